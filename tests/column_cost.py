"""Counts what the other members of its group cost the control thread of a rank, by how many they are.

    python -m tests.column_cost --members 16,64,256,1024

At rest, for each tenth of the heartbeat timeout, and in a change of view: messages that it sends, their bytes before
they are sealed, and bytecodes that its node runs, without sockets. And the memory of its links: this process connects
to itself as often as there are other members, so it has both ends, as a member has.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click

from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.handshake import Credentials, Opening
from ftcomm.control.links import Link, Listener, listen, serve_messages
from ftcomm.control.rank_with_leader import InProcessAction
from ftcomm.control.sealed import Channel
from ftcomm.control.timeouts import Timeouts
from tests.bytecodes import counting
from tests.rigs.rank_node import Process, running, view

HOST = "127.0.0.1"
CREDENTIALS = Credentials("t" * 32)
TIMEOUTS = Timeouts.derive()
AT_ONCE = 32  # links that are made at a time


class Cost:
    """What calls of a node cost together."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0
        self.seen: Counter[str] = Counter()

    def of(self, call: Callable[..., list[InProcessAction]], *args: object) -> None:
        sys.settrace(counting(self.seen))
        try:
            actions = call(*args)
        finally:
            sys.settrace(None)
        said = [m.encode(action.message) for action in actions if isinstance(action, n.ToPeer)]
        self.messages, self.bytes = self.messages + len(said), self.bytes + sum(map(len, said))

    def __str__(self) -> str:
        return f"{self.messages} messages of {self.bytes} bytes, {self.seen.total()} bytecodes"


def at_rest(node: Process, others: range) -> Cost:
    beats = TIMEOUTS.beats_between(1 + len(others))
    cost = Cost()
    for beat in range(3 * beats):  # the last one counts
        now, cost = beat * TIMEOUTS.beat, Cost()
        cost.of(node.peers_acknowledged, dict.fromkeys(others, now))
        cost.of(node.tick, now)
        for replica in others:
            if replica % beats == beat % beats:
                cost.of(node.from_peer, m.Alive(replica, f"life-{replica}"), now)
    return cost


def change(node: Process, others: range) -> Cost:
    """Of a view in which one member is missing."""
    cost = Cost()
    after = view(2, (0, *others[:-1]))
    cost.of(node.from_up, m.NewView(after))
    cost.of(node.quiesced, 2, m.Progress(0, ()))
    for replica in others[:-1]:
        cost.of(node.from_peer, m.MemberProgress(replica, f"life-{replica}", 2, m.Progress(0, ())), 3.0)
    assert node.wants(after)
    cost.of(node.entered, after)
    return cost


def resident() -> int:
    """In KB."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


async def links(others: int) -> float:
    """KB of the memory of a link to each of so many and from each, for one of these."""
    sock = listen(HOST, 0)

    async def serve(channel: Channel, opening: Opening) -> None:
        await serve_messages(channel, lambda message: None, lambda writer: None)

    listener = Listener(sock, CREDENTIALS, serve)
    made: list[Link] = []
    for number in range(others + AT_ONCE):
        if number == AT_ONCE:
            before = resident()
        opened = asyncio.Event()
        made.append(Link(sock.getsockname()[:2], CREDENTIALS, "member", {"replica": 0}, on_open=opened.set))
        await opened.wait()
        made[-1].send(m.Alive(0, "life"))
    await asyncio.sleep(0)
    kept = resident() - before
    for link in made:
        link.close()
    await listener.close()
    return kept / others


@click.command()
@click.option("--members", default="16,64,256,1024", show_default=True, metavar="N,N")
def main(members: str) -> None:
    for count in map(int, members.split(",")):
        others = range(1, count)
        node = running((0, *others), timeouts=TIMEOUTS)
        click.echo(f"{count} members, at rest: {at_rest(node, others)}; a loss: {change(node, others)}")
    click.echo(f"a link each way: {asyncio.run(links(int(members.split(',')[-1]) - 1)):.1f} KB a member")


if __name__ == "__main__":
    main()
