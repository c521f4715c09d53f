"""Views on their way: each receiver is told what concerns it, and nothing twice.

    coordinator -> leader    the addresses of all ranks
    leader -> rank           the addresses of the same rank of the other replicas

On one connection a member's addresses are left out of a view if its life was in the view before. So after a loss all
ranks of a replica get the same few bytes, which are encoded once. A connection that is made again begins anew, and both
ends with it; so they never differ about what was told. The state machines see whole views and know nothing of this.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.views import NO_ADDRESSES, Addresses, Member, View

Carrier = TypeVar("Carrier", bound=m.Message)

CARRIERS = (m.NewView, m.Registered, m.Decision)
KEPT = 8  # messages that may be sent again meanwhile


class UntoldError(ValueError):
    """A view leaves out what was not told on this connection."""


class ViewsSent:
    """The sending end of one connection: to rank `shard` of the sender's replica, or (None) to one that needs all
    addresses. Not thread-safe."""

    def __init__(self, shard: int | None = None) -> None:
        self.shard = shard
        self.before: View | None = None  # the last one that was sent

    def is_new(self, member: Member) -> bool:
        return self.before is None or not self.before.has(member.replica, member.incarnation)

    def shorten(self, message: Carrier) -> Carrier:
        """Returns `message` without what was told before. It has to be sent, as the next one."""
        view = message.view if isinstance(message, CARRIERS) else None
        if view is None:
            return message
        members = (msgspec.structs.replace(member, ranks=self._addresses(member)) for member in view.members)
        short = msgspec.structs.replace(view, members=tuple(members))
        self.before = view
        return msgspec.structs.replace(message, view=short)

    def _addresses(self, member: Member) -> Addresses:
        if not self.is_new(member):
            return NO_ADDRESSES
        return member.ranks if self.shard is None else member.ranks.part(self.shard, 1)


class ViewsReceived:
    """The receiving end of one connection. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Addresses] = {}  # of the lives in the last view

    def complete(self, message: Carrier) -> Carrier:
        """Returns `message` with what was told before. Raises `UntoldError` if that is not known."""
        view = message.view if isinstance(message, CARRIERS) else None
        if view is None:
            return message
        lives = {(member.replica, member.incarnation): member.ranks for member in view.members}
        unknown = [life for life, ranks in lives.items() if not ranks and life not in self._known]
        if unknown:
            raise UntoldError(f"a view of epoch {view.epoch} without the addresses of {unknown}")
        known = {life: ranks or self._known[life] for life, ranks in lives.items()}
        members = (msgspec.structs.replace(x, ranks=known[x.replica, x.incarnation]) for x in view.members)
        whole = msgspec.structs.replace(view, members=tuple(members))
        self._known = known
        return msgspec.structs.replace(message, view=whole)


class EncodedOnce:
    """Encodes what goes to many in a row once for all who get the same. Not thread-safe."""

    def __init__(self) -> None:
        # The newest messages, and for each its bytes by the view that the receiver was told before. What is named by
        # its id lives here, so that nothing else has that.
        self._made: dict[int, tuple[m.Message, dict[int, tuple[View | None, bytes]]]] = {}

    def encode(self, message: m.Message, sent: ViewsSent) -> bytes:
        """Returns the bytes of the next message on the connection of `sent`."""
        if id(message) not in self._made:
            self._made[id(message)] = message, {}
            if len(self._made) > KEPT:
                del self._made[next(iter(self._made))]
        made = self._made[id(message)][1]
        view = message.view if isinstance(message, CARRIERS) else None
        before = sent.before if view is not None else None
        known = made.get(id(before))
        if known is not None:
            sent.before = view or sent.before
            return known[1]
        differs = view is not None and sent.shard is not None and any(map(sent.is_new, view.members))
        data = m.encode(sent.shorten(message))
        if not differs:
            made[id(before)] = before, data
        return data
