"""The waits: by the flag, by the abort word, by the deadline; one after the other, in one context."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ftcomm.kernels.device import DEVICE
from ftcomm.kernels.device import words as w
from ftcomm.kernels.device.signal import signal_kernel, wait_kernel
from ftcomm.kernels.epochs import COUNTER

pytestmark = pytest.mark.protocol

FLAG, ABORT, STATUS = 0, 1, 2
LOW, HIGH = 5 << COUNTER | 3, 6 << COUNTER


def wait(words: torch.Tensor, *, deadline: float = 0.0) -> int:
    at = words.data_ptr()
    wait_kernel[(1,)](
        at + 8 * FLAG, LOW, HIGH, at + 8 * ABORT, 0, int(deadline * 1e9), at + 8 * STATUS, THREADS=32, num_warps=1
    )
    settle()
    return int(words[STATUS])


def words_of_host() -> torch.Tensor:
    """Where the product has them: in pinned host memory, which the host writes while a kernel polls."""
    words = torch.zeros(8, dtype=torch.int64)
    return words if DEVICE == "cpu" else words.pin_memory()


def settle() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def signal(words: torch.Tensor, value: int) -> None:
    signal_kernel[(1,)](words.data_ptr() + 8 * FLAG, value, num_warps=1)
    settle()


def test_ends_of_a_wait() -> None:
    words = words_of_host()
    for early in (
        0,
        5 << COUNTER | 2,
        6 << COUNTER,
        4 << COUNTER | 9,
    ):  # nothing, too few, a later epoch, an earlier one
        words[FLAG] = early
        assert wait(words, deadline=0.01) == w.TIMED_OUT
    words[ABORT] = 1
    assert wait(words) == w.ABORTED
    for value in (LOW, LOW + 1, HIGH - 1):  # the flag counts, even beside an abort
        signal(words, value)
        assert int(words[FLAG]) == value
        assert wait(words) == w.OK


def test_a_wait_that_another_thread_ends() -> None:
    words = words_of_host()

    def come() -> None:
        time.sleep(0.05)
        words[FLAG] = LOW

    thread = threading.Thread(target=come)
    thread.start()
    assert wait(words, deadline=30.0) == w.OK
    thread.join()
