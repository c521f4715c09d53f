"""The exchange of a member whose ops a kernel runs, as a state machine: what the words of its device say, and what is
written to them. `ftcomm.collective.core` is that of a member whose ops the host runs. Ops and views are accounted for
in `ftcomm.collective.member` for both, and what both do has one name:

    submit   an op is called                          launch    hand it to the device, which runs it
    capture  one is put into a graph                  progress  returns where this member stands, for the others
    freeze   a view change: launches hold
    enter    a new epoch, with what all have told     collect   return what the device has returned
    fail     the end                                  blocked   nothing has moved since the last look: who is to blame
                                                      abandon   the end of every op in flight, too

It has no thread and waits for nothing. `ftcomm.engines.gpu_kernel.monitor` looks at it from time to time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftcomm.collective.member import Entered, GroupMember
from ftcomm.collective.operation import mismatch
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE, ProtocolError
from ftcomm.collective.watchdog import Stall
from ftcomm.control.messages import Progress
from ftcomm.engines.gpu_kernel.collective import CollectiveOperation, detail_of
from ftcomm.engines.gpu_kernel.device import Device, KernelLaunch, Reached
from ftcomm.engines.gpu_kernel.gather import copies_detail
from ftcomm.engines.gpu_kernel.graphs import Running, captured, replay_of
from ftcomm.engines.gpu_kernel.launch import (
    account,
    collective_variant,
    counter,
    lane_word,
    missing,
    task_words,
    variant,
    view_words,
)
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.errors import FtcommError
from ftcomm.kernels.device.words import (
    BASE_OF,
    BEGUN,
    CALLED,
    CAPTURED,
    CLOSED,
    FINISHED,
    HEARD,
    KIND,
    LANES_AT,
    LINE,
    MISMATCHED,
    NEWS,
    NTODO,
    OPEN,
    POSTED,
    REDUCED,
    RETURNED,
    SEEN,
    SEEN_WHO,
    STARTED,
    TAKEN,
    TEMPLATE,
    TODO,
    TODO_OF,
)
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.base import Peer

_ALL = 1 << 62  # as HEARD: more than any op
_UNSIGNED = (1 << 64) - 1


class _Launched:
    """Keeps what is needed of a launch until its op has returned."""

    __slots__ = ("kept", "mark")

    def __init__(self, kept: Any) -> None:
        self.kept = kept  # a copy of the input, of an atomic op; else None
        self.mark: Any = None  # behind it, once it is launched


class DeviceCore:
    """The state machine that runs the ops of `member` on `device`. All calls are made with the mutex of the exchange
    held, but `launch`, one at a time."""

    def __init__(self, member: GroupMember[KernelOperation], device: Device) -> None:
        self.member, self.device = member, device
        self._inflight, self._watch = member.inflight, member.watch
        self.ctl = device.ctl
        self.called = 0  # ops; the template of the next
        self.launched: dict[int, _Launched] = {}  # by template
        self.captured: list[KernelOperation] = []  # by template - CAPTURED
        self.trusted: set[int] = set()  # templates of ops whose callers have gone on, while only their streams wait
        self.unheard: FtcommError | None = None  # the error of an op that no caller waits for
        self.reached: dict[int, Reached] = {}
        self.dead = False  # a kernel has failed, and with it all that ran
        self._replay: KernelOperation | None = None  # one that was broken off, first in flight until it has returned
        self._mark: tuple[Any, ...] = ()  # what had moved at the last look

    @property
    def still(self) -> bool:
        """Whether no launch touches memory; it stays so while OPEN is 0."""
        return self.dead or self.ctl[BEGUN] == self.ctl[FINISHED]

    def running(self) -> Running | None:
        """The op that has begun and not returned.

        A launch writes STARTED behind what it says of itself, and after the one before it has written RETURNED. So what
        is read between the two is of one launch, if RETURNED has not come to it.
        """
        ctl = self.ctl
        started = ctl[STARTED]
        running = Running(started - 1, ctl[TEMPLATE], ctl[BASE_OF])
        return running if ctl[RETURNED] < started else None

    # -- ops -----------------------------------------------------------------------------------------------------------

    def submit(self, op: KernelOperation) -> None:
        """Add an op, to be launched. Raises `ArgumentError` if there are too many."""
        now = self._watch.clock()
        if not self._inflight.ops:
            self._watch.began = now
        self._inflight.add(op)
        self._watch.recorder.called(op, now)
        op.template = self.called
        self.called += 1
        if self.member.view is not None:
            op.prepare(self.member.view)

    def capture(self, op: KernelOperation) -> GroupView:
        """Add an op of a graph, to be launched into that, in the view that is returned."""
        if self.member.view is None:
            raise FtcommError("an op cannot be captured before this member is in a view of the group")
        op.template = CAPTURED + len(self.captured)
        self.captured.append(op)
        return self.member.view

    def launch(self, op: KernelOperation, view: GroupView) -> None:
        """Launch the kernel of `op`. Raises `FtcommError`."""
        device = self.device
        kept = None
        chunks = len(op.finals)
        if op.atomic and chunks > 1:
            kept = device.empty(op.array)
            device.copy(op.array, kept)
        programs = device.programs(op.nbytes, min(chunks, device.layout.lanes), op.max_sms)
        self.launched[op.template] = launched = _Launched(kept)  # before it can return
        if isinstance(op, CollectiveOperation):
            moved = collective_variant(op, device.layout, view)
            arrays, call = (op.array, op.elements), (op.compared, op.template)
            launch = KernelLaunch(*arrays, *call, chunks, None, programs, moved, op.source, op.who, op.table)
        else:
            asked = variant(op, device.address(op.array), device.layout, view)
            launch = KernelLaunch(op.array, op.count, op.call, op.template, chunks, kept, programs, asked)
        device.launch(launch)
        if not device.blocking:
            launched.mark = device.mark()

    def collect(self) -> None:
        """Return what the device has returned."""
        flight, view = self._inflight, self.member.view
        self._hear()
        while view is not None and flight.ops and self._has_returned(flight.ops[0]):
            op = flight.ops[0]
            self._hear()
            if op.error is None:
                for task in op.tasks:
                    op.took(task, view)
            if op is not self._replay:
                self._watch.returns(op)
            else:
                self._watch.recorder.ended(op, self._watch.clock(), op.error is not None)
            self._returned(op)  # before anybody is told: who calls next then hears of its error
            flight.return_first()
        self._forget()

    def count(self) -> None:
        """Count the replays that have returned, all in this view. Nothing runs, and what has returned is collected."""
        flight, returned = self._inflight, self.ctl[RETURNED]
        if flight.returned < returned and self.member.view is not None:
            flight.narrow(self.member.view.contributors)
        flight.returned = returned

    def blocked(self) -> Stall | None:
        """Returns the stall, when it is due to be reported, of an op that has not moved since the last look. Raises
        `FtcommError` when it is time to give up."""
        running, view = self.running(), self.member.view
        lanes, layout = self.device.own.lanes, self.device.layout
        mark = (self.ctl[BEGUN], self.ctl[RETURNED], bytes(lanes[LANES_AT : LANES_AT + layout.lanes * LINE]))
        moved, self._mark = mark != self._mark, mark
        op = None
        if running is not None:
            op = self._op(running.template)
            if op is None and captured(running.template):
                op = self.captured[running.template - CAPTURED]
        if running is None or op is None or view is None or moved:
            self._watch.wait = None
            return None
        op.number = running.number
        others = {replica: reached.lanes for replica, reached in self.reached.items()}
        who = missing(op, lanes, others, layout, view, running.base)
        posted = lambda replica: sum(  # noqa: E731
            max(0, counter(others[replica], lane, POSTED, view.epoch)) for lane in range(layout.lanes)
        )
        return self.member.stalled(op, who, posted) if who else None

    # -- views ---------------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        self.member.freeze()
        if self.member.error is None:
            self.ctl[OPEN] = 0

    def progress(self) -> Progress:
        """Returns where this member stands, frozen and still. Raises the error with which it has failed."""
        if self.member.view is not None and self.member.error is None:
            self.collect()
            op = self.number()
            if op is not None:
                self._hear()
                if op.error is None:
                    account(op, self.device.own.lanes, self.device.layout, self.member.view, self.ctl[BASE_OF])
        return self.member.account(self.ctl[STARTED])

    def number(self) -> KernelOperation | None:
        """Number what is in flight, while nothing runs. Returns the op that has begun and not returned, which is the
        first, a replay, too."""
        flight, running = self._inflight, self.running()
        if running is not None and captured(running.template) and self._replay is None:
            self._replay = replay_of(self.captured[running.template - CAPTURED], self.device.layout.chunk)
            flight.ops.appendleft(self._replay)
        self.count()
        for number, op in enumerate(flight.ops, flight.returned):
            op.number = number
        flight.issued = flight.returned + len(flight.ops)
        return None if running is None else flight.ops[0]

    def enter(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Entered:
        """Enter the epoch of `view`. `peers` are all its other members, `progress` is of all its members."""
        flight, device = self._inflight, self.device
        stay = self.member.replace_peers(peers, device.leave)
        self.reached = {replica: device.reach(peer) for replica, peer in peers.items()}
        begun = self.number()
        ops = tuple(flight.ops)
        resumed, failed = self.member.enter(view, progress, stay)
        try:
            while failed is None and flight.ops and not flight.ops[0].tasks:  # all members hold it, or it failed
                self._watch.returns(flight.ops[0])
                flight.return_first()
        except ProtocolError as error:
            failed = error
        for op in ops:
            if op.done:
                self._returned(op)
        self._forget()
        if failed is None:
            self._open(view, begun if flight.ops and flight.ops[0] is begun else None)
        return Entered(resumed, failed)

    def _open(self, view: GroupView, begun: KernelOperation | None) -> None:
        """Raises the copy of our flags, which hosts read, then opens the epoch. The flags themselves are raised by the
        kernel, before it changes a byte (`ftcomm.kernels.device.attempts.raise_flags`)."""
        own, ctl = self.device.own, self.ctl
        for lane in range(self.device.layout.lanes):
            for word in (POSTED, REDUCED, TAKEN):
                own.lanes[lane_word(lane, word)] = view.epoch << COUNTER
        returned = self._inflight.returned
        news = view_words(view, {**self.reached, self.member.replica: own}, returned)
        if begun is not None:
            tasks = self._what_is_left(begun, view)
            news[TODO_OF], news[TODO], news[NTODO] = begun.number + 1, self.device.leave_tasks(tasks), len(tasks)
        for i, word in enumerate(news):
            ctl[NEWS + i] = word & _UNSIGNED
        ctl[RETURNED] = returned
        ctl[OPEN] = view.epoch

    def _what_is_left(self, op: KernelOperation, view: GroupView) -> tuple[int, ...]:
        """The tasks of an op whose launch waits for them. What is reduced again, the kernel first makes INPUT."""
        launched = self.launched.get(op.template)
        if launched is not None and launched.kept is not None:
            for task in op.tasks:
                if task.holder == REDUCE:
                    op.finals[task.chunk] = None
        return task_words(op, view)

    # -- the end -------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> bool:
        first = self.member.fail(error)
        if first:
            self.ctl[OPEN] = CLOSED & _UNSIGNED
            self.ctl[HEARD] = _ALL
        return first

    def abandon(self) -> None:
        self.member.abandon()
        self.launched.clear()
        self.captured.clear()

    # -- what the words say --------------------------------------------------------------------------------------------

    def _op(self, template: int) -> KernelOperation | None:
        """The op in flight of that launch; None of a replay that was not broken off."""
        return next((op for op in self._inflight.ops if op.template == template), None)

    def _has_returned(self, op: KernelOperation) -> bool:
        return op.number < self.ctl[RETURNED] if op is self._replay else op.template < self.ctl[CALLED]

    def _returned(self, op: KernelOperation) -> None:
        """Note that an op is no longer in flight. Its error is for the thread that waits for it, or else for the next
        caller."""
        if isinstance(op.error, FtcommError) and (op is self._replay or op.template in self.trusted):
            self.unheard = op.error
        if op is self._replay:
            self._replay = None

    def _hear(self) -> None:
        """Whether the members have made different calls; the device goes on when we have read them. The error of a
        replay has no op to wait in, and is heard when that has returned: it may yet be broken off."""
        ctl, view = self.ctl, self.member.view
        mismatched = ctl[MISMATCHED]
        if view is None or mismatched <= ctl[HEARD]:
            return
        op = self._op(ctl[TEMPLATE])
        if op is None and ctl[RETURNED] < mismatched:
            return
        calls = [(member, *self._seen(i, op)) for i, member in enumerate(view.members)]
        error = mismatch(calls)
        if op is None:
            self.unheard = error
        else:
            op.error = error
        ctl[HEARD] = mismatched

    def _seen(self, i: int, op: KernelOperation | None) -> tuple[int, int, int]:
        """(number, call, detail) of the call of member `i`, which was compared with `op`."""
        number, compared = self.ctl[SEEN + 2 * i], self.ctl[SEEN + 2 * i + 1]
        call = compared & (1 << KIND) - 1
        if call == compared:  # an all-reduce
            return number, call, copies_detail(call)
        who = self.ctl[SEEN_WHO + i] if isinstance(op, CollectiveOperation) else 0  # an all-reduce does not look at it
        return number, call, detail_of(compared, who)

    def _forget(self) -> None:
        first = next((op.template for op in self._inflight.ops if op is not self._replay), self.called)
        self.trusted = {template for template in self.trusted if template >= first}
        for template in [template for template in self.launched if template < first]:
            del self.launched[template]
