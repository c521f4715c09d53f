"""A host agent is a process between the leader of a replica and its ranks on one host. The replica ends with it, as it
does with any of its ranks; the others go on.

Here four ranks that follow each other count as those of a host; the leader is beside rank 0, the agent beside rank 4.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import ftcomm

from ..rigs.deadlines import DEADLINE
from .bodies import reduce_forever
from .job import STALL, Job, Notes
from .test_faults import _until as until
from .test_held import go_on, wait_removed
from .test_kills import ENDLESS, check
from .test_leader_process import VICTIM, goes_on_until_a_change, hears_end, members

pytestmark = pytest.mark.protocol

RANKS, HOST_RANKS = 8, 4
FIRST = 4  # the rank beside which the agent is


def with_agents(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """An all-reduce a step. The first rank of a host says who its agent is."""
    control = group._control_thread
    if group.shard == FIRST < group.shards - 1 and group.settings.host_agent:
        end = time.monotonic() + DEADLINE
        while not control.host_agent_pid:
            assert time.monotonic() < end, "its agent has not begun"
            time.sleep(0.001)
        notes.write(kind="host agent", pid=control.host_agent_pid)
    reduce_forever(group, notes, arguments)


def says_its_agent(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    notes.write(kind="host agent", pid=group._control_thread.host_agent_pid)
    reduce_forever(group, notes, arguments)


def job(folder: Path, **settings: Any) -> Job:
    given: dict[str, Any] = dict(replicas=2, ranks=RANKS, host_ranks=HOST_RANKS, elements=1000, steps=ENDLESS)
    return Job(folder, **{"body": with_agents, **given, **settings})


def agent_of(running: Job, replica: int = VICTIM) -> int:
    seen = [note for r, rank, note in running.notes() if (r, rank) == (replica, FIRST) and note["kind"] == "host agent"]
    return int(seen[-1]["pid"])


def begin(running: Job) -> int:
    """Returns the process of the victim's agent."""
    everybody = range(running.replicas)
    running.wait_contributing(set(everybody))
    go_on(running, everybody)
    return agent_of(running)


def stop(pid: int) -> None:
    """Stop a process, with all its threads."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    still = lambda: all(b") T " in (task / "stat").read_bytes() for task in tasks.iterdir())  # noqa: E731
    for _ in until(still, f"process {pid} goes on"):
        pass


def comes_back(running: Job) -> None:
    """The victim is started again, and all end well."""
    seen = len(running.events)
    running.start(VICTIM)
    everybody = set(range(running.replicas))
    running.wait_contributing(everybody, since=seen)
    go_on(running, everybody)
    drain(running)


def drain(running: Job) -> None:
    running.drain()
    for replica in range(running.replicas):
        assert running.join(replica) == [0] * RANKS, running.errors()
    check(running)


def test_replicas_with_agents_train_and_their_agents_end_with_them(tmp_path: Path) -> None:
    with job(tmp_path) as running, contextlib.ExitStack() as ends:
        begin(running)
        for replica in range(running.replicas):
            ends.enter_context(hears_end(agent_of(running, replica)))
        drain(running)
        assert not [event for event in running.events if event["kind"] in ("suspect", "removed")]


@pytest.mark.parametrize("rank", [FIRST, FIRST + 2], ids=["the first", "another"])
def test_a_rank_of_an_agent_that_is_killed_ends_its_replica_at_once(tmp_path: Path, rank: int) -> None:
    """The agent tells it: the member that sees that memory as well stands still meanwhile."""
    with job(tmp_path) as running:
        agent, seen = begin(running), len(running.events)
        pid, peer = (running.processes[replica, rank].pid for replica in (VICTIM, 0))
        assert peer is not None
        stop(peer)
        with hears_end(agent):
            running.processes[VICTIM, rank].kill()
            why = wait_removed(running, VICTIM)
            assert why == f"lost {VICTIM}: its shard {rank} is lost: its process {pid} has ended", running.events[seen:]
            assert running.join(VICTIM) == [-signal.SIGKILL if rank == one else 1 for one in range(RANKS)]
        os.kill(peer, signal.SIGCONT)
        go_on(running, [0])
        comes_back(running)


@pytest.mark.parametrize("held", [False, True], ids=["", "and the rank beside it is stopped"])
def test_an_agent_that_is_killed_ends_its_replica_and_the_reason_says_so(tmp_path: Path, held: bool) -> None:
    """Any rank of its host tells it: nobody listens there any more."""
    with job(tmp_path) as running:
        agent, seen = begin(running), len(running.events)
        first = running.processes[VICTIM, FIRST].pid
        assert first is not None
        if held:
            os.kill(first, signal.SIGSTOP)
        os.kill(agent, signal.SIGKILL)
        why = wait_removed(running, VICTIM)
        assert "its host agent" in why, running.events[seen:]
        assert "has ended" in why
        go_on(running, [0])
        if held:
            os.kill(first, signal.SIGCONT)
        assert running.join(VICTIM) == [1] * RANKS, running.errors()
        comes_back(running)


def test_an_agent_that_is_stopped_costs_nothing_until_the_view_has_to_change_and_then_the_stall_names_it(
    tmp_path: Path,
) -> None:
    """Training needs no agent."""
    with job(tmp_path, replicas=3, **STALL) as running:
        agent = begin(running)
        why = goes_on_until_a_change(running, agent)
        assert f"the host agent of its shards {FIRST} to {RANKS - 1}, a process beside shard {FIRST}" in why, why
        go_on(running, [0])
        os.kill(agent, signal.SIGCONT)
        with hears_end(agent):
            assert running.join(VICTIM) == [1] * RANKS
        running.drain()
        assert running.join(0) == [0] * RANKS, running.errors()
        check(running)


def test_an_agent_that_is_stopped_for_a_while_is_no_loss(tmp_path: Path) -> None:
    """A change of the view waits for it."""
    with job(tmp_path, replicas=3) as running:
        agent = begin(running)
        os.kill(agent, signal.SIGSTOP)
        running.kill(2)
        running.wait_event("the loss of 2", lambda events: [0, 1] in members(running))
        os.kill(agent, signal.SIGCONT)
        for _ in until(lambda: members(running)[-1] == [0, 1], "the view is another"):
            pass
        go_on(running, [0, 1])
        running.drain()
        for replica in (0, 1):
            assert running.join(replica) == [0] * RANKS, running.errors()
        check(running)


def test_a_replica_on_one_host_starts_no_agent(tmp_path: Path) -> None:
    with job(tmp_path, ranks=2, host_ranks=2, body=says_its_agent) as running:
        running.wait_contributing({0, 1})
        go_on(running, [0, 1])
        said = [note["pid"] for _, _, note in running.notes() if note["kind"] == "host agent"]
        assert len(said) == 4
        assert not any(said)
        running.drain()
        for replica in range(2):
            assert running.join(replica) == [0, 0]
        check(running)
