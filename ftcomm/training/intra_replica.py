"""Exchanges a few bytes between the ranks of one replica: all send theirs to rank 0, which answers with everybody's.

It uses the authenticated connections that the ranks can make to each other anyway. They live and die together: if one
is gone, so is the replica, and an error raised here ends this rank, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.control import handshake
from ftcomm.control.framing import Framing
from ftcomm.control.sealed import Connection
from ftcomm.errors import CollectiveTimeout, TransportError

if TYPE_CHECKING:
    from ftcomm.group import Group

RETRY = 0.05  # seconds
_HEAD = 32  # bytes of a frame beside its rows, at most


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """The row of a rank in exchange `number`, or those of all. Exchange 0 says that rank 0 serves."""

    number: int
    rows: bytes


_FRAMES: Framing[Rows] = Framing(Rows, _HEAD)


class IntraReplicaExchange:
    """The exchanges of one rank. Not thread-safe. Every rank of the replica makes the same calls in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._ranks = group.shards
        self._patience = group.settings.timeouts.give_up
        group.internals.intra_replica_exchanges += 1
        self._which = group.internals.intra_replica_exchanges  # the ranks make them in the same order
        self._number = 0
        self._came = threading.Condition()
        self._sockets: dict[int, Connection] = {}
        if group.shard == 0:
            group.internals.serve("inside", self._serve)

    def exchange(self, row: bytes) -> list[bytes]:
        """Returns the row of each rank, in order, all as long as `row`. Blocks until all ranks have called it. Raises
        `TransportError` if one is gone or sends something else, `CollectiveTimeout` if one does not come."""
        self._number += 1
        try:
            rows = self._collect(row) if self._group.shard == 0 else self._ask(row)
        except TimeoutError:
            raise CollectiveTimeout(
                f"{self._who()}: the other ranks of this replica did not come within {self._patience:g} s; "
                "all ranks of a replica must make the same calls, and do the same steps."
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
        rows = [row, *(self._receive(self._sockets[rank], len(row), self._number) for rank in range(1, self._ranks))]
        answer = b"".join(rows)
        for sock in self._sockets.values():
            self._send(sock, answer)
        return rows

    def _ask(self, row: bytes) -> list[bytes]:
        if not self._sockets:
            self._sockets[0] = self._open()
        self._send(self._sockets[0], row)
        answer = self._receive(self._sockets[0], self._ranks * len(row), self._number)
        return [answer[at : at + len(row)] for at in range(0, len(answer), len(row))]

    def _open(self) -> Connection:
        """Connect to rank 0, which closes the connection as long as its script has not come to the loop."""
        deadline = time.monotonic() + self._patience
        while True:
            sock = None
            try:
                sock = self._dial()
                sock.settimeout(self._patience)
                self._receive(sock, 0, 0)
                return sock
            except OSError:
                if sock is not None:
                    sock.close()
                if time.monotonic() > deadline:
                    raise
            time.sleep(RETRY)

    def _dial(self) -> Connection:
        group = self._group
        fields: handshake.Fields = {"shard": group.shard, "which": self._which}
        return group.internals.dial_rank(group.replica, 0, "inside", fields, self._patience)

    def _serve(self, sock: Connection, fields: Mapping[str, Any]) -> None:
        shard = handshake.number(fields, "shard", least=1, most=self._ranks - 1)
        if handshake.number(fields, "which") != self._which:  # the caller is in its next loop already, and calls again
            sock.close()
            return
        sock.settimeout(self._patience)
        with contextlib.suppress(OSError):
            sock.sendall(_FRAMES.frame(Rows(0, b"")))
        with self._came:
            earlier = self._sockets.pop(shard, None)
            if earlier is not None:
                earlier.close()
            self._sockets[shard] = sock
            self._came.notify_all()

    def _send(self, sock: Connection, data: bytes) -> None:
        sock.sendall(_FRAMES.frame(Rows(self._number, data)))

    def _receive(self, sock: Connection, expected: int, number: int) -> bytes:
        try:
            said = _FRAMES.read(sock.recv, expected + _HEAD)
        except msgspec.DecodeError as error:
            raise ConnectionError(f"{error}; all ranks must run the same script") from None
        if said.number != number:
            raise ConnectionError(f"it is at exchange {said.number}, this rank at {number}")
        if len(said.rows) != expected:
            nbytes = len(said.rows)
            raise ConnectionError(f"it sends {nbytes} bytes, expected {expected}; all ranks must run the same script")
        return said.rows

    def _who(self) -> str:
        return f"replica {self._group.replica} rank {self._group.shard}"
