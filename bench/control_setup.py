"""The place of a process of `ftcomm bench control` in the emulated job, and what all of them do: they answer calls,
tell what happens, and count what they use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.agent_ranks import agent_ranks
from ftcomm.control.handshake import Credentials
from ftcomm.control.timeouts import Timeouts

HOST = "127.0.0.1"
TO_LEADER, TO_RANK = 0, 1  # the ways of a message
_BYTES = struct.Struct("=120xQQ")  # tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info


class Setup(msgspec.Struct, frozen=True):
    """A part's place in the emulated job."""

    replicas: int
    ranks: int
    hosts: int  # of a replica
    token: str
    op_timeout: float
    heartbeat: float | None  # None: what follows from `op_timeout`
    begun: float  # time.monotonic() of step 0, on all parts
    pace: float  # s of a step
    coordinator: int = 0  # its port; 0: any, in the coordinator itself
    store: str = ""  # the file of views, or their place in etcd
    stands_by: bool = False  # of a coordinator: another one has the job
    replica: int = 0  # of a leader
    columns: tuple[int, int] = (0, 0)  # of ranks: from, to
    at_once: int = 1  # of these, so many may be about to connect
    flapping: int = 0  # hosts of each replica that may be cut off, from the second on: rank 0 is on the first
    has_agents: bool = False  # each host but that of rank 0 has a host agent

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts.derive(self.op_timeout, self.heartbeat)

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.token)

    @property
    def step(self) -> int:
        """The step that all are in by the clock."""
        return int((time.monotonic() - self.begun) / self.pace)

    def host(self, replica: int, shard: int) -> int:
        """The host that a rank counts as being on; each has about as many consecutive ranks."""
        return replica * self.hosts + shard * self.hosts // self.ranks

    def agent(self, shard: int) -> range:
        """The ranks that share a host agent with this one; empty if there is none."""
        return agent_ranks(shard, self.ranks // self.hosts if self.has_agents else 0, self.ranks)

    def flaps(self, shard: int) -> bool:
        """Whether the host of a rank may be cut off."""
        return 1 <= self.host(0, shard) <= self.flapping


def say(**fields: Any) -> None:
    sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")
    sys.stdout.flush()


class Measured:
    """Counts what it takes to measure: a look at thousands of sockets, which no part of a job would take."""

    cpu = 0.0  # s


def usage() -> dict[str, Any]:
    """CPU seconds of this process without what measuring takes, its memory in MB, and the bytes that each open
    connection has sent and received."""
    cpu = time.process_time() - Measured.cpu
    carried: dict[str, tuple[int, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found = os.stat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size)
                carried[str(found.st_ino)] = _BYTES.unpack(info)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {"cpu": cpu, "mb": pages * resource.getpagesize() / 1e6, "carried": carried}


class MessageCounts:
    """Counts messages between ranks, agents and leaders by replica and kind: how many have gone up, and down."""

    def __init__(self) -> None:
        self.messages: dict[int, dict[str, list[int]]] = {}
        self.at_leader: dict[int, list[int]] = {}  # by replica: those of all kinds that its leader takes or sends

    def count(self, replica: int, kind: str, way: int, at_leader: bool) -> None:
        self.messages.setdefault(replica, {}).setdefault(kind, [0, 0])[way] += 1
        if at_leader:
            self.at_leader.setdefault(replica, [0, 0])[way] += 1

    @property
    def told(self) -> dict[str, Any]:
        return {"messages": self.messages, "at_leader": self.at_leader}


def kind_of(message: m.AnyMessage) -> str:
    """Returns the kind of a message; of what an agent hands on, that of what is in it."""
    inner = message.message if isinstance(message, m.Enclosed) else message
    return type(inner).__name__


async def answer(calls: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer what is asked on the standard input, until that ends: {"call": name, ...}."""
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        asked = msgspec.json.decode(line)
        name, number = asked.pop("call"), asked.pop("number")
        begun = time.thread_time()
        say(answers=number, **({"usage": usage} | calls)[name](**asked))
        if name == "usage":
            Measured.cpu += time.thread_time() - begun
