"""A handshake is driven in the callbacks of its socket: what it waits for, how it ends, and that no task is made."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from ftcomm.control import dropped, handshake, links, wire
from ftcomm.control.handshake import HungUp, SilentHangUp, Wired
from ftcomm.control.links import Listener, listen
from ftcomm.control.sealed import Channel
from ftcomm.control.socket_events import socket_events
from tests.rigs.asyncio_client import open_socket
from tests.rigs.peers import CREDENTIALS, DEADLINE, closed, framed, listening, nobody, pair, until

LONG = 1 << 22  # bytes, more than a socket takes at once


@pytest.mark.parametrize("early", [b"a", b""])
def test_what_does_not_fit_is_sent_when_there_is_room_and_bytes_come_as_they_come(early: bytes) -> None:
    def steps() -> Wired:
        yield bytes(LONG)
        first = yield 3
        return first + (yield 2)

    async def far_end(far: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        far.setblocking(False)
        await loop.sock_sendall(far, early)  # input, while there is no room
        left = LONG
        while left:
            left -= len(await loop.sock_recv(far, 1 << 16))
        for byte in b"abcde"[len(early) :]:
            await asyncio.sleep(0.01)
            await loop.sock_sendall(far, bytes([byte]))

    async def run() -> None:
        with pair() as (near, far):
            there = asyncio.ensure_future(far_end(far))
            assert await wire.handshake(near, steps(), DEADLINE) == b"abcde"
            await there

    asyncio.run(run())


def test_the_steps_may_want_no_bytes() -> None:
    """As those of TLS do, of a record whose length somebody has written as 0."""

    def steps() -> Wired:
        nothing = yield 0
        return nothing + (yield 2)

    async def run() -> None:
        with pair() as (near, far):
            far.sendall(b"ab")
            assert await wire.handshake(near, steps(), DEADLINE) == b"ab"

    asyncio.run(run())


@pytest.mark.parametrize(("said", "error"), [(b"", SilentHangUp), (b"a", HungUp)])
def test_an_end_before_anything_was_said_is_told_from_a_later_one(said: bytes, error: type[Exception]) -> None:
    def steps() -> Wired:
        yield 2

    async def run() -> None:
        with pair() as (near, far):
            far.sendall(said)
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(error) as ended:
                await wire.handshake(near, steps(), DEADLINE)
            assert type(ended.value) is error

    asyncio.run(run())


def test_what_is_received_ahead_is_given_to_the_steps_in_parts() -> None:
    def steps() -> Wired:
        first = yield 1
        return first + (yield 3) + (yield 1)

    async def run() -> None:
        with pair() as (near, far):
            far.sendall(b"abcde")
            ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            wire.Handshake(near, steps(), DEADLINE, lambda done, error: ended.set_result(done), most=10).begin()
            assert await ended == b"abcde"

    asyncio.run(run())


@pytest.mark.usefixtures("time_for_handshakes")
def test_who_says_more_than_he_may_before_he_is_answered_is_closed(count: Callable[[str], int]) -> None:
    """Else what he has said would be lost, and he would wait for an answer to it."""
    steps = handshake.client_steps(CREDENTIALS, "rank", {})

    async def run() -> None:
        async with listening(nobody) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(framed(next(steps)))
            next(steps)
            length = int.from_bytes(await reader.readexactly(4), "big")
            writer.write(framed(steps.send(await reader.readexactly(length))) + b"a record")
            await closed(reader)
            writer.close()

    asyncio.run(run())
    assert count("handshake") == 1


@pytest.mark.parametrize("come", [0, 4])
def test_who_answers_short_messages_and_no_long_one_is_told_of_the_mtu(come: int) -> None:
    """Whether nothing of the long one has come, or its length."""
    client, server = handshake.client(CREDENTIALS, "rank", {}), handshake.server(CREDENTIALS)
    assert next(server) == 4
    opening = next(client)
    assert isinstance(opening, bytes)
    assert server.send(opening[:4]) == len(opening) - 4
    challenge = server.send(opening[4:])
    assert isinstance(challenge, bytes)
    assert next(client) == 4
    assert client.send(challenge[:4]) == len(challenge) - 4
    client.send(challenge[4:])  # the proof
    assert next(client) == 4
    if come:
        client.send((4000).to_bytes(4, "big"))
    with pytest.raises(handshake.HandshakeError, match=r"carry 536 bytes\. Set the MTU"):
        client.throw(TimeoutError(536))


@pytest.mark.usefixtures("time_for_handshakes")
def test_a_connection_that_comes_in_is_tuned_like_one_that_goes_out() -> None:
    options = [socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
    options += [socket.TCP_USER_TIMEOUT, 16, 44]  # the last ones as in `tune`

    def tuned(sock: socket.socket) -> list[int]:
        known = [sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        for option in options:
            with contextlib.suppress(OSError):  # TCP_RTO_MAX_MS is of Linux 6.15
                known.append(sock.getsockopt(socket.IPPROTO_TCP, option))
        return known

    async def peer(channel: Channel, opening: handshake.Opening) -> None:
        arrived.append(tuned(channel.detach()))
        channel.close()

    async def run() -> None:
        async with listening(peer) as address:
            with await open_socket(address, CREDENTIALS, "rank", {}) as sock:
                await until(lambda: bool(arrived))
                arrived.append(tuned(sock.detach()))

    arrived: list[list[int]] = []
    asyncio.run(run())
    plain = socket.socket()
    assert arrived[0] == arrived[1] != tuned(plain)
    plain.close()


def test_an_error_of_the_steps_is_raised_and_nothing_is_waited_for_after_it() -> None:
    def steps() -> Wired:
        yield 1
        raise KeyError("mine")

    async def run() -> None:
        with pair() as (near, far):
            driven = asyncio.ensure_future(wire.handshake(near, steps(), DEADLINE))
            await asyncio.sleep(0)
            far.sendall(b"ab")
            with pytest.raises(KeyError, match="mine"):
                await driven
            assert not socket_events().remove_reader(near.fileno())

    asyncio.run(run())


def test_who_gives_a_handshake_up_is_not_called_any_more() -> None:
    def steps() -> Wired:
        yield 1

    async def run() -> None:
        with pair() as (near, far):
            driven = asyncio.ensure_future(wire.handshake(near, steps(), DEADLINE))
            await asyncio.sleep(0)
            driven.cancel()
            with pytest.raises(asyncio.CancelledError):
                await driven
            assert not socket_events().remove_reader(near.fileno())
            far.sendall(b"a")
            await asyncio.sleep(0.01)
            assert near.recv(10) == b"a", "left to whoever is next"

    asyncio.run(run())


def test_who_gives_a_handshake_up_in_the_turn_in_which_it_ends_is_told_nothing() -> None:
    wrong: list[object] = []

    def steps() -> Wired:
        yield 1

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        with pair() as (near, far):
            driven = asyncio.ensure_future(wire.handshake(near, steps(), DEADLINE))
            await asyncio.sleep(0)
            far.sendall(b"a")
            loop.call_soon(driven.cancel)
            with pytest.raises(asyncio.CancelledError):
                await driven

    asyncio.run(run())
    assert not wrong


def test_who_waits_for_a_mute_process_is_told_and_gives_what_follows_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernel answers. After the first byte no more than the time limit passes, and `on_mute` is not called."""
    monkeypatch.setattr(wire, "unanswered", lambda sock: 0.0)
    mute = []

    def steps() -> Wired:
        yield b"asks"
        yield 2

    async def run() -> None:
        with pair() as (near, far):

            def on_mute() -> None:
                mute.append(time.monotonic())
                if len(mute) == 3:
                    far.sendall(b"a")

            monkeypatch.setattr(wire, "late", lambda steps, sock, timeout: handshake.HandshakeError("late"))
            with pytest.raises(handshake.HandshakeError, match="late"):
                await wire.handshake(near, steps(), 0.05, on_mute)
            assert time.monotonic() - mute[-1] >= 0.05

    asyncio.run(run())
    assert len(mute) == 3


def test_a_kernel_that_does_not_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "unanswered", lambda sock: DEADLINE)
    monkeypatch.setattr(wire, "late", lambda steps, sock, timeout: handshake.HandshakeError("late"))

    def steps() -> Wired:
        yield 1

    async def run() -> None:
        with pair() as (near, _), pytest.raises(handshake.HandshakeError, match="late"):
            await wire.handshake(near, steps(), 0.05, lambda: pytest.fail("it is not only mute"))

    asyncio.run(run())


def test_a_client_that_drips_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, count: Callable[[str], int]) -> None:
    """Each byte comes in time, all of them do not."""
    monkeypatch.setattr(links, "ARRIVAL_TIMEOUT", 0.3)

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write((4000).to_bytes(4, "big"))
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with listening(nobody) as address:
            reader, writer = await asyncio.open_connection(*address)
            dripping = asyncio.ensure_future(drip(writer))
            assert await closed(reader) == b""
            dripping.cancel()
            writer.close()
            assert count("handshake") == 1

    asyncio.run(run())


@pytest.mark.usefixtures("time_for_handshakes")
def test_a_task_is_made_only_for_who_has_proved_that_it_holds_the_token() -> None:
    """Half an opening, an opening that waits for its answer, and nothing: none of them costs a task."""
    opening = next(handshake.client_steps(CREDENTIALS, "rank", {}))

    async def peer(channel: Channel, opening: handshake.Opening) -> None:
        arrived.append(asyncio.current_task())
        await asyncio.sleep(DEADLINE)

    async def run() -> None:
        async with listening(peer) as address:
            await asyncio.sleep(0)
            before = asyncio.all_tasks()
            strangers = [await asyncio.open_connection(*address) for _ in range(20)]
            for number, (_, writer) in enumerate(strangers):
                writer.write(framed(opening)[: (0, 5, None)[number % 3]])
            for reader, _ in strangers[2::3]:
                await asyncio.wait_for(reader.readexactly(4), DEADLINE)  # the head of a challenge
            assert asyncio.all_tasks() == before
            (await open_socket(address, CREDENTIALS, "rank", {})).close()
            await until(lambda: bool(arrived))
            assert asyncio.all_tasks() - before == set(arrived)
            for _, writer in strangers:
                writer.close()

    arrived: list[asyncio.Task[None] | None] = []
    asyncio.run(run())


def test_who_is_one_too_many_at_once_is_closed_before_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, count: Callable[[str], int]
) -> None:
    monkeypatch.setattr(links, "MAX_HANDSHAKES", 0)

    async def run() -> None:
        async with listening(nobody) as address:
            reader, writer = await asyncio.open_connection(*address)
            assert await closed(reader) == b""
            writer.close()

    asyncio.run(run())
    assert dropped.counts() == {"crowded": 1}


@pytest.mark.usefixtures("time_for_handshakes")
def test_a_port_that_is_closed_ends_what_comes_in_there_and_counts_nothing() -> None:
    async def run() -> None:
        sock = listen("127.0.0.1", 0)
        listener = Listener(sock, CREDENTIALS, nobody)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        await until(lambda: len(listener._strangers) == 1)
        await listener.close()
        assert await closed(reader) == b""
        writer.close()

    before = dropped.counts()
    asyncio.run(run())
    assert dropped.counts() == before


def test_a_port_that_is_closed_in_the_turn_in_which_a_handshake_ends_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And leaves that to no garbage collector: it may be told of the connection a minute later, or never."""
    kept: list[Channel] = []
    arrived = Listener._arrived

    def channel(*args: Any) -> Channel:
        kept.append(Channel(*args))
        return kept[-1]

    def closes_first(self: Listener, *args: Any) -> None:
        closing.append(asyncio.ensure_future(self.close()))
        arrived(self, *args)

    closing: list[asyncio.Future[None]] = []

    async def run() -> None:
        sock = listen("127.0.0.1", 0)
        Listener(sock, CREDENTIALS, nobody)
        there = await open_socket(sock.getsockname(), CREDENTIALS, "anything", {})
        await until(lambda: bool(closing))
        await closing[0]
        assert kept[0].fileno() == -1
        there.close()

    with monkeypatch.context() as patch:
        patch.setattr(Listener, "_arrived", closes_first)
        patch.setattr(links, "Channel", channel)
        asyncio.run(run())


def test_a_handshake_that_has_ended_needs_no_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: list[weakref.ref[Any]] = []
    arrived = Listener._arrived

    def noted(self: Listener, arrival: Any, *args: Any) -> None:
        arrivals.append(weakref.ref(arrival))
        arrived(self, arrival, *args)

    async def come(channel: Channel, opening: handshake.Opening) -> None:
        channel.close()

    async def run() -> None:
        async with listening(come) as address:
            (await open_socket(address, CREDENTIALS, "anything", {})).close()
            await until(lambda: bool(arrivals))
            await until(lambda: arrivals[0]() is None)

    monkeypatch.setattr(Listener, "_arrived", noted)
    monkeypatch.setattr("tests.rigs.peers.DEADLINE", 5.0)
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_client_that_gets_little_of_a_core_may_take_longer_than_it_waits_itself(
    monkeypatch: pytest.MonkeyPatch, count: Callable[[str], int]
) -> None:
    """Hundreds of ranks on a few cores each come to their next step seconds later. Dropped, all would begin again."""
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", 0.05)
    arrived: list[str] = []

    async def peer(channel: Channel, opening: handshake.Opening) -> None:
        arrived.append(opening.purpose)
        channel.close()

    async def run() -> None:
        async with listening(peer) as address:
            reader, writer = await asyncio.open_connection(*address)
            steps = handshake.client_steps(CREDENTIALS, "rank", {})
            writer.write(framed(next(steps) or b""))
            challenge = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            assert next(steps) is None
            await asyncio.sleep(0.5)
            writer.write(framed(steps.send(challenge) or b""))
            await until(lambda: arrived == ["rank"])
            writer.close()

    asyncio.run(run())
    assert count("handshake") == 0
