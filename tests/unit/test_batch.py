"""A member that holds a part FINAL gives it to others as it is, and keeps it."""

from __future__ import annotations

import numpy as np

from ftcomm.collective import schedule
from ftcomm.collective.algorithms.batch import ScheduledBatches
from ftcomm.collective.inflight import Inflight
from ftcomm.collective.plan import GroupView
from ftcomm.collective.scheduled import ScheduledOperation
from ftcomm.control.messages import FailedOp, Final, OpProgress, Progress
from ftcomm.errors import LostError, MismatchError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.transport.segment import CHUNK, POSTED, SLOTS, Segment

ROSTER = (0, 1, 2)


def gathering(me: int) -> ScheduledOperation:
    plan = schedule.allgather(8, ROSTER, me, False, 64, 1)
    return ScheduledOperation(plan, np.full(8, me, np.uint8), np.full(24, 99, np.uint8), "uint8", "", 8, 1)


def test_what_the_lost_gave_to_one_goes_from_there_to_the_other() -> None:
    """2 is lost, 0 has its piece: in the next epoch 0 gives it to 1 by way of its slot, and takes nothing itself."""
    segments = {m: Segment() for m in (0, 1)}
    ops = {m: gathering(m) for m in (0, 1)}
    ops[0].array[16:] = 2
    ops[0].finals[2] = (2,)
    told = {
        0: Progress(0, (OpProgress(0, (Final((2,), bytes([4])),)),)),
        1: Progress(0, (OpProgress(0, ()),)),
    }
    views = {m: GroupView(2, m, (0, 1), frozenset({0, 1})) for m in (0, 1)}
    carriers = {m: ScheduledBatches(views[m], segments, Reducer()) for m in (0, 1)}
    for m, op in ops.items():
        op.number = 0
        tasks = op.resume(told, (0, 1))
        assert [(task.chunk, task.holder, task.contributors) for task in tasks] == [
            (0, 0, ()),
            (1, 1, ()),
            (2, 0, (2,)),
        ]
        op.enter(views[m])
    for slot, batch in enumerate(ops[0].tasks):
        for m, op in ops.items():
            carriers[m].pack(op, batch, slot)
    ops[0].array[16:20] = 7  # a sign that nobody writes there
    for slot, batch in enumerate(ops[0].tasks):
        for m, op in ops.items():
            carriers[m].unpack(op, batch, slot)
    assert ops[1].array.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert ops[0].array.tolist() == [0] * 8 + [1] * 8 + [7] * 4 + [2] * 4
    assert ops[0].finals == ops[1].finals == [(0,), (1,), (2,)]
    assert ops[1].spans() == ((0, 8, (0,)), (8, 16, (1,)), (16, 24, (2,)))


def test_the_own_input_is_put_by_when_it_would_be_overwritten() -> None:
    """In place, the third of three in the order of the sum."""
    segments = {m: Segment() for m in ROSTER}
    plan = schedule.reduce_scatter(4, ROSTER, 2, True, 1024, 4)
    x = np.array([0.0] * 8 + [2.0**-30, 1.0, 2.0, 3.0], np.float32)
    op = ScheduledOperation(plan, x, x, "float32", "sum", 4, 4)
    view = GroupView(1, 2, ROSTER, frozenset(ROSTER))
    op.enter(view)
    (batch,) = op.tasks
    at = next(move.at for move in batch.moves if move.takers == (2,))
    for m, value in ((0, 1.0), (1, -1.0)):
        segments[m].carve(POSTED, 0, at, 4, x.dtype)[...] = value
    ScheduledBatches(view, segments, Reducer()).unpack(op, batch, 0)
    assert x[8:].tolist() == [2.0**-30, 1.0, 2.0, 3.0]  # 1 - 1 + own; any other order would lose the first


def test_room_for_the_own_input_is_made_before_a_task_is_posted() -> None:
    segment = Segment(chunks=0)
    plan = schedule.reduce_scatter(1024, ROSTER, 2, True, CHUNK, 4)
    x = np.ones(3072, np.float32)
    op = ScheduledOperation(plan, x, x, "float32", "sum", 1024, 4)
    view = GroupView(1, 2, ROSTER, frozenset(ROSTER))
    op.enter(view)
    (batch,) = op.tasks
    carrier = ScheduledBatches(view, {0: Segment(), 1: Segment(), 2: segment}, Reducer())
    for slot in range(SLOTS):
        before = segment._lacking.count(0)
        carrier.pack(op, batch, slot)
        packed = segment._lacking.count(0)
        carrier.unpack(op, batch, slot)
        assert before < packed == segment._lacking.count(0)
        op.finals[2] = None


def test_an_op_that_failed_elsewhere_fails_with_that_error() -> None:
    for lost, kind in ((True, LostError), (False, MismatchError)):
        flight = Inflight()
        op = gathering(0)
        flight.add(op)
        told = Progress(0, (OpProgress(0, ()),), failed=(FailedOp(0, "so it is", lost),))
        flight.resume({0: flight.progress(), 1: told}, (0, 1))
        assert type(op.error) is kind
        assert flight.progress().failed == (FailedOp(0, "so it is", lost),)
        op.enter(GroupView(2, 0, (0, 1), frozenset({0, 1})))
        assert op.tasks == ()  # all know it


def test_what_a_member_had_returned_that_has_left_does_not_fail_with_what_comes_after_it() -> None:
    flight = Inflight()
    ops = [gathering(0), gathering(0), gathering(0)]
    for op in ops:
        flight.add(op)
    ops[0].finals = [(0,)] * len(ops[0].finals)
    flight.return_below(2)  # the second has failed there
    flight.abandon(RuntimeError("a member has closed the group after 2 ops"))
    assert [op.done for op in ops] == [True] * 3
    assert [op.error is None for op in ops] == [True, False, False]
