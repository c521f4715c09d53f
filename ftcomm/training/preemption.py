"""Turns SIGTERM into a wish to leave at a step boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftcomm.groups.group import Group


class PreemptionHandler:
    """Turns the first SIGTERM into a wish to leave, if this process may decide that."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked = False
        self._ours = False
        self._process = os.getpid()

    def __enter__(self) -> PreemptionHandler:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._ours = True
        return self

    def __exit__(self, *_: object) -> None:
        # A loop that is given up may be collected, and so end, anywhere, also in another thread.
        if self._ours and signal.getsignal(signal.SIGTERM) == self._on_signal:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def at_boundary(self) -> None:
        """Ask at every boundary until this replica has left, since a coordinator that was away has not heard it."""
        if self._asked:
            self._group.leave()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != self._process:  # a forked child, such as the worker of a pool, just ends
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._asked = True
        self._group.leave()  # at once, so that the boundary is agreed on during a long step
