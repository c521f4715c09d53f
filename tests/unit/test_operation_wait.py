"""Threads that wait for an op: whichever comes first, its end or they."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from ftcomm.collective import operation
from ftcomm.collective.operation import Operation
from tests.rigs.exchange import DEADLINE


@pytest.fixture
def op() -> Operation:
    return Operation(np.ones(4, np.float32), "float32", "sum")


def test_an_op_that_ends_just_as_a_thread_begins_to_wait(op: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has looked, and has not yet made the latch, which nobody releases then."""

    class Latch:
        def acquire(self, timeout: float) -> bool:
            raise AssertionError("it waits for an op that is done")

    def ends() -> Any:
        op.finish()
        return Latch()

    monkeypatch.setattr(operation, "_held", ends)
    assert op.wait()


def test_all_that_wait_go_on(op: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a latch to offer, and all look whether the op is done before it is."""
    offered, looked = threading.Barrier(3), threading.Barrier(4)

    class Latch:
        def __init__(self) -> None:
            self._lock = held()
            offered.wait(DEADLINE)

        def acquire(self, timeout: float) -> bool:
            looked.wait(DEADLINE)
            return self._lock.acquire(timeout=timeout)

        def release(self) -> None:
            self._lock.release()

    held = operation._held
    monkeypatch.setattr(operation, "_held", Latch)
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(op.wait()), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    looked.wait(DEADLINE)
    op.finish()
    for thread in threads:
        thread.join(DEADLINE)
    assert done == [True] * 3


def test_a_wait_that_ends_before_the_op(op: Operation) -> None:
    assert not op.wait(0.0)
    assert not op.wait(0.001)
    op.finish()
    assert op.wait(0.0)
