"""What the launchers of several hosts tell each other, over real connections, at the worst moments."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ftcomm.control.handshake import Credentials
from ftcomm.control.messages import encode
from ftcomm.control.server import CoordinatorServer
from ftcomm.launch.job_state import JobState
from ftcomm.launch.options import RunOptions
from ftcomm.launch.policy import State
from ftcomm.launch.replica_processes import ReplicaListener, ReplicaProcesses
from ftcomm.launch.several_hosts.messages import (
    LAUNCHER,
    CoordinatorSaid,
    Heard,
    RankFailed,
    ReplicaIs,
    decode_launcher_message,
)
from ftcomm.launch.several_hosts.node_place import NodePlace
from ftcomm.launch.several_hosts.other_hosts import OtherHosts
from ftcomm.launch.supervisor import Supervisor
from tests.rigs.ports import free_port

pytestmark = pytest.mark.protocol

DEADLINE = 120.0
HOST = "127.0.0.1"
MINE = Credentials("a token that is long enough")  # of host 1
FIRST = dataclasses.replace(MINE, job="made by host 0", called={LAUNCHER: MINE.job})


def replica_of(number: int, rank: int, port: int = 1, replicas: int = 2) -> ReplicaProcesses:
    """A replica, as host `rank` of two sees it."""
    options = RunOptions(replicas, "train.py", node=NodePlace(rank, 2, HOST, port))
    return ReplicaProcesses(number, options, {}, None, ReplicaListener(*[lambda *told: None] * 5))  # type: ignore[arg-type]


class Side:
    """The launcher of host `rank` of two, with one replica each: `told` is what it has been told."""

    def __init__(self, rank: int, port: int, run: str, first: Credentials = FIRST) -> None:
        self.told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.replicas = [replica_of(number, rank, port) for number in range(2)]
        for replica in self.replicas:
            replica.begin_life(1)
        self.before_answer: Callable[[int], None] = lambda question: None
        options = RunOptions(2, "train.py", node=NodePlace(rank, 2, HOST, port))
        assert options.node is not None
        self.listener = listener = SimpleNamespace(
            event=lambda event: self.told.put_nowait(("event", event)),
            replica=lambda message: self.told.put_nowait(("replica", message)),
            heard=lambda message: self.told.put_nowait(("heard", message)),
            judge=lambda replica, starts: self.told.put_nowait(("judge", replica, starts)),
            anew=lambda node: self.told.put_nowait(("anew", node)),
            failed=lambda replica, code: self.told.put_nowait(("failed", replica, code)),
            lost=lambda reason: self.told.put_nowait(("lost", reason)),
            changed=lambda: None,
            known=self._known,
            states=lambda: [ReplicaIs(x.number, x.state, x.starts) for x in self.replicas],
            stands=lambda: 0.0,
            log=lambda text: None,
        )
        self.hosts = OtherHosts(options)
        self.hosts.open(options.node, run, MINE if rank else first, listener)

    def _known(self, replica: int, question: int) -> Heard:
        self.before_answer(question)
        return self.replicas[replica].heard(question)

    async def hears(self, kind: str) -> list[tuple[Any, ...]]:
        """Returns what it is told up to a message of `kind`."""
        messages = [await asyncio.wait_for(self.told.get(), DEADLINE)]
        while messages[-1][0] != kind:
            messages.append(await asyncio.wait_for(self.told.get(), DEADLINE))
        return messages


def hosts(test: Callable[[Side, Side], Awaitable[None]]) -> None:
    """Run `test` with two launchers that are connected; neither is ready yet."""

    async def main() -> None:
        port = free_port()
        first = Side(0, port, "run of host 0")
        options = RunOptions(2, "train.py")
        server = CoordinatorServer(2, 1, FIRST, port=port, timeouts=options.timeouts, others=first.hosts.served)
        await server.start()
        second = Side(1, port, "run of host 1")
        try:
            _, begun = await asyncio.gather(first.hosts.gather("store:1"), second.hosts.follow(HOST))
            assert begun == ("store:1", "made by host 0")
            await test(first, second)
        finally:
            second.hosts.close()
            first.hosts.close()
            await server.stop()

    asyncio.run(main())


def test_messages_that_come_before_the_replicas_exist_are_kept() -> None:
    async def test(first: Side, second: Side) -> None:
        second.hosts.ready()
        second.hosts.tell(ReplicaIs(1, State.FAILED, 1))
        second.hosts.close()
        assert await first.hosts._until(lambda: first.hosts.is_missing(1))  # so all has arrived
        assert first.told.empty()
        first.hosts.ready()
        told = [first.told.get_nowait() for _ in range(first.told.qsize())]
        assert told == [("replica", ReplicaIs(1, State.RUNNING, 1)), ("replica", ReplicaIs(1, State.FAILED, 1))]

    hosts(test)


def test_the_end_of_a_replica_is_judged_with_all_that_host_0_has_heard_of_it() -> None:
    """Its last messages went to the coordinator; what that has said of them is under way, or lost with a connection."""

    async def test(first: Side, second: Side) -> None:
        def before_answer(question: int) -> None:
            first.replicas[1].said_finished = question == 3

        first.before_answer = before_answer
        first.hosts.ready()
        second.hosts.ready()  # asks for both replicas; those answers say nothing of what came after
        assert second.hosts.asks(1, 1)
        *before, judged = await second.hears("judge")
        assert judged == ("judge", 1, 1)
        assert [(message.number, message.finished) for _, message in before] == [(1, False), (2, False), (3, True)]
        second.replicas[1].note(before[-1][1])
        assert second.replicas[1].said_finished

    hosts(test)


def test_what_was_said_without_a_connection_is_told_when_there_is_one_again() -> None:
    async def test(first: Side, second: Side) -> None:
        second.hosts.ready()
        assert second.hosts.asks(1, 1)  # host 0 is not ready to answer
        first.hosts.close()
        assert await second.hears("judge") == [("judge", 1, 1)]  # it waits for nobody who may not come back
        assert not second.hosts.asks(1, 1)
        first.replicas[1].removed = "op 7 waits for it"
        first.hosts.ready()
        told: list[Heard] = []
        while not (told and told[-1].removed):
            told += [message for kind, message in await second.hears("heard") if kind == "heard"]
        assert (told[-1].replica, told[-1].removed) == (1, "op 7 waits for it")
        assert await second.hosts._until(lambda: second.hosts.reached)
        assert not second.hosts.is_given_up
        assert ("anew", 1) not in [first.told.get_nowait() for _ in range(first.told.qsize())]

    hosts(test)


def test_a_host_that_comes_back_ends_what_its_last_launcher_had_started() -> None:
    async def test(first: Side, second: Side) -> None:
        first.hosts.ready()
        second.hosts.ready()
        await first.hears("replica")
        second.hosts.close()
        assert await first.hosts._until(lambda: first.hosts.is_missing(1))
        other = Side(1, second.hosts._place.port, "another run")
        try:
            await other.hosts.follow(HOST)
            assert await first.hears("anew") == [("anew", 1)]
        finally:
            other.hosts.close()

    hosts(test)


def test_who_finds_another_job_where_host_0_was_has_lost_its_own() -> None:
    """The next job, with the same token and endpoint, would else take the last launcher for its own."""

    async def main() -> None:
        port = free_port()
        timeouts = RunOptions(2, "train.py").timeouts
        second = Side(1, port, "run of host 1")
        second.listener.lost = lambda reason: second.told.put_nowait(("lost", reason, second.hosts.reached))
        try:
            for job in ("one", "two"):
                mine = dataclasses.replace(FIRST, job=job)
                first = Side(0, port, f"run {job} of host 0", mine)
                server = CoordinatorServer(2, 1, mine, port=port, timeouts=timeouts, others=first.hosts.served)
                await server.start()
                try:
                    if job == "one":
                        _, begun = await asyncio.gather(first.hosts.gather("store:1"), second.hosts.follow(HOST))
                        assert begun == ("store:1", "one")
                        second.hosts.ready()
                    else:
                        await asyncio.wait_for(first.hosts.gather("store:2"), DEADLINE)
                        _, reason, reached = (await second.hears("lost"))[-1]
                        assert reason.startswith("another job runs at 127.0.0.1:")
                        assert not reached, "what the last job says would be for the next one"
                        assert not second.hosts.asks(1, 1), "the end of its replica would never be judged"
                finally:
                    first.hosts.close()
                    await server.stop()
        finally:
            second.hosts.close()

    asyncio.run(main())


def test_the_silence_of_host_0_ends_no_replica_that_runs() -> None:
    """It may be reached again; the one that has died waits for that, too, and so do the ranks."""

    async def main() -> None:
        lost: list[str] = []
        job = JobState(RunOptions(4, "train.py", node=NodePlace(1, 2, HOST)))
        job.replicas = [replica_of(number, 1, replicas=4) for number in range(4)]
        *_, running, died = job.replicas
        running.begin_life(1)
        hosts = SimpleNamespace(reached=False, is_given_up=True, given_up="host 0 is not reached")
        shutdown = SimpleNamespace(lose=lost.append, check=lambda: None)
        supervisor = Supervisor(job, hosts, None, shutdown, None)  # type: ignore[arg-type]
        supervisor._start_again(died)
        assert not lost
        running.state = State.WAITING  # it has given up
        supervisor._start_again(died)
        assert lost == ["host 0 is not reached"]

    asyncio.run(main())


def test_the_coordinator_may_meet_a_replica_before_its_launcher_tells_of_its_start() -> None:
    """The messages of a launcher may come later than the view that has the replica."""
    replica = replica_of(1, rank=0)
    replica.begin_life(1)
    replica.comes()
    replica.joined = replica.contributed = replica.said_finished = True
    replica.comes()  # its next life
    assert not replica.joined
    assert not replica.said_finished
    replica.joined = True  # a view has it
    for state, starts in ((State.WAITING, 1), (State.RUNNING, 2)):
        replica.is_told(ReplicaIs(1, state, starts))
    assert (replica.joined, replica.starts, replica.state) == (True, 2, State.RUNNING)
    for state, starts in ((State.WAITING, 2), (State.RUNNING, 3)):
        replica.is_told(ReplicaIs(1, state, starts))
    assert (replica.joined, replica.starts, replica.state) == (False, 3, State.RUNNING)


def test_what_was_heard_of_another_life_is_not_noted() -> None:
    here, there = replica_of(1, rank=1), replica_of(1, rank=0)
    here.begin_life(2)
    there.begin_life(1)
    there.joined = there.trained = True
    here.note(there.heard(1))
    assert not here.joined
    assert not here.trained
    there.begin_life(2)
    there.joined = there.trained = True
    here.note(there.heard(1))
    assert here.joined
    assert here.trained


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"kind": 7},
        {"kind": "view", "epoch": 1, "why": "", "step": None},
        {"kind": "view", "epoch": 1, "why": "", "step": None, "members": [{"replica": "x", "contributing": True}]},
        {"kind": "metrics", "replica": 1, "step": 3},
    ],
)
def test_an_event_on_which_no_launcher_could_act_is_no_message(event: dict[str, Any]) -> None:
    good = {"kind": "view", "epoch": 1, "why": "", "step": None, "members": [{"replica": 1, "contributing": True}]}
    assert decode_launcher_message(encode(CoordinatorSaid(good))) == CoordinatorSaid(good)
    raw = msgspec.msgpack.encode({"type": "CoordinatorSaid", "event": event})
    with pytest.raises(msgspec.DecodeError):
        decode_launcher_message(raw)


def test_host_0_hears_with_which_code_a_rank_of_another_host_has_exited() -> None:
    """Of its own replicas it knows that; a launcher says nothing of those of others."""

    async def test(first: Side, second: Side) -> None:
        first.hosts.ready()
        second.hosts.ready()
        second.hosts.tell(RankFailed(0, 4))
        second.hosts.tell(RankFailed(1, 3))
        assert [told for told in await first.hears("failed") if told[0] == "failed"] == [("failed", 1, 3)]

    hosts(test)
