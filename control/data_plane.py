"""The interface of the data plane, as the control thread drives it, which so knows nothing of arrays or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from ftcomm.control import messages as m
from ftcomm.control.views import View


class WaitsFor(NamedTuple):
    """An op that makes no progress (or `ftcomm.control.blame.CHANGE`), and the replicas that have to move."""

    op: int
    replicas: tuple[int, ...]


class DataPlane(Protocol):
    """The data plane of a rank. None of its calls blocks except `reach`, which runs in a thread of its own."""

    def freeze(self, quiesced: Callable[[], None]) -> None: ...

    def wake(self) -> None:
        """Look around: it is to stop, or a beat has passed."""

    def progress(self) -> m.Progress: ...

    def awaited(self) -> Mapping[int, float]:
        """Returns for how many seconds it has waited for each replica. Called between `quiesced` and `enter`."""

    def hand_waits(self, seconds: Mapping[int, float]) -> None:
        """Let the next op wait for replicas as if it had waited for so many seconds already."""

    def wait_on(self, away: float) -> None:
        """Note that for so many seconds no member could be decided to be lost: in waits for one they do not count."""

    def reach(self, view: View, severed: frozenset[int]) -> Iterable[int]:
        """Make the memory of the view's members reachable; returns the replicas whose process lives on this host.
        `severed` are members that have lost their connection to this one: it is made again even if it looks whole here.
        Raises `Unreachable`."""

    def reaching(self) -> tuple[int, ...]:
        """The replica whose memory `reach` is about to reach, if any. Any thread."""

    def enter(self, view: View, progress: dict[int, m.Progress]) -> dict[str, int]:
        """Enter `view`. Returns what was in flight, for the log."""

    def stalls(self, seconds: float) -> WaitsFor | None:
        """Returns the op in flight that has made no progress for `seconds`, and the replicas that it waits for; None
        without one."""

    def fail(self, reason: str, ending: m.Ending) -> None: ...


class Unreachable(Exception):
    """The memory of `replica` cannot be reached."""

    def __init__(self, replica: int, reason: str) -> None:
        super().__init__(reason)
        self.replica = replica
