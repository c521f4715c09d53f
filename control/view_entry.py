"""Takes a rank from one view into the next: its data plane stops, says what it holds, reaches the members, goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from ftcomm.control import messages as m
from ftcomm.control.control_loop import ControlLoop
from ftcomm.control.data_plane import DataPlane, Unreachable
from ftcomm.control.failed_dials import cause_of
from ftcomm.control.peers import Peers
from ftcomm.control.replica_reports import RESUMED
from ftcomm.control.views import View

WAKE_AGAIN = 0.001  # s between wake-ups of a data plane that goes to sleep just as it is frozen: one may be missed
WAKE_UPS = 10  # then its longest sleep is over (`ftcomm.sync.futex.MAX_SLEEP`), and it has looked around


class ViewEntry:
    """Does what the node asks for while a view changes. In the event loop of the control thread. `joins` says whether
    the rank is in no view yet, `on_joined` that it is."""

    def __init__(
        self,
        control: ControlLoop,
        data_plane: DataPlane,
        peers: Peers,
        *,
        joins: Callable[[], bool],
        on_joined: Callable[[View], None],
    ) -> None:
        self._control, self._node, self._data_plane, self._peers = control, control.node, data_plane, peers
        self._joins, self._on_joined = joins, on_joined
        self._since = 0.0  # when this rank heard of the newest view

    def freeze(self, view: View) -> None:
        self._since = time.monotonic()
        still = asyncio.Event()
        self._peers.connect(view)

        def quiesced() -> None:
            still.set()
            if self._node.machine.view is not view:
                return
            try:
                progress = self._data_plane.progress()
            except Exception as error:  # the exchange has failed
                self._control.do(self._node.failed, str(error))
                return
            self._control.do(self._node.quiesced, view.epoch, progress, self._data_plane.awaited())

        self._data_plane.freeze(lambda: self._control.call(quiesced))
        self._control.spawn(self.wake(still))

    async def wake(self, still: asyncio.Event) -> None:
        for _ in range(WAKE_UPS):
            await asyncio.sleep(WAKE_AGAIN)
            if still.is_set():
                return
            self._data_plane.wake()

    async def enter(self, view: View, progress: dict[int, m.Progress]) -> None:
        told = time.monotonic()
        severed = frozenset(replica for replica, said in progress.items() if self._node.machine.replica in said.severed)
        while self._node.wants(view):
            try:
                local = await self._in_thread(self._data_plane.reach, view, severed)
                break
            except Exception as error:
                if self._node.wants(view) and not self._control.is_short(error):
                    if not isinstance(error, Unreachable):
                        raise
                    now, cause = time.monotonic(), cause_of(error)
                    self._control.do(self._node.unreachable, view.epoch, error.replica, str(error), cause, now)
                await asyncio.sleep(self._control.timeouts.beat)
        if not self._node.wants(view):
            return
        self._peers.watch(view, local)
        counts = self._data_plane.enter(view, progress)
        times = {"told_ms": 1e3 * (told - self._since), "resume_ms": 1e3 * (time.monotonic() - self._since)}
        joins = self._joins()
        report = m.Report(RESUMED, {"shard": self._node.shard, "epoch": view.epoch, **times, **counts})
        self._control.do(self._node.entered, view, None if joins else report)
        if joins:
            self._on_joined(view)

    def _in_thread(
        self, work: Callable[[View, frozenset[int]], Iterable[int]], view: View, severed: frozenset[int]
    ) -> asyncio.Future[Iterable[int]]:
        """Run work in a thread of its own. Raises `RuntimeError` if there is none to be had. The executor of the loop
        is shut down before the last view changes of an interpreter that exits."""
        future: concurrent.futures.Future[Iterable[int]] = concurrent.futures.Future()

        def run() -> None:
            try:
                result = work(view, severed)
            except BaseException as error:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # the caller has given up
                    future.set_exception(error)
            else:
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_result(result)

        threading.Thread(target=run, name="ftcomm-reach", daemon=True).start()
        return asyncio.wrap_future(future, loop=self._control.loop)
