"""Looks up where any rank of the job is reached. A rank knows the addresses of its own group; its leader knows all.

A rank asks its leader over a connection of its own, and gets the addresses of `BLOCK` ranks at once, which it keeps as
long as that life is in a view: those who want one often want more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterable

from ftcomm.control import handshake, wire
from ftcomm.control import messages as m
from ftcomm.control.links import ask, serve_messages
from ftcomm.control.rank_name import rank_name
from ftcomm.control.sealed import Channel
from ftcomm.control.views import NO_ADDRESSES, Address, Addresses, Member, View
from ftcomm.control.wait_for import wait_for

PURPOSE = "where"
BLOCK = 64  # ranks


class Directory:
    """The addresses of ranks of other groups, as a rank of shard > 0 asks its leader for them. Any thread but that of
    `loop`."""

    def __init__(
        self, leader: tuple[str, int], credentials: handshake.Credentials, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._leader, self._credentials, self._loop = leader, credentials, loop
        self._lock = threading.Lock()
        self._known: dict[tuple[int, str, int], Addresses] = {}  # by replica, its incarnation, and the first rank

    def address(self, view: View, member: Member, shard: int, timeout: float) -> Address:
        """Returns the address of rank `shard` of a member of `view`. Blocks for up to `timeout` seconds. Raises
        `OSError`."""
        first = shard - shard % BLOCK
        wanted = member.replica, member.incarnation, first
        with self._lock:
            known = self._known.get(wanted)
        if known is None:
            known = self._ask(member, first, timeout)
            if not known.has(shard):  # the leader may be in a later view, and in one with that life again
                raise ConnectionError(f"the leader knows no {rank_name(member.replica, shard)}")
            with self._lock:
                self._known = {at: ranks for at, ranks in self._known.items() if view.has(at[0], at[1])}
                self._known[wanted] = known
        if not known.has(shard):
            raise ConnectionError(f"there is no {rank_name(member.replica, shard)}")
        return known[shard]

    def _ask(self, member: Member, first: int, timeout: float) -> Addresses:
        fields: handshake.Fields = {"replica": member.replica, "incarnation": member.incarnation, "first": first}
        asking = asyncio.run_coroutine_threadsafe(ask(self._leader, self._credentials, PURPOSE, fields), self._loop)
        try:
            answer = asking.result(timeout)
        except concurrent.futures.TimeoutError:
            asking.cancel()
            answer = None
        if not isinstance(answer, m.RanksAt):
            raise ConnectionError(f"the leader of this replica does not say where replica {member.replica} is")
        return answer.ranks


async def serve(channel: Channel, fields: handshake.Fields, views: Iterable[View | None]) -> None:
    """Answer a rank that has asked. `views` are those that the leader knows, the best first."""
    replica, incarnation = handshake.number(fields, "replica"), handshake.text(fields, "incarnation")
    first = handshake.number(fields, "first")
    members = (view.member(replica) for view in views if view is not None and view.has(replica, incarnation))
    member = next(members, None)
    ranks = NO_ADDRESSES if member is None else member.ranks.part(first, BLOCK)

    def ready(writer: wire.Writer) -> None:
        writer.write(m.encode(m.RanksAt(ranks)))
        writer.close()

    await wait_for(wire.KERNEL, serve_messages(channel, lambda message: None, ready))
