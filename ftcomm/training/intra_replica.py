"""Exchanges a few bytes between the ranks of one replica, in a tree (`rank_tree.py`).

    up      each rank sends one row to its parent: what follows from its own and from those of its children
    down    shard 0 has what follows from all, and it goes back the same way, in as many bytes

So a rank sends and receives a row for each of its connections, which are some 60 at most, and all ranks together move
two rows for each rank.

It uses the authenticated connections that the ranks can make to each other anyway. They live and die together: if one
is gone, so is the replica, and an error raised here ends this rank, too. It closes its connections at once, so that the
ranks above and below it hear of that, whatever they wait for. Another rank may wait at a boundary, or in an op, until
the job has removed others one after the other, so a wait begins anew with each view.
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
from ftcomm.control.rank_name import rank_name
from ftcomm.control.running_time import RunningTimer
from ftcomm.control.sealed import Connection
from ftcomm.control.timeouts import AWAITED_EVERY
from ftcomm.errors import CollectiveTimeout, TransportError
from ftcomm.groups.group_internals import INTRA_REPLICA
from ftcomm.recorder.layout import PhaseKind
from ftcomm.recorder.waits import PhaseWait
from ftcomm.training.rank_tree import place

if TYPE_CHECKING:
    from ftcomm.groups.group import Group

RETRY = 0.05  # seconds
_HEAD = 32  # bytes of a frame beside its row, at most


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Says what follows from some rows in exchange `number`, or from all. Exchange 0 says that a parent serves."""

    number: int
    row: bytes


_FRAMES: Framing[Row] = Framing(Row, _HEAD)


class IntraReplicaExchange:
    """The exchanges of one rank. Not thread-safe. Every rank of the replica makes the same calls in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parent, self._children = place(group.shard, group.shards)
        self._timeout = group.settings.timeouts.give_up
        group.internals.intra_replica_exchanges += 1
        self._which = group.internals.intra_replica_exchanges  # the ranks make them in the same order
        self._number = 0
        self._came = threading.Condition()
        self._sockets: dict[int, Connection] = {}
        self._looks: PhaseWait
        if self._children:
            group.internals.serve(INTRA_REPLICA, self._serve)

    def exchange(self, row: bytes, fold: Callable[[list[bytes]], bytes]) -> bytes:
        """Returns what `fold` makes of the rows of all ranks. It makes one of several, which are in the order of the
        ranks and all as long as `row`, as is the result, and is associative: some rows may have come out of it. Blocks
        until all ranks have called this. Raises `TransportError` if one is gone or sends something else,
        `CollectiveTimeout` if one does not come."""
        self._number += 1
        timer = self._timer()
        try:
            with PhaseWait(PhaseKind.MEET, number=self._number) as self._looks:
                below = self._below(timer)
                rows = [row, *(self._receive(sock, rank, len(row), timer) for rank, sock in below)]
                answer = fold(rows) if below else row
                if self._parent is not None:
                    above = self._above(self._parent, timer)
                    self._send(above, answer)
                    answer = self._receive(above, self._parent, len(row), timer)
                for _, sock in below:
                    self._send(sock, answer)
                return answer
        except TimeoutError:
            self.close()
            raise CollectiveTimeout(
                f"{self._who()}: the other ranks of this replica did not come within {self._timeout:g} s; "
                "all ranks of a replica must make the same calls, and do the same steps."
            ) from None
        except OSError as error:
            self.close()
            raise TransportError(f"{self._who()}: another rank of this replica is gone: {error}") from None

    def close(self) -> None:
        with self._came:
            for sock in self._sockets.values():
                sock.close()
            self._sockets.clear()

    def _timer(self) -> RunningTimer:
        router = self._group.internals.router
        return RunningTimer(self._timeout, time.monotonic, lambda: router.changes, lambda: router.away)

    def _below(self, timer: RunningTimer) -> list[tuple[int, Connection]]:
        """Returns the children with their connections, in order. Blocks until all have come."""
        with self._came:
            while absent := [rank for rank in self._children if rank not in self._sockets]:
                if not self._goes_on(timer, absent):
                    raise TimeoutError
                self._came.wait(AWAITED_EVERY)
            return [(rank, self._sockets[rank]) for rank in self._children]

    def _above(self, parent: int, timer: RunningTimer) -> Connection:
        """Returns the connection to the parent."""
        sock = self._sockets.get(parent)
        if sock is None:
            sock = self._open(parent, timer)
            with self._came:
                self._sockets[parent] = sock
        return sock

    def _open(self, parent: int, timer: RunningTimer) -> Connection:
        """Connect to the parent, which closes the connection as long as its script has not come to the loop."""
        while True:
            sock = None
            try:
                sock = self._dial(parent)
                self._receive(sock, parent, 0, timer, 0)
                return sock
            except OSError:
                if sock is not None:
                    sock.close()
                if not self._goes_on(timer, [parent]):
                    raise
            time.sleep(RETRY)

    def _dial(self, parent: int) -> Connection:
        group = self._group
        fields: handshake.Fields = {"shard": group.shard, "which": self._which}
        return group.internals.dial_rank(group.replica, parent, INTRA_REPLICA, fields, self._timeout)

    def _serve(self, sock: Connection, fields: Mapping[str, Any]) -> None:
        shard = handshake.number(fields, "shard", least=self._children[0], most=self._children[-1])
        if shard not in self._children:
            raise handshake.BadFields(f"shard {shard} is no child of shard {self._group.shard}")
        if handshake.number(fields, "which") != self._which:  # the caller is in its next loop already, and calls again
            sock.close()
            return
        sock.settimeout(self._timeout)
        with contextlib.suppress(OSError):
            sock.sendall(_FRAMES.frame(Row(0, b"")))
        with self._came:
            earlier = self._sockets.pop(shard, None)
            if earlier is not None:
                earlier.close()
            self._sockets[shard] = sock
            self._came.notify_all()

    def _send(self, sock: Connection, data: bytes) -> None:
        sock.settimeout(self._timeout)
        sock.sendall(_FRAMES.frame(Row(self._number, data)))

    def _goes_on(self, timer: RunningTimer, absent: Sequence[int]) -> bool:
        """Whether to wait on for the ranks `absent` of this replica. It is recorded that this rank does."""
        left = timer.left()
        self._looks.look([(self._group.replica, rank) for rank in absent], left)
        return left > 0

    def _receive(
        self, sock: Connection, rank: int, expected: int, timer: RunningTimer, number: int | None = None
    ) -> bytes:
        """Returns a row of `expected` bytes in exchange `number`, or else in this one."""
        number = self._number if number is None else number
        try:
            data = receive_while(sock, lambda: self._goes_on(timer, [rank]), AWAITED_EVERY)
            said = _FRAMES.read(data, expected + _HEAD)
        except msgspec.DecodeError as error:
            raise ConnectionError(f"{error}; all ranks must run the same script") from None
        if said.number != number:
            raise ConnectionError(f"it is at exchange {said.number}, this rank at {number}")
        if len(said.row) != expected:
            nbytes = len(said.row)
            raise ConnectionError(f"it sends {nbytes} bytes, expected {expected}; all ranks must run the same script")
        return said.row

    def _who(self) -> str:
        return rank_name(self._group.replica, self._group.shard)
