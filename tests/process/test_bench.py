"""`ftcomm bench`, real: a few ops and a few kills, for what is written and not for how fast it was."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftcomm.bench.peers import missing
from ftcomm.settings.tuning_file import load
from ftcomm.transport.segment import STAGED

from .conftest import Bench

ROW = {
    *(
        "op",
        "library",
        "device",
        "transport",
        "ranks",
        "dtype",
        "redop",
        "root",
        "in_place",
        "bytes",
        "count",
        "rounds",
    ),
    *("iterations", "time_us_p50", "time_us_p99", "time_us_mean", "algbw_gbps", "busbw_gbps", "limit_pct", "wrong"),
    *("round_us", "ratio", "round_ratio", "sms", "wire", "error"),
}


LIMIT = 300.0  # s for a test: each command imports torch in several processes, on a busy machine for a minute
MARK = "FTCOMM_TEST_RUN"  # in the environment of a command, and of all that it starts


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ftcomm.cli", "bench", *arguments]


@pytest.mark.protocol  # of gloo on the newest torch tells the recovery beside it
def test_allreduce_beside_its_peers(bench: Bench, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("out.json", "out.csv", "out.png")]
    peers = ["gloo", *(["mpi"] if missing("mpi", "cpu", 2) is None else [])]
    done = bench(
        *("allreduce", "--smoke", "--compare", "gloo,mpi,nccl"),
        *(part for option in zip(("--json", "--csv", "--plot"), map(str, files), strict=True) for part in option),
    )
    assert done.returncode == 0, done.stderr
    assert "# Wrong elements: 0 OK" in done.stdout
    assert "# nccl moves what is on GPUs (--device cuda); left out" in done.stdout
    result = json.loads(files[0].read_text())
    assert {"command", "date", "cpu", "cores", "ftcomm", "torch", "numpy", "python", "schema"} <= result[
        "header"
    ].keys()
    assert all(row.keys() == ROW for row in result["rows"])
    seen = [(row["bytes"], row["in_place"], row["library"]) for row in result["rows"]]
    assert seen == [
        (size, place, library)
        for size in (1 << 10, 1 << 20)
        for place in (False, True)
        for library in ("ftcomm", *peers)
    ]
    for row in result["rows"]:
        assert (row["wrong"], row["error"]) == (0, "")
        assert 0 < row["time_us_p50"] <= row["time_us_p99"]
        assert row["limit_pct"] > 0
        assert (row["ratio"] is None) == (row["library"] == "ftcomm")
    # A line for each library at each size, between the header and the footer, and nothing else.
    assert sum(not line.startswith("#") for line in done.stdout.splitlines()) == 2 * (1 + len(peers))
    assert len(files[1].read_text().splitlines()) == 1 + len(result["rows"])
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in files[2].with_suffix(".svg").read_text()


@pytest.mark.protocol
def test_another_collective(bench: Bench) -> None:
    """Three ranks, sizes that no chunk divides. What is right is tested for all of them in tests/unit/test_bench.py."""
    done = bench(
        "reduce-scatter", "--sizes", "1200,3000K", "-n", "2", "--rounds", "1", "--ranks", "3", "--compare", "gloo"
    )
    assert done.returncode == 0, done.stderr
    assert "# Wrong elements: 0 OK" in done.stdout
    assert "gloo:" not in done.stdout


@pytest.mark.protocol
def test_a_peer_that_is_killed_has_a_row_that_says_so_and_the_rest_goes_on(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("allreduce", "--sizes", "1K,2K,4K", "-n", "3", "--rounds", "1", "--compare", "gloo")
    done = bench(*arguments, "--json", str(path), first_row=lambda: os.kill(bench.peers[0].pid, signal.SIGKILL))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert not [row for row in rows if row["library"] == "ftcomm" and row["error"]]
    assert {(row["bytes"], row["in_place"]) for row in rows if row["library"] == "ftcomm"} == {
        (size << 10, place) for size in (1, 2, 4) for place in (False, True)
    }
    last = [row for row in rows if row["library"] == "gloo"][-1]
    assert "signal SIGKILL" in last["error"]
    assert last["time_us_p50"] is None
    assert "# gloo: rank 0 ended with signal SIGKILL" in done.stdout
    assert not multiprocessing.active_children(), "of ftcomm or of gloo"


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-d", "bfloat16", "-o", "max", "--sizes", "2K,3000", "-n", "3"), id="bf16 max"),
        pytest.param(("-d", "float16", "-o", "sum", "--sizes", "64K", "-n", "30"), id="fp16 sum, filled again"),
        pytest.param(("--compare", "atomic", "--sizes", "1K,1500K", "-n", "3"), id="atomic"),
        pytest.param(("-d", "int64", "-o", "product", "--sizes", "1K", "-n", "3", "--transport", "tcp"), id="tcp"),
    ],
)
@pytest.mark.protocol
def test_allreduce_kinds(bench: Bench, arguments: tuple[str, ...]) -> None:
    done = bench("allreduce", "--rounds", "1", *arguments)
    assert done.returncode == 0, done.stderr
    assert "# Wrong elements: 0 OK" in done.stdout


@pytest.mark.parametrize(
    ("endless", "rows"),
    [
        (("allreduce", "--sizes", "1K" + ",1M" * 3000, "-n", "5", "--rounds", "1"), "rows"),
        pytest.param(
            ("recovery", "--replicas", "2", "--size", "4M", "--kills", "1000"), "events", marks=pytest.mark.sweep
        ),
    ],
    ids=["allreduce", "recovery"],
)
@pytest.mark.protocol
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, endless: tuple[str, ...], rows: str) -> None:
    path = tmp_path / "out.json"
    with started(tmp_path, *endless, "--json", str(path)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("#"):
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT - 60)
    assert process.returncode == 130
    result = json.loads(path.read_text())
    assert result[rows]
    assert result[rows][0].get("bytes", 1024) == 1024
    assert result["header"]["command"]
    assert not left_of(tmp_path)


@pytest.mark.protocol
def test_recovery_beside_gloo(bench: Bench, tmp_path: Path) -> None:
    """ftcomm's op returns on all survivors; gloo's never does, and all of its ranks are started again."""
    path = tmp_path / "out.json"
    arguments = ("--replicas", "3", "--size", "4M", "--kills", "1", "--compare", "gloo")
    done = bench("recovery", *arguments, "--json", str(path), "--plot", str(tmp_path / "out.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ops that survived: 1 of 1; equal bytes on all survivors: 1 of 1; wrong elements: 0" in done.stdout
    result = json.loads(path.read_text())
    event, gloo = result["events"]
    assert (event["library"], event["victim"], event["completed"], event["equal"]) == ("ftcomm", 0, True, True)
    assert 0 < event["detect_ms"] <= event["view_ms"] < event["rejoin_ms"]
    assert event["resume_ms"] > 0
    assert event["stall_ms"] == max(event["survivor_ms"].values())
    assert len(event["survivor_ms"]) == 2
    assert event["steps_lost"] == 0
    assert event["bytes_resent"] <= event["bytes_in_flight"] == 2 * STAGED
    assert (gloo["library"], gloo["completed"], gloo["stall_ms"], gloo["steps_lost"]) == ("gloo", False, None, 1)
    assert 0 < gloo["detect_ms"] < gloo["rejoin_ms"]
    assert [summary["library"] for summary in result["summary"]] == ["ftcomm", "gloo"]
    assert set(result["summary"][0]["stall_ms"]) == {"p50", "p99", "max"}
    assert (tmp_path / "out.svg").exists()


@pytest.mark.protocol
def test_overhead(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("overhead", "--smoke", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    costs = json.loads(path.read_text())["costs"]
    assert [cost["level"] for cost in costs] == ["off", "stability", "detection", "ftcomm", "verify"]
    assert all(cost["wrong"] == 0 and cost["time_us_p50"] > 0 for cost in costs)
    assert "fault tolerance on against off" in done.stdout
    assert "the recorder alone" in done.stdout
    [share] = json.loads(path.read_text())["shares"]
    assert share["ops_per_step"] > 1
    record_us = share["op_us"] * share["ops_per_step"] + share["phase_us"] * 3
    assert share["share_pct"] == pytest.approx(100 * record_us / (1000 * share["step_ms"]))
    assert "of the demo's" in done.stdout


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Known by `folder` from those of tests that run at the same time."""
    environment = {**os.environ, MARK: str(folder)}
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def left_of(folder: Path) -> list[str]:
    """Processes of the command that was started with `folder` that do not end."""
    deadline = time.monotonic() + 30
    mark = f"{MARK}={folder}".encode()
    while True:
        alive = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    alive.append((entry / "cmdline").read_text())
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


@pytest.mark.protocol
def test_tune_writes_a_file_with_which_a_job_runs(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    done = bench("tune", "--smoke", "--ranks", "3", "--file", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"(one-shot up to \S+|two-shot at every size) with 3 members on one host: \d+ us against", done.stdout
    )
    assert f"use it with FTCOMM_TUNING={path} on all ranks" in done.stdout
    file = json.loads(path.read_text())
    assert list(file["one_shot_on_one_host"]) == ["3"]
    assert load(str(path)).source == str(path)
    within = [*command("tune", "--smoke", "--file", str(path))]
    environment = {**os.environ, "FTCOMM_TUNING": str(path)}
    launch = [sys.executable, "-m", "ftcomm.cli", "run", "--replicas", "2", "-m", "ftcomm.cli", *within[3:]]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=LIMIT - 20, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("with 2 members on one host") == 1  # one rank speaks
    assert sorted(json.loads(path.read_text())["one_shot_on_one_host"]) == ["2", "3"]
