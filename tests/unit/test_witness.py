"""The witness of a rank, with real processes that are killed, and who has one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftcomm.control import handshake, liveness, witness
from ftcomm.control.companion import dismissed
from ftcomm.control.control_thread import ControlThread
from ftcomm.control.links import Listener, listen
from ftcomm.control.messages import Finished
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address
from ftcomm.control.witness import PURPOSE, Witness, WitnessConfig
from tests.rigs.idle_data_plane import IdleDataPlane
from tests.rigs.stopped_processes import DEADLINE, until

NEVER = 600.0  # s, longer than any test
NONCE = "0" * 32
CREDENTIALS = handshake.Credentials("secret")

# A rank that says when its witness has begun, then what else there is to say.
RANK = """
import asyncio, ctypes, os, signal, sys
from ftcomm.control.witness import WitnessConfig, Witness

what, port = sys.argv[1:]
rank = Witness(WitnessConfig("0" * 32, 1, ("127.0.0.1", int(port)), "secret", "", None, 600.0))
assert asyncio.run(rank.begun()) == ""
if what == "forks behind Python's back":
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
elif what == "waits for its children":
    try:
        print(os.wait(), flush=True)
    except ChildProcessError:
        print("none", flush=True)
else:
    print("begun", flush=True)
signal.pause()
"""


class Leader:
    """What witnesses call; it refuses them before `open`."""

    def __init__(self) -> None:
        self.calls: queue.Queue[handshake.Opening] = queue.Queue()
        self._sock = socket.socket()
        self._sock.bind(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._sock.getsockname()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def open(self) -> Leader:
        async def come(channel: Channel, opening: handshake.Opening) -> None:
            channel.close()
            self.calls.put(opening)

        async def begin() -> None:
            self._listener = Listener(self._sock, CREDENTIALS, come, names={NONCE})

        self._sock.listen()
        self._sock.setblocking(False)
        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(DEADLINE)
        return self

    def hears(self) -> None:
        opening = self.calls.get(timeout=DEADLINE)
        assert (opening.purpose, opening.fields) == (PURPOSE, {"shard": 1, "nonce": NONCE})

    def close(self) -> None:
        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(DEADLINE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()
        self._sock.close()


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.close()


@pytest.fixture
def wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is a script that waits for it."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\n"{sys.executable}" "$@"\nexit $?\n')
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))


@contextlib.contextmanager
def a_rank(leader: Leader, what: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """It, and what it says."""
    command = [sys.executable, "-c", RANK, what, str(leader.address[1])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(DEADLINE)


def config(leader: Leader) -> WitnessConfig:
    return WitnessConfig(NONCE, 1, leader.address, "secret", "", None, NEVER)


def ends(witness: socket.socket) -> None:
    """It does; in a copy of the rank's end, which that may have closed."""
    witness.settimeout(DEADLINE)
    with contextlib.suppress(ConnectionResetError):  # it has not read a word
        while witness.recv(1):
            pass


def test_the_end_of_a_rank_is_told(leader: Leader) -> None:
    with a_rank(leader.open()) as (process, said):
        assert said == "begun"
        assert leader.calls.empty()
        process.kill()
        leader.hears()


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.usefixtures("wrapper")
def test_nothing_is_told_of_a_rank_that_ends_as_it_should_whatever_has_started_the_witness(
    leader: Leader, begun: bool
) -> None:
    witness = Witness(config(leader.open()))
    with witness._sock.dup() as heard:
        if begun:
            assert asyncio.run(witness.begun()) == ""
        witness.dismiss()
        ends(heard)
    assert leader.calls.empty()


def test_the_end_of_a_rank_is_told_though_a_child_that_python_does_not_know_lives(leader: Leader) -> None:
    with a_rank(leader.open(), "forks behind Python's back") as (process, child):
        try:
            process.kill()
            leader.hears()
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_the_token_is_not_in_the_environment_of_a_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOMM_TOKEN", "a secret that is long enough")
    given: list[dict[str, str]] = []

    def refuse(*_: object, env: dict[str, str], **__: object) -> None:
        given.append(env)
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="no process"):
        Witness(WitnessConfig("0" * 32, 1, ("127.0.0.1", 1), "a secret that is long enough", "", None, 600.0))
    assert "a secret" not in " ".join(given[0].values())
    assert given[0]["PATH"] == os.environ["PATH"]


def test_a_witness_holds_no_output_of_its_rank(leader: Leader) -> None:
    """Who waits for the end of that waits for the rank alone, however long the leader cannot be reached."""
    with a_rank(leader) as (process, said):
        assert said == "begun"
        process.kill()
        assert process.communicate(timeout=DEADLINE) == ("", "")
    leader.open().hears()


def test_a_script_that_waits_for_all_of_its_children_waits_for_no_witness(leader: Leader) -> None:
    with a_rank(leader.open(), "waits for its children") as (process, said):
        assert said == "none"
        process.kill()
        leader.hears()


def test_a_witness_that_does_not_begin_is_missed(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    witness = Witness(config(leader))
    assert "ended before it began" in asyncio.run(witness.begun())
    witness.dismiss()


def test_a_last_message_counts_though_the_first_one_was_not_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = os.pidfd_open(os.getpid())
    with theirs:
        theirs.send(b"b")
        ours.send(b"x")
        ours.close()
        assert dismissed(theirs, end)
    os.close(end)


def test_a_connection_that_ends_without_a_message_is_no_end_of_the_rank() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    end = os.pidfd_open(process.pid)
    found: queue.Queue[tuple[bool, bool]] = queue.Queue()
    watch = threading.Thread(target=lambda: found.put((dismissed(theirs, end), process.poll() is None)), daemon=True)
    watch.start()
    ours.close()
    with pytest.raises(queue.Empty):
        found.get(timeout=0.2)
    process.stdin.close()
    assert found.get(timeout=DEADLINE) == (False, False)
    theirs.close()
    os.close(end)


# -- who has one -------------------------------------------------------------------------------------------------------


class Replica:
    """Two controls that never reach their coordinator. `pids` are the processes that the leader sees."""

    def __init__(self, pids: str, name: str = "127.0.0.1", host: str = "127.0.0.1") -> None:
        self._nowhere = listen("127.0.0.1", 0)
        sock = listen("127.0.0.1", 0)
        port = sock.getsockname()[1]
        self.leader = self._control_thread(0, sock, None, ("127.0.0.1", port), pids)
        self.rank = self._control_thread(1, None, (name, port), None, liveness.pids(), host)

    def _control_thread(
        self,
        rank: int,
        leader_socket: socket.socket | None,
        leader: tuple[str, int] | None,
        at: tuple[str, int] | None,
        pids: str,
        host: str = "127.0.0.1",
    ) -> ControlThread:
        sock = listen("127.0.0.1", 0)
        there = (host, sock.getsockname()[1])
        control = ControlThread(
            IdleDataPlane(),  # type: ignore[arg-type]
            coordinator=self._nowhere.getsockname(),
            credentials=CREDENTIALS,
            replica=0,
            shard=rank,
            ranks=2,
            leader=leader or at,
            leader_socket=leader_socket,
            sock=sock,
            address=Address(*there, liveness.boot(), os.getpid(), 3, NONCE, network=liveness.network(), pids=pids),
            timeouts=Timeouts.derive(120.0, 10.0),
        )
        control.start()
        return control

    def met(self) -> bool:
        return self.rank._node.machine.incarnation != ""

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *error: object) -> None:
        self.rank.stop()
        self.leader.stop()
        self._nowhere.close()


def test_a_rank_has_a_witness_where_its_leader_sees_other_processes_at_the_same_address() -> None:
    """So two containers have that share a network. It ends with the part of its rank in the job."""
    with Replica("another container") as replica:
        until(replica.met)
        assert replica.rank._witness.called is not None
        with replica.rank._witness.called._sock.dup() as heard:
            replica.rank.stop()
            ends(heard)


def test_a_rank_has_no_witness_where_its_leader_sees_it_whatever_the_name_of_the_host() -> None:
    with Replica(liveness.pids(), "localhost") as replica:
        until(replica.met)
        assert replica.rank._witness.called is None


def test_a_rank_that_may_not_watch_itself_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    with Replica("another container") as replica:
        until(replica.met)
    assert "shard 1 has no witness of its end, so its leader may hear of that late: [Errno 1]" in caplog.text


def test_a_rank_waits_for_no_message_that_a_leader_that_has_ended_would_have_passed_on() -> None:
    """Another host refuses, which proves nothing to a rank that trains."""
    with Replica("another container", host="elsewhere") as replica:
        until(replica.met)
        replica.leader.tell(Finished(True))  # without that it would be lost, and the leader tell it to the rank
        replica.leader.stop()
        until(lambda: replica.rank._node.leader_ended)
        replica.rank.finish(NEVER)


def test_a_witness_that_was_stopped_for_longer_than_it_calls_calls_on(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All may have been stopped, and the leader listens again just when it does."""
    skew, now, tried = [0.0], time.monotonic, threading.Event()
    connect = witness.wire.connect

    def tries(*how: object, **named: object) -> Channel:
        try:
            return connect(*how, **named)  # type: ignore[arg-type]
        except OSError:
            if not tried.is_set():
                skew[0] = 2 * NEVER  # it runs again
                leader.open()
                tried.set()
            raise

    monkeypatch.setattr(witness.time, "monotonic", lambda: now() + skew[0])
    monkeypatch.setattr(witness.wire, "connect", tries)
    witness.tell(WitnessConfig(NONCE, 1, leader.address, "secret", "", None, NEVER), CREDENTIALS)
    assert tried.is_set()
    leader.hears()
