"""The thread that watches a device. It learns from words of the device which ops have returned, and says when one
stands still. While something is in flight it looks every `_LOOK` seconds; no op waits for it. It asks the driver
nothing, which may be stuck behind an op that needs this thread to go on: whether a kernel has failed another asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ftcomm.collective.plan import GroupView
from ftcomm.collective.watchdog import Stall, no_view
from ftcomm.control.running_time import RunningTime
from ftcomm.engines.gpu_kernel.core import DeviceCore
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.errors import FtcommError

_LOOK = 0.001  # s
_LOOK_IDLE = 0.01  # s; for a replay, of which the host is not told


class Monitor:
    """Watches `core`, with the lock of `changed`, on which it waits while nothing is in flight. Neither that nor
    `launching`, which is taken before it, is held across a wait for others."""

    def __init__(
        self,
        core: DeviceCore,
        changed: threading.Condition,
        *,
        on_stall: Callable[[Stall], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._core, self._member, self._changed = core, core.member, changed
        self._on_stall, self._on_failed = on_stall, on_failed
        self.launching = threading.Lock()  # the order of launches
        self.late = False  # ops wait to be launched by the monitor: at submission they had no number yet
        self.copying = False  # a thread moves memory by the copy engines
        self.awaits_replays = False  # a thread waits for the end of replays
        self._ran = RunningTime()
        self._since = 0.0  # when, in `_ran`, the core was frozen, or began to end
        self._quiesced: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._due = threading.Event()  # it is time to ask whether a kernel has failed
        self._over = False  # this thread ends

    # -- with the lock -----------------------------------------------------------------------------------------------

    def quiet(self) -> bool:
        """Whether nothing of ours touches memory; it stays so while OPEN is 0.

        A launch that begins says so and then looks at OPEN again; we have written OPEN and look at what it says. To let
        go of a lock is what keeps the processor from doing the second before the first.
        """
        with _fence:
            pass
        return self._core.still and not self.copying

    def when_quiet(self, call: Callable[[], None]) -> bool:
        """True if it is quiet; if not, `call` is called when it is."""
        if self.quiet():
            return True
        self._quiesced.append(call)
        self.start()
        return False

    def start(self) -> None:
        """Note that something has to be watched."""
        if self._thread is None:
            replica = self._member.replica
            threading.Thread(target=self._check, name=f"ftcomm-check-{replica}", daemon=True).start()
            thread = threading.Thread(target=self._serve, name=f"ftcomm-monitor-{replica}", daemon=True)
            thread.start()
            self._thread = thread
        self._changed.notify_all()

    def stops(self) -> None:
        """Note that the core is frozen, or begins to end."""
        self._since = self._ran.at(time.monotonic())

    def coordinator_away(self, seconds: float) -> None:
        """Let the wait for a view go on for so many seconds more."""
        self._since += seconds

    def end(self, error: BaseException) -> bool:
        """The core fails with `error`, unless it has failed before."""
        first = self._core.fail(error)
        if first:
            self.stops()
            self.start()
        self._changed.notify_all()
        return first

    # -- without it --------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self._woken.set()

    def fail(self, error: BaseException, *, tell: bool) -> None:
        """Fail. With `tell`, `on_failed` hears of it, if it has not before."""
        with self._changed:
            first = self.end(error)
        self.wake()
        if first and tell:
            self._on_failed(error)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while self._look():
            self._woken.wait(_LOOK)
            self._woken.clear()
        self._over = True
        self._due.set()

    def _look(self) -> bool:
        """Wait for something to be in flight, then look once; False at the end."""
        core = self._core
        stall: Stall | None = None
        given_up: FtcommError | None = None
        with self._changed:
            self._await_work()
            quiet = self.quiet()
            calls: list[Callable[[], None]] = []
            if quiet:
                calls, self._quiesced = self._quiesced, []
            waited = self._ran.at(time.monotonic()) - self._since > self._member.watch.give_up
            failed = self._member.error is not None
            end = failed and (quiet or waited)
            if end:
                core.abandon()
            elif not failed:
                core.collect()
                if self._member.frozen:
                    given_up = self._no_view() if waited else None
                else:
                    try:
                        stall = core.blocked()
                    except FtcommError as error:
                        given_up = error.with_traceback(None)  # with one it would keep the op
            view = self._member.view if self.late else None
        for call in calls:
            call()
        if failed:
            return not end
        self._due.set()
        try:
            if view is not None:
                self._launch_late(view)
        except FtcommError as error:
            self.fail(error, tell=True)
        if given_up is not None:
            self.fail(given_up, tell=True)
        elif stall is not None:
            self._on_stall(stall)
        return True

    def _await_work(self) -> None:
        core = self._core
        while not (self._member.inflight.ops or self._quiesced or self._member.error):
            if not core.captured:
                self._changed.wait()
            elif core.running() is not None or not self._changed.wait(_LOOK_IDLE):
                return

    def _no_view(self) -> FtcommError | None:
        """The error of ops that have waited for a view for too long; None if there are none."""
        core = self._core
        if self._member.view is None or not (self._member.inflight.ops or self.awaits_replays):
            return None
        core.number()
        return no_view((self._member.inflight.ops or core.captured)[0], self._member.watch.give_up)

    def _check(self) -> None:
        """The other thread. When a kernel has failed the device runs nothing, and what has begun never ends."""
        while not self._over:
            self._due.wait()
            self._due.clear()
            try:
                self._core.device.check()
            except FtcommError as error:
                self._core.dead = True
                self.fail(error, tell=True)
                return

    def _launch_late(self, view: GroupView) -> None:
        """Launch what was submitted before this member was in any view."""
        core = self._core
        with self.launching:
            with self._changed:
                ops: list[KernelOperation] = [
                    op for op in self._member.inflight.ops if op.template not in core.launched
                ]
            for op in ops:
                core.launch(op, view)
            self.late = False


_fence = threading.Lock()
