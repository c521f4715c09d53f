"""Tells whether the kernel at the other end of a connection answers, whatever its process does.

A process that holds its interpreter (a compilation, a long C call, a debugger), or is stopped, says nothing; but its
kernel goes on acknowledging what is sent to it, and keeps its listening port open. A process that ends closes both. A
host that is gone acknowledges nothing. So silence of the process and silence of the kernel are two facts, and only the
second one is a loss (`ftcomm.control.detector`).

Linux tells of acknowledgements by getsockopt(TCP_INFO), struct tcp_info in <linux/tcp.h>, native byte order:

    offset  0  u8   tcpi_state           1: established
            3  u8   tcpi_probes          probes of a closed window, or of keepalive, without an answer yet
           24  u32  tcpi_unacked         segments that were sent and not acknowledged yet
           56  u32  tcpi_last_ack_recv   milliseconds since the last acknowledgement came

The caller has to send something several times per timeout (a heartbeat, `messages.Ping`): without a question no answer
can be missing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from functools import cache
from pathlib import Path
from typing import Protocol

from ftcomm.control.views import Address

_TCP_INFO = struct.Struct("=B2xB20xI28xI")
_ESTABLISHED = 1


class Socket(Protocol):
    """A `socket.socket`, or the view of one that asyncio gives."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def unanswered(sock: Socket) -> float | None:
    """Returns for how many seconds the kernel at the other end of `sock` (TCP) has not acknowledged what it was sent:
    0.0 if it has acknowledged all of it, None if the connection has ended. Does not block.

    Ask before more is sent, not right after it, since that cannot have been acknowledged yet.
    """
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    state, probes, unacked, last = _TCP_INFO.unpack(raw)
    if state != _ESTABLISHED:
        return None
    return last / 1e3 if unacked or probes else 0.0


def state(pid: int) -> str:
    """Returns the letter that ps(1) shows for a process of this host: "T" if it is stopped, "t" if a debugger has
    stopped it; empty without such a process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


def started() -> float:
    """Returns when this process has started, in seconds since this host has."""
    ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def lived_since(start: float) -> float:
    """Returns the seconds since `start`, a time as of `started`; also those in which a process was stopped."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start


def is_ending(there: Address) -> bool:
    """Whether the kernel of this host has ended the process at an address, or is about to. The port of such a process
    answers until its memory is freed, and its threads end one after the other; but it runs no more."""
    if there.processes != processes():
        return False
    try:
        fields = Path(f"/proc/{there.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return not _exists(there.pid)  # it may be hidden from us
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING or int(fields[28]) & _KILLED)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


# In proc_pid_stat(5): PF_EXITING among the flags, and SIGKILL among the signals that are pending.
_EXITING, _KILLED = 0x4, 1 << (signal.SIGKILL - 1)


@cache
def boot() -> str:
    """The boot id of this kernel: the `Address.boot` of what runs on it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def network() -> str:
    """The network namespace of this thread: the `Address.network` of what listens in it."""
    return str(os.stat("/proc/thread-self/ns/net").st_ino)


def ports() -> str:
    """The `Address.ports` of what listens here."""
    return f"{boot()} {network()}"


def pids() -> str:
    """The process namespace of this thread: the `Address.pids` of what runs in it."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


def processes() -> str:
    """The `Address.processes` of what runs here."""
    return f"{boot()} {pids()}"


def state_of(there: Address) -> str:
    """Returns the `state` of the process at an address, if it runs on this host."""
    return state(there.pid) if there.processes == processes() else ""


def described(seconds: float, state: str = "") -> str:
    """Describes a process that lives and has not spoken for `seconds`; `state` is the result of the function, or ""."""
    why = {
        "": "it holds the interpreter lock (compilation, a long C call, a debugger), is stopped, or its machine is "
        "overloaded; raise FTCOMM_OP_TIMEOUT",
        "T": "it is stopped (SIGSTOP, SIGTSTP); continue it, or raise FTCOMM_OP_TIMEOUT",
        "t": "a debugger has stopped it; raise FTCOMM_OP_TIMEOUT to debug",
    }
    return f"its process lives but has not spoken for {seconds:.0f} s: {why.get(state, _RUNS)}"


def leader_described(seconds: float) -> str:
    """Describes the leader of a replica of several ranks, which is a process of its own, as `described` does a rank."""
    return (
        f"its leader, a process beside its shard 0, lives but has not spoken for {seconds:.0f} s: it is stopped, or "
        "its machine is overloaded; continue it, or raise FTCOMM_OP_TIMEOUT"
    )


def runs(there: Address) -> bool:
    """Whether the kernel of this host knows that the process at an address runs, and is not about to end. Another
    process may have its number by now."""
    return there.processes == processes() and not is_ending(there)


def why_lost(there: Address) -> str:
    """Returns why the rank at an address is lost, where it is not found any more."""
    if runs(there):
        return f"its process {there.pid} runs, and takes no part in the job any more"
    return f"its process {there.pid} has ended"


def agent_described(shards: range, seconds: float) -> str:
    """Describes the agent of the host of some ranks, as `described` does a rank."""
    return (
        f"the host agent of its shards {shards.start} to {shards[-1]}, a process beside shard {shards.start}, lives "
        f"but has not spoken for {seconds:.0f} s: it is stopped, or its machine is overloaded; continue it, or raise "
        "FTCOMM_OP_TIMEOUT"
    )


def agent_ended(pid: int) -> str:
    """Returns why the ranks of a host are lost, of whose agent `pid` was the process."""
    return f"its host agent, process {pid}, has ended; its log, or that of the kernel (dmesg), may say why"


_RUNS = (
    "it holds the interpreter lock (compilation, a long C call, a debugger), or its machine is overloaded; raise "
    "FTCOMM_OP_TIMEOUT"
)
