"""`ftcomm bench`, real: a few ops and a few kills, for what is written and not for how fast it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROW = {
    *("op", "library", "device", "transport", "ranks", "dtype", "redop", "bytes", "count", "rounds", "iterations"),
    *("time_us_p50", "time_us_p99", "time_us_mean", "algbw_gbps", "busbw_gbps", "wrong", "round_us", "ratio"),
    "round_ratio",
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ftcomm.cli", "bench", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=110)


def test_allreduce_beside_gloo(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("allreduce", "--smoke", "--compare", "gloo", "--ranks", "2,3", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "# Wrong elements: 0 OK" in done.stdout
    result = json.loads(path.read_text())
    assert {"command", "date", "cpu", "cores", "ftcomm", "torch", "numpy", "python", "schema"} <= result[
        "header"
    ].keys()
    assert all(row.keys() == ROW for row in result["rows"])
    seen = [(row["ranks"], row["bytes"], row["library"]) for row in result["rows"]]
    assert seen == [(n, size, lib) for n in (2, 3) for size in (1 << 10, 1 << 20) for lib in ("ftcomm", "gloo")]
    for row in result["rows"]:
        assert row["wrong"] == 0
        assert 0 < row["time_us_p50"] <= row["time_us_p99"]
        assert (row["ratio"] is None) == (row["library"] == "ftcomm")
    # One line a size, between the header and the footer, and nothing else.
    assert sum(not line.startswith("#") for line in done.stdout.splitlines()) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-d", "bfloat16", "-o", "max", "--sizes", "2K,3000", "-n", "3"), id="bf16 max"),
        pytest.param(("-d", "float16", "-o", "sum", "--sizes", "64K", "-n", "30"), id="fp16 sum, filled again"),
        pytest.param(("--compare", "atomic", "--sizes", "1K,1500K", "-n", "3"), id="atomic"),
        pytest.param(("-d", "int64", "-o", "product", "--sizes", "1K", "-n", "3", "--transport", "tcp"), id="tcp"),
    ],
)
def test_allreduce_kinds(arguments: tuple[str, ...]) -> None:
    done = run("allreduce", "--rounds", "1", *arguments)
    assert done.returncode == 0, done.stderr
    assert "# Wrong elements: 0 OK" in done.stdout


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("allreduce", "--sizes", "1K,1M,2M", "-n", "5", "--rounds", "1", "--json", str(path))
    endless = (*arguments[:2], "1K" + ",1M" * 5000, *arguments[3:])
    with subprocess.Popen(command(*endless), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("#"):
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    rows = json.loads(path.read_text())["rows"]
    assert rows
    assert rows[0]["bytes"] == 1024
    assert not _children_of_the_run(process.pid)


def test_recovery(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("recovery", "--smoke", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ops that survived: 2 of 2; equal bytes on all survivors: 2 of 2; wrong elements: 0" in done.stdout
    result = json.loads(path.read_text())
    assert [event["victim"] for event in result["events"]] == [0, 1]
    for event in result["events"]:
        assert event["completed"]
        assert event["equal"]
        assert event["detect_ms"] > 0
        assert event["stall_ms"] == max(event["survivor_ms"].values())
        assert len(event["survivor_ms"]) == 2
        assert event["rejoin_ms"] > event["detect_ms"]
    assert result["summary"]["steps_lost"] == 0
    assert set(result["summary"]["stall_ms"]) == {"p50", "p99", "max"}


def test_detection(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run("detection", "--smoke", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# detected: 2 of 2" in done.stdout
    result = json.loads(path.read_text())
    assert [(event["replica"], event["rank"]) for event in result["events"]] == [(0, 0), (1, 0)]
    for event in result["events"]:
        assert 0 < event["detect_ms"] <= event["view_ms"]
        assert event["how"]
    assert result["summary"]["detect_ms"].keys() == {"p50", "p90", "p99", "max"}


def _children_of_the_run(pid: int) -> list[str]:
    """Ranks of a run carry the pid of their launcher nowhere, but are its children; orphans go to 1 or a reaper."""
    deadline = time.monotonic() + 10
    while True:
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"ftcomm.bench.allreduce_rank" in words:
                    alive.append(entry.name)
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)
