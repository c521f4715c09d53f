"""Who is asked for which block of a state, and which snapshot a source keeps for whom."""

from __future__ import annotations

from ftcomm.control.views import Member, View
from ftcomm.training.block_scheduler import BlockScheduler, Snapshots


def view(epoch: int, step: int | None, behind: tuple[str, ...]) -> View:
    joiners = [Member(i + 1, life, (), False) for i, life in enumerate(behind)]
    return View(epoch, step, (Member(0, "0a", (), True), *joiners))


def test_what_a_lost_source_was_asked_for_is_asked_of_another() -> None:
    scheduler = BlockScheduler((0, 1), depth=2)
    scheduler.begin(4)
    assert (scheduler.ask(0), scheduler.ask(1)) == ([0, 1], [2, 3])
    assert scheduler.due(0) == 0
    scheduler.received(0)
    scheduler.drop(0, "gone")
    scheduler.drop(0, "twice")
    assert scheduler.ask(1) == []
    scheduler.received(1)
    assert scheduler.ask(1) == [1]
    assert not scheduler.idle(1)
    scheduler.received(1)
    scheduler.received(1)
    assert scheduler.complete
    assert not scheduler.hopeless
    assert scheduler.served == [0, 1]
    assert scheduler.why() == "replica 0: gone"


def test_without_a_source_there_is_no_hope() -> None:
    scheduler = BlockScheduler((3,))
    assert not scheduler.hopeless
    scheduler.drop(3, "gone")
    assert scheduler.hopeless


def test_a_joiner_gets_the_state_of_the_step_at_which_it_came_in() -> None:
    """It was taken in at step 1, but that was given up before it ran; then at step 2, in the same life."""
    kept: Snapshots[str] = Snapshots()
    kept.due(0, view(1, 0, ()))
    assert kept.due(1, view(2, 1, ("1b",))) == [(1, "1b")]
    kept.put([(1, "1b")], 1, "entering 1")
    assert kept.due(2, view(4, 2, ("1b",))) == [(1, "1b")]  # view 3 was without it
    assert kept.get((1, "1b"), 2) is None
    kept.put([(1, "1b")], 2, "entering 2")
    assert kept.get((1, "1b"), 2) == "entering 2"


def test_a_joiner_that_runs_keeps_its_snapshot_when_another_comes() -> None:
    kept: Snapshots[str] = Snapshots()
    kept.due(0, view(1, 0, ()))
    kept.put(kept.due(1, view(2, 1, ("1b",))), 1, "entering 1")
    assert kept.due(2, view(3, 2, ("1b", "2b"))) == [(2, "2b")]
    assert kept.get((1, "1b"), 1) == "entering 1"
    kept.only([0, 2])
    assert not kept
