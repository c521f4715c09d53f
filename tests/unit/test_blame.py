from __future__ import annotations

from ftcomm.control.blame import Blame


def culprit(blame: Blame, now: float, contributing: frozenset[int] = frozenset(range(8))) -> dict[int, str]:
    return blame.culprit(now, contributing)


def test_the_one_with_more_complaints_goes() -> None:
    blame = Blame(0.5, 5.0)
    blame.complaint(0, 1, now=0.0)
    blame.complaint(1, 0, now=0.0)
    blame.complaint(2, 0, now=0.1)
    assert culprit(blame, 0.3) == {}
    assert list(culprit(blame, 0.6)) == [0]


def test_of_equals_the_higher_replica_goes() -> None:
    blame = Blame(0.5, 5.0)
    blame.complaint(0, 3, now=0.0)
    blame.complaint(3, 0, now=0.0)
    assert list(culprit(blame, 0.6)) == [3]


def test_a_stall_is_followed_to_who_waits_for_nobody() -> None:
    blame = Blame(0.5, 5.0)
    for now in range(7):
        assert culprit(blame, now) == {}
        blame.stalled(0, 7, (1,), now)
        blame.stalled(1, 7, (2,), now)
        blame.stalled(3, 7, (0, 1, 2), now)
    assert list(culprit(blame, 6.1)) == [2]


def test_a_stall_that_is_not_said_again_is_over() -> None:
    blame = Blame(0.5, 5.0)
    for now in range(4):
        blame.stalled(0, 7, (1,), now)
    for now in (4.0, 5.1, 8.0):  # it has ended within the grace, though the report came long ago by then
        assert culprit(blame, now) == {}


def test_a_link_that_is_back_is_forgiven() -> None:
    blame = Blame(0.5, 5.0)
    blame.complaint(0, 1, now=0.0)
    blame.withdraw(0, 1)
    assert culprit(blame, 1.0) == {}


def test_one_that_reaches_nobody_goes_itself() -> None:
    blame = Blame(0.5, 5.0)
    for accused in (0, 1, 2):
        blame.complaint(3, accused, now=0.0)
    assert list(culprit(blame, 1.0)) == [3]


def test_who_holds_the_state_stays() -> None:
    blame = Blame(0.5, 5.0)
    blame.complaint(0, 1, now=0.0)
    blame.complaint(1, 0, now=0.0)
    assert list(culprit(blame, 1.0, frozenset({1}))) == [0]


def test_a_circle_is_broken() -> None:
    blame = Blame(0.5, 5.0)
    for now in range(7):
        blame.stalled(0, 7, (1,), now)
        blame.stalled(1, 7, (0,), now)
    assert list(culprit(blame, 6.1)) == [1]


def test_a_new_view_forgives() -> None:
    blame = Blame(0.5, 5.0)
    blame.complaint(0, 3, now=0.0)
    blame.stalled(0, 7, (1,), now=0.0)
    blame.clear()
    assert culprit(blame, 100.0) == {}
