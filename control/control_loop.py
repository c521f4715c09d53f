"""The event loop of a rank's control thread, and the only way from there to its node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ftcomm.control import actions as act
from ftcomm.control.failed_dials import shortage
from ftcomm.control.links import event_loop
from ftcomm.control.rank_errors import why_broken
from ftcomm.control.rank_name import rank_name
from ftcomm.control.rank_node import RankNode
from ftcomm.control.rank_with_leader import InProcessAction, RankWithLeader
from ftcomm.control.timeouts import Timeouts

log = logging.getLogger("ftcomm.control")


class ControlLoop:
    """Tells `node` of events, and lets `carry_out` do what it wants; runs what has to run in between. In the loop,
    unless said otherwise."""

    def __init__(
        self,
        node: RankNode,
        timeouts: Timeouts,
        carry_out: Callable[[Sequence[InProcessAction]], None],
    ) -> None:
        self.node, self.timeouts = node, timeouts
        self.with_leader: RankWithLeader | None = None  # the leader of the replica is in this process
        self.failed: act.Failed | None = None  # why the node has failed
        self.lock = threading.Lock()  # guards the nodes; never held during a wait
        self.loop = event_loop()
        self._carry_out = carry_out
        self._tasks: set[asyncio.Task[None]] = set()

    def inform(self, event: Callable[..., Sequence[InProcessAction]], *args: Any) -> Sequence[InProcessAction]:
        """Tell the node of an event; returns its actions. With the lock, so that a thread that finds that the node has
        failed also finds why. Any thread."""
        actions = event(*args)
        if self.with_leader is not None:
            actions = self.with_leader.carry(actions)
        self.failed = next((action for action in actions if isinstance(action, act.Failed)), self.failed)
        return actions

    def do(self, event: Callable[..., Sequence[InProcessAction]], *args: Any) -> None:
        """Tell the node of an event, and carry out its actions."""
        with self.lock:
            actions = self.inform(event, *args)
        self._carry_out(actions)

    def soon(self, event: Callable[..., Sequence[InProcessAction]], *args: Any) -> None:
        """`do` as soon as the loop comes to it. Any thread."""
        self.call(self.do, event, *args)

    def call(self, work: Callable[..., None], *args: Any) -> None:
        """Let the loop do `work`, unless it has ended. An error in it ends this rank: what the node wanted was not
        done, and another rank would wait for it. Any thread."""

        def call() -> None:
            try:
                work(*args)
            except Exception as error:
                self._broken(error)

        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(call)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task whose error ends this rank, since a control thread without one of its tasks must not seem
        alive."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._broken(error)

        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _broken(self, error: BaseException) -> None:
        log.error("internal error in the control thread", exc_info=error)
        self.do(self.node.failed, why_broken(error))

    def is_short(self, error: BaseException) -> bool:
        """Whether this process lacks what it needs to reach the others, and `error` says nothing else. It tries again;
        the node ends it if that lasts. What it lacks to serve or to watch others does not belong here."""
        lacks = shortage(error)
        if lacks:
            now = time.monotonic()
            if not self.node.is_short(now):
                log.warning(
                    "%s: this process is short of something, and tries again for %g s at most: %s",
                    *(rank_name(self.node.machine.replica, self.node.shard), self.timeouts.op, lacks),
                )
            self.do(self.node.short, f"it was short of something for {self.timeouts.op:g} s: {lacks}", now)
        return bool(lacks)
