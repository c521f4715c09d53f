"""What a thread that drives a GPU needs of the driver and of time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator

from ftcomm.errors import FtcommError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def until(done: Callable[[], bool], seconds: float) -> bool:
    """Whether it is within so many seconds."""
    deadline, pause = time.monotonic() + seconds, 20e-6
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """What this thread does is no part of any graph that is being captured, and allowed meanwhile."""
    mode = ctypes.c_int(_RELAXED)
    _exchange(mode)
    try:
        yield
    finally:
        _exchange(mode)  # it holds what was before


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _exchange(mode: ctypes.c_int) -> None:
    error = _libcuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if error:
        raise FtcommError(f"cuThreadExchangeStreamCaptureMode failed with CUresult {error}")
