"""The leader: speaks for the ranks of one replica, and agrees with the other leaders at a step boundary.

A pure state machine; it lives in rank 0 of its replica. Views of a loss pass straight through to the ranks. A change of
membership at the boundary of step m is agreed on without waiting for the coordinator:

    coordinator        Prepare(P, m)    are all your ranks before m?         each leader: Promise
    coordinator        NewView(P)       the commit, when all have promised
    at the boundary    Boundary(P, v)   each leader tells the others whether it holds the commit (v) or not (None)
                       one holds it  -> all install it
                       nobody does   -> all withdraw together and train on; the coordinator is told

A leader that has said None does not take the commit from the coordinator any more, only from another leader. One that
is not bound to P answers None at once and will not promise it any more. So either all install it or nobody runs in it,
and nobody waits at the boundary for anyone but the other members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.detector import Detector
from ftcomm.control.liveness import described
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View


@dataclasses.dataclass(frozen=True)
class ToCoordinator:
    message: m.Message


@dataclasses.dataclass(frozen=True)
class ToRank:
    rank: int
    message: m.Message


@dataclasses.dataclass(frozen=True)
class ToLeader:
    """To the leader of another replica, a member of the view in force."""

    replica: int
    message: m.Boundary


Action = ToCoordinator | ToRank | ToLeader

MANY = 256  # proposals of one view that we keep an answer for; far more than there can be


@dataclasses.dataclass
class _Change:
    """What this replica knows of one proposal."""

    number: int
    step: int
    epoch: int  # of the view that it replaces
    promised: set[int] = dataclasses.field(default_factory=set)  # ranks
    bound: bool = False  # all ranks have promised, and so have we
    commit: View | None = None
    asked: set[int] = dataclasses.field(default_factory=set)  # ranks that stand at the boundary
    heard: dict[int, View | None] = dataclasses.field(default_factory=dict)  # what the other leaders said
    said_none: bool = False
    decided: bool = False


class Leader:
    """Not thread-safe; every method returns actions in order."""

    def __init__(
        self,
        replica: int,
        incarnation: str,
        ranks: int,
        timeouts: Timeouts,
        state: Callable[[Address], str] = lambda there: "",
    ) -> None:
        """`state` tells what a process does, where that can be seen, see `ftcomm.control.liveness.state_of`."""
        self.detector: Detector[int] = Detector(timeouts.unheard)  # of our other ranks
        self._state = state
        self._timeouts = timeouts
        self.replica = replica
        self.incarnation = incarnation
        self.ranks = ranks
        self.addresses: dict[int, Address] = {}
        self._foreign: set[int] = set()  # ranks of an earlier life of the replica
        self.view: View | None = None  # the newest view that this replica runs in
        self.steps: dict[int, int] = {}
        self._deaf: dict[int, str] = {}  # who does not hear us, though we hear it
        self._looks = m.Heartbeat(-1)  # what we said of our ranks last
        self.change: _Change | None = None
        self._given: dict[str, m.Message] = {}  # the last of each kind that all ranks were told at once, see `_again`
        self._refused: set[int] = set()  # proposals that we have told another leader we hold nothing of
        self._answered: set[tuple[int, int]] = set()  # (proposal, replica) that was told so
        self._installed: dict[int, int] = {}  # rank -> epoch
        self.epoch = 0  # the newest view that all our ranks have installed
        self.heard = 0  # the newest that we were told of
        self._told: dict[str, set[int]] = {"Ready": set(), "CaughtUp": set(), "Finished": set()}
        self.ready = False  # the scripts of all our ranks are
        self.caught_up = False  # they hold the state of everybody
        self.finished = False
        self.leaving = False
        self._dismissed = False

    # -- the coordinator -----------------------------------------------------------------------------------------

    def join(self) -> m.Join | None:
        """What to say first on a connection to the coordinator; None until all ranks have said hello, and from the
        moment on at which it has sent us away."""
        if len(self.addresses) < self.ranks or self._dismissed:
            return None
        addresses = tuple(self.addresses[rank] for rank in range(self.ranks))
        timeouts = dataclasses.astuple(self._timeouts)
        return m.Join(
            self.replica,
            self.incarnation,
            addresses,
            self.epoch,
            self.step,
            timeouts,
            leaving=self.leaving,
            ready=self.ready,
            caught_up=self.caught_up,
            heard=self.heard,
        )

    @property
    def step(self) -> int:
        return max(self.steps.values(), default=-1)

    def tick(self, now: float) -> list[Action]:
        """To be called several times per heartbeat timeout: our sign of life, and how our ranks are. Silence of one
        proves nothing, so the coordinator decides; what lasts for longer than any op may is our own end."""
        silent = self.detector.silent(now)
        self._looks = m.Heartbeat(self.step, self._mute(now), self._divided(silent))
        actions: list[Action] = [ToCoordinator(self._looks)]
        actions += [ToRank(rank, m.Ping()) for rank in range(1, self.ranks)]
        for rank, seconds in silent.items():
            if seconds > self._timeouts.give_up:
                self.detector.forget(rank)
                actions += self.rank_lost(rank, f"silent for {seconds:.1f} s")
        return actions

    def _mute(self, now: float) -> str:
        """What those of our ranks do that live and do not speak: the coordinator hears of it by us alone."""
        words = (
            f"its rank {rank}: {described(seconds, self._state(self.addresses[rank]))}"
            for rank, seconds in self.detector.mute(now).items()
            if rank in self.addresses
        )
        return next(words, "")

    def _divided(self, silent: dict[int, float]) -> str:
        """Of whom neither the process nor the kernel is heard: it, its host or the network in between is gone."""
        if self.finished:
            return ""
        words = {**self._deaf, **{rank: f"has been silent for {seconds:.1f} s" for rank, seconds in silent.items()}}
        return next((f"its rank {rank} {why}" for rank, why in words.items() if rank not in self._told["Finished"]), "")

    def from_coordinator(self, message: m.Message) -> list[Action]:
        if isinstance(message, m.NewView):
            return self._new_view(message.view)
        if isinstance(message, m.Prepare):
            return self._prepare(message)
        if isinstance(message, m.Cancel):
            if self.change is not None and self.change.number == message.proposal and not self.change.decided:
                return self._decide(None)
            return []
        if isinstance(message, m.Queued | m.Registered | m.Dismissed | m.Expelled | m.WhoWaits | m.FinishAck):
            self._dismissed = self._dismissed or isinstance(message, m.Dismissed)
            return self._give(message)
        return []

    def _new_view(self, view: View) -> list[Action]:
        self.heard = max(self.heard, view.epoch)
        if self.view is not None and view.epoch <= self.view.epoch:
            return []
        if view.proposal == 0 or self.view is None:  # in force at once, or our first: no boundary to wait for
            self.change = None
            self._refused.clear()
            self._answered.clear()
            self.view = view if view.has(self.replica, self.incarnation) else None
            return self._give(m.NewView(view))
        change = self.change
        if change is None or change.number != view.proposal or (change.decided and change.commit is None):
            return [ToCoordinator(m.Withdrawn(view.proposal))]
        if change.said_none or change.decided:
            return []  # the leaders settle it among themselves
        change.commit = view
        return self._agree()

    def _prepare(self, prepare: m.Prepare) -> list[Action]:
        if self.view is None or prepare.epoch != self.view.epoch:
            return []  # of a view that we have not heard of yet, or of an older one: the coordinator asks again
        if self.step >= prepare.step or prepare.proposal in self._refused or len(self._refused) >= MANY:
            return [ToCoordinator(m.Promise(prepare.proposal, False, self.step))]
        # One view has one proposal at a time: a new one means that the old one was never committed.
        given_up = [] if self.change is None or self.change.decided else self._decide(None)
        self.change = _Change(prepare.proposal, prepare.step, prepare.epoch)
        return [*given_up, *self._to_ranks(prepare)]

    # -- the ranks -----------------------------------------------------------------------------------------------

    def from_rank(self, rank: int, message: m.Message) -> list[Action]:
        if isinstance(message, m.Hello):
            return self._hello(rank, message)
        if rank in self._foreign:
            return []
        if isinstance(message, m.Heartbeat):
            first = self.step < 0 <= message.step
            self.steps[rank] = max(message.step, self.steps.get(rank, -1))
            self._deaf.pop(rank, None)
            if message.divided:
                self._deaf[rank] = message.divided
            return [ToCoordinator(msgspec.structs.replace(self._looks, step=self.step))] if first else []
        if isinstance(message, m.Promise):
            return self._promised(rank, message)
        if isinstance(message, m.AtBoundary):
            return self._at_boundary(rank, message)
        if isinstance(message, m.Installed):
            self._installed[rank] = message.epoch
            if sum(epoch == message.epoch for epoch in self._installed.values()) < self.ranks:
                return []
            self.epoch = message.epoch
            return [ToCoordinator(message)]
        if isinstance(message, m.Leave):
            self.leaving = True
            return [ToCoordinator(message)]
        if isinstance(message, m.Finished) and not message.ok:
            return self.rank_lost(rank, message.reason)
        if isinstance(message, m.Ready) and self.ready:
            return []  # said again
        if isinstance(message, m.Ready | m.CaughtUp | m.Finished):
            told = self._told[type(message).__name__]
            told.add(rank)
            if len(told) < self.ranks:
                return self._wait_for_siblings(rank, told) if isinstance(message, m.Ready) else []
            told.clear()
            self.ready = self.ready or isinstance(message, m.Ready)
            self.caught_up = self.caught_up or isinstance(message, m.CaughtUp)
            self.finished = self.finished or isinstance(message, m.Finished)
            return [ToCoordinator(message)]
        if isinstance(message, m.Suspect | m.Reachable | m.Stalled | m.Report):
            return [ToCoordinator(message)]
        return []

    def _hello(self, rank: int, hello: m.Hello) -> list[Action]:
        """The ranks of a replica live and die as one: none goes on with the next life of another."""
        welcome: list[Action] = [ToRank(rank, m.Welcome(self.incarnation))]
        if hello.incarnation not in ("", self.incarnation):
            self._foreign.add(rank)
            return welcome  # by which it ends
        self._foreign.discard(rank)
        known = self.addresses.get(rank)
        if known == hello.address:
            return [*welcome, *self._again(rank)]
        if known is not None and len(self.addresses) == self.ranks:
            return self.rank_lost(rank, "it was started again, and its replica was not")
        self.addresses[rank] = hello.address
        join = self.join()
        return [*welcome, ToCoordinator(join)] if join is not None else welcome

    def _again(self, rank: int) -> list[Action]:
        """Its connection was made anew: say once more what may have been lost. It says its own part again, too."""
        given: list[Action] = [ToRank(rank, message) for message in self._given.values()]
        change = self.change
        if change is not None and not change.decided and rank not in change.promised:
            given.append(ToRank(rank, m.Prepare(change.number, change.epoch, change.step)))
        return given

    def _wait_for_siblings(self, rank: int, ready: set[int]) -> list[Action]:
        missing = ", ".join(str(other) for other in range(self.ranks) if other not in ready)
        reason = f"joins when all ranks of this replica are ready for it; missing: {missing}"
        return [ToRank(rank, m.Queued(reason, m.Stage.JOINING))]

    def rank_lost(self, rank: int, reason: str) -> list[Action]:
        """The replica is the unit of failure: without one of its ranks it is lost."""
        if self.finished or rank in self._told["Finished"]:
            return []
        text = f"its rank {rank} is lost: {reason}"
        return [
            ToCoordinator(m.Suspect(self.replica, self.incarnation, text, True)),
            *self._to_ranks(m.Expelled(f"replica {self.replica} cannot go on: {text}")),
        ]

    def rank_refused(self, rank: int, reason: str) -> list[Action]:
        """Another host refuses it. So it does when its process has ended, and so does what may be in between: the
        coordinator, who sees more of the network, decides."""
        if self.finished or rank in self._told["Finished"]:
            return []
        text = f"its rank {rank} is lost: {reason}"
        return [ToCoordinator(m.Suspect(self.replica, self.incarnation, text, False, rank))]

    def _promised(self, rank: int, promise: m.Promise) -> list[Action]:
        self.steps[rank] = max(promise.step, self.steps.get(rank, -1))
        change = self.change
        if change is None or change.number != promise.proposal or change.decided:
            return []
        if not promise.ok:
            actions = self._decide(None)
            return [*actions, ToCoordinator(m.Promise(promise.proposal, False, self.step))]
        change.promised.add(rank)
        if len(change.promised) < self.ranks:
            return []
        change.bound = True
        return [ToCoordinator(m.Promise(change.number, True, self.step))]

    def _at_boundary(self, rank: int, message: m.AtBoundary) -> list[Action]:
        change = self.change
        if change is None or change.number != message.proposal:
            return [ToRank(rank, m.Decision(message.proposal, None))]  # given up meanwhile
        first = not change.asked
        change.asked.add(rank)
        if not change.decided:
            return self._agree(first)
        if change.commit is None or change.commit.has(self.replica, self.incarnation):
            return [ToRank(rank, m.Decision(change.number, change.commit))]
        return self._leave(change.number, change.commit)

    # -- the other leaders ---------------------------------------------------------------------------------------

    def from_leader(self, message: m.Boundary) -> list[Action]:
        change = self.change
        ours = change is not None and (change.number, change.epoch) == (message.proposal, message.epoch)
        if self.view is None or not (ours or message.epoch == self.view.epoch):
            return []
        if change is not None and ours and not change.decided:
            if message.replica in self.view.replicas:
                change.heard[message.replica] = message.view
            return self._agree()
        known = change.commit if change is not None and ours else None
        if len(self._refused) < MANY:
            self._refused.add(message.proposal)
        answered = (message.proposal, message.replica) in self._answered or len(self._answered) >= 16 * MANY
        if message.view is not None or answered:
            return []
        if known is None:
            self._answered.add((message.proposal, message.replica))
        return [ToLeader(message.replica, m.Boundary(self.replica, message.epoch, message.proposal, known))]

    def again(self, replica: int) -> list[Action]:
        """The link to another leader was made anew: say once more what may have been lost."""
        change, view = self.change, self.view
        if view is None:
            return []
        answered = [number for number, asker in self._answered if asker == replica]
        said = {number: m.Boundary(self.replica, view.epoch, number, None) for number in answered}
        if change is not None and (change.said_none or change.decided):
            said[change.number] = m.Boundary(self.replica, change.epoch, change.number, change.commit)
        return [ToLeader(replica, said[number]) for number in sorted(said)]

    def waiting(self) -> tuple[int, ...]:
        """Whose word we wait for at a boundary."""
        change, view = self.change, self.view
        if change is None or view is None or change.decided or not change.asked:
            return ()
        return tuple(replica for replica in view.replicas if replica != self.replica and replica not in change.heard)

    def _agree(self, first: bool = False) -> list[Action]:
        """At the boundary: tell the others what we hold, and decide as soon as the answer cannot change."""
        change, view = self.change, self.view
        assert change is not None
        assert view is not None
        if change.decided or not change.asked:
            return []
        others = [replica for replica in view.replicas if replica != self.replica]
        if change.commit is None:
            change.commit = next((seen for seen in change.heard.values() if seen is not None), None)
        actions: list[Action] = []
        if change.commit is not None or first:
            said = m.Boundary(self.replica, change.epoch, change.number, change.commit)
            actions += [ToLeader(replica, said) for replica in others]
            change.said_none = change.said_none or change.commit is None
        if change.commit is not None:
            return [*actions, *self._decide(change.commit)]
        if all(replica in change.heard for replica in others):
            return [*actions, *self._decide(None), ToCoordinator(m.Withdrawn(change.number))]
        return actions

    def _decide(self, view: View | None) -> list[Action]:
        change = self.change
        assert change is not None
        change.decided, change.commit = True, view
        if view is not None and not view.has(self.replica, self.incarnation):
            return self._leave(change.number, view)
        asked: list[Action] = [ToRank(rank, m.Decision(change.number, view)) for rank in sorted(change.asked)]
        if view is not None:
            self.view = view  # the ranks that are still under way ask later
            self._refused.clear()  # nobody asks for a promise of the view before any more
            self._answered.clear()
            return asked
        freed = [ToRank(r, m.Cancel(change.number)) for r in range(self.ranks) if r not in change.asked]
        if self.view is None or change.said_none:
            return [*asked, *freed]
        said = m.Boundary(self.replica, change.epoch, change.number, None)
        return [*asked, *freed, *[ToLeader(replica, said) for replica in change.heard]]  # they stand and wait for it

    def _leave(self, number: int, view: View) -> list[Action]:
        """The replica leaves as one, when all its ranks stand at the boundary: nobody can come back from that."""
        assert self.change is not None
        if len(self.change.asked) < self.ranks:
            return []
        return self._to_ranks(m.Decision(number, view))

    def _give(self, message: m.Message) -> list[Action]:
        """To all ranks, and to one whose connection breaks once more: it may have been lost."""
        if not isinstance(message, m.WhoWaits | m.Queued):  # these are of the moment
            self._given[type(message).__name__] = message
        return self._to_ranks(message)

    def _to_ranks(self, message: m.Message) -> list[Action]:
        return [ToRank(rank, message) for rank in range(self.ranks)]
