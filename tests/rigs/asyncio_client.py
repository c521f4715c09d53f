"""A connection in asyncio to whatever listens, past its handshake, and the messages over one."""

from __future__ import annotations

import asyncio

from ftcomm.control import handshake, wire
from ftcomm.control import messages as m
from ftcomm.control.links import HANDSHAKE_TIMEOUT, connected, serve_messages
from ftcomm.control.sealed import Channel


async def open_socket(
    address: tuple[str, int], credentials: handshake.Credentials, purpose: str, fields: handshake.Fields
) -> Channel:
    """Not blocking. Raises `OSError`, also if it takes longer than the handshake may."""
    sock = await connected(address, HANDSHAKE_TIMEOUT)
    try:
        steps = handshake.client(credentials, purpose, fields, None, handshake.place(sock.getpeername))
        return Channel(sock, *await wire.handshake(sock, steps, HANDSHAKE_TIMEOUT))
    except BaseException:
        sock.close()
        raise


class Conversation:
    """Messages over such a connection, to be begun with `await Conversation.over(channel)`."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[m.AnyMessage | None] = asyncio.Queue()  # None: it has ended
        self._writer: asyncio.Future[wire.Writer] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Future[str]

    @classmethod
    async def over(cls, channel: Channel) -> Conversation:
        made = cls()
        work = serve_messages(channel, made._heard.put_nowait, made._writer.set_result)
        made._listening = asyncio.ensure_future(work)
        made._listening.add_done_callback(lambda task: made._heard.put_nowait(None))
        await made._writer
        return made

    def write(self, data: bytes) -> None:
        self._writer.result().write(data)

    def close(self) -> None:
        self._writer.result().close()

    async def heard(self) -> m.AnyMessage | None:
        """Returns the next message; None at the end."""
        return await self._heard.get()
