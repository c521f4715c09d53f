"""Alive is not the same as quick: whether the kernel at the other end of a connection answers, whatever its process
does.

A process that holds its interpreter (a compilation, a long C call, a debugger), or is stopped, says nothing; but its
kernel goes on acknowledging what is sent to it, and keeps its listening port open. A process that ends closes both. A
host that is gone acknowledges nothing. So silence of the process and silence of the kernel are two facts, and only the
second one is a loss (`ftcomm.control.detector`).

Linux tells of acknowledgements by getsockopt(TCP_INFO), struct tcp_info in <linux/tcp.h>, native byte order:

    offset  0  u8   tcpi_state           1: established
            3  u8   tcpi_probes          of a window that is closed, or of keepalive, without an answer yet
           24  u32  tcpi_unacked         segments that were sent and not acknowledged yet
           56  u32  tcpi_last_ack_recv   milliseconds since anything came that acknowledges

Whoever asks has to send something several times per timeout (a heartbeat, `messages.Ping`): where nothing is asked,
nothing can be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from functools import cache
from pathlib import Path
from typing import Protocol

from ftcomm.control.fork import apart
from ftcomm.control.views import Address
from ftcomm.control.wait_for import wait_for

_TCP_INFO = struct.Struct("=B2xB20xI28xI")
_ESTABLISHED = 1


class Socket(Protocol):
    """A `socket.socket`, or what asyncio shows of one."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def unanswered(sock: Socket) -> float | None:
    """Seconds for which the kernel at the other end of `sock` (TCP) has left unanswered what it was sent; 0.0 if it has
    acknowledged all of it. None if there is no connection any more. Does not block.

    Ask before something more is sent, not right after it: that cannot have been acknowledged yet.
    """
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    state, probes, unacked, last = _TCP_INFO.unpack(raw)
    if state != _ESTABLISHED:
        return None
    return last / 1e3 if unacked or probes else 0.0


class Knock:
    """A connection on which nothing is said, to a port at which a process of ours listens, or did.

    The kernel makes it whether the process runs or not: so it tells a process that is stopped from one that has ended,
    where there is no other connection to look at. Who is stopped finds it waiting in its backlog when it goes on, and
    drops it: so knock once and keep it, not again and again. Belongs to an event loop.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    async def at(cls, address: tuple[str, int], timeout: float) -> Knock:
        """Raises `ConnectionRefusedError` if nobody listens there (any more), another `OSError` if no kernel answers
        within `timeout` seconds."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = apart(socket.socket(family, socket.SOCK_STREAM))
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # asks the kernel, and never the process
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            await wait_for(timeout, asyncio.get_running_loop().sock_connect(sock, address))
        except (asyncio.TimeoutError, TimeoutError):
            sock.close()
            raise ConnectionError(f"no answer from {address[0]}:{address[1]} within {timeout:g} s") from None
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    def unanswered(self) -> float | None:
        """The same as the function; the kernel there is asked once a second. None also if the process has taken the
        connection and closed it: then it runs."""
        return unanswered(self._sock)

    def close(self) -> None:
        self._sock.close()


def state(pid: int) -> str:
    """The letter that ps(1) shows for a process of this host: "T" if it is stopped, "t" if a debugger has stopped it.
    Empty if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def is_ending(there: Address) -> bool:
    """Whether the kernel of this host ends the process at an address, whose port answers until its memory is freed."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        if there.boot == boot():
            fields = Path(f"/proc/{there.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)
    return False


_EXITING = 0x4  # PF_EXITING, among the flags in proc_pid_stat(5)


@cache
def boot() -> str:
    """The boot id of this kernel: `Address.boot` of what runs on it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network() -> str:
    """The network namespace of this thread: `Address.network` of what listens in it."""
    return str(os.stat("/proc/thread-self/ns/net").st_ino)


def ports() -> str:
    """`Address.ports` of what listens here."""
    return f"{boot()} {network()}"


def state_of(there: Address) -> str:
    """`state` of the process at an address, if it is one of this host."""
    return state(there.pid) if there.boot == boot() else ""


def described(seconds: float, state: str = "") -> str:
    """What to say of a process that lives and has not spoken for `seconds`. `state`: as the function says, or ""."""
    why = {
        "": "it holds the interpreter lock (compilation, a long C call, a debugger), is stopped, or its machine is "
        "overloaded; raise FTCOMM_OP_TIMEOUT",
        "T": "it is stopped (SIGSTOP, SIGTSTP); continue it, or raise FTCOMM_OP_TIMEOUT",
        "t": "a debugger has stopped it; raise FTCOMM_OP_TIMEOUT to debug",
    }
    return f"its process lives but has not spoken for {seconds:.0f} s: {why.get(state, _RUNS)}"


_RUNS = (
    "it holds the interpreter lock (compilation, a long C call, a debugger), or its machine is overloaded; raise "
    "FTCOMM_OP_TIMEOUT"
)
