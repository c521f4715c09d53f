"""What many ranks of a replica say is heard once, and nothing that matters is lost by that."""

from __future__ import annotations

import random

import pytest

from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control.leader import Leader, ToCoordinator
from ftcomm.control.replica_reports import PER_BEAT, RESUMED, Installs, Losses, Resumptions
from tests.rigs.rank_node import TIMEOUTS, running, said, view


def lost(shard: int, replica: int = 1, proof: bool = True) -> m.Suspect:
    return m.Suspect(replica, f"life-{replica}", f"rank {shard}", proof, shard)


def test_a_view_is_installed_when_the_last_rank_says_so_in_whatever_order() -> None:
    for seed in range(200):
        chance, ranks = random.Random(seed), 5
        installs, said = Installs(ranks), dict.fromkeys(range(ranks), 0)
        for _ in range(100):
            shard = chance.randrange(ranks)
            said[shard] += chance.randrange(2)
            by_all = installs.by_all(shard, said[shard])
            assert by_all == (set(said.values()) == {said[shard]} and installs.by_all(shard, said[shard])), seed


def test_a_thousand_ranks_that_lose_their_peers_are_heard_once() -> None:
    losses = Losses()
    assert [shard for shard in range(1000) if losses.is_news(lost(shard))] == [0]
    assert losses.is_news(lost(3, proof=False))  # that is another fact
    assert losses.is_news(m.Severed(1, "life-1", 4, "reset", 3))
    assert losses.is_news(lost(3, replica=2))
    assert list(losses.tick(view(2, (0, 2)))) == [], "the view has settled it"
    assert list(losses.tick(view(2, (0, 1)))) == []


def test_each_rank_of_a_life_is_told_of_in_the_end_if_no_view_settles_it() -> None:
    """The proof about the first may be wrong: that process answers, and another one has ended."""
    losses = Losses()
    told = [shard for shard in range(40) if losses.is_news(lost(shard))]
    while heard := [loss.shard for loss in losses.tick(view(1, (0, 1)))]:
        assert len(heard) <= PER_BEAT
        told += heard
    assert sorted(told) == list(range(40))
    assert losses.is_news(lost(0)), "who says so again, in a later beat, is heard again"


def test_who_repeats_a_report_in_the_same_beat_is_not_heard_again() -> None:
    losses = Losses()
    assert losses.is_news(lost(1))
    assert not losses.is_news(lost(1))
    assert list(losses.tick(view(1, (0, 1)))) == []


def test_who_reaches_a_replica_again_does_not_complain_of_it_afterwards() -> None:
    losses = Losses()
    for shard in range(3):
        losses.is_news(lost(shard, proof=False))
        losses.is_news(lost(shard, proof=True))
    losses.reached(1, 1)
    losses.reached(2, 2)
    heard = [(loss.shard, loss.proof) for loss in losses.tick(view(1, (0, 1))) if isinstance(loss, m.Suspect)]
    assert heard == [(2, False), (1, True), (2, True)]
    assert list(losses.tick(view(1, (0, 1)))) == []


def resumed(rank: int, epoch: int, took: float) -> m.Report:
    return m.Report(RESUMED, {"shard": rank, "epoch": epoch, "resume_ms": took})


def test_the_slowest_rank_speaks_for_all() -> None:
    said = Resumptions(3)
    assert said.by_all(0, resumed(0, 1, 1.0)) is None
    assert said.by_all(1, resumed(1, 1, 5.0)) is None
    assert said.by_all(0, resumed(0, 2, 4.0)) is None, "a later view"
    assert said.by_all(2, resumed(2, 2, 9.0)) is None
    assert said.by_all(1, resumed(1, 2, 5.0)) == resumed(2, 2, 9.0)
    assert Resumptions(1).by_all(0, resumed(0, 2, 4.0)) == resumed(0, 2, 4.0)


@pytest.mark.parametrize("connected", [True, False])
def test_a_rank_says_with_one_message_that_it_goes_on_and_how_long_that_took(connected: bool) -> None:
    """Its script may wait at a boundary. What no connection takes is said with the next one."""
    node = running(rank=1, ranks=2)
    later = view(2, (0, 1), ranks=2, step=None)
    node.from_up(m.NewView(later))
    node.boundary(3)
    node.quiesced(2, m.Progress(0, ()))
    (enter,) = node.from_peer(m.MemberProgress(1, "life-1", 2, m.Progress(0, ())), 0.0)
    report = m.Report(RESUMED, {"shard": 1, "epoch": 2})
    if not connected:
        node.up_lost("reset by peer")
    installed, passed, *_ = node.entered(enter.view, report)
    assert (installed, type(passed)) == (act.ToLeader(m.Installed(2, report)), act.Passed)
    again = node.up_opened()
    assert said(again, m.Installed) == [m.Installed(2)]
    assert said(again, m.Report) == ([] if connected else [report])


def test_a_leader_says_that_all_go_on_and_how_long_the_slowest_took() -> None:
    leader = Leader(0, "life-0", 3, TIMEOUTS)
    assert leader.from_rank(1, m.Installed(2, resumed(1, 2, 4.0))) == []
    assert leader.from_rank(2, m.Installed(2, resumed(2, 2, 9.0))) == []
    all_ = [ToCoordinator(m.Installed(2)), ToCoordinator(resumed(2, 2, 9.0))]
    assert leader.from_rank(0, m.Installed(2, resumed(0, 2, 5.0))) == all_


def test_a_leader_takes_a_report_that_comes_apart() -> None:
    """A rank whose connection was down says it so, before that it goes on or after."""
    leader = Leader(0, "life-0", 2, TIMEOUTS)
    assert leader.from_rank(0, m.Installed(2, resumed(0, 2, 4.0))) == []
    assert leader.from_rank(1, m.Installed(2)) == [ToCoordinator(m.Installed(2))]
    assert leader.from_rank(1, resumed(1, 2, 9.0)) == [ToCoordinator(resumed(1, 2, 9.0))]
    other = m.Report("data", {"epoch": 2})
    assert leader.from_rank(1, other) == [ToCoordinator(other)]
