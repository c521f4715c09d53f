"""The watch over the driver: what it times, when it speaks, and what others read of it."""

from __future__ import annotations

import enum

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Stall, StallLog, Watchdog
from ftcomm.errors import CollectiveTimeout


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def op(number: int, count: int = 100) -> Operation:
    made = Operation(np.ones(count), "float64", "sum")
    made.number = number
    return made


def watch_after(clock: Clock, seconds: float, ops: int = 8, first: int = 0, steady: int = 0) -> Watchdog:
    watch = Watchdog(0.5, 60, 120, clock)
    watch.disturbed(steady, (), ())
    for number in range(first, first + ops):
        watch.began = clock.now
        clock.now += seconds
        watch.returns(op(number))
    return watch


class Due(enum.Enum):
    NOTHING = enum.auto()
    REPORT = enum.auto()
    GIVE_UP = enum.auto()


def waits(watch: Watchdog, number: int) -> Due:
    """What is due in a wait for member 3."""
    try:
        return Due.NOTHING if watch.waits(1, op(number), (3,)) is None else Due.REPORT
    except CollectiveTimeout:
        return Due.GIVE_UP


def due_at(watch: Watchdog, clock: Clock, waited: float) -> Due:
    """What is due in a wait of that many seconds."""
    watch.wait = None
    assert waits(watch, 99) is Due.NOTHING
    return look(watch, clock, waited)


def look(watch: Watchdog, clock: Clock, seconds: float, number: int = 99) -> Due:
    """Look twice a second, and at the end; what is due in this time."""
    end, due = clock.now + seconds, Due.NOTHING
    while due is not Due.GIVE_UP and clock.now < end:
        clock.now = min(end, clock.now + 0.5)
        now = waits(watch, number)
        due = due if now is Due.NOTHING else now
    clock.now = end
    return due


def test_the_deadline_follows_what_ops_have_taken(clock: Clock) -> None:
    assert due_at(watch_after(clock, 2.0), clock, 7.9) is Due.NOTHING
    assert due_at(watch_after(clock, 2.0), clock, 8.1) is Due.REPORT
    assert due_at(watch_after(clock, 2.0, ops=7), clock, 59.0) is Due.NOTHING
    assert due_at(watch_after(clock, 0.001), clock, 0.6) is Due.REPORT


def test_ops_that_were_in_flight_in_a_view_change_do_not_count(clock: Clock) -> None:
    assert due_at(watch_after(clock, 2.0, ops=8, steady=1), clock, 59.0) is Due.NOTHING
    assert due_at(watch_after(clock, 2.0, ops=9, steady=1), clock, 9.0) is Due.REPORT


def test_an_op_is_timed_from_when_it_was_the_first(clock: Clock) -> None:
    """Not from its submission, if others were before it."""
    watch = Watchdog(0.5, 60, 120, clock)
    watch.began = clock.now
    for number in range(10):  # all were submitted together
        clock.now += 1.0
        watch.returns(op(number))
    assert due_at(watch, clock, 3.9) is Due.NOTHING
    assert due_at(watch, clock, 4.1) is Due.REPORT


def test_a_stall_is_said_every_second_and_then_given_up(clock: Clock) -> None:
    watch = Watchdog(10, 10, 20, clock)
    said = []
    for tick in range(0, 2100, 5):
        clock.now = 100 + tick / 100
        said.append((tick / 100, waits(watch, 7)))
    reports = [round(at) for at, due in said if due is Due.REPORT]
    assert reports == list(range(10, 21))
    assert next(at for at, due in said if due is Due.GIVE_UP) == pytest.approx(20.05)


def test_an_op_has_its_whole_timeout_again_when_the_job_changes_its_view(clock: Clock) -> None:
    """Which a subgroup enters later, if others are removed before. What is due to be reported still is."""
    watch = Watchdog(10, 10, 20, clock)
    watch.waits(1, op(7), (3,))
    assert look(watch, clock, 19, 7) is Due.REPORT
    watch.job_changes()
    assert look(watch, clock, 19, 7) is Due.REPORT
    assert watch.awaited == {3: 38.0}
    watch.job_changes()
    assert look(watch, clock, 19.5, 7) is Due.REPORT
    assert look(watch, clock, 1.5, 7) is Due.GIVE_UP


def test_time_without_a_coordinator_comes_on_top_and_no_more(clock: Clock) -> None:
    watch = Watchdog(10, 10, 20, clock)
    watch.coordinator_away(100.0)  # before the wait
    watch.waits(1, op(7), (3,))
    assert look(watch, clock, 15, 7) is Due.REPORT
    watch.coordinator_away(4.0)
    assert look(watch, clock, 8.5, 7) is Due.REPORT
    assert look(watch, clock, 1, 7) is Due.GIVE_UP


def test_progress_begins_a_new_wait(clock: Clock) -> None:
    watch = Watchdog(10, 10, 20, clock)
    watch.waits(1, op(7), (3,))
    assert look(watch, clock, 9, 7) is Due.NOTHING
    watch.wait = None
    watch.waits(1, op(7), (3,))
    assert look(watch, clock, 9, 7) is Due.NOTHING


def test_a_process_that_was_stopped_has_waited_for_nobody(clock: Clock) -> None:
    watch = Watchdog(10, 10, 20, clock)
    watch.waits(1, op(7), (3,))
    clock.now += 1000
    assert look(watch, clock, 8, 7) is Due.NOTHING
    assert look(watch, clock, 1.5, 7) is Due.REPORT
    clock.now += 1000
    assert look(watch, clock, 8, 7) is Due.REPORT
    assert look(watch, clock, 2, 7) is Due.GIVE_UP


def test_what_it_waits_for_can_be_asked(clock: Clock) -> None:
    watch = Watchdog(10, 10, 20, clock)
    assert watch.waiting(0) is None
    watch.waits(1, op(7), (2, 3))
    assert watch.waiting(0) == Stall(1, 7, (2, 3))
    assert watch.waiting(0.5) is None
    clock.now += 0.6
    watch.waits(1, op(7), (3,))
    assert watch.waiting(0.5) == Stall(1, 7, (3,))
    watch.returns(op(7))
    assert watch.waiting(0) is None


def test_only_waits_that_were_reported_or_ended_by_a_view_change_stood_still(clock: Clock) -> None:
    watch = watch_after(clock, 2.0)
    assert due_at(watch, clock, 7.0) is Due.NOTHING
    watch.wait = None  # the driver: something has moved
    watch.returns(op(99))
    assert watch.stalled_seconds == 0.0
    assert due_at(watch, clock, 9.0) is Due.REPORT
    clock.now += 1.0
    watch.wait = None
    clock.now += 1.0
    watch.returns(op(99))
    assert watch.stalled_seconds == 11.0
    assert due_at(watch, clock, 3.0) is Due.NOTHING
    watch.disturbed(100, (4,), (4,))  # who was waited for is lost
    assert watch.stalled_seconds == 14.0
    assert due_at(watch, clock, 70.0) is Due.REPORT
    watch.disturbed(100, (4,), (4,))
    watch.returns(op(99))
    assert watch.stalled_seconds == 84.0


def reported(watch: Watchdog, clock: Clock, missing: tuple[int, ...], come: int = 0) -> tuple[tuple[int, ...], float]:
    """Wait until a stall is reported, and return of whom, and for how long it has lasted."""
    while (stall := watch.waits(2, op(7), missing, lambda replica: come)) is None:
        clock.now += 0.5
    return stall.waiting_on, stall.lasted


def test_a_wait_goes_on_in_the_next_view(clock: Clock) -> None:
    watch = Watchdog(10, 10, 20, clock)
    watch.waits(1, op(7), (3, 4))
    assert look(watch, clock, 7, 7) is Due.NOTHING
    assert watch.awaited == {3: 7.0}
    watch.disturbed(8, (3, 5), (3, 5))
    watch.waits(2, op(7), (5,))
    clock.now += 0.5
    watch.wait = None  # others move
    assert reported(watch, clock, (3, 5)) == ((3,), 10.0)
    assert watch.awaited == {3: 10.0, 5: 2.5}
    watch.disturbed(8, (3, 5), (3, 5))
    clock.now += 0.5
    assert reported(watch, clock, (3, 5)) == ((3,), 11.0), "every second, in whatever view"


def test_no_wait_is_handed_over_for_another_life_or_one_that_is_gone(clock: Clock) -> None:
    watch = Watchdog(10, 10, 20, clock)
    watch.hand_waits({2: 9.0, 3: 9.0, 4: 9.0})
    watch.disturbed(8, (3, 4), (3,))  # 4 is a new life
    watch.hand_waits({2: 9.0})
    words = {3: 0, 4: 0}  # there are none of 2
    assert watch.waits(2, op(7), (3, 4), words.__getitem__) is None
    assert watch.awaited == {3: 9.0, 4: 0.0}


def test_a_wait_that_is_handed_over_ends_when_an_op_returns(clock: Clock) -> None:
    """Though nobody has looked at it: no wait was long enough."""
    watch = Watchdog(10, 10, 20, clock)
    watch.disturbed(8, (3,), (3,))
    watch.hand_waits({3: 9.0})
    watch.returns(op(7))
    assert reported(watch, clock, (3,)) == ((3,), 10.0)


@pytest.mark.parametrize("ends", ["takes part", "returns", "is lost"])
def test_a_wait_of_an_earlier_view_ends_when_the_replica_moves(clock: Clock, ends: str) -> None:
    watch = Watchdog(10, 10, 20, clock)
    watch.waits(1, op(7), (3,))
    assert look(watch, clock, 7, 7) is Due.NOTHING
    watch.disturbed(8, (3,), () if ends == "is lost" else (3,))
    if ends == "returns":
        watch.returns(op(6))
    assert reported(watch, clock, (3,), come=ends == "takes part") == ((3,), 10.0)


def test_a_wait_goes_on_while_there_is_no_view(clock: Clock) -> None:
    watch = Watchdog(10, 10, 20, clock)
    watch.waits(1, op(7), (3,))
    for _ in range(12):  # the driver is parked, and looks
        clock.now += 0.5
        watch.ran()
    assert watch.awaited == {3: 6.0}
    watch.disturbed(8, (3,), (3,))
    assert reported(watch, clock, (3,)) == ((3,), 10.0)


def test_a_wait_that_is_handed_over_goes_on_until_the_replica_moves(clock: Clock) -> None:
    """At a boundary that was given up; the replica has come as far as 5 in this view."""
    watch = Watchdog(10, 10, 20, clock)
    watch.hand_waits({3: 6.0, 4: 6.0})
    watch.disturbed(8, (3,), (3,))
    assert reported(watch, clock, (3,), come=5) == ((3,), 10.0)
    watch.hand_waits({3: 6.0})
    watch.waits(2, op(7), (3,), lambda replica: 5)
    watch.wait = None
    assert reported(watch, clock, (3,), come=6)[1] == 10.0
    assert clock.now == 114.0


def test_a_stall_is_news_for_the_log_when_it_is_another_one_and_not_when_it_lasts() -> None:
    seen = StallLog()
    assert seen.is_new(Stall(1, 7, (2,), 3.0))
    assert not seen.is_new(Stall(1, 7, (2,), 4.0))
    assert seen.is_new(Stall(1, 7, (2, 3), 5.0))
    assert seen.is_new(Stall(2, 7, (2, 3), 5.0))
