"""The calls of the CUDA driver that a thread which drives a GPU needs, and its waits.

Some calls of PyTorch and CuPy keep the interpreter lock while they are in the driver: queries of streams and events, to
choose a GPU, to make or destroy a stream, to open or close memory of another process. If the driver is busy there for
another thread (a full queue, a kernel that is being loaded), every Python thread would stand still, and with them the
one that can end what the driver waits for. Calls by ctypes let the lock go.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence

from ftcomm.errors import FtcommError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS, _NOT_READY = 0, 600  # CUresult
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_LAZY_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


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
    """Keeps what this thread does out of any graph that is being captured, and lets it be done meanwhile."""
    mode = ctypes.c_int(_RELAXED)
    _exchange(mode)
    try:
        yield
    finally:
        _exchange(mode)  # it holds what was before


class Context:
    """The primary context of a GPU, which PyTorch, CuPy and Triton share; kept for good. Raises `RuntimeError`, as all
    calls here do for what the driver refuses, with the name of the call and of the error."""

    def __init__(self, index: int) -> None:
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.pushed = Pushed(self._context)  # for a `with`: calls of the driver by this thread are for this GPU

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Calls of the driver by this thread are for this GPU, and `relaxed`."""
        with self.pushed, relaxed():
            yield


class Pushed:
    """Makes a context the current one of a thread, in a `with`. Any number of threads, and within each other."""

    def __init__(self, context: ctypes.c_void_p) -> None:
        library = _libcuda()
        self._context = context
        self._push, self._pop = library["cuCtxPushCurrent_v2"], library["cuCtxPopCurrent_v2"]
        self._popped = ctypes.byref(ctypes.c_void_p())  # the context that was current, which is of no use

    def __enter__(self) -> None:
        error = self._push(self._context)
        if error:
            raise RuntimeError(f"cuCtxPushCurrent_v2: {_name(error)}")

    def __exit__(self, *_: object) -> None:
        error = self._pop(self._popped)
        if error:
            raise RuntimeError(f"cuCtxPopCurrent_v2: {_name(error)}")

    def call(self, function: Callable[..., int], arguments: tuple[object, ...]) -> int:
        """Returns what a function of the driver returns in this context: what a `with` does, in half its time."""
        error = self._push(self._context)
        if error:
            raise RuntimeError(f"cuCtxPushCurrent_v2: {_name(error)}")
        try:
            return function(*arguments)
        finally:
            self._pop(self._popped)


# With a context that is current:


def stream_ended(stream: int) -> bool:
    """Whether all that was queued on it is done."""
    return _call("cuStreamQuery", ctypes.c_void_p(stream)) == _SUCCESS


def event_ended(event: int) -> bool:
    """Whether all work that was queued before the event was recorded is done."""
    return _call("cuEventQuery", ctypes.c_void_p(event)) == _SUCCESS


def make_stream(priority: int) -> int:
    """One that waits for no legacy stream; of the nearest priority that there is, the lower number first."""
    stream = ctypes.c_void_p()
    _call("cuStreamCreateWithPriority", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority))
    assert stream.value is not None
    return stream.value


def destroy_stream(stream: int) -> None:
    _call("cuStreamDestroy_v2", ctypes.c_void_p(stream))


def mapped_address(host: int) -> int:
    """The address for kernels of memory of the host that is registered."""
    address = ctypes.c_uint64()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), ctypes.c_void_p(host), ctypes.c_uint(0))
    return address.value


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class Kernel:
    """A kernel whose parameters are all of 64 bits, in a context that launches make the current one. For one thread at
    a time.

    `parameters`: the values that it begins with.
    """

    def __init__(self, context: Pushed, function: int, threads: int, shared: int, parameters: Sequence[int]) -> None:
        count, unit = len(parameters), ctypes.sizeof(ctypes.c_int64)
        self.parameters = (ctypes.c_int64 * count)(*parameters)
        self._context = context
        self._config = _LaunchConfig(1, 1, 1, threads, 1, 1, shared)
        self._programs, self._stream = 1, 0
        first = ctypes.addressof(self.parameters)
        addresses = (ctypes.c_void_p * count)(*range(first, first + count * unit, unit))
        self._launch = _libcuda()["cuLaunchKernelEx"]
        self._arguments = ctypes.byref(self._config), ctypes.c_void_p(function), addresses, None

    def launch(self, programs: int, stream: int) -> None:
        """Queue it with the values that its parameters have now."""
        if programs != self._programs:
            self._programs = self._config.grid_x = programs
        if stream != self._stream:
            self._stream = self._config.stream = stream
        error = self._context.call(self._launch, self._arguments)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx: {_name(error)}")


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def open_ipc(handle: bytes) -> int:
    """The address here of memory of another process."""
    address = ctypes.c_uint64()
    by_value = _IpcHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, ctypes.c_uint(_LAZY_PEERS))
    return address.value


def close_ipc(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _call(name: str, *arguments: object) -> int:
    """Returns _SUCCESS or _NOT_READY."""
    error: int = getattr(_libcuda(), name)(*arguments)
    if error not in (_SUCCESS, _NOT_READY):
        raise RuntimeError(f"{name}: {_name(error)}")
    return error


def _name(error: int) -> str:
    """Returns the name of an error, as `CUDA_ERROR_ILLEGAL_ADDRESS`."""
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
