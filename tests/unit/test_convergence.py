"""What `ftcomm bench accuracy` and `hsdp` draw from their seeds, and make of what the ranks wrote down."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.bench.cli import bench
from ftcomm.bench.harness import BenchReport
from ftcomm.bench.research import accuracy, curves, hsdp
from ftcomm.bench.research.absence_plan import FIRST, LAST, SETTLE, Absence, draw, most_away
from ftcomm.bench.research.convergence import (
    UNDISTURBED,
    Run,
    compare,
    comparison_line,
    curve,
    faults,
    share_out,
    summary,
)
from ftcomm.bench.research.convergence_rank import FinalState, RankRecords, Settled, Validated
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.training import Outcome, StepDecision


def made(kind: str = UNDISTURBED, seed: int = 1, final: float = 2.0, **other: Any) -> Run:
    plain = {"steps": 10, "kills": 0, "deaths": 0, "absent": 0.0, "lost": 0, "discarded": 0, "disputed": 0}
    rest = {"equal": True, "validation": [(0, 5.5), (10, final)], "killed_at": [], "seconds": 1.0}
    return Run(kind, seed, **{**plain, **rest, **other})  # type: ignore[arg-type]


# -- what is drawn -----------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(), replicas=st.integers(4, 6), times=st.integers(1, 3), share=st.sampled_from((0.1, 0.2)))
def test_each_replica_is_away_for_its_share_and_never_most_of_them(
    seed: int, replicas: int, times: int, share: float
) -> None:
    steps = 2000
    absences = draw(seed, replicas, steps, share, times)
    assert absences == draw(seed, replicas, steps, share, times)
    for replica in range(replicas):
        own = [one for one in absences if one.replica == replica]
        assert len(own) == times
        assert sum(one.end - one.begin for one in own) == round(share * steps)
        assert all(a.end + SETTLE < b.begin for a, b in itertools.pairwise(own)), "killed while it comes back"
        assert own[0].begin >= FIRST
        assert own[-1].end <= steps - LAST
    away = [sum(one.begin <= step < one.end + SETTLE for one in absences) for step in range(steps)]
    assert max(away) == most_away(absences) <= replicas // 2


def test_absences_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingsError, match="do not fit into 30 steps"):
        draw(1, 4, 30, 0.2, 7)
    with pytest.raises(SettingsError, match="never more than half of them at once"):
        draw(1, 2, 300, 0.45, 1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(), kills=st.integers(1, 60))
def test_kills_come_one_after_the_other_all_over_the_run(seed: int, kills: int) -> None:
    steps = hsdp.NEEDED * (kills + 1)
    drawn = hsdp.plan(seed, steps, kills)
    assert drawn == hsdp.plan(seed, steps, kills)
    assert len(drawn) == kills
    assert [kill.after for kill in drawn] == sorted(kill.after for kill in drawn)
    assert drawn[-1].after <= steps - hsdp.NEEDED
    assert all(0 <= kill.share < 1 for kill in drawn)


def test_every_rank_is_killed_now_and_then() -> None:
    assert {(kill.replica, kill.rank) for kill in hsdp.plan(1, 1000, 50)} == {(0, 0), (0, 1), (1, 0), (1, 1)}


# -- what is made of the records ---------------------------------------------------------------------------------------


def settled(step: int, replica: int = 0, pid: int = 10, decision: str = "COMMIT", counted: Any = (0, 1)) -> Settled:
    return Settled(replica, 0, pid, step, decision, tuple(counted), float(step))


def whole() -> list[Any]:
    """Two replicas for three steps; replica 1 is killed in step 1 and comes back as pid 12."""
    records: list[Any] = [settled(0), settled(1, counted=(0,)), settled(2)]
    records += [settled(0, 1, 11), settled(2, 1, 12)]
    records += [Validated(0, 3, 5.0), Validated(0, 1, 9.0), Validated(2, 3, 4.0), Validated(3, 2, 3.0)]
    return [*records, Validated(3, 2, 2.0), FinalState(0, 0, "same"), FinalState(1, 0, "same")]


def summed(records: list[Any]) -> Run:
    other = {"kind": "killed", "seed": 1, "kills": 1, "deaths": 1, "killed_at": [1], "seconds": 1.0}
    return summary(records, 2, 1, 3, 4, **other)


def test_a_run_that_kept_its_promises() -> None:
    run = summed(whole())
    assert run.kept
    assert run.absent == pytest.approx(1 / 6)
    assert run.validation == [(0, 6.0), (3, 2.5)], "a point that lacks a share is no point"
    assert run.final == 2.5


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda records: [r for r in records if not (isinstance(r, Settled) and r.step == 1)], "lost"),
        (lambda records: [*records, settled(1, 0, 13, "SKIP", (0,))], "discarded"),
        (lambda records: [*records, settled(2, 1, 13, counted=(0,))], "disputed"),
        (lambda records: [*records, settled(0, 0, 14), settled(2, 0, 14)], "disputed"),
    ],
)
def test_what_a_run_has_lost_shows(change: Any, field: str) -> None:
    run = summed(change(whole()))
    assert getattr(run, field) > 0
    assert not run.kept
    assert faults([run, made()]) == [line for line in faults([run]) if line]


@pytest.mark.parametrize(
    "ends",
    [[FinalState(0, 0, "same"), FinalState(1, 0, "other")], [FinalState(0, 0, "same")]],
    ids=["they differ", "one is missing"],
)
def test_states_that_are_not_equal_show(ends: list[FinalState]) -> None:
    run = summed([record for record in whole() if not isinstance(record, FinalState)] + ends)
    assert not run.equal
    assert not run.kept
    assert "DIFFER" in faults([run])[0]


def test_a_death_that_nobody_caused_shows() -> None:
    assert made(kills=2, deaths=2).kept
    assert not made(kills=2, deaths=3).kept


def test_ranks_of_one_replica_may_hold_different_shards() -> None:
    ends = [FinalState(replica, rank, f"shard {rank}") for replica in range(2) for rank in range(2)]
    assert summary(ends, 2, 2, 0 + 1, 4, kind="k", seed=1, kills=0, deaths=0, killed_at=[], seconds=0.0).equal


def test_means_are_compared_with_what_another_seed_does() -> None:
    runs = [made(UNDISTURBED, seed, loss) for seed, loss in ((1, 2.00), (2, 2.04), (3, 2.02))]
    runs += [made("linear", seed, loss) for seed, loss in ((1, 2.03), (2, 2.06), (3, 2.06))]
    runs += [made("none", seed, loss) for seed, loss in ((1, 2.10), (2, 2.11), (3, 2.12))]
    near, far = compare(runs)
    assert (near.kind, near.seeds, near.within) == ("linear", 3, True)
    assert near.difference == pytest.approx(0.03)
    assert near.spread == pytest.approx(0.04)
    assert near.deviation_reference == pytest.approx(0.02)
    assert near.paired == pytest.approx([0.03, 0.02, 0.04])
    assert (far.kind, far.within) == ("none", False)
    assert "OUTSIDE" in comparison_line(far)
    assert compare(runs[:1] + runs[3:4]) == [], "one seed has no spread"


def test_a_run_that_does_not_say_how_it_ended_is_a_bad_one() -> None:
    runs = [made(UNDISTURBED, seed) for seed in (1, 2)] + [made("none", seed, validation=[]) for seed in (1, 2)]
    assert math.isnan(runs[-1].final)
    assert not runs[-1].kept
    assert compare(runs) == []


def test_a_line_stands_under_its_heading() -> None:
    (table,) = hsdp.EXPERIMENT.tables
    assert len({len(text) for text in (*table.heading(), *table.lines(made("undisturbed")))}) == 1


def test_accuracy_stands_and_falls_with_runs_of_equal_samples_and_learning_rates() -> None:
    losses = {UNDISTURBED: 2.0, accuracy.LEFT_OUT: 2.5, "none": 2.5, "sqrt": 2.7}
    runs = [made(kind, seed, loss + seed / 100) for kind, loss in losses.items() for seed in (1, 2)]
    judged, others = accuracy.AccuracyRequest().compare(runs)
    assert [(one.kind, one.reference, one.within) for one in judged] == [("none", accuracy.LEFT_OUT, True)]
    assert [(one.kind, one.within) for one in others] == [("left out", False), ("none", False), ("sqrt", False)]


def task_of(folder: Path) -> dict[str, Any]:
    sizes = {"width": 8, "layers": 1, "batch": 1, "validate_every": 1, "windows": 4}
    return {"seed": 1, "steps": 10, "folder": str(folder), **sizes}


# -- what a rank writes down -------------------------------------------------------------------------------------------


def test_a_diary_says_each_outcome_once_and_counts_its_lives(tmp_path: Path) -> None:
    first = RankRecords(str(tmp_path), 1, 0, 2)
    outcome = Outcome(0, StepDecision.COMMIT, frozenset({1, 0}))
    for told in (None, outcome, outcome, Outcome(1, StepDecision.COMMIT, frozenset({1}))):
        first.settled(told)
    assert (first.life, RankRecords(str(tmp_path), 1, 0, 2).life, RankRecords(str(tmp_path), 1, 1, 2).life) == (0, 1, 0)
    lines = (tmp_path / "rank-2.jsonl").read_text().splitlines()
    assert [(line["step"], line["counted"]) for line in map(json.loads, lines)] == [(0, [0, 1]), (1, [1])]


def test_ranks_share_the_held_out_text_and_those_who_are_behind_look_at_none(tmp_path: Path) -> None:
    import torch

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double().mean()

    samples = torch.arange(8)[:, None].expand(8, 3)
    for replica in range(3):
        for rank in range(2):
            RankRecords(str(tmp_path), replica, rank, 2).validate(5, Sum(), samples, [2, 0])
    found = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(found) == 4
    shares = [Validated(record["step"], record["windows"], record["loss"]) for record in found]
    assert curve(shares, 8) == [(5, 3.5)]
    assert curve(shares[1:], 8) == []


def test_leaving_samples_out_gives_the_average_over_the_others(tmp_path: Path) -> None:
    absences = (Absence(2, 5, 8), Absence(0, 6, 7))
    task = accuracy.AccuracyTask(policy="none", absences=absences, kill=False, **task_of(tmp_path))
    ranks = [accuracy.Absences(task, RankRecords(str(tmp_path), replica)) for replica in range(4)]
    weights = {step: [rank.weight(step, 4) for rank in ranks] for step in (4, 5, 6, 7, 8)}
    assert weights[4] == weights[8] == [1, 1, 1, 1]
    assert weights[5] == weights[7] == pytest.approx([4 / 3, 4 / 3, 0, 4 / 3])
    assert weights[6] == [0, 2, 0, 2]
    for rank in ranks:
        rank.at(5, ())  # and nobody dies of it


def test_survivors_hold_after_the_same_step_while_the_file_is_there(tmp_path: Path) -> None:
    task = hsdp.HsdpTask(**task_of(tmp_path))
    hold, passed = hsdp.Hold(task, 2), threading.Event()
    task.hold.touch()

    def steps(count: int, *counted: int) -> None:
        for _ in range(count):
            hold.after(Outcome(0, StepDecision.COMMIT, frozenset(counted)))

    hold.after(None)
    steps(hsdp.ALONE - 1, 0)
    steps(1, 0, 1)
    steps(hsdp.ALONE - 1, 1)  # until here it has never waited
    thread = threading.Thread(target=lambda: (steps(1, 1), passed.set()), daemon=True)
    thread.start()
    assert not passed.wait(0.2), "it went on though the file is there"
    task.hold.unlink()
    assert passed.wait(30)
    task.hold.touch()
    steps(5, 1)  # it waits once, and not for a file of the next kill


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (accuracy.AccuracyRequest(replicas=1), "--replicas 1: expected 2 to 1024"),
        (accuracy.AccuracyRequest(width=7), "--width has to be a multiple of 8"),
        (accuracy.AccuracyRequest(down=0.5), "--down 0.5"),
        (accuracy.AccuracyRequest(policies=("cosine",)), "--policies cosine: expected none, linear, sqrt"),
        (accuracy.AccuracyRequest(seeds=(1, 1)), "--seeds: expected different numbers"),
        (accuracy.AccuracyRequest(steps=30), "do not fit"),
        (hsdp.HsdpRequest(width=7), "--width has to be a multiple of 8"),
        (accuracy.AccuracyRequest(jobs=0), "--jobs at least 1"),
        (hsdp.HsdpRequest(kills=200), "200 kills need at least"),
        (hsdp.HsdpRequest(kills=0), "raise --steps or lower --kills"),
        (hsdp.HsdpRequest(seeds=()), "--seeds"),
    ],
)
def test_what_cannot_be_measured(request_: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        request_.check()


FINE = [made(UNDISTURBED, seed, 2 + seed / 100) for seed in (1, 2)] + [made("killed", 1, 2.01), made("killed", 2, 2.02)]


@pytest.mark.parametrize(
    ("runs", "code", "said"),
    [
        (FINE, 0, "within"),
        ([*FINE[:3], made("killed", 2, 2.02, equal=False)], 1, "final states DIFFER"),
        ([*FINE[:3], made("killed", 2, 2.02, lost=1)], 1, "1 steps lost"),
        ([*FINE[:2], made("killed", 1, 2.11), made("killed", 2, 2.12)], 1, "OUTSIDE"),
    ],
    ids=["fine", "differ", "lost", "outside"],
)
def test_the_command_fails_when_a_promise_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: list[Run], code: int, said: str
) -> None:
    async def train(request: Any, seed: int, kind: str, progress: Any) -> Run:
        assert request == hsdp.HsdpRequest(kills=20, seeds=(1, 2), jobs=2)
        for _ in range(3 if kind == UNDISTURBED else 1):  # they end in another order than they begin
            await asyncio.sleep(0)
        return next(run for run in runs if (run.seed, run.kind) == (seed, kind))

    monkeypatch.setattr(hsdp, "train", train)
    path = tmp_path / "out.json"
    done = CliRunner().invoke(bench, ["hsdp", "--kills=20", "--seeds=1,2", "--jobs=2", "--json", str(path)])
    assert done.exit_code == code, done.output
    assert said in done.output
    result = json.loads(path.read_text())
    assert [run["kind"] for run in result["runs"]] == [UNDISTURBED, "killed"] * 2
    assert [one["kind"] for one in result["comparisons"]] == ["killed"]


@pytest.mark.parametrize("name", ["accuracy", "hsdp"])
def test_the_smoke_of_each_is_small_and_can_be_done(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[Any] = []

    async def measure(request: Any, report: BenchReport) -> None:
        await asyncio.sleep(0)
        asked.append(request)

    module: Any = {"accuracy": accuracy, "hsdp": hsdp}[name]
    monkeypatch.setattr(module, "EXPERIMENT", dataclasses.replace(module.EXPERIMENT, measure=measure))
    done = CliRunner().invoke(bench, [name, "--smoke", "--seeds", "7,8", "--jobs", "2"])
    assert done.exit_code == 0, done.output
    assert (asked[0].seeds, asked[0].jobs) == ((7,), 2)
    assert asked[0].steps <= 100


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_all_trainings_are_done_so_many_at_a_time(jobs: int) -> None:
    running, most, shares = 0, 0, []

    async def training(seed: int, progress: Any) -> Run:
        nonlocal running, most
        running += 1
        most = max(most, running)
        progress(0.5)
        for _ in range(seed):
            await asyncio.sleep(0)
        running -= 1
        return made(seed=seed)

    runs: list[Run] = []
    trainings = [functools.partial(training, seed) for seed in (3, 1, 4, 2)]
    asyncio.run(share_out(trainings, jobs, runs.append, shares.append))
    assert sorted(run.seed for run in runs) == [1, 2, 3, 4]
    assert most == min(jobs, 4)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_when_one_training_fails_the_others_are_ended() -> None:
    ended: list[str] = []

    async def fails(progress: Any) -> Run:
        await asyncio.sleep(0)
        raise FtcommError("a rank failed")

    async def lasts(progress: Any) -> Run:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("it could clean up")
        raise AssertionError("nobody ended it")

    with pytest.raises(FtcommError, match="a rank failed"):
        asyncio.run(share_out([fails, lasts], 2, lambda run: None, lambda share: None))
    assert ended


def test_equal_runs_give_equal_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [*FINE, made("sqrt", 1, 2.2, killed_at=[2, 5])]
    for name in ("a.svg", "b.png"):
        curves.draw(runs, tmp_path / name)
    first, second = (tmp_path / name for name in ("a.svg", "b.svg"))
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size > 10_000
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path, words in (
        (tmp_path / "x.jpeg", "ends in .png or .svg"),
        (tmp_path / "no" / "x.png", "there is no folder"),
    ):
        with pytest.raises(SettingsError, match=words):
            hsdp.EXPERIMENT.run(hsdp.HsdpRequest(), plot_file=path)
