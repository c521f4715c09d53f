"""Peers that lie, flood, stall or replay: what they cost, what is counted, and that everybody else is served."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import ftcomm
from ftcomm.control import actions as act
from ftcomm.control import dropped, handshake, links, wire
from ftcomm.control import knock as knock_module
from ftcomm.control import messages as m
from ftcomm.control.agent import Agent
from ftcomm.control.links import Link, Listener, hand_over, listen, serve_messages
from ftcomm.control.rank_errors import Gone, JoinError
from ftcomm.control.sealed import Channel
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.store import ViewStore
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.view_differences import difference
from ftcomm.control.view_entry import WAKE_AGAIN, WAKE_UPS
from ftcomm.control.views import NO_ADDRESSES, Addresses, Member, View
from ftcomm.errors import SettingsError
from ftcomm.settings import unstarted
from ftcomm.sync.futex import MAX_SLEEP
from tests.fuzz.choices import ADDRESS
from tests.fuzz.machines import GIVEN, TIMEOUTS
from tests.fuzz.targets import all_messages
from tests.idle_engine import IdleEngine
from tests.opened import open_socket
from tests.sealed_rig import ends, records

pytestmark = pytest.mark.protocol

CREDENTIALS = handshake.Credentials("secret")
DEADLINE = 60.0
MB = 1 << 20


@pytest.fixture(autouse=True)
def _time_for_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time: who is counted is counted for what it says."""
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", DEADLINE)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """How many of a kind were dropped in this test."""
    monkeypatch.setattr(dropped, "_tallies", {})
    return lambda kind: dropped.counts().get(kind, 0)


@contextlib.asynccontextmanager
async def listening(on_peer: Callable[[Channel, handshake.Opening], Awaitable[None]]):
    sock = listen("127.0.0.1", 0)
    listener = Listener(sock, CREDENTIALS, on_peer)
    try:
        yield sock.getsockname()
    finally:
        await listener.close()


async def nobody(sock: Channel, opening: handshake.Opening) -> None:
    sock.close()
    raise AssertionError(f"let in: {opening}")


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side hangs up; what it did not read makes that a reset."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await asyncio.wait_for(reader.read(100), DEADLINE):
            got += part
    return got


def framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def recorded(mine: handshake.Credentials) -> tuple[list[bytes], list[bytes]]:
    """What client and server say in a handshake that goes well."""
    client, server = handshake.client_steps(mine, "leader", {"replica": 1}), handshake.server_steps(mine)
    next(server)
    opening = next(client)
    next(client)
    challenge = server.send(opening)
    next(server)
    proof = client.send(challenge)
    next(client)
    return [opening, proof], [challenge, server.send(proof)]


# -- who is let in -------------------------------------------------------------------------------------------------


def test_a_recorded_handshake_opens_nothing(count: Callable[[str], int]) -> None:
    said, _ = recorded(CREDENTIALS)
    assert len(said) == 2

    async def run() -> None:
        async with listening(nobody) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(framed(*said))
            assert b"wrong token" in await closed(reader)
            writer.close()
            await until(lambda: count("token") == 1)

    asyncio.run(run())


def test_a_recorded_server_is_not_trusted() -> None:
    _, answers = recorded(CREDENTIALS)
    client = handshake.client_steps(CREDENTIALS, "leader", {"replica": 1})
    next(client)
    next(client)
    client.send(answers[0])
    next(client)
    with pytest.raises(handshake.HandshakeError, match="does not hold this job's token"):
        client.send(answers[1])


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("when", ["at once", "after the proof"])
def test_a_refusal_without_the_token_proves_nothing(when: str, elsewhere: bool) -> None:
    """Whoever is on the way can say it, so it is no reason to give up, nor one to take anybody for dead."""
    client = handshake.client_steps(CREDENTIALS, "leader", {"replica": 1})
    next(client)
    next(client)
    if when == "at once":
        said = handshake.Challenge(handshake.VERSION, bytes(handshake.NONCE), "go away")
    else:
        client.send(msgspec.msgpack.encode(handshake.Challenge(handshake.VERSION, bytes(handshake.NONCE))))
        next(client)
        said = handshake.Accepted(bytes(32), "go away", elsewhere=elsewhere)
    with pytest.raises(handshake.HandshakeError, match="go away") as refused:
        client.send(msgspec.msgpack.encode(said))
    assert type(refused.value) is handshake.HandshakeError


def test_a_client_signs_for_nobody_else() -> None:
    """One who lures a client could have it sign an opening of the lurer's own, were a nonce of any length."""
    real = handshake.server_steps(CREDENTIALS)
    next(real)
    victim = handshake.client_steps(CREDENTIALS, "member", {"replica": 1})
    signed = next(victim)  # will be the value of a last field of the lurer's opening
    head = msgspec.msgpack.encode({"version": handshake.VERSION, "purpose": "leader", "fields": {}, "nonce": b"n" * 16})
    prefix = bytes([0x85]) + head[1:] + b"\xa1x" + b"\xc4" + bytes([len(signed)])
    assert msgspec.msgpack.decode(prefix + signed, type=handshake.Opening).purpose == "leader"
    nonce = msgspec.msgpack.decode(real.send(prefix + signed), type=handshake.Challenge).nonce
    next(victim)
    lure = msgspec.msgpack.encode({"version": handshake.VERSION, "nonce": nonce + prefix, "refused": ""})
    with pytest.raises(handshake.HandshakeError, match="nonce"):
        victim.send(lure)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "handshake"),
        (b"\x7f\xff\xff\xff", "handshake"),
        (framed(b"\x81\xa7purpose\xa1\xff"), "handshake"),
        (framed(b"\x91" * 4000), "handshake"),
        (framed(msgspec.msgpack.encode({"version": handshake.VERSION + 1})), "version"),
        (framed(*recorded(handshake.Credentials("guess"))[0]), "token"),
        (b"", "handshake"),
        (b"\x00\x00", "handshake"),
    ],
    ids=["another protocol", "too long", "no UTF-8", "deep", "version", "token", "nothing", "truncated"],
)
def test_each_refusal_is_counted_and_one_line(
    said: bytes, kind: str, count: Callable[[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with listening(nobody) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(said)
            writer.write_eof()
            await closed(reader)
            writer.close()
            await until(lambda: count(kind) == 1)

    with caplog.at_level(logging.WARNING, "ftcomm.control"):
        asyncio.run(run())
    assert dropped.counts() == {kind: 1}
    lines = [1] if said else []  # who only looks whether somebody listens, as a cluster does, is no news
    assert [len(record.getMessage().splitlines()) for record in caplog.records] == lines
    assert not any(record.exc_info for record in caplog.records)


def test_strangers_that_say_nothing_make_room_for_newer_ones(
    monkeypatch: pytest.MonkeyPatch, count: Callable[[str], int]
) -> None:
    monkeypatch.setattr(links, "MAX_HANDSHAKES", 8)
    arrived = []
    heard: list[m.AnyMessage] = []

    async def peer(sock: Channel, opening: handshake.Opening) -> None:
        arrived.append(opening.purpose)
        await serve_messages(sock, heard.append, lambda writer: None)

    async def run() -> None:
        async with listening(peer) as address:
            friend = await open_socket(address, CREDENTIALS, "rank", {})
            await until(lambda: arrived == ["rank"])
            strangers = [await asyncio.open_connection(*address) for _ in range(20)]
            await until(lambda: count("crowded") == 12)
            for reader, _ in strangers[:12]:  # the oldest are gone
                assert await closed(reader) == b""
            client = await open_socket(address, CREDENTIALS, "member", {})  # and who has the token gets in
            client.close()
            await until(lambda: arrived == ["rank", "member"])
            friend.sendall(GOOD)  # who had got in is no stranger
            await until(lambda: heard == [m.Heartbeat(3)])
            friend.close()
            for reader, writer in strangers[13:]:
                assert not reader.at_eof()
                writer.close()

    asyncio.run(run())


def test_who_is_out_of_descriptors_says_so_without_flooding_its_log_and_goes_on(
    count: Callable[[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    arrived = []

    async def peer(channel: Channel, opening: handshake.Opening) -> None:
        arrived.append(opening.purpose)
        channel.close()

    async def run() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        async with listening(peer) as address:
            sock = socket.socket()
            free = os.dup(sock.fileno())
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                sock.connect(address)
                await until(lambda: count("unaccepted") > dropped.LINES + 2)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                sock.close()
            client = await open_socket(address, CREDENTIALS, "member", {})
            client.close()
            await until(lambda: arrived == ["member"])

    with caplog.at_level(logging.WARNING, "ftcomm.control"):
        asyncio.run(run())
    said = [record for record in caplog.records if "could not be accepted" in record.getMessage()]
    assert 0 < len(said) <= dropped.LINES + 1, "a window may have ended in between"
    assert "Too many open files" in said[0].getMessage()


def test_strangers_take_no_more_memory_than_a_handshake_may(count: Callable[[str], int]) -> None:
    """Each says that the longest frame comes and sends all but its end; then one sends a MB, which is not read."""
    strangers = 100

    async def run() -> None:
        async with listening(nobody) as address:
            socks = [socket.create_connection(address) for _ in range(strangers)]
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for sock in socks:
                sock.sendall(handshake.MAX_HANDSHAKE.to_bytes(4, "big") + bytes(handshake.MAX_HANDSHAKE - 1))
                await asyncio.sleep(0)
            flood = asyncio.to_thread(push, socks[0], (bytes(MB),))
            await flood
            await until(lambda: count("handshake") == 1)
            assert tracemalloc.get_traced_memory()[1] - before < MB + 4 * strangers * handshake.MAX_HANDSHAKE + MB // 2
            for sock in socks:
                sock.close()

    try:
        asyncio.run(run())
    finally:
        tracemalloc.stop()


def test_a_stranger_that_says_nothing_is_closed_in_time(
    monkeypatch: pytest.MonkeyPatch, count: Callable[[str], int]
) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", 0.05)

    async def run() -> None:
        async with listening(nobody) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"\x00")
            assert await closed(reader) == b""
            writer.close()
            assert count("handshake") == 1

    asyncio.run(run())


def test_a_server_that_drips_does_not_hold_a_client() -> None:
    """Each byte comes in time, all of them do not."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        over = threading.Event()

        def drip() -> None:
            conn, _ = port.accept()
            with conn, contextlib.suppress(OSError):
                conn.sendall((4000).to_bytes(4, "big"))
                while not over.wait(0.02):
                    conn.sendall(b"x")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with pytest.raises(OSError, match="within"):
            wire.connect(port.getsockname(), CREDENTIALS, "data", {}, 0.3)
        over.set()
        thread.join(DEADLINE)


# -- who is in -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


def served(*payloads: bytes, on_message: Callable[[m.AnyMessage], None], then: bytes = b"") -> str:
    """`then` comes behind the records, and is none."""

    async def run() -> str:
        with pair() as (near, far):
            parts = (*records(*payloads), then)
            thread = threading.Thread(target=push, args=(far, parts), daemon=True)
            thread.start()
            channel, _ = ends(near, far)
            why = await asyncio.wait_for(serve_messages(channel, on_message, lambda writer: None), DEADLINE)
        thread.join(DEADLINE)
        return why

    return asyncio.run(run())


def push(sock: socket.socket, parts: tuple[bytes, ...]) -> None:
    with contextlib.suppress(OSError):  # it hangs up on us
        for part in parts:
            sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)


GOOD = m.encode(m.Heartbeat(3))
NO_MESSAGE = {
    "no UTF-8": b"\x81\xa4type\xa1\xff",
    "deep": b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 100_000,
    "a list of 4 G": b"\xdd\xff\xff\xff\xff",
    "unknown kind": msgspec.msgpack.encode({"type": "Surrender"}),
    "truncated": m.encode(m.Expelled("a reason"))[:-3],
    "with a tail": m.encode(m.Heartbeat(3)) + b"\x00",
    "empty": b"",
    "negative replica": msgspec.msgpack.encode({"type": "Reachable", "replica": -1}),
    "huge replica": msgspec.msgpack.encode({"type": "Reachable", "replica": 1 << 31}),
    "huge epoch": msgspec.msgpack.encode({"type": "Installed", "epoch": 1 << 32}),
    "huge step": msgspec.msgpack.encode({"type": "Heartbeat", "step": (1 << 64) - 1}),
    "long name": msgspec.msgpack.encode({"type": "Welcome", "incarnation": "x" * 1000}),
    "an event of the coordinator": msgspec.msgpack.encode({"type": "Report", "kind": "failed", "fields": {}}),
    "a member twice": msgspec.msgpack.encode(
        {
            "type": "NewView",
            "view": {
                "epoch": 1,
                "step": None,
                "members": [msgspec.to_builtins(Member(1, "a", NO_ADDRESSES, True))] * 2,
            },
        }
    ),
}


@pytest.mark.parametrize("data", NO_MESSAGE.values(), ids=NO_MESSAGE)
def test_what_is_no_message_is_dropped_and_the_connection_goes_on(data: bytes, count: Callable[[str], int]) -> None:
    heard: list[m.AnyMessage] = []
    served(GOOD, data, GOOD, on_message=heard.append)
    assert heard == [m.Heartbeat(3), m.Heartbeat(3)]
    assert dropped.counts() == {"message": 1}


def test_a_view_that_leaves_out_what_was_never_told_ends_the_connection(count: Callable[[str], int]) -> None:
    """The next one would leave it out, too; a new connection begins with everything."""
    heard: list[m.AnyMessage] = []
    view = View(2, None, (Member(0, "a", NO_ADDRESSES, True),))
    untold = difference(m.NewView(view), view, None)
    why = served(GOOD, m.encode(untold), GOOD, on_message=heard.append)
    assert heard == [m.Heartbeat(3)]
    assert "without the addresses of [(0, 'a')]" in why
    assert dropped.counts() == {"message": 1}


def test_a_view_has_its_members_in_order() -> None:
    members = (Member(2, "a", NO_ADDRESSES, True), Member(1, "b", NO_ADDRESSES, True))
    with pytest.raises(ValueError, match="ascending"):
        View(1, None, members)


def test_a_callback_that_fails_costs_one_message(count: Callable[[str], int]) -> None:
    heard = []

    def fails_once(message: m.AnyMessage) -> None:
        heard.append(message)
        if len(heard) == 1:
            raise KeyError("a defect")

    served(GOOD, GOOD, on_message=fails_once)
    assert len(heard) == 2
    assert count("internal") == 1


def test_memory_is_taken_for_what_came_not_for_what_was_said(count: Callable[[str], int]) -> None:
    """A frame that claims the most and brings little, then one that claims more than the most."""
    tracemalloc.start()
    try:
        served(then=(wire.MAX_MESSAGE).to_bytes(4, "big") + b"x" * 1000, on_message=print)
        assert tracemalloc.get_traced_memory()[1] < MB
        why = served(GOOD, then=(wire.MAX_MESSAGE + 1).to_bytes(4, "big") + b"x" * MB, on_message=print)
        assert "at most" in why
        assert tracemalloc.get_traced_memory()[1] < 3 * MB
    finally:
        tracemalloc.stop()
    assert dropped.counts() == {"frame": 1}


def test_a_longest_message_takes_a_small_multiple_of_its_length(count: Callable[[str], int]) -> None:
    """The bounds of lists keep what is decoded small: one of 16 million small numbers is refused before it is made."""
    numbers = b"\xdd" + (wire.MAX_MESSAGE - 100).to_bytes(4, "big") + b"\x01" * (wire.MAX_MESSAGE - 100)
    stalled = msgspec.msgpack.encode({"type": "Stalled", "shard": 0, "epoch": 1, "op": 1, "due": True})
    data = bytes([stalled[0] + 1]) + stalled[1:] + b"\xaawaiting_on" + numbers
    assert wire.MAX_MESSAGE - 100 < len(data) <= wire.MAX_MESSAGE
    frame = records(data)[0]
    tracemalloc.start()
    try:
        served(then=frame, on_message=print)
        assert tracemalloc.get_traced_memory()[1] < 4 * wire.MAX_MESSAGE
    finally:
        tracemalloc.stop()
    assert dropped.counts() == {"message": 1}


def test_a_peer_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch, count: Callable[[str], int]) -> None:
    monkeypatch.setattr(wire, "MAX_UNSENT", MB)

    async def run() -> None:
        with pair() as (near, far):
            _, stream = await asyncio.open_connection(sock=near)
            writer = wire.Writer(ends(near, far)[0], stream)
            for _ in range(100):
                writer.write(b"x" * 100_000)
                assert stream.transport.get_write_buffer_size() < 2 * MB
            assert stream.transport.is_closing()

    asyncio.run(run())
    assert count("unsent") > 0


def test_a_message_that_is_too_long_is_not_sent(count: Callable[[str], int]) -> None:
    async def run() -> None:
        with pair() as (near, far):
            _, stream = await asyncio.open_connection(sock=near)
            channel, other = ends(near, far)
            writer = wire.Writer(channel, stream)
            writer.write(bytes(wire.MAX_MESSAGE + 1))
            writer.write(b"next")
            assert await asyncio.to_thread(other.recv, 100) == b"next"
            writer.close()

    asyncio.run(run())
    assert count("unsent") == 1


# -- whole servers: everything, from everybody, at once ----------------------------------------------------------


def rubbish() -> list[bytes]:
    """Every message there is, in no order that makes sense, with what is none in between."""
    good = [m.encode(message) for message in all_messages()]
    return [data for pair in itertools.zip_longest(good, NO_MESSAGE.values(), fillvalue=b"") for data in pair]


async def insult(address: tuple[str, int], purpose: str, fields: handshake.Fields) -> None:
    """Say all of it on an authenticated connection, then hang up."""
    sock = await open_socket(address, CREDENTIALS, purpose, fields)
    with sock, contextlib.suppress(OSError):  # it may hang up first
        for data in rubbish():
            await asyncio.get_running_loop().sock_sendall(sock.detach(), sock.record(data))


FIELDS: list[handshake.Fields] = [
    {},
    {"shard": 0},
    {"shard": 1},
    {"shard": 1, "replica": 0},
    {"shard": 9},
    {"shard": "x"},
    {"replica": -1, "epoch": "x"},
    {"replica": 3, "epoch": 1},
]
PURPOSES = ("leader", "rank", "member", "data", "asked", "state", "", "x" * 200)


def test_a_coordinator_outlives_every_peer(count: Callable[[str], int]) -> None:
    async def run() -> None:
        events: list[dict[str, object]] = []
        server = CoordinatorServer(1, 1, CREDENTIALS, timeouts=TIMEOUTS, on_event=events.append)
        await server.start()
        address = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        for purpose, fields in itertools.product(PURPOSES, FIELDS):
            await insult(address, purpose, fields)
        assert count("purpose") == (len(PURPOSES) - 1) * len(FIELDS)
        assert count("message") > 0
        heard: list[m.AnyMessage] = []
        epoch = max([0, *[event["epoch"] for event in events if event["kind"] == "view"]])
        join = m.Join(5, "honest", Addresses.of((ADDRESS,)), 0, -1, GIVEN["timeouts"])
        link = Link(
            address,
            CREDENTIALS,
            "leader",
            NamedRank(5, 0).fields,
            on_open=lambda: link.send(join),
            on_message=heard.append,
        )
        await until(lambda: any(not isinstance(word, m.Ping) for word in heard))  # one may come first
        answer = next(word for word in heard if not isinstance(word, m.Ping))
        assert isinstance(answer, m.NewView | m.Queued | m.Registered | m.Expelled), epoch
        link.close()
        await server.stop()

    asyncio.run(run())
    assert count("internal") == 0


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


@contextlib.contextmanager
def an_agent(ranks: int = 2, coordinator: socket.socket | None = None) -> Iterator[tuple[Agent, tuple[str, int]]]:
    """Rank 0 of replica 0, which never reaches its coordinator unless there is one, and where it listens."""
    sock, nowhere = listen("127.0.0.1", 0), coordinator or listen("127.0.0.1", 0)
    agent = Agent(
        IdleEngine(),  # type: ignore[arg-type]
        coordinator=nowhere.getsockname(),
        credentials=CREDENTIALS,
        replica=0,
        shard=0,
        ranks=ranks,
        leader=None,
        leader_socket=None,
        sock=sock,
        address=ADDRESS,
        timeouts=TIMEOUTS,
    )
    try:
        yield agent, sock.getsockname()
    finally:
        agent.stop()
        nowhere.close()


def test_a_stranger_that_refuses_in_the_place_of_the_coordinator_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may be gone in a moment: its word ends no rank before its time limit, and is logged once."""
    times: list[float] = []

    def refuse() -> None:
        with contextlib.suppress(OSError):
            while True:
                conn, _ = stranger.accept()
                with conn:
                    times.append(time.monotonic())
                    conn.recv(handshake.MAX_HANDSHAKE)
                    said = msgspec.msgpack.encode(
                        handshake.Challenge(handshake.VERSION, bytes(handshake.NONCE), "the job is over")
                    )
                    conn.sendall(framed(said))
                    conn.recv(handshake.MAX_HANDSHAKE)

    stranger = listen("127.0.0.1", 0)
    threading.Thread(target=refuse, daemon=True).start()
    with an_agent(1, stranger) as (agent, _):
        agent.start()
        with pytest.raises(JoinError, match=r"the job is over.*waited 1 s"):
            agent.register(1.0)
    assert len(times) > 1
    assert len([record for record in caplog.records if "the job is over" in record.getMessage()]) == 1


def test_an_engine_that_does_not_stop_is_woken_for_as_long_as_it_may_have_missed_it() -> None:
    """Its longest sleep ends by itself, and then it has looked around: to wake it for ever takes a core."""
    with an_agent(1) as (agent, _):
        woken: list[None] = []
        agent.engine.wake = lambda: woken.append(None)  # type: ignore[method-assign]
        asyncio.run(asyncio.wait_for(agent._entry.wake(asyncio.Event()), TIMEOUTS.op))
    assert len(woken) * WAKE_AGAIN >= MAX_SLEEP
    assert len(woken) == WAKE_UPS


def test_a_boundary_says_why_the_rank_has_failed_before_that_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may come to it between the two, in a thread of its own."""
    with an_agent(1) as (agent, _):
        monkeypatch.setattr(agent, "_carry_out", lambda actions: None)
        agent._do(agent._node.failed, "the engine was interrupted")
        with pytest.raises(Gone, match="the engine was interrupted"):
            agent.boundary(0, 1.0)


def test_who_is_on_its_way_in_waits_longer_than_who_waits_for_others_to_come() -> None:
    """Whatever the words are in which it is told so."""
    stranger = listen("127.0.0.1", 0)
    with stranger, an_agent(1, stranger) as (agent, _):
        agent.start()
        agent._carry_out([act.JoinPending("some news", m.Stage.JOINING)])
        with ThreadPoolExecutor(1) as pool:
            register = pool.submit(agent.register, 0.5)
            assert not wait([register], 2.0).done
            agent._carry_out([act.JoinPending("other news", m.Stage.WAITING)])
            with pytest.raises(JoinError, match="other news"):
                register.result(DEADLINE)


def test_a_member_speaks_for_itself_alone(count: Callable[[str], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """That another is alive, has told its progress, or stands at a boundary, only that one can say."""
    heard: list[m.AnyMessage] = []
    progress = m.Progress(0, ())
    said: list[m.AnyMessage] = [
        *(m.Alive(replica, "abc") for replica in (2, 1)),
        *(m.MemberProgress(replica, "abc", 7, progress) for replica in (2, 1)),
        *(m.Boundary(replica, 1, 5, None) for replica in (2, 1)),
    ]

    async def insult(address: tuple[str, int]) -> None:
        link = Link(address, CREDENTIALS, "member", {"replica": 1}, on_open=lambda: [link.send(x) for x in said])
        await until(lambda: len(heard) + count("message") == len(said))
        link.close()

    with an_agent() as (agent, address):
        monkeypatch.setattr(agent._node, "from_peer", lambda message, *_: heard.append(message) or [])
        agent.start()
        asyncio.run(insult(address))
    assert heard == said[1::2]
    assert count("message") == 3


def test_a_rank_outlives_every_peer(count: Callable[[str], int]) -> None:
    served: queue.Queue[handshake.Fields] = queue.Queue()

    def handler(sock: Channel, fields: handshake.Fields) -> None:
        with sock:
            handshake.number(fields, "replica")
            served.put(fields)

    with an_agent() as (agent, address):
        agent.serve("data", handler)
        agent.start()
        for purpose, fields in itertools.product(PURPOSES, FIELDS):
            asyncio.run(insult(address, purpose, fields))
        with wire.connect(address, CREDENTIALS, "data", {"replica": 3, "epoch": 1}, DEADLINE):
            for fields in ({"shard": 1, "replica": 0}, *[{"replica": 3, "epoch": 1}] * 2):
                assert served.get(timeout=DEADLINE) == fields
        right = 1 + 2 + 2  # of "rank", "member" and "data"
        asyncio.run(until(lambda: count("fields") == 3 * len(FIELDS) - right))
    assert count("purpose") == 4 * len(FIELDS)
    assert count("message") > 0
    assert count("internal") == 0


# -- our own errors ------------------------------------------------------------------------------------------------


def test_a_link_outlives_errors_in_its_callbacks(count: Callable[[str], int]) -> None:
    opened: list[int] = []

    async def peer(sock: Channel, opening: handshake.Opening) -> None:
        await serve_messages(sock, lambda message: None, lambda writer: None)

    async def run() -> None:
        link: Link | None = None

        def on_open() -> None:
            opened.append(1)
            if len(opened) < 3:
                raise KeyError("a defect")

        def on_down(error: Exception) -> None:
            raise ValueError("another")

        async with listening(peer) as address:
            link = Link(address, CREDENTIALS, "member", {}, on_open=on_open, on_down=on_down)
            await until(lambda: len(opened) == 3)
            await until(lambda: link.is_up)
            link.close()

    asyncio.run(run())
    assert count("internal") == 4


def test_a_link_to_an_address_that_cannot_be_says_so(count: Callable[[str], int]) -> None:
    told: list[Exception] = []

    async def run() -> None:
        for address in (("\x00", 1), ("127.0.0.1", 70_000), ("x" * 300, 1)):
            link = Link(address, CREDENTIALS, "member", {}, on_open=lambda: None, on_down=told.append)
            before = len(told)
            await until(lambda before=before: len(told) > before)
            link.close()

    asyncio.run(run())
    assert all(isinstance(error, OSError) for error in told)
    assert dropped.counts() == {}


def test_a_listener_outlives_errors_in_what_it_hands_on_to(count: Callable[[str], int]) -> None:
    async def peer(sock: Channel, opening: handshake.Opening) -> None:
        if opening.purpose == "rank":
            handshake.number(opening.fields, "shard", most=1)
        raise KeyError("a defect")

    async def run() -> None:
        async with listening(peer) as address:
            for purpose, fields in (("member", {}), ("rank", {"shard": "x"}), ("rank", {"shard": 7}), ("rank", {})):
                sock = await open_socket(address, CREDENTIALS, purpose, fields)
                with sock.detach() as raw:
                    loop = asyncio.get_running_loop()
                    assert await asyncio.wait_for(loop.sock_recv(raw, 1), DEADLINE) == b"", "hung up on"

    asyncio.run(run())
    assert dropped.counts() == {"internal": 1, "fields": 3}


@pytest.mark.parametrize("fields", [{}, {"replica": "x"}, {"replica": -1}, {"replica": 1 << 31}], ids=str)
def test_a_handler_with_fields_that_it_cannot_use_hangs_up(
    fields: handshake.Fields, count: Callable[[str], int]
) -> None:
    def handler(sock: Channel, fields: handshake.Fields) -> None:
        handshake.number(fields, "replica")

    near, far = socket.socketpair()
    with far:
        hand_over(handler, ends(near, far)[0], fields)
        assert far.recv(1) == b""
    assert dropped.counts() == {"fields": 1}


# -- counting ------------------------------------------------------------------------------------------------------


def test_a_flood_is_counted_and_does_not_flood_the_log(
    count: Callable[[str], int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(dropped.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.WARNING, "ftcomm.control"):
        threads = [
            threading.Thread(target=lambda: [dropped.drop("message", "x\n\x1b[31my") for _ in range(1000)])
            for _ in "ab"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert count("message") == 2000
        assert len(caplog.records) == dropped.LINES
        assert caplog.records[0].getMessage() == "dropped (message): x??[31my"
        dropped.drop("frame", "another kind")
        assert len(caplog.records) == dropped.LINES + 1
        now[0] = dropped.WINDOW
        dropped.drop("message", "y")
        assert caplog.records[-1].getMessage() == "dropped (message): y (and 1990 of this kind before it, not logged)"


@pytest.mark.parametrize("letter", ["e", "\U0001f600"])
def test_a_long_reason_fits_into_an_opening(letter: str) -> None:
    """Cut where it is told, it is taken: four bytes a character, as the longest are."""
    mine, told = handshake.Credentials("a token that is long enough"), []

    def tell(there: object, credentials: object, purpose: str, fields: handshake.Fields, timeout: float) -> Any:
        told.append((purpose, fields))
        raise OSError("nobody is there")

    leader = f"{'h' * 100}:1"
    settings = SimpleNamespace(coordinator="127.0.0.1:1", replica=3, shard=1, ranks_per_replica=2, leader=leader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unstarted.wire, "connect", tell)
        patch.setattr(unstarted.credentials, "of", lambda settings: mine)
        unstarted.tell(ValueError(letter * 5000), settings)  # type: ignore[arg-type]
    purpose, fields = told[0]
    opening = next(handshake.client_steps(mine, purpose, fields))
    assert opening is not None
    assert len(opening) <= handshake.MAX_HANDSHAKE
    taken = msgspec.msgpack.decode(opening, type=handshake.Opening)
    assert handshake.text(taken.fields, "reason") == f"rank 1 of replica 3 cannot start: {letter * 5000}"[:598]
    assert NamedRank.read(taken.fields) == NamedRank(3, 1, leader)


def test_who_cannot_start_says_so_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader of its replica waits for all its ranks, and another replica for this one."""
    token, timeouts = "a token that is long enough", dataclasses.astuple(TIMEOUTS)
    mine = handshake.Credentials(token)

    async def said(channel: Channel, reader: asyncio.StreamReader) -> m.AnyMessage:
        while isinstance(message := m.decode(await channel.read(reader, wire.MAX_MESSAGE)), m.Ping):
            pass
        return message

    async def run() -> None:
        events: list[dict[str, object]] = []
        server = CoordinatorServer(2, 2, mine, timeouts=TIMEOUTS, on_event=events.append)
        await server.start()
        try:
            port = int(server.endpoint.rpartition(":")[2])
            heard = []
            for replica in (0, 1):
                channel = await open_socket(
                    ("127.0.0.1", port), mine, "leader", NamedRank(replica, 0, f"there:{replica + 1}").fields
                )
                reader, stream = await asyncio.open_connection(sock=channel.detach())
                if replica == 0:
                    join = m.Join(0, "life", Addresses.of((ADDRESS, ADDRESS)), 0, -1, timeouts)
                    wire.Writer(channel, stream).write(m.encode(join))
                    assert isinstance(await said(channel, reader), m.Queued)
                heard.append((channel, reader, stream))
            env = {"COORDINATOR": f"127.0.0.1:{port}", "TOKEN": token, "REPLICA": "1", "REPLICAS": "998", "RANK": "1"}
            env["LEADER"] = "there:2"
            for name, value in env.items():
                monkeypatch.setenv(f"FTCOMM_{name}", value)
            with pytest.raises(SettingsError, match="998 replicas; a job has at most"):
                await asyncio.to_thread(ftcomm.init)
            other, sibling = [await said(channel, reader) for channel, reader, _ in heard]
            assert isinstance(sibling, m.Expelled)
            assert sibling.reason.startswith("rank 1 of replica 1 cannot start: FTCOMM_REPLICAS and")
            assert other == sibling
            assert [event["reason"] for event in events if event["kind"] == "refused"] == [sibling.reason]
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


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
            reader, stream = await asyncio.open_connection(sock=channel.detach())
            writer = wire.Writer(channel, stream)
            writer.write(m.encode(m.Join(0, "life", Addresses.of((ADDRESS,)), 0, -1, dataclasses.astuple(TIMEOUTS))))
            writer.write(m.encode(m.Finished(True)))
            while not isinstance(said := m.decode(await channel.read(reader, wire.MAX_MESSAGE)), m.FinishAck):
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
        reader, stream = await asyncio.open_connection(sock=channel.detach())
        writer = wire.Writer(channel, stream)
        store.sure = sure
        writer.write(m.encode(m.Join(0, "life", Addresses.of((ADDRESS,)), 0, -1, (1.0, 2.0, 3.0))))
        if not sure:  # else it closes the connection itself
            writer.write(b"\xc1")  # no message, by which we know that the one before was looked at
            await until(lambda: count("message") == 1)
            await server.stop()
        heard: list[m.Message] = []
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                heard.append(m.decode(await channel.read(reader, wire.MAX_MESSAGE)))
        writer.close()
        await server.stop()
        return heard

    heard = asyncio.run(run())
    assert [type(message) for message in heard] == ([m.Expelled] if sure else [])


def test_a_coordinator_that_is_not_sure_of_its_store_calls_nobody_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who came would leave the one that has taken its place, and be lost there."""
    store = Doubted(None)
    store.views = [View(1, None, (Member(0, "life", Addresses.of((ADDRESS,)), True),))]
    store.sure = False
    calls: list[bool] = []

    def knock(*there: object) -> None:
        calls.append(store.sure)
        raise OSError("nobody listens")

    monkeypatch.setattr(knock_module, "Knock", knock)

    async def run() -> None:
        server = CoordinatorServer(1, 1, CREDENTIALS, store=store, timeouts=Timeouts.derive(10.0))
        await server.start()
        await asyncio.sleep(10 * Timeouts.derive(10.0).beat)
        store.sure = True
        await until(lambda: bool(calls))
        await server.stop()

    asyncio.run(run())
    assert all(calls)


def test_an_error_in_one_look_does_not_end_the_looking(
    monkeypatch: pytest.MonkeyPatch, count: Callable[[str], int]
) -> None:
    async def run() -> None:
        server = CoordinatorServer(1, 1, CREDENTIALS, timeouts=TIMEOUTS)
        await server.start()
        looks = 0

        def tick(now: float) -> None:
            nonlocal looks
            looks += 1
            raise KeyError(looks)

        monkeypatch.setattr(server._machine, "tick", tick)
        while looks < 3:
            await asyncio.sleep(0.01)
        await server.stop()
        assert count("internal") >= 2

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
