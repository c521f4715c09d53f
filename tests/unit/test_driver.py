"""What the driver's answers mean; the driver itself is asked in tests/gpu."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from ftcomm.engines.gpu import driver

_NOT_READY, _ILLEGAL_ADDRESS = 600, 700


def answering(code: int) -> Any:
    def name(error: int, text: Any) -> int:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_ILLEGAL_ADDRESS"
        return 0

    return lambda: SimpleNamespace(
        cuStreamQuery=lambda handle: code, cuEventQuery=lambda handle: code, cuGetErrorName=name
    )


@pytest.mark.parametrize("query", [driver.stream_ended, driver.event_ended])
def test_queries(query: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_libcuda", answering(0))
    assert query(0x7F00)
    monkeypatch.setattr(driver, "_libcuda", answering(_NOT_READY))
    assert not query(0x7F00)
    monkeypatch.setattr(driver, "_libcuda", answering(_ILLEGAL_ADDRESS))
    with pytest.raises(RuntimeError, match="Query: CUDA_ERROR_ILLEGAL_ADDRESS"):
        query(0x7F00)


class Libcuda:
    """Keeps what it was called with, and answers as a driver does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            given = [argument.value for argument in arguments if hasattr(argument, "value")]
            self.calls.append((name, given))
            if type(arguments[0]).__name__ == "CArgObject" and name not in ("cuCtxPopCurrent_v2", "cuDeviceGet"):
                arguments[0]._obj.value = 0x7F12_3456_789A
            if name == "cuIpcOpenMemHandle_v2":
                given.insert(0, bytes(arguments[1]))
            return 0

        return call

    __getitem__ = __getattr__


def test_addresses_and_handles_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes would pass a number as an int, and take a zero in a handle for its end."""
    libcuda, handle, far = Libcuda(), bytes([7, 0, *range(62)]), 0x7F12_3456_789A
    monkeypatch.setattr(driver, "_libcuda", lambda: libcuda)
    assert driver.open_ipc(handle) == driver.mapped_address(far) == driver.make_stream(-5) == far
    driver.close_ipc(far)
    driver.destroy_stream(far)
    assert libcuda.calls == [
        ("cuIpcOpenMemHandle_v2", [handle, 1]),
        ("cuMemHostGetDevicePointer_v2", [far, 0]),
        ("cuStreamCreateWithPriority", [1, -5]),
        ("cuIpcCloseMemHandle", [far]),
        ("cuStreamDestroy_v2", [far]),
    ]


def test_a_context_is_current_within_however_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    libcuda = Libcuda()
    monkeypatch.setattr(driver, "_libcuda", lambda: libcuda)
    context = driver.Context(3)
    with pytest.raises(ZeroDivisionError), context.current():
        raise ZeroDivisionError
    exchange = "cuThreadExchangeStreamCaptureMode"
    assert [name for name, _ in libcuda.calls] == [
        *("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", exchange, exchange, "cuCtxPopCurrent_v2")
    ]
    assert libcuda.calls[0][1] == [3]
    assert libcuda.calls[2][1] == [0x7F12_3456_789A]
