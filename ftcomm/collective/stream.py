"""The stream of tasks of one epoch, and the memory operations that it is made of.

All ops of an epoch make one stream of tasks, which has the same task at the same index on every member. A task goes
through three stages at every member, in order; the counters `posted`, `arrived`, `taken` say how far each has come:

    post     copy my input of the chunk into my POSTED staging (or my FINAL chunk, if others are to copy it)
    arrive   all members have posted: on the first chunk of an op compare the calls; two-shot: reduce my shard into
             my REDUCED staging
    take     one-shot: reduce all inputs into the caller's buffer. Two-shot: when all have reduced, copy the shards
             there

That is a chunk of an all-reduce; between hosts, where frames cost more than caches save, it may be SPAN chunks that lie
side by side. On a route it goes over hops between `arrive` and `take`, see
`ftcomm.collective.route`. Other collectives move batches of parts, of which a member posts those that it gives and
takes those that are for it, see `ftcomm.collective.script`.

    word      written by      value             polled by   before
    POSTED    owner           tasks posted      all others  they read its POSTED staging
    REDUCED   owner           tasks arrived     all others  they read its REDUCED staging (two-shot)
    TAKEN     owner           tasks taken       all others  they return an op: all must hold all of it FINAL;
                                                            between hosts, they post what uses the slot again
    level(l)  owner           tasks that have   the right   it reads the shard of that level, see
                              reached level l   neighbour   `ftcomm.collective.ring`

Words hold `epoch << 32 | counter` and only grow. Task `index` has descriptor `index % SLOTS` and, in the staging, the
room of SPAN chunks of that number; among members of one host the `index % NEAR`-th of as many as their layout has for a
task.

Fencing. A member enters an epoch with a new stream, whose first act is to raise its words to the epoch, before any
staging is written. A member that was left behind in the old epoch may still read that staging while it changes, and
mark a chunk FINAL that is none. But it sees the data before it looks, once more, at the words of all members, to return
the op; then it sees that a word has left its epoch, and never returns the op. Those who go on have all stopped reading
before any of them enters the new epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ftcomm.collective.carry import Carrier
from ftcomm.collective.divergence import Alarm, Divergence
from ftcomm.collective.express import Express, may, token
from ftcomm.collective.operation import Operation, mismatch
from ftcomm.collective.plan import GroupView, by_route, shards, two_shot
from ftcomm.collective.resume import REDUCE, Task, side_by_side
from ftcomm.collective.ring import Ring
from ftcomm.collective.route import Route
from ftcomm.collective.script import AROUND, TWO_LEVEL, Batch
from ftcomm.collective.scripted import Scripted
from ftcomm.collective.two_level import TwoLevel
from ftcomm.collective.wire import FP8, WIRES, hands_on
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.packed import RECORD, Packed
from ftcomm.kernels.host.quantise import BLOCK
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.kernels.host.tensors import lasting
from ftcomm.kernels.wait import IN_POLL, Waiter, wake
from ftcomm.transport.lines import Lines
from ftcomm.transport.segment import (
    ASLEEP,
    DETAIL,
    FINGERPRINT,
    NEAR,
    POSTED,
    PUBLISHED,
    REDUCED,
    SLOTS,
    SPAN,
    TAKEN,
    Memory,
    Peer,
    Segment,
    descriptor,
    level,
    reached_at,
)
from ftcomm.transport.tcp import Reader, TcpPeer, of_member
from ftcomm.tuning import Tuning

# Tasks posted and not taken. 64 MB, two members: 1 (nothing overlaps) 5.65 ms, 2 5.1, 3 5.4 (spills the cache); four
# members on two cores: 1 19.2 ms, 2 18.1. Half of the slots is also what makes a slot free when its turn comes, without
# looking: I post task p after I have taken p - AHEAD, so all had posted that, so all had taken p - 2 * AHEAD, which had
# the same slot. Between hosts members look, and are ahead by as many tasks as there are slots.
AHEAD = NEAR // 2

_TO_ALL = frozenset((POSTED, REDUCED, TAKEN))  # words that all others look at

_LANES = 64  # sizes of chunks whose views are kept, per slot

_NOTHING = memoryview(b"")

Array = np.ndarray[Any, Any]


class _Lane:
    """The staging of all members for chunks of one dtype, wire and size in one slot, as ready-made views.

    Making them costs 0.3 us each, and a training repeats its sizes.
    """

    def __init__(self, stream: Stream, dtype: str, wire: str, count: int, slot: int) -> None:
        self.coded = wire == FP8
        carrier = RECORD if self.coded else HOST_DTYPES[dtype].carrier
        made = Packed if self.coded else partial(operand, dtype)
        block = BLOCK if self.coded else 1  # elements in each item of these views
        view = stream.view
        memories = stream.memories
        items = -(-count // block)
        posted = {m: memories[m].carve(POSTED, slot, 0, items, carrier) for m in view.members}
        self.mine = posted[view.me]
        self.posted = posted
        self.sources = [made(posted[m]) for m in view.contributors]
        self.shards = dict(zip(view.members, shards(items, carrier.itemsize, len(view.members)), strict=True))
        start, stop = self.shards[view.me]
        self.shard_sources = [made(posted[m][start:stop]) for m in view.contributors]
        self.shard_out = made(memories[view.me].carve(REDUCED, slot, start, stop - start, carrier))
        self.routed: Any = None
        self.needed: set[tuple[int, int]] = set()  # elements of my input that I have to stage for others on the route
        if stream._route is not None:
            self.routed = stream._route.lane(dtype, wire, count, slot)
            size = HOST_DTYPES[dtype].itemsize
            needed = [stream._route.read_by(m, 0, self.routed) for m in view.members if m != view.me]
            self.needed = {(start // size, stop // size) for start, stop in needed}
        reduced = [(a, b, memories[m].carve(REDUCED, slot, a, b - a, carrier)) for m, (a, b) in self.shards.items()]
        self.reduced: list[tuple[slice, Any]] = [
            (slice(a * block, b * block), made(array) if self.coded else array) for a, b, array in reduced if a < b
        ]
        if self.coded:
            self.packed = made(self.mine)


class _Slot:
    """A task on its way. `op` and `here` end when it is taken: the caller's arrays are not ours to keep."""

    __slots__ = ("first", "here", "hop", "lane", "needs", "op", "span", "straight", "task", "two_shot")

    op: Operation
    task: Task | Batch
    span: int  # chunks that it is of, from that of `task` on
    first: bool  # of its op in this epoch
    two_shot: bool
    hop: int  # of the route, the next one; -1: it does not go by it
    straight: bool  # who reduces its shards has them from `here`, not from the staging
    here: Array  # the caller's buffer of this chunk
    lane: _Lane
    needs: Sequence[Peer]  # whose staging is read, of those of whom it may only be heard what they have done


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
        self._words = [peer.heard for peer in self._peers]
        # In a ring a member need have no connection but to its neighbours; of the others it hears from the left, and
        # tells the right, see `_relay`.
        self._hearsay = any(peer.heard is not peer.words for peer in self._peers)
        self._tokens = {word: token(view.me, word) for word in PUBLISHED}
        self._waiter = waiter
        self._reducer = reducer
        contributors = view.contributors
        self.contributors = contributors
        # The inputs of a single contributor are the result: everybody copies them.
        self._sole = contributors[0] if len(contributors) == 1 else REDUCE
        self._contributes = view.me in view.contributing
        self._detail = AROUND if view.ring else TWO_LEVEL if view.hosts else 0  # of all-reduces
        # Two members reduce from the caller's own buffer and the staging of the other. With more, the first step of
        # the sum would overwrite an input that a later one needs.
        self._pair = len(view.members) == 2 and len(contributors) == 2
        self._mine_first = contributors[:1] == (view.me,)
        self._place = contributors.index(view.me) if self._contributes else -1
        self._lanes: list[dict[tuple[str, str, int], _Lane]] = [{} for _ in range(SLOTS * SPAN)]
        self._ring = [_Slot() for _ in range(SLOTS)]
        self._carrier = Carrier(view, self.memories, reducer)
        self._route: Route | None = None
        if len(view.ring) > 1:
            self._route = Ring(view, self.memories, reducer)
        elif view.hosts:
            self._route = TwoLevel(view, self.memories, reducer)
        self._left = view.ring[view.ring.index(view.me) - 1] if view.ring else view.me
        self._right = view.ring[(view.ring.index(view.me) + 1) % len(view.ring)] if view.ring else view.me
        others = self._peers if len(view.ring) > 3 else ()  # of fewer, all are neighbours
        self._relayed = [(peer, {POSTED: 0, TAKEN: 0}) for peer in others if peer.replica != self._right]
        hops = () if self._route is None else self._route.hops
        self._awaited = [[peer for peer in self._peers if peer.replica in hop.of] for hop in hops]  # at each hop
        self._looked_at = {} if self._route is None else {level(i): who for i, who in self._route.readers.items()}
        self._alarm: Alarm | None = None
        served = () if self._route is None or on_divergence is not None else self._route.served
        self._served = [peer for peer in self._peers if peer.replica in served]
        if on_divergence is not None:
            self._alarm = Alarm(view, self.memories, lambda count: self._all(TAKEN, count), on_divergence)
        # Whoever reads through a connection has a shard of the caller's input from where it lies: it is final, and
        # overwritten, only when all have reduced, and so have what they need of it.
        self._far = not view.one_host
        self._slots, self._most = (SLOTS, SPAN) if self._far else (NEAR, segment.layout.near)  # used; chunks of a task
        self._last = True  # the task that was taken last was the last one of its op
        self._straight = lines is not None and len(lines.peers) == len(self._peers)
        self._straight_from = 0 if lines is None else lines.straight_from
        # Of two members each overwrites its input when it has that of the other; and when the other has its.
        self._pair_straight = self._pair and self._straight and lines is not None and lines.lands
        self._express = Express(self, segment, peers, waiter) if on_divergence is None and may(view, peers) else None
        for word in (POSTED, REDUCED, TAKEN, *self._looked_at):
            self._publish(word, 0)

    # -- what the driver does --------------------------------------------------------------------------------------

    def welcome(self, reader: Reader) -> None:
        """A TCP reader has attached; send it what it has missed.

        What it has yet to take lies in the slots; of what was there before nobody needs anything from here.
        """
        if reader.replica not in self.memories or reader.replica == self.view.me:
            reader.close()
            return
        for known in [known for known in self._readers if known.replica == reader.replica]:
            if known.epoch > reader.epoch:  # it was dialled earlier, and has come later
                reader.close()
                return
            self._readers.remove(known)
            known.close()
        self._readers.append(reader)
        if reader.replica == self._right:
            for _, told in self._relayed:
                told[POSTED] = told[TAKEN] = 0
        first = max(0, self.posted - self._slots)
        for index in range(first, self.posted):
            self._send(reader, POSTED, index + 1)
        for index in range(first, self.arrived):
            slot = self._ring[index % SLOTS]
            if slot.two_shot:
                self._send(reader, REDUCED, index + 1)
            if self._route is not None:
                for hop in self._route.hops[: max(0, slot.hop)]:
                    if hop.makes and reader.replica in self._route.readers[hop.makes]:
                        self._send(reader, level(hop.makes), index + 1)
        for index in range(max(0, self.taken - self._slots), self.taken):
            self._send(reader, TAKEN, index + 1)

    def close(self, lives: Mapping[int, str] | None = None) -> list[Reader]:
        """The epoch is over. The connections of the readers that go on with this member come back, see
        `ftcomm.collective.lobby` for `lives`; those of others are closed.

        Nothing of it may hold the memory of members that are gone: the alarm and the stream know each other, and what
        frees such pairs runs so rarely that the memory and a descriptor of every loss would be kept."""
        kept = []
        for reader in self._readers:
            if (lives or {}).get(reader.replica) == reader.life and reader.turn():
                kept.append(reader)
                continue
            with contextlib.suppress(OSError):
                reader.flush()  # who fails here has said so in a word that may be left
            reader.close()
        self._readers.clear()
        self._ring.clear()
        self.unposted.clear()
        self._alarm = None
        return kept

    def tune(self, tuning: Tuning) -> None:
        """Other switch points, while nothing is in flight."""
        self.view = dataclasses.replace(self.view, tuning=tuning)
        if self._express is not None:
            peers = {peer.replica: peer for peer in self._peers}
            self._express = Express(self, self._segment, peers, self._waiter)

    def at_once(self, op: Operation) -> bool:
        """`op` is the first in flight: True if it could be done in one go, and is stable. Else it is where it is."""
        return (
            self._express is not None
            and self.posted == self.taken
            and len(self.unposted) == 1
            and not op.next
            and op.script is None
            and not self._readers
            and self._express.run(self, op)
        )

    def fill(self, index: int, op: Operation, lane: _Lane) -> None:
        """Task `index`, the only one of an all-reduce, was posted from elsewhere."""
        slot = self._ring[index % SLOTS]
        slot.op, slot.task, slot.span, slot.first, slot.here, slot.lane = op, op.tasks[0], 1, True, op.array, lane
        slot.two_shot, slot.straight, slot.hop = False, False, -1

    def advance(self) -> bool:
        """Move what can move without waiting, at most one task per stage; False if nothing could."""
        moved = False
        if self._relayed:
            self._relay()
        ahead = self.posted - self.taken
        if self.unposted and (self._free(ahead) if self._far else ahead < AHEAD) and self._may_post():
            self._post()
            moved = True
        if self.arrived < self.posted and (
            self._all(POSTED, self.arrived + 1) if self._route is None else self._may_arrive()
        ):
            self._arrive()
            moved = True
        if self._route is not None and self.taken < self.arrived and self._pass_on(self._route):
            moved = True
        if self.taken < self.arrived and self._may_take():
            self._take()
            moved = True
        return moved

    def stable(self, op: Operation) -> bool:
        """True when all members are known to hold all of `op` FINAL (or to have failed it). Looks at the words now."""
        if not (0 <= op.end <= self.taken and self._all(TAKEN, op.end)):
            return False
        if self._relayed:
            self._relay()  # the right neighbour may have it from nobody else
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
        if lines is not None and lines.peers and not self._straight:
            return lines.wait(clogged, lambda: self.advance() or self.stable(oldest))
        if lines is not None and (lines.peers or clogged):
            return lines.wait(clogged)
        word, count, peers = self._obstacle(oldest)
        target = self._low + count
        for peer in peers:
            words = peer.words
            if not target <= words[word] < self._high and not self._waiter.until(
                words, word, peer.address + 8 * word, target, self._high, token(peer.replica, word)
            ):
                return False
        return True

    def missing(self, oldest: Operation) -> tuple[int, ...]:
        """On whom `wait` waits."""
        word, count, peers = self._obstacle(oldest)
        target = self._low + count
        if self._hearsay and peers is self._peers and word in (POSTED, TAKEN):
            # Of others the left neighbour tells. If it has not, it waits for that as well, or stands still.
            lacking = [p for p in peers if not target <= p.heard[word] < self._high]
            unmet = {p.replica for p in lacking if isinstance(p, TcpPeer) and not p.is_open}
            missing = tuple(sorted({self._left if p.replica in unmet else p.replica for p in lacking}))
        else:
            missing = tuple(p.replica for p in peers if not target <= p.words[word] < self._high)
        return missing or tuple(reader.replica for reader in self._clogged())

    # -- the stages ------------------------------------------------------------------------------------------------

    def _free(self, ahead: int) -> bool:
        """Between hosts, where a task takes as long as the way there and back, members go as far as there are slots.
        Then that I have taken a task does not tell that others have taken an earlier one."""
        readers = self._slot_readers()
        if readers is not self._peers:
            return ahead < SLOTS and self._reached(readers, TAKEN, self.posted - SLOTS + 1)
        return ahead < SLOTS and self._all(TAKEN, self.posted - SLOTS + 1)

    def _slot_readers(self) -> Sequence[Peer]:
        """Who has to have taken what lies in the slot of the next task, before that may be posted."""
        if self._served and self.posted >= SLOTS and self._ring[self.posted % SLOTS].hop >= 0:
            return self._served
        return self._peers

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
        span = self._span(op)
        op.next += span
        if op.next == len(op.tasks):
            op.end = index + 1
            self.unposted.popleft()
        if op.script is not None:
            assert isinstance(op, Scripted)
            slot.op, slot.task, slot.first, slot.two_shot, slot.straight, slot.hop = op, task, first, False, False, -1
            if self._hearsay:
                slot.needs = self._want(self._peers)
            self._carrier.give(op, task, self.staging(index))
            self.posted = index + 1
            self._publish(POSTED, index + 1)
            return
        if first:
            op.routed = by_route(op.array.nbytes, self.view) and hands_on(op.dtype, op.op, op.wire)
            op.two_shot = two_shot(op.array.nbytes, self.view) and not op.routed
        here = op.array
        if len(op.finals) > 1:
            start = task.chunk * op.elements
            here = here[start : start + span * op.elements]
            for chunk in range(task.chunk, task.chunk + span if op.atomic else 0):
                op.keep(chunk, task.holder == REDUCE)
        coded = task.holder == REDUCE and op.wire == FP8
        if task.holder == REDUCE and self._sole != REDUCE and not coded:
            task = Task(task.chunk, self._sole, self.contributors)
        slot.op, slot.task, slot.span, slot.first, slot.here = op, task, span, first, here
        slot.two_shot = op.two_shot and task.holder == REDUCE
        wire = op.wire if coded or op.wire != FP8 else WIRES[0]  # what is FINAL is given as it is
        slot.lane = lane = self.lane(op.dtype, wire, len(here), self.staging(index))
        slot.hop = 0 if op.routed and task.holder == REDUCE else -1
        straight = self._straight and not coded and op.nbytes >= self._straight_from
        slot.straight = straight and (slot.two_shot or slot.hop == 0 or (self._pair_straight and task.holder == REDUCE))
        if self._hearsay:
            lacks = op.finals[task.chunk] is None
            read = [p for p in self._peers if task.holder == REDUCE or (lacks and p.replica == task.holder)]
            slot.needs = self._want(read) if slot.hop < 0 else ()
        gives = self._contributes if task.holder == REDUCE else task.holder == self.view.me
        if gives and coded:
            self._reducer.packer.encode(op.dtype, here, lane.packed)
        elif gives and self._peers and not slot.straight:
            for start, stop in lane.needed if slot.hop == 0 else ((0, len(here)),):
                lane.mine[start:stop] = here[start:stop]
        self.posted = index + 1
        self._publish(POSTED, index + 1)

    def _span(self, op: Operation) -> int:
        """Of how many chunks the next task is. All members say the same, as they have the same tasks."""
        if self._most == 1 or op.script is not None or len(op.finals) <= SLOTS:  # each of these finds a slot of its own
            return 1
        tasks: Any = op.tasks
        return side_by_side(tasks[op.next : op.next + self._most])

    def _want(self, peers: Sequence[Peer]) -> Sequence[Peer]:
        """Those of them of whom this one may know by hearsay alone; from now on by a connection."""
        needed = [peer for peer in peers if peer.heard is not peer.words]
        for peer in needed:
            assert isinstance(peer, TcpPeer)
            peer.want(self._waiter.poke)
        return needed

    def _may_arrive(self) -> bool:
        """Where there is a route; else it takes that all have posted, and no more."""
        count = self.arrived + 1
        slot = self._ring[self.arrived % SLOTS]
        if slot.hop >= 0 and not slot.first and self._route is not None and self._route.chained:
            return True
        return self._all(POSTED, count) and (not self._hearsay or self._reached(slot.needs, POSTED, count))

    def _arrive(self) -> None:
        index = self.arrived
        slot = self._ring[index % SLOTS]
        if slot.first:
            self._verify(slot, index)
        self.arrived = index + 1
        if slot.two_shot and slot.op.error is None:
            lane = slot.lane
            start, stop = lane.shards[self.view.me]
            if start < stop and lane.coded:
                self._reducer.packer.reduce(lane.shard_sources, slot.op.op, lane.shard_out)
            elif start < stop:
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
        seen = ((member, self.memories[member].heard) for member in self.view.members)
        op.error = mismatch((member, words[at], words[at + 1], words[at + DETAIL]) for member, words in seen)
        op.end = index + 1
        if self.unposted and self.unposted[0] is op:
            self.unposted.popleft()

    def _may_take(self) -> bool:
        slot = self._ring[self.taken % SLOTS]
        if slot.hop >= 0:
            return slot.hop == len(self._awaited) or slot.op.error is not None
        if slot.op.error is not None:
            return True
        if not slot.two_shot:
            return not slot.straight or self._landed(self.taken + 1)
        if self._hearsay:
            return self._reached(self._peers, REDUCED, self.taken + 1)
        return self._all(REDUCED, self.taken + 1)

    def _landed(self, count: int) -> bool:
        """Whether all others have what so many tasks have posted."""
        value = self._low + count
        readers = self._readers
        return len(readers) == len(self._peers) and all(reader.told(POSTED, value) for reader in readers)

    def _pass_on(self, route: Route) -> bool:
        """Each task that goes by the route takes its next hop, if those it waits for have come so far."""
        moved = False
        for index in range(self.taken, self.arrived):
            slot = self._ring[index % SLOTS]
            number = slot.hop
            if not 0 <= number < len(route.hops) or slot.op.error is not None:
                continue
            hop = route.hops[number]
            if not self._reached(self._awaited[number], level(hop.level) if hop.level else POSTED, index + 1):
                continue
            route.hop(slot.op, slot.here, slot.lane.routed, number)
            slot.hop = number + 1
            if hop.makes:
                self._publish(level(hop.makes), index + 1)
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
            elif slot.hop >= 0:
                assert self._route is not None
                self._route.finish(here, lane.routed)
            elif lane.coded:
                self._decode(op, lane, here, slot.two_shot)
            elif slot.two_shot:
                for part, source in lane.reduced:
                    here[part] = source
            else:
                self.reduction(op, lane)(here)
            op.finals[chunk : chunk + slot.span] = [contributors or self.contributors] * slot.span
        if self._alarm is not None:
            self._alarm.taken(index, op, chunk, slot.here)
        self._last = op.end == index + 1
        del slot.op, slot.here
        self.taken = index + 1
        self._publish(TAKEN, index + 1)

    def reduction(self, op: Operation, lane: _Lane) -> Callable[[Array], None]:
        """One-shot: what reduces the inputs of all into the caller's buffer."""
        reduction, dtype, sources = self._reducer.get(op.dtype, op.op), op.dtype, lane.sources

        def reduce(here: Array) -> None:
            reduction(sources, operand(dtype, here))

        def reduce_mine_first(here: Array) -> None:
            out = operand(dtype, here)
            reduction((out, sources[1]), out)

        def reduce_mine_last(here: Array) -> None:
            out = operand(dtype, here)
            reduction((sources[0], out), out)

        return reduce if not self._pair else reduce_mine_first if self._mine_first else reduce_mine_last

    def _decode(self, op: Operation, lane: _Lane, here: Array, two_shot: bool) -> None:
        """In one-shot each member codes the sums itself: all have the same bytes then, too."""
        packer = self._reducer.packer
        if not two_shot:
            packer.reduce_decoded(lane.sources, op.op, op.dtype, here)
            return
        for part, source in lane.reduced:
            packer.decode(source, op.dtype, here[part])

    def _take_batch(self, op: Operation, slot: _Slot, index: int) -> None:
        batch = slot.task
        assert isinstance(op, Scripted)
        assert isinstance(batch, Batch)
        if op.error is None:
            self._carrier.take(op, batch, self.staging(index))
        if self._alarm is not None:
            self._alarm.taken_batch(index, op, batch)
        self._last = op.end == index + 1
        del slot.op
        self.taken = index + 1
        self._publish(TAKEN, index + 1)

    def _relay(self) -> None:
        """What is heard of others goes on to the right neighbour, before anything that follows from it. So after one
        round all know, and who returns an op has told the right one all that it needs to do the same."""
        reader = next((reader for reader in self._readers if reader.replica == self._right), None)
        if reader is None:
            return
        for peer, told in self._relayed:
            heard = peer.heard
            for word, before in told.items():
                value = heard[word]
                if not self._low + before < value < self._high:
                    continue
                count = value - self._low
                each = word == POSTED or self._alarm is not None
                for said in range(max(before, count - SLOTS) + 1 if each else count, count + 1):
                    at = descriptor((said - 1) % SLOTS)
                    posted = (heard[at], heard[at + 1], heard[at + DETAIL])
                    belongs = posted if word == POSTED else (heard[at + FINGERPRINT], 0, 0)
                    try:
                        reader.send(of_member(peer.replica, word), self._low + said, 0, _NOTHING, belongs)
                    except OSError as error:
                        self._drop(reader, error)
                        return
                told[word] = count

    # -- words -----------------------------------------------------------------------------------------------------

    def _publish(self, word: int, count: int) -> None:
        self._own[word] = self._low + count
        token = self._tokens[word]
        for words in self._words:
            asleep = words[ASLEEP]
            if not asleep:
                continue
            if asleep == token:
                wake(self._segment.address + 8 * word)  # wakes all who sleep on it
                token = 0
            elif asleep == IN_POLL:
                self._ring_at(words, word)
        if word == TAKEN and not (self._last or self._far or self._alarm is not None):
            return  # by a connection: of an op, the others look at its last task alone
        for reader in tuple(self._readers):
            if word in _TO_ALL or reader.replica in self._looked_at[word]:
                self._send(reader, word, count)

    def _ring_at(self, words: memoryview, word: int) -> None:
        """The owner of these sleeps, on connections too; if it looks at this word of ours, it has to be woken."""
        peer = next(peer for peer in self._peers if peer.words is words)
        if word in _TO_ALL or peer.replica in self._looked_at[word]:
            peer.ring()

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
                start, nbytes = begin * slot.task.itemsize, (end - begin) * slot.task.itemsize
            else:
                start, end = self._read_by(reader.replica, word, slot, slot.task.holder)
                nbytes = end - start
        slot_at = self.staging(count - 1) * self._segment.chunk
        try:
            if word == POSTED and slot.straight:
                # None if it is taken: then all have what they need of it, whatever connection this is.
                payload = _NOTHING
                if count > self.taken:
                    assert isinstance(slot.task, Task)
                    start_of = slot.task.chunk * slot.op.elements * slot.op.itemsize + start
                    payload = slot.op.memory[start_of : start_of + nbytes]
            else:
                base = self._segment.offset(word, 0) + slot_at + start
                payload = self._segment.buffer[base : base + nbytes]
            reader.send(word, self._low + count, slot_at + start, payload, belongs)
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
        """The bytes (start, stop) that `reader` needs of the chunk that `word` announces."""
        lane = slot.lane
        itemsize = lane.mine.itemsize
        if word == REDUCED:
            start, stop = lane.shards[self.view.me]
            return start * itemsize, stop * itemsize
        if slot.hop >= 0:
            assert self._route is not None
            return self._route.read_by(reader, 0 if word == POSTED else reached_at(word), lane.routed)
        if not (self._contributes if holder == REDUCE else holder == self.view.me):
            return 0, 0
        start, stop = lane.shards[reader] if slot.two_shot else (0, len(lane.mine))
        return start * itemsize, stop * itemsize

    def _all(self, word: int, count: int) -> bool:
        target = self._low + count
        high = self._high
        for words in self._words:  # noqa: SIM110 (a generator would double the price of a poll)
            if not target <= words[word] < high:
                return False
        return True

    def _reached(self, peers: Sequence[Peer], word: int, count: int) -> bool:
        """Whether these have come so far; `_all` asks all others."""
        target = self._low + count
        return all(target <= peer.words[word] < self._high for peer in peers)

    def _obstacle(self, oldest: Operation) -> tuple[int, int, Sequence[Peer]]:
        """The word, and the value that these peers must reach, before anything can move."""
        if self.arrived < self.posted and self.arrived == self.taken:
            needs = self._ring[self.arrived % SLOTS].needs if self._hearsay else ()
            if needs and self._all(POSTED, self.arrived + 1):
                return POSTED, self.arrived + 1, needs
            return POSTED, self.arrived + 1, self._peers
        if self.taken < self.posted:
            hop = self._ring[self.taken % SLOTS].hop
            if 0 <= hop < len(self._awaited):
                assert self._route is not None
                reached = self._route.hops[hop].level
                return level(reached) if reached else POSTED, self.taken + 1, self._awaited[hop]
            return REDUCED, self.taken + 1, self._peers
        if oldest.end < 0:
            return TAKEN, self.posted - SLOTS + 1, self._slot_readers()
        return TAKEN, oldest.end, self._peers

    def staging(self, index: int) -> int:
        """From which chunk of the staging on task `index` is staged."""
        return index % self._slots * self._most

    def lane(self, dtype: str, wire: str, count: int, slot: int) -> _Lane:
        lanes = self._lanes[slot]
        lane = lanes.get((dtype, wire, count))
        if lane is None:
            if len(lanes) >= _LANES:
                lanes.clear()
            with lasting():
                lane = lanes[dtype, wire, count] = _Lane(self, dtype, wire, count, slot)
        return lane
