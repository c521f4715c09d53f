"""Whether a thread gets a CPU, from two looks at what the kernel has counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ftcomm.diagnosis import processes
from ftcomm.diagnosis.processes import SchedulerTimes, ThreadTimes, _shares, scheduled

SECOND = 10**9  # ns


def shares(before: ThreadTimes, after: ThreadTimes) -> tuple[float, float]:
    """The shares of a second that is between two looks."""
    return _shares(SchedulerTimes(7.0, {1: before}), SchedulerTimes(8.0, {1: after}))[1]


def test_a_thread_that_gets_no_cpu_at_all_is_delayed_though_the_kernel_has_not_counted_it_yet() -> None:
    still = ThreadTimes(5 * SECOND, SECOND, slept=9, ready=True)
    assert shares(still, still) == (0.0, 0.0), "without a second look nothing is known"
    assert shares(still, ThreadTimes(5 * SECOND, SECOND, slept=9, ready=True)) == (0.0, 1.0)
    late = ThreadTimes(5 * SECOND + SECOND // 10, SECOND + SECOND // 5, slept=9, ready=True)
    assert shares(still, late) == pytest.approx((0.1, 0.9))


def test_a_thread_that_slept_is_delayed_for_as_long_as_was_counted() -> None:
    asleep = ThreadTimes(0, 0, slept=9, ready=False)
    assert shares(asleep, ThreadTimes(0, 0, slept=9, ready=False)) == (0.0, 0.0)
    assert shares(asleep, ThreadTimes(0, 0, slept=9, ready=True)) == (0.0, 0.0)  # it has just been woken
    woken = ThreadTimes(0, 0, slept=9, ready=True)
    assert shares(woken, ThreadTimes(SECOND // 4, SECOND // 2, slept=10, ready=True)) == (0.25, 0.5)


@contextmanager
def child(code: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def test_what_the_kernel_says_of_a_process() -> None:
    with child("print(flush=True)\nwhile True: pass") as pid:
        assert scheduled(pid).threads[pid].ready
    with child("print(flush=True); input()") as pid:
        while scheduled(pid).threads[pid].ready:
            pass  # it goes to sleep, whenever it gets a CPU
        assert scheduled(pid).threads[pid].slept > 0
    assert scheduled(pid).threads == {}


@pytest.mark.parametrize(("slept", "delayed"), [(10, 1.0), (11, 0.2)], ids=["it waits", "it sleeps again and again"])
def test_who_slept_and_is_ready_now_is_looked_at_once_more(
    monkeypatch: pytest.MonkeyPatch, slept: int, delayed: float
) -> None:
    """Its wait is not counted yet, and nobody knows since when it lasts."""
    pid, tenth, ran = 1, SECOND // 10, SECOND + 1000
    before = SchedulerTimes(7.0, {pid: ThreadTimes(SECOND, SECOND, slept=9, ready=False)})
    looks = iter(
        [
            SchedulerTimes(8.0, {pid: ThreadTimes(ran, SECOND + tenth, slept=10, ready=True)}),
            SchedulerTimes(8.1, {pid: ThreadTimes(ran, SECOND + tenth + tenth // 5, slept=slept, ready=True)}),
        ]
    )
    monkeypatch.setattr(processes, "scheduled", lambda _: next(looks))
    monkeypatch.setattr(processes, "AGAIN", 0.0)
    assert processes._shares_since(before, pid)[pid][1] == pytest.approx(delayed)


@pytest.mark.parametrize("ready", [False, True], ids=["sleeps", "runs"])
def test_who_sleeps_or_runs_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, ready: bool) -> None:
    before = SchedulerTimes(7.0, {1: ThreadTimes(SECOND, SECOND, slept=9, ready=False)})
    after = SchedulerTimes(8.0, {1: ThreadTimes(SECOND + (SECOND // 2 if ready else 0), SECOND, slept=10, ready=ready)})
    looks = iter([after])
    monkeypatch.setattr(processes, "scheduled", lambda _: next(looks))
    assert processes._shares_since(before, 1)[1] == (0.5 if ready else 0.0, 0.0)
