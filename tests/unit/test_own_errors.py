"""Errors of our own behind a connection: a link, a listener, a handler and the coordinator go on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from ftcomm.control import dropped, handshake
from ftcomm.control.links import Link, hand_over, serve_messages
from ftcomm.control.sealed import Channel
from ftcomm.control.server import CoordinatorServer
from tests.fuzz.machines import TIMEOUTS
from tests.rigs.asyncio_client import open_socket
from tests.rigs.peers import CREDENTIALS, DEADLINE, listening, until
from tests.rigs.sealed_pair import ends

pytestmark = pytest.mark.usefixtures("time_for_handshakes")


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
