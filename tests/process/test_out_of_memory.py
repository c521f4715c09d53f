"""The kernel kills a process for want of memory, and that is told from a SIGKILL by somebody else. Needs root."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftcomm.monitoring.evidence import KernelKills, own_counter

EXIT_TIMEOUT = 60.0  # s
MOST = 64 << 20  # bytes that the process may have
TAKES = f"print(flush=True); input(); x = bytearray({4 * MOST}); x[::4096] = b'x' * len(x[::4096])"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with little memory, below that of this process."""
    counter = own_counter()
    path = counter.parent / f"ftcomm-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if counter.name == "memory.oom_control" else "memory.max"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if not (path / limit).exists():
            pytest.skip(f"no memory controller in {path.parent}")
        (path / limit).write_text(str(MOST))
        yield path / counter.name
    finally:
        path.rmdir()


@contextlib.contextmanager
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process that takes more memory than it may have, once it is told to."""
    command = [sys.executable, "-c", TAKES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("log", ["/dev/kmsg", "/nonexistent"])
def test_who_was_killed_for_want_of_memory_is_known(group: Path, log: str) -> None:
    kills = KernelKills(group, log)
    try:
        with waiting() as process:
            (group.parent / "cgroup.procs").write_text(str(process.pid))
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.close()
            assert process.wait(EXIT_TIMEOUT) == -signal.SIGKILL
            assert kills.killed(process.pid)
        with waiting() as process:
            (group.parent / "cgroup.procs").write_text(str(process.pid))
            process.kill()
            assert process.wait(EXIT_TIMEOUT) == -signal.SIGKILL
            assert not kills.killed(process.pid)
    finally:
        kills.close()
