"""A process beside a rank, which watches the end of the rank: its witness, or the leader of its replica.

    rank         python -m MODULE        with a connection in place of the standard input
                 the configuration, a pidfd of the rank itself, and what else the companion has to hold
    companion    its pid                 it has begun
    rank         "x"                     it ends as it should

The pidfd is the rank itself and no other process, whatever is between the two (a wrapper of the interpreter, say).
Where the system refuses one, the end of the connection is the end of the rank. The connection may outlive the rank,
since a child that a library has forked behind the interpreter's back holds it as well. The end of the companion is the
end of the connection, as it has no children.

The companion is not a child of the rank, whose script may wait for all its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from ftcomm.control.fork import keep_from_children
from ftcomm.control.wait_for import wait_for

_BEGIN = 60.0  # s for Python to start on a busy machine
_LOOK = 0.01  # s between two checks whether the starter of the companion has ended
_LONGEST = 1 << 16  # bytes of the longest configuration
_FDS = 4  # descriptors with a configuration, at most


class Companion:
    """The rank's end of the connection to its companion. Only `begun` and `ended` wait for the companion, and they
    block no thread."""

    def __init__(
        self,
        module: str,
        config: bytes,
        descriptors: tuple[int, ...],
        environment: Mapping[str, str],
        errors: int | IO[bytes] | None = subprocess.DEVNULL,
    ) -> None:
        """Starts the companion, which finds modules where this process does, holds copies of `descriptors`, and writes
        its log to `errors` (None: where this process does). Raises `OSError`."""
        self._module = module
        self.pid = 0  # the process of the companion, from `begun` on
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._sock = keep_from_children(ours)
                self._sock.setblocking(False)
                socket.send_fds(self._sock, [config], descriptors)
                self._starter = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise

    async def begun(self) -> str:
        """Wait until the companion watches. Returns why it does not; empty if it does."""
        try:
            return await wait_for(_BEGIN, self._begun())
        except (asyncio.TimeoutError, TimeoutError):
            return f"its process has not begun within {_BEGIN:g} s"

    async def _begun(self) -> str:
        said = await self._received()
        while self._starter.poll() is None:
            await asyncio.sleep(_LOOK)
        self.pid = int(said or b"0")
        return "" if said else f"its process ended before it began; try: {sys.executable} -m {self._module}"

    async def ended(self) -> None:
        """Wait for the end of the companion."""
        while await self._received():
            pass

    async def _received(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._sock, _LONGEST)
        except ConnectionResetError:
            return b""

    def dismiss(self) -> None:
        """Tell the companion that this rank ends as it should."""
        with contextlib.suppress(OSError):
            self._sock.send(b"x", socket.MSG_NOSIGNAL)
        self._sock.close()
        if self._starter.poll() is None:  # the companion has not begun yet
            self._starter.kill()
            self._starter.wait()


def own_end() -> int:
    """Returns a pidfd of this process; -1 if the system refuses one."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError:
        return -1


# -- in the companion ------------------------------------------------------------------------------------------------


def become_companion() -> tuple[socket.socket, bytes, list[int]]:
    """Become the companion. Returns its end of the connection, its configuration, and the descriptors that came."""
    if os.fork():
        os._exit(0)
    sock = socket.socket(fileno=sys.stdin.fileno())
    data, descriptors, _, _ = socket.recv_fds(sock, _LONGEST, _FDS)
    return sock, data, list(descriptors)


def begin(sock: socket.socket) -> None:
    """Tell the rank that its companion watches."""
    with contextlib.suppress(OSError):  # the rank has already ended
        sock.send(str(os.getpid()).encode(), socket.MSG_NOSIGNAL)


def dismissed(sock: socket.socket, end: int) -> bool:
    """Wait for the end of the process of a pidfd; with -1, for that of the connection `sock`. Returns whether the
    process has said there, or says, that it ends as it should."""
    watch = select.poll()
    watch.register(sock, select.POLLIN)
    if end >= 0:
        watch.register(end, select.POLLIN)
    while True:
        ended = any(fd == end for fd, _ in watch.poll()) or end < 0
        if _said(sock):
            return True
        if ended:
            return False
        watch.unregister(sock)  # the connection is closed, and the process may live


def _said(sock: socket.socket) -> bool:
    while True:
        try:
            return bool(sock.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the reset comes first: the rank had not read our message
            continue
