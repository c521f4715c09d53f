"""The copy-engine path: all-gather and point-to-point copies that take no multiprocessor, chosen by `copy_engine=True`.

The idea is FreeScale's: what only moves bytes can be left to the GPU's copy engines, and the multiprocessors to the
model. Copy engines cannot wait for a flag, so this rank's host does, and queues one copy after the other:

    sender    wait until the readers have taken what was in the slot, copy into it, wait for the copy, POSTED + 1
    reader    wait for POSTED, copy from the slot to where it belongs, wait for the copy, TAKEN + 1

Out of a slot, and into one, may be memory of this GPU or pinned memory of the host alike.

Every rank owns channels, each with a POSTED word, a TAKEN word at every reader, and SLOTS slots in the owner's staging:
channel ALL is read by all others, channel 1 + i by member i alone. Task k of a channel has slot k % SLOTS.

    word              written by   polled by        before
    POSTED[c]         owner        readers of c     they read the slot
    TAKEN[o][ALL|1]   reader       owner o          it fills the slot again

All are `epoch << COUNTER | counter`, have one writer and only grow, as in the all-reduce: what a member of an earlier
epoch wrote satisfies no wait. Calls are matched by their order, on each channel. A call that does not return OK leaves
its destinations in parts; the counters of its channels are then only good for another epoch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ftcomm.kernels.device.words import ABORTED, MOST_MEMBERS, OK, TIMED_OUT
from ftcomm.kernels.epochs import COUNTER

ALL = 0
CHANNELS = 1 + MOST_MEMBERS
SLOTS = 2
AHEAD = SLOTS - 1
SLOTS_IN_ALL = CHANNELS * SLOTS
CHUNK = 1 << 20
STAGING = SLOTS_IN_ALL * CHUNK

# Indices of 64-bit words from where the words of this path begin, in a segment or beside it.
POSTED = 0
TAKEN = CHANNELS
WORDS = TAKEN + 2 * MOST_MEMBERS


class Mover(Protocol):
    """Queues copies between addresses, in order."""

    def copy(self, to: int, source: int, nbytes: int) -> None: ...

    def wait(self) -> None:
        """Block until all that was queued is done, for all to see. The copies bound how long that takes."""


class HostMover:
    """The same on host memory."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def wait(self) -> None:
        """Block until `copy` is done."""


class PeerMemory(NamedTuple):
    """A member's memory as this process sees it."""

    words: memoryview  # ("Q") WORDS of them; writable if it is this rank's own
    staging: int  # address of STAGING bytes


class CopySend(NamedTuple):
    channel: int
    readers: tuple[int, ...]
    source: int  # address
    nbytes: int


class CopyReceive(NamedTuple):
    owner: int
    channel: int
    to: int  # address
    nbytes: int


class Piece(NamedTuple):
    """A slot's worth of transfer number `transfer` of a call; the `step`-th of it."""

    transfer: int
    step: int
    start: int
    nbytes: int


class Round(NamedTuple):
    puts: tuple[Piece, ...]
    gets: tuple[Piece, ...]


def rounds(sends: Sequence[int], receives: Sequence[int], chunk: int, ahead: int) -> Iterator[Round]:
    """Yields the order in which a member puts and gets the pieces of transfers of so many bytes.

    It puts piece k + ahead before it gets piece k. With ahead < SLOTS nobody can stand still: whoever is in the
    earliest round finds the slot it puts into free, since its readers got what was there in a round before, and what it
    gets posted, since all have put that in a round before. With ahead = SLOTS each would wait for the other to get.
    """

    def pieces(sizes: Sequence[int], step: int) -> tuple[Piece, ...]:
        return tuple(
            Piece(i, step, step * chunk, min(chunk, size - step * chunk))
            for i, size in enumerate(sizes)
            if 0 <= step * chunk < size
        )

    steps = -(-max([0, *sends, *receives]) // chunk)
    for step in range(-ahead, steps):
        yield Round(pieces(sends, step + ahead), pieces(receives, step))


@dataclasses.dataclass
class Copies:
    """The copies of one rank in one epoch. `me` and members are indices into `ports`.

    Not thread-safe. `stop` is asked while a call waits; True ends it with ABORTED.
    """

    me: int
    ports: Sequence[PeerMemory]
    epoch: int
    mover: Mover
    stop: Callable[[], bool]
    chunk: int = CHUNK  # bytes in a slot

    def __post_init__(self) -> None:
        self._posted = [0] * CHANNELS  # tasks of my channels
        self._taken = [[0, 0] for _ in self.ports]  # of the channels ALL and mine of each member

    def allgather(self, source: int, to: Sequence[int], sizes: Sequence[int], seconds: float) -> int:
        """Member i has `sizes[i]` bytes, at address `source` there, which come to address `to[i]` on all members.

        All members call it. Returns OK, ABORTED or TIMED_OUT; blocks. My own part must not overlap `to[me]` in part.
        """
        others = [i for i in self._after_me() if sizes[i]]
        sends = [CopySend(ALL, tuple(self._after_me()), source, sizes[self.me])]
        if source != to[self.me]:
            self.mover.copy(to[self.me], source, sizes[self.me])
        return self._run(sends, [CopyReceive(i, ALL, to[i], sizes[i]) for i in others], seconds)

    def send(self, member: int, source: int, nbytes: int, seconds: float) -> int:
        """Send `nbytes` at address `source` to `member`, which calls `receive`. Blocks until it has them."""
        return self._run([CopySend(1 + member, (member,), source, nbytes)], [], seconds)

    def receive(self, member: int, to: int, nbytes: int, seconds: float) -> int:
        """Receive `nbytes` at address `to` from `member`, which calls `send` with as many. Blocks."""
        return self._run([], [CopyReceive(member, 1 + self.me, to, nbytes)], seconds)

    def _after_me(self) -> list[int]:
        """The others, each member beginning with the next, so that not all read from one at a time."""
        n = len(self.ports)
        return [(self.me + i) % n for i in range(1, n)]

    def _run(self, sends: Sequence[CopySend], receives: Sequence[CopyReceive], seconds: float) -> int:
        deadline = time.monotonic() + seconds
        own, mover = self.ports[self.me], self.mover
        for puts, gets in rounds([s.nbytes for s in sends], [r.nbytes for r in receives], self.chunk, AHEAD):
            if self.stop():
                return ABORTED
            for put in puts:
                send = sends[put.transfer]
                task = self._posted[send.channel] + put.step
                for reader in send.readers:
                    status = self._await(
                        reader, TAKEN + 2 * self.me + (send.channel != ALL), task + 1 - SLOTS, deadline
                    )
                    if status != OK:
                        return status
                mover.copy(own.staging + self._slot(send.channel, task), send.source + put.start, put.nbytes)
            mover.wait()
            for put in puts:
                channel = sends[put.transfer].channel
                self._raise(POSTED + channel, self._posted[channel] + put.step + 1)
            for get in gets:
                receive = receives[get.transfer]
                task = self._taken[receive.owner][receive.channel != ALL] + get.step
                status = self._await(receive.owner, POSTED + receive.channel, task + 1, deadline)
                if status != OK:
                    return status
                source = self.ports[receive.owner].staging + self._slot(receive.channel, task)
                mover.copy(receive.to + get.start, source, get.nbytes)
            mover.wait()
            for get in gets:
                owner, channel, *_ = receives[get.transfer]
                self._raise(TAKEN + 2 * owner + (channel != ALL), self._taken[owner][channel != ALL] + get.step + 1)
        for send in sends:
            self._posted[send.channel] += -(-send.nbytes // self.chunk)
        for receive in receives:
            self._taken[receive.owner][receive.channel != ALL] += -(-receive.nbytes // self.chunk)
        for send in sends:  # the source may be changed, and a slot filled, when all have what they need
            for reader in send.readers:
                word = TAKEN + 2 * self.me + (send.channel != ALL)
                status = self._await(reader, word, self._posted[send.channel], deadline)
                if status != OK:
                    return status
        return OK

    def _raise(self, word: int, counter: int) -> None:
        self.ports[self.me].words[word] = self.epoch << COUNTER | counter

    def _await(self, member: int, word: int, counter: int, deadline: float) -> int:
        """Block until that word of `member` is at `counter` in this epoch; returns at once if there is nothing to wait
        for."""
        words, low, high = self.ports[member].words, self.epoch << COUNTER | max(0, counter), self.epoch + 1 << COUNTER
        pause = 0.0
        while counter > 0 and not low <= words[word] < high:
            if self.stop():
                return ABORTED
            if time.monotonic() > deadline:
                return TIMED_OUT
            time.sleep(pause)  # hands the core, and the interpreter lock, to others; longer when nothing comes
            pause = min(1e-3, pause + 10e-6)
        return OK

    def _slot(self, channel: int, task: int) -> int:
        """Offset in the owner's staging."""
        return (channel * SLOTS + task % SLOTS) * self.chunk
