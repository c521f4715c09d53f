"""`ftcomm bench fleet`: cases that can be computed by hand, the paper's figures, and what seeds are for."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ftcomm.bench.research import fleet_facts
from ftcomm.bench.research.fleet import FleetRequest, FleetRow, check_paper, expected, interval_of_mean, simulate_fleet
from ftcomm.bench.research.fleet_events import Failure, Fleet, at_random, evenly
from ftcomm.bench.research.fleet_facts import (
    DAY,
    FAILURES,
    Constant,
    FleetPipeline,
    ft_hsdp,
    ft_hsdp_at_best,
    restart,
    start_share,
)
from ftcomm.bench.research.fleet_measured import ftcomm_pipeline, newest, tenfold
from ftcomm.cli import main
from ftcomm.errors import SettingsError


def pipeline(replicas: int, stall: float, away: float, **other: float) -> FleetPipeline:
    def part(seconds: float) -> tuple[Constant, ...]:
        return (Constant("all of it", seconds, "s", "made up"),)

    rejoin = part(other.pop("rejoin", 0.0))
    return FleetPipeline("made up", replicas, part(stall), part(away), rejoin, **other)  # type: ignore[arg-type]


def at(*when: float, replica: float = 0.0) -> list[Failure]:
    times = (0.0, *when)
    return [Failure(after - before, replica, 1.0, 0.5, 0.5) for before, after in itertools.pairwise(times)]


def useful(of: FleetPipeline, failures: list[Failure], seconds: float = 100.0) -> float:
    return Fleet(of, iter(failures)).run(seconds) * seconds


def test_nothing_fails() -> None:
    assert useful(pipeline(4, 10, 30), []) == 100


@pytest.mark.parametrize(
    ("of", "failures", "seconds"),
    [
        pytest.param(pipeline(1, 10, 0), at(20), 90.0, id="all wait"),
        pytest.param(pipeline(1, 10, 0), at(20, 25), 85.0, id="again while they wait"),
        pytest.param(pipeline(1, 10, 0), at(95), 95.0, id="into the end"),
        pytest.param(pipeline(4, 0, 20), at(50), 95.0, id="a quarter is away"),
        pytest.param(pipeline(4, 10, 20), at(50), 100 - 10 - 10 / 4, id="waits, then a quarter is away"),
        pytest.param(pipeline(4, 0, 20), at(50, 60), 100 - 30 / 4, id="hit again before it is back"),
        pytest.param(pipeline(4, 0, 20), at(20) + at(10, replica=0.5), 90.0, id="two are away"),
        pytest.param(pipeline(4, 0, 20, rejoin=8), at(50), 100 - 5 - 8, id="its return stalls"),
        pytest.param(pipeline(2, 0, 20, step=10), at(50), 100 - 25 / 2, id="its part of the step is lost"),
        pytest.param(pipeline(1, 10, 0, checkpoint=15), at(20), 100 - 5 - 10, id="back to the checkpoint"),
    ],
)
def test_by_hand(of: FleetPipeline, failures: list[Failure], seconds: float) -> None:
    assert useful(of, failures) == pytest.approx(seconds)


def test_silence_and_measured_stalls_are_drawn() -> None:
    of = FleetPipeline("made up", 2, (), (), stalls=(1.0, 3.0), silent_share=0.25, silence=10.0)
    failures = [Failure(20, 0, silent, draw, 0) for silent, draw in ((0.2, 0.4), (0.3, 0.6), (0.9, 0.0))]
    assert useful(of, failures) == 100 - (1 + 10) - 3 - 1
    assert of.mean_stall() == 2 + 2.5


@pytest.mark.parametrize(("replicas", "stall", "away"), [(1, 600, 0), (12, 180, 600), (12, 1, 620), (3, 60, 60)])
def test_at_random_as_the_formula_says(replicas: int, stall: float, away: float) -> None:
    """A moment is useful if nothing has failed for a stall, and a replica's if it was not hit since it is back."""
    interval = 1080.0
    of = pipeline(replicas, stall, away)
    shares = [Fleet(of, at_random(interval, seed)).run(30 * DAY) for seed in range(10)]
    wanted = expected(stall, away if replicas > 1 else 0, interval, replicas)
    error = np.std(shares) / math.sqrt(len(shares))
    assert abs(np.mean(shares) - wanted) < 5 * error, f"seeds 0 to 9: {np.mean(shares)} and {wanted}, +- {error}"


def test_the_papers_two_figures() -> None:
    checks = {check.pipeline: check for check in check_paper(seeds=2)}
    assert checks["restart"].found == pytest.approx((18 - 10) / 18)
    assert checks["ft-hsdp"].found == pytest.approx((8 + 7 * 11 / 12) / 18)
    assert all(check.good for check in checks.values())
    assert not msgspec.structs.replace(checks["restart"], found=0.455).good


def test_constants_sum_to_what_the_paper_says() -> None:
    assert restart(98_304).seconds("stall") == 600
    assert ft_hsdp(12).seconds("stall") == 180
    assert ft_hsdp_at_best(12).seconds("stall") == 90
    assert FAILURES["paper"].interval(98_304) == pytest.approx(18 * 60)
    assert FAILURES["paper-32k"].interval(32_768) == pytest.approx(2.6 * 3600, rel=0.03)
    assert FAILURES["llama3"].interval(16_384) == pytest.approx(3.1 * 3600, rel=0.01)
    assert [round(200 * start_share(gpus)) for gpus in (16_384, 22_528, 65_536, 98_304)] == [17, 30, 100, 200]
    assert 200 * start_share(8192) == pytest.approx(8.5)
    assert 200 * start_share(131_072) > 290
    assert all(constant.source for constant in (*restart(1).stall, *ft_hsdp(2).stall, fleet_facts.SILENT))


def test_even_failures_take_turns() -> None:
    first = list(itertools.islice(evenly(10.0, 3), 4))
    assert [failure.gap for failure in first] == [0, 10, 10, 10]
    assert [int(failure.which * 3) for failure in first] == [0, 1, 2, 0]


def test_a_seed_is_a_history_and_seeds_make_the_interval() -> None:
    of = pipeline(12, 180, 600)
    shares = [Fleet(of, at_random(1080, seed)).run(DAY) for seed in range(8)]
    assert shares == [Fleet(of, at_random(1080, seed)).run(DAY) for seed in range(8)]
    assert len(set(shares)) == 8
    low, high = interval_of_mean(shares)
    assert min(shares) < low < np.mean(shares) < high < max(shares)
    few = interval_of_mean(shares[:4] * 16)
    assert few[1] - few[0] < (high - low)  # as wide as the mean is unsure, not as the values are far apart


def results(folder: Path) -> tuple[Path, Path, Path]:
    recovery, rejoin, control = folder / "a.json", folder / "b.json", folder / "c.json"
    rejoins = [{"stalls": {"0": 0.01, "1": 0.04}, "step": 2.0}, {"stalls": {"0": 0.01}, "step": 2.0}]
    peers = [{"stall_ms": None, "library": "gloo", "fault": "kill"}, {"stall_ms": 9e3, "library": "torchft"}]
    cut = [{"stall_ms": 7e3, "library": "ftcomm", "fault": "cut"}]
    recovery.write_text(json.dumps({"events": [{"stall_ms": 20.0}, *peers, {"stall_ms": 40.0}, *cut]}))
    rejoin.write_text(json.dumps({"rejoins": rejoins}))
    after = {"start": 1.0, "rank": 0.002, "host": 0.004, "rank: return": 1.0}
    costs = [{"what": what, "part": "busiest leader", "cpu": cpu} for what, cpu in after.items()]
    costs += [{"what": "host", "part": "light ranks", "cpu": 1.0}]
    control.write_text(json.dumps({"request": {"ranks": 10}, "costs": costs}))
    return recovery, rejoin, control


def test_ours_is_what_was_measured(tmp_path: Path) -> None:
    ours = ftcomm_pipeline(98_304, 12, *results(tmp_path))
    assert ours.stalls == (0.02, 0.04)
    assert ours.seconds("rejoin") == pytest.approx(0.02 * 20)
    assert ours.mean_stall() == pytest.approx(8192 * 400e-6 + 0.001 + 0.03 + ours.silent_share * 5.0)
    assert tenfold(ours).mean_stall() == pytest.approx(10 * ours.mean_stall())
    assert tenfold(ours).away == ours.away


def test_rows_of_all_pipelines_in_order(tmp_path: Path) -> None:
    request = FleetRequest(*results(tmp_path), gpus=(32_768, 98_304), days=2, seeds=4)
    request.check()
    rows: list[FleetRow] = []
    simulate_fleet(request, rows.append, lambda words, share: None)
    names = ["restart", "ft-hsdp", "ft-hsdp, mended", "ftcomm", "ftcomm, x10"]
    assert [(row.gpus, row.pipeline) for row in rows] == [(n, name) for n in request.gpus for name in names]
    assert all(row.low <= row.effective <= row.high <= 1 for row in rows)
    by = {(row.gpus, row.pipeline): row.effective for row in rows}
    for gpus in request.gpus:
        assert by[gpus, "restart"] < by[gpus, "ft-hsdp"] < by[gpus, "ft-hsdp, mended"] < by[gpus, "ftcomm, x10"]
        assert by[gpus, "ftcomm, x10"] < by[gpus, "ftcomm"]
    assert len({row.count for row in rows[:5]}) == 1  # all meet the same failures


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("out.json", "out.csv", "out.png", "out.svg")}
    arguments = ["fleet", "--gpus", "1000,98304", "--days", "1", "--seeds", "3"]
    for option, name in (("--json", "out.json"), ("--csv", "out.csv"), ("--plot", "out.png")):
        arguments += [option, str(files[name])]
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "paper 44%, here 44.4% OK" in said
    assert "paper 80%, here 80.1% OK" in said
    result = json.loads(files["out.json"].read_text())
    assert len(result["rows"]) == 10
    assert {constant["source"] for constant in result["pipelines"][3]["stall"]}
    assert len(files["out.csv"].read_text().splitlines()) == 11
    assert files["out.png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files["out.svg"].read_text()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"replicas": 1}, "expected 2 or more"),
        ({"gpus": (8,)}, "no more than GPUs"),
        ({"failures": "none"}, "expected one of paper"),
        ({"days": 0}, "--days 0"),
        ({"seeds": 1}, "an interval needs several"),
        ({"checkpoint_minutes": -1}, "--checkpoint -1"),
    ],
)
def test_what_cannot_be_computed(other: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        FleetRequest(Path(), Path(), Path(), **other).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"events": []}', '{"events": [{}]}', '{"events": [{"stall_ms": null}]}']
)
def test_what_is_no_result(tmp_path: Path, text: str) -> None:
    recovery, rejoin, control = results(tmp_path)
    recovery.write_text(text)
    with pytest.raises(SettingsError, match="measure"):
        ftcomm_pipeline(1000, 12, recovery, rejoin, control)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"costs": []}', '{"costs": [{}]}', '{"costs": [{"what": "rank"}], "request": {"ranks": 1}}']
)
def test_what_is_no_result_of_control(tmp_path: Path, text: str) -> None:
    recovery, rejoin, control = results(tmp_path)
    control.write_text(text)
    with pytest.raises(SettingsError, match="measure it"):
        ftcomm_pipeline(1000, 12, recovery, rejoin, control)


def test_there_are_results_beside_the_bench() -> None:
    recovery, rejoin, control = newest("recovery"), newest("rejoin"), newest("control")
    assert recovery is not None
    assert rejoin is not None
    assert control is not None
    assert ftcomm_pipeline(1000, 12, recovery, rejoin, control).stalls
