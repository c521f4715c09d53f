"""Decides what can be done next in one epoch, and on whom that waits. Pure: it reads words and decides; it writes no
memory, sends nothing and waits for nothing.

All ops of an epoch make one stream of tasks, which has the same task at the same index on every member. A task goes
through these stages at every member, in order; the counters `posted`, `arrived`, `taken` say how far each has come:

    post    stage my input of the chunk (or my FINAL chunk, if others are to copy it)
    arrive  all members have posted: on the first task of an op, compare the calls
    step    the work of the algorithm in between, see `ftcomm.collective.algorithms.base`; none or several
    take    the chunk becomes FINAL in the caller's buffer
    return  of an op: all members have taken all of its tasks

Before each stage there is a list of gates, and a gate opens when certain members have raised a word far enough:

    stage   gates                                                               opened by
    post    `_gates_of_slot`: between hosts, the slot has been read              TAKEN
    arrive  `Slot.arrival`: all have posted                                     POSTED
    step    the gate of the step                                                POSTED, REDUCED or a level
    take    the gate of the last step                                           POSTED, REDUCED or a level
    return  `taken_by_all`                                                      TAKEN

With a tree (`ftcomm.collective.tree`) what goes through it has other gates, and the first task of each op goes through
`gather` and `announce`. If that is not one of the tree, it waits for them only if the calls are not alike.

    stage     what then holds                                                   opened by
    gather    my subtree has posted                                             POSTED, GATHERED, of children
    announce  all have posted, and what I know of the calls I know of all       ANNOUNCED, of the parent
    settle    my subtree has taken                                              TAKEN, TAKEN_UP, of children
              all have taken                                                    TAKEN_DOWN, of the parent

Nothing else says who waits for whom. `to_post`, `to_arrive`, `to_step`, `to_take`, `is_stable` and those of the tree
ask whether the gates are open; `obstacle` names the first that is not, at which the thread waits; and the replicas
`behind` it are the ones to blame. The fast path waits at the same gates, see `ftcomm.collective.gate`.

Work is handed out as a `Slot`. `arrive`, `step` and `take` report it as done, and a posted task raises `posted`. In
between the caller moves the memory, and nothing else happens.

Words hold `epoch << COUNTER | counter` and only grow. Task `index` has descriptor `index % SLOTS` and, in the staging,
room `index % staged`. Between hosts there are as many rooms as the layout has slots, SLOTS or fewer, and among members
of one host NEAR. Each is of as many chunks as the layout has for a task.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ftcomm.collective.gate import Gate
from ftcomm.collective.operation import Operation, mismatch, unlike
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE, Task, side_by_side
from ftcomm.collective.schedule import AROUND, HIERARCHICAL, Batch
from ftcomm.collective.tree import ASKS, DIFFERS, FOUND, TreeBranch, tree
from ftcomm.errors import FtcommError
from ftcomm.kernels.epochs import COUNTS
from ftcomm.settings.tuning import Tuning
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import (
    ANNOUNCED,
    DESCRIPTORS,
    DETAIL,
    GATHERED,
    NEAR,
    POSTED,
    SLOTS,
    SPAN,
    TAKEN,
    TAKEN_DOWN,
    TAKEN_UP,
    Memory,
    descriptor,
)

if TYPE_CHECKING:
    from ftcomm.collective.algorithms import Algorithms
    from ftcomm.collective.algorithms.base import Algorithm, Array

# Tasks posted and not taken, within a host (docs/transports.md, Measured choices). Half of the slots is also what makes
# a slot free when its turn comes, without looking: I post task p after I have taken p - AHEAD, so all had posted that,
# so all had taken p - 2 * AHEAD, which had the same slot. Between hosts members look, and are ahead by as many tasks as
# there are slots.
AHEAD = NEAR // 2

_KEPT = 64  # courses of calls

LAST = COUNTS - (1 << 20)  # tasks of an epoch; the rest of the counter is never used


def used_up(replica: int, epoch: int) -> FtcommError:
    """Makes the error of an epoch that is used up. All members find it at the same task, so none looks like the cause
    of a stall."""
    return FtcommError(
        f"replica {replica}: {LAST:,} tasks were done in epoch {epoch}, all that it can count. A change of "
        "membership begins another: in a job that goes on for so long without one, restart a replica (ftcomm restart)"
    )


class Obstacle(NamedTuple):
    """An obstacle: what has to happen before anything can go on."""

    gate: Gate
    tasks: int  # it has to open for so many


class Course(NamedTuple):
    """The course of an op by one algorithm: what its tasks have alike, found once and not for each."""

    algorithm: Algorithm
    reduces: bool  # a task that has no holder goes by this algorithm, as it is
    arrivals: tuple[Sequence[Gate], Sequence[Gate]]  # gates before a task arrives, and before the first of the op does
    gates: Sequence[Gate]  # gates of the steps
    steps: int  # steps before the last one
    straight: bool  # readers get my input from the caller's buffer, not from the staging
    elements: int  # elements of a chunk; 0: a task has all of the op
    most: int  # the most chunks of a task


class Slot:
    """A task on its way. `op` and `here` are dropped when it is taken, since the arrays are the caller's."""

    __slots__ = (
        "algorithm",
        "arrival",
        "chunk",
        "count",
        "course",
        "first",
        "gates",
        "here",
        "index",
        "number",
        "op",
        "span",
        "steps",
        "straight",
        "task",
        "views",
    )

    index: int
    chunk: int  # the chunk of the staging where it begins, always the same of this slot
    op: Operation
    task: Task | Batch
    span: int  # how many chunks it has, from that of `task` on
    first: bool  # the first task of its op in this epoch
    algorithm: Algorithm
    arrival: Sequence[Gate]  # gates before it arrives; a chained algorithm has none
    gates: Sequence[Gate]  # gates of its steps
    number: int  # number of the next step
    steps: int  # steps before the last one, which does nothing
    straight: bool  # readers get my input from `here`, not from the staging
    here: Array  # the caller's buffer of this chunk; of a batch that of the whole op
    count: int  # elements of `here`
    views: Any  # the algorithm's views of the staging, for so many
    course: Course | None  # from which it has its algorithm and all that follows from that

    def __init__(self, chunk: int) -> None:
        self.chunk, self.course = chunk, None


class Pipeline:
    """The tasks of one epoch at one member. For one thread at a time, except `unposted`, to which any may append."""

    gate: type[Gate] = Gate

    def __init__(
        self,
        view: GroupView,
        segment: Memory,
        peers: Mapping[int, Peer],
        algorithms: Algorithms,
        straight_from: float = math.inf,
        delivered: Sequence[Gate] = (),
        compares: bool = False,
    ) -> None:
        """Begin an epoch. From ops of `straight_from` bytes on, what algorithms can send from the caller's array is not
        staged; `delivered` then opens when it has been sent. `compares`: members look at each other's results, so all
        have to keep pace."""
        self.view, self._compares = view, compares
        self.algorithms = algorithms
        self.posted = self.arrived = self.taken = 0
        self.stepped = 0  # every task before it is known to have no step left: `to_step` begins there
        self.unposted: deque[Operation] = deque()  # ops with tasks to post
        self.course: Course  # the course of the first of `unposted`, once it has posted a task
        self.peers = others = tuple(peers[m] for m in view.members if m != view.me)
        self._straight_from, self._delivered = straight_from, delivered
        # In a ring a member needs connections only to its neighbours, and hears of the others from the left.
        self.relayed = any(peer.heard is not peer.words for peer in others)
        self.far = not view.one_host
        # Slots of the staging that are used, and chunks of a task.
        layout = segment.layout
        near = layout.pair if len(view.members) == 2 else layout.near
        self.staged, self._most = (layout.slots, layout.span) if self.far else (NEAR, near)
        self.ahead = self.staged if self.far else AHEAD
        self.slots = self.empty_slots()
        # An op of so many chunks has a task for each, in its own slot. With more members that would make small slices.
        self._apart = SLOTS if self._most <= SPAN else 1
        self.posted_by_all = self._gate(POSTED, self.peers, relayed=True)
        self._arrival = (self.posted_by_all,)
        self.taken_by_all = self._gate(TAKEN, self.peers, relayed=True)
        self._taken_by_all = (self.taken_by_all,)
        # The place in the tree; None where there is none.
        self.place = tree(view.members, view.tuning.tree_fan)[view.me] if view.tree else None
        if self.place is not None:
            self._join(self.place, peers)
        served = frozenset() if compares else algorithms.served
        self._taken_by_served = self._gate(TAKEN, [peer for peer in self.peers if peer.replica in served])
        self._served_alone = bool(served)
        self._own = segment.words
        self._seen = {m: segment.words if m == view.me else peers[m].heard for m in view.members}
        self._heard = [peer.heard for peer in self.peers]
        self._gates = {
            algorithm: tuple(
                self._gate(step.word, [peer for peer in self.peers if peer.replica in step.members])
                for step in algorithm.steps
            )
            for algorithm in algorithms
        }
        self.courses: dict[tuple[int, int], Course] = {}  # of all-reduces, keyed by call and elements of a chunk
        self._detail = AROUND if view.ring else HIERARCHICAL if view.hosts else 0  # the detail of all-reduces

    def _join(self, place: TreeBranch, peers: Mapping[int, Peer]) -> None:
        """Take a place in the tree."""
        leaves, tops, above = ([peers[m] for m in who if m >= 0] for who in (place.leaves, place.tops, (place.parent,)))

        def gates(*words: tuple[int, Sequence[Peer]]) -> tuple[Gate, ...]:
            return tuple(self._gate(word, of) for word, of in words if of)

        self._below = [peer.words for peer in (*leaves, *tops)]
        self._above = [peer.words for peer in above]
        self._gathering = gates((POSTED, leaves), (GATHERED, tops))
        self._announcing = gates((ANNOUNCED, above))
        self._taking, self._settling = gates((TAKEN, leaves), (TAKEN_UP, tops)), gates((TAKEN_DOWN, above))
        self._meeting = (*self._gathering, *self._announcing)
        self._stability = (*self._taking, *self._settling)
        # Tasks before these are through, or have been taken without it, whether or not they are the first of an op.
        self.gathered = self.announced = 0
        self._unmet = 0  # tasks up to the last one of the tree that I have posted
        # The ends of ops of the tree that I have taken, and of which I do not know that all have.
        self.ends: deque[int] = deque()
        self.taken_below = self.settled = 0  # the last end that my subtree, and that all are known to have taken

    def _gate(self, word: int, peers: Iterable[Peer], *, relayed: bool = False) -> Gate:
        return self.gate(self.view, word, peers, relayed=relayed)

    # -- who waits for whom ------------------------------------------------------------------------------------------

    def _gates_of_slot(self) -> Sequence[Gate]:
        """Returns the gates of the members that must have taken what a slot holds before the next task is posted there
        between hosts.

        There a task takes as long as the way there and back, so members go as far as there are slots. Then that I have
        taken a task does not tell that others have taken an earlier one. Among members of one host it does.
        """
        before = self.posted - self.staged  # the task that had the slot
        if before >= 0 and (self._served_alone or self.place is not None):
            algorithm = self.slots[before % SLOTS].algorithm
            if self._served_alone and algorithm.chained:
                return (self._taken_by_served,)
            if algorithm is self.algorithms.tree and not self.asks(before):
                return self._stability
        return self._taken_by_all

    def obstacle(self, oldest: Operation) -> Obstacle:
        """Returns what stands in the way of `oldest`, the first op that has not returned, when nothing can be done."""
        if self.taken < self.posted:
            slot, count = self.slots[self.taken % SLOTS], self.taken + 1
            if self.arrived > self.taken and slot.gates:
                return Obstacle(slot.gates[min(slot.number, slot.steps)], count)
            gates = slot.arrival
            if self.place is not None and slot.first and slot.algorithm is not self.algorithms.tree:
                gates = (*gates, *self._meeting)
            return self._first_shut(gates, count, self.posted_by_all)
        if oldest.end < 0:
            count = self.posted - self.staged + 1
            return self._first_shut(self._gates_of_slot(), count, self.taken_by_all)
        return self._first_shut(self._gates_of_end(oldest.end), oldest.end, self.taken_by_all)

    @staticmethod
    def _first_shut(gates: Sequence[Gate], count: int, otherwise: Gate) -> Obstacle:
        last = gates[-1] if gates else otherwise  # all may be open by now; then nobody is behind
        return Obstacle(next((gate for gate in gates if not gate.is_open(count)), last), count)

    def _gates_of_end(self, end: int) -> Sequence[Gate]:
        """Returns the gates before an op returns that ends there."""
        if self.place is None or (end > self.settled and end not in self.ends):
            return self._taken_by_all
        return self._stability

    # -- what can be done ----------------------------------------------------------------------------------------------

    def to_post(self) -> Operation | None:
        """Returns the op whose next task may be posted. Called while there are `unposted` ops, and fewer tasks than
        `ahead` are posted and not taken."""
        if self.far:
            for gate in self._gates_of_slot():
                if not gate.is_open(self.posted - self.staged + 1):
                    return None
        op = self._next_op()
        if op is not None and self.place is not None and self._unmet > self.announced:
            # Only then all have been sent what I had to say of my call, which comes before what is posted to all.
            algorithm, _ = self.algorithms.of_task(self.algorithms.of(op), op.tasks[op.next])
            return op if algorithm is self.algorithms.tree else None
        return op

    def _next_op(self) -> Operation | None:
        if self.posted >= LAST:
            return None
        unposted = self.unposted
        while True:
            op = unposted[0]
            if op.next:
                return op if op.verified else None
            if op.schedule is not None:
                op.enter(self.view)
            if op.tasks:
                return op
            unposted.popleft().end = self.posted  # every member already holds all of it
            if not unposted:
                return None

    def begin(self, op: Operation) -> Slot:
        """Put the next task of `op`, the result of `to_post`, into its slot. It is to be staged, and `posted`
        raised."""
        tasks: Any = op.tasks
        index, first = self.posted, op.next
        slot = self.slots[index % SLOTS]
        slot.index, slot.number, slot.first = index, 0, not first
        if not first:
            self.course = self.course_of(op)
        course = self.course
        # The same on all members, since they have the same tasks.
        slot.span = span = 1 if course.most == 1 else side_by_side(tasks[first : first + course.most])
        op.next = stop = first + span
        if stop == len(tasks):
            op.end = index + 1
            self.unposted.popleft()
        self.bind(slot, op, tasks[first], course)
        if self.place is not None and slot.algorithm is self.algorithms.tree:
            self._unmet = index + 1
        return slot

    def course_of(self, op: Operation) -> Course:
        """Returns the course of an op. Those of all-reduces are kept, since a training repeats its calls."""
        if op.schedule is not None:
            return self._course(op, self.algorithms.of(op))
        key = op.call, op.elements
        found = self.courses.get(key)
        if found is None:
            if len(self.courses) >= _KEPT:
                self.courses.clear()
            found = self.courses[key] = self._course(op, self.algorithms.of(op))
        return found

    def tune(self, tuning: Tuning) -> None:
        """Use other switch points, while nothing is in flight."""
        self.algorithms.tune(tuning)
        self.courses.clear()

    def _course(self, op: Operation, algorithm: Algorithm) -> Course:
        """Makes the course of what goes by `algorithm` of an op."""
        gates: Sequence[Gate] = self._gates[algorithm]
        straight = algorithm.straight and op.nbytes >= self._straight_from
        if straight and not gates:
            gates = self._delivered
        chunks = 1 if op.schedule is not None else len(op.finals)
        return Course(
            algorithm,
            algorithm is not self.algorithms.copy and algorithm is not self.algorithms.batches,
            (() if algorithm.chained else self._arrival, self._arrival),
            gates,
            max(0, len(gates) - 1),
            straight,
            op.elements if chunks > 1 else 0,
            self._most if chunks > self._apart else 1,
        )

    def bind(self, slot: Slot, op: Operation, task: Any, course: Course) -> None:
        """Set what follows from the op, its course, and a task of `index` and `span` in the slot."""
        if not course.reduces or task.holder != REDUCE:
            algorithm, task = self.algorithms.of_task(course.algorithm, task)
            course = self._course(op, algorithm)
        here, elements = op.array, course.elements
        if elements:
            start = task.chunk * elements
            here = here[start : start + slot.span * elements]
        count = len(here)
        if slot.course is not course or slot.count != count:  # else the slot has had the like of it
            algorithm, _, _, slot.gates, slot.steps, slot.straight, _, _ = course
            slot.algorithm, slot.views = algorithm, algorithm.views(op, count, slot.chunk)
            slot.course, slot.count = course, count
        slot.op, slot.task, slot.here, slot.arrival = op, task, here, course.arrivals[slot.first]
        if self.place is not None and slot.algorithm is self.algorithms.tree:
            slot.arrival = self._arrival_by_tree(slot)

    def need(self, slot: Slot) -> list[Peer]:
        """Returns the peers that have to be reached before the task can arrive, since it reads the staging of members
        that only others tell of. Called where the view is `relayed`, after `Operation.keep`."""
        reads = slot.algorithm.reads(slot)
        needed = [peer for peer in self.peers if peer.replica in reads and peer.heard is not peer.words]
        if needed:
            slot.arrival = (self.posted_by_all, self._gate(POSTED, needed))
        return needed

    # -- the tree ----------------------------------------------------------------------------------------------------

    def _arrival_by_tree(self, slot: Slot) -> Sequence[Gate]:
        """Returns the gates before a task of the tree arrives. All are asked if something has to be compared."""
        return (*self._meeting, *self._arrival) if self.asks(slot.index) else self._meeting

    def asks(self, index: int) -> bool:
        """Whether all have learned that the calls or the results of this first task have to be compared. Then what is
        left to do of it is done without the tree, to which some may not have trusted it."""
        return index < self.announced and bool(self._own[descriptor(index % SLOTS) + DETAIL] & FOUND)

    def _next_first(self, index: int, end: int) -> int:
        """Returns the index of the first task of an op, from `index` on and before `end`; or `end`."""
        while index < end and not self.slots[index % SLOTS].first:
            index += 1
        return index

    def to_gather(self) -> Slot | None:
        """Returns the slot of the next first task that my subtree has posted."""
        self.gathered = index = self._next_first(max(self.gathered, self.taken), self.posted)
        if index == self.posted or not all(gate.is_open(index + 1) for gate in self._gathering):
            return None
        return self.slots[index % SLOTS]

    def compare_below(self, slot: Slot) -> bool:
        """Compare my call with those of my children, and note what is found. False: there is nothing to sum, since
        calls differ."""
        at = descriptor(slot.index % SLOTS)
        place, call, detail = self._own[at], self._own[at + 1], self._own[at + DETAIL]
        found = 0
        for words in self._below:
            theirs = words[at + DETAIL]
            found |= theirs & FOUND
            if words[at + 1] != call or (theirs ^ detail) & ~FOUND:
                found |= DIFFERS
            elif words[at] != place:
                found |= ASKS
        if found:
            self._own[at + DETAIL] |= found
        return not found & DIFFERS

    def to_announce(self) -> Slot | None:
        """Returns the slot of the next first task that I know all to have posted."""
        self.announced = index = self._next_first(max(self.announced, self.taken), self.gathered)
        if index >= self.gathered or not all(gate.is_open(index + 1) for gate in self._announcing):
            return None
        return self.slots[index % SLOTS]

    def hear_above(self, slot: Slot) -> bool:
        """Note what my parent has found of the calls. False: there is no result, since calls differ."""
        at = descriptor(slot.index % SLOTS) + DETAIL
        for words in self._above:
            if words[at] & FOUND:
                self._own[at] |= words[at] & FOUND
        return not self._own[at] & DIFFERS

    def announce(self, slot: Slot) -> None:
        """Note that I know of a task that all have posted it."""
        self.announced = slot.index + 1
        if slot.algorithm is self.algorithms.tree:
            slot.arrival = self._arrival_by_tree(slot)

    def to_settle(self) -> Iterator[tuple[int, int]]:
        """Yields (word, end) of what I come to know of the ends of ops, to be raised before the next is asked for."""
        ends = self.ends
        if ends[-1] > self.taken_below:
            for end in reversed(ends):
                if end <= self.taken_below:
                    break
                if all(gate.is_open(end) for gate in self._taking):
                    self.taken_below = end
                    yield TAKEN_UP, end
                    break
        for end in reversed(ends):
            if end <= self.taken_below and all(gate.is_open(end) for gate in self._settling):
                yield TAKEN_DOWN, end
                self.settled = end
                while ends and ends[0] <= end:
                    ends.popleft()
                return

    # -- the rest of its way -----------------------------------------------------------------------------------------

    def to_arrive(self) -> Slot | None:
        """Returns the slot of the next task, if all have posted it. Called while one has been posted here and has not
        arrived."""
        index = self.arrived
        slot = self.slots[index % SLOTS]
        for gate in slot.arrival:
            if not gate.is_open(index + 1):
                return None
        if self.place is not None and slot.first and index >= self.announced:
            # A member that owes its children an answer gives it before it can be done with the op.
            return slot if slot.algorithm is not self.algorithms.tree and self._alike(slot) else None
        return slot

    def arrive(self, slot: Slot) -> None:
        """Compare the calls if this is the first task of its op. On a mismatch the op ends with this task, on all
        members."""
        if slot.first:
            self._verify(slot)
        self.arrived = slot.index + 1

    def _verify(self, slot: Slot) -> None:
        op = slot.op
        by_tree = slot.algorithm is self.algorithms.tree and not self.asks(slot.index)
        if by_tree or self._alike(slot):
            op.verified, op.error = True, op.doom
            return
        at = descriptor(slot.index % SLOTS)
        detail_at = at + DETAIL
        calls = ((m, words[at], words[at + 1], words[detail_at] & ~FOUND) for m, words in self._seen.items())
        op.error = mismatch(calls, op.lag)
        op.end = slot.index + 1
        if self.unposted and self.unposted[0] is op:
            self.unposted.popleft()

    def _alike(self, slot: Slot) -> bool:
        """Whether all have made the same call, as all have said."""
        at = DESCRIPTORS[slot.index % SLOTS]
        call_at, detail_at = at + 1, at + DETAIL
        call, place, detail = slot.op.call, self._own[at], self._own[detail_at]
        for words in self._heard:
            if words[call_at] != call or words[at] != place or words[detail_at] != detail:
                break
        else:
            return True
        alike, detail = True, detail & ~FOUND
        for words in self._heard:
            if words[call_at] != call or words[detail_at] & ~FOUND != detail:
                return False
            alike = alike and words[at] == place
        return alike or not unlike([place, *(words[at] for words in self._heard)])

    def to_step(self) -> Iterator[Slot]:
        """Yields the slots of tasks that can take their next step, in order: none before the earlier ones of its
        algorithm.

        The word that a step raises tells of all tasks up to this one. A gate that was shut for the task before, when it
        was looked at, may be open for this one a moment later.
        """
        reached: dict[Algorithm, int] = {}  # the next step of the task before
        stepped = self.stepped
        if stepped < self.taken:
            stepped = self.taken
        for index in range(stepped, self.arrived):
            slot = self.slots[index % SLOTS]
            number, steps = slot.number, slot.steps
            if number < steps and slot.op.error is None:
                algorithm = slot.algorithm
                if (not reached or number < reached.get(algorithm, steps)) and slot.gates[number].is_open(index + 1):
                    yield slot
                    number = slot.number
                if number < steps:
                    reached[algorithm] = number
                    continue
            if index == stepped:
                stepped += 1
        self.stepped = stepped

    def step(self, slot: Slot) -> int:
        """Note that a step is done; returns the word that this member raises then, or 0."""
        number = slot.number
        slot.number = number + 1
        return slot.algorithm.steps[number].makes

    def to_take(self) -> Slot | None:
        """Returns the slot of the next task, if it has nothing left to wait for. Called while one has arrived and is
        not taken."""
        index = self.taken
        slot = self.slots[index % SLOTS]
        gates = slot.gates
        if not gates or slot.op.error is not None:
            return slot
        return slot if slot.number >= slot.steps and gates[-1].is_open(index + 1) else None

    def take(self, slot: Slot) -> None:
        """Note that a task is in the caller's buffer: INPUT becomes FINAL, or its op has failed."""
        if slot.op.error is None:
            slot.task.mark(slot.op, slot.span, self.algorithms.contributors)
        del slot.op, slot.here
        self.taken = slot.index + 1
        if self.place is not None and slot.algorithm is self.algorithms.tree and not self.asks(slot.index):
            self.ends.append(slot.index + 1)

    def is_stable(self, op: Operation) -> bool:
        """Whether all members are known to hold all of `op` FINAL, or to have failed it. Looks at the words now."""
        end = op.end
        if not 0 <= end <= self.taken:
            return False
        if self.place is None:
            return self.taken_by_all.is_open(end)
        return end not in self.ends and all(gate.is_open(end) for gate in self._gates_of_end(end))

    def stop(self) -> None:
        """Begin no task any more, and leave those unfinished that are not taken."""
        self.posted = self.arrived = self.taken
        if self.unposted:
            self._next_op()  # of ops before it nothing is left to do
            self.unposted.clear()

    def has_taken(self, op: Operation) -> bool:
        """Whether all that was left of `op` is taken here, so that others may return it. Called after `stop`."""
        return 0 <= op.end <= self.taken

    @property
    def counts(self) -> str:
        return f"{self.posted}/{self.arrived}/{self.taken}"

    # -- others ----------------------------------------------------------------------------------------------------

    def staging(self, index: int) -> int:
        """Returns the chunk of the staging where task `index` begins."""
        return index % self.staged * self._most

    def empty_slots(self) -> list[Slot]:
        """Makes the slots of the epoch. Of the staging each has always the same room, since `staged` divides SLOTS."""
        return [Slot(self.staging(number)) for number in range(SLOTS)]

    def detail(self, op: Operation) -> int:
        """Returns what members compare besides the call."""
        detail = self._detail if op.schedule is None else op.detail
        return detail | ASKS if self._compares and self.place is not None else detail

    def fill(self, index: int, op: Operation) -> Slot:
        """Go on with task `index`, the only one of `op`, after the fast path has posted it."""
        slot = self.slots[index % SLOTS]
        op.next = 1
        slot.index, slot.span, slot.first, slot.number = index, 1, True, 0
        self.bind(slot, op, op.tasks[0], self.course_of(op))
        return slot

    def close(self) -> None:
        """End the epoch, and hold no op."""
        self.unposted.clear()
        self.slots.clear()
