"""Connections for data that have ended between members that live: the coordinator makes them again by a view."""

from __future__ import annotations

import pytest

from ftcomm.control import messages as m
from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.severed import MOST
from tests.rigs.coordinator_script import Script


def severed(other: int, epoch: int, life: str = "") -> m.Severed:
    return m.Severed(other, life or f"life-{other}", epoch, "connection for data: reset")


def test_a_connection_for_data_that_ends_between_two_that_live_is_made_again_by_a_view_of_the_same() -> None:
    script = Script(3)
    script.answers = {"life-0", "life-2"}
    script.tell(0, severed(2, 1))
    assert script.newest == ((0, 1, 2), {0, 1, 2})
    assert script.epoch == 2
    assert script.views[-1].why == "connections for data are made again, between 0 and 2"
    assert not any(isinstance(message, m.Removed) for message in script.sent[2])
    script.tell(2, severed(0, 1))  # said before it heard of the view, in which that is mended
    script.install(0, 1, 2)
    script.tell(1, severed(2, 1))
    assert script.epoch == 2


def test_who_does_not_answer_may_hold_its_interpreter_and_goes_for_no_reset() -> None:
    script = Script(3)
    script.tell(0, severed(2, 1))
    assert len(script.views) == 1
    script.wait(0, 1)  # replica 2 says nothing: it may have ended, which is known in other ways
    assert len(script.views) == 1
    script.do(script.coordinator.receive(2, m.Heartbeat(4), 12.0))
    for conn in (0, 1):
        script.do(script.coordinator.receive(conn, m.Heartbeat(4), 12.0))
    script.do(script.coordinator.tick(12.1))
    assert script.newest == ((0, 1, 2), {0, 1, 2})
    assert script.epoch == 2


def test_who_has_died_or_finished_with_its_connections_is_no_reason_for_a_view() -> None:
    script = Script(3)
    script.lose(2, ProbeOutcome.ENDED)
    script.answers = {"life-0", "life-1", "life-2"}
    script.tell(0, severed(2, 1))
    script.install(0, 1)
    script.tell(1, m.Finished())
    script.tell(0, severed(1, 2))
    assert [view.replicas for view in script.views] == [(0, 1, 2), (0, 1)]


def test_two_that_are_reset_again_and_again_cannot_reach_each_other() -> None:
    script = Script(3)
    script.answers = {"life-0", "life-1", "life-2"}
    for epoch in range(1, MOST + 1):
        script.tell(0, severed(2, epoch))
        script.install(0, 1, 2)
    assert script.epoch == MOST + 1
    script.tell(1, severed(2, MOST + 1))  # of others, the first
    script.install(0, 1, 2)
    script.tell(0, severed(2, MOST + 2))
    script.tell(2, severed(0, MOST + 2))
    assert script.epoch == MOST + 2
    script.wait(0, 1, 2)
    assert script.newest == ((0, 1), {0, 1})
    assert "replicas 0 and 2 cannot reach each other" in script.views[-1].why


@pytest.mark.parametrize("comes_about", [True, False])
def test_a_change_under_way_is_given_up_for_a_connection_only_if_it_does_not_come_about(comes_about: bool) -> None:
    script = Script(2)
    script.coordinator.known.expected = 3
    script.answers = {"life-0", "life-1"}
    script.join_ready(12)
    script.promise(0, 1)
    assert script.newest == ((0, 1, 2), {0, 1})
    script.tell(0, severed(1, 1))  # they stand at the boundary, and make it again in the new view; or in an op
    assert script.epoch == 2
    if comes_about:
        script.install(0, 1, 12)
    script.wait(0, 1, 12)
    if comes_about:
        assert script.epoch == 2
    else:
        assert script.newest == ((0, 1), {0, 1})
        assert script.epoch == 3
        script.install(0, 1)
        script.promise(0, 1)
        assert script.newest == ((0, 1, 2), {0, 1})
