"""Two ends of a connection as they are after a handshake, and what one of them would say."""

from __future__ import annotations

import socket

from ftcomm.control.sealed import Channel, Keys, Mac

SECRET = bytes(range(32))


def ends(near: socket.socket, far: socket.socket) -> tuple[Channel, Channel]:
    """`near` is that of the server."""
    return Channel(near, Keys(SECRET, client=False)), Channel(far, Keys(SECRET, client=True))


def records(*payloads: bytes) -> list[bytes]:
    """What the client says first, in so many records."""
    mac = Mac(Keys(SECRET, client=True).of("mac", sending=True))
    return [mac.seal((payload,), len(payload)) for payload in payloads]
