"""Dials, links and members that wait for a process that is stopped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import select
import socket

import pytest

from ftcomm.control import handshake, links, wire
from ftcomm.control import messages as m
from ftcomm.control.links import Link
from ftcomm.control.liveness import unanswered
from ftcomm.control.peers import Peers
from ftcomm.control.views import Address, Addresses, Member, View
from tests.rigs.stopped_processes import CREDENTIALS, DEADLINE, Peer, until


def test_a_dial_waits_for_a_process_that_is_stopped_and_comes_once(
    member: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look(sock: socket.socket) -> float | None:
        nonlocal looks
        looks += 1
        return unanswered(sock)

    monkeypatch.setattr(wire, "KERNEL", 0.1)
    monkeypatch.setattr(wire, "_LOOK", 0.01)
    monkeypatch.setattr(wire, "unanswered", look)
    member.stop()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        dialled = pool.submit(wire.connect, member.address, CREDENTIALS, "data", {}, DEADLINE)
        until(lambda: looks > 50)  # half a second at least
        assert not dialled.done()
        member.go_on()
        dialled.result(DEADLINE).close()
    assert member.says() == "data"


def test_a_dial_does_not_wait_longer_than_told(member: Peer) -> None:
    member.stop()
    with pytest.raises(OSError, match=r"no answer to the handshake within 0\.3 s"):
        wire.connect(member.address, CREDENTIALS, "data", {}, 0.3)


def test_a_dial_ends_with_the_process_that_it_waits_for(member: Peer) -> None:
    member.stop()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        dialled = pool.submit(wire.connect, member.address, CREDENTIALS, "data", {}, DEADLINE)
        with socket.create_connection(member.address) as before:  # behind the other one, or before it
            member.kill()
            until(lambda: unanswered(before) is None)
        with pytest.raises(OSError, match=r"closed|reset|refused"):
            dialled.result(DEADLINE)


def test_a_link_waits_for_a_process_that_is_stopped_with_one_connection(
    member: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", 0.05)

    async def run() -> None:
        opened, mute = asyncio.Event(), 0
        down: list[Exception] = []

        def is_mute() -> None:
            nonlocal mute
            mute += 1
            monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", DEADLINE)  # what follows its first byte may take its time

        member.stop()
        link = Link(member.address, CREDENTIALS, "member", {}, on_open=opened.set, on_down=down.append, on_mute=is_mute)
        while mute < 10:
            await asyncio.sleep(0.01)
            assert not opened.is_set()
        assert not down
        assert link.unanswered() == 0.0
        member.go_on()
        await opened.wait()
        link.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    assert member.says() == "member"


def test_members_complain_of_who_cannot_be_reached_and_not_of_who_is_stopped(member: Peer) -> None:
    async def run() -> None:
        lost: list[tuple[int, str]] = []
        ended: list[str] = []
        opened, back = asyncio.Event(), asyncio.Event()
        peers = Peers(
            0,
            0,
            CREDENTIALS,
            on_open=lambda replica: opened.set(),
            on_message=lambda message: None,
            on_lost=lambda view, replica, reason: ended.append(reason),
            on_failed=lambda view, replica, reason, error: lost.append((replica, reason)),
            on_back=lambda replica: back.set(),
        )
        there = Address(*member.address, "b", 1, 3, "0" * 32)
        peers.connect(
            View(1, None, (Member(0, "a", Addresses.of((there,)), True), Member(1, "b", Addresses.of((there,)), True)))
        )
        await opened.wait()
        member.stop()
        for _ in range(20):
            peers.send(1, m.Alive(0, "a"))
            while peers.unanswered() != {1: 0.0}:
                await asyncio.sleep(0.01)
        assert not lost
        member.kill()
        while not lost:
            await asyncio.sleep(0.01)
        assert peers.unanswered() == {}
        assert lost[0][0] == 1
        assert "Connection refused" in lost[0][1]
        assert not ended, "another network may lie in between"
        assert not back.is_set()
        peers.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_what_a_stopped_process_is_sent_may_lie_there(member: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end a connection whose other end has no room, though it answers, after the time of `tune`."""
    monkeypatch.setattr(wire, "USER_TIMEOUT", 300)
    for bulk in (False, True):
        with wire.connect(member.address, CREDENTIALS, "data", {}, DEADLINE) as sock:
            assert member.says() == "data"
            sock.setblocking(False)
            if bulk:
                wire.for_bulk(sock)
            member.stop()
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            poll = select.poll()
            poll.register(sock, 0)  # errors alone
            assert bool(poll.poll(3000.0 if bulk else 1e3 * DEADLINE)) != bulk
            member.go_on()


def test_a_link_on_its_way_to_who_calls_it_is_not_broken_off() -> None:
    """Each call comes before the answer to what the one before has begun: on a loaded host it would never be there."""

    async def run() -> None:
        opened = asyncio.Event()
        sock = links.listen("127.0.0.1", 0)
        sock.setblocking(False)
        link = Link(sock.getsockname()[:2], CREDENTIALS, "leader", {}, on_open=opened.set)
        came, _ = await asyncio.get_running_loop().sock_accept(sock)
        for _ in range(5):
            link.redirect(sock.getsockname()[:2])
            await asyncio.sleep(0)
        came.setblocking(False)
        await wire.handshake(came, handshake.server(CREDENTIALS), DEADLINE)
        await opened.wait()
        link.close()
        came.close()
        sock.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
