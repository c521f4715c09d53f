"""A coordinator with control threads that move no data, in this process, and a relay between a rank and its leader."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any

from ftcomm.control import liveness
from ftcomm.control.control_thread import ControlThread
from ftcomm.control.links import listen
from ftcomm.control.own_host_agent import AgentPlace
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address
from tests.rigs.host_agent import HostAgentThread
from tests.rigs.idle_data_plane import IdleDataPlane
from tests.rigs.leader import Led
from tests.rigs.peers import CREDENTIALS, DEADLINE


class Relay:
    """Between a rank and its leader; `cut` resets all connections that there are."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.count = 0
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self.count += 1
                self._socks += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        socks, self._socks = self._socks, []
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)  # wakes who reads
            sock.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


class Job:
    """A coordinator, and control threads that move no data, in this process."""

    def __init__(self, replicas: int, ranks: int, timeouts: Timeouts | None = None) -> None:
        self._ranks = ranks
        self._timeouts = timeouts or Timeouts.derive(60.0, 10.0)
        self._events: list[dict[str, object]] = []
        self._control_threads: list[ControlThread] = []
        self._leaders: list[Led] = []
        self._host_agents: list[HostAgentThread] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.server = CoordinatorServer(
            replicas, ranks, CREDENTIALS, timeouts=self._timeouts, on_event=self._events.append
        )
        self.do(self.server.start())

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    def control_thread(
        self,
        replica: int,
        rank: int,
        leader: tuple[str, int] | None = None,
        leader_socket: socket.socket | None = None,
        host_agent: AgentPlace | None = None,
    ) -> ControlThread:
        sock = listen("127.0.0.1", 0)
        nonce = f"{replica:016x}{rank:016x}"
        made = ControlThread(
            IdleDataPlane(),
            coordinator=self.coordinator,
            credentials=CREDENTIALS,
            replica=replica,
            shard=rank,
            ranks=self._ranks,
            leader=leader,
            leader_socket=leader_socket,
            sock=sock,
            address=Address(*sock.getsockname(), liveness.boot(), 1, 3, nonce, network=liveness.network()),
            timeouts=self._timeouts,
            host_agent=host_agent,
        )
        self._control_threads.append(made)
        made.start()
        return made

    def led(self, replica: int = 0) -> Led:
        """The leader of a replica of several ranks, in a thread of the test."""
        made = Led(self.coordinator, CREDENTIALS, self._timeouts, self._ranks, replica)
        self._leaders.append(made)
        return made

    def host_agent(self, leader: tuple[str, int], shards: range, replica: int = 0) -> HostAgentThread:
        """The host agent of these ranks, in a thread of the test."""
        made = HostAgentThread(leader, CREDENTIALS, self._timeouts, shards, self._ranks, replica)
        self._host_agents.append(made)
        return made

    @property
    def coordinator(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.server.endpoint.rpartition(":")[2])

    def events_of(self, *kinds: str) -> list[dict[str, object]]:
        return [event for event in self._events if event["kind"] in kinds]

    def close(self) -> None:
        for control in self._control_threads:
            control.stop()
        for host_agent in self._host_agents:
            host_agent.close()
        for leader in self._leaders:
            leader.close()
        self.do(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
