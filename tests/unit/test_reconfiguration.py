"""What is proposed at a boundary, and what is left of a proposal that fails."""

from __future__ import annotations

from ftcomm.control.reconfiguration import given_up, wanted
from ftcomm.control.views import Member, View


def member(replica: int, contributing: bool = True) -> Member:
    return Member(replica, f"life-{replica}", (), contributing)


def view(*members: Member, proposal: int = 0) -> View:
    return View(5, None, tuple(members), "", proposal)


def test_joining_contributing_and_leaving_go_together() -> None:
    before = view(member(0), member(1), member(2, contributing=False))
    joins, contributes, leaves = wanted(before, {3: member(3)}, caught_up={2}, leaving={1}, draining=False)
    assert (set(joins), contributes, leaves) == ({3}, {2}, {1})


def test_the_last_one_that_holds_the_state_does_not_leave_yet() -> None:
    before = view(member(0), member(1, contributing=False))
    assert wanted(before, {}, caught_up=set(), leaving={0}, draining=False)[2] == frozenset()


def test_all_may_leave_together_and_nobody_joins_them() -> None:
    before = view(member(0), member(1))
    for leaving, draining in (({0, 1}, False), (set(), True)):
        joins, contributes, leaves = wanted(before, {2: member(2)}, set(), leaving, draining)
        assert (joins, contributes, leaves) == ({}, frozenset(), {0, 1})


def test_a_withdrawn_change_changes_nothing() -> None:
    before = view(member(0), member(1))
    change = view(member(0), member(2), proposal=9)
    assert given_up(change, before, gone=set(), withdrawn=True) == before.members


def test_who_was_to_leave_stays_away_when_another_is_lost() -> None:
    """The others may have gone on without it, steps ahead."""
    before = view(member(0), member(1), member(2))
    change = view(member(1), member(2), proposal=9)
    assert given_up(change, before, gone={1}, withdrawn=False) == (member(1), member(2))


def test_who_was_to_leave_comes_back_if_nobody_else_is_left() -> None:
    before = view(member(0), member(1))
    change = view(member(1), proposal=9)
    assert given_up(change, before, gone={1}, withdrawn=False) == before.members
