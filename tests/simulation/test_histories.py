"""The whole protocol in virtual time, with everything going wrong: see `ftcomm.simulation`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ftcomm.simulation.history import run
from ftcomm.simulation.scenario import KINDS
from ftcomm.simulation.simulate_cli import simulate

pytestmark = pytest.mark.protocol

SEEDS = int(os.environ.get("FTCOMM_SIMULATION_SEEDS", "1000"))


@pytest.mark.parametrize("block", range(10))
def test_no_promise_is_broken(block: int) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        history = run(seed)
        assert not history.broken, f"{history.broken}\nftcomm simulate --replay {seed}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_history_does_something(kind: str) -> None:
    histories = [run(seed, 2, 6, kind) for seed in range(40)]
    assert sum(history.returns for history in histories) > 500
    assert not any(history.broken for history in histories)
    if kind not in ("calm", "quiet", "frozen", "stuck", "suspended"):
        assert max(history.views for history in histories) > 2


def test_a_seed_is_a_history_whatever_the_order_of_hashes() -> None:
    script = (
        "from ftcomm.simulation.history import run; print(hash(sum(run(s, traced=True).events for s in range(30))))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_the_command_counts_and_replays() -> None:
    counted = CliRunner().invoke(simulate, ["--seeds", "20", "--jobs", "1", "--members", "2..3"])
    assert counted.exit_code == 0, counted.output
    assert "20 histories" in counted.output
    some = CliRunner().invoke(simulate, ["--seeds", "20", "--jobs", "1", "--kinds", "held,cut-off"])
    assert some.exit_code == 0, some.output
    assert {line.split()[0] for line in some.output.splitlines()[1:3]} == {"cut-off", "held"}
    replayed = CliRunner().invoke(simulate, ["--replay", "3", "--members", "2..3"])
    assert replayed.exit_code == 0
    assert "enters view 1" in replayed.output
    wrong = CliRunner().invoke(simulate, ["--members", "3..2"])
    assert wrong.exit_code == 2
    unknown = CliRunner().invoke(simulate, ["--kinds", "kills,floods"])
    assert unknown.exit_code == 2
    assert "'floods' is not one of 'accused', 'calm'," in " ".join(unknown.output.replace("│", " ").split())
    assert "expected 1 <= first <= last <= 16" in wrong.output
