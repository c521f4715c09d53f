"""A replica and the coordinator: what it hears of a replica, and what goes on while it is away."""

from __future__ import annotations

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Watchdog
from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.leader import ToRank
from ftcomm.errors import CollectiveTimeout
from tests.rigs.rank_node import TIMEOUTS, change, running, said, view


def test_the_coordinator_hears_at_once_that_the_job_is_in_its_next_step_loop() -> None:
    """Who comes back in less than a beat would else be told of the one before."""
    node = running()
    assert [said(node.boundary(step, loop), m.Heartbeat) for step, loop in ((0, 1), (1, 1), (2, 2), (3, 2))] == [
        [m.Heartbeat(0, loop=1)], [], [m.Heartbeat(2, loop=2)], [],
    ]  # fmt: skip


def test_waits_go_on_while_the_coordinator_is_not_heard_but_not_for_ever() -> None:
    """In rank 0, which is told nothing, and in another rank, which its leader tells of it."""
    leader, other = running(ranks=2), running(ranks=2, rank=1)
    went_on: list[float] = []
    other_went_on: list[float] = []
    heard = 20
    for second in range(heard + int(TIMEOUTS.absence) + 20):
        now = float(second)
        if second <= heard:
            leader.from_up(m.Ping())
        other.up_acknowledged(now)
        actions = leader.tick(now)
        for action in actions:
            if isinstance(action, ToRank) and isinstance(action.message, m.Ping):
                other.from_up(action.message)
        went_on += [action.seconds for action in actions if isinstance(action, n.WaitOn)]
        other_went_on += [action.seconds for action in other.tick(now) if isinstance(action, n.WaitOn)]
    assert went_on == [float(x) for x in range(int(TIMEOUTS.heartbeat) + 1, int(TIMEOUTS.absence) + 1)]
    assert all(action.away == 1.0 for action in actions if isinstance(action, n.WaitOn))
    assert other_went_on == went_on[1:], "it counts the second since the leader told it"
    leader.from_up(m.Ping())
    assert not [action for action in leader.tick(now + 1) if isinstance(action, n.WaitOn)]


def test_a_coordinator_that_takes_connections_and_says_nothing_is_not_heard() -> None:
    """Its views are older than the job. It decides nothing, so the ranks wait for one that does."""
    leader = running(ranks=2)
    seconds = range(int(TIMEOUTS.absence))
    waits = []
    for second in seconds:
        leader.up_opened()
        waits += [second] * any(isinstance(action, n.WaitOn) for action in leader.tick(float(second)))
        leader.up_lost("its connection closed")
    assert waits == [*seconds[int(TIMEOUTS.heartbeat) + 1 :]]


def test_a_coordinator_that_is_heard_now_and_then_does_not_let_waits_go_on_for_ever() -> None:
    leader, half = running(), 0
    watch = Watchdog(TIMEOUTS.op_floor, TIMEOUTS.op, TIMEOUTS.give_up, lambda: half / 2)
    op = Operation(np.zeros(8, np.float32), "float32", "sum")
    every = int(TIMEOUTS.heartbeat) + 4  # of which it is not known to be silent for 4 s
    for half in range(int(4 * TIMEOUTS.give_up)):
        if half % (2 * every) == 0:
            leader.from_up(m.Ping())
        for action in leader.tick(half / 2) if half % 2 == 0 else ():
            if isinstance(action, n.WaitOn):
                watch.coordinator_away(action.away)
        try:
            watch.waits(1, op, (1,))
        except CollectiveTimeout:
            assert half / 2 > TIMEOUTS.give_up + every
            return
    pytest.fail("it waits on")


def test_a_leader_that_does_not_hear_the_coordinator_is_told_by_a_member_that_the_job_goes_on_without_it() -> None:
    node = running((0, 1))
    later = m.RemovedIn(view(2, (1,)).bare())
    for second in range(int(TIMEOUTS.heartbeat) + 2):
        assert node.peer_answered(later) == []
        node.tick(float(second))
    assert any(isinstance(action, act.Failed) for action in node.peer_answered(later))


def test_a_leader_without_its_coordinator_trains_on() -> None:
    node = running()
    node.boundary(0)
    assert node.up_lost("gone") == []
    assert node.boundary(1) == [act.Passed(node.view, False)]  # type: ignore[arg-type]


def test_reports_while_the_coordinator_is_away_are_said_when_it_is_back() -> None:
    node = running()
    node.up_lost("gone")
    assert node.tell(m.Report("divergence", {"op": 3})) == []
    actions = node.up_opened()
    assert isinstance(said(actions, m.Join)[0], m.Join)
    assert actions[-1] == act.ToLeader(m.Report("divergence", {"op": 3}))
    assert node.tell(m.Report("divergence", {"op": 4})) == [act.ToLeader(m.Report("divergence", {"op": 4}))]


def test_the_first_boundary_is_told_to_the_coordinator_at_once() -> None:
    """Who joins waits for it; later ones go with the signs of life."""
    node = running()
    assert node.boundary(0) == [act.Passed(node.view, False), act.ToLeader(m.Heartbeat(0))]  # type: ignore[arg-type]
    assert node.boundary(1) == [act.Passed(node.view, False)]  # type: ignore[arg-type]


def test_the_end_of_a_member_is_said_again_to_a_coordinator_that_was_away() -> None:
    node = running()
    node.up_lost("gone")
    node.peer_lost(2, 1, "its process died", proof=True)
    ended = m.Suspect(2, "life-2", "its process died", True)
    assert node.up_opened()[1:] == [act.ToLeader(ended)]
    change(node, view(2, (0, 1), step=None))
    node.up_lost("gone again")
    assert node.up_opened()[1:] == []
