"""`ftcomm run --nnodes`: two launchers, each with a run directory of its own, stand for two hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftcomm.launch import run
from tests.process.several_hosts import DEADLINE, SCRIPT, Host
from tests.rigs.ports import free_port

pytestmark = pytest.mark.protocol


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    (tmp_path / "script.py").write_text(SCRIPT)
    port = free_port()
    made: list[Host] = []

    def make(rank: int, *more: str, **variables: str) -> Host:
        made.append(Host(tmp_path, rank, f"127.0.0.1:{port}", *more, **variables))
        return made[-1]

    yield make
    for each in made:
        if each.process.poll() is None:
            each.kill()


@pytest.mark.shows("ftcomm run --nnodes", "NumPy arrays", "RSJE")
def test_a_replica_and_a_host_die_and_come_back(tmp_path: Path, host: Callable[..., Host]) -> None:
    first, second = host(0), host(1)
    variables = {first.hears(f"^.{r}. variables (.*)")[1] for r in (0, 1)}
    variables |= {second.hears(f"^.{r}. variables (.*)")[1] for r in (2, 3)}
    assert variables == {"0 0 4 2 0 2", "1 1 4 2 0 2", "2 0 4 2 1 2", "3 1 4 2 1 2"}

    pid = second.hears("^.3. step .* of (.*) with 4")[1]  # a replica of the host that has no coordinator
    said = len(second.lines)
    os.kill(int(pid), signal.SIGKILL)
    second.hears(r"replica 3 .* was killed by SIGKILL; restarting it", said)
    second.hears("^.3. step .* with 4", said)

    second.kill()
    first.hears("^.0. step .* with 2", len(first.lines))
    said = len(first.lines)
    again = host(1)
    again.hears("^.2. step .* with 4")
    again.hears("^.3. step .* with 4")
    (tmp_path / "enough").touch()
    ends = {first.hears(f"^.{r}. ended (.*)")[1] for r in (0, 1)}
    ends |= {again.hears(f"^.{r}. ended (.*)")[1] for r in (2, 3)}
    assert len(ends) == 1, "replicas differ"
    assert (first.process.wait(DEADLINE), again.process.wait(DEADLINE)) == (0, 0), first.lines + again.lines


def test_a_signal_lets_a_host_leave_and_the_first_host_drain_the_job(host: Callable[..., Host]) -> None:
    first, second = host(0), host(1)
    first.hears("^.0. step .* with 4")
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(DEADLINE) == run.DRAINED, "\n".join(second.lines)
    first.hears("^.0. step .* with 2", len(first.lines))
    other = host(1)  # and another one may take its place
    other.hears("^.2. step .* with 4")
    first.process.send_signal(signal.SIGTERM)
    assert (first.process.wait(DEADLINE), other.process.wait(DEADLINE)) == (run.DRAINED,) * 2, first.lines + other.lines


def test_a_job_ends_without_a_host_that_does_not_come_back(tmp_path: Path, host: Callable[..., Host]) -> None:
    first, second = host(0), host(1)
    first.hears("^.0. step .* with 4")
    second.kill()
    first.hears("^.0. step .* with 2")
    (tmp_path / "enough").touch()
    assert first.process.wait(DEADLINE) == 0, first.lines
    first.hears("the training is complete on replicas 0, 1; replicas 2, 3 were not back in time")


def test_without_host_0_the_others_end_and_say_what_to_type(host: Callable[..., Host]) -> None:
    """The coordinator was there. Its ranks would wait for it for 32 times the op timeout."""
    first = host(0, "--op-timeout", "4")
    second = host(1, "--op-timeout", "4")
    second.hears("^.2. step .* with 4")
    first.kill()
    assert second.process.wait(DEADLINE) == run.FAILED, second.lines
    second.hears("no connection to the launcher of host 0 at 127.0.0.1:")
    second.hears("the job failed: host 0 at 127.0.0.1:.* has refused .* Start the job again from its last checkpoint")
    second.hears("host 0 at 127.0.0.1:.*: the same command on each host$")


def test_hosts_that_differ_are_told_so(host: Callable[..., Host]) -> None:
    first, second = host(0, "--op-timeout", "50"), host(1)
    second.hears("no connection to the launcher of host 0 .*: it was started with .* --op-timeout 120 .* host 0 with")
    second.process.send_signal(signal.SIGTERM)
    first.process.send_signal(signal.SIGTERM)
    assert (first.process.wait(DEADLINE), second.process.wait(DEADLINE)) == (run.DRAINED,) * 2
