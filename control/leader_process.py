"""The process of the leader of a replica that has several ranks. Shard 0 starts it, as its companion.

    python -m ftcomm.control.leader_process     with its configuration, and the socket to which the ranks come

So no interpreter of a training carries the control of the other ranks: while that of shard 0 is held (a compilation,
a long C call, a debugger), they hear of views. The two end with each other, and the replica with them:

    shard 0 ends             its pidfd tells the leader, which tells the coordinator and the other ranks, and ends
    the leader ends          its connection tells shard 0, which tells the coordinator, and ends; its witness
                             (`ftcomm.control.leader_witness`) tells the coordinator, too, as shard 0 may be held
    the leader is stopped    its kernel answers, so it is waited for, like a rank that is, and removed as a stall
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ftcomm.control import handshake
from ftcomm.control.companion import become_companion
from ftcomm.control.companion_loop import LAST, Tasks, prepare, run_companion, within
from ftcomm.control.dropped import drop
from ftcomm.control.hopeless import ask_until_over
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_driver import LeaderDriver
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.leader_witness import LeaderWitness
from ftcomm.control.links import Listener
from ftcomm.control.liveness import state_of
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.tls import Files, Tls
from ftcomm.control.unstarted import NamedRank, asking_times

GARBAGE = 50_000  # objects that are made and not freed before the garbage collector looks


class LeaderConfig(msgspec.Struct, frozen=True):
    """All that a leader has to know."""

    rank: NamedRank  # shard 0
    pid: int  # the process of shard 0
    started: float  # when that process has started, in s since this host has
    ranks: int
    coordinator: tuple[str, int]
    token: str
    job: str
    tls: Files | None
    timeouts: Timeouts
    host: str  # the address of this host
    processes: str  # `Address.processes` of shard 0
    level: int  # the level of the log
    life: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))  # the incarnation of the replica

    @property
    def credentials(self) -> handshake.Credentials:
        tls = None if self.tls is None else Tls(self.tls)
        return handshake.Credentials(self.token, self.job, tls)


_CONFIG = msgspec.json.Decoder(LeaderConfig)


class LeaderProcess:
    """Drives a leader in the event loop in which it is made, until shard 0 has ended."""

    def __init__(
        self, config: LeaderConfig, ranks: socket.socket, moved: Callable[[tuple[str, int]], None] = lambda there: None
    ) -> None:
        """`ranks` listens for them; `moved` is as of `LeaderDriver`."""
        self._config, self._socket = config, ranks
        self._credentials = config.credentials
        self._tasks = Tasks()
        replica, timeouts = config.rank.replica, config.timeouts
        self.node = LeaderNode(replica, config.life, config.ranks, timeouts, state_of, processes=config.processes)
        self.driver = LeaderDriver(
            *(self.node, config.rank, self._credentials, config.coordinator, config.host, timeouts),
            do=self._do,
            spawn=self._tasks.spawn,
            trains=lambda: self.node.leader.view is not None,
            moved=moved,
        )

    async def run(self, begun: Callable[[], None], ended: asyncio.Future[bool]) -> None:
        """Lead until shard 0 has `ended`; see `CompanionProcess`."""
        listener = Listener(self._socket, self._credentials, self._serve)
        self.driver.open()
        self._tasks.spawn(self._beats())
        self._tasks.spawn(
            ask_until_over(
                *(self._config.rank, self._config.coordinator, self._credentials),
                asking_times(0, self._config.ranks, self._config.timeouts.heartbeat),
                over=lambda: any(view is not None for view in self.node.views),
                alone=lambda: True,
                tell=lambda told: self._do(self.node.from_coordinator, told),
                started=self._config.started,
            )
        )
        begun()
        await self._end(await self._tasks.until(ended))
        await listener.close()

    def _do(self, event: Callable[..., Sequence[ToCoordinator | ToRank]], *args: Any) -> None:
        """Tell the node of an event, and carry out its actions."""
        if actions := event(*args):  # most messages ask for nothing
            self.driver.carry_out_all(actions)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._config.timeouts.beat)
            self.driver.look()
            self._do(self.node.tick, time.monotonic())

    async def _serve(self, channel: Channel, opening: handshake.Opening) -> None:
        if opening.purpose == "asked":  # a question whether this process lives
            channel.close()
        elif not await self.driver.serve(channel, opening):
            drop("purpose", f"a connection for {opening.purpose!r}, which a leader does not serve")
            channel.close()

    async def _end(self, well: bool) -> None:
        """Take what shard 0 has said last, say that it has ended, and let the others have that."""
        await within(LAST, self.driver.closed(0))
        self._tasks.cancel()
        if not well:
            self._do(self.node.rank_lost, 0, f"its process {self._config.pid} has ended")
        await within(LAST, self.driver.flushed())
        self.driver.close()


def collect_seldom() -> None:
    """Let the garbage collector look less often. As ranks come it would look at all connections again and again, an
    eighth of what they cost; hardly anything here needs it."""
    gc.freeze()
    gc.set_threshold(GARBAGE)


def main() -> None:
    sock, data, descriptors = become_companion()
    config = _CONFIG.decode(data)
    prepare(config.level)
    who = config.coordinator, config.credentials, config.rank.replica, config.life
    witness = LeaderWitness(*who, config.timeouts.give_up, (sock.fileno(), *descriptors))
    collect_seldom()
    name = f"the leader of replica {config.rank.replica}"
    code = run_companion(name, lambda ranks: LeaderProcess(config, ranks, witness.moved), sock, descriptors)
    if code == 0:
        witness.dismiss()
    os._exit(code)


if __name__ == "__main__":
    main()
