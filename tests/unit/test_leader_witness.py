"""The witness of a leader, with real processes that are killed: whom it calls, and what its own end costs."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ftcomm.control import leaderless
from ftcomm.control.handshake import Credentials
from ftcomm.control.leader_witness import LeaderWitness

from .test_witness import DEADLINE, Leader

# A leader that says which process its witness is, once it has told that what there is to say.
LEADER = """
import os, signal, sys
from ftcomm.control.handshake import Credentials
from ftcomm.control.leader_witness import LeaderWitness

what, first, *others = sys.argv[1:]
children, fork = [], os.fork
os.fork = lambda: children.append(fork()) or children[-1]
witness = LeaderWitness(("127.0.0.1", int(first)), Credentials("secret"), 3, "life", 600.0, ())
if what == "loses it":
    os.kill(children[0], signal.SIGKILL)
    os.waitpid(children[0], 0)
for port in others:
    witness.moved(("127.0.0.1", int(port)))
if what:
    witness.dismiss()
print(children[0], file=sys.stderr, flush=True)
if not what:
    signal.pause()
os._exit(0)
"""


@contextlib.contextmanager
def a_leader(what: str, *coordinators: Leader) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """It, and its witness."""
    command = [sys.executable, "-c", LEADER, what, *(str(each.address[1]) for each in coordinators)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    witness = int(process.stderr.readline())
    try:
        yield process, witness
    finally:
        process.kill()
        process.wait(DEADLINE)
        with contextlib.suppress(ProcessLookupError):
            os.kill(witness, signal.SIGKILL)


@pytest.fixture
def coordinators() -> Iterator[tuple[Leader, Leader, Leader]]:
    """Three that refuse all calls before `open`."""
    made = Leader(), Leader(), Leader()
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("lives", [0, 1, 2])
def test_a_witness_calls_all_coordinators_of_which_its_leader_has_heard(
    lives: int, coordinators: tuple[Leader, Leader, Leader]
) -> None:
    """The two that have taken the job over, and the one that was there at the start."""
    coordinators[lives].open()
    with a_leader("", *coordinators) as (process, _):
        process.kill()
        opening = coordinators[lives].calls.get(timeout=DEADLINE)
        assert opening.purpose == leaderless.PURPOSE
        assert opening.fields == leaderless.told(3, "life", leaderless.reason(process.pid))


def test_a_witness_whose_leader_ends_as_it_should_calls_nobody(coordinators: tuple[Leader, Leader, Leader]) -> None:
    for each in coordinators:
        each.open()
    with a_leader("ends", *coordinators) as (process, witness):
        assert process.wait(DEADLINE) == 0
        with contextlib.suppress(ProcessLookupError):  # it is no child of ours
            end = os.pidfd_open(witness)
            assert select.select([end], [], [], DEADLINE)[0]
            os.close(end)
        assert all(each.calls.empty() for each in coordinators)


def test_a_leader_whose_witness_has_died_ends_as_it_should(coordinators: tuple[Leader, Leader, Leader]) -> None:
    with a_leader("loses it", *coordinators) as (process, _):
        assert process.wait(DEADLINE) == 0


def test_a_leader_without_a_witness_leads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    witness = LeaderWitness(("127.0.0.1", 1), Credentials("secret"), 3, "life", 600.0, ())
    witness.moved(("127.0.0.1", 2))
    witness.dismiss()
    assert "no process is left to witness the end of the leader of replica 3: [Errno 11]" in caplog.text
    os.close(witness._said)


def test_a_witness_holds_no_output_of_its_replica(coordinators: tuple[Leader, Leader, Leader]) -> None:
    """Somebody may wait for the end of that, while the witness calls a coordinator that is away."""
    with a_leader("", *coordinators) as (process, witness):
        assert process.stderr is not None
        process.kill()
        assert select.select([process.stderr], [], [], DEADLINE)[0]
        assert process.stderr.read() == ""
        os.kill(witness, 0)  # it lives
