"""Turns SIGTERM into a wish to leave at a step boundary, in this process and in no child that it forks.

When Python starts in a forked child it forgets what signals have come for its handlers. So one that is sent right
after the fork would be lost, and `multiprocessing.Pool` waits for ever for a worker that it has told to end. Therefore
SIGTERM is held back during a fork, and ends the child as by default.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftcomm.groups.group import Group


_forking = threading.local()  # .mask: the signals that are blocked in this thread when it does not fork


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
        if os.getpid() != self._process:  # a child that was forked behind the interpreter's back just ends
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._asked = True
        self._group.leave()  # at once, so that the boundary is agreed on during a long step


def _before_fork() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if getattr(handler, "__func__", None) is PreemptionHandler._on_signal:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _after_fork() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    if "mask" in _forking.__dict__:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
