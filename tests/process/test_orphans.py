"""What is left of a test whose pytest is killed: nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ftcomm

from .job import DEADLINE, Job, Notes

pytestmark = pytest.mark.protocol


def spin(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    notes.write(kind="pid", pid=os.getpid())
    while True:
        time.sleep(0.01)


def start(folder: Path) -> None:
    """As a test does, and it never ends."""
    with Job(folder, replicas=2, body=spin) as job:
        job.join(0)


PYTEST = """
import sys
from pathlib import Path
from tests.process.test_orphans import start
start(Path(sys.argv[1]))
"""


def test_forked_ranks_end_with_pytest_though_nobody_tells_them(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", PYTEST, tmp_path], cwd=root)
    fds: list[int] = []
    try:
        end = time.monotonic() + DEADLINE
        while len(fds) < 2:
            assert time.monotonic() < end, "the ranks have not started"
            assert process.poll() is None
            notes = [path.read_text() for path in tmp_path.glob("notes-*-????")]
            pids = [int(note.rpartition('"pid": ')[2].rstrip("}\n")) for note in notes if '"pid"' in note]
            fds = [os.pidfd_open(pid) for pid in pids] if len(pids) == 2 else []
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait(DEADLINE)
    ended = []
    for fd in fds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        ended.append(bool(poll.poll(1e3 * DEADLINE)))
        if not ended[-1]:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)
    assert ended == [True, True]
