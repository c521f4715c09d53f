"""How often views are made for connections that end between members that live."""

from __future__ import annotations

from ftcomm.control.severed import MOST, SeveredPairs

WINDOW = 100.0


def ends(pairs: SeveredPairs, by: int, other: int, now: float) -> bool:
    """Whether one more view may be made for the two; then it is."""
    if not pairs.said(by, other, 1, now):
        return False
    pairs.mend()
    pairs.clear()
    return True


def test_two_are_connected_anew_so_often_and_again_when_that_is_long_ago() -> None:
    pairs = SeveredPairs(1.0, WINDOW)
    assert [ends(pairs, 0, 1, float(now)) for now in range(MOST + 1)] == [True] * MOST + [False]
    assert ends(pairs, 0, 2, float(MOST))
    assert ends(pairs, 1, 0, WINDOW + MOST)


def test_a_member_that_loses_one_neighbour_after_another_does_not_keep_all_making_views() -> None:
    pairs = SeveredPairs(1.0, WINDOW)
    done = [ends(pairs, 0, 1 + turn, turn / 10) for turn in range(3 * MOST)]
    assert done == [True] * 2 * MOST + [False] * MOST
    assert ends(pairs, 1, 2, 3 * MOST / 10), "it is not the neighbours' fault"


def test_many_that_end_at_once_count_once_for_a_member() -> None:
    pairs = SeveredPairs(1.0, WINDOW)
    for other in range(1, 4 * MOST):
        assert pairs.said(0, other, 1, 0.0)
    pairs.mend()
    pairs.clear()
    assert pairs.said(0, 1, 1, 1.0)
