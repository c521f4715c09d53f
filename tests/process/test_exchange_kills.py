"""SIGKILL at random moments inside an all-reduce between processes; the test stands in for the control plane."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.exchange_process import main
from tests.process.job import only_on_host
from tests.rigs.deadlines import DEADLINE

pytestmark = pytest.mark.protocol

_context = multiprocessing.get_context("forkserver")  # of tests.process.job, which has imported what a member needs


class Job:
    """The processes, and the view changes."""

    def __init__(self, count: int, mode: str) -> None:
        self.mode = mode
        self.epoch = 0
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Any] = {}
        self.addresses: dict[int, Any] = {}
        for replica in range(count):
            near, far = _context.Pipe()
            process = _context.Process(target=main, args=(replica, mode, far, count), daemon=True)
            process.start()
            far.close()
            self.processes[replica], self.pipes[replica] = process, near

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(DEADLINE)

    def receive(self, replica: int, name: str) -> Any:
        """The next report of this name; others that come before are dropped, if they may come."""
        end = time.monotonic() + DEADLINE
        while True:
            assert self.pipes[replica].poll(max(0.0, end - time.monotonic())), f"replica {replica} says nothing"
            report = self.pipes[replica].recv()
            if report[0] == name:
                return report[1:]
            assert report[0] in ("lost", "started", "returned"), report

    def start(self) -> None:
        for replica in self.processes:
            (self.addresses[replica],) = self.receive(replica, "hello")
        self.view()

    def view(self, also_kill: int | None = None) -> None:
        """A view of those that live; `also_kill` dies while it is being agreed upon."""
        done: dict[int, Any] = {}
        self.epoch += 1
        for replica in self.processes:
            self.pipes[replica].send(("freeze", self.epoch))
        if also_kill is not None:
            self.kill(also_kill)
            self.epoch += 1
            for replica in self.processes:
                self.pipes[replica].send(("freeze", self.epoch))
        progress = {}
        for replica in self.processes:
            epoch = -1
            while epoch != self.epoch:
                name, *report = self.report(replica)
                if name == "progress":
                    epoch, progress[replica] = report
                elif name == "done":
                    done[replica] = report
        members = {m: self.addresses[m] for m in sorted(self.processes)}
        for replica in self.processes:
            self.pipes[replica].send(("enter", self.epoch, members, progress))
        self.early = done

    def report(self, replica: int) -> Any:
        assert self.pipes[replica].poll(DEADLINE), f"replica {replica} says nothing"
        return self.pipes[replica].recv()

    def kill(self, replica: int) -> None:
        process = self.processes.pop(replica)
        os.kill(process.pid, signal.SIGKILL)
        process.join(DEADLINE)
        self.pipes.pop(replica).close()

    def reduce(self, count: int, atomic: bool = False, wire: str = "input") -> None:
        self.start_all("reduce", count, atomic, wire)

    def start_all(self, *command: Any) -> None:
        self.early = {}
        for pipe in self.pipes.values():
            pipe.send(command)

    def results(self) -> set[Any]:
        """What the members returned; one element if they agree."""
        out = set()
        for replica in self.processes:
            out.add(tuple(self.early.get(replica) or self.receive(replica, "done")))
        return out


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    only_on_host("part in this: it drives the exchange of the host itself")
    started: list[Job] = []
    yield started
    for job in started:
        job.close()


@pytest.mark.parametrize(
    ("mode", "members", "megabytes", "atomic", "seed"),
    [
        ("shm", 6, 8, False, 6),
        ("shm", 4, 16, True, 19),
        ("tcp", 4, 16, False, 14),
        pytest.param("ring", 4, 16, False, 34, marks=pytest.mark.sweep),
        ("ring", 4, 16, True, 38),
        ("hosts", 5, 16, False, 40),  # three members on one host, two on the other
        ("rows", 6, 16, True, 46),  # two rows of three, and then of others
        pytest.param("shm", 4, 64, False, 0, marks=pytest.mark.sweep),
        pytest.param("tcp", 4, 16, True, 24, marks=pytest.mark.sweep),
        pytest.param("hosts", 5, 16, True, 44, marks=pytest.mark.sweep),
        pytest.param("rows", 6, 16, False, 45, marks=pytest.mark.sweep),
        *[pytest.param("shm", 4, 16, False, seed, marks=pytest.mark.sweep) for seed in range(2, 4)],
        *[pytest.param("shm", 6, 8, False, seed, marks=pytest.mark.sweep) for seed in range(7, 10)],
        *[pytest.param(mode, 4, 16, False, 15, marks=pytest.mark.sweep) for mode in ("tcp", "ring")],
        pytest.param("shm", 4, 64, True, 18, marks=pytest.mark.sweep),
        pytest.param("hosts", 5, 16, False, 41, marks=pytest.mark.sweep),
    ],
)
def test_survivors_of_sigkill_return_the_same_bytes(
    jobs: list[Job], mode: str, members: int, megabytes: int, atomic: bool, seed: int
) -> None:
    one_after_the_other(jobs, mode, members, megabytes, atomic, seed, "input")


@pytest.mark.parametrize(
    ("mode", "members", "megabytes", "atomic", "seed"),
    [
        ("tcp", 3, 8, True, 53),
        pytest.param("shm", 4, 8, False, 51, marks=pytest.mark.sweep),
        pytest.param("tcp", 4, 8, False, 52, marks=pytest.mark.sweep),
        pytest.param("shm", 3, 8, False, 54, marks=pytest.mark.sweep),
    ],
)
def test_survivors_of_sigkill_have_decoded_the_same_bytes(
    jobs: list[Job], mode: str, members: int, megabytes: int, atomic: bool, seed: int
) -> None:
    one_after_the_other(jobs, mode, members, megabytes, atomic, seed, "fp8")


def one_after_the_other(
    jobs: list[Job], mode: str, members: int, megabytes: int, atomic: bool, seed: int, wire: str
) -> None:
    """One or two at a time are killed until one is left, each time in the middle of an op."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    job = Job(members, mode)
    jobs.append(job)
    job.start()
    count = (megabytes << 20) // 4
    for _ in range(2):  # the first one touches fresh memory
        job.reduce(count, wire=wire)
        job.receive(0, "started")
        begun = time.monotonic()
        job.receive(0, "returned")
        usual = time.monotonic() - begun
        (result,) = job.results()
        assert result[2] == ((0, count, tuple(range(members))),)
    while len(job.processes) > 1:
        job.reduce(count, atomic, wire)
        watched = chance.choice(list(job.processes))
        job.receive(watched, "started")
        # A random moment, not a synchronisation: the op goes on whatever it is.
        job.pipes[watched].poll(chance.random() * usual)
        for _ in range(min(chance.choice((1, 1, 1, 2)), len(job.processes) - 1)):
            job.kill(chance.choice(list(job.processes)))
        again = len(job.processes) > 1 and chance.random() < 0.3
        job.view(also_kill=chance.choice(list(job.processes)) if again else None)
        (result,) = job.results()
        assert {m for _, _, who in result[2] for m in who} >= set(job.processes)
        assert not atomic or len(result[2]) == 1
        print([who for _, _, who in result[2]])
    job.reduce(count, wire=wire)
    (result,) = job.results()
    assert result[2] == ((0, count, tuple(job.processes)),)


@pytest.mark.parametrize(
    ("mode", "large"),
    [("shm", 300_000), pytest.param("ring", 2_200_000, marks=pytest.mark.sweep)],  # the ring runs over TCP
)
def test_24_members_lose_two_in_mid_op(jobs: list[Job], mode: str, large: int) -> None:
    """Beyond the 17 members for which the first page of a segment has words; around the ring in more tasks than there
    are slots."""
    job = Job(24, mode)
    jobs.append(job)
    job.start()
    for count, lost in ((1000, ()), (large, (23, 5)), (large, ())):
        members = tuple(job.processes)
        job.reduce(count)
        if lost:
            job.receive(members[0], "started")
            for replica in lost:
                job.kill(replica)
            job.view()
        (result,) = job.results()
        assert {m for _, _, who in result[2] for m in who} >= set(job.processes)
        assert lost or result[2] == ((0, count, members),)
    job.start_all("call", "allgather", 200_000, tuple(job.processes))
    assert job.results() == {("",)}


def test_24_members_lose_who_stands_between_them_in_the_tree(jobs: list[Job]) -> None:
    """Small ops between hosts, one after the other: a member with children and a leaf are killed, then the top."""
    job = Job(24, "tcp")
    jobs.append(job)
    job.start()
    for lost in ((1, 23), (0,)):
        before = tuple(job.processes)
        job.start_all("many", 250, 40)
        job.receive(before[2], "started")
        for replica in lost:
            job.kill(replica)
        job.view()
        (result,) = job.results()  # the bytes of each of these ops
        assert result[1:] == (before, tuple(job.processes))


KINDS = ("broadcast", "allgather", "gather", "scatter", "alltoall", "reduce", "reduce_scatter", "barrier")


@pytest.mark.parametrize(("mode", "kinds", "seed"), [("shm", KINDS[::2], 30), ("tcp", KINDS[1::2], 31)])
def test_every_collective_survives_sigkill_or_fails_alike(
    jobs: list[Job], mode: str, kinds: tuple[str, ...], seed: int
) -> None:
    """One after the other is killed in the middle of an op of each kind; the last two first do all of them in peace."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    job = Job(len(kinds) + 2, mode)
    jobs.append(job)
    job.start()
    count = 300_000
    usual = 0.0
    for kind in kinds:
        roster = tuple(job.processes)
        outcomes = []
        for killed in (False, True, True):  # undisturbed; killed in the middle; called when the loss is known
            job.start_all("call", kind, count, roster)
            begun = time.monotonic()
            if killed and len(job.processes) == len(roster):
                watched = chance.choice(list(job.processes))
                job.receive(watched, "started")
                job.pipes[watched].poll(chance.random() * usual)
                victim = chance.choice((roster[0], roster[-1], chance.choice(roster)))
                job.kill(victim)
                job.view()
            (outcome,) = job.results()  # all survivors say the same
            usual = time.monotonic() - begun
            outcomes.append(outcome[0])
        assert outcomes[0] == ""
        for error in outcomes[1:]:
            assert error == "" or (kind in error and f"replica {victim} was lost" in error)
        needed = {"broadcast": victim == roster[-1], "scatter": victim == roster[0], "gather": victim != roster[0]}
        assert (outcomes[2] != "") == needed.get(kind, kind in ("allgather", "alltoall"))
        print(kind, victim, [error[:60] for error in outcomes])
    for kind in KINDS:
        job.start_all("call", kind, count, tuple(job.processes))
        assert job.results() == {("",)}
