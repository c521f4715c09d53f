"""Strangers that lie, flood, stall or replay before they are let in: what they cost, and that all others are served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from ftcomm.control import dropped, handshake, links, wire
from ftcomm.control import messages as m
from ftcomm.control.links import listen, serve_messages
from ftcomm.control.rank_errors import JoinError
from ftcomm.control.sealed import Channel
from tests.rigs.asyncio_client import open_socket
from tests.rigs.peers import (
    CREDENTIALS,
    DEADLINE,
    GOOD,
    MB,
    a_control_thread,
    closed,
    framed,
    listening,
    nobody,
    push,
    until,
)

pytestmark = pytest.mark.usefixtures("time_for_handshakes")


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
    monkeypatch.setattr(links, "ARRIVAL_TIMEOUT", 0.05)

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
    with a_control_thread(1, stranger) as (control, _):
        control.start()
        with pytest.raises(JoinError, match=r"the job is over.*waited 1 s"):
            control.register(1.0)
    assert len(times) > 1
    assert len([record for record in caplog.records if "the job is over" in record.getMessage()]) == 1
