"""What the control thread drives, so that it need know nothing of arrays or memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ftcomm.control import messages as m
from ftcomm.control.views import View


class Engine(Protocol):
    """What the agent drives. None of these blocks, but `reach`, which runs in a thread of its own."""

    def freeze(self, quiesced: Callable[[], None]) -> None: ...

    def nudge(self) -> None: ...

    def progress(self) -> m.Progress: ...

    def reach(self, view: View) -> Iterable[int]:
        """Make the memory of the view's members reachable; returns the replicas whose process lives on this host.
        Raises `Unreachable`."""

    def reaching(self) -> tuple[int, ...]:
        """The replica whose memory `reach` is at, if any. For any thread."""

    def resume(self, view: View, progress: dict[int, m.Progress]) -> dict[str, int]:
        """Returns what was in flight, for the log."""

    def waiting(self, seconds: float) -> tuple[int, tuple[int, ...]] | None:
        """The op in flight that has made no progress for `seconds`, and the replicas it waits for; None without one."""

    def fail(self, reason: str, ending: m.Ending) -> None: ...


class Unreachable(Exception):
    """The memory of `replica` cannot be reached."""

    def __init__(self, replica: int, reason: str) -> None:
        super().__init__(reason)
        self.replica = replica
