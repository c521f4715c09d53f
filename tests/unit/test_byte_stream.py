"""The bytes of a connection in the callbacks of its socket: all that is written arrives, and an end is told once."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from ftcomm.control import wire
from ftcomm.control.byte_stream import ByteStream
from ftcomm.control.handshake import Opening
from ftcomm.control.links import Listener, listen, serve_messages
from ftcomm.control.sealed import Channel
from tests.rigs.asyncio_client import open_socket
from tests.rigs.exchange import socket_pair
from tests.rigs.peers import CREDENTIALS, DEADLINE, MB, pair, until


def _read(far: socket.socket, count: int) -> bytes:
    far.settimeout(DEADLINE)
    data = b""
    while len(data) < count and (part := far.recv(1 << 20)):
        data += part
    return data


def test_what_finds_no_room_is_sent_when_there_is_some_and_before_it_closes() -> None:
    said = [bytes([number]) * MB for number in range(16)]

    async def run() -> None:
        with pair() as (near, far):
            stream = ByteStream(near, print, ended.append)
            for part in said:
                stream.write(part)
            assert 0 < stream.unsent < 16 * MB
            flushed = asyncio.ensure_future(stream.flushed())
            stream.close()
            stream.write(b"too late")
            assert near.fileno() >= 0
            assert not ended
            assert await asyncio.to_thread(_read, far, 16 * MB + 1) == b"".join(said)
            await asyncio.wait_for(flushed, DEADLINE)
            assert near.fileno() < 0

    ended: list[OSError | None] = []
    asyncio.run(run())
    assert ended == [None]


def test_what_is_unsent_goes_out_though_the_task_that_serves_the_connection_is_cancelled() -> None:
    """As a server does at its end, right after it has told its members so."""

    async def run() -> None:
        sock = listen("127.0.0.1", 0)
        served: list[wire.Writer] = []

        async def serve(channel: Channel, opening: Opening) -> None:
            await serve_messages(channel, print, served.append)

        listener = Listener(sock, CREDENTIALS, serve)
        channel = await open_socket(sock.getsockname(), CREDENTIALS, "leader", {})
        await until(lambda: bool(served))
        for _ in range(16):
            served[0].write(bytes(MB))
        flushed = asyncio.ensure_future(served[0].flushed())
        await asyncio.sleep(0)
        assert not flushed.done()
        await listener.close()
        far = channel.detach()
        far.setblocking(True)
        assert len(await asyncio.to_thread(_read, far, 17 * MB)) > 16 * MB
        await asyncio.wait_for(flushed, DEADLINE)
        far.close()

    asyncio.run(run())


def test_it_reads_from_its_beginning_to_its_close() -> None:
    came: list[bytes] = []
    ended: list[OSError | None] = []

    async def run() -> None:
        with pair() as (near, far):
            far.sendall(b"early")
            stream = ByteStream(near, came.append, ended.append)
            await asyncio.sleep(0.01)
            assert not came
            stream.begin()
            await until(lambda: came == [b"early"])
            far.sendall(b"late")
            stream.close()
            stream.begin()
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert (came, ended) == ([b"early"], [None])


def test_an_end_of_the_other_side_is_told_and_what_is_written_after_it_still_goes_out() -> None:
    ended: list[OSError | None] = []

    async def run() -> None:
        with pair() as (near, far):
            stream = ByteStream(near, print, ended.append)
            stream.begin()
            far.shutdown(socket.SHUT_WR)
            await until(lambda: bool(ended))
            stream.write(b"last")
            stream.close()
            assert _read(far, 5) == b"last"

    asyncio.run(run())
    assert ended == [None]


@pytest.mark.parametrize("writes", [False, True])
def test_a_broken_connection_is_told_with_its_reason_and_once(writes: bool) -> None:
    ended: list[OSError | None] = []

    async def run() -> None:
        near, far = socket_pair()
        near.setblocking(False)
        with near, far:
            stream = ByteStream(near, print, ended.append)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            far.close()
            if writes:
                stream.write(b"one")
                stream.write(b"two")
            stream.begin()
            await until(lambda: bool(ended))
            assert near.fileno() < 0
            stream.close()
            await stream.flushed()

    asyncio.run(run())
    assert [type(error) for error in ended] == [ConnectionResetError]


def test_who_gives_it_up_drops_what_is_unsent_and_wakes_who_waits_for_that() -> None:
    ended: list[OSError | None] = []

    async def run() -> None:
        with pair() as (near, _):
            stream = ByteStream(near, print, ended.append)
            stream.write(bytes(16 * MB))
            flushed = asyncio.ensure_future(stream.flushed())
            await asyncio.sleep(0)
            stream.abort()
            await asyncio.wait_for(flushed, DEADLINE)
            assert (near.fileno(), stream.unsent) == (-1, 0)

    asyncio.run(run())
    assert ended == [None]
