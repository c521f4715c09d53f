"""The connection between a rank and its leader: resets cost nothing, and a wrong rank takes no place."""

from __future__ import annotations

import itertools
import threading
import time

from ftcomm.control.agent import Agent
from ftcomm.control.dropped import counts
from ftcomm.control.links import listen
from ftcomm.control.server import CoordinatorServer
from tests.agents_rig import Job, Relay
from tests.stopped_rig import DEADLINE, until


def test_a_rank_that_has_come_to_the_leader_of_another_replica_takes_the_place_of_nobody() -> None:
    leader_socket = listen("127.0.0.1", 0)
    job = Job(2, 2)
    try:
        leader = job.agent(0, 0, leader_socket.getsockname(), leader_socket)
        before = counts().get("fields", 0)
        job.agent(1, 1, leader_socket.getsockname())
        until(lambda: counts().get("fields", 0) > before)
        assert leader._leading is not None
        assert not leader._leading.ranks
        assert 1 not in leader._leading.node.leader.addresses
    finally:
        job.close()


def test_a_reset_between_a_rank_and_its_leader_costs_nothing() -> None:
    leader_socket = listen("127.0.0.1", 0)
    relay = Relay(leader_socket.getsockname())
    job = Job(1, 2)
    agents = [job.agent(0, 0, relay.address, leader_socket), job.agent(0, 1, relay.address)]
    try:
        for one in agents:
            one.register(DEADLINE)
        for times in range(1, 4):
            relay.cut()
            until(lambda times=times: relay.count > times and 1 in agents[0]._leading.ranks)  # type: ignore[misc]
        job.do(_drained(job.server))
        training = [threading.Thread(target=_train, args=(one,), daemon=True) for one in agents]
        for thread in training:
            thread.start()
        for thread in training:
            thread.join(DEADLINE)
        assert all(one.left for one in agents), "what was said after a reset did not arrive"
        assert not job.events_of("suspect", "failed")
    finally:
        relay.close()
        job.close()


def _train(agent: Agent) -> None:
    """Until a drain is over."""
    for step in itertools.count():
        agent.boundary(step, DEADLINE)
        if agent.left:
            return
        time.sleep(0.001)  # a step


async def _drained(server: CoordinatorServer) -> None:
    server.drain()
