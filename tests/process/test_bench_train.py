"""`ftcomm bench train`: real steps and a real kill, for what is written and not for how fast it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcomm.bench.peers import missing
from ftcomm.bench.train import Timed, TrainRequest, step_rows
from ftcomm.errors import SettingsError

from .conftest import Bench

STEP = {
    *("library", "ranks", "parameters", "rounds", "iterations", "step_ms_p50", "step_ms_p99", "round_ms", "ratio"),
}
KILLS = {
    *("library", "replicas", "parameters", "steps", "kills", "steps_per_minute", "steps_per_minute_killed", "share"),
    *("lost", "usual_gap_ms", "longest_gap_ms", "equal"),
}


@pytest.mark.protocol
def test_steps_and_kills(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    without = (
        missing("torchft", "cpu", 2) is not None
    )  # where it is there it is left alone: its kills take half a minute
    done = bench("train", "--smoke", "--compare", "gloo,torchft" if without else "gloo", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert ("torchft is not installed" in done.stdout) == without
    result = json.loads(path.read_text())
    assert [row["library"] for row in result["steps"]] == ["ftcomm", "gloo", "none"]
    for row in result["steps"]:
        assert row.keys() == STEP
        assert 0 < row["step_ms_p50"] <= row["step_ms_p99"]
        assert (row["ratio"] is None) == (row["library"] == "ftcomm")
    (row,) = result["kills"]
    assert row.keys() == KILLS
    assert (row["library"], row["kills"], row["lost"], row["equal"]) == ("ftcomm", 1, 0, True)


def test_a_step_takes_as_long_as_on_its_slower_rank_and_ratios_are_of_one_round() -> None:
    seconds = {("ftcomm", 0): ([1.0, 4.0], [3.0, 2.0]), ("ftcomm", 1): ([2.0, 2.0], [1.0, 1.0])}
    seconds |= {("gloo", number): ([6.0, 8.0], [1.0, 1.0]) for number in range(2)}
    timed = [
        Timed(rank, library, number, times[rank]) for (library, number), times in seconds.items() for rank in range(2)
    ]
    ours, gloo = step_rows(timed, ("ftcomm", "gloo"), TrainRequest(rounds=2))
    assert ours.round_ms == [3500.0, 2000.0]
    assert ours.step_ms_p50 == 2500.0
    assert gloo.ratio == (7 / 3.5 + 7 / 2) / 2
    assert TrainRequest().parameters == 25_469_440


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"compare": ("nccl",)}, "--compare nccl: expected of gloo, torchft, restart"),
        ({"replicas": 1}, "--replicas 1: expected 2 to 1024"),
        ({"width": 7}, "--width has to be a multiple of 8"),
        ({"rounds": 0, "steps": 0}, "one of them more"),
        ({"width": 65536}, "lower --replicas or --width"),
    ],
)
def test_what_cannot_be_measured_is_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        TrainRequest(**other).check()
