"""Views on their way: each receiver is told what concerns it, and nothing twice.

    coordinator -> leader    the addresses of all ranks
    leader -> rank           the addresses of the same rank of the other replicas
    leader -> host agent     the addresses of the same ranks as the agent's own

On one connection a view is told as the difference from the one that was told before: who is gone, who is new, with the
addresses, and who is the same life and contributes now or no more. A member that is not named is as it was. So after a
loss all ranks of a replica get the same few bytes, which are encoded once. The first view on a connection is the
difference from none. A connection that is made again begins anew, and both ends with it; so they never differ about
what was told. Should they differ all the same, the digest of the view tells: the receiver ends the connection, and by
the next one it is told the whole. The state machines see whole views and know nothing of this.
"""

from __future__ import annotations

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.views import NO_ADDRESSES, Member, View

CARRIERS = (m.NewView, m.Registered, m.Decision)
_WITH_VIEWS = (m.Difference, m.Enclosed, *CARRIERS)
KEPT = 8  # messages that may be sent again meanwhile


class ViewDifferenceError(ValueError):
    """A view does not follow from what was told on this connection."""


class ViewsSent:
    """The sending end of one connection: to rank `shard` of the sender's replica, or to the agent of `count` ranks from
    there on, or (None) to one that needs all addresses. Not thread-safe."""

    def __init__(self, shard: int | None = None, count: int = 1) -> None:
        self.shard, self._count = shard, count
        self.before: View | None = None  # the last one that was sent

    def shorten(self, message: m.Message) -> m.Message:
        """Returns what is to be sent in place of `message`, as the next one."""
        view = message.view if isinstance(message, CARRIERS) else None
        if view is None:
            return message
        made = self.own(difference(message, view, self.before))
        self.before = view
        return made

    def own(self, told: m.Difference) -> m.Difference:
        """Returns it with the addresses that concern the receiver alone."""
        if self.shard is None:
            return told
        return msgspec.structs.replace(told, changed=tuple(map(self._own, told.changed)))

    def _own(self, member: Member) -> Member:
        if not member.ranks:
            return member
        return msgspec.structs.replace(member, ranks=member.ranks.part(self.shard or 0, self._count))


def difference(message: m.Message, view: View, before: View | None) -> m.Difference:
    """Returns `message`, which carries `view`, for one who was told `before` last; with the addresses of all ranks of
    new lives."""
    known = {member.replica: member for member in (before.members if before is not None else ())}
    changed = (change for member in view.members if (change := _change(known.get(member.replica), member)) is not None)
    return m.Difference(
        m.Carrier(type(message).__name__),
        view.digest(),
        view.epoch,
        view.step,
        view.proposal,
        view.why,
        tuple(sorted(known.keys() - set(view.replicas))),
        tuple(changed),
        loop=message.loop if isinstance(message, m.Registered) else 0,
        decides=message.proposal if isinstance(message, m.Decision) else 0,
    )


def _change(before: Member | None, member: Member) -> Member | None:
    """Returns what is to be told of a member; None if that is nothing."""
    if before is None or before.incarnation != member.incarnation:
        return member
    if before.contributing == member.contributing:
        return None
    return msgspec.structs.replace(member, ranks=NO_ADDRESSES)


class ViewsReceived:
    """The receiving end of one connection. Not thread-safe."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}  # of the last view, by replica

    def complete(self, message: m.Message) -> m.Message:
        """Returns what `message` stands for. Raises `ViewDifferenceError` if that does not follow from what was told
        before."""
        if not isinstance(message, _WITH_VIEWS):  # as most are
            return message
        if isinstance(message, m.Enclosed):
            return msgspec.structs.replace(message, message=self.complete(message.message))
        if not isinstance(message, m.Difference):
            if message.view is not None:
                raise ViewDifferenceError(
                    f"{type(message).__name__} with a view of epoch {message.view.epoch} as it is"
                )
            return message
        view = self._whole(message)
        self._members = {member.replica: member for member in view.members}
        if message.carrier is m.Carrier.NEW_VIEW:
            return m.NewView(view)
        if message.carrier is m.Carrier.REGISTERED:
            return m.Registered(view, message.loop)
        return m.Decision(message.decides, view)

    def _whole(self, told: m.Difference) -> View:
        gone = frozenset(told.gone)
        members = {replica: member for replica, member in self._members.items() if replica not in gone}
        members.update((change.replica, self._changed(change)) for change in told.changed)
        ascending = tuple(members[replica] for replica in sorted(members))
        view = View(told.epoch, told.step, ascending, told.why, told.proposal)
        unknown = [(member.replica, member.incarnation) for member in ascending if not member.ranks]
        if unknown:
            raise ViewDifferenceError(f"a view of epoch {told.epoch} without the addresses of {unknown}")
        if view.digest() != told.digest:
            raise ViewDifferenceError(
                f"a view of epoch {told.epoch} that does not follow from what was told before: that makes it one of "
                f"replicas {view.replicas}, whose digest is {view.digest().hex()} and not {told.digest.hex()}"
            )
        return view

    def _changed(self, change: Member) -> Member:
        known = self._members.get(change.replica)
        if change.ranks or known is None or known.incarnation != change.incarnation:
            return change
        return msgspec.structs.replace(change, ranks=known.ranks)


class EncodedOnce:
    """Encodes what goes to many in a row once for all who get the same. Not thread-safe."""

    def __init__(self) -> None:
        # The newest messages, and for each what it is for those who were told the same view before: the difference, and
        # its bytes if they are alike for all. What is named by its id lives here, so that nothing else has that.
        self._made: dict[int, tuple[m.Message, dict[int, tuple[View | None, m.Message, bytes]]]] = {}

    def encode(self, message: m.Message, sent: ViewsSent) -> bytes:
        """Returns the bytes of the next message on the connection of `sent`."""
        known = self._made.get(id(message))
        if known is None:
            known = self._made[id(message)] = message, {}
            if len(self._made) > KEPT:
                del self._made[next(iter(self._made))]
        made = known[1]
        view, before = None, None
        if isinstance(message, CARRIERS) and message.view is not None:
            view, before, sent.before = message.view, sent.before, message.view
        if id(before) not in made:
            told = message if view is None else difference(message, view, before)
            made[id(before)] = before, told, b""
        _, told, data = made[id(before)]
        if data:
            return data
        if isinstance(told, m.Difference) and sent.shard is not None and any(x.ranks for x in told.changed):
            return m.encode(sent.own(told))
        data = m.encode(told)
        made[id(before)] = before, told, data
        return data
