"""What `ftcomm chaos` draws, and what it makes of events: no job, no clock."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.chaos.cli import chaos
from ftcomm.chaos.leaks import LIMITS, Leaks, Sample, slope
from ftcomm.chaos.plan import COORDINATOR, KINDS, LOCAL, Fault, Plan
from ftcomm.chaos.record import Ledger
from ftcomm.chaos.report import as_dict, percentile, rows, show, write
from ftcomm.chaos.run import ChaosOptions, Outcome
from ftcomm.errors import SettingsError
from ftcomm.launch import requests as r

# -- the plan --------------------------------------------------------------------------------------------------------


@given(st.integers(), st.sets(st.integers(0, 5)), st.booleans(), st.integers(1, 3))
def test_somebody_is_always_left_alone(seed: int, untouched: set[int], away: bool, ranks: int) -> None:
    plan = Plan(KINDS, ranks, seed, cables=True)
    for _ in range(20):
        fault = plan.next(untouched, away)
        if fault is None:
            assert len(untouched) < 2
            return
        assert set(fault.replicas) <= untouched
        assert fault.kind == "coordinator" or untouched - set(fault.replicas)
        assert not (fault.kind == "coordinator" and away)
        assert set(fault.ranks) <= set(range(ranks))
        assert str(fault)


def test_the_same_seed_draws_the_same_faults_and_all_kinds_come_equally_often() -> None:
    drawn = [[plan.next({0, 1, 2, 3}, False) for _ in range(80)] for plan in (Plan(KINDS, 2, 7), Plan(KINDS, 2, 7))]
    assert drawn[0] == drawn[1]
    assert drawn[0] != [Plan(KINDS, 2, 8).next({0, 1, 2, 3}, False) for _ in range(80)]
    kinds = [fault.kind for fault in drawn[0] if fault is not None]
    assert {kind: kinds.count(kind) for kind in KINDS} == dict.fromkeys(KINDS, 10)


# -- the ledger ------------------------------------------------------------------------------------------------------


def view(at: float, epoch: int, contributing: set[int], catching_up: frozenset[int] = frozenset()) -> dict[str, Any]:
    members = [{"replica": x, "contributing": x in contributing} for x in sorted(contributing | catching_up)]
    return {"kind": "view", "mono": at, "epoch": epoch, "members": members, "why": "", "step": None}


def step(at: float, replica: int, number: int) -> dict[str, Any]:
    return {"kind": "report", "mono": at, "replica": replica, "step": number}


def ledger(replicas: int = 3) -> Ledger:
    made = Ledger(replicas)
    made.started(frozenset(range(replicas)))
    return made


def test_a_kill_from_injection_to_the_return() -> None:
    book = ledger()
    book.feed(step(9.9, 0, 1))
    book.feed(step(9.9, 1, 1))
    record = book.add(Fault(1, "kill", (1,), (0,)), 10.0)
    book.healed(record, 10.0)
    assert not book.whole
    assert record.closed is None, "it still counts in the view, but must go first"
    book.feed({"kind": "suspect", "mono": 10.25, "replica": 1, "reason": ""})
    book.feed(view(10.5, 2, {0, 2}))
    book.feed({"kind": "resumed", "mono": 10.6, "replica": 0, "epoch": 2, "resume_ms": 100.0})
    book.feed({"kind": "resumed", "mono": 10.7, "replica": 2, "epoch": 2, "resume_ms": 150.0})
    book.feed({"kind": "resumed", "mono": 10.7, "replica": 2, "epoch": 1, "resume_ms": 9000.0})
    book.feed(step(10.65, 0, 2))
    book.feed({"kind": "restarting", "mono": 10.8, "replica": 1})
    book.feed(view(12.0, 3, {0, 2}, frozenset({1})))
    assert record.closed is None
    book.feed(view(13.0, 4, {0, 1, 2}))
    assert (record.detection, record.stall, record.restarts, record.closed) == (0.25, pytest.approx(0.65), 1, 13.0)
    assert record.gap == pytest.approx(0.75)
    assert book.whole
    assert not book.innocent


def test_a_gap_of_a_replica_that_another_fault_hit_does_not_count() -> None:
    book = ledger()
    book.feed(step(10.0, 0, 1))
    slow = book.add(Fault(1, "slow", (1,), (0,), 2.0), 10.0)
    book.add(Fault(2, "kill", (0,), (0,)), 10.1)
    book.feed(view(10.2, 2, {1, 2}))
    book.feed(view(19.0, 3, {0, 1, 2}))
    book.feed(step(19.5, 0, 90))
    assert slow.gap == 0.0
    book.feed(step(19.6, 2, 91))
    book.feed(step(19.9, 2, 92))
    assert slow.gap == pytest.approx(0.3)


def test_who_is_removed_without_a_fault_is_named() -> None:
    book = ledger()
    record = book.add(Fault(1, "slow", (0,), (0,), 2.0), 10.0)
    book.feed(view(11.0, 2, {0, 1}))
    assert [event["innocent"] for event in book.innocent] == [[2]]
    assert record.detected is None
    book.healed(record, 12.0)
    assert record.closed == 12.0, "it contributes, and was never removed"
    assert not book.whole


def test_the_return_of_the_coordinator_closes_its_fault() -> None:
    book = ledger()
    record = book.add(Fault(1, "coordinator", seconds=1.0), 10.0)
    book.feed({"kind": "coordinator_stopped", "mono": 10.0})
    assert book.open == [record]
    assert book.add(Fault(2, "kill", (0,), (0,)), 10.5).overlapped
    book.feed({"kind": "coordinator_started", "mono": 11.0})
    assert record.closed == 11.0


def test_a_cut_between_two_is_closed_when_both_contribute() -> None:
    book = ledger()
    record = book.add(Fault(1, "partition", (0, 1), (0,), 1.0, other=1), 10.0)
    book.feed(view(12.0, 2, {0, 2}))
    book.healed(record, 13.0)
    assert record.closed is None
    book.feed(view(15.0, 3, {0, 1, 2}))
    assert (record.removed, record.closed) == ({1: 2}, 15.0)


# -- leaks -----------------------------------------------------------------------------------------------------------


def histories(seed: int, fds: float) -> list[list[Sample]]:
    """Twenty processes of a minute each, with noise and their own levels; `fds` leak a minute."""
    draw = random.Random(seed)
    made = []
    for number in range(20):
        level = draw.randrange(10, 20)
        made.append(
            [
                Sample(60.0 * number + t, int(level + fds * t / 60 + draw.randrange(3)), 5, 3, 100 + draw.random())
                for t in range(0, 60, 2)
            ]
        )
    return made


def test_growth_is_found_over_many_short_lives_and_noise_is_not() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    for fds, leaks in ((0.0, False), (10.0, True)):
        found = slope(histories(seed, fds), "fds")
        assert found.leaks(LIMITS["fds"]) is leaks, (seed, fds, found)
    assert not slope(histories(seed, 0.0), "memory").leaks(LIMITS["memory"]), seed


def test_this_process_can_be_looked_at() -> None:
    import os

    leaks = Leaks()
    for now in range(100):
        leaks.sample(os.getpid(), [os.getpid(), 2**22 + 1], float(now))
    assert leaks.ranks.keys() == {os.getpid()}
    sample = leaks.launcher[0]
    assert sample.fds >= 3
    assert sample.threads >= 1
    assert sample.memory > 5


# -- the report ------------------------------------------------------------------------------------------------------


def outcome() -> Outcome:
    replicas = [r.ReplicaStatus(x, "running", 1, {"0": 1}, True, True, 5, "127.0.0.1") for x in range(3)]
    status = r.Status("run", 1, "x.py", 1, False, "127.0.0.1:1", False, 1, "auto", 2.0, 24.0, replicas)
    book = ledger()
    for number in range(100):
        record = book.add(Fault(number + 1, "kill", (1,), (0,)), 10.0 * number)
        book.feed(view(10.0 * number + (number + 1) / 1000, 2 * number + 2, {0, 2}))
        book.healed(record, 10.0 * number)
        book.feed(view(10.0 * number + 5, 2 * number + 3, {0, 1, 2}))
    return Outcome(ChaosOptions(5.0, 60.0, ("kill",), 1), status, book, Leaks(), seconds=1000.0)


def test_the_report_of_a_hundred_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    made = outcome()
    kill, everything = rows(made.ledger.records)
    assert (kill.kind, everything.kind) == ("kill", "all")
    assert (kill.faults, kill.over, kill.removed) == (100, 100, 100)
    assert kill.detection == pytest.approx((0.05, 0.099))
    show(made, Console(width=140))
    assert "50 / 99" in capsys.readouterr().out
    write(made, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["kinds"][0]["faults"] == 100
    assert as_dict(made)["faults"][3]["what"] == "kill replica 1 rank 0"
    with pytest.raises(SettingsError, match=r"absent/report\.json: No such file or directory; choose"):
        write(made, tmp_path / "absent" / "report.json")


def test_the_timeline_is_drawn(tmp_path: Path) -> None:
    from ftcomm.chaos.timeline import draw

    draw(outcome(), tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SettingsError, match=r"choose a file as in chaos\.png"):
        draw(outcome(), tmp_path / "chaos.unknown")


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.99) == 4.0


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--every", "soon"], "'soon': expected a time above 0, as in 5s, 10m or 1h"),
        (["--every", "0s"], "expected a time above 0"),
        (["--for", "-5m"], "expected a time above 0"),
        (["--kinds", "kill,flood"], f"'flood': expected some of {','.join(KINDS)}"),
        (["--overlap", "1.5"], "1.5 is not in the range"),
    ],
)
def test_the_command_says_what_cannot_work(argv: list[str], said: str) -> None:
    result = CliRunner().invoke(chaos, argv)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_a_fault_says_what_it_is() -> None:
    assert str(Fault(1, "partition", (2,), other=None)) == "cut replica 2 from everybody"
    assert str(Fault(1, "oneway", (2,), other=COORDINATOR, outgoing=False)) == (
        "cut replica 2 from the coordinator, one way"
    )
    assert str(Fault(1, "stop", (0,), (0, 1))) == "stop replica 0 ranks 0, 1"
    assert "coordinator" in LOCAL
