"""A connection in asyncio to whatever listens, past its handshake."""

from __future__ import annotations

from ftcomm.control import handshake, wire
from ftcomm.control.links import HANDSHAKE_TIMEOUT, connected
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
