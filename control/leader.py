"""The leader: speaks for the ranks of one replica, and agrees with the other leaders at a step boundary.

A pure state machine, which `ftcomm.control.leader_node` holds. Views of a loss pass straight through to the ranks. A
change of membership at the boundary of step m is agreed on without waiting for the coordinator:

    coordinator        Prepare(P, m)    are all your ranks before m?         each leader: Promise
    coordinator        NewView(P)       the commit, when all have promised
    at the boundary    Boundary(P, v)   each leader tells the others whether it holds the commit (v) or not (None)
                       one holds it  -> all install it
                       nobody does   -> all withdraw together and train on; the coordinator is told

A leader that has said None does not take the commit from the coordinator any more, only from another leader. One that
is not bound to P answers None at once and will not promise it any more. So either all install it or nobody runs in it,
and nobody waits at the boundary for anyone but the other members.

A leader speaks when all its ranks stand at the boundary. Who stays installs the commit when all have spoken who leave:
a rank that leaves may still be in the op before the boundary, and what it waits for is not said in a newer view.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.detector import Detector
from ftcomm.control.liveness import agent_described, described
from ftcomm.control.replica_reports import RESUMED, Installs, Losses, Resumptions
from ftcomm.control.script_end import ScriptEnd
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import NO_ADDRESSES, Address, Addresses, Member, View


class ToCoordinator(msgspec.Struct, frozen=True):
    message: m.Message


class ToRank(msgspec.Struct, frozen=True):
    shard: int
    message: m.Message


class ToPeerLeader(msgspec.Struct, frozen=True):
    """A message to the leader of another replica, a member of the view in force."""

    replica: int
    message: m.Boundary


LeaderAction = ToCoordinator | ToRank | ToPeerLeader

_FROM_EACH = (m.Ready, m.CaughtUp, m.Finished)  # what counts when all ranks have said it
_PASSED_UP = (m.Reachable, m.Stalled)

NAMED = 64  # at most so many of the ranks that have not come are named
MANY = 256  # proposals of one view that a leader remembers; far more than there can be


@dataclasses.dataclass
class _Change:
    """Keeps what this replica knows of one proposal."""

    number: int
    step: int
    epoch: int  # the view that the change replaces
    loop: int  # the step loop in which the joiners wait
    joins: tuple[Member, ...] = ()
    promised: set[int] = dataclasses.field(default_factory=set)  # shards of the ranks that have promised
    bound: bool = False  # all ranks have promised, so the leader has too
    commit: View | None = None
    later: bool = False  # the boundary is of a later loop than that of the joiners, so the commit is refused
    asked: set[int] = dataclasses.field(default_factory=set)  # shards of the ranks that stand at the boundary
    heard: dict[int, View | None] = dataclasses.field(default_factory=dict)  # what the other leaders said
    said_none: bool = False
    said_commit: bool = False
    decided: bool = False
    decision: m.Decision | None = None  # the answer to each rank that asks, once it is decided


class Leader:
    """The state machine of one replica. Not thread-safe. Every method returns actions in order."""

    def __init__(
        self,
        replica: int,
        incarnation: str,
        ranks: int,
        timeouts: Timeouts,
        state: Callable[[Address], str] = lambda there: "",
        processes: str = "",
    ) -> None:
        """`state` tells what a process does, where this host can see it (`ftcomm.control.liveness.state_of`).
        `processes` are those whose end the leader sees by itself (`Address.processes`)."""
        self._beats = timeouts.beats(ranks)
        self._beat = 0  # the next of `_beats`; with 0 all ranks get a sign of life
        self.detector: Detector[int] = Detector(self._beats * timeouts.unheard)  # the ranks, by shard
        self.agents: Detector[range] = Detector(self._beats * timeouts.unheard)  # host agents, by their ranks
        self._state = state
        self._timeouts = timeouts
        self.replica = replica
        self.incarnation = incarnation
        self.welcome = m.Welcome(incarnation, processes)  # the answer to a rank
        self.ranks = ranks
        self.addresses: dict[int, Address] = {}
        self._replicas: dict[int, int] = {}  # by rank: how many replicas the job has, as that rank was told
        self.view: View | None = None  # the newest view that this replica runs in
        self.preview: View | None = None  # the members and this replica, as a running job told them last
        self.step = -1  # the last boundary that any rank has passed
        self.loop = 0  # the newest step loop of any rank
        self._deaf: dict[int, str] = {}  # ranks that do not hear this leader, though it hears them
        self._looks = m.Heartbeat(-1)  # the last heartbeat
        self.change: _Change | None = None
        self._given: dict[str, m.Message] = {}  # the last message of each kind to all ranks, see `_again`
        self._refused: set[int] = set()  # proposals of which this leader has told another one that it holds nothing
        self._answered: set[tuple[int, int]] = set()  # (proposal, replica) of the leaders that were told so
        self._installed = Installs(ranks)
        self._losses, self._resumptions = Losses(), Resumptions(ranks)
        self.epoch = 0  # the newest view that all ranks have installed
        self.heard = 0  # the newest view that this leader was told of
        self._news: m.Queued | None = None  # news for all ranks but shard 0, with the next beat
        self._early: set[int] = set()  # ranks but shard 0 that hear with the next beat that they wait for others
        self._told: dict[str, set[int]] = {"Ready": set(), "CaughtUp": set(), "Finished": set()}
        self.ready = False  # the scripts of all ranks are ready
        self._loops: dict[int, int] = {}  # by rank: the step loop in which it waits to join
        self._behind = 0  # loops before this one are over
        self.caught_up = False  # all ranks hold the state of all members
        self.finished = False
        self.leaving = False
        self._dismissed = False
        self._lost = False  # a rank of this replica is lost

    # -- the coordinator -----------------------------------------------------------------------------------------

    def join(self) -> m.Join | None:
        """Returns the first message on a connection to the coordinator: None until all ranks have said hello, and again
        None once the coordinator has sent this replica away, or a rank of it is lost and no view has it."""
        if len(self.addresses) < self.ranks or self._dismissed or (self._lost and self.view is None):
            return None
        addresses = Addresses.of(self.addresses[shard] for shard in range(self.ranks))
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
            loop=self._stands_in,
            replicas=next((said for said in self._replicas.values() if said != self._replicas[0]), self._replicas[0]),
        )

    def tick(self, now: float, unheard: float = 0.0) -> list[LeaderAction]:
        """Send a sign of life, and tell how the ranks are; the ranks are told for how many seconds the coordinator is
        `unheard`. The caller does so several times per heartbeat timeout. The silence of a rank proves nothing, so the
        coordinator decides; but a rank that is silent for longer than any op may take ends the replica."""
        silent = self.detector.silent(now)
        self._looks = m.Heartbeat(self.step, self._mute(now), self._divided(silent), self._stands_in)
        actions: list[LeaderAction] = [ToCoordinator(self._looks)]
        actions += [ToCoordinator(said) for said in self._losses.tick(self.view)]
        ping = m.Ping(unheard)
        actions += self._to_ranks(ping) if self.asks_all else [ToRank(0, ping)]
        self._beat = (self._beat + 1) % self._beats
        actions += self._late_news()
        for shard, seconds in silent.items():
            if seconds > self._timeouts.give_up:
                self.detector.forget(shard)
                actions += self.rank_lost(shard, f"silent for {seconds:.1f} s")
        return actions

    def _late_news(self) -> list[LeaderAction]:
        """Tell all ranks but shard 0 what they wait for, if they still do: most of that is over before a beat is, and
        would cost a message to each of thousands."""
        news, self._news = self._news, None
        told = [] if news is None else [ToRank(shard, news) for shard in range(1, self.ranks)]
        early, self._early = self._early & self._told["Ready"], set()
        return [*told, *self._wait_for_siblings(sorted(early))]

    @property
    def asks_all(self) -> bool:
        """Whether all ranks get a sign of life with the next `tick`; otherwise shard 0 alone does."""
        return self._beat == 0

    def _mute(self, now: float) -> str:
        """Describe a rank, or the agent of a host, that lives and does not speak: the coordinator hears of it from this
        leader alone."""
        self.agents.silent(now)
        for shards, seconds in self.agents.mute(now).items():
            return agent_described(shards, seconds)
        mute = (
            f"its shard {shard}: {described(seconds, self._state(self.addresses[shard]))}"
            for shard, seconds in self.detector.mute(now).items()
            if shard in self.addresses
        )
        return next(mute, "")

    def _divided(self, silent: dict[int, float]) -> str:
        """Name a rank of which neither the process nor the kernel is heard: the rank, its host or the network in
        between is gone."""
        if self.finished:
            return ""
        silences = {shard: f"has been silent for {seconds:.1f} s" for shard, seconds in silent.items()}
        for shard, why in {**self._deaf, **silences}.items():
            if shard not in self._told["Finished"]:
                return f"its shard {shard} {why}"
        return ""

    def from_coordinator(self, message: m.Message) -> list[LeaderAction]:
        if isinstance(message, m.NewView):
            return self._new_view(message.view)
        if isinstance(message, m.Prepare):
            return self._prepare(message)
        if isinstance(message, m.Cancel):
            if self.change is not None and self.change.number == message.proposal and not self.change.decided:
                return self._decide(None)
            return []
        if isinstance(message, m.Behind):
            return [*self._give(message), *self._send_on(message.loop)]
        if isinstance(message, m.Queued | m.Registered | m.Dismissed | m.Removed | m.WhoWaits | m.FinishAck):
            self._dismissed = self._dismissed or isinstance(message, m.Dismissed)
            self.preview = message.view if isinstance(message, m.Registered) else self.preview
            return self._give(message)
        return []

    def _send_on(self, loop: int) -> list[LeaderAction]:
        """Wait for the ranks that stand before `loop`; one that was told of it before them says nothing any more."""
        self._behind = loop
        there = {shard for shard, at in self._loops.items() if not 0 < at < loop}
        self.ready = len(there) == self.ranks
        self._told["Ready"] = set() if self.ready else there
        return [ToCoordinator(m.Ready(self._ready_in))] if self.ready else []

    def _new_view(self, view: View) -> list[LeaderAction]:
        self.heard = max(self.heard, view.epoch)
        if self.view is not None and view.epoch <= self.view.epoch:
            return []
        if view.proposal == 0 or self.view is None:  # in force at once, or the first view
            self.change = None
            self._refused.clear()
            self._answered.clear()
            self.view = view if view.has(self.replica, self.incarnation) else None
            return self._give(m.NewView(view))
        change = self.change
        if change is None or change.number != view.proposal or (change.decided and change.commit is None):
            return [ToCoordinator(m.Withdrawn(view.proposal))]
        if change.said_none or change.later or change.decided:
            return []  # the leaders settle this among themselves
        change.commit = view
        return self._agree()

    def _prepare(self, prepare: m.Prepare) -> list[LeaderAction]:
        if self.view is None or prepare.epoch != self.view.epoch:
            return []  # a view that is not known yet, or an older one: the coordinator asks again
        if self.step >= prepare.step or prepare.proposal in self._refused or len(self._refused) >= MANY:
            return [ToCoordinator(m.Promise(prepare.proposal, False, self.step))]
        # One view has one proposal at a time: a new one means that the old one was never committed.
        given_up = [] if self.change is None or self.change.decided else self._decide(None)
        self.change = _Change(prepare.proposal, prepare.step, prepare.epoch, prepare.loop, prepare.joins)
        return [*given_up, *self._to_ranks(msgspec.structs.replace(prepare, joins=()))]

    # -- the ranks -----------------------------------------------------------------------------------------------

    def from_rank(self, shard: int, message: m.Message) -> list[LeaderAction]:
        if isinstance(message, m.Hello):
            return self._hello(shard, message)
        if isinstance(message, m.Heartbeat):
            first = self.step < 0 <= message.step or message.loop > self.loop
            self.step = max(self.step, message.step)
            self.loop = max(self.loop, message.loop)
            self._deaf.pop(shard, None)
            if message.divided:
                self._deaf[shard] = message.divided
            if not first:
                return []
            return [ToCoordinator(msgspec.structs.replace(self._looks, step=self.step, loop=self._stands_in))]
        if isinstance(message, m.Promise):
            return self._promised(shard, message)
        if isinstance(message, m.AtBoundary):
            return self._at_boundary(shard, message)
        if isinstance(message, m.Installed):
            reported = self._reported(shard, message.report) if message.report is not None else []
            if not self._installed.by_all(shard, message.epoch):
                return reported
            self.epoch = message.epoch
            return [ToCoordinator(m.Installed(message.epoch)), *reported]
        if isinstance(message, m.Leave):
            first, self.leaving = not self.leaving, True
            return [ToCoordinator(message)] if first else []
        if isinstance(message, m.Finished) and not message.ok:
            return self.rank_lost(shard, message.reason, message.script)
        if isinstance(message, m.Ready):
            if self.ready or 0 < message.loop < self._behind:
                return []  # a repetition
            self._loops[shard] = message.loop
        if isinstance(message, _FROM_EACH):
            told = self._told[type(message).__name__]
            told.add(shard)
            if len(told) < self.ranks:
                if shard == 0 and isinstance(message, m.Ready):
                    return self._wait_for_siblings([0])
                self._early |= {shard} if isinstance(message, m.Ready) else set()
                return []
            told.clear()
            self.ready = self.ready or isinstance(message, m.Ready)
            self.caught_up = self.caught_up or isinstance(message, m.CaughtUp)
            self.finished = self.finished or isinstance(message, m.Finished)
            return [ToCoordinator(m.Ready(self._ready_in) if isinstance(message, m.Ready) else message)]
        if isinstance(message, m.Suspect | m.Severed):
            return [ToCoordinator(message)] if self._losses.is_news(message) else []
        if isinstance(message, m.Report):
            return self._reported(shard, message)
        if isinstance(message, m.Reachable):
            self._losses.reached(message.replica, shard)
        if isinstance(message, _PASSED_UP):
            return [ToCoordinator(message)]
        return []

    def _reported(self, shard: int, report: m.Report) -> list[LeaderAction]:
        """Pass a report on; the slowest rank speaks for all that go on in a view."""
        told = self._resumptions.by_all(shard, report) if report.kind == RESUMED else report
        return [ToCoordinator(told)] if told is not None else []

    def _hello(self, shard: int, hello: m.Hello) -> list[LeaderAction]:
        """Take in a rank of this life."""
        welcome: list[LeaderAction] = [ToRank(shard, self.welcome)]
        known = self.addresses.get(shard)
        if known == hello.address:
            return [*welcome, *self._again(shard)]
        if known is not None and len(self.addresses) == self.ranks:
            return self.rank_lost(shard, "it was started again, and its replica was not")
        self.addresses[shard], self._replicas[shard] = hello.address, hello.replicas
        join = self.join()
        return [*welcome, *(self._again(shard) if join is None else [ToCoordinator(join)])]

    @property
    def _ready_in(self) -> int:
        """The step loop in which the ranks wait to join. They do in the same; 0 if one of them does outside of any."""
        return min(self._loops.values(), default=0)

    @property
    def _stands_in(self) -> int:
        return self._ready_in if self.ready and not self.epoch else self.loop

    def _again(self, shard: int) -> list[LeaderAction]:
        """Repeat to a rank with a new connection what may have been lost. The rank repeats its own part, too."""
        given: list[LeaderAction] = [ToRank(shard, message) for message in self._given.values()]
        change = self.change
        if change is not None and not change.decided and shard not in change.promised:
            given.append(ToRank(shard, m.Prepare(change.number, change.epoch, change.step, change.loop)))
        return given

    def _wait_for_siblings(self, shards: list[int]) -> list[LeaderAction]:
        """Tell ranks that are ready for which others they wait."""
        if not shards:
            return []
        ready = self._told["Ready"]
        count = self.ranks - len(ready)
        missing = f"{count} of {self.ranks}"
        if count <= NAMED:
            missing = ", ".join(str(other) for other in range(self.ranks) if other not in ready)
        reason = f"joins when all ranks of this replica are ready for it; missing: {missing}"
        queued = m.Queued(reason, m.Stage.JOINING)
        return [ToRank(shard, queued) for shard in shards]

    @property
    def is_lost(self) -> bool:
        """Whether one of its ranks is lost, so that the replica ends."""
        return self._lost

    def rank_lost(self, shard: int, reason: str, script: ScriptEnd | None = None) -> list[LeaderAction]:
        """The replica is the unit of failure: without one of its ranks it is lost. `script` is how that of the rank has
        ended, if it is known."""
        if self._lost or self.finished or shard in self._told["Finished"]:
            return []
        self._lost = True
        text = f"its shard {shard} is lost: {reason}"
        return [
            ToCoordinator(m.Suspect(self.replica, self.incarnation, text, True, script=script)),
            *self._give(m.Removed(f"replica {self.replica} cannot go on: {text}")),
        ]

    def rank_refused(self, shard: int, reason: str) -> list[LeaderAction]:
        """Report a rank that another host refuses. That host does so when the process has ended, but something in
        between may refuse as well: the coordinator sees more of the network and decides."""
        if self.finished or shard in self._told["Finished"]:
            return []
        text = f"its shard {shard} is lost: {reason}"
        return [ToCoordinator(m.Suspect(self.replica, self.incarnation, text, False, shard))]

    def _promised(self, shard: int, promise: m.Promise) -> list[LeaderAction]:
        self.step = max(self.step, promise.step)
        change = self.change
        if change is None or change.number != promise.proposal or change.decided:
            return []
        if not promise.ok:
            actions = self._decide(None)
            return [*actions, ToCoordinator(m.Promise(promise.proposal, False, self.step))]
        change.promised.add(shard)
        if len(change.promised) < self.ranks:
            return []
        change.bound = True
        return [ToCoordinator(m.Promise(change.number, True, self.step))]

    def _at_boundary(self, shard: int, message: m.AtBoundary) -> list[LeaderAction]:
        change = self.change
        if change is None or change.number != message.proposal:
            return [ToRank(shard, m.Decision(message.proposal, None))]  # given up meanwhile
        change.asked.add(shard)
        if message.later and not change.decided:
            change.commit, change.later = None, True  # the others see the same loop, and do not go by it either
        if not change.decided:
            return self._agree(len(change.asked) == self.ranks)
        if change.commit is None or change.commit.has(self.replica, self.incarnation):
            assert change.decision is not None
            return [ToRank(shard, change.decision)]
        return self._leave(change.number, change.commit)

    # -- the other leaders ---------------------------------------------------------------------------------------

    def from_leader(self, message: m.Boundary) -> list[LeaderAction]:
        change = self.change
        ours = change is not None and (change.number, change.epoch) == (message.proposal, message.epoch)
        if self.view is None or not (ours or message.epoch == self.view.epoch):
            return []
        if change is not None and ours and not change.decided:
            if message.view is not None and not all(self._addresses(member) for member in message.view.members):
                return []  # not what the coordinator has committed
            if message.replica in self.view.replicas:
                change.heard[message.replica] = self._with_addresses(message.view)
            return self._agree()
        known = change.commit if change is not None and ours else None
        if len(self._refused) < MANY:
            self._refused.add(message.proposal)
        answered = (message.proposal, message.replica) in self._answered or len(self._answered) >= 16 * MANY
        if message.view is not None or answered:
            return []
        if known is None:
            self._answered.add((message.proposal, message.replica))
        return [ToPeerLeader(message.replica, m.Boundary(self.replica, message.epoch, message.proposal, _bare(known)))]

    def _with_addresses(self, view: View | None) -> View | None:
        """Returns the commit that another leader has told, with addresses."""
        if view is None:
            return None
        members = (msgspec.structs.replace(member, ranks=self._addresses(member)) for member in view.members)
        return msgspec.structs.replace(view, members=tuple(members))

    def _addresses(self, member: Member) -> Addresses:
        """Returns those of a member of the view in force, or of a joiner that the coordinator has proposed."""
        known = (*(self.view.members if self.view else ()), *(self.change.joins if self.change else ()))
        lives = (member.replica, member.incarnation)
        return next((x.ranks for x in known if (x.replica, x.incarnation) == lives), NO_ADDRESSES)

    def again(self, replica: int) -> list[LeaderAction]:
        """Repeat over a new link to another leader what may have been lost."""
        change, view = self.change, self.view
        if view is None:
            return []
        answered = [number for number, asker in self._answered if asker == replica]
        said = {number: m.Boundary(self.replica, view.epoch, number, None) for number in answered}
        if change is not None and (change.said_none or change.said_commit or change.decided):
            said[change.number] = m.Boundary(self.replica, change.epoch, change.number, _bare(change.commit))
        return [ToPeerLeader(replica, said[number]) for number in sorted(said)]

    def waiting(self) -> tuple[int, ...]:
        """Returns the replicas whose leaders this one waits for at a boundary."""
        change, view = self.change, self.view
        if change is None or view is None or change.decided or len(change.asked) < self.ranks:
            return ()
        return tuple(replica for replica in self._awaited(change, view) if replica not in change.heard)

    def not_come(self) -> list[int]:
        """Returns the ranks of this replica that have not come to a boundary where others of them stand."""
        change = self.change
        if change is None or change.decided or not change.asked:
            return []
        return [shard for shard in range(self.ranks) if shard not in change.asked]

    def _awaited(self, change: _Change, view: View) -> list[int]:
        """Returns the replicas that have to speak before this one decides."""
        others = [replica for replica in view.replicas if replica != self.replica]
        if change.commit is None:
            return others
        stays = change.commit.has(self.replica, self.incarnation)
        return [replica for replica in others if stays and replica not in change.commit.replicas]

    def _agree(self, first: bool = False) -> list[LeaderAction]:
        """Tell the others at the boundary what this leader holds, and decide as soon as the answer cannot change.
        `first`: all ranks have come just now."""
        change, view = self.change, self.view
        assert change is not None
        assert view is not None
        if change.decided or len(change.asked) < self.ranks:
            return []
        others = [replica for replica in view.replicas if replica != self.replica]
        if change.commit is None:
            change.commit = next((seen for seen in change.heard.values() if seen is not None), None)
        actions: list[LeaderAction] = []
        if first if change.commit is None else not change.said_commit:
            said = m.Boundary(self.replica, change.epoch, change.number, _bare(change.commit))
            actions += [ToPeerLeader(replica, said) for replica in others]
            change.said_none = change.said_none or change.commit is None
            change.said_commit = change.commit is not None
        if any(replica not in change.heard for replica in self._awaited(change, view)):
            return actions
        if change.commit is not None:
            return [*actions, *self._decide(change.commit)]
        return [*actions, *self._decide(None), ToCoordinator(m.Withdrawn(change.number))]

    def _decide(self, view: View | None) -> list[LeaderAction]:
        change = self.change
        assert change is not None
        change.decided, change.commit = True, view
        if view is not None and not view.has(self.replica, self.incarnation):
            return self._leave(change.number, view)
        change.decision = decision = m.Decision(change.number, view)
        asked: list[LeaderAction] = [ToRank(shard, decision) for shard in sorted(change.asked)]
        if view is not None:
            self.view = view  # ranks that are still under way ask later
            self._refused.clear()  # no promise of the earlier view is asked for any more
            self._answered.clear()
            return asked
        cancel = m.Cancel(change.number)
        freed = [ToRank(r, cancel) for r in range(self.ranks) if r not in change.asked]
        if self.view is None or change.said_none:
            return [*asked, *freed]
        said = m.Boundary(self.replica, change.epoch, change.number, None)
        waiting = [ToPeerLeader(replica, said) for replica in change.heard]
        return [*asked, *freed, *waiting]

    def _leave(self, number: int, view: View) -> list[LeaderAction]:
        """Let the replica leave as one, once all its ranks stand at the boundary: none can come back from that."""
        assert self.change is not None
        if len(self.change.asked) < self.ranks:
            return []
        return self._to_ranks(m.Decision(number, view))

    def _give(self, message: m.Message) -> list[LeaderAction]:
        """Give a message to all ranks. A rank whose connection breaks gets it again, since it may have been lost."""
        if isinstance(message, m.Queued):  # matters only at the moment, and to shard 0 first, which may log it
            self._news = message
            return [ToRank(0, message)]
        if isinstance(message, m.NewView | m.Dismissed | m.Removed):
            self._news = None  # what ranks waited for is over
        if not isinstance(message, m.WhoWaits):  # matters only at the moment, too
            self._given.pop(type(message).__name__, None)  # the newest is said last
            self._given[type(message).__name__] = message
        return self._to_ranks(message)

    def _to_ranks(self, message: m.Message) -> list[LeaderAction]:
        return [ToRank(shard, message) for shard in range(self.ranks)]


def _bare(view: View | None) -> View | None:
    return None if view is None else view.bare()
