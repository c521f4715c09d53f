"""The thread that watches a device. It learns from words of the device which ops have returned, says when one stands
still, and launches what is left of an op after a view change. While something is in flight it looks every `_LOOK`
seconds; nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ftcomm.collective.inflight import Inflight
from ftcomm.collective.operation import mismatch
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE
from ftcomm.collective.roster import RosterTracker
from ftcomm.collective.watchdog import Due, Stall, Watchdog, gave_up, no_view
from ftcomm.engines.gpu_kernel.copies import Copies
from ftcomm.engines.gpu_kernel.device import Device, Launch, Reached
from ftcomm.engines.gpu_kernel.gather import detail_of
from ftcomm.engines.gpu_kernel.graphs import Running, captured, replay_of
from ftcomm.engines.gpu_kernel.launch import constants, lane_word, missing, task_words, view_words
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
    LANES_AT,
    LINE,
    MISMATCHED,
    OPEN,
    POSTED,
    REDUCED,
    RETURNED,
    SEEN,
    STARTED,
    TAKEN,
    TEMPLATE,
)
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.base import Peer

_LOOK = 0.001  # s
_LOOK_IDLE = 0.01  # s; for a replay, of which nobody tells
_ALL = 1 << 62  # as RETURNED: more than any op
_UNSIGNED = (1 << 64) - 1


class _Launched(NamedTuple):
    """What a repair needs of the first launch of an op."""

    constants: dict[str, Any]
    kept: Any  # a copy of the input, of an atomic op; else None
    mark: Any


class Monitor:
    """What a `DeviceExchange` is made of, which says what the arguments are, and when the device is frozen and resumed.

    `_mutex` guards the transitions, and `_launching`, taken before it, the order of launches; neither is held across a
    wait for others.
    """

    def __init__(
        self,
        replica: int,
        device: Device,
        *,
        deadline_floor: float,
        deadline_ceiling: float,
        give_up: float,
        on_stall: Callable[[Stall], None],
        on_failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.replica = replica
        self._device = device
        self._ctl = device.ctl
        self._watch = Watchdog(deadline_floor, deadline_ceiling, give_up)
        self._on_stall = on_stall
        self._on_failed = on_failed
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)  # an idle monitor waits on it
        self._launching = threading.Lock()  # taken before the mutex
        self._flight = Inflight()
        self._rosters = RosterTracker()
        self._called = 0  # ops; the template of the next
        self._launched: dict[int, _Launched] = {}  # by template
        self._captured: list[KernelOperation] = []  # by template - CAPTURED
        self._replay: KernelOperation | None = None  # one that was broken off, first in flight until it has returned
        self._draining = False  # somebody waits for the end of replays
        self._copies: Copies | None = None  # of the last epoch in which there were any
        self._copying = False
        self._trusted: set[int] = set()  # templates of ops whose callers have gone on, while only their streams wait
        self._unheard: FtcommError | None = None
        self._view: GroupView | None = None  # None: has never been in one
        self._peers: dict[int, Peer] = {}
        self._reached: dict[int, Reached] = {}
        self._frozen = True
        self._since = 0.0  # when it was frozen, or began to end
        self._quiesced: list[Callable[[], None]] = []
        self._late = False  # ops wait to be launched by the monitor: at submission they had no number yet
        self._repair: KernelOperation | None = None  # to be launched by the monitor
        self._repairing = False  # the monitor is at it
        self._dead = False  # a kernel has failed, and with it all that ran
        self._error: BaseException | None = None
        self._monitor: threading.Thread | None = None
        self._nudged = threading.Event()
        self._mark: tuple[Any, ...] = ()  # what had moved when the monitor looked last

    # -- with the mutex ----------------------------------------------------------------------------------------------

    def _quiet(self) -> bool:
        """Whether nothing of ours touches memory; it stays so while OPEN is 0.

        A launch that begins says so and then looks at OPEN again; we have written OPEN and look at what it says. To let
        go of a lock is what keeps the processor from doing the second before the first.
        """
        with _fence:
            pass
        ended = self._dead or self._ctl[BEGUN] == self._ctl[FINISHED]
        return ended and not self._repairing and not self._copying

    def _running(self) -> Running | None:
        """The op that has begun and not returned.

        A launch writes STARTED behind what it says of itself, and after the one before it has written RETURNED. So what
        is read between the two is of one launch, if RETURNED has not come to it.
        """
        ctl = self._ctl
        started = ctl[STARTED]
        running = Running(started - 1, ctl[TEMPLATE], ctl[BASE_OF])
        return running if ctl[RETURNED] < started else None

    def _op(self, template: int) -> KernelOperation | None:
        """The op in flight of that launch; None of a replay that was not broken off."""
        return next((op for op in self._flight.ops if op.template == template), None)

    def _number(self) -> KernelOperation | None:
        """Quiet: number what is in flight. The op that has begun and not returned is the first, a replay, too."""
        flight, running = self._flight, self._running()
        if running is not None and captured(running.template) and self._replay is None:
            self._replay = replay_of(self._captured[running.template - CAPTURED], self._device.layout.chunk)
            flight.ops.appendleft(self._replay)
        self._count()
        for number, op in enumerate(flight.ops, flight.returned):
            op.number = number
        flight.issued = flight.returned + len(flight.ops)
        return None if running is None else flight.ops[0]

    def _count(self) -> None:
        """Quiet, and what has returned is collected: the rest were replays, all in this view."""
        flight, returned = self._flight, self._ctl[RETURNED]
        if flight.returned < returned and self._view is not None:
            flight.narrow(self._view.contributors)
        flight.returned = returned

    def _collect(self) -> None:
        """Return what the device has returned."""
        flight, view = self._flight, self._view
        self._hear()
        while view is not None and flight.ops and self._has_returned(flight.ops[0]):
            op = flight.ops[0]
            self._hear()
            if op.error is None:
                for task in op.tasks:
                    op.finals[task.chunk] = task.contributors or view.contributors
            if op is not self._replay:
                self._watch.returns(op)
            self._returned(op)  # before anybody is told: who calls next then hears of its error
            flight.return_first()
        self._forget()

    def _has_returned(self, op: KernelOperation) -> bool:
        return op.number < self._ctl[RETURNED] if op is self._replay else op.template < self._ctl[CALLED]

    def _returned(self, op: KernelOperation) -> None:
        """It is in flight no more. What it failed with is for who waits for it, or else for the next who calls."""
        if isinstance(op.error, FtcommError) and (op is self._replay or op.template in self._trusted):
            self._unheard = op.error
        if op is self._replay:
            self._replay = None

    def _hear(self) -> None:
        """Whether the members have made different calls; the device goes on when we have read them. The error of a
        replay has no op to wait in, and is heard when that has returned: it may yet be broken off."""
        ctl, view = self._ctl, self._view
        mismatched = ctl[MISMATCHED]
        if view is None or mismatched <= ctl[HEARD]:
            return
        op = self._op(ctl[TEMPLATE])
        if op is None and ctl[RETURNED] < mismatched:
            return
        calls = [(member, ctl[SEEN + 2 * i], ctl[SEEN + 2 * i + 1]) for i, member in enumerate(view.members)]
        error = mismatch((member, number, call, detail_of(call)) for member, number, call in calls)
        if op is None:
            self._unheard = error
        else:
            op.error = error
        ctl[HEARD] = mismatched

    def _forget(self) -> None:
        first = next((op.template for op in self._flight.ops if op is not self._replay), self._called)
        self._trusted = {template for template in self._trusted if template >= first}
        for template in [template for template in self._launched if template < first]:
            del self._launched[template]

    def _replace(self, peers: Mapping[int, Peer]) -> None:
        for peer in self._peers.values():
            if all(peer is not kept for kept in peers.values()):
                self._device.leave(peer)
                peer.close()
        self._peers = dict(peers)
        self._reached = {replica: self._device.reach(peer) for replica, peer in peers.items()}

    def _enter(self, view: GroupView) -> None:
        """Our words first: who was left behind in another epoch has to see that we left it before any byte changes."""
        own = self._device.own.lanes
        for lane in range(self._device.layout.lanes):
            for word in (POSTED, REDUCED, TAKEN):
                own[lane_word(lane, word)] = view.epoch << COUNTER
        self._device.enter(view_words(view, {**self._reached, self.replica: self._device.own}), self._flight.returned)
        self._ctl[RETURNED] = self._flight.returned
        self._ctl[OPEN] = view.epoch

    def _end(self, error: BaseException) -> bool:
        """The engine fails with `error`, unless it has failed before."""
        first = self._error is None
        if first:
            self._error = error
            self._since = time.monotonic()
            self._repair = None
            self._ctl[OPEN] = CLOSED & _UNSIGNED
            self._ctl[RETURNED] = self._ctl[HEARD] = _ALL
            self._start_monitor()
        self._changed.notify_all()
        return first

    def _start_monitor(self) -> None:
        if self._monitor is None:
            self._monitor = threading.Thread(target=self._serve, name=f"ftcomm-monitor-{self.replica}", daemon=True)
            self._monitor.start()

    # -- the monitor -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while self._look():
            self._nudged.wait(_LOOK)
            self._nudged.clear()

    def _look(self) -> bool:
        """Wait for something to be in flight, then look once; False at the end."""
        say: Callable[[], None] | None = None
        with self._mutex:
            while not (self._flight.ops or self._quiesced or self._error):
                if not self._captured:
                    self._changed.wait()
                elif self._running() is not None or not self._changed.wait(_LOOK_IDLE):
                    break
            quiet = self._quiet()
            calls: list[Callable[[], None]] = []
            if quiet:
                calls, self._quiesced = self._quiesced, []
            waited = time.monotonic() - self._since
            failed = self._error is not None
            end = failed and (quiet or waited > self._watch.give_up)
            if end:
                self._abandon()
            elif self._frozen and not failed:
                self._collect()
                if self._view is not None and waited > self._watch.give_up and (self._flight.ops or self._draining):
                    self._number()
                    error = no_view((self._flight.ops or self._captured)[0], self._watch.give_up)
                    say = lambda: self._fail(error)  # noqa: E731
            elif not failed:
                self._collect()
                say = self._stalled()
            repair, self._repair = self._repair, None
            self._repairing = repair is not None
            late = self._late and self._view is not None
        for call in calls:
            call()
        if failed:
            return not end
        try:
            self._check()
            if repair is not None:
                self._relaunch(repair)
            if late:
                self._launch_late()
        except FtcommError as error:
            self._fail(error)
        finally:
            self._repairing = False
        if say is not None:
            say()
        return True

    def _check(self) -> None:
        """Raises `FtcommError` if a kernel has failed: then the device runs nothing, and what has begun never ends."""
        try:
            self._device.check()
        except FtcommError:
            self._dead = True
            raise

    def _abandon(self) -> None:
        """End every op in flight with the engine's error: nothing touches their arrays any more."""
        assert self._error is not None
        self._flight.abandon(self._error)
        self._launched.clear()
        self._captured.clear()
        self._watch.wait = None
        for peer in self._peers.values():
            peer.close()

    def _stalled(self) -> Callable[[], None] | None:
        """What is to be said of the op that runs, without the mutex; None if it moves."""
        running, view = self._running(), self._view
        lanes, layout = self._device.own.lanes, self._device.layout
        mark = (self._ctl[BEGUN], self._ctl[RETURNED], bytes(lanes[LANES_AT : LANES_AT + layout.lanes * LINE]))
        moved, self._mark = mark != self._mark, mark
        op = None
        if running is not None:
            op = self._op(running.template)
            if op is None and captured(running.template):
                op = self._captured[running.template - CAPTURED]
        if running is None or op is None or view is None or moved:
            self._watch.wait = None
            return None
        op.number = running.number
        others = {replica: reached.lanes for replica, reached in self._reached.items()}
        who = missing(op, lanes, others, layout, view.epoch, running.base)
        if not who:
            return None
        due = self._watch.waits(view.epoch, op, who)
        if due is Due.REPORT:
            return lambda: self._on_stall(Stall(view.epoch, op.number, who))
        if due is Due.GIVE_UP:
            return lambda: self._fail(gave_up(op, self._watch.give_up, who))
        return None

    def _fail(self, error: BaseException) -> None:
        """This member has found that it cannot go on."""
        with self._mutex:
            first = self._end(error)
        self.nudge()
        if first:
            self._on_failed(error)

    # -- launches ----------------------------------------------------------------------------------------------------

    def _launch(self, op: KernelOperation, view: GroupView) -> None:
        """With `_launching`."""
        device = self._device
        kept = None
        if op.atomic and len(op.finals) > 1:
            kept = device.empty(op.array)
            device.copy(op.array, kept)
        compiled = constants(op, device.address(op.array), device.layout, view)
        chunks = len(op.finals)
        programs = device.programs(op.array.nbytes, min(chunks, device.layout.lanes), op.max_sms)
        self._launched[op.template] = _Launched(compiled, kept, None)  # before it can return
        device.launch(Launch(op.array, op.count, op.call, op.template, 0, chunks, None, programs, compiled))
        if not device.blocking:
            self._launched[op.template] = _Launched(compiled, kept, device.mark())

    def _launch_late(self) -> None:
        """What was submitted before this member was in any view."""
        with self._launching:
            with self._mutex:
                ops = [op for op in self._flight.ops if op.template not in self._launched]
                view = self._view
            assert view is not None
            for op in ops:
                self._launch(op, view)
            self._late = False

    def _relaunch(self, op: KernelOperation) -> None:
        """What is left of an op that was broken off. By the monitor, in the epoch that `resume` has entered."""
        device, view = self._device, self._view
        launched = self._launched.get(op.template)
        assert view is not None
        if launched is not None:
            for task in op.tasks:
                if launched.kept is not None and task.holder == REDUCE and op.finals[task.chunk] is not None:
                    start = task.chunk * op.elements
                    stop = min(op.count, start + op.elements)
                    device.copy(launched.kept[start:stop], op.array[start:stop], repair=True)
                    op.finals[task.chunk] = None  # for the stream, which does all in order, it is INPUT from here on
            tasks = task_words(op, view)
            programs = device.programs(op.array.nbytes, min(len(tasks), device.layout.lanes), op.max_sms)
            repair = Launch(
                op.array, op.count, op.call, op.template, view.epoch, len(tasks), tasks, programs, launched.constants
            )
            device.launch(repair, repair=True)


_fence = threading.Lock()
