"""Who contributed to everything that was reduced: what a step's samples are counted by."""

from __future__ import annotations

import numpy as np

from ftcomm.collective.inflight import Inflight
from ftcomm.collective.operation import Operation
from ftcomm.errors import MismatchError
from ftcomm.transport.segment import CHUNK


def returned(flight: Inflight, *finals: tuple[int, ...], error: Exception | None = None) -> tuple[int, ...] | None:
    """An all-reduce with as many chunks, whose inputs are those, has returned."""
    op = Operation(np.zeros(len(finals) * CHUNK // 4, np.float32), "float32", "sum")
    assert len(op.finals) == len(finals)
    flight.add(op)
    op.finals[:] = finals
    op.error = error
    flight.return_first()
    return flight.common


def test_only_who_is_in_every_chunk_of_every_op_has_contributed() -> None:
    flight = Inflight()
    assert flight.common is None
    assert returned(flight, (0, 1, 2)) == (0, 1, 2)
    assert returned(flight, (0, 1, 2), (0, 2), (0, 1, 2)) == (0, 2)
    assert returned(flight, (0, 1, 2), (0, 1, 2)) == (0, 2), "one that was lost cannot come back"
    assert returned(flight, (2,)) == (2,)
    flight.common = None
    assert returned(flight, (0, 1)) == (0, 1)


def test_an_op_that_failed_says_nothing() -> None:
    flight = Inflight()
    returned(flight, (0, 1))
    assert returned(flight, (0,), error=MismatchError("different calls")) == (0, 1)
