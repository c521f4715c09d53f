"""The stream of tasks of one epoch, and the memory operations that it is made of.

All ops of an epoch make one stream of tasks, which has the same task at the same index on every member. A task goes
through three stages at every member, in order; the counters `posted`, `arrived`, `taken` say how far each has come:

    post     copy my input of the chunk into my POSTED staging (or my FINAL chunk, if others are to copy it)
    arrive   all members have posted: on the first chunk of an op compare the calls; two-shot: reduce my shard into
             my REDUCED staging
    take     one-shot: reduce all inputs into the caller's buffer. Two-shot: when all have reduced, copy the shards
             there

That is a chunk of an all-reduce. In a ring it goes through levels between `arrive` and `take`. Other collectives move
batches of parts, of which a member posts those that it gives and takes those that are for it, see
`ftcomm.collective.script`.

    word      written by      value             polled by   before
    POSTED    owner           tasks posted      all others  they read its POSTED staging
    REDUCED   owner           tasks arrived     all others  they read its REDUCED staging (two-shot)
    TAKEN     owner           tasks taken       all others  they return an op: all must hold all of it FINAL;
                                                            between hosts, they post what uses the slot again
    level(l)  owner           tasks that have   the right   it reads the shard of that level, see
                              reached level l   neighbour   `ftcomm.collective.ring`

Words hold `epoch << 32 | counter` and only grow. Task `index` uses slot `index % SLOTS` of the staging.

Fencing. A member enters an epoch with a new stream, whose first act is to raise its words to the epoch, before any
staging is written. A member that was left behind in the old epoch may still read that staging while it changes, and
mark a chunk FINAL that is none. But it sees the data before it looks, once more, at the words of all members, to return
the op; then it sees that a word has left its epoch, and never returns the op. Those who go on have all stopped reading
before any of them enters the new epoch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ftcomm.collective.carry import Carrier
from ftcomm.collective.divergence import Alarm, Divergence
from ftcomm.collective.operation import Operation, mismatch
from ftcomm.collective.plan import GroupView, around, shards, two_shot
from ftcomm.collective.resume import REDUCE, Task
from ftcomm.collective.ring import Ring, RingLane, may_ring
from ftcomm.collective.script import AROUND, Batch
from ftcomm.collective.scripted import Scripted
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.kernels.wait import Waiter, wake
from ftcomm.transport.lines import Lines
from ftcomm.transport.segment import (
    ASLEEP,
    DETAIL,
    FINGERPRINT,
    POSTED,
    PUBLISHED,
    REDUCED,
    SLOTS,
    TAKEN,
    Memory,
    Peer,
    Segment,
    descriptor,
    level,
    reached_at,
)
from ftcomm.transport.tcp import Reader

# Tasks posted and not taken. 64 MB, two members: 1 (nothing overlaps) 5.65 ms, 2 5.1, 3 5.4 (spills the cache); four
# members on two cores: 1 19.2 ms, 2 18.1. Half of the slots is also what makes a slot free when its turn comes, without
# looking: I post task p after I have taken p - AHEAD, so all had posted that, so all had taken p - 2 * AHEAD, which had
# the same slot.
AHEAD = SLOTS // 2

_TO_ALL = frozenset((POSTED, REDUCED, TAKEN))  # words that all others look at, not the right neighbour alone

_LANES = 64  # sizes of chunks whose views are kept, per slot

Array = np.ndarray[Any, Any]


class _Lane:
    """The staging of all members for chunks of one dtype and size in one slot, as ready-made views.

    Making them costs 0.3 us each, and a training repeats its sizes.
    """

    def __init__(self, stream: Stream, dtype: str, count: int, slot: int) -> None:
        carrier = HOST_DTYPES[dtype].carrier
        view = stream.view
        memories = stream.memories
        posted = {m: memories[m].carve(POSTED, slot, 0, count, carrier) for m in view.members}
        self.mine = posted[view.me]
        self.posted = posted
        self.sources = [operand(dtype, posted[m]) for m in view.contributors]
        self.shards = dict(zip(view.members, shards(count, carrier.itemsize, len(view.members)), strict=True))
        start, stop = self.shards[view.me]
        self.shard_sources = [operand(dtype, posted[m][start:stop]) for m in view.contributors]
        self.shard_out = operand(dtype, memories[view.me].carve(REDUCED, slot, start, stop - start, carrier))
        self.around = None if stream._around is None else RingLane(stream._around, dtype, count, slot)
        self.reduced = [
            (slice(a, b), memories[m].carve(REDUCED, slot, a, b - a, carrier))
            for m, (a, b) in self.shards.items()
            if a < b
        ]


class _Slot:
    """A task on its way. `op` and `here` end when it is taken: the caller's arrays are not ours to keep."""

    __slots__ = ("first", "here", "lane", "level", "op", "straight", "task", "two_shot")

    op: Operation
    task: Task | Batch
    first: bool  # of its op in this epoch
    two_shot: bool
    level: int  # of the ring, that it has reached; -1: it does not go around
    straight: bool  # who reduces its shards has them from `here`, not from the staging
    here: Array  # the caller's buffer of this chunk
    lane: _Lane


class Interrupted(Exception):
    """A freeze or the end, while the stream waited in the middle of a publication. Every chunk is INPUT or FINAL."""


class Stream:
    """One epoch of the exchange. Used by one thread at a time; `waiter` is where that thread waits.

    `on_lost(replica, epoch, reason)` hears of connections that broke. With `on_divergence` the results of all members
    are compared; it hears of those that differ, and raises `Interrupted` to give up. `lines` are the connections that
    this thread is to serve; without them nothing is ever left to be sent.
    """

    def __init__(
        self,
        view: GroupView,
        segment: Segment,
        peers: Mapping[int, Peer],
        waiter: Waiter,
        reducer: Reducer,
        on_lost: Callable[[int, int, str], None],
        on_divergence: Callable[[Divergence], None] | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.view = view
        self.memories: dict[int, Memory] = {**peers, view.me: segment}
        self.posted = self.arrived = self.taken = 0
        self.unposted: deque[Operation] = deque()  # ops with tasks to post; all threads may append
        self._low = view.epoch << 32
        self._high = (view.epoch + 1) << 32
        self._segment = segment
        self._own = segment.words
        self._lines = lines
        self._on_lost = on_lost
        self._readers: list[Reader] = []  # through TCP; those that share memory need no word from us
        self._peers = [peers[m] for m in view.members if m != view.me]
        self._words = [peer.words for peer in self._peers]
        self._tokens = {word: _token(view.me, word) for word in PUBLISHED}
        self._waiter = waiter
        self._reducer = reducer
        contributors = view.contributors
        self._contributors = contributors
        # The inputs of a single contributor are the result: everybody copies them.
        self._sole = contributors[0] if len(contributors) == 1 else REDUCE
        self._contributes = view.me in view.contributing
        self._detail = AROUND if view.ring else 0  # of all-reduces
        # Two members reduce from the caller's own buffer and the staging of the other. With more, the first step of
        # the sum would overwrite an input that a later one needs.
        self._pair = len(view.members) == 2 and len(contributors) == 2
        self._mine_first = contributors[:1] == (view.me,)
        self._place = contributors.index(view.me) if self._contributes else -1
        self._lanes: list[dict[tuple[str, int], _Lane]] = [{} for _ in range(SLOTS)]
        self._ring = [_Slot() for _ in range(SLOTS)]
        self._carrier = Carrier(view, self.memories, reducer)
        self._around = Ring(view, self.memories, reducer) if len(view.ring) > 1 else None
        self._left = [peer for peer in self._peers if self._around is not None and peer.replica == self._around.left]
        self._alarm: Alarm | None = None
        if on_divergence is not None:
            self._alarm = Alarm(view, self.memories, lambda count: self._all(TAKEN, count), on_divergence)
        # Whoever reads through a connection has a shard of the caller's input from where it lies: it is final, and
        # overwritten, only when all have reduced, and so have what they need of it.
        self._far = not view.one_host
        self._last = True  # the task that was taken last was the last one of its op
        self._straight = lines is not None and bool(lines.peers)
        for word in PUBLISHED if self._around is not None else (POSTED, REDUCED, TAKEN):
            self._publish(word, 0)

    # -- what the driver does --------------------------------------------------------------------------------------

    def welcome(self, reader: Reader) -> None:
        """A TCP reader has attached; send it what it has missed.

        It has taken nothing yet, so no slot was used twice: the staging still holds every task from the first on.
        """
        if reader.replica not in self.memories or reader.replica == self.view.me:
            reader.close()
            return
        for earlier in [known for known in self._readers if known.replica == reader.replica]:
            self._readers.remove(earlier)
            earlier.close()
        self._readers.append(reader)
        for index in range(self.posted):
            self._send(reader, POSTED, index + 1)
        for index in range(self.arrived):
            if self._ring[index].two_shot:
                self._send(reader, REDUCED, index + 1)
            for reached in range(1, self._ring[index].level + 1):
                self._send(reader, level(reached), index + 1)
        for index in range(self.taken):
            self._send(reader, TAKEN, index + 1)

    def close(self) -> None:
        """The epoch is over. Nothing of it may hold the memory of members that are gone: the alarm and the stream know
        each other, and what frees such pairs runs so rarely that 4 MB and a descriptor of every loss would be kept."""
        for reader in self._readers:
            with contextlib.suppress(OSError):
                reader.flush()  # who fails here has said so in a word that may be left
            reader.close()
        self._readers.clear()
        self._ring.clear()
        self.unposted.clear()
        self._alarm = None

    def advance(self) -> bool:
        """Move what can move without waiting, at most one task per stage; False if nothing could."""
        moved = False
        ahead = self.posted - self.taken
        if self.unposted and (self._free(ahead) if self._far else ahead < AHEAD) and self._may_post():
            self._post()
            moved = True
        if self.arrived < self.posted and self._all(POSTED, self.arrived + 1):
            self._arrive()
            moved = True
        if self._around is not None and self.taken < self.arrived and self._pass_on(self._around):
            moved = True
        if self.taken < self.arrived and self._may_take():
            self._take()
            moved = True
        return moved

    def stable(self, op: Operation) -> bool:
        """True when all members are known to hold all of `op` FINAL (or to have failed it). Looks at the words now."""
        if not (0 <= op.end <= self.taken and self._all(TAKEN, op.end)):
            return False
        if self._readers and not self._told(op.end):
            return False  # it may be the last for long, and the others wait to hear that it is taken here
        if self._alarm is not None:
            self._alarm.compare(op.end)
        return True

    def wait(self, oldest: Operation) -> bool:
        """When nothing can move: wait for the word that stands in the way of `oldest`, the first op not returned.

        False if it did not come before a poke or the end of one sleep. Through lines: for any word.
        """
        lines = self._lines
        clogged = self._clogged() if self._readers else ()
        if lines is not None and (lines.peers or clogged):
            return lines.wait(clogged) and not self.missing(oldest)
        word, count, peers = self._obstacle(oldest)
        target = self._low + count
        for peer in peers:
            words = peer.words
            if not target <= words[word] < self._high and not self._waiter.until(
                words, word, peer.address + 8 * word, target, self._high, _token(peer.replica, word)
            ):
                return False
        return True

    def missing(self, oldest: Operation) -> tuple[int, ...]:
        """On whom `wait` waits."""
        word, count, peers = self._obstacle(oldest)
        target = self._low + count
        missing = tuple(p.replica for p in peers if not target <= p.words[word] < self._high)
        return missing or tuple(reader.replica for reader in self._clogged())

    # -- the stages ------------------------------------------------------------------------------------------------

    def _free(self, ahead: int) -> bool:
        """Between hosts, where a task takes as long as the way there and back, members go as far as there are slots.
        Then that I have taken a task does not tell that others have taken an earlier one."""
        return ahead < SLOTS and self._all(TAKEN, self.posted - SLOTS + 1)

    def _may_post(self) -> bool:
        unposted = self.unposted
        while True:
            op = unposted[0]
            if op.next:
                return op.verified
            if op.script is not None:
                op.enter(self.view)
            if op.tasks:
                return True
            unposted.popleft().end = self.posted  # every member holds all of it already
            if not unposted:
                return False

    def _post(self) -> None:
        op = self.unposted[0]
        index = self.posted
        if self._alarm is not None:
            self._alarm.compare(index - SLOTS + 1)
        slot = self._ring[index % SLOTS]
        task: Any = op.tasks[op.next]
        first = op.next == 0
        if first:
            at = descriptor(index % SLOTS)
            self._own[at] = op.number
            self._own[at + 1] = op.call
            self._own[at + DETAIL] = self._detail if op.script is None else op.detail
        op.next += 1
        if op.next == len(op.tasks):
            op.end = index + 1
            self.unposted.popleft()
        if op.script is not None:
            assert isinstance(op, Scripted)
            slot.op, slot.task, slot.first, slot.two_shot, slot.straight, slot.level = op, task, first, False, False, -1
            self._carrier.give(op, task, index % SLOTS)
            self.posted = index + 1
            self._publish(POSTED, index + 1)
            return
        if first:
            op.around = around(op.array.nbytes, self.view) and may_ring(op.dtype, op.op)
            op.two_shot = two_shot(op.array.nbytes, self.view) and not op.around
        here = op.array
        if len(op.finals) > 1:
            start = task.chunk * op.elements
            here = here[start : start + op.elements]
            if op.atomic:
                op.keep(task.chunk, here, task.holder == REDUCE)
        if task.holder == REDUCE and self._sole != REDUCE:
            task = Task(task.chunk, self._sole, self._contributors)
        slot.op, slot.task, slot.first, slot.here = op, task, first, here
        slot.two_shot = op.two_shot and task.holder == REDUCE
        slot.lane = lane = self._lane(op.dtype, len(here), index % SLOTS)
        slot.level = 0 if op.around and task.holder == REDUCE else -1
        slot.straight = (slot.two_shot or slot.level == 0) and self._straight
        gives = self._contributes if task.holder == REDUCE else task.holder == self.view.me
        if gives and self._peers and not slot.straight:
            lane.mine[...] = here
        self.posted = index + 1
        self._publish(POSTED, index + 1)

    def _arrive(self) -> None:
        index = self.arrived
        slot = self._ring[index % SLOTS]
        if slot.first:
            self._verify(slot, index)
        self.arrived = index + 1
        if slot.two_shot and slot.op.error is None:
            lane = slot.lane
            start, stop = lane.shards[self.view.me]
            if start < stop:
                sources: Sequence[Any] = lane.shard_sources
                if slot.straight and self._contributes:
                    mine = operand(slot.op.dtype, slot.here[start:stop])
                    sources = [*sources[: self._place], mine, *sources[self._place + 1 :]]
                self._reducer.get(slot.op.dtype, slot.op.op)(sources, lane.shard_out)
            self._publish(REDUCED, index + 1)

    def _verify(self, slot: _Slot, index: int) -> None:
        """Compare the calls of all members. On a mismatch all see it, and for all the op ends with this one task."""
        op = slot.op
        at = descriptor(index % SLOTS)
        detail_at = at + DETAIL
        detail = self._own[detail_at]
        for words in self._words:
            if words[at + 1] != op.call or words[at] != op.number or words[detail_at] != detail:
                break
        else:
            op.verified, op.error = True, op.doom
            return
        seen = ((member, self.memories[member].words) for member in self.view.members)
        op.error = mismatch((member, words[at], words[at + 1], words[at + DETAIL]) for member, words in seen)
        op.end = index + 1
        if self.unposted and self.unposted[0] is op:
            self.unposted.popleft()

    def _may_take(self) -> bool:
        slot = self._ring[self.taken % SLOTS]
        if slot.level >= 0 and self._around is not None:
            return slot.level == self._around.levels or slot.op.error is not None
        return not slot.two_shot or slot.op.error is not None or self._all(REDUCED, self.taken + 1)

    def _pass_on(self, around: Ring) -> bool:
        """Each task that goes around takes the next step, if the left neighbour has gone before it."""
        moved = False
        for index in range(self.taken, self.arrived):
            slot = self._ring[index % SLOTS]
            reached = slot.level
            if not 0 <= reached < around.levels or slot.op.error is not None:
                continue
            if reached and not self._low + index + 1 <= self._left[0].words[level(reached)] < self._high:
                continue
            assert slot.lane.around is not None
            around.step(slot.op, slot.here, slot.lane.around, reached)
            slot.level = reached + 1
            if reached + 1 < around.levels:
                self._publish(level(reached + 1), index + 1)
            moved = True
        return moved

    def _take(self) -> None:
        """INPUT becomes FINAL here, in one go: nothing waits between the first byte and the mark."""
        index = self.taken
        slot = self._ring[index % SLOTS]
        op = slot.op
        if op.script is not None:
            self._take_batch(op, slot, index)
            return
        task: Any = slot.task
        chunk, holder, contributors = task
        if op.error is None:
            here = slot.here
            lane = slot.lane
            if holder != REDUCE:
                if holder != self.view.me and op.finals[chunk] is None:
                    here[...] = lane.posted[holder]
            elif slot.level >= 0:
                assert self._around is not None
                assert lane.around is not None
                self._around.finish(here, lane.around)
            elif slot.two_shot:
                for part, source in lane.reduced:
                    here[part] = source
            else:
                out = operand(op.dtype, here)
                sources: Sequence[Any] = lane.sources
                if self._pair:
                    sources = (out, sources[1]) if self._mine_first else (sources[0], out)
                self._reducer.get(op.dtype, op.op)(sources, out)
            op.finals[chunk] = contributors or self._contributors
        if self._alarm is not None:
            self._alarm.taken(index, op, chunk, slot.here)
        self._last = op.end == index + 1
        del slot.op, slot.here
        self.taken = index + 1
        self._publish(TAKEN, index + 1)

    def _take_batch(self, op: Operation, slot: _Slot, index: int) -> None:
        batch = slot.task
        assert isinstance(op, Scripted)
        assert isinstance(batch, Batch)
        if op.error is None:
            self._carrier.take(op, batch, index % SLOTS)
        if self._alarm is not None:
            self._alarm.taken_batch(index, op, batch)
        self._last = op.end == index + 1
        del slot.op
        self.taken = index + 1
        self._publish(TAKEN, index + 1)

    # -- words -----------------------------------------------------------------------------------------------------

    def _publish(self, word: int, count: int) -> None:
        self._own[word] = self._low + count
        token = self._tokens[word]
        for words in self._words:
            if words[ASLEEP] == token:
                wake(self._segment.address + 8 * word)  # wakes all who sleep on it
                break
        if word == TAKEN and not (self._last or self._far or self._alarm is not None):
            return  # by a connection: of an op, the others look at its last task alone
        for reader in tuple(self._readers):
            if word in _TO_ALL or (self._around is not None and reader.replica == self._around.right):
                self._send(reader, word, count)

    def _send(self, reader: Reader, word: int, count: int) -> None:
        """Push a word to a TCP reader, with the bytes that it announces and that this reader will read."""
        start = nbytes = 0
        index = (count - 1) % SLOTS
        at = descriptor(index)
        belongs = (self._own[at + FINGERPRINT], 0, 0)
        if word != TAKEN:
            slot = self._ring[index]
            belongs = (self._own[at], self._own[at + 1], self._own[at + DETAIL])
            if isinstance(slot.task, Batch):
                begin, end = slot.task.span(self.view.me, self._contributes, reader.replica)
                itemsize = slot.task.itemsize
            else:
                begin, end = self._read_by(reader.replica, word, slot, slot.task.holder)
                itemsize = slot.lane.mine.itemsize
            start, nbytes = begin * itemsize, (end - begin) * itemsize
        base = self._segment.offset(word, index) + start
        try:
            if word == POSTED and slot.straight:
                # None if it is taken: then all have reduced their shards, whatever connection this is.
                there = b"" if count <= self.taken else slot.here.view(np.uint8)[start : start + nbytes].data
                payload = memoryview(there)
            else:
                payload = self._segment.buffer[base : base + nbytes]
            reader.send(word, self._low + count, start, payload, belongs)
        except OSError as error:
            self._drop(reader, error)

    def _told(self, count: int) -> bool:
        """True when all readers were sent the word that so many tasks are taken."""
        self._clogged()
        return all(reader.told(TAKEN, self._low + count) for reader in self._readers)

    def _clogged(self) -> list[Reader]:
        """Send what has been left; those for whom something is left still."""
        clogged = []
        for reader in tuple(self._readers):
            try:
                if not reader.flush():
                    clogged.append(reader)
            except OSError as error:
                self._drop(reader, error)
        return clogged

    def _drop(self, reader: Reader, error: OSError) -> None:
        reader.close()
        if reader in self._readers:  # once
            self._readers.remove(reader)
            self._on_lost(reader.replica, self.view.epoch, f"connection for data: {error}")

    def _read_by(self, reader: int, word: int, slot: _Slot, holder: int) -> tuple[int, int]:
        """The elements (start, stop) that `reader` needs of the chunk that `word` announces."""
        lane = slot.lane
        if word == REDUCED:
            return lane.shards[self.view.me]
        if slot.level >= 0:
            assert self._around is not None
            assert lane.around is not None
            if reader != self._around.right:
                return 0, 0
            return self._around.read_by_right(0 if word == POSTED else reached_at(word), lane.around)
        if not (self._contributes if holder == REDUCE else holder == self.view.me):
            return 0, 0
        return lane.shards[reader] if slot.two_shot else (0, len(lane.mine))

    def _all(self, word: int, count: int) -> bool:
        target = self._low + count
        high = self._high
        for words in self._words:  # noqa: SIM110 (a generator would double the price of a poll)
            if not target <= words[word] < high:
                return False
        return True

    def _obstacle(self, oldest: Operation) -> tuple[int, int, Sequence[Peer]]:
        """The word, and the value that these peers must reach, before anything can move."""
        if self.arrived < self.posted and self.arrived == self.taken:
            return POSTED, self.arrived + 1, self._peers
        if self.taken < self.posted:
            reached = self._ring[self.taken % SLOTS].level
            if reached > 0:
                return level(reached), self.taken + 1, self._left
            return REDUCED, self.taken + 1, self._peers
        return TAKEN, oldest.end, self._peers

    def _lane(self, dtype: str, count: int, slot: int) -> _Lane:
        lanes = self._lanes[slot]
        lane = lanes.get((dtype, count))
        if lane is None:
            if len(lanes) >= _LANES:
                lanes.clear()
            lane = lanes[dtype, count] = _Lane(self, dtype, count, slot)
        return lane


def _token(replica: int, word: int) -> int:
    """What a member's ASLEEP word holds while it sleeps on a word of `replica`; 0 when awake."""
    return (replica + 1) << 16 | word
