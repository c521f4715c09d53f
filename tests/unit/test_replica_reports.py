"""What many ranks of a replica say is heard once, and nothing that matters is lost by that."""

from __future__ import annotations

import random

from ftcomm.control import messages as m
from ftcomm.control.replica_reports import PER_BEAT, RESUMED, Installs, Losses, Resumptions
from tests.rigs.rank_node import view


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
    assert said.by_all(resumed(0, 1, 1.0)) is None
    assert said.by_all(resumed(1, 1, 5.0)) is None
    assert said.by_all(resumed(0, 2, 4.0)) is None, "a later view"
    assert said.by_all(resumed(2, 2, 9.0)) is None
    assert said.by_all(resumed(1, 2, 5.0)) == resumed(2, 2, 9.0)
    assert Resumptions(1).by_all(resumed(0, 2, 4.0)) == resumed(0, 2, 4.0)
