"""The members of a static group: how they meet, what each hears of the others, and the one error that ends it. Pure:
events in, actions out.

    what is heard of a member                what follows
    its hello                                when all have said theirs, the group begins
    a hello of other members                 ArgumentError
    Left(taken)                              what it has taken others may have returned, so it returns here, too, as
                                             soon as all have taken it; every later op fails
    MemberFailed(lost, why)                  the end: that one is lost, or this one has given up
    its link or its process ends             it is lost: the end
    its connection for data ends             if for `DOUBT` seconds nothing else is heard of it, it is asked why
    DataEnded(why): it asks                  MemberLeft, if a member has left and so the ops have failed; else the end
    MemberLeft(member, taken)                as if that one had said `Left`
    a view of the job is without that life   it is lost: the end

Silence is no proof: a member that lives answers, and the link to one that has died ends. A member that is asked and
cannot answer is waited for as long as an op may take.

`MemberFailed` does not say what its member has taken, as `Left` does: where a member is lost that would decide nothing.
The lost one may have returned an op, and one that has told some of that may be lost next; there is no coordinator to
say what the others do. So after such an end the members compare how far they have come (docs/limits.md, *Groups*).

`ftcomm.groups.static_internals` drives it in the product, `ftcomm.simulation.static` in virtual time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.dropped import printable
from ftcomm.control.views import Address, Addresses, Member, View
from ftcomm.errors import ArgumentError, CollectiveTimeout, LostError
from ftcomm.membership.derived import Left

EPOCH = 1  # the only one
DOUBT = 0.5  # s that a member may take to say why its connection for data has ended, before it is asked
_MEND = "make a new group of those that are left"

ReasonText = Annotated[str, Meta(max_length=4096)]


class MemberHello(msgspec.Struct, frozen=True, tag=True):
    """`members` is a digest of who belongs to the group, in which order."""

    members: t.Hex
    address: Address


class MemberFailed(msgspec.Struct, frozen=True, tag=True):
    """The member has given up, because of the loss of the rank `lost`, or (-1) for a reason of its own."""

    lost: Annotated[int, Meta(ge=-1, le=1 << 16)]
    why: ReasonText


class DataEnded(msgspec.Struct, frozen=True, tag=True):
    """The connection for data between the member that says this and the one that hears it has ended: why?"""

    why: ReasonText


class MemberLeft(msgspec.Struct, frozen=True, tag=True):
    """The ops of the member that says this have ended, and with them its connections for data, since `member` has left
    the group after it had taken so many."""

    member: Annotated[int, Meta(ge=0, le=1 << 16)]
    taken: Annotated[int, Meta(ge=0, le=1 << 53)]


LastMessage = Left | MemberFailed
Said = MemberHello | DataEnded | MemberLeft | LastMessage


class LoseMember(msgspec.Struct, frozen=True):
    """Messages to and from this member fail."""

    member: int
    why: str


class FailOps(msgspec.Struct, frozen=True):
    """Every op in flight fails, and every later one; the others are told nothing."""

    error: BaseException


class TellMember(msgspec.Struct, frozen=True):
    """Tell a member, and go on."""

    member: int
    said: DataEnded | MemberLeft


class End(msgspec.Struct, frozen=True):
    """The group ends: all fails with `error`, and the others are told `last`."""

    error: BaseException
    last: LastMessage


StaticAction = LoseMember | FailOps | TellMember | End


class StaticMembership:
    """Rank `me` of the group `name`, whose ranks are called `names` in errors. In a job, rank `i` is part of
    `replicas[i]`. Not thread-safe."""

    def __init__(
        self, name: str, me: int, names: Sequence[str], hello: MemberHello, replicas: Sequence[int] = ()
    ) -> None:
        self.me, self.hello = me, hello
        self.error: BaseException | None = None  # why no op can succeed any more; None while all is well
        self.is_over = False  # nothing is left to be ended
        self._name, self._names, self._replicas = name, tuple(names), tuple(replicas)
        self._addresses = {me: hello.address}  # the addresses of members that have come
        self._incarnations: dict[int, str] = {}  # by rank: as the first view that had it has said
        self._left: dict[int, int] = {}  # ranks that have closed the group -> how many ops they have taken
        self._doubts: dict[int, str] = {}  # connections that ended, and what is known of it
        self._doubted: dict[int, float] = {}  # when a doubt was seen first, in the time of `look`
        self._sure: set[int] = set()  # members that were asked, or have said why
        self._answered: set[int] = set()  # members that have asked why
        self._ended_by = -1  # the rank whose leaving has ended the ops here
        self._parts = False

    def __str__(self) -> str:
        return f"group {self._name!r}, rank {self.me}"

    @property
    def roster(self) -> tuple[int, ...]:
        return tuple(range(len(self._names)))

    # -- the meeting -------------------------------------------------------------------------------------------------

    def missing(self) -> tuple[int, ...]:
        """Returns the ranks that have not come yet."""
        return tuple(member for member in self.roster if member not in self._addresses)

    def came(self, member: int, hello: MemberHello) -> None:
        """Note the hello of a member. It may say it again: then it means the newer one. Raises `ArgumentError` if it
        means another group."""
        if hello.members != self.hello.members:
            raise ArgumentError(
                f"group {self._name!r}: {self._names[member]} makes it of other members, or in another order; pass the "
                "same members to all"
            )
        self._addresses[member] = hello.address

    def absent(self, waited: float, news: Mapping[int, str]) -> str:
        """Returns what there is to say when not all have come in time. `news`: how the last attempts ended."""
        who = "; ".join(
            f"{self._names[member]} did not come ({news.get(member, 'it has not called')})" for member in self.missing()
        )
        return (
            f"group {self._name!r}: {who}. {self._names[self.me]} has waited for {waited:.1f} s. Do all members run, "
            "and do they make this group?"
        )

    def view(self) -> View:
        """Returns the one view, when all have come."""
        return View(
            EPOCH, None, tuple(Member(rank, "", Addresses.of((self._addresses[rank],)), True) for rank in self.roster)
        )

    # -- what is heard -----------------------------------------------------------------------------------------------

    def left_after(self, member: int) -> int | None:
        """Returns after how many ops a member has closed the group; None if it has not."""
        return self._left.get(member)

    def said(self, member: int, said: Said) -> list[StaticAction]:
        """Take in what another member says: it ends, with the reason; or it asks, or answers, why a connection has
        ended."""
        if isinstance(said, Left):
            return self._leaves(member, said.taken)
        if isinstance(said, MemberLeft):
            self._sure.add(member)
            return self._leaves(said.member, said.taken) if said.member in self.roster else []
        if isinstance(said, DataEnded):
            return self._asked(member, said.why)
        if isinstance(said, MemberHello):
            return []
        if said.lost in self.roster and said.lost != self.me:
            return self.lost(said.lost, f"{said.why} (as {self._names[member]} has noticed)")
        return self.failed(LostError(f"{self}: {self._names[member]} has given up: {said.why}; {_MEND}"))

    def _leaves(self, member: int, taken: int) -> list[StaticAction]:
        if member in self._left or member == self.me:
            return []
        self._left[member] = taken
        return [LoseMember(member, "it has closed the group")]

    def _asked(self, member: int, why: str) -> list[StaticAction]:
        """A member asks why a connection for data between it and this one has ended. The last
        word of this one answers that, if it is said already or about to be."""
        if self.is_over or self._parts or member in self._answered:
            return []
        self._answered.add(member)
        if self._ended_by >= 0:
            return [TellMember(member, MemberLeft(self._ended_by, self._left[self._ended_by]))]
        between = f"between {self._names[member]} and {self._names[self.me]}"
        return self.failed(LostError(f"{self}: {why} ({between}); {_MEND}"))

    def lost(self, member: int, why: str) -> list[StaticAction]:
        """A member is lost: its process, or its link, has ended. One that has said before that it leaves is not."""
        if member in self._left:
            return []
        error = LostError(f"{self}: {self._names[member]} was lost: {why}; {_MEND}")
        return self._end(error, MemberFailed(member, why[:1000]))

    def severed(self, member: int, why: str) -> None:
        """The connection for data to or from a member has ended. What that means, the member says itself, or its end
        does, a moment later."""
        self._doubts.setdefault(member, why)

    def job_entered(self, view: View) -> list[StaticAction]:
        """A view of the job is in force: a rank whose life is not in it is lost."""
        actions: list[StaticAction] = []
        for rank, replica in enumerate(self._replicas):
            member = view.member(replica)
            incarnation = None if member is None else member.incarnation
            known = self._incarnations.get(rank)
            if incarnation is not None and known is None:
                self._incarnations[rank] = incarnation
            elif incarnation != known and rank != self.me:
                actions += self.lost(rank, f"its replica is not in the view of epoch {view.epoch}")
        return actions

    @property
    def waits(self) -> bool:
        """Whether `look` has something to wait for."""
        doubts = self._doubts.keys() - self._left.keys() - self._sure
        return (bool(doubts) and not self.is_over) or (bool(self._left) and self.error is None)

    def look(self, returned: int, heard: float) -> list[StaticAction]:
        """Look at what is waited for, when so many ops have returned here. All that had come at the time `heard` was
        told before; it is one of the seconds in which this member has run."""
        actions: list[StaticAction] = []
        for member, why in self._doubts.items():
            if member in self._left or member in self._sure:
                continue
            if heard - self._doubted.setdefault(member, heard) > DOUBT:
                self._sure.add(member)
                actions.append(TellMember(member, DataEnded(why[:1000])))
        for member, ops in self._left.items():
            # A later op can return nowhere; an earlier one returns here, if all others take it, too.
            if returned >= ops and self.error is None:
                who, self._ended_by = self._names[member], member
                self.error = LostError(f"{self}: Connection closed by peer: {who} has closed the group; {_MEND}")
                actions.append(FailOps(self.error))
        return actions

    # -- what this member does ---------------------------------------------------------------------------------------

    def replicas_of(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Returns the replicas of these ranks in a job, and none without a job. This replica may be among them: then
        another rank of it has to move, and says for whom it waits."""
        return tuple(sorted({self._replicas[rank] for rank in ranks})) if self._replicas else ()

    def names(self, ranks: Collection[int]) -> str:
        return ", ".join(self._names[rank] for rank in ranks)

    def gives_up(self, op: int, ranks: Collection[int], seconds: float) -> list[StaticAction]:
        """This member gives an op up, for which it has waited so long for these ranks."""
        return self.failed(
            CollectiveTimeout(
                f"{self}: op {op} has waited {seconds:g} s for {self.names(ranks)}. Did they make the same call? A "
                "longer timeout waits longer"
            )
        )

    def failed(self, error: BaseException) -> list[StaticAction]:
        """This member cannot go on."""
        return self._end(error, MemberFailed(-1, printable(str(error), 1000)))

    def aborts(self, reason: str) -> list[StaticAction]:
        why = f"it was aborted{': ' if reason else ''}{reason}"
        return self._end(LostError(f"{self}: {why}; make a new group to go on"), MemberFailed(-1, printable(why, 1000)))

    def parts(self) -> None:
        """This member is about to leave, and says so soon: its connections for data end first."""
        self._parts = True

    def leaves(self, error: BaseException, returned: int, taken: int) -> list[StaticAction]:
        """This member closes the group after so many ops, see `Left`."""
        return self._end(error, Left(returned, taken))

    def _end(self, error: BaseException, last: LastMessage) -> list[StaticAction]:
        """The first end counts."""
        if self.is_over:
            return []
        self.is_over, self.error = True, self.error or error
        return [End(error, last)]
