"""When the launcher of another host takes host 0 for gone."""

from __future__ import annotations

import asyncio
import math

from ftcomm.control.handshake import Credentials, HungUp
from ftcomm.control.links import Ended
from ftcomm.launch.several_hosts.link import LauncherLink
from ftcomm.launch.several_hosts.messages import TurnedAway
from ftcomm.launch.several_hosts.node_place import NodePlace
from ftcomm.launch.several_hosts.refusals import Refusals
from tests.rigs.ports import free_port

REFUSED = ConnectionRefusedError(111, "Connection refused")
OP = 10.0


def refusals(*, stands: float = 0.0) -> Refusals:
    return Refusals("10.0.0.1:29400", OP, lambda: stands)


def test_a_host_whose_port_refuses_for_twice_the_op_timeout_has_no_launcher_any_more() -> None:
    host = refusals(stands=1000.0)  # and was killed then
    assert not any(host.proof(REFUSED, now) for now in (1000.0, 1005.0, 1019.9))
    said = host.proof(REFUSED, 1020.5)
    assert said.startswith("host 0 at 10.0.0.1:29400 has refused connections for 20 s (twice the op timeout), so its ")
    assert said.endswith("Start the job again from its last checkpoint: the same command on each host")


def test_silence_is_no_proof() -> None:
    """Nor is what comes after it: a host that has lost its power starts, and then its launcher."""
    host = refusals()
    others = (ConnectionError("no connection within 5 s"), HungUp("reset by peer"), OSError(113, "No route to host"))
    for begun, other in enumerate(others):
        at = 1000.0 * (begun + 1)
        assert not any(host.proof(other, at + seconds) for seconds in range(0, 100, 5))
        assert not any(host.proof(REFUSED, at + seconds) for seconds in (100.0, 119.0))
    assert host.proof(REFUSED, 3120.0)


def test_what_is_there_again_has_not_gone() -> None:
    """The coordinator is restarted by its launcher, and a connection ends later."""
    host = refusals()
    assert not host.proof(REFUSED, 1000.0)
    assert not host.proof(ConnectionError("its connection closed"), 1019.0)
    assert not host.proof(REFUSED, 1030.0)
    assert host.proof(REFUSED, 1050.0)


def test_a_job_that_trains_has_all_that_it_needs() -> None:
    """Something on the way refuses, and the ranks of host 0 go on."""
    last = 1000.0
    host = Refusals("10.0.0.1:29400", OP, lambda: last)
    assert not host.proof(REFUSED, 1000.0)
    for last in (1019.0, 1039.0):
        assert not host.proof(REFUSED, last + 1.0)
    assert host.proof(REFUSED, 1049.0)


def test_a_job_that_only_computes_has_all_that_it_needs() -> None:
    """An evaluation, or a checkpoint, without an op for longer than an op may take."""
    host = refusals(stands=math.inf)
    assert not any(host.proof(REFUSED, now) for now in (1000.0, 1020.5, 9000.0))


def test_a_launcher_that_is_turned_away_says_why_and_no_more() -> None:
    """The end of that connection, which follows, is no news; that the next attempt fails is."""
    told: list[str] = []

    async def link() -> None:
        place = NodePlace(1, 2, "127.0.0.1", free_port())
        made = LauncherLink(
            *((place.host, place.port), place, "run", "options", Credentials("token")),
            on_message=lambda message: None,
            on_change=lambda: None,
            tell=told.append,
            refusals=refusals(),
        )
        made._received(TurnedAway("host 1 is there already"))
        made._down(Ended("its connection closed"))
        made._down(ConnectionError("no answer"))
        made.close()
        await asyncio.sleep(0)

    asyncio.run(link())
    assert [text.rpartition(": ")[2] for text in told] == ["host 1 is there already", "no answer"]
