"""The coordinator beside its store of views: one that is slow, older than the job, or in doubt."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from ftcomm.control import messages as m
from ftcomm.control import probe as probe_module
from ftcomm.control.links import Link
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.store import ViewStore
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.views import Addresses, Member, View
from tests.fuzz.choices import ADDRESS
from tests.fuzz.machines import GIVEN, TIMEOUTS
from tests.rigs.asyncio_client import Conversation, open_socket
from tests.rigs.peers import CREDENTIALS, DEADLINE, until

pytestmark = pytest.mark.usefixtures("time_for_handshakes")


def test_a_coordinator_whose_views_are_older_than_the_job_is_not_heard_any_more() -> None:
    """Who hears it would wait for its decisions for no longer than an op takes, and it makes none."""

    async def run() -> None:
        store = ViewStore(None)
        here = Addresses.of((ADDRESS,))
        store.views = [View(1, None, tuple(Member(replica, "life", here, True) for replica in (0, 1)))]
        server = CoordinatorServer(2, 1, CREDENTIALS, timeouts=TIMEOUTS, store=store)
        await server.start()
        address = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        heard: list[m.AnyMessage] = []
        opened: list[None] = []
        waiting = Link(
            address,
            CREDENTIALS,
            "leader",
            NamedRank(0, 0).fields,
            on_open=lambda: opened.append(None),
            on_message=heard.append,
        )
        await until(lambda: bool(heard))  # pings
        join = m.Join(1, "life", here, 7, 70, GIVEN["timeouts"], heard=7)
        ahead = Link(address, CREDENTIALS, "leader", NamedRank(1, 0).fields, on_open=lambda: ahead.send(join))
        await asyncio.wait_for(server.wait_done(), 60.0)
        assert "the store is older than the job" in server.failed
        times = len(opened)
        await until(lambda: len(opened) > times)  # its connections end, and a new one is not spoken on
        heard.clear()
        await until(lambda: len(opened) > times + 3)
        assert heard == []
        for link in (waiting, ahead):
            link.close()
        await server.stop()

    asyncio.run(run())


class Slow(ViewStore):
    """Its disk takes as long as the test does."""

    def append(self, view: View) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


def test_who_has_finished_is_known_before_it_hears_so_though_a_view_is_being_written() -> None:
    """It may end as soon as it has the acknowledgement, and its launcher would take that for a death."""

    async def run() -> list[str]:
        kinds: list[str] = []
        server = CoordinatorServer(
            *(1, 1, CREDENTIALS),
            store=Slow(None),
            timeouts=TIMEOUTS,
            on_event=lambda event: kinds.append(event["kind"]),
        )
        await server.start()
        try:
            port = int(server.endpoint.rpartition(":")[2])
            channel = await open_socket(("127.0.0.1", port), CREDENTIALS, "leader", {"replica": 0, "shard": 0})
            talk = await Conversation.over(channel)
            talk.write(m.encode(m.Join(0, "life", Addresses.of((ADDRESS,)), 0, -1, dataclasses.astuple(TIMEOUTS))))
            talk.write(m.encode(m.Finished(True)))
            while not isinstance(said := await talk.heard(), m.FinishAck):
                assert not isinstance(said, m.NewView), "it is not written yet"
            return kinds[:]
        finally:
            await server.stop()

    kinds = asyncio.run(asyncio.wait_for(run(), DEADLINE))
    assert "finished" in kinds
    assert "view" not in kinds


class Doubted(ViewStore):
    sure = True


@pytest.mark.parametrize("sure", [True, False])
def test_a_coordinator_that_is_not_sure_of_its_store_says_nothing(sure: bool, count: Callable[[str], int]) -> None:
    """Here: that the timeouts of a leader are not its own. Another one may decide for the job by now."""

    async def run() -> list[m.Message]:
        store = Doubted(None)
        server = CoordinatorServer(1, 1, CREDENTIALS, store=store, timeouts=Timeouts.derive(60.0))
        await server.start()
        port = int(server.endpoint.rpartition(":")[2])
        channel = await open_socket(("127.0.0.1", port), CREDENTIALS, "leader", {"replica": 0, "shard": 0})
        talk = await Conversation.over(channel)
        store.sure = sure
        talk.write(m.encode(m.Join(0, "life", Addresses.of((ADDRESS,)), 0, -1, (1.0, 2.0, 3.0))))
        if not sure:  # else it closes the connection itself
            talk.write(b"\xc1")  # no message, by which we know that the one before was looked at
            await until(lambda: count("message") == 1)
            await server.stop()
        heard: list[m.Message] = []
        while (message := await talk.heard()) is not None:
            heard.append(message)
        talk.close()
        await server.stop()
        return heard

    heard = asyncio.run(run())
    assert [type(message) for message in heard] == ([m.Removed] if sure else [])


def test_a_coordinator_that_is_not_sure_of_its_store_calls_nobody_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who came would leave the one that has taken its place, and be lost there."""
    store = Doubted(None)
    store.views = [View(1, None, (Member(0, "life", Addresses.of((ADDRESS,)), True),))]
    store.sure = False
    calls: list[bool] = []

    def connect(*there: object) -> None:
        calls.append(store.sure)
        raise OSError("nobody listens")

    monkeypatch.setattr(probe_module, "ProbeConnection", connect)

    async def run() -> None:
        server = CoordinatorServer(1, 1, CREDENTIALS, store=store, timeouts=Timeouts.derive(10.0))
        await server.start()
        await asyncio.sleep(10 * Timeouts.derive(10.0).beat)
        store.sure = True
        await until(lambda: bool(calls))
        await server.stop()

    asyncio.run(run())
    assert all(calls)
