"""The exchange of a group at one member, where a kernel runs the ops. `ftcomm.collective.exchange` is that of a
member whose host drives them, also if a device reduces.

Ops are launched when they are submitted, and run in that order on the op stream of the device. What a view change does
to them:

    freeze    OPEN = 0: the launch that runs holds between two steps, one that comes later as it begins. Nothing of ours
              touches any memory when BEGUN == FINISHED
    progress  the op that has begun and not returned, and from the words of its lanes what of it is FINAL. Ops that were
              launched and have not begun count as not called: no member can hold a chunk of them
    enter     own words are raised to the epoch, the table of members and the tasks that are left of that op are
              written, OPEN = epoch: the launch goes on

What is captured into a graph is launched when that is replayed: see `ftcomm.engines.gpu_kernel.graphs`.

It consists of a core, which decides and launches (`ftcomm.engines.gpu_kernel.core`), and a thread that watches
(`ftcomm.engines.gpu_kernel.monitor`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ftcomm.collective.inflight import Resumed
from ftcomm.collective.member import GroupExchange, GroupMember
from ftcomm.collective.plan import GroupView
from ftcomm.collective.watchdog import Stall, Watchdog
from ftcomm.control.messages import Progress
from ftcomm.engines.gpu_kernel.copies import Copies
from ftcomm.engines.gpu_kernel.core import DeviceCore
from ftcomm.engines.gpu_kernel.device import Device
from ftcomm.engines.gpu_kernel.graphs import captured
from ftcomm.engines.gpu_kernel.monitor import Monitor
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError
from ftcomm.kernels.device.words import OK, RETURNED, TIMED_OUT
from ftcomm.process.own import own_process
from ftcomm.recorder.recorder import GroupRecorder
from ftcomm.transport.base import MirrorWriter, Peer

_MOMENT = 0.1  # s; between two looks whether a wait has to end


class DeviceExchange(GroupExchange[KernelOperation]):
    """The collectives of a member whose ops a kernel runs. Arguments are those of
    `ftcomm.collective.exchange.Exchange`, but that peers are reached by shared memory alone, and results are not
    compared."""

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
        recorder: GroupRecorder | None = None,
    ) -> None:
        watch = Watchdog(deadline_floor, deadline_ceiling, give_up, recorder=recorder)
        member = GroupMember[KernelOperation](replica, watch)
        super().__init__(member, threading.Condition(threading.Lock()))
        self.core = DeviceCore(member, device)
        self.monitor = Monitor(self.core, self._changed, on_stall=on_stall, on_failed=on_failed)
        self._on_failed = on_failed
        self._device = device
        self._copies: Copies | None = None  # of the last epoch in which there were any

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    def submit(self, op: KernelOperation) -> None:
        """Enqueue and launch, or capture. Does not block. If the engine has failed, `op.error` is set at once.

        Raises what an earlier op failed with whose caller did not wait for it.
        """
        own_process()
        self._raise_unheard()
        if self.capturing:
            self._capture(op)
            return
        core, monitor = self.core, self.monitor
        with self._changed:
            monitor.start()  # first: without a thread that watches it, no op begins
        try:
            with monitor.launching:
                with self._changed:
                    if self.member.error is not None:
                        op.finish(self.member.error)
                        return
                    core.submit(op)
                    view = self.member.view
                    late = monitor.late = monitor.late or view is None
                    self._changed.notify_all()
                if view is not None and not late:
                    self._device.follow()
                    core.launch(op, view)
        except ArgumentError:
            raise
        except BaseException as error:  # an interrupt: it may have been launched, or not
            interrupted = FtcommError(f"the engine was interrupted by {error!r}; this rank cannot go on")
            monitor.fail(interrupted, tell=True)
            raise

    def _capture(self, op: KernelOperation) -> None:
        core = self.core
        with self.monitor.launching:
            with self._changed:
                if self.member.error is not None:
                    op.finish(self.member.error)
                    return
                self.monitor.start()
                view = core.capture(op)
            self._device.follow()
            core.launch(op, view)

    def _raise_unheard(self) -> None:
        unheard, self.core.unheard = self.core.unheard, None
        if unheard is not None:
            raise unheard

    def run(self, op: KernelOperation) -> None:
        """Enqueue, and return when the caller may use the array, as the device understands that: when `op.done`, or
        when its current stream waits for the op, or when the graph does into which it is captured."""
        self.submit(op)
        self.wait(op)

    def wait(self, op: KernelOperation, timeout: float | None = None) -> bool:
        if op.done:
            return True
        own_process()
        in_graph = captured(op.template)
        launched = self.core.launched.get(op.template)
        if launched is not None and launched.mark is not None and (not in_graph or self.capturing):
            with self._changed:
                self.core.trusted.add(op.template)
            self._device.release(launched.mark)
            return True
        return in_graph or op.wait(timeout)

    @property
    def capturing(self) -> bool:
        return self._device.capturing()

    def wait_all(self, timeout: float | None = None) -> None:
        """Block until nothing is in flight, replays included. Raises `CollectiveTimeout` after `timeout` seconds, and
        what an earlier op failed with whose caller did not wait for it; not the errors of others."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        core = self.core
        self.member.inflight.wait_all(self._changed, timeout)
        if core.captured:
            self.monitor.awaits_replays = True
            try:
                while not self._device.wait_replays(min(_MOMENT, max(0.0, end - time.monotonic()))):
                    if time.monotonic() > end:
                        raise CollectiveTimeout(
                            f"a graph was still replaying op {core.ctl[RETURNED]} after {timeout:g}s"
                        )
            finally:
                self.monitor.awaits_replays = False
            with self._changed:
                if self.member.error is None:
                    core.collect()
                    core.count()
            self._raise_unheard()

    @property
    def give_up(self) -> float:
        """Seconds after which a wait for others is the end."""
        return self.member.watch.give_up

    def copy(self, roster: Sequence[int], body: Callable[[Copies], int]) -> int | None:
        """Run `body` on the copy engines among the members, if they are the `roster`. The epoch in which it has ended
        well; None if it was not begun, or was broken off with that epoch. Blocks. Raises the engine's error."""
        core, member, monitor = self.core, self.member, self.monitor
        with self._changed:
            if member.error is not None:
                raise member.error
            view = member.view
            if view is None or member.frozen or view.members != tuple(roster):
                return None
            if monitor.copying:
                raise FtcommError(
                    "another thread is copying; call allgather(copy_engine=True) from one thread at a time"
                )
            if self._copies is None or self._copies.epoch != view.epoch:
                me = view.members.index(self.replica)
                members = [core.reached.get(other, self._device.own) for other in view.members]
                stop = lambda: member.frozen or member.error is not None  # noqa: E731
                self._copies = self._device.copy_engines(me, members, view.epoch, stop)
            monitor.copying = True
            copies = self._copies
        try:
            status = body(copies)
        finally:
            with self._changed:
                monitor.copying = False
                self._changed.notify_all()
            self.wake()
        if status == TIMED_OUT:
            waited = f"allgather(copy_engine=True) waited {self.give_up:g} s; did all make the same call?"
            monitor.fail(CollectiveTimeout(waited), tell=True)
        return view.epoch if status == OK else None

    # -- the control side: none of these blocks ----------------------------------------------------------------------

    def coordinator_away(self, seconds: float) -> None:
        super().coordinator_away(seconds)
        with self._changed:
            self.monitor.coordinator_away(seconds)

    def freeze(self, quiesced: Callable[[], None]) -> None:
        with self._changed:
            self.monitor.stops()
            self.core.freeze()
            now = self.monitor.when_quiet(quiesced)
        if now:
            quiesced()
        else:
            self.wake()

    def wake(self) -> None:
        self.monitor.wake()

    def progress(self) -> Progress:
        with self._changed:
            return self.core.progress()

    def admit(self, writer: MirrorWriter) -> None:
        """Refuse a member that has found no other way than a connection: kernels read shared memory alone."""
        writer.close()

    def enter(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Resumed:
        with self._changed:
            core, monitor = self.core, self.monitor
            if not self.member.frozen or not monitor.quiet():
                raise RuntimeError("enter() before the engine has quiesced")
            if self.member.error is not None:
                return Resumed(0, 0, 0)
            resumed, failed = core.enter(view, peers, progress)
            if failed is not None:
                monitor.end(failed)
            monitor.start()
        self.wake()
        if failed is not None:
            self._on_failed(failed)
        return resumed

    def fail(self, error: BaseException) -> None:
        self.monitor.fail(error, tell=False)
