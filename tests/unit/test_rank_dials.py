"""A rank that cannot reach a member: whom it blames for that, and after how long."""

from __future__ import annotations

import pytest

from ftcomm.control import messages as m
from ftcomm.control.blame import CHANGE
from ftcomm.control.failed_dials import Cause
from tests.rigs.rank_node import TIMEOUTS, running, said, ticks, view


def test_memory_that_cannot_be_reached_is_a_wait_for_its_owner() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    node.from_peer(m.MemberProgress(1, "life-1", 2, m.Progress(0, ())), 0.0)
    assert {x.replica for x in said(node.unreachable(2, 1, "no route", Cause.OTHER, 0.0), m.Suspect)} == {1}  # type: ignore[attr-defined]
    assert said(node.waits(0, ()), m.Stalled) == [m.Stalled(0, 2, CHANGE, (1,), False)]


def test_memory_that_is_reached_at_last_is_no_complaint_any_more() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    node.from_peer(m.MemberProgress(1, "life-1", 2, m.Progress(0, ())), 0.0)
    node.unreachable(2, 1, "no route", Cause.OTHER, 0.0)
    assert said(node.entered(view(2, (0, 1), step=None)), m.Reachable) == [m.Reachable(1)]


def test_a_port_that_hangs_up_is_tried_for_as_long_as_an_op_may_take_before_there_is_a_complaint() -> None:
    """A kernel lives there, and somebody without the token may flood it: that is no silence either."""
    node, now = running(), 0.0
    while now < TIMEOUTS.op:
        assert not said(node.dial_failed(1, 1, "reset", Cause.HUNG_UP, now), m.Suspect)
        assert not said(ticks(node, now, 1, (2,)), m.Suspect)
        now += 1.0
    assert said(node.dial_failed(1, 1, "reset", Cause.HUNG_UP, now), m.Suspect) == [
        m.Suspect(1, "life-1", "reset", False)
    ]
    assert not said(node.dial_failed(2, 1, "reset", Cause.HUNG_UP, now), m.Suspect), "each has its own time"


@pytest.mark.parametrize("over", ["a connection", "a pause"])
def test_a_port_that_hangs_up_now_and_then_has_its_time_again(over: str) -> None:
    node = running()
    for now in range(int(TIMEOUTS.op) - 10):
        node.dial_failed(1, 1, "reset", Cause.HUNG_UP, now)
    if over == "a connection":
        node.peer_opened(1)
    else:
        now += 10
    for later in range(now, now + 100):
        assert not said(node.dial_failed(1, 1, "reset", Cause.HUNG_UP, later), m.Suspect)


def test_a_dial_that_no_kernel_answers_is_a_complaint_at_once() -> None:
    assert said(running().dial_failed(1, 1, "no route", Cause.OTHER, 0.0), m.Suspect)


def test_who_is_short_of_something_blames_no_other_and_in_the_end_itself() -> None:
    """It cannot reach them: it neither complains of their silence, nor says that it waits for them."""
    node, now = running(), 0.0
    node.from_up(m.NewView(view(2, (0, 1, 2), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    assert node.short("no descriptors", now) == []
    assert said(node.waits(3, (1,)), m.Stalled) == [m.Stalled(0, 2, CHANGE, (), False)]
    while now < TIMEOUTS.op:
        assert node.short("no descriptors", now) == []
        actions = ticks(node, now, 1, ())
        assert not said(actions, m.Suspect)
        assert not said(actions, m.Stalled)
        now += 1.0
    assert said(node.short("no descriptors", now), m.Suspect) == [
        m.Suspect(0, "life-0", "its shard 0 is lost: no descriptors", True)
    ]


def test_who_is_short_of_something_no_more_waits_for_others_again() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1, 2), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    node.short("no descriptors", 0.0)
    ticks(node, 0.0, 10, (1, 2))
    assert said(node.waits(0, ()), m.Stalled) == [m.Stalled(0, 2, CHANGE, (1, 2), False)]


def test_who_takes_long_to_answer_for_its_memory_is_waited_for_and_not_complained_about() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1, 2), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    for replica in (1, 2):
        node.from_peer(m.MemberProgress(replica, f"life-{replica}", 2, m.Progress(0, ())), 0.0)
    assert node.reaching((2,)) == []
    actions = ticks(node, 0.0, TIMEOUTS.op_floor + 3, (1, 2))
    assert not said(actions, m.Suspect)
    assert {stall.waiting_on for stall in said(actions, m.Stalled)} == {(2,)}
