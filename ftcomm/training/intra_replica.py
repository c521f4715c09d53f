"""Exchanges a few bytes between the ranks of one replica: all send theirs to rank 0, which answers with what follows
from all of them, in as many bytes.

It uses the authenticated connections that the ranks can make to each other anyway. They live and die together: if one
is gone, so is the replica, and an error raised here ends this rank, too. Another rank may wait at a boundary, or in an
op, until the job has removed others one after the other, so a wait begins anew with each view.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.control import handshake
from ftcomm.control.framing import Framing, receive_while
from ftcomm.control.running_time import Patience
from ftcomm.control.sealed import Connection
from ftcomm.errors import CollectiveTimeout, TransportError
from ftcomm.recorder.layout import PhaseKind
from ftcomm.recorder.waits import LOOK, PhaseWait

if TYPE_CHECKING:
    from ftcomm.group import Group

RETRY = 0.05  # seconds
_HEAD = 32  # bytes of a frame beside its row, at most


class Row(msgspec.Struct, frozen=True, array_like=True):
    """The row of a rank in exchange `number`, or what follows from those of all. Exchange 0 says that rank 0 serves."""

    number: int
    row: bytes


_FRAMES: Framing[Row] = Framing(Row, _HEAD)


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
        self._looks: PhaseWait
        if group.shard == 0:
            group.internals.serve("inside", self._serve)

    def exchange(self, row: bytes, fold: Callable[[list[bytes]], bytes]) -> bytes:
        """Returns what `fold` makes of the rows of all ranks, in order, all as long as `row`, as is the result. Rank 0
        alone calls it. Blocks until all ranks have called this. Raises `TransportError` if one is gone or sends
        something else, `CollectiveTimeout` if one does not come."""
        self._number += 1
        patience = self._wait()
        try:
            with PhaseWait(PhaseKind.MEET, number=self._number) as self._looks:
                return self._collect(row, fold, patience) if self._group.shard == 0 else self._ask(row, patience)
        except TimeoutError:
            raise CollectiveTimeout(
                f"{self._who()}: the other ranks of this replica did not come within {self._patience:g} s; "
                "all ranks of a replica must make the same calls, and do the same steps."
            ) from None
        except OSError as error:
            raise TransportError(f"{self._who()}: another rank of this replica is gone: {error}") from None

    def close(self) -> None:
        with self._came:
            for sock in self._sockets.values():
                sock.close()
            self._sockets.clear()

    def _wait(self) -> Patience:
        router = self._group.internals.router
        return Patience(self._patience, time.monotonic, lambda: router.changes, lambda: router.excused)

    def _collect(self, row: bytes, fold: Callable[[list[bytes]], bytes], patience: Patience) -> bytes:
        with self._came:
            while absent := [rank for rank in range(1, self._ranks) if rank not in self._sockets]:
                if not self._goes_on(patience, absent):
                    raise TimeoutError
                self._came.wait(LOOK)
        others = ((self._sockets[rank], rank) for rank in range(1, self._ranks))
        rows = [row, *(self._receive(sock, rank, len(row), self._number, patience) for sock, rank in others)]
        answer = fold(rows)
        for sock in self._sockets.values():
            self._send(sock, answer)
        return answer

    def _ask(self, row: bytes, patience: Patience) -> bytes:
        if not self._sockets:
            self._sockets[0] = self._open(patience)
        self._send(self._sockets[0], row)
        return self._receive(self._sockets[0], 0, len(row), self._number, patience)

    def _open(self, patience: Patience) -> Connection:
        """Connect to rank 0, which closes the connection as long as its script has not come to the loop."""
        while True:
            sock = None
            try:
                sock = self._dial()
                self._receive(sock, 0, 0, 0, patience)
                return sock
            except OSError:
                if sock is not None:
                    sock.close()
                if not self._goes_on(patience, [0]):
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
            sock.sendall(_FRAMES.frame(Row(0, b"")))
        with self._came:
            earlier = self._sockets.pop(shard, None)
            if earlier is not None:
                earlier.close()
            self._sockets[shard] = sock
            self._came.notify_all()

    def _send(self, sock: Connection, data: bytes) -> None:
        sock.settimeout(self._patience)
        sock.sendall(_FRAMES.frame(Row(self._number, data)))

    def _goes_on(self, patience: Patience, absent: Sequence[int]) -> bool:
        """Whether to wait on for the ranks `absent` of this replica. It is recorded that this rank does."""
        left = patience.left()
        self._looks.look([(self._group.replica, rank) for rank in absent], left)
        return left > 0

    def _receive(self, sock: Connection, rank: int, expected: int, number: int, patience: Patience) -> bytes:
        try:
            said = _FRAMES.read(receive_while(sock, lambda: self._goes_on(patience, [rank]), LOOK), expected + _HEAD)
        except msgspec.DecodeError as error:
            raise ConnectionError(f"{error}; all ranks must run the same script") from None
        if said.number != number:
            raise ConnectionError(f"it is at exchange {said.number}, this rank at {number}")
        if len(said.row) != expected:
            nbytes = len(said.row)
            raise ConnectionError(f"it sends {nbytes} bytes, expected {expected}; all ranks must run the same script")
        return said.row

    def _who(self) -> str:
        return f"replica {self._group.replica} rank {self._group.shard}"
