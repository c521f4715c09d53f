"""Ray Train, from the registry, on a cluster of one node: a worker is killed in a backward, and the driver while the
others train; Ray starts the worker again, and all end alike. `make test-ray` runs it: Ray starts a dozen processes, and
gives each of its own services 15 s to come up, which they may not on a machine that is busy with other tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray.train")

HERE = Path(__file__)
EXAMPLES = HERE.parents[2] / "examples"
RAY = Path(sys.executable).with_name("ray")
HEAD = "start --head --block --port 0 --num-cpus 2 --object-store-memory 80000000 --include-dashboard false"
STEPS = 400
DEADLINE = 300.0  # s for each thing that is waited for

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.slow,
    pytest.mark.skipif("FTCOMM_TEST_RAY" not in os.environ, reason="make test-ray, which has the machine to itself"),
]


def until(what: str, true: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"not after {DEADLINE:g} s: {what}"
        time.sleep(0.1)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path, since Ray has sockets in it, on which its cluster is gone at the end."""
    made = Path(tempfile.mkdtemp(prefix="ray-"))
    for name, value in (
        ("PYTHONPATH", os.pathsep.join((str(EXAMPLES), str(HERE.parents[2])))),
        ("OMP_NUM_THREADS", "1"),
        ("RAY_AUTH_MODE", "disabled"),
        ("RAY_raylet_start_wait_time_s", "120"),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("XDG_RUNTIME_DIR", str(made)),
    ):
        monkeypatch.setenv(name, value)
    head = subprocess.Popen(
        [RAY, *HEAD.split(), "--temp-dir", str(made)],
        cwd=made,
        stdout=(made / "head").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        until("a node of Ray", lambda: head.poll() is not None or "Ray runtime started" in (made / "head").read_text())
        assert head.poll() is None, (made / "head").read_text()
        yield made
    finally:
        head.terminate()  # and so all that it has started
        head.wait(60)
        shutil.rmtree(made, ignore_errors=True)


def said(folder: Path) -> str:
    """What the processes of Ray have printed."""
    return "\n".join(path.read_text() for path in sorted((folder / "session_latest" / "logs").glob("worker-*")))


@pytest.mark.shows("Ray", "DDP", "RSJE")
def test_a_worker_and_the_driver_are_killed(folder: Path) -> None:
    command = [sys.executable, str(HERE.with_name("killed.py")), str(folder), "--address", "auto", "--detached"]
    command += ["--workers", "2", "--width", "32", "--steps", str(STEPS), "--storage", str(folder / "storage")]
    with (folder / "driver").open("w") as output:
        driver = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)

    def done(name: str) -> bool:
        assert driver.poll() is None, (folder / "driver").read_text()
        return (folder / name).exists()

    until("the worker is killed", lambda: done("killed"))
    until("the other trains on meanwhile", lambda: done("alone 0"))
    driver.kill()
    driver.wait()
    until("it is back", lambda: (folder / "together 1").exists())
    until("both end", lambda: len(ends(folder)) == 2)
    first, second = ends(folder).values()
    assert first == second
    assert first[0] == str(STEPS)
    text = said(folder)
    assert text.count("(all replicas are here)") == 1, "all workers were started again, in a job of their own"


def ends(folder: Path) -> dict[str, tuple[str, str]]:
    """replica -> (steps, digest of the weights)"""
    found = re.findall(r"replica (\d) trained (\d+) steps, weights ([0-9a-f]+)", said(folder))
    return {replica: (steps, digest) for replica, steps, digest in found}
