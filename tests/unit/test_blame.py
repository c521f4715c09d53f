from __future__ import annotations

from ftcomm.control.blame import Blame


def test_the_one_with_more_complaints_goes() -> None:
    blame = Blame(0.5, 5.0)
    blame.complaint(0, 1, now=0.0)
    blame.complaint(1, 0, now=0.0)
    blame.complaint(2, 0, now=0.1)
    assert blame.culprit(0.3) == {}
    assert list(blame.culprit(0.6)) == [0]


def test_of_equals_the_higher_replica_goes() -> None:
    blame = Blame(0.5, 5.0)
    blame.complaint(0, 3, now=0.0)
    blame.complaint(3, 0, now=0.0)
    assert list(blame.culprit(0.6)) == [3]


def test_a_stall_is_followed_to_who_waits_for_nobody() -> None:
    blame = Blame(0.5, 5.0)
    blame.stalled(0, 7, (1,), now=0.0)
    blame.stalled(1, 7, (2,), now=0.0)
    blame.stalled(3, 7, (0, 1, 2), now=1.0)
    assert blame.culprit(4.0) == {}
    assert list(blame.culprit(5.1)) == [2]


def test_a_circle_is_broken() -> None:
    blame = Blame(0.5, 5.0)
    blame.stalled(0, 7, (1,), now=0.0)
    blame.stalled(1, 7, (0,), now=0.0)
    assert list(blame.culprit(5.1)) == [1]


def test_a_new_view_forgives() -> None:
    blame = Blame(0.5, 5.0)
    blame.complaint(0, 3, now=0.0)
    blame.stalled(0, 7, (1,), now=0.0)
    blame.clear()
    assert blame.culprit(100.0) == {}
