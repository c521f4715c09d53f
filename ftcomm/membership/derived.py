"""Views that are those of a job, restricted to some replicas: one member as a state machine, events in, actions out.

    view of the job  epoch 7: 0 1 2 3    the group of 0, 1 and 3 runs in  epoch 7: 0 1   3
    1 is lost        epoch 8: 0   2 3                                     epoch 8: 0     3
    1 comes back     epoch 9: 0 1 2 3                                     epoch 9: 0 1   3

These views need no decision: they are in order and equal on all members without a message. To enter one, a member
stops, and asks the others of that view for their accounts:

    member i                                    member j
      Freeze, quiesced
      AskMember(epoch)                 --->     asked: kept until j has stopped for that epoch, or a later one
                                       <---     TellCaller(SubgroupProgress(epoch, segment, progress))
      told by all: ReachMember, reached: EnterView
      AskMember(epoch, entered)        --->     asked: j may leave, as far as i is concerned

A member that closes the group waits until the others have entered what it has entered, and until what it has taken has
returned. A later caller gets `Left`, and leaves it out of that view. What it has returned is FINAL everywhere, so the
others need nothing more from it; ops that it has not taken cannot be completed.

To make the group is the same again: a first view, in which no op was called. So a loss while a group is being made is a
loss like others, and a replica that comes back makes it as in its first life, and goes on in its numbering.

A thread drives this in `ftcomm.groups.subgroup_internals`, virtual time in `ftcomm.simulation.subgroup`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.actions import EnterView, Freeze
from ftcomm.control.messages import Progress
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Address, Addresses, Member, View
from ftcomm.transport.group_connection import ENTERED, GroupConnection

_PAUSE = 0.02  # s before a silent member is asked again


class SubgroupProgress(msgspec.Struct, frozen=True, tag=True):
    """The account of a member: where it stands before `epoch`, and where its segment is."""

    epoch: t.Epoch
    address: Address
    progress: Progress


class Left(msgspec.Struct, frozen=True, tag=True):
    """The member has closed the group, after it had returned so many ops: they are FINAL everywhere. It has taken so
    many: others may have returned them, and no member can return one after them. `fresh`: it had just come, and was in
    no view of the group yet, so these numbers say nothing of those of the others."""

    returned: Annotated[int, Meta(ge=0, le=1 << 53)]
    taken: Annotated[int, Meta(ge=0, le=1 << 53)]
    fresh: bool = False


class AskMember(msgspec.Struct, frozen=True):
    """Call a member for its account before the epoch of `view`, or (`entered`) to say that this member runs in it;
    answer with `told`, `left` or `unanswered`. `there` is the nonce of its segment, if known, else empty."""

    view: View
    member: Member
    there: str
    entered: bool


class TellCaller(msgspec.Struct, frozen=True):
    """Give the caller this account, or (None) close its connection: it hears of a newer view, too."""

    call: GroupConnection
    account: SubgroupProgress | None


class ReachMember(msgspec.Struct, frozen=True):
    """Reach the segment at `address` of a member of `view`; answer with `reached`, or `unreachable`."""

    view: View
    member: Member
    address: Address
    severed: bool  # it has lost its connection to this member, which may look whole here


class ReportStall(msgspec.Struct, frozen=True):
    """Report that these members hold up the change to `epoch` for longer than they may, for `lasted` seconds now."""

    epoch: int
    missing: tuple[int, ...]
    lasted: float


class ReturnedElsewhere(msgspec.Struct, frozen=True):
    """A member that has left had returned so many ops: they return here, too, whatever comes."""

    ops: int


class FailGroup(msgspec.Struct, frozen=True):
    """Fail the group: an op was called that cannot be done, since `replica` has closed the group after `ops`."""

    replica: int
    ops: int


DerivedAction = Freeze | AskMember | TellCaller | ReachMember | EnterView | ReportStall | ReturnedElsewhere | FailGroup


class DerivedMembership:
    """The membership of one member. Not thread-safe. Every method but the first returns actions in order. `here` is the
    segment of this member, and `among` are all replicas that may ever be members.

    made: before which step boundary this member made the group, 0 before the first; None in a replica that joins, until
        it is in a view. In a step the scripts of the others make it, too.
    last: how many ops can be done before the group ends, as a member has closed it.
    """

    def __init__(
        self, replica: int, among: Collection[int], here: Address, timeouts: Timeouts, made: int | None = None
    ) -> None:
        self.replica, self.among, self.made = replica, frozenset(among), made
        self.last = float("inf")
        self._in_step, self._over = bool(made), False
        self.epoch = 0  # the epoch that the exchange runs in
        self.view: View | None = None  # the job's newest view, restricted; entered, or about to be
        self._here, self._timeouts = here, timeouts
        self._account: SubgroupProgress | None = None  # what it tells for the newest epoch for which it has stopped
        self._calls: dict[int, GroupConnection] = {}  # calls of members that are ahead
        self._known: dict[int, tuple[str, str]] = {}  # replica -> its incarnation, and the nonce of its segment
        self._accounts: dict[int, SubgroupProgress] = {}  # what the others have told for the epoch of `view`
        self._reaching: set[int] = set()  # members whose segments are to be reached
        self._reached: set[int] = set()  # members whose segments are reached
        self._entered_by: set[int] = set()  # members that have said that they run in `view`
        self._gone: set[str] = set()  # incarnations of members that have closed the group
        self._retries: dict[int, float] = {}  # replica -> when it is asked or reached again
        self._asking: set[int] = set()  # members whose answer for the epoch of `view` is to come
        self._begun = self._said = 0.0  # when the wait for others began, and was last reported

    # -- what happens ------------------------------------------------------------------------------------------------

    def job_entered(self, view: View) -> list[DerivedAction]:
        """Note that a view of the job is in force."""
        if self.made is None:
            self.made = view.step or 0
        if self._over or (self.view is not None and view.epoch <= self.view.epoch):
            return []
        self.view = self._restricted(view)
        self._accounts, self._reaching, self._reached, self._retries = {}, set(), set(), {}
        self._entered_by, self._asking = set(), set()
        return [Freeze(self.view)]

    def quiesced(self, epoch: int, progress: Progress, now: float) -> list[DerivedAction]:
        """Note that the exchange stands still and holds `progress`; `epoch` is the one of the `Freeze` that this
        answers."""
        if self.view is None or epoch != self.view.epoch or self._told(epoch):
            return []
        self._account = account = SubgroupProgress(epoch, self._here, progress)
        due = [call for call in self._calls.values() if call.epoch <= epoch]
        self._calls = {member: call for member, call in self._calls.items() if call.epoch > epoch}
        self._begun = self._said = now
        asks = [self._ask(member) for member in self._others()]
        return [*(_answer(call, account) for call in due), *asks, *self._go_on(now)]

    def accepts(self, call: GroupConnection) -> bool:
        """Whether a call is for this group. A member that has closed it may have made the next group of its name, while
        this one lasts here, whose staging the next one must not take for its own. So it is if the caller knows that the
        others made their last one at a later boundary."""
        if self.made is not None and call.since > self.made:
            return False
        return call.there in ("", self._here.nonce) and self._is_ours(call.member, call.instance, call.nonce)

    def asked(self, call: GroupConnection) -> list[DerivedAction]:
        """Take a call, which was accepted, for the account of this member. While it does not know when it made this
        group, that may be an earlier one than the caller asks for, which asks again."""
        if self._over or (self.made is None and call.since):
            return [TellCaller(call, None)]
        account = self._account
        if call.what == ENTERED and self.is_current(call.epoch):
            self._entered_by.add(call.member)
        if account is not None and call.epoch <= account.epoch:
            return [_answer(call, account)]
        before = self._calls.get(call.member)
        self._calls[call.member] = call
        return [] if before is None else [TellCaller(before, None)]

    def told(self, epoch: int, replica: int, account: SubgroupProgress, now: float) -> list[DerivedAction]:
        """Take the answer of a member that was asked for `epoch`."""
        self._answered(epoch, replica)
        if not self.wants(epoch) or replica in self._accounts:
            return []
        assert self.view is not None
        member = self.view.member(replica)
        assert member is not None
        if account.epoch != epoch or not self._is_ours(replica, member.incarnation, account.address.nonce):
            return self.unanswered(epoch, replica, now)
        self._accounts[replica] = account
        return self._go_on(now)

    def left(self, epoch: int, replica: int, said: Left, returned: int, issued: int, now: float) -> list[DerivedAction]:
        """Note that a member that was asked for `epoch` has closed the group. What it has returned is FINAL here, what
        it has taken may have returned elsewhere and goes on, and no other op can be done. Here so many ops have
        returned, and so many were issued."""
        self._answered(epoch, replica)
        ops = returned if said.fresh else said.taken  # a fresh one leaves what was done before it came
        self.last = min(self.last, ops)
        elsewhere: list[DerivedAction] = [] if said.fresh else [ReturnedElsewhere(said.returned)]
        goes_on = not said.fresh and max(said.returned, returned) < self.last
        if issued > self.last and not goes_on:  # else the op that comes then is a stall
            return [*elsewhere, FailGroup(replica, ops)]
        if not self.is_current(epoch):
            return elsewhere
        assert self.view is not None
        member = self.view.member(replica)
        if member is not None:
            self._gone.add(member.incarnation)
            self.view = self._restricted(self.view)
        return [*elsewhere, *self._go_on(now)] if self.wants(epoch) else elsewhere

    def unanswered(self, epoch: int, replica: int, now: float) -> list[DerivedAction]:
        """Note that a member has not answered: it is not there yet, or gone, which the next view will tell."""
        self._answered(epoch, replica)
        if self.is_current(epoch):
            self._retries[replica] = now + (_PAUSE if self.wants(epoch) else self._timeouts.beat)
        return []

    def reached(self, epoch: int, replica: int, now: float) -> list[DerivedAction]:
        if not self.wants(epoch) or replica not in self._accounts:
            return []
        self._reached.add(replica)
        self._begun = self._said = now
        return self._go_on(now)

    def unreachable(self, epoch: int, replica: int, now: float) -> list[DerivedAction]:
        """Ask a member again whose segment cannot be reached, since it may have closed the group. There is no complaint
        about it: the control plane dials the same port."""
        if self.wants(epoch):
            self._accounts.pop(replica, None)
            self._reaching.discard(replica)
            self._retries[replica] = now + self._timeouts.beat
        return []

    def entered(self, epoch: int) -> list[DerivedAction]:
        """Note that the exchange runs in `epoch`."""
        self.epoch = epoch
        return [self._ask(member) for member in self._others()] if self.is_current(epoch) else []

    def ask(self, replicas: Collection[int]) -> list[DerivedAction]:
        """Ask members for which an op stands still in the view that was entered whether they have closed the group.
        Each has one question at a time, since the answer of a stopped process may take as long as the stall."""
        if self.view is None or self.epoch != self.view.epoch:
            return []
        busy = self._asking | self._retries.keys()
        return [self._ask(m) for m in self._others() if m.replica in replicas and m.replica not in busy]

    def is_needed(self) -> bool:
        """Whether others still have to enter the view that was entered here. A member that was in no view of the group
        yet is needed, too: others may be about to ask for its account, and cannot name its segment, so they would get
        that of its next group of this name. Until it is in a view it cannot say so, for which they wait."""
        if self.view is None or 0 < self.epoch != self.view.epoch:
            return False
        return any(not self.epoch or member.replica not in self._entered_by for member in self._others())

    def due(self) -> float:
        """The time at which `tick` has something to do next."""
        times = [*self._retries.values(), *([self._overdue()] if self.missing() else [])]
        return min(times, default=float("inf"))

    def tick(self, now: float) -> list[DerivedAction]:
        actions: list[DerivedAction] = []
        for replica in [replica for replica, when in self._retries.items() if when <= now]:
            del self._retries[replica]
            assert self.view is not None
            member = self.view.member(replica)
            actions += [] if member is None else [self._ask(member)]
        if (missing := self.missing()) and now >= self._overdue():
            self._said = now
            assert self.view is not None
            actions.append(ReportStall(self.view.epoch, missing, now - self._begun))
        return actions

    def missing(self) -> tuple[int, ...]:
        """Returns the members whose account, or whose segment, is still to come."""
        if self.view is None or self.epoch == self.view.epoch or not self._told(self.view.epoch):
            return ()
        others = [member.replica for member in self._others()]
        silent = tuple(replica for replica in others if replica not in self._accounts)
        return silent or tuple(replica for replica in others if replica not in self._reached)

    @property
    def is_fresh(self) -> bool:
        """Whether this member was in no view of the group yet."""
        return not self.epoch

    def segments(self) -> tuple[str, ...]:
        """Returns the nonces of the segments in this group, as far as they are known."""
        return (self._here.nonce, *(nonce for _, nonce in self._known.values()))

    def close(self) -> list[DerivedAction]:
        """End the group: no caller gets an account any more."""
        calls, self._calls = self._calls, {}
        self._retries, self._over = {}, True
        return [TellCaller(call, None) for call in calls.values()]

    # -- what follows ------------------------------------------------------------------------------------------------

    def _restricted(self, view: View) -> View:
        members = (m for m in view.members if m.replica in self.among and m.incarnation not in self._gone)
        return msgspec.structs.replace(view, members=tuple(members))

    def _others(self) -> list[Member]:
        assert self.view is not None
        return [member for member in self.view.members if member.replica != self.replica]

    def _told(self, epoch: int) -> bool:
        """Whether this member has stopped for `epoch`."""
        return self._account is not None and self._account.epoch == epoch

    def wants(self, epoch: int) -> bool:
        """Whether the view of `epoch` is to be entered, and was not. Any thread."""
        return self.is_current(epoch) and epoch != self.epoch

    def is_current(self, epoch: int) -> bool:
        """Whether the view of `epoch` is the newest. Any thread."""
        return self.view is not None and self.view.epoch == epoch

    def _is_ours(self, member: int, incarnation: str, nonce: str) -> bool:
        """Whether a member speaks for this group: it keeps the same segment here for life."""
        known = self._known.get(member)
        if known is None or known[0] != incarnation:
            self._known[member] = known = (incarnation, nonce)
        return known[1] == nonce

    def _answered(self, epoch: int, replica: int) -> None:
        if self.is_current(epoch):
            self._asking.discard(replica)

    def _ask(self, member: Member) -> AskMember:
        assert self.view is not None
        incarnation, nonce = self._known.get(member.replica, ("", ""))
        there = nonce if incarnation == member.incarnation else ""
        self._asking.add(member.replica)
        return AskMember(self.view, member, there, entered=self.epoch == self.view.epoch)

    def _reach(self, member: Member) -> ReachMember:
        assert self.view is not None
        account = self._accounts[member.replica]
        return ReachMember(self.view, member, account.address, self.replica in account.progress.severed)

    def _go_on(self, now: float) -> list[DerivedAction]:
        """Go on after a member has told, or was reached."""
        assert self.view is not None
        assert self._account is not None
        others = self._others()
        if not all(member.replica in self._accounts for member in others):
            return []
        reach = [self._reach(member) for member in others if member.replica not in self._reaching]
        if reach:
            self._begun = self._said = now
            self._reaching |= self._accounts.keys()
            return list(reach)
        if not all(member.replica in self._reached for member in others):
            return []
        accounts = {**self._accounts, self.replica: self._account}
        nobody = not self.view.contributing
        members = tuple(
            Member(m.replica, m.incarnation, Addresses.of((accounts[m.replica].address,)), m.contributing or nobody)
            for m in self.view.members
        )
        view = msgspec.structs.replace(self.view, members=members)
        return [EnterView(view, {replica: account.progress for replica, account in accounts.items()})]

    def _overdue(self) -> float:
        """Returns when a stall is reported next. After a loss all hear of the view at once. Otherwise a member waits
        for the scripts of others. When the group is made before the first step, or this member has just come, that has
        no limit."""
        if not self.epoch and not self._in_step:
            return float("inf")
        assert self.view is not None
        timeout = self._timeouts.op_floor if self.epoch and not self.view.proposal else self._timeouts.op
        return max(self._said + REPORT, self._begun + timeout)


def _answer(call: GroupConnection, account: SubgroupProgress) -> TellCaller:
    return TellCaller(call, account if call.epoch == account.epoch else None)
