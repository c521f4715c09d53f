"""The connection between a rank and its leader: resets cost nothing, and a wrong rank takes no place."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time

import msgspec
import pytest

from ftcomm.control import handshake
from ftcomm.control import messages as m
from ftcomm.control.control_thread import ControlThread
from ftcomm.control.dropped import counts
from ftcomm.control.links import Link
from ftcomm.control.rank_errors import JoinError
from ftcomm.control.server import CoordinatorServer
from tests.rigs import control_threads as rig
from tests.rigs.control_threads import CREDENTIALS, Job, Relay
from tests.rigs.stopped_processes import DEADLINE, until


def test_a_rank_that_has_come_to_the_leader_of_another_replica_takes_the_place_of_nobody() -> None:
    job = Job(2, 2)
    try:
        leader = job.led()
        job.control_thread(0, 0, leader.address)
        before = counts().get("fields", 0)
        job.control_thread(1, 1, leader.address)
        until(lambda: counts().get("fields", 0) > before and leader.ranks == {0})
        assert 1 not in leader.process.node.leader.addresses
    finally:
        job.close()


def test_a_rank_of_an_earlier_life_takes_the_place_of_nobody_and_hears_that_it_is_over() -> None:
    """Its replica was started again at the same address, and it was not."""
    job = Job(1, 2)
    heard: list[m.AnyMessage] = []
    try:
        leader = job.led()
        controls = [job.control_thread(0, rank, leader.address) for rank in range(2)]
        for one in controls:
            one.register(DEADLINE)
        ours = leader.process.driver.ranks[1]

        async def come_again() -> None:
            hello = m.Hello(1, msgspec.structs.replace(controls[1].address, port=1), "an earlier life")
            fields: handshake.Fields = {"replica": 0, "shard": 1}
            said = [hello, m.Finished(False, "a rank of an earlier life says so"), m.Ready()]
            link = Link(
                *(leader.address, CREDENTIALS, "rank", fields),
                on_open=lambda: [link.send(message) for message in said],
                on_message=heard.append,
            )
            while len(heard) < len(said):
                await asyncio.sleep(0.005)
            link.close()

        asyncio.run(asyncio.wait_for(come_again(), DEADLINE))
        assert heard == [leader.process.node.leader.welcome] * 3
        assert leader.process.driver.ranks[1] is ours
        assert leader.process.node.leader.addresses[1] == controls[1].address
        job.do(_drained(job.server))
        _train_all(controls)
        assert not job.events_of("suspect", "failed")
    finally:
        job.close()


def test_a_leader_of_another_job_is_refused_at_once_and_its_ranks_take_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs have one token, and a rank has the address of the other one's leader."""
    job = Job(1, 2)
    try:
        leader = job.led()
        monkeypatch.setattr(rig, "CREDENTIALS", dataclasses.replace(CREDENTIALS, job="another"))
        stray = job.control_thread(0, 1, leader.address)
        with pytest.raises(JoinError, match="it is of the job 'another', expected ''"):
            stray.register(DEADLINE)
        assert not leader.ranks
    finally:
        job.close()


def test_a_second_process_that_leads_the_same_replica_is_told_so_and_harms_nobody() -> None:
    job = Job(1, 2)
    try:
        first, second = job.led(), job.led()
        controls = [job.control_thread(0, rank, first.address) for rank in range(2)]
        for one in controls:
            one.register(DEADLINE)
        strays = [job.control_thread(0, rank, second.address) for rank in range(2)]
        with pytest.raises(JoinError, match=r"another process is replica 0, and answers; .* \(FTCOMM_REPLICA\)"):
            strays[1].register(2.0)
        assert [event["kind"] for event in job.events_of("view", "suspect", "failed")] == ["view"]
        assert all(one.view is not None for one in controls)
    finally:
        job.close()


def test_a_reset_between_a_rank_and_its_leader_costs_nothing() -> None:
    """Be it rank 0, through which the leader speaks to the others."""
    job = Job(1, 2)
    leader = job.led()
    relay = Relay(leader.address)
    controls = [job.control_thread(0, rank, relay.address) for rank in range(2)]
    try:
        for one in controls:
            one.register(DEADLINE)
        for times in range(1, 4):
            relay.cut()
            until(lambda times=times: relay.count >= 2 * (times + 1) and leader.ranks == {0, 1})  # type: ignore[misc]
        job.do(_drained(job.server))
        _train_all(controls)
        assert all(one.left for one in controls), "what was said after a reset did not arrive"
        assert not job.events_of("suspect", "failed")
    finally:
        relay.close()
        job.close()


def _train_all(controls: list[ControlThread]) -> None:
    training = [threading.Thread(target=_train, args=(one,), daemon=True) for one in controls]
    for thread in training:
        thread.start()
    for thread in training:
        thread.join(DEADLINE)


def _train(control: ControlThread) -> None:
    """Until a drain is over."""
    for step in itertools.count():
        control.boundary(step, DEADLINE)
        if control.left:
            return
        time.sleep(0.001)  # a step


async def _drained(server: CoordinatorServer) -> None:
    server.drain()
