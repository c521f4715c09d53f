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
