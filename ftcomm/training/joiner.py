"""The catch-up of this replica, driven from the boundaries of the step loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ftcomm.control.rank_name import rank_name
from ftcomm.recorder.files import process_recorder
from ftcomm.recorder.layout import PhaseKind
from ftcomm.training.catchup import Fetch
from ftcomm.training.loss_scalers import LossScalers
from ftcomm.training.replay import Replay
from ftcomm.training.samples import ask, settle
from ftcomm.training.state import Stateful, entry, flatten
from ftcomm.training.unsaved import UnsavedBuffers

if TYPE_CHECKING:
    from ftcomm.control.views import View
    from ftcomm.groups.group import Group

log = logging.getLogger("ftcomm")

FINISH = 120.0  # s that the end of the loop waits for a state on its way
REPLAY_SHARE = 0.25  # the part of a step's time spent on replay, for which the others wait in the next op
REPLAY_LEAST = 2  # kept steps replayed at each boundary; one is added a step, so it converges


class Joiner:
    """Catches this replica up, from the boundary at which it joined until it contributes. Not thread-safe."""

    def __init__(
        self,
        group: Group,
        state: Mapping[str, Stateful],
        scalers: LossScalers,
        view: View,
        step: int,
        *,
        compares: bool = True,
    ) -> None:
        """`compares`: compare a sample of the state with that of another replica before this one contributes."""
        self._group, self._state, self._scalers, self._compares = group, state, scalers, compares
        self._fetch = Fetch(group, view, step, flatten(state).skeleton)
        self._replay = Replay(state)
        self._unsaved = UnsavedBuffers(state)
        self._loaded = False
        self._caught_up = False
        self._since = time.monotonic()
        self._boundary = step, view
        self._recorder = process_recorder()
        self._fetching: tuple[int, int] | None = self._recorder.begin(PhaseKind.FETCH, step=step)

    def agree(self, name: str) -> Any:
        """Block until a source has said what it has; returns the entry `name` of that state, which is plain. The scales
        of losses, and the settings of optimizers, are as there from then on."""
        self._fetch.agree(FINISH)
        self._scalers.take(self._fetch.skeleton)
        self._replay.take(self._fetch.skeleton)
        return entry(self._fetch.skeleton, name)

    @property
    def behind(self) -> bool:
        """Whether updates are kept, because some before them are missing."""
        return not self._caught_up

    def keep(self, action: Callable[[], object]) -> None:
        """Run `action` when the update of this step is replayed."""
        self._replay.keep(action)

    def scale(self, scale: float) -> None:
        """Set the scale of the learning rate for updates kept from now on."""
        self._replay.scale = scale

    def at_boundary(self, step: int, view: View) -> None:
        """Load what has arrived, replay some of what was kept, and tell the coordinator once nothing is missing."""
        now = time.monotonic()
        last_step, self._since = now - self._since, now
        self._boundary = step, view
        if not self._loaded:
            self._fetch.agree(FINISH)
            self._fetch.keep(view.replicas)
            if not self._replay.possible:
                if self._replay.lacks:
                    who, lacks = rank_name(self._group.replica, self._group.shard), ", ".join(self._replay.lacks)
                    log.info("%s: waits for the state, as %s cannot be loaded late", who, lacks)
                self._fetch.wait(FINISH)
            if self._fetch.ready():
                self._load()
        if self._loaded and not self._caught_up:
            with self._recorder.phase(PhaseKind.REPLAY, step=step, number=self._replay.behind):
                self._replay.apply(REPLAY_LEAST, REPLAY_SHARE * last_step)
            self._check()
            if self._caught_up:
                answer = ask(self._group, self._state, step, view, unsaved=self._unsaved)
                settle(self._group, self._state, step, answer, compares=self._compares)
        if not self._caught_up:
            self._replay.begin()
        elif not self._group.contributes:
            self._group.internals.caught_up(step)

    def finish(self) -> None:
        """Block for what is missing after the last step, and apply all of it."""
        if self._group.contributes:
            return
        step, view = self._boundary
        # At once: they wait for this alone.
        answer = ask(self._group, self._state, step, view, unsaved=self._unsaved, all_of_them=True)
        if not self._loaded:
            self._fetch.wait(FINISH)
            self._load()
        if not self._caught_up:
            with self._recorder.phase(PhaseKind.REPLAY, number=self._replay.behind):
                self._replay.apply(self._replay.behind, 0.0)
            self._check()
        settle(self._group, self._state, step, answer, compares=self._compares)

    def close(self) -> None:
        self._replay.restore()
        self._end_fetch(failed=True)
        self._fetch.close()

    def _end_fetch(self, *, failed: bool) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            self._recorder.finish(fetching, failed=failed)

    def _load(self) -> None:
        fetch, started = self._fetch, time.monotonic()
        self._end_fetch(failed=False)
        with self._recorder.phase(PhaseKind.LOAD, step=fetch.step, number=fetch.nbytes), self._scalers.kept():
            self._replay.load(fetch.take())
        self._loaded = True
        self._group.emit(
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
