"""How long an op may stand still, as a function of what ops of its size have taken."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.collective.adaptive_timeout import AdaptiveTimeouts

FLOOR, CEILING = 0.5, 100.0


def after(*took: float, nbytes: int = 1000) -> AdaptiveTimeouts:
    deadlines = AdaptiveTimeouts(FLOOR, CEILING)
    for seconds in took:
        deadlines.taken[nbytes.bit_length()].append(seconds)
    return deadlines


def test_until_eight_ops_were_seen_it_is_the_ceiling() -> None:
    assert after(*[1.0] * 7).of(1000) == CEILING
    assert after(*[1.0] * 8).of(1000) == 4.0


def test_sizes_are_told_apart_by_powers_of_two() -> None:
    deadlines = after(*[1.0] * 8)
    assert deadlines.of(512) == deadlines.of(1023) == 4.0
    assert deadlines.of(511) == deadlines.of(1024) == CEILING


def test_a_few_that_took_very_long_move_nothing() -> None:
    assert after(*[1.0] * 20, 50.0, 90.0, 70.0).of(1000) == 4.0


def test_a_spread_is_allowed_for() -> None:
    assert after(*[1.0, 2.0, 3.0] * 10).of(1000) == pytest.approx(4 * (2 + 3 * 1.4826))


def test_what_lies_further_back_than_64_ops_is_forgotten() -> None:
    assert after(*[9.0] * 100, *[1.0] * 63).of(1000) == 4.0
    assert after(*[9.0] * 100, *[1.0] * 32).of(1000) > 4.0


@given(st.lists(st.floats(0, 1000), max_size=100))
def test_it_lies_between_floor_and_ceiling(took: list[float]) -> None:
    deadline = after(*took).of(1000)
    assert FLOOR <= deadline <= CEILING
    if len(took) >= 8:
        assert deadline == CEILING or deadline >= 4 * statistics.median(took[-64:])


@pytest.mark.parametrize(("floor", "ceiling"), [(0.0, 1.0), (2.0, 1.0)])
def test_bounds_that_cannot_work_are_refused(floor: float, ceiling: float) -> None:
    with pytest.raises(ValueError, match="floor"):
        AdaptiveTimeouts(floor, ceiling)
