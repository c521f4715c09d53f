"""Measures what each of its ranks costs a leader: to connect, in a loss, in the return of another replica, and at rest.

    python -m tests.leader_cost --ranks 2048 --rounds 6
    python -m tests.leader_cost --ranks 256 --bytecodes 20

The leader is the production `LeaderNode` with its driver, over real sockets, and so are the links of the ranks, which
live in another process and answer at once what ranks answer. Microseconds of the processor for each rank, the least of
all rounds: those of the leader, and those of the ranks with the little that they do here. Or the bytecodes that the
leader runs, by function: they are the same on a machine with any load.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import click

from ftcomm.bench.header import header
from ftcomm.control import messages as m
from ftcomm.control.handshake import Credentials, Opening
from ftcomm.control.leader_driver import LeaderDriver
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.leader_process import collect_seldom
from ftcomm.control.links import Link, Listener, listen
from ftcomm.control.replica_reports import RESUMED
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.views import Address, Addresses, Member, View
from tests.bytecodes import counting

REPLICAS = 12
HOST = "127.0.0.1"
CREDENTIALS = Credentials("t" * 32)
AT_ONCE = 32  # ranks that connect at a time
TIMEOUTS = Timeouts.derive()


def address(replica: int, shard: int) -> Address:
    return Address(f"node-{replica}-{shard // 8}", 40000 + shard, f"{replica:036d}", 1, 3, f"{shard:032x}")


class Rank:
    """A rank of replica 0 that answers what its leader says."""

    def __init__(self, shard: int, port: int, welcomed: Callable[[], None]) -> None:
        self.shard, self.step, self._welcomed = shard, 0, welcomed
        fields: dict[str, str | int] = {"replica": 0, "shard": shard}
        self.link = Link((HOST, port), CREDENTIALS, "rank", fields, on_open=self._opened, on_message=self._received)

    def _opened(self) -> None:
        self.link.send(m.Hello(self.shard, address(0, self.shard)))

    def _received(self, message: m.AnyMessage) -> None:
        if isinstance(message, m.Welcome):
            self._welcomed()
        elif isinstance(message, m.Prepare):
            self.link.send(m.Promise(message.proposal, True, 4))
            self.link.send(m.AtBoundary(message.proposal))
        elif isinstance(message, m.NewView | m.Decision) and message.view is not None:
            fields = {"shard": self.shard, "epoch": message.view.epoch, "told_ms": 1.0, "resume_ms": 1.0}
            self.link.send(m.Installed(message.view.epoch, m.Report(RESUMED, fields)))


class Ranks:
    """All ranks but shard 0, in a process of their own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._ranks = pipe, dict[int, Rank]()
        self._coming: asyncio.Future[None] | None = None
        self._left = 0

    async def run(self) -> None:
        gc.disable()
        loop = asyncio.get_running_loop()
        asked: asyncio.Queue[Any] = asyncio.Queue()
        loop.add_reader(self._pipe.fileno(), lambda: asked.put_nowait(self._pipe.recv()))
        while (what := await asked.get()) is not None:
            begun = time.process_time()
            self._pipe.send(await getattr(self, what[0])(*what[1:]) or (time.process_time() - begun))

    async def connect(self, port: int, ranks: int) -> None:
        self._left = AT_ONCE
        for shard in range(1, ranks):
            if not self._left:
                self._coming = asyncio.get_running_loop().create_future()
                await self._coming
            self._left -= 1
            self._ranks[shard] = Rank(shard, port, self._came)
        while self._left < AT_ONCE:
            self._coming = asyncio.get_running_loop().create_future()
            await self._coming

    def _came(self) -> None:
        self._left += 1
        if self._coming is not None and not self._coming.done():
            self._coming.set_result(None)

    async def cpu(self) -> float:
        return time.process_time()

    async def beat(self) -> None:
        for rank in self._ranks.values():
            rank.link.send(m.Heartbeat(rank.step))

    async def leave(self) -> None:
        for rank in self._ranks.values():
            rank.link.close()
        self._ranks.clear()
        gc.collect()


def ranks_process(pipe: Connection) -> None:
    asyncio.run(Ranks(pipe).run())


class Leader:
    """The leader, of one life. `seen`: count the bytecodes, by what is done and by function."""

    def __init__(
        self,
        ranks: int,
        pipe: Connection,
        found: dict[str, list[tuple[float, float]]],
        seen: dict[str, Counter[str]] | None,
    ) -> None:
        self.ranks, self._pipe, self._found, self._seen = ranks, pipe, found, seen
        self._addresses = [Addresses.of(address(r, shard) for shard in range(ranks)) for r in range(REPLICAS)]
        self.node = LeaderNode(0, "life", ranks, TIMEOUTS)
        self.driver = LeaderDriver(
            *(self.node, NamedRank(0, 0), CREDENTIALS, (HOST, 1), HOST, TIMEOUTS),
            do=self.do,
            spawn=lambda work: work.close(),
            trains=lambda: True,
        )
        self.driver.up.link = None  # it has no coordinator

    def do(self, event: Callable[..., Any], *args: Any) -> None:
        for action in event(*args):
            self.driver.carry_out(action)

    def view(self, epoch: int, gone: int, proposal: int = 0) -> View:
        here = [replica for replica in range(REPLICAS) if replica != gone]
        members = tuple(Member(r, "life", self._addresses[r], True) for r in here)
        return View(epoch, None, members, "", proposal)

    async def asked(self, *what: Any) -> Any:
        self._pipe.send(what)
        return await self.answer()

    async def answer(self) -> Any:
        loop = asyncio.get_running_loop()
        come: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._pipe.fileno(), lambda: come.done() or come.set_result(None))
        await come
        loop.remove_reader(self._pipe.fileno())
        return self._pipe.recv()

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            await asyncio.sleep(0.002)

    async def cost(self, name: str, begin: Callable[[], Any], done: Callable[[], bool]) -> None:
        theirs, ours = await self.asked("cpu"), time.process_time()
        if self._seen is not None:
            sys.settrace(counting(self._seen.setdefault(name, Counter())))
        waits = begin()
        if waits is not None:
            await waits
        await self.until(done)
        sys.settrace(None)
        ours = time.process_time() - ours
        theirs = await self.asked("cpu") - theirs
        self._found.setdefault(name, []).append((1e6 * ours / self.ranks, 1e6 * theirs / self.ranks))

    async def run(self) -> None:
        async def serve(channel: Channel, opening: Opening) -> None:
            await self.driver.serve(channel, opening)

        sock = listen(HOST, 0)
        listener = Listener(sock, CREDENTIALS, serve)
        self.do(self.node.told, 0, m.Hello(0, address(0, 0)))
        leader = self.node.leader
        port = sock.getsockname()[1]
        await self.cost("connect", lambda: self.asked("connect", port, self.ranks), lambda: leader.join() is not None)
        self._install(m.NewView(self.view(1, -1)))
        await self.until(lambda: leader.epoch == 1)
        await self.cost("loss", lambda: self._install(m.NewView(self.view(2, 1))), lambda: leader.epoch == 2)
        await self.cost("return", self._returned, lambda: leader.epoch == 3)
        heard = leader.detector._heard
        await asyncio.sleep(0.05)
        since = time.monotonic()

        def rest() -> Any:
            self.driver.look()
            self.do(self.node.tick, time.monotonic())
            return self.asked("beat")

        await self.cost("rest", rest, lambda: all(heard[shard] >= since for shard in range(1, self.ranks)))
        await self.asked("leave")
        self.driver.close()
        await listener.close()

    def _install(self, message: m.NewView) -> None:
        self.do(self.node.from_coordinator, message)
        self.do(self.node.told, 0, m.Installed(message.view.epoch))

    def _returned(self) -> None:
        """Replica 1 comes back at a boundary, by proposal 7."""
        members = (Member(1, "life", self._addresses[1], True),)
        self.do(self.node.from_coordinator, m.Prepare(7, 2, 5, 0, members))
        self.do(self.node.told, 0, m.Promise(7, True, 4))
        self.do(self.node.told, 0, m.AtBoundary(7))
        self.do(self.node.from_coordinator, m.NewView(self.view(3, -1, proposal=7)))
        for replica in range(2, REPLICAS):
            self.do(self.node.told, 0, m.Boundary(replica, 2, 7, self.view(3, -1, proposal=7).bare()))
        self.do(self.node.told, 0, m.Installed(3))


@click.command()
@click.option("--ranks", default=2048, show_default=True)
@click.option("--rounds", default=6, show_default=True)
@click.option("--bytecodes", default=0, metavar="N", help="Count these instead, and name the N functions with most.")
def main(ranks: int, rounds: int, bytecodes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    header()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=ranks_process, args=(there,), daemon=True)
    process.start()
    collect_seldom()
    found: dict[str, list[tuple[float, float]]] = {}
    seen: dict[str, Counter[str]] | None = {} if bytecodes else None
    for _ in range(1 if bytecodes else rounds):
        asyncio.run(Leader(ranks, here, found, seen).run())
    here.send(None)
    process.join()
    if seen is not None:
        click.echo(f"{ranks} ranks, bytecodes of the leader for each")
        for name, counts in seen.items():
            click.echo(f"{counts.total() / ranks:7.1f} {name}")
            for function, count in counts.most_common(bytecodes):
                click.echo(f"    {count / ranks:7.1f} {function}")
        return
    click.echo(f"{ranks} ranks, us of the processor for each, the least of {rounds} rounds: the leader's, the ranks'")
    for name, costs in found.items():
        click.echo(f"{name:8} {min(ours for ours, _ in costs):6.1f} {min(theirs for _, theirs in costs):6.1f}")


if __name__ == "__main__":
    main()
