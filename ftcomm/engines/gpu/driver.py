"""What a thread that drives a GPU needs of the driver and of time.

PyTorch's and CuPy's queries of streams and events keep the interpreter lock while they are in the driver. If the driver
is busy there for another thread (a full queue, a kernel that is being loaded), every Python thread would stand still,
and with them the one that can end what the driver waits for. Calls by ctypes let the lock go.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator

from ftcomm.errors import FtcommError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS, _NOT_READY = 0, 600  # CUresult


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


def stream_ended(stream: int) -> bool:
    """Whether all that was queued on it is done. A CUDA context is current. Raises `RuntimeError` if one is lost."""
    return _ended("cuStreamQuery", stream)


def event_ended(event: int) -> bool:
    """Whether what it was recorded behind is done. A CUDA context is current. Raises `RuntimeError` if one is lost."""
    return _ended("cuEventQuery", event)


def _ended(call: str, handle: int) -> bool:
    error: int = getattr(_libcuda(), call)(ctypes.c_void_p(handle))
    if error not in (_SUCCESS, _NOT_READY):
        raise RuntimeError(f"{call}: {_name(error)}")
    return error == _SUCCESS


def _name(error: int) -> str:
    """As in `CUDA_ERROR_ILLEGAL_ADDRESS`."""
    name = ctypes.c_char_p()
    if _libcuda().cuGetErrorName(error, ctypes.byref(name)) or name.value is None:
        return f"CUresult {error}"
    return name.value.decode()


@functools.cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _exchange(mode: ctypes.c_int) -> None:
    error = _libcuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if error:
        raise FtcommError(f"cuThreadExchangeStreamCaptureMode: {_name(error)}")
