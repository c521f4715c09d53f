"""Bad messages from who was let in: what they cost, what is counted, and that the connection goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from ftcomm.control import dropped, wire
from ftcomm.control import messages as m
from ftcomm.control.byte_stream import ByteStream
from ftcomm.control.links import serve_messages
from ftcomm.control.view_differences import difference
from ftcomm.control.views import NO_ADDRESSES, Member, View
from tests.rigs.peers import DEADLINE, GOOD, MB, NO_MESSAGE, pair, push
from tests.rigs.sealed_pair import ends, records

pytestmark = pytest.mark.usefixtures("time_for_handshakes")


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
            near.setblocking(False)
            stream = ByteStream(near, print, ended.append)
            writer = wire.Writer(ends(near, far)[0], stream)
            for _ in range(100):
                writer.write(b"x" * 100_000)
                assert stream.unsent < 2 * MB
            assert stream.is_closing

    ended: list[OSError | None] = []

    asyncio.run(run())
    assert count("unsent") > 0
    assert ended == [None]


def test_a_message_that_is_too_long_is_not_sent(count: Callable[[str], int]) -> None:
    async def run() -> None:
        with pair() as (near, far):
            channel, other = ends(near, far)
            near.setblocking(False)
            writer = wire.Writer(channel, ByteStream(near, print, print))
            writer.write(bytes(wire.MAX_MESSAGE + 1))
            writer.write(b"next")
            assert await asyncio.to_thread(other.recv, 100) == b"next"
            writer.close()

    asyncio.run(run())
    assert count("unsent") == 1


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
