"""Seconds in which a process did not run are none that it has waited."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control.running_time import LOOK, RunningTime, RunningTimer
from ftcomm.control.timeouts import REPORT


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0.0, 1000.0), max_size=30), st.floats(0.1, 2.0))
def test_of_a_gap_only_so_many_seconds_count(gaps: list[float], most: float) -> None:
    ran, now = RunningTime(most), 7.0
    assert ran.at(now) == 0.0
    for gap in gaps:
        now += gap
        ran.at(now)
    assert ran.seconds == pytest.approx(sum(min(gap, most) for gap in gaps), abs=1e-6)


def test_a_look_from_before_the_last_one_is_none() -> None:
    """Two threads may look, and the one that read the clock first may be the second to say so."""
    ran = RunningTime()
    for now in (1.0, 1.5, 1.2, 1.6):
        ran.at(now)
    assert 0.6 <= ran.seconds <= 1.0


def test_a_wait_ends_after_its_seconds_and_a_stop_is_one_look() -> None:
    clock = Clock()
    timer = RunningTimer(10.0, clock)
    parts = []
    while part := timer.part():
        parts.append(part)
        assert part <= LOOK
        clock.now += 3600.0 if len(parts) == 3 else part
    assert 10.0 - REPORT <= sum(parts) <= 10.0


def test_a_wait_begins_anew_when_the_others_move() -> None:
    clock, views = Clock(), [1]
    timer = RunningTimer(10.0, clock, lambda: views[0])
    for second in range(1, 40):
        clock.now += 1.0
        views[0] += second in (8, 17)
        if second < 27:
            assert timer.left(), second
    assert not timer.left()


def test_a_wait_of_no_seconds_is_over() -> None:
    assert RunningTimer(0.0, Clock()).part() == 0.0
