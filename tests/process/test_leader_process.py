"""The leader of a replica of several ranks is a process beside its shard 0, whose interpreter carries nothing of
others.

Each of the two is held, stopped or killed. The replica ends with either, and the others go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ftcomm
from ftcomm.settings import Settings

from .bodies import reduce_forever
from .job import DEADLINE, Job, Notes
from .test_faults import _until as until
from .test_held import STALL, go_on, kinds, wait_removed
from .test_kills import ENDLESS, check

pytestmark = pytest.mark.protocol

VICTIM = 1  # the replica whose leader or rank 0 it is


def led(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """An all-reduce a step. Rank 0 says who its leader is."""
    control = group._control_thread
    while group.shard == 0 < group.shards - 1 and not control.leader_pid:
        time.sleep(0.001)
    notes.write(kind="leader", pid=control.leader_pid, here=os.getpid())
    threading.Thread(target=_hold, args=(group, notes, Path(arguments["marks"])), daemon=True).start()
    reduce_forever(group, notes, arguments)


def _hold(group: ftcomm.Group, notes: Notes, marks: Path) -> None:
    """Hold the interpreter as soon as the test says so, until it says something else."""
    pipe = marks / f"held-{group.replica}-{group.shard}"
    while not pipe.exists():
        time.sleep(0.005)
    fd = os.open(pipe, os.O_RDWR)
    pipe.unlink()  # the next life is not held
    notes.write(kind="holds")
    ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)  # PyDLL keeps the interpreter lock
    notes.write(kind="held")


def job(folder: Path, **settings: Any) -> Job:
    given: dict[str, Any] = dict(replicas=3, ranks=2, elements=1000, steps=ENDLESS, heartbeat_timeout=2.0)
    return Job(folder, body=led, **{**given, **settings})


def begin(running: Job) -> int:
    """Returns the process of the victim's leader."""
    running.wait_contributing(set(range(running.replicas)))
    go_on(running, range(running.replicas))
    return leader_of(running, VICTIM)


def leader_of(running: Job, replica: int) -> int:
    notes = [note for r, rank, note in running.notes() if (r, rank) == (replica, 0) and note["kind"] == "leader"]
    return int(notes[-1]["pid"])


def hold(running: Job, rank: int) -> int:
    """Of the victim. Returns where to write a byte to let it go on."""
    pipe = running.folder / f"new-{rank}"
    os.mkfifo(pipe)
    way = os.open(pipe, os.O_RDWR)
    pipe.rename(running.folder / f"held-{VICTIM}-{rank}")
    holds = lambda: any(of == rank for r, of, note in running.notes() if r == VICTIM and note["kind"] == "holds")  # noqa: E731
    for _ in until(holds, f"rank {rank} does not hold its interpreter"):
        pass
    return way


@contextlib.contextmanager
def hears_end(pid: int) -> Iterator[None]:
    """Afterwards the process has to end."""
    fd = os.pidfd_open(pid)
    try:
        yield
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(1e3 * DEADLINE), f"process {pid} is left"
    finally:
        os.close(fd)


def members(running: Job) -> list[list[int]]:
    return [[x["replica"] for x in event["members"]] for event in running.events if event["kind"] == "view"]


def comes_back(running: Job) -> None:
    """The victim is started again, and all end well."""
    seen = len(running.events)
    running.start(VICTIM)
    everybody = set(range(running.replicas))
    running.wait_contributing(everybody, since=seen)
    go_on(running, everybody)
    running.drain()
    for replica in everybody:
        assert running.join(replica) == [0] * running.ranks, running.errors()
    check(running)


def test_the_other_rank_hears_of_a_view_while_the_interpreter_of_rank_0_is_held(tmp_path: Path) -> None:
    """Without the leader in its process; and held until the other one has gone on, however long that takes."""
    with job(tmp_path) as running:
        begin(running)
        way = hold(running, 0)
        running.kill(2)

        def goes_on() -> bool:
            notes = [note for r, rank, note in running.notes() if (r, rank) == (VICTIM, 1) and note["kind"] == "step"]
            return sum(note["epoch"] > 1 for note in notes) > 20

        for _ in until(goes_on, "the other rank does not hear of the view"):
            pass
        assert not kinds(running, VICTIM, "held")
        os.write(way, b"x")
        os.close(way)
        for _ in until(lambda: kinds(running, VICTIM, "held"), "it holds its interpreter"):
            pass
        go_on(running, [0, VICTIM])
        assert members(running) == [[0, 1, 2], [0, 1]]
        running.drain()
        for replica in (0, VICTIM):
            assert running.join(replica) == [0, 0], running.errors()
        check(running)


def test_a_leader_that_is_killed_ends_its_replica_and_its_rank_0_says_why(tmp_path: Path) -> None:
    """The other rank finds that nobody listens there any more; here it is stopped, since its end would tell it, too.
    The leader is a new interpreter, as in a job of a user."""
    with job(tmp_path, fork_companions=False) as running:
        leader, seen = begin(running), len(running.events)
        other = running.processes[VICTIM, 1].pid
        assert other is not None
        os.kill(other, signal.SIGSTOP)
        os.kill(leader, signal.SIGKILL)
        why = wait_removed(running, VICTIM)
        assert why.startswith(f"lost {VICTIM}: its leader, process {leader}, has ended; "), running.events[seen:]
        os.kill(other, signal.SIGCONT)
        assert running.join(VICTIM) == [1, 1]
        assert f"its leader, process {leader}, has ended" in running.errors()[0][2]
        go_on(running, [0, 2])
        comes_back(running)


@pytest.mark.parametrize("away", [False, True], ids=["", "and the coordinator is away"])
def test_the_end_of_a_leader_is_told_while_all_its_ranks_hold_their_interpreters(tmp_path: Path, away: bool) -> None:
    """As a compilation does. The witness of the leader tells it; nobody waits until that is a stall. The ranks end when
    they go on."""
    with job(tmp_path) as running:
        leader, seen = begin(running), len(running.events)
        ways = [hold(running, rank) for rank in range(2)]
        if away:
            running.stop_coordinator()
        os.kill(leader, signal.SIGKILL)
        if away:
            running.start_coordinator()
        why = wait_removed(running, VICTIM)
        assert why.startswith(f"lost {VICTIM}: its leader, process {leader}, has ended; "), running.events[seen:]
        go_on(running, [0, 2])
        for way in ways:
            os.write(way, b"x")
            os.close(way)
        assert running.join(VICTIM) == [1, 1]
        comes_back(running)


def goes_on_until_a_change(running: Job, pid: int) -> str:
    """A process beside a rank of the victim is stopped, and later replica 2 killed. Returns why the victim is removed
    then."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 2 * STALL["op_floor"]
    while time.monotonic() < end:
        go_on(running, range(3))
    assert members(running) == [[0, 1, 2]]
    running.kill(2)
    running.wait_event("the loss of 2", lambda events: [0, 1] in members(running))
    return wait_removed(running, VICTIM)


def test_a_leader_that_is_stopped_costs_nothing_until_the_view_has_to_change_and_then_it_is_a_stall(
    tmp_path: Path,
) -> None:
    """Training needs no leader. The ranks end when theirs goes on; under a launcher they are ended before that."""
    with job(tmp_path, **STALL) as running:
        leader = begin(running)
        why = goes_on_until_a_change(running, leader)
        assert "waits for it" in why
        go_on(running, [0])
        os.kill(leader, signal.SIGCONT)
        with hears_end(leader):
            assert running.join(VICTIM) == [1, 1]
        running.drain()
        assert running.join(0) == [0, 0], running.errors()
        check(running)


@pytest.mark.parametrize("how", ["", "and no pidfd is to be had"])
def test_a_rank_0_that_is_killed_ends_its_leader_and_its_replica(tmp_path: Path, how: str) -> None:
    """The leader says so to all, and leaves no process behind."""
    prepare = {"prepare": _refuse_pidfds} if how else {}
    with job(tmp_path, **prepare) as running:
        leader = begin(running)
        pid = running.processes[VICTIM, 0].pid
        with hears_end(leader):
            running.processes[VICTIM, 0].kill()
            why = wait_removed(running, VICTIM)
            says = f"its shard 0 is lost: its process {pid} has ended"  # the leader, and the members of the same host:
            said = (says, "the process of its shard 0 died", f"its process {pid} ended")
            assert why in [f"lost {VICTIM}: {text}" for text in said], why
            assert running.join(VICTIM) == [-signal.SIGKILL, 1]
        [error] = [text for replica, _, text in running.errors() if replica == VICTIM]
        assert any(text in error for text in said), error
        go_on(running, [0, 2])
        comes_back(running)


def _refuse_pidfds(settings: Settings, arguments: dict[str, Any]) -> None:
    """Of this process, as a sandbox may; that of another one is a test's business."""
    given, me = os.pidfd_open, os.getpid()

    def refuse(pid: int, flags: int = 0) -> int:
        if pid == me:
            raise PermissionError(1, "Operation not permitted")
        return given(pid, flags)

    os.pidfd_open = refuse  # type: ignore[assignment]


def test_a_replica_of_one_process_starts_no_leader(tmp_path: Path) -> None:
    with job(tmp_path, replicas=2, ranks=1) as running:
        assert begin(running) == 0
        running.drain()
        for replica in range(2):
            assert running.join(replica) == [0]
        check(running)


def test_leaders_end_with_a_job_that_ends_well(tmp_path: Path) -> None:
    with job(tmp_path, replicas=2, fork_companions=False) as running, contextlib.ExitStack() as ends:
        begin(running)
        for replica in range(2):
            ends.enter_context(hears_end(leader_of(running, replica)))
        running.drain()
        for replica in range(2):
            assert running.join(replica) == [0, 0], running.errors()
        check(running)
