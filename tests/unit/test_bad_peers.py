"""Whole servers, to which every peer says everything in no order that makes sense: they outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
from collections.abc import Callable

import pytest

from ftcomm.control import handshake, wire
from ftcomm.control import messages as m
from ftcomm.control.links import Link, listen
from ftcomm.control.sealed import Channel
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.views import Addresses
from tests.fuzz.choices import ADDRESS
from tests.fuzz.machines import GIVEN, TIMEOUTS
from tests.fuzz.targets import all_messages
from tests.rigs.asyncio_client import open_socket
from tests.rigs.leader import Led
from tests.rigs.peers import CREDENTIALS, DEADLINE, NO_MESSAGE, a_control_thread, until

pytestmark = pytest.mark.usefixtures("time_for_handshakes")


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
        assert isinstance(answer, m.NewView | m.Queued | m.Registered | m.Removed), epoch
        link.close()
        await server.stop()

    asyncio.run(run())
    assert count("internal") == 0


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

    with a_control_thread() as (control, address):
        monkeypatch.setattr(control._node, "from_peer", lambda message, *_: heard.append(message) or [])
        control.start()
        asyncio.run(insult(address))
    assert heard == said[1::2]
    assert count("message") == 3


def test_a_rank_outlives_every_peer(count: Callable[[str], int]) -> None:
    served: queue.Queue[handshake.Fields] = queue.Queue()

    def handler(sock: Channel, fields: handshake.Fields) -> None:
        with sock:
            handshake.number(fields, "replica")
            served.put(fields)

    with a_control_thread() as (control, address):
        control.serve("data", handler)
        control.start()
        for purpose, fields in itertools.product(PURPOSES, FIELDS):
            asyncio.run(insult(address, purpose, fields))
        with wire.connect(address, CREDENTIALS, "data", {"replica": 3, "epoch": 1}, DEADLINE):
            for fields in ({"shard": 1, "replica": 0}, *[{"replica": 3, "epoch": 1}] * 2):
                assert served.get(timeout=DEADLINE) == fields
        right = 2 + 2  # of "member" and "data"
        asyncio.run(until(lambda: count("fields") == 2 * len(FIELDS) - right))
    assert count("purpose") == 5 * len(FIELDS)
    assert count("message") > 0
    assert count("internal") == 0


def test_a_leader_outlives_every_peer(count: Callable[[str], int]) -> None:
    nowhere = listen("127.0.0.1", 0)
    leader = Led(nowhere.getsockname(), CREDENTIALS, TIMEOUTS)
    try:
        for purpose, fields in itertools.product(PURPOSES, FIELDS):
            asyncio.run(insult(leader.address, purpose, fields))
        asyncio.run(until(lambda: count("fields") == len(FIELDS) - 1))  # of "rank"
        asyncio.run(until(lambda: not leader.ranks))
    finally:
        leader.close()
        nowhere.close()
    assert count("purpose") == 6 * len(FIELDS)
    assert count("message") > 0
    assert count("internal") == 0
