"""A replica that joins: its scripts prepare, it is told who is there, or it is sent away."""

from __future__ import annotations

from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control.leader import ToRank
from tests.rigs.rank_node import Process, address, change, running, said, view


def registered(ranks: int, rank: int = 0) -> Process:
    """Replica 0 joins a running job, which knows it: its scripts prepare."""
    node = Process(rank, ranks)
    node.up_opened()
    if rank == 0:
        for other in range(1, ranks):
            node.from_rank(other, m.Hello(other, address(0, other)), 0.0)
    seen = view(5, (0, 1, 2), ranks)
    assert act.Known(seen) in node.from_up(m.Registered(seen))
    return node


def test_a_replica_is_ready_when_the_scripts_of_all_its_ranks_are_and_says_so_to_a_new_coordinator() -> None:
    node = registered(ranks=3)
    assert not node.from_rank(2, m.Ready(), 0.0)
    waits = [a.message for a in node.tick(0.0) if isinstance(a, ToRank) and a.shard == 2]
    waits = [message for message in waits if not isinstance(message, m.Ping)]
    assert isinstance(waits[0], m.Queued)
    assert waits[0].reason.endswith("missing: 0, 1")
    assert not said(node.tell(m.Ready()), m.Ready)
    assert not said(node.tell(m.Ready()), m.Ready)
    assert [join.ready for join in said(node.up_opened(), m.Join)] == [False]  # type: ignore[attr-defined]
    assert said(node.from_rank(1, m.Ready(), 0.0), m.Ready) == [m.Ready()]
    assert [join.ready for join in said(node.up_opened(), m.Join)] == [True]  # type: ignore[attr-defined]


def test_a_rank_says_once_in_its_life_that_it_has_caught_up_and_again_with_each_new_connection() -> None:
    """Its script comes to that at each boundary until the replica contributes, in whatever view."""
    node = running(ranks=2, rank=1)
    assert said(node.tell(m.CaughtUp(5)), m.CaughtUp) == [m.CaughtUp(5)]
    assert node.tell(m.CaughtUp(6)) == []
    assert not said(change(node, view(2, (0, 1), 2, step=None)), m.CaughtUp)
    assert node.tell(m.CaughtUp(7)) == []
    for _ in range(2):
        node.up_lost("reset by peer")
        assert node.tell(m.CaughtUp(8)) == []
        assert said(node.up_opened(), m.CaughtUp) == [m.CaughtUp(5)]
    assert node.tell(m.CaughtUp(9)) == []


def test_what_a_rank_says_without_a_connection_it_says_with_the_next_one() -> None:
    node = running(ranks=2, rank=1)
    node.up_lost("reset by peer")
    node.tell(m.CaughtUp(5))  # which no connection takes
    assert said(node.up_opened(), m.CaughtUp) == [m.CaughtUp(5)]


def test_a_leader_tells_each_coordinator_that_its_replica_has_caught_up() -> None:
    """One may have died of which nobody knows whether it has heard so. Its ranks say it no more."""
    node = running(ranks=2)
    assert not said(node.tell(m.CaughtUp(5)), m.CaughtUp)
    assert said(node.from_rank(1, m.CaughtUp(5), 0.0), m.CaughtUp) == [m.CaughtUp(5)]
    for _ in range(2):
        node.up_lost("reset by peer")
        assert [join.caught_up for join in said(node.up_opened(), m.Join)] == [True]  # type: ignore[attr-defined]
    assert not said(node.tell(m.CaughtUp(6)), m.CaughtUp)


def test_who_prepares_is_told_once_who_is_there() -> None:
    """All ranks of a replica have got the first message of it, and a new coordinator says another."""
    node = registered(ranks=1)
    assert node.from_up(m.Registered(view(6, (0, 1)))) == []
    assert node.machine.preview == view(5, (0, 1, 2))


def test_who_is_dismissed_has_left_and_does_not_join_again() -> None:
    node = registered(ranks=2)
    actions = node.from_up(m.Dismissed("the job is being drained"))
    assert act.Passed(view(5, (0, 1, 2), 2), left=True) in actions
    assert ToRank(1, m.Dismissed("the job is being drained")) in actions
    assert not said(node.up_opened(), m.Join)
    assert node.from_up(m.Removed("later")) == [ToRank(1, m.Removed("later"))]


def test_who_is_in_no_view_and_was_told_of_none_fails_when_it_is_dismissed() -> None:
    node = Process()
    assert node.from_up(m.Dismissed("the job is being drained")) == [act.Failed("the job is being drained")]


def test_a_rank_hears_for_what_it_waits_and_why_it_ends() -> None:
    node = Process()
    for stage in m.Stage:
        assert node.from_up(m.Queued("news", stage)) == [act.JoinPending("news", stage)]
    over = m.Removed("over", m.Ending.TOO_LATE)
    assert node.from_up(over) == [act.Failed("over", m.Ending.TOO_LATE)]


def test_a_rank_that_prepares_without_its_leader_is_removed() -> None:
    assert registered(ranks=2, rank=1).up_lost("gone", refused=True, here=True) == [act.Failed("gone")]
