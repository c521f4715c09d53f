"""The witness of a rank: a process beside it that tells the leader when the rank has ended. A rank has one if its
leader does not see its process.

    rank        python -m ftcomm.control.witness     with a connection in place of the standard input
                the charge, and a pidfd of the rank itself
    witness     "b"                                  it has begun
    rank        "x"                                  it ends as it should, and tells that by itself

A killed process says nothing. Its host then refuses connections, but a firewall in between would do so too, so that
proves nothing. Where the leader sees the same processes, the kernel tells it; elsewhere the witness asks the kernel
that does, and proves by the job's token that it belongs to the job. So the end of a rank is known at once, whether or
not another process of the job is left on its host. If host and witness go with the rank, there is silence, as without
one.

The pidfd is the rank itself and no other process, whatever is between the two (a wrapper of the interpreter, say). The
connection may outlive the rank, since a child that a library has forked behind the interpreter's back holds it as well.
The witness is not a child of the rank, whose script may wait for all its children. It holds none of the rank's output,
at whose end a reader may wait for the rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import time

import msgspec

from ftcomm.control import handshake, wire
from ftcomm.control.fork import apart
from ftcomm.control.running_time import RunningTimer
from ftcomm.control.tls import Files, Tls
from ftcomm.control.wait_for import wait_for

PURPOSE = "witness"
_MARK = "FTCOMM_RUN"  # a launcher finds by it what a dead rank has left behind
_BEGIN = 60.0  # s for Python to start on a busy machine
_PAUSE = 0.1  # s between two calls of a leader that does not answer
_LOOK = 0.01  # s between two checks whether the starter of the witness has ended
_LONGEST = 1 << 16  # bytes of the longest charge


class Charge(msgspec.Struct, frozen=True):
    """All that a witness has to know."""

    nonce: str  # the nonce in the address of the rank
    shard: int
    leader: tuple[str, int]
    token: str
    job: str
    tls: Files | None
    call_timeout: float  # s for which the witness calls the leader


_CHARGE = msgspec.json.Decoder(Charge)


class Witness:
    """The rank's end of the connection to its witness. Only `begun` waits for the witness, and it blocks no thread."""

    def __init__(self, charge: Charge) -> None:
        """Starts the witness. Raises `OSError`."""
        environment = {name: value for name, value in os.environ.items() if name not in (_MARK, "FTCOMM_TOKEN")}
        end = os.pidfd_open(os.getpid())
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    self._sock = apart(ours)
                    self._sock.setblocking(False)
                    socket.send_fds(self._sock, [msgspec.json.encode(charge)], [end])
                    self._starter = subprocess.Popen(
                        [sys.executable, "-m", __name__],
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=environment,
                        start_new_session=True,
                    )
                except BaseException:
                    ours.close()
                    raise
        finally:
            os.close(end)

    async def begun(self) -> str:
        """Wait until the witness watches. Returns why it does not; empty if it does."""
        try:
            return await wait_for(_BEGIN, self._begun())
        except (asyncio.TimeoutError, TimeoutError):
            return f"its process has not begun within {_BEGIN:g} s"

    async def _begun(self) -> str:
        try:
            byte = await asyncio.get_running_loop().sock_recv(self._sock, 1)
        except ConnectionResetError:
            byte = b""
        while self._starter.poll() is None:
            await asyncio.sleep(_LOOK)
        return "" if byte else f"its process ended before it began; try: {sys.executable} -m {__name__}"

    def dismiss(self) -> None:
        """Tell the witness that this rank ends as it should."""
        with contextlib.suppress(OSError):
            self._sock.send(b"x", socket.MSG_NOSIGNAL)
        self._sock.close()
        if self._starter.poll() is None:  # the witness has not begun yet
            self._starter.kill()
            self._starter.wait()


def dismissed(sock: socket.socket, end: int) -> bool:
    """Wait for the end of the process of a pidfd. Returns whether it has said on `sock`, or says, that it ends as it
    should."""
    watch = select.poll()
    watch.register(sock, select.POLLIN)
    watch.register(end, select.POLLIN)
    while True:
        ended = any(fd == end for fd, _ in watch.poll())
        if _said(sock):
            return True
        if ended:
            return False
        watch.unregister(sock)  # closed, though the process may live


def _said(sock: socket.socket) -> bool:
    while True:
        try:
            return bool(sock.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        except ConnectionResetError:  # the reset comes first: the rank had not read our byte
            continue


def main() -> None:
    if os.fork():
        os._exit(0)
    sock = socket.socket(fileno=sys.stdin.fileno())
    data, (end,), _, _ = socket.recv_fds(sock, _LONGEST, 1)
    charge = _CHARGE.decode(data)
    credentials = handshake.Credentials(charge.token, charge.job, None if charge.tls is None else Tls(charge.tls))
    with contextlib.suppress(OSError):  # the rank has already ended
        sock.send(b"b", socket.MSG_NOSIGNAL)
    if not dismissed(sock, end):
        tell(charge, credentials)


def tell(charge: Charge, credentials: handshake.Credentials) -> None:
    """Call the leader until it hears, or for as long as the charge says."""
    timer = RunningTimer(charge.call_timeout, time.monotonic, most=wire.KERNEL)  # the leader may be stopped, or all may
    fields: handshake.Fields = {"shard": charge.shard, "nonce": charge.nonce}
    while timer.left():
        try:
            wire.connect(charge.leader, credentials, PURPOSE, fields, wire.KERNEL, process=timer).close()
            return
        except handshake.Refused:
            return
        except OSError:
            time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
