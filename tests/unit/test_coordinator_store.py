"""The coordinator beside its store of views: one that is slow, older than the job, or in doubt."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import types
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ftcomm.control import coordinator_actions as ca
from ftcomm.control import finish_writer
from ftcomm.control import messages as m
from ftcomm.control import probe as probe_module
from ftcomm.control import server as server_module
from ftcomm.control.finishes import Finishes
from ftcomm.control.links import Link
from ftcomm.control.messages import Event
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
    """Its disk takes as long as the test does: for views, or for who has finished as well."""

    def __init__(self, finishes: str = "") -> None:
        super().__init__(None)
        self.how, self.written, self.given = finishes, list[Finishes](), list[asyncio.Future[None]]()
        self.views_given: list[asyncio.Future[None]] = []

    def append(self, view: View) -> asyncio.Future[None]:
        self.views_given.append(asyncio.get_running_loop().create_future())
        return self.views_given[-1]

    def write_finishes(self, finishes: Finishes) -> asyncio.Future[None] | None:
        self.written.append(finishes)
        if self.how == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.given.append(asyncio.get_running_loop().create_future())
        if self.how != "slow":
            self.given[-1].set_result(None)
        return self.given[-1]


async def finishing(server: CoordinatorServer, replica: int, *, at_once: bool = True) -> Conversation:
    """A replica that joins, and has finished."""
    port = int(server.endpoint.rpartition(":")[2])
    channel = await open_socket(("127.0.0.1", port), CREDENTIALS, "leader", {"replica": replica, "shard": 0})
    talk = await Conversation.over(channel)
    join = m.Join(replica, f"life-{replica}", Addresses.of((ADDRESS,)), 1, 3, dataclasses.astuple(TIMEOUTS))
    for message in (join, m.Finished(True))[: 1 + at_once]:
        talk.write(m.encode(message))
    return talk


async def acknowledged(talk: Conversation, *, views: bool = False) -> None:
    while not isinstance(said := await talk.heard(), m.FinishAck):
        assert said is not None, "the connection has ended"
        assert views or not isinstance(said, m.NewView), "it is not written yet"


def served(store: Slow, replicas: int, test: Callable[[CoordinatorServer, list[Event]], Awaitable[None]]) -> None:
    """All of so many replicas are in the view that is stored."""
    events: list[Event] = []
    here = Addresses.of((ADDRESS,))
    store.views = [View(1, None, tuple(Member(replica, f"life-{replica}", here, True) for replica in range(replicas)))]

    async def run() -> None:
        server = CoordinatorServer(replicas, 1, CREDENTIALS, store=store, timeouts=TIMEOUTS, on_event=events.append)
        await server.start()
        try:
            await test(server, events)
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def kinds(events: list[Event]) -> list[str]:
    return [event["kind"] for event in events]


def test_who_has_finished_is_known_before_it_hears_so_though_a_view_is_being_written() -> None:
    """It may end as soon as it has the acknowledgement, and its launcher would take that for a death."""

    async def test(server: CoordinatorServer, events: list[Event]) -> None:
        talks = [await finishing(server, 0)]
        await acknowledged(talks[0])
        server._do([ca.Persist(View(2, None, ()))])
        talks.append(await finishing(server, 1))
        await acknowledged(talks[1])
        assert kinds(events).count("finished") == 2
        assert server._writing is not None

    served(Slow(), 3, test)


def test_nobody_hears_that_its_finish_is_known_before_that_is_written() -> None:
    """It may end then, and this coordinator as well. What comes meanwhile is one more write, however much it is."""
    store = Slow("slow")

    async def test(server: CoordinatorServer, events: list[Event]) -> None:
        talks = [await finishing(server, replica) for replica in range(3)]
        acks = [asyncio.ensure_future(acknowledged(talk)) for talk in talks]
        await until(lambda: kinds(events).count("finished") == 3)  # a launcher knows at once
        await asyncio.sleep(0)
        assert len(store.written[0].lives) == 1
        assert not any(ack.done() for ack in acks)
        assert not server._done.is_set()
        store.given[0].set_result(None)
        await until(lambda: len(store.given) == 2)
        assert len(store.written[1].lives) == 3
        store.given[1].set_result(None)
        await asyncio.gather(*acks)

    served(store, 3, test)


def test_who_has_finished_is_not_written_before_the_view_in_which_that_is_known() -> None:
    """Otherwise a coordinator that comes with the older view would believe nothing of it, nor what it has replaced."""
    store = Slow()

    async def test(server: CoordinatorServer, events: list[Event]) -> None:
        talks = [await finishing(server, replica) for replica in range(2)]
        for talk in talks:
            await acknowledged(talk)
        talks.append(await finishing(server, 2, at_once=False))
        await until(lambda: len(server.steps) == 3)
        assert {finishes.epoch for finishes in store.written} == {1}
        server.exited(1, 1)  # its script has failed after all, so it is lost
        assert len(store.views_given) == 1
        talks[2].write(m.encode(m.Finished(True)))
        acknowledgement = asyncio.ensure_future(acknowledged(talks[2], views=True))
        await until(lambda: kinds(events).count("finished") == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert all(finishes.epoch == 1 for finishes in store.written)
        assert not acknowledgement.done()
        store.views = [*store.views, View(2, None, store.views[-1].members[:1])]
        store.views_given[0].set_result(None)
        await until(lambda: store.written[-1].epoch == 2)
        await acknowledgement

    served(store, 3, test)


def test_what_comes_during_the_last_write_waits_for_that_one_alone() -> None:
    store = Slow("slow")
    store.views = [View(1, None, ())]

    async def run() -> None:
        writer = finish_writer.FinishWriter(store, lambda error: None, lambda text: None)
        taken: list[int] = []
        writer.write(Finishes(1))
        await until(lambda: len(store.given) == 1)
        writer.then(lambda: taken.append(1))
        store.given[0].set_result(None)
        await until(lambda: bool(taken))

    asyncio.run(asyncio.wait_for(run(), finish_writer.LONGEST / 2))


@pytest.mark.parametrize("how", ["slow", "full"])
def test_a_store_that_does_not_take_it_holds_up_no_end_for_long(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish_writer, "LONGEST", 0.2)
    monkeypatch.setattr(finish_writer, "RETRY", 0.01)
    store = Slow(how)

    async def test(server: CoordinatorServer, events: list[Event]) -> None:
        talk = await finishing(server, 0)
        await acknowledged(talk)
        said = [event["text"] for event in events if event["kind"] == "store"]
        assert len(said) == (how == "full"), "once"
        assert all("who has finished cannot be stored" in text and "free space there" in text for text in said)
        assert (len(store.written) > 1) == (how == "full"), "it is tried again"

    served(store, 2, test)


def test_the_end_of_the_job_waits_for_what_is_being_written_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is written after it: what is stored is removed then."""
    monkeypatch.setattr(finish_writer, "LONGEST", 0.2)
    monkeypatch.setattr(finish_writer, "RETRY", 0.01)
    store = Slow("full")

    async def test(server: CoordinatorServer, events: list[Event]) -> None:
        talk = await finishing(server, 0)
        await asyncio.wait_for(server.wait_done(), DEADLINE)
        assert server.ended
        assert not server.failed
        times = len(store.written)
        assert times > 1
        await asyncio.sleep(0.1)
        assert len(store.written) == times
        talk.close()

    served(store, 1, test)


@pytest.mark.parametrize("reads", [True, False])
def test_what_was_said_last_is_heard_or_it_is_said_that_it_is_not(
    reads: bool, count: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LAST", DEADLINE if reads else 0.1)
    some, times = bytes(1 << 20), 16

    async def test(server: CoordinatorServer, events: list[Event]) -> None:
        port = int(server.endpoint.rpartition(":")[2])
        channel = await open_socket(("127.0.0.1", port), CREDENTIALS, "leader", {"replica": 0, "shard": 0})
        await until(lambda: bool(server._writers))
        (writer,) = server._writers.values()
        for _ in range(times):
            writer._writer.write(some)
        assert not asyncio.ensure_future(writer.flushed()).done()
        stopping = asyncio.ensure_future(server.stop())
        with channel.detach() as far:
            heard = 0
            while reads and (part := await asyncio.get_running_loop().sock_recv(far, 1 << 20)):
                heard += len(part)
            await stopping
        assert (heard > times * len(some)) == reads
        assert count("unsent") == (not reads)

    served(Slow(), 1, test)


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


def test_a_leader_that_is_mute_for_long_gets_few_pings_as_it_reads_none() -> None:
    """Its connection would end when there is no room for more, and then nothing shows that its kernel answers."""
    sent: list[int] = []

    def writer(conn: int) -> Any:
        return types.SimpleNamespace(unanswered=lambda: 0.0, send=lambda message: sent.append(conn))

    machine: Any = types.SimpleNamespace(lives=(), mute=lambda longer, now: {1}, acknowledged=lambda *_: None)

    async def run() -> None:
        server = CoordinatorServer(1, 1, CREDENTIALS, timeouts=TIMEOUTS)
        server._writers = {1: writer(1), 2: writer(2)}
        for _ in range(16):
            server._ask_kernels(machine)

    asyncio.run(run())
    assert (sent.count(1), sent.count(2)) == (2, 16)
