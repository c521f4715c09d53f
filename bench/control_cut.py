"""The cable of a light rank of `ftcomm bench control`, or of a host agent, which can be pulled and plugged in again.

A filter of its sockets drops all that comes in before the kernel acknowledges it, as if the packets were lost on the
way (SO_ATTACH_FILTER in socket(7); it needs no privilege). What is said meanwhile leaves at the end of that.
"""

from __future__ import annotations

import ctypes
import socket
import struct

from ftcomm.control import messages as m
from ftcomm.control.links import Link

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER of asm-generic/socket.h; Python has no names for them
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes
_PROGRAM = struct.Struct("@HP")  # struct sock_fprog


class Cable:
    """Leads to a process with `link`, whose port is `listening` if it shares that with nobody. `inside`: the other end
    of the link is on the same host, with no cable in between. Belongs to the event loop of the link."""

    def __init__(self, link: Link, listening: socket.socket | None, inside: bool = False) -> None:
        self._link, self._listening, self._inside = link, listening, inside
        self._waiting: list[m.Message] = []
        self._cut: list[socket.socket] = []
        self.is_pulled = False

    @property
    def cuts_link(self) -> bool:
        """Whether the link is cut off now."""
        return self.is_pulled and not self._inside

    def send(self, *messages: m.Message) -> None:
        if self.cuts_link:
            self._waiting += messages
        else:
            self._link.send(*messages)

    def pull(self) -> None:
        self.is_pulled = True
        link = None if self._inside else self._link.sock
        self._cut = [sock for sock in (link, self._listening) if sock is not None]
        code = ctypes.create_string_buffer(_DROP)
        for sock in self._cut:
            sock.setsockopt(socket.SOL_SOCKET, _ATTACH, _PROGRAM.pack(1, ctypes.addressof(code)))

    def plug(self) -> None:
        self.is_pulled = False
        for sock in self._cut:
            if sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._link.send(message)
