"""The data plane of a rank that moves no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftcomm.control import messages as m
from ftcomm.control.views import View


class IdleDataPlane:
    """A data plane that has nothing to do."""

    def freeze(self, quiesced: Callable[[], None]) -> None:
        quiesced()

    def wake(self) -> None: ...

    def wait_on(self, away: float) -> None: ...

    def progress(self) -> m.Progress:
        return m.Progress(0, ())

    def reach(self, view: View, severed: frozenset[int]) -> list[int]:
        return []

    def reaching(self) -> tuple[int, ...]:
        return ()

    def enter(self, view: View, progress: dict[int, m.Progress]) -> dict[str, int]:
        return {}

    def stalls(self, seconds: float) -> None: ...

    def awaited(self) -> dict[int, float]:
        return {}

    def hand_waits(self, seconds: Mapping[int, float]) -> None: ...

    def fail(self, reason: str, ending: m.Ending) -> None: ...
