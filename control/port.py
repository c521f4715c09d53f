"""A TCP port that stays with this process between two listeners."""

from __future__ import annotations

import contextlib
import socket

from ftcomm.control.fork import keep_from_children
from ftcomm.control.links import listen


class Port:
    """A port that stays bound. While no socket listens at it, connections are refused, and neither another program nor
    a rank that connects is given it. Its owner may listen at it again and again."""

    def __init__(self, host: str, number: int) -> None:
        """Port 0 is any free one, chosen when it is first listened at; `number` tells it from then on."""
        self.number = number
        self._host = host
        self._bound: socket.socket | None = None

    def listen(self) -> socket.socket:
        """Returns a listening socket, for the caller to close. Raises `OSError` if another process has the port."""
        if self._bound is None:
            self._bound = self._bind()
            self.number = self._bound.getsockname()[1]
        return listen(self._host, self.number)

    def close(self) -> None:
        """Give the port away. Idempotent."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None

    def _bind(self) -> socket.socket:
        with contextlib.ExitStack() as stack:
            sock = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
            stack.callback(sock.close)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._host, self.number))
            stack.pop_all()
        return keep_from_children(sock)
