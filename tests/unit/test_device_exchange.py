"""The exchange of a device, at one member, between its words and its calls: what is frozen when, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.control.messages import Progress
from ftcomm.device.exchange import DeviceExchange
from ftcomm.device.launch import lane_word
from ftcomm.device.layout import INTERPRETED
from ftcomm.errors import FtcommError
from ftcomm.kernels.device import INTERPRETED as INTERPRETING
from ftcomm.kernels.device import words
from ftcomm.transport.segment import Segment

if not INTERPRETING:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

from ftcomm.device.interpret import InterpretDevice

LANE_WORDS = [lane_word(lane, word) for lane in range(INTERPRETED.lanes) for word in range(3)]


class Device(InterpretDevice):
    """Says what the words of its lanes, and OPEN, were when the table of members was written."""

    entered: Sequence[int] = ()
    open = -1

    def enter(self, view: Sequence[int], number: int) -> None:
        self.entered, self.open = [self.own.lanes[i] for i in LANE_WORDS], self.ctl[words.OPEN]
        super().enter(view, number)


class Member:
    def __init__(self) -> None:
        self.device = Device(Segment(INTERPRETED))
        self.failed: list[BaseException] = []
        self.exchange = DeviceExchange(
            0,
            self.device,
            deadline_floor=30,
            deadline_ceiling=30,
            give_up=60,
            on_stall=lambda stall: None,
            on_failed=self.failed.append,
        )

    def freeze(self) -> Progress:
        quiet = threading.Event()
        self.exchange.freeze(quiet.set)
        assert quiet.wait(30)
        return self.exchange.progress()

    def resume(self, epoch: int, progress: Progress) -> None:
        self.exchange.resume(GroupView(epoch, 0, (0,), frozenset((0,))), {}, {0: progress})

    def submit(self, value: float = 1.0, **how: bool) -> Operation:
        op = Operation(np.full(100, value), "float64", "sum", INTERPRETED.chunk, on_device=True, **how)
        self.exchange.submit(op)
        return op


@pytest.fixture
def member() -> Iterator[Member]:
    member = Member()
    yield member
    member.exchange.fail(FtcommError("the test is over"))
    assert member.device.settle(30)
    member.device.close()


def test_words_are_raised_before_the_table_and_the_table_is_written_before_programs_may_run(member: Member) -> None:
    for epoch in (3, 7):
        member.resume(epoch, member.freeze())
        assert set(member.device.entered) == {epoch << 32}
        assert member.device.open == 0
        assert member.device.ctl[words.OPEN] == epoch
        assert member.submit().wait(30)


def test_an_op_that_is_launched_while_frozen_counts_as_not_called_and_runs_in_the_next_epoch(member: Member) -> None:
    member.resume(1, member.freeze())
    assert member.submit().wait(30)
    member.freeze()
    op = member.submit()
    assert not op.wait(0.3)
    progress = member.freeze()  # quiet at once: a launch that holds is no launch that runs
    assert (progress.returned, progress.ops) == (1, ())
    member.resume(2, progress)
    assert op.wait(30)
    assert (op.error, op.number, op.finals) == (None, 1, [(0,)])


def test_who_joins_late_numbers_its_ops_on(member: Member) -> None:
    """It has called two before it is in any view."""
    first, second = member.submit(), member.submit()
    progress = member.freeze()
    assert progress.fresh
    view = GroupView(5, 0, (0,), frozenset((0,)))
    member.exchange.resume(view, {}, {0: progress, 9: Progress(returned=40, ops=())})
    assert first.wait(30)
    assert second.wait(30)
    assert [first.number, second.number, member.submit().number] == [40, 41, 42]
    member.exchange.drain(30)
    assert member.freeze().returned == 43


def test_the_end_fails_what_holds_and_what_comes_later(member: Member) -> None:
    member.resume(1, member.freeze())
    member.freeze()
    held = member.submit()
    member.exchange.fail(FtcommError("that was it"))
    assert held.wait(30)
    later = member.submit()
    assert later.done
    assert str(held.error) == str(later.error) == "that was it"
    with pytest.raises(FtcommError, match="that was it"):
        member.exchange.progress()
    assert not member.failed  # it was told from outside


def test_a_kernel_that_breaks_is_the_end(member: Member) -> None:
    member.resume(1, member.freeze())
    member.device.copy(np.zeros(3), np.zeros(2))  # cannot be
    op = member.submit()
    assert op.wait(90)
    assert "a kernel has failed in the interpreter" in str(op.error)
    assert [str(error) for error in member.failed] == [str(op.error)]


def test_accounts_that_contradict_each_other_are_the_end(member: Member) -> None:
    member.resume(1, member.freeze())
    member.freeze()
    op = member.submit()
    member.exchange.resume(
        GroupView(2, 0, (0,), frozenset((0,))), {}, {0: Progress(returned=0, ops=()), 1: Progress(returned=1, ops=())}
    )
    assert op.wait(30)
    assert "returned elsewhere, but is not FINAL here" in str(op.error)
    assert len(member.failed) == 1
