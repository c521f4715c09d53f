"""The ranks of one replica tell each other a few bytes: all send theirs to rank 0, which answers with everybody's.

Over the authenticated connections that the ranks can make to each other anyway. They live and die together: if one is
gone, so is the replica, and what is raised here ends this rank, too.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ftcomm.control import wire
from ftcomm.control.sealed import Connection
from ftcomm.errors import CollectiveTimeout, TransportError
from ftcomm.training.catchup_protocol import read_into

if TYPE_CHECKING:
    from ftcomm.group import Group

_HEAD = struct.Struct(">QI")  # number of the exchange, bytes of a row
_HELLO = b"\x01"  # that rank 0 serves; without it the connection is made again
RETRY = 0.05  # seconds


class IntraReplicaExchange:
    """Not thread-safe. Every rank of the replica makes the same calls in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ranks = group.shards
        self._patience = group.settings.timeouts.give_up
        group._intra_replica_exchanges += 1
        self._which = group._intra_replica_exchanges  # the ranks make them in the same order
        self._number = 0
        self._came = threading.Condition()
        self._sockets: dict[int, Connection] = {}
        if group.shard == 0:
            group._serve("inside", self._serve)

    def exchange(self, row: bytes) -> list[bytes]:
        """The row of each rank, in order, all as long as `row`. Blocks until all ranks have called it. Raises
        `TransportError` if one is gone or says something else, `CollectiveTimeout` if one does not come."""
        self._number += 1
        try:
            rows = self._collect(row) if self._group.shard == 0 else self._ask(row)
        except TimeoutError:
            raise CollectiveTimeout(
                f"{self._who()}: the other ranks of this replica did not come to the end of the step within "
                f"{self._patience:g} s; every rank must call the same steps."
            ) from None
        except OSError as error:
            raise TransportError(f"{self._who()}: another rank of this replica is gone: {error}") from None
        return rows

    def close(self) -> None:
        with self._came:
            for sock in self._sockets.values():
                sock.close()
            self._sockets.clear()

    def _collect(self, row: bytes) -> list[bytes]:
        with self._came:
            if not self._came.wait_for(lambda: len(self._sockets) == self._ranks - 1, self._patience):
                raise TimeoutError
        rows = [row, *(self._receive(self._sockets[rank], len(row)) for rank in range(1, self._ranks))]
        answer = b"".join(rows)
        for sock in self._sockets.values():
            self._send(sock, answer)
        return rows

    def _ask(self, row: bytes) -> list[bytes]:
        if not self._sockets:
            self._sockets[0] = self._open()
        self._send(self._sockets[0], row)
        answer = self._receive(self._sockets[0], self._ranks * len(row))
        return [answer[at : at + len(row)] for at in range(0, len(answer), len(row))]

    def _open(self) -> Connection:
        """Rank 0 closes the connection as long as its script has not come to the loop."""
        deadline = time.monotonic() + self._patience
        while True:
            sock = None
            try:
                sock = self._dial()
                sock.settimeout(self._patience)
                read_into(sock, memoryview(bytearray(1)))
                return sock
            except OSError:
                if sock is not None:
                    sock.close()
                if time.monotonic() > deadline:
                    raise
            time.sleep(RETRY)

    def _dial(self) -> Connection:
        group = self._group
        member = group.view.member(group.replica)
        if member is None:
            raise ConnectionError("this replica is no member any more")
        return group._dial_address(member.ranks[0], "inside", {"rank": group.shard, "which": self._which})

    def _serve(self, sock: Connection, fields: Mapping[str, Any]) -> None:
        rank = wire.number(fields, "rank", least=1, most=self._ranks - 1)
        if wire.number(fields, "which") != self._which:  # it is in its next loop already, and calls again
            sock.close()
            return
        sock.settimeout(self._patience)
        with contextlib.suppress(OSError):
            sock.sendall(_HELLO)
        with self._came:
            earlier = self._sockets.pop(rank, None)
            if earlier is not None:
                earlier.close()
            self._sockets[rank] = sock
            self._came.notify_all()

    def _send(self, sock: Connection, data: bytes) -> None:
        sock.sendall(_HEAD.pack(self._number, len(data)) + data)

    def _receive(self, sock: Connection, expected: int) -> bytes:
        head = bytearray(_HEAD.size)
        read_into(sock, memoryview(head))
        number, size = _HEAD.unpack(head)
        if number != self._number:
            raise ConnectionError(f"it is at exchange {number}, this rank at {self._number}")
        if size != expected:  # and no memory is taken for what is only said
            raise ConnectionError(f"it sends {size} bytes, expected {expected}; all ranks must run the same script")
        data = bytearray(size)
        read_into(sock, memoryview(data))
        return bytes(data)

    def _who(self) -> str:
        return f"replica {self._group.replica} rank {self._group.shard}"
