"""The connections between ranks, the agent of their host and the leader: what they carry, and what it costs if one
ends."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from typing import Any

import msgspec
import pytest

from ftcomm.control import handshake, host_agent_process, leaderless, links, wire
from ftcomm.control import messages as m
from ftcomm.control.control_thread import ControlThread
from ftcomm.control.dropped import counts
from ftcomm.control.framing import framed
from ftcomm.control.leader_driver import AGENT, LeaderDriver
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.links import listen
from ftcomm.control.rank_errors import JoinError
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.upward_link import JoinNews
from tests.rigs import control_threads as rig
from tests.rigs.control_threads import CREDENTIALS, Job, Relay
from tests.rigs.leader import Led
from tests.rigs.rank_node import TIMEOUTS, address, view
from tests.rigs.stopped_processes import DEADLINE, until

RANKS, HOST_RANKS = 6, 2


class Hosts:
    """A replica of six ranks on three hosts: two ranks with the leader, and twice two with an agent."""

    def __init__(self, job: Job, led: Led) -> None:
        self.job, self.led = job, led
        self.relays = [Relay(led.address) for _ in range(2)]  # between agents and leader
        self.agents = [
            job.host_agent(relay.address, range(2 * k + 2, 2 * k + 4)) for k, relay in enumerate(self.relays)
        ]
        self.below = [Relay(agent.address) for agent in self.agents]  # between ranks and agents
        self.ranks = [job.control_thread(0, rank, led.address) for rank in range(HOST_RANKS)]
        for agent, relay in zip(self.agents, self.below, strict=True):
            self.ranks += [
                job.control_thread(0, rank, led.address, host_agent=agent.place(relay.address)) for rank in agent.shards
            ]

    def register(self) -> None:
        for one in self.ranks:
            one.register(DEADLINE)

    def drain(self) -> None:
        """Let all train to the boundary at which they leave, of which all have to hear."""
        server = self.job.server

        async def drained() -> None:
            server.drain()

        self.job.do(drained())
        training = [threading.Thread(target=_train, args=(one,), daemon=True) for one in self.ranks]
        for thread in training:
            thread.start()
        for thread in training:
            thread.join(DEADLINE)
        assert all(one.left for one in self.ranks)
        assert not self.job.events_of("suspect", "failed")

    def close(self) -> None:
        for relay in (*self.relays, *self.below):
            relay.close()


def _train(control: ControlThread) -> None:
    for step in itertools.count():
        control.boundary(step, DEADLINE)
        if control.left:
            return
        time.sleep(0.001)  # a step


def test_a_leader_has_one_connection_for_all_ranks_of_another_host() -> None:
    job = Job(1, RANKS)
    hosts = Hosts(job, job.led())
    try:
        hosts.register()
        assert hosts.led.ranks == {0, 1}
        assert set(hosts.led.process.driver.agents.connections) == {range(2, 4), range(4, 6)}
        assert [agent.ranks for agent in hosts.agents] == [{2, 3}, {4, 5}]
        assert [relay.count for relay in hosts.relays] == [1, 1]
        for rank, one in enumerate(hosts.ranks):
            assert one.view is not None
            assert one.view.members[0].ranks[rank] == one.address, "it is told of its own column"
        hosts.drain()
    finally:
        hosts.close()
        job.close()


@pytest.mark.parametrize("where", ["above", "below"])
def test_a_reset_costs_nothing(where: str) -> None:
    """What was said before it, or while there was no connection, is said again."""
    job = Job(1, RANKS)
    hosts = Hosts(job, job.led())
    try:
        hosts.register()
        relay = hosts.relays[0] if where == "above" else hosts.below[0]
        agent = hosts.agents[0].process.node
        for _ in range(3):
            before = relay.count
            relay.cut()
            until(lambda before=before: relay.count > before and agent._welcome == {2, 3})  # type: ignore[misc]
        hosts.drain()
    finally:
        hosts.close()
        job.close()


def test_what_a_rank_says_while_its_agent_reaches_no_leader_is_said_later() -> None:
    """The leader is at its place only after all ranks are at theirs."""
    job = Job(1, RANKS)
    led = job.led()
    hosts = Hosts(job, led)
    try:
        hosts.register()
        relay = hosts.relays[1]
        relay._listener.close()
        relay.cut()
        until(lambda: all(one._node.cut_off for one in hosts.ranks[4:]))
        assert not any(one._node._up for one in hosts.ranks[4:])
        assert all(one._hears_leader for one in hosts.ranks[:4])
        hosts.agents[1].process.up.link._addresses[0] = hosts.agents[1].process.up.link.address = led.address  # type: ignore[union-attr]
        until(lambda: not any(one._node.cut_off for one in hosts.ranks[4:]) and all(x._node._up for x in hosts.ranks))
        hosts.drain()
    finally:
        hosts.close()
        job.close()


def test_an_agent_that_ends_says_that_its_first_rank_has_ended() -> None:
    job = Job(1, RANKS)
    hosts = Hosts(job, job.led())
    try:
        hosts.register()
        ending = threading.Thread(target=hosts.ranks[4].stop)
        ending.start()
        hosts.agents[1].close(well=False)
        ending.join(DEADLINE)
        until(lambda: bool(job.events_of("suspect")))
        pid = hosts.agents[1].process._config.pid
        assert job.events_of("suspect")[0]["reason"] == f"its shard 4 is lost: its process {pid} has ended"
        lost = hosts.ranks[3], hosts.ranks[5]
        until(lambda: all(one._control.failed is not None for one in lost))
        why = f"replica 0 cannot go on: its shard 4 is lost: its process {pid} has ended"
        assert [one._control.failed.reason for one in lost] == [why, why], "it waits for what the leader answers"  # type: ignore[union-attr]
    finally:
        hosts.close()
        job.close()


def test_ranks_that_are_in_no_view_yet_end_at_once_with_their_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a leader, or another of their hosts, that misses them. Each tells the coordinator once."""
    told: list[str] = []

    async def tell(*args: Any) -> None:
        told.append(args[-1])
        await asyncio.sleep(0.3)  # for longer than between two dials

    monkeypatch.setattr(host_agent_process, "LAST", 0.05)
    monkeypatch.setattr(leaderless, "tell", tell)
    job = Job(1, RANKS)
    try:
        led = job.led()
        agent = job.host_agent(led.address, range(4, 6))
        ranks = [job.control_thread(0, rank, led.address, host_agent=agent.place()) for rank in agent.shards]
        until(lambda: all(one._node.machine.incarnation for one in ranks))
        agent.close()
        until(lambda: all(one._control.failed is not None for one in ranks))
        assert all("the host agent is lost" in one._control.failed.reason for one in ranks)  # type: ignore[union-attr]
        assert len(told) == len(ranks)
    finally:
        job.close()


def test_a_reset_above_begins_no_new_wait_for_a_rank_that_joins() -> None:
    """A boundary may take longer than its init timeout, which counts only as long as there is no leader."""
    job = Job(1, RANKS)
    hosts = Hosts(job, job.led())
    try:
        hosts.register()
        one, agent, waits = hosts.ranks[2], hosts.agents[0].process.node, JoinNews("for a boundary", m.Stage.JOINING)
        one._up.queued(*waits)
        begun = agent._openings
        hosts.relays[0].cut()
        until(lambda: agent._openings > begun and agent._welcome == {2, 3})
        assert one._up.news == waits
    finally:
        hosts.close()
        job.close()


def test_an_agent_whose_leader_has_ended_too_gives_its_port_back_at_once() -> None:
    """A replica of which all processes have ended is started again, and its new agent listens there."""
    job = Job(1, RANKS)
    hosts = Hosts(job, job.led())
    try:
        hosts.register()
        agent = hosts.agents[1]
        hosts.relays[1]._listener.shutdown(socket.SHUT_RDWR)
        hosts.relays[1].close()
        until(lambda: isinstance(agent.process.up.refused, ConnectionRefusedError))
        for rank in (4, 5):
            hosts.ranks[rank].stop()
        begun = time.monotonic()
        agent.close(well=False)
        assert time.monotonic() - begun < host_agent_process.LAST
        listen(*agent.address).close()
    finally:
        hosts.close()
        job.close()


def test_an_agent_that_ends_before_it_has_served_its_ranks_gives_its_ports_back() -> None:
    """It waits for the leader, whose kernel has taken the connection. Where many agents are in one process, what one
    leaves open is found by ranks."""
    job = Job(1, RANKS)
    mute = listen("127.0.0.1", 0)
    try:
        agent = job.host_agent(mute.getsockname(), range(2, 4))
        own = agent.process.own.getsockname()
        agent.close(well=True)
        for place in (agent.address, own):
            listen(*place).close()
    finally:
        mute.close()
        job.close()


def test_an_agent_that_ends_while_it_reaches_no_leader_tells_it_by_the_next_connection() -> None:
    job = Job(1, RANKS)
    hosts = Hosts(job, job.led())
    try:
        hosts.register()
        agent, link = hosts.agents[1], hosts.agents[1].process.up.link
        assert link is not None
        agent.do(link._on_down, OSError("reset"))
        writer = link._writer
        assert writer is not None
        agent.do(writer.close)
        ending = threading.Thread(target=hosts.ranks[4].stop)
        ending.start()
        agent.close(well=False)
        ending.join(DEADLINE)
        until(lambda: bool(job.events_of("suspect")))
        assert job.events_of("suspect")[0]["reason"].startswith("its shard 4 is lost: its process")
    finally:
        hosts.close()
        job.close()


@pytest.mark.parametrize("rank", [1, 3])
def test_a_call_of_a_new_coordinator_goes_through_an_agent(rank: int) -> None:
    job = Job(1, RANKS)
    hosts = Hosts(job, job.led())
    nowhere = listen("127.0.0.1", 0)
    try:
        hosts.register()
        up = hosts.led.process.driver.up
        until(lambda: up.link is not None and up.link.is_up)
        up.link._opened_at -= 10.0  # type: ignore[union-attr]
        here = hosts.ranks[rank].address
        there = nowhere.getsockname()
        wire.connect((here.host, here.port), CREDENTIALS, "coordinator", {"port": there[1]}, DEADLINE).close()
        until(lambda: up.link.address == there)  # type: ignore[union-attr]
    finally:
        hosts.close()
        job.close()
        nowhere.close()


class Sent:
    """The sending side of a connection, of an agent or of a rank."""

    def __init__(self, shards: range = range(0)) -> None:
        self.sent: list[Any] = []
        self.shards = shards

    def send(self, *what: Any) -> None:
        self.sent.append(what)


def test_what_a_leader_tells_all_goes_once_to_each_agent_and_in_order() -> None:
    ranks = 10
    node = LeaderNode(0, "life-0", ranks, TIMEOUTS)
    driver = LeaderDriver(
        *(node, NamedRank.of(0, 0, None), CREDENTIALS, ("127.0.0.1", 1), "127.0.0.1", TIMEOUTS),
        do=lambda *args: None,
        spawn=lambda work: None,
        trains=lambda: True,
    )
    direct, agents = [Sent(), Sent()], [Sent(range(2, 6)), Sent(range(6, ranks))]
    driver.ranks.update(enumerate(direct))  # type: ignore[arg-type]
    driver.agents.connections.update({told.shards: told for told in agents})  # type: ignore[misc]
    driver.agents.carried.update({rank: agents[rank // 6] for rank in range(2, ranks)})  # type: ignore[misc]
    for rank in range(ranks):
        node.from_rank(rank, m.Hello(rank, address(0, rank)), 0.0)
    for event in (m.NewView(view(1, (0, 1), ranks)), m.Prepare(7, 1, 3)):
        driver.carry_out_all(node.from_coordinator(event))
    for told, shards in zip(agents, (range(2, 6), range(6, ranks)), strict=True):
        assert [(list(to), type(what)) for to, what in told.sent] == [
            (list(shards), m.NewView),
            (list(shards), m.Prepare),
        ]
    assert [[type(what) for (what,) in told.sent[-2:]] for told in direct] == [[m.NewView, m.Prepare]] * 2


# -- who is not of the replica -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [(1, 2, 2), (0, 0, 2), (0, 2, 5), (0, 6, 1), (0, 2, 0)])
def test_an_agent_of_another_replica_or_of_ranks_that_it_does_not_have_is_dropped(
    fields: tuple[int, int, int],
) -> None:
    job = Job(2, RANKS)
    try:
        led = job.led()
        before = counts().get("fields", 0)
        named: handshake.Fields = dict(zip(("replica", "first", "count"), fields, strict=True))
        wire.connect(led.address, CREDENTIALS, AGENT, named, DEADLINE).close()
        until(lambda: counts().get("fields", 0) > before)
        assert not led.process.driver.agents.connections
    finally:
        job.close()


def test_an_agent_that_speaks_for_a_rank_of_another_host_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(1, RANKS)
    try:
        led = job.led()
        before = counts().get("message", 0)
        named: handshake.Fields = {"replica": 0, "first": 2, "count": 2}
        with wire.connect(led.address, CREDENTIALS, AGENT, named, DEADLINE) as channel:
            here = job.control_thread(0, 0, led.address).address
            for said in (m.AgentHello(here), m.Enclosed((4,), m.Hello(4, here))):
                channel.sendall(m.encode(said))
            until(lambda: "a host agent of shards range(2, 4) speaks for shard 4" in caplog.text)
        assert counts().get("message", 0) > before
        assert 4 not in led.process.node.leader.addresses
    finally:
        job.close()


def test_ranks_of_an_agent_of_another_job_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token serves two jobs, and the agent has the address of the other one's leader."""
    job = Job(1, RANKS)
    try:
        led = job.led()
        other = type(CREDENTIALS)(CREDENTIALS.token, "another")
        monkeypatch.setattr(rig, "CREDENTIALS", other)
        agent = job.host_agent(led.address, range(2, 4))
        stray = job.control_thread(0, 2, led.address, host_agent=agent.place())
        with pytest.raises(JoinError, match="it is of the job 'another', expected ''"):
            stray.register(DEADLINE)
        assert not led.process.driver.agents.connections
    finally:
        job.close()


def test_a_leader_that_does_not_answer_is_named_and_not_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, or starts slowly: its kernel takes the connection."""
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", 0.3)
    job = Job(1, RANKS)
    mute = listen("127.0.0.1", 0)
    try:
        there = mute.getsockname()
        agent = job.host_agent(there, range(2, 4))
        one = job.control_thread(0, 2, there, host_agent=agent.place())
        with pytest.raises(JoinError, match=f"the leader of the replica at 127.0.0.1:{there[1]} has not answered yet"):
            one.register(3.0)
    finally:
        mute.close()
        job.close()


def test_ranks_of_an_agent_of_another_version_are_told_what_to_do() -> None:
    """And they wait no longer than for any leader that does not come."""
    job = Job(1, RANKS)
    old = listen("127.0.0.1", 0)
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            try:
                near, _ = old.accept()
            except OSError:
                return
            with near:
                near.recv(4096)
                data = msgspec.msgpack.encode(handshake.Challenge(handshake.VERSION + 1, b"n" * 16))
                near.sendall(framed(data))

    threading.Thread(target=answer, daemon=True).start()
    try:
        agent = job.host_agent(old.getsockname(), range(2, 4))
        one = job.control_thread(0, 2, old.getsockname(), host_agent=agent.place())
        version = f"version {handshake.VERSION + 1}, expected {handshake.VERSION}; install the same ftcomm"
        with pytest.raises(JoinError, match=version):
            one.register(2.0)
    finally:
        stop.set()
        old.close()
        job.close()
