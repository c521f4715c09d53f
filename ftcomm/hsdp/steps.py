"""The step loop: membership changes between steps and nowhere else, and a replica that came back catches up in it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING

from ftcomm.hsdp.catchup import Fetch, Source
from ftcomm.hsdp.replay import Replay
from ftcomm.hsdp.state import Stateful, flatten

if TYPE_CHECKING:
    from ftcomm.control.views import View
    from ftcomm.group import Group

FINISH = 120.0  # seconds that the end of the loop waits for a state that is still on its way
REPLAY_SHARE = 0.25  # of a step's time that a joiner spends on replaying: everybody waits for it in the next op
REPLAY_LEAST = 2  # kept steps replayed at a boundary whatever they take: one is added each step, so it converges


def steps(total: int, state: Mapping[str, Stateful] | None = None, group: Group | None = None) -> Iterator[int]:
    """Yield the steps from 0 (or where a joining replica comes in) to `total` - 1; blocks at each boundary.

    `state` names what a replica that joins a running job must take over: the module, the optimizer, learning-rate
    schedulers, anything with `state_dict` and `load_state_dict`. It must hold the same names on every replica. A
    joiner fetches it in the background and runs the loop body all the while, its input left out of every reduction;
    its optimizers and schedulers do nothing until the state is there and then repeat what they missed (see replay.py),
    so at the end all replicas hold the same bits. For that,

    - a step must end with `optimizer.step()` on gradients that were reduced over the group: what the update uses must
      not depend on this replica's own weights;
    - optimizers and schedulers must be entries of `state` themselves, not hidden inside another object;
    - other entries are loaded as they were entering the step at which the replica joined, some steps ago; so let data
      be a function of the step, as the demo does. Without an optimizer in `state` the joiner waits for its state.

    The loop ends early when the replica is to leave (`group.drained`): when the job is drained, when a rank of it has
    called `group.leave()`, or on SIGTERM, which a loop in the main thread takes so for as long as it runs, unless the
    program has a handler of its own. No step is lost then. A second SIGTERM acts as it does by default.

    Raises `StateError` when the state cannot be fetched or does not fit, `ExpelledError` when the job went on without
    this replica.
    """
    if group is None:
        from ftcomm.group import default_group

        group = default_group()
    state = dict(state or {})
    source = Source(group, state)
    joiner: Joiner | None = None
    fresh = group.fresh
    step = group.step
    with _Leaving(group) as leaving:
        try:
            while True:
                leaving.at_boundary()
                view = group.boundary(step)
                if group.drained:
                    return
                source.at_boundary(step, view)
                if fresh:
                    fresh, joiner = False, Joiner(group, state, view, step)
                if joiner is not None:
                    joiner.at_boundary(step, view)
                if step >= total:
                    break
                yield step
                step += 1
            if joiner is not None:
                joiner.finish(step)
            source.linger(FINISH)
        finally:
            if joiner is not None:
                joiner.close()


class _Leaving:
    """Turns the first SIGTERM into a wish to leave, where that is ours to decide."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked = False
        self._ours = False

    def __enter__(self) -> _Leaving:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._ours = True
        return self

    def __exit__(self, *_: object) -> None:
        # A loop that is given up in the middle may end anywhere, in another thread too, when it is collected.
        if self._ours and signal.getsignal(signal.SIGTERM) == self._on_signal:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def at_boundary(self) -> None:
        """Ask at every boundary until we are out: a coordinator that was away has not heard us."""
        if self._asked:
            self._group.leave()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._asked = True
        self._group.leave()  # at once: this step may be long, and the boundary after it is agreed on meanwhile


class Joiner:
    """The catch-up of this replica, driven from the boundaries of the step loop."""

    def __init__(self, group: Group, state: Mapping[str, Stateful], view: View, step: int) -> None:
        self._group = group
        self._fetch = Fetch(group, view, step, flatten(state).skeleton) if state else None
        self._replay = Replay(state)
        self._loaded = self._fetch is None
        self._caught_up = False
        self._since = time.monotonic()

    def at_boundary(self, step: int, view: View) -> None:
        """Load what has arrived, replay a little of what was kept, and tell the coordinator once nothing is missing."""
        now = time.monotonic()
        last_step, self._since = now - self._since, now
        if self._fetch is not None and not self._loaded:
            self._fetch.agree(FINISH)
            self._fetch.keep(view.replicas)
            if not self._replay.possible:
                self._fetch.wait(FINISH)
            if self._fetch.ready():
                self._load(self._fetch)
        if self._loaded and not self._caught_up:
            self._replay.apply(REPLAY_LEAST, REPLAY_SHARE * last_step)
            self._check()
        if not self._caught_up:
            self._replay.begin()
        elif not self._group.contributes:
            self._group.caught_up(step)

    def finish(self, step: int) -> None:
        """After the last step: wait for what is missing and apply all of it. Blocks."""
        if self._fetch is not None and not self._loaded:
            self._fetch.wait(FINISH)
            self._load(self._fetch)
        if not self._caught_up:
            self._replay.apply(self._replay.behind, 0.0)
            self._check()

    def close(self) -> None:
        self._replay.restore()
        if self._fetch is not None:
            self._fetch.close()

    def _load(self, fetch: Fetch) -> None:
        started = time.monotonic()
        self._replay.load(fetch.take())
        self._loaded = True
        self._group.report(
            "state_fetched",
            step=fetch.step,
            bytes=fetch.nbytes,
            seconds=round(fetch.seconds, 4),
            load_seconds=round(time.monotonic() - started, 4),
            sources=",".join(map(str, sorted(fetch.sources))),
            replayed=self._replay.behind,
        )

    def _check(self) -> None:
        if self._replay.behind == 0:
            self._caught_up = True
            self._replay.restore()
