"""Floods at a listening port: what they cost is bounded, and an honest rank gets in meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control import dropped, handshake, links, rate_limit
from ftcomm.control.links import Listener, listen
from ftcomm.control.rate_limit import BURST, RATE, SOURCES, HandshakeRateLimit, source_of
from ftcomm.control.sealed import Channel

DEADLINE = 60.0  # s
CREDENTIALS = handshake.Credentials("secret")

pytestmark = pytest.mark.protocol


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=200))
def test_a_source_never_has_more_than_its_rate(pauses: list[float]) -> None:
    made, now, admitted = HandshakeRateLimit(), 0.0, 0
    for pause in pauses:
        now += pause
        admitted += sum(made.admit("a", now) for _ in range(100))
        assert admitted <= BURST + RATE * now + 1
    assert made.admit("b", now), "another source pays for itself alone"


def test_who_proves_to_hold_the_token_is_not_held_up() -> None:
    made = HandshakeRateLimit()
    for _ in range(10 * int(BURST)):
        assert made.admit("a", 0.0)
        made.proved("a")
    assert sum(made.admit("a", 0.0) for _ in range(10 * int(BURST))) == int(BURST)
    assert not made.admit("a", 0.0)
    assert made.admit("a", 1.0)


def test_sources_take_bounded_memory() -> None:
    made = HandshakeRateLimit()
    for number in range(2 * SOURCES):
        assert made.admit(str(number), 0.0)
    assert len(made._buckets) == SOURCES


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_what_one_host_may_have_is_one_source(one: str, other: str, same: bool) -> None:
    assert (source_of(one) == source_of(other)) == same


class Flood:
    """Threads that connect again and again, from one address, and say what is no handshake, or nothing."""

    def __init__(self, target: tuple[str, int], source: str, said: bytes) -> None:
        self._target, self._source, self._said = target, source, said
        self._over = threading.Event()
        self.turns = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *how: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(DEADLINE)

    def _run(self) -> None:
        kept: list[socket.socket] = []
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                sock = socket.create_connection(self._target, DEADLINE, (self._source, 0))
                sock.sendall(self._said)
                kept.append(sock)
            self.turns += 1
            for old in kept[:-300]:
                old.close()
            del kept[:-300]
        for sock in kept:
            sock.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param("127.0.0.2", b"", id="another host-mute"),
        pytest.param("127.0.0.2", b"\x00\x00\x00\x05wrong", id="another host-wrong"),
        pytest.param("127.0.0.1", b"\x00\x00\x00\x05", id="the same host-half"),
        pytest.param("127.0.0.2", b"\x00\x00\x00\x05", id="another host-half", marks=pytest.mark.sweep),
        pytest.param("127.0.0.1", b"", id="the same host-mute", marks=pytest.mark.sweep),
        pytest.param("127.0.0.1", b"\x00\x00\x00\x05wrong", id="the same host-wrong", marks=pytest.mark.sweep),
    ],
)
def test_an_honest_rank_joins_in_a_flood(
    source: str, said: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dropped, "_tallies", {})
    monkeypatch.setattr(rate_limit, "BURST", 50.0)
    monkeypatch.setattr(links, "MAX_HANDSHAKES", 32)
    caplog.set_level(logging.CRITICAL)

    async def run() -> None:
        joined = asyncio.Event()

        async def peer(channel: Channel, opening: handshake.Opening) -> None:
            joined.set()
            channel.close()

        sock = listen("127.0.0.1", 0)
        listener = Listener(sock, CREDENTIALS, peer)
        with Flood(sock.getsockname(), source, said) as flood:
            while dropped.counts().get("crowded", 0) < 300 or flood.turns < 600:
                await asyncio.sleep(0.01)
            link = links.Link(sock.getsockname(), CREDENTIALS, "member", {}, on_open=lambda: None)
            await asyncio.wait_for(joined.wait(), DEADLINE)
            link.close()
        await listener.close()

    asyncio.run(run())


def test_what_is_too_much_is_closed_unread(monkeypatch: pytest.MonkeyPatch, once_dropped: Callable[[], int]) -> None:
    monkeypatch.setattr(rate_limit, "BURST", 3.0)
    monkeypatch.setattr(rate_limit, "RATE", 0.0)

    async def run() -> None:
        async def nobody(channel: Channel, opening: handshake.Opening) -> None:
            channel.close()

        sock = listen("127.0.0.1", 0)
        listener = Listener(sock, CREDENTIALS, nobody)
        made = [await asyncio.open_connection(*sock.getsockname()) for _ in range(5)]
        for reader, _ in made[3:]:
            assert await asyncio.wait_for(reader.read(10), DEADLINE) == b""
        assert once_dropped() == 2
        assert not any(reader.at_eof() for reader, _ in made[:3])
        for _, writer in made:
            writer.close()
        await listener.close()

    asyncio.run(run())


@pytest.fixture
def once_dropped(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    monkeypatch.setattr(dropped, "_tallies", {})
    return lambda: dropped.counts().get("crowded", 0)
