"""A coordinator that is cut off from replicas that live: nobody is removed, no view is made, no job ends for it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.ports import free_port

from .bodies import reduce_forever
from .job import SILENCE, Job, fewer
from .test_faults import _members, _until, finish
from .test_faults import go_on as make_steps
from .test_kills import ENDLESS

pytestmark = pytest.mark.protocol

ALL = {0, 1, 2}


class Relay:
    """What stands between replicas and their coordinator in a cluster: a load balancer, a proxy, a NAT."""

    def __init__(self, job: Job) -> None:
        self._job, self.port = job, free_port()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._passes = asyncio.Event()
        self._passes.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there = int(self._job.server.endpoint.rpartition(":")[2])
            far, on = await asyncio.open_connection("127.0.0.1", there)
            self._pairs.add((back, on))
            await asyncio.gather(self._pump(near, on), self._pump(far, back))
            self._pairs.discard((back, on))
        back.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._passes.wait()
                writer.write(data)
        writer.close()

    async def reset(self) -> None:
        """All connections at once, by RST; goes on listening."""
        pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for writer in pair:
                sock = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

    async def hold(self) -> None:
        self._passes.clear()

    async def let_pass(self) -> None:
        self._passes.set()


class RelayedJob(Job):
    relay: Relay

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.relay.port}"


@contextlib.contextmanager
def relayed(folder: Path, **settings: Any) -> Iterator[RelayedJob]:
    arguments: dict[str, Any] = dict(elements=1000, steps=ENDLESS, heartbeat_timeout=SILENCE)
    job = RelayedJob(folder, replicas=3, body=reduce_forever, **{**arguments, **settings})
    job.relay = Relay(job)
    job.do(job.relay.start())
    with job:
        job.wait_contributing(ALL)
        go_on(job, ALL, 20)  # they have heard of the view
        yield job


def go_on(running: Job, replicas: set[int], steps: int = 100) -> None:
    make_steps(running, replicas, fewer(steps))


def nothing_happened(running: Job) -> None:
    """All are in the first view, and end well; and whoever dies is noticed."""
    go_on(running, ALL)
    assert [_members(event) for event in running.events if event["kind"] == "view"] == [[0, 1, 2]], running.events
    running.kill(1)
    running.wait_event("view without 1", lambda events: any(_members(e) == [0, 2] for e in events))
    finish(running, {0, 2})


def connected(running: Job) -> bool:
    machine = running.server._machine
    return machine is not None and {link.replica for link in machine.links.values()} == ALL


def test_connections_that_are_reset_cost_nothing(tmp_path: Path) -> None:
    with relayed(tmp_path) as running:
        for _ in range(5):
            for _ in _until(lambda: connected(running), "the replicas do not come back"):
                pass
            running.do(running.relay.reset())
            go_on(running, ALL, 20)
        nothing_happened(running)


def test_silence_of_all_for_three_heartbeats_costs_nothing(tmp_path: Path) -> None:
    with relayed(tmp_path) as running:
        running.do(running.relay.hold())
        end = time.monotonic() + 3 * SILENCE
        while time.monotonic() < end:
            go_on(running, ALL, 20)
        running.do(running.relay.let_pass())
        nothing_happened(running)


def test_all_stopped_for_three_heartbeats_go_on(tmp_path: Path) -> None:
    """As if all held their interpreters at the same line of the script."""
    with relayed(tmp_path, op_timeout=120.0) as running:
        for replica in ALL:
            running.signal(replica, signal.SIGSTOP)
        with contextlib.suppress(AssertionError):
            running.wait_event("a loss", lambda events: any(e["kind"] == "failed" for e in events), 3 * SILENCE)
        for replica in ALL:
            running.signal(replica, signal.SIGCONT)
        nothing_happened(running)


def test_a_store_that_was_rolled_back_is_refused_and_the_job_trains_on(tmp_path: Path) -> None:
    with Job(
        tmp_path, replicas=3, body=reduce_forever, elements=1000, steps=ENDLESS, heartbeat_timeout=SILENCE
    ) as running:
        running.wait_contributing(ALL)
        go_on(running, ALL, 10)
        shutil.copy(tmp_path / "views", tmp_path / "older")
        seen = len(running.events)
        running.kill(2)
        running.wait_event("view without 2", lambda events: any(_members(e) == [0, 1] for e in events[seen:]))
        go_on(running, {0, 1})
        running.stop_coordinator()
        views = len([event for event in running.events if event["kind"] == "view"])
        running.start_coordinator(store=tmp_path / "older")
        running.do(running.server.wait_done())
        assert "the store is older than the job: it ends with epoch 1, and replica" in running.server.failed
        assert not running.server.ended  # so that nobody deletes anything
        running.stop_coordinator()
        go_on(running, {0, 1})
        assert len([event for event in running.events if event["kind"] == "view"]) == views
        running.start_coordinator()
        seen = len(running.events)
        running.kill(1)
        running.wait_event("view without 1", lambda events: any(_members(e) == [0] for e in events[seen:]))
        finish(running, {0})
