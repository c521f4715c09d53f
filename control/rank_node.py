"""All that one rank does in the control plane. It is pure. It holds the rank's `Machine`, and knows what must be told
when. `ftcomm.control.control_thread` drives it with real sockets and time, `ftcomm.simulation` with simulated ones.

    up      the connection to the leader of the replica (`ftcomm.control.leader_node`)
    peers   links to this rank of the other replicas of the view. Those of shard 0 carry what leaders say to each other
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec

from ftcomm.control import member as mem
from ftcomm.control import messages as m
from ftcomm.control.actions import EnterView, Failed, Freeze, GoOn, JoinPending, Known, Passed, ToLeader
from ftcomm.control.blame import BOUNDARY, CHANGE
from ftcomm.control.detector import Detector
from ftcomm.control.failed_dials import Cause, FailedDials
from ftcomm.control.outbox import Outbox
from ftcomm.control.running_time import RunningTime
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Address, Life, View


class ToPeer(msgspec.Struct, frozen=True):
    replica: int
    message: m.Message


class LookAtWaits(msgspec.Struct, frozen=True):
    """A member asks on whom the exchange waits; answer with `waits`."""


class HandWaits(msgspec.Struct, frozen=True):
    """A boundary is passed for which some replicas never came. The next op waits for them, and has waited already for
    so many seconds."""

    seconds: Mapping[int, float]


class WaitOn(msgspec.Struct, frozen=True):
    """Let waits for members go on: the last `away` seconds do not count. For `seconds` nothing was heard of the
    coordinator, and only it can decide that a member is lost."""

    seconds: float
    away: float


class Acked(msgspec.Struct, frozen=True):
    """The coordinator knows that this replica has finished."""


RankAction = (
    ToLeader
    | ToPeer
    | Freeze
    | EnterView
    | LookAtWaits
    | HandWaits
    | WaitOn
    | Passed
    | JoinPending
    | Known
    | GoOn
    | Acked
    | Failed
)


KEPT = 16  # the newest messages of each other leader that are kept; only those of the last proposals matter
NOBODY: Mapping[int, float] = MappingProxyType({})


class RankNode:
    """The state machine of one rank. Not thread-safe. Times are seconds of any origin. Every method returns actions in
    order."""

    def __init__(
        self, replica: int, shard: int, address: Address, timeouts: Timeouts, replicas: int = 0, ranks: int = 1
    ) -> None:
        """`replicas`: how many the job has, as this rank was told; 0: unknown. `ranks`: of its replica."""
        self.shard = shard
        self.machine = mem.Machine(replica)
        self.view: View | None = None  # the view that the exchange runs in
        self._timeouts = timeouts
        self._hello = m.Hello(shard, address, replicas=replicas)
        self._up = False
        self._outbox = Outbox()
        self._severed: dict[int, tuple[m.Severed, float]] = {}  # by replica: what ended, and when it was reported last
        self._peers: set[Life] = set()  # lives that this rank listens to
        self._silent: dict[Life, float] = {}  # by life: when it was complained of last
        self._beats = timeouts.beats(ranks) if shard else 1  # beats between two signs of life to the leader
        # So long that the leader of a rank that is missed here, which misses it too, has said so before that counts.
        self._detector: Detector[Life] = Detector(self._beats * timeouts.unheard + (self._beats - 1) * timeouts.beat)
        self._beat = 0  # beats so far
        self._above: Detector[str] = Detector(self._beats * timeouts.unheard)  # the leader
        self.cut_off = False  # the host agent does not reach the leader, and is no sign of it
        self._from_above = False  # the leader has spoken since the last beat
        self._answers_above = False  # the leader's kernel has answered the host agent, which does not reach it
        self._up_refused = False  # the leader's port refuses
        self._leaderless = False  # neither the leader nor its kernel is heard; it may live
        self._lasting: dict[str, m.Message] = {}  # what this rank tells its leader once
        self._boundary_waits = m.BoundaryWaits()  # for whom the leader waits, as it tells shard 0
        self._all_finished = False  # the leader has told shard 0 that all ranks have finished
        self._from_leaders: dict[int, list[m.Boundary]] = {}  # in shard 0: what they have said, by replica
        self._dials = FailedDials(timeouts.op)
        self._short = False  # this process lacks what it needs to reach members
        self._unreachable: set[int] = set()  # replicas whose memory this rank fails to reach
        self._reaching: tuple[int, ...] = ()  # replicas whose memory it is about to reach
        self._ran = RunningTime()
        self._passed = 0.0  # s of `_ran` between the last two beats
        self._heard_coordinator = 0.0  # when this replica has heard the coordinator last, in seconds of `_ran`
        self._unheard = False  # the coordinator was not heard for too long
        # The lives that a change of view, or a boundary, waits for: since when, in `_ran`. It goes on in the next view.
        self._since: dict[Life, float] = {}
        self._at_boundary: dict[Life, float] = {}  # since when a boundary waits for a life, until it is passed
        self._said = float("-inf")

    # -- connections ---------------------------------------------------------------------------------------------

    def up_opened(self) -> list[RankAction]:
        """Note that the connection to the leader is there, for the first time or again."""
        self._up, self._up_refused, self.cut_off = True, False, False
        self._from_above = True  # its process has just answered, though it may never send a message
        self._boundary_waits = m.BoundaryWaits()  # it tells them again
        hello = msgspec.structs.replace(self._hello, incarnation=self.machine.incarnation)
        late = self._outbox.late(self.machine.view)
        return [ToLeader(hello), *self._said_again(), *(ToLeader(message) for message in late)]

    def _said_again(self) -> list[RankAction]:
        """Returns what a rank has told its leader, and may have been lost with the connection."""
        again: list[m.Message] = list(self._lasting.values())
        if self.view is not None:
            again.append(m.Installed(self.view.epoch))
        return [ToLeader(message) for message in (*again, *self.machine.asked(), *self._between_leaders())]

    def _between_leaders(self) -> list[m.Message]:
        """Returns what shard 0 repeats to its leader: what the other leaders have said, and that there are links to
        them, as what its own one has said may have been lost, too."""
        if self.shard != 0 or self.machine.view is None:
            return []
        others = [replica for replica in self.machine.view.replicas if replica != self.machine.replica]
        kept = (message for replica in others for message in self._from_leaders.get(replica, ()))
        said = [message for message in kept if message.epoch >= self._epoch()]
        return [*said, *(m.Linked(replica) for replica in others)]

    def up_lost(self, reason: str, refused: bool = False, here: bool = False) -> list[RankAction]:
        """Note that the connection to the leader is down. With `refused` it cannot be made again since no process
        listens there any more; with `here` the own kernel says so, and not another host. The replica lives and dies as
        one."""
        self._up = False
        self._up_refused = refused
        return self._orphaned(reason) if refused and here else []

    def _orphaned(self, reason: str) -> list[RankAction]:
        if self.view is not None or self.machine.preview is not None:
            return self._from_leader(m.Removed(reason))
        return []

    def host_agent_ended(self, reason: str) -> list[RankAction]:
        """Note that the host agent has ended, by which this rank was taken into its replica."""
        self._up, self._up_refused = False, True
        if self.machine.phase is mem.Phase.LEFT:
            return []
        return self._orphaned(reason) or self.failed(reason)

    def up_acknowledged(self, at: float) -> list[RankAction]:
        """Note that the kernel of the leader answers."""
        if not self.cut_off:
            self._above.acknowledged("leader", at)
        return []

    def from_up(self, message: m.Message) -> list[RankAction]:
        """Take a message from the leader."""
        if isinstance(message, m.LeaderLost):
            self.cut_off, self._from_above, self._answers_above = True, False, message.answers
            return self.up_lost(message.reason, message.refused, message.here)
        self._from_above = True
        if isinstance(message, m.Ping):
            self._unheard = message.unheard > 0.0
            self._heard_coordinator = self._ran.seconds - message.unheard
            return []
        if isinstance(message, m.ForLeader):
            return [ToPeer(message.replica, message.boundary)]
        if isinstance(message, m.BoundaryWaits):
            self._boundary_waits = message
            return []
        if isinstance(message, m.AllFinished):
            self._all_finished = True
            return []
        return self._from_leader(message)

    def from_peer(self, message: m.Message, now: float) -> list[RankAction]:
        if isinstance(message, m.Alive):
            return self._heard(message, now)
        if isinstance(message, m.MemberProgress):
            return self._do_member(self.machine.from_member(message))
        if isinstance(message, m.Boundary) and self.shard == 0:
            for life in self._lives((message.replica,)):
                self._at_boundary.pop(life, None)
            self._keep(message)
            return [ToLeader(message)]
        return []

    def _keep(self, said: m.Boundary) -> None:
        """Keep what the leader of another member has said, in case that the connection to the own one breaks."""
        view = self.machine.view
        if view is not None and said.replica in view.replicas:
            before = self._from_leaders.get(said.replica, ())
            kept = [x for x in before if x.epoch >= said.epoch and x.proposal != said.proposal]
            self._from_leaders[said.replica] = [*kept, said][-KEPT:]

    def peer_opened(self, replica: int) -> list[RankAction]:
        """Note that the link to a replica is there, for the first time or again, and repeat what may have been lost."""
        self._dials.reached(replica)
        actions = self._do_member(self.machine.again(replica))
        return [*actions, ToLeader(m.Linked(replica))] if self.shard == 0 else actions

    def peer_lost(
        self, replica: int, epoch: int, reason: str, proof: bool, *, silent: bool = False
    ) -> list[RankAction]:
        """Note that a member of the view of `epoch` cannot be reached, or is `silent`, or (`proof`) that its process
        has ended."""
        for view in (self.view, self.machine.view):  # the second view may be one that is under way
            member = view.member(replica) if view is not None and view.epoch == epoch else None
            if member is not None:
                return self.tell(m.Suspect(replica, member.incarnation, reason, proof, self.shard, silent))
        return []

    def dial_failed(self, replica: int, epoch: int, reason: str, cause: Cause, now: float) -> list[RankAction]:
        """Note that a dial of a member of the view of `epoch` has failed."""
        if cause is Cause.HUNG_UP and not self._dials.hung_up(replica, now):
            return self.peers_acknowledged({replica: now})
        return self.peer_lost(replica, epoch, reason, proof=False)

    def short(self, reason: str, now: float) -> list[RankAction]:
        """Note that this process lacks what it needs to reach a member. That is no fault of the member: this rank tries
        again, and until then the others wait for it; in the end it gives itself up."""
        self._short = True
        return self.failed(reason) if self._dials.short(now) else []

    def is_short(self, now: float) -> bool:
        return self._dials.is_short(now)

    def severed(self, replica: int, epoch: int, reason: str, now: float) -> list[RankAction]:
        """Note that a connection for data with a member of the view of `epoch` has ended."""
        for view in (self.view, self.machine.view):
            member = view.member(replica) if view is not None and view.epoch == epoch else None
            if member is not None:
                said = m.Severed(replica, member.incarnation, epoch, reason, self.shard)
                self._severed[replica] = said, now
                return self.tell(said)
        return []  # the view in force by now makes it again

    def _severed_still(self, now: float) -> list[RankAction]:
        """Repeat that connections have ended: a coordinator that was away has not heard it."""
        newest = self.machine.view.epoch if self.machine.view is not None else 0
        self._severed = {replica: known for replica, known in self._severed.items() if known[0].epoch >= newest}
        due = [said for said, last in self._severed.values() if now - last >= REPORT]
        self._severed |= {said.replica: (said, now) for said in due}
        return [action for said in due for action in self.tell(said)]

    def peers_acknowledged(self, at: Mapping[int, float]) -> list[RankAction]:
        """Note when the kernels of members, by replica, last answered. Their processes may hold their interpreters, but
        the network leads there."""
        actions: list[RankAction] = []
        for life in sorted(self._peers):
            if life[0] in at:
                self._detector.acknowledged(life, at[life[0]])
                known = self._silent.get(life)
                if known is not None and at[life[0]] > known:
                    del self._silent[life]
                    actions += self.peer_back(life[0])
        return actions

    def peer_back(self, replica: int) -> list[RankAction]:
        """Note that a replica can be reached again."""
        return self.tell(m.Reachable(replica))

    def _heard(self, alive: m.Alive, now: float) -> list[RankAction]:
        life = (alive.replica, alive.incarnation)
        if life not in self._peers:
            return []
        self._detector.heard(life, now)
        if life not in self._silent:
            return []
        del self._silent[life]
        return self.peer_back(alive.replica)

    def _listen(self, now: float) -> list[RankAction]:
        """Send a sign of life to the members of the newest view whose turn it is, and complain of those that give
        none."""
        view = self.machine.view
        me = self.machine.replica
        peers = {(x.replica, x.incarnation) for x in view.members if x.replica != me} if view is not None else set()
        for life in sorted(self._peers - peers):
            self._detector.forget(life)
            self._silent.pop(life, None)
        for life in sorted(peers - self._peers):  # in one order, so that a seed gives one history
            self._detector.heard(life, now)
        self._peers = peers
        alive = m.Alive(me, self.machine.incarnation)
        every = self._timeouts.beats_between(1 + len(peers))
        turn = self._beat % every
        actions: list[RankAction] = [ToPeer(replica, alive) for replica, _ in sorted(peers) if replica % every == turn]
        for life, seconds in self._detector.silent(now).items():
            if self._joins or self._short:  # the others hear of a joiner when they come to its boundary
                self._detector.heard(life, now)
            elif view is not None and now - self._silent.get(life, float("-inf")) >= REPORT:
                self._silent[life] = now
                member = view.member(life[0])
                there = member.ranks[self.shard] if member is not None else None
                where = f" at {there.host}:{there.port}" if there is not None else ""
                why = f"silent for {seconds:.1f} s{where}"
                actions += self.peer_lost(life[0], view.epoch, why, proof=False, silent=True)
        return actions

    # -- the user's code and the exchange ------------------------------------------------------------------------

    def boundary(self, step: int, loop: int = 0) -> list[RankAction]:
        """Stand at the boundary of `step` in step loop `loop`, with no op in flight. `Passed` comes now or later."""
        return self._do_member(self.machine.boundary(step, loop))

    def tell(self, message: m.Message) -> list[RankAction]:
        """Tell the leader a Report, Ready, CaughtUp, Leave or Finished. CaughtUp counts once in a life."""
        return self._do_member([ToLeader(message)])

    def _say(self, message: m.Message) -> list[RankAction]:
        if isinstance(message, m.CaughtUp) and "CaughtUp" in self._lasting:
            return []  # said, and with each new connection again
        if not self._outbox.says(message, self._up):
            return []
        if isinstance(message, m.Ready | m.CaughtUp | m.Leave | m.Finished):
            self._lasting[type(message).__name__] = message
        return [ToLeader(message)]

    def quiesced(self, epoch: int, progress: m.Progress, awaited: Mapping[int, float] = NOBODY) -> list[RankAction]:
        """Note that the exchange stands still; `epoch` is the one of the `Freeze` that this answers. `awaited`: for how
        many seconds it has waited for each replica. That goes on if the replica says nothing to the change either."""
        ran = self._ran.seconds
        for life in self._lives(awaited) if self.machine.quiescing else ():
            since = min(self._since.get(life, ran), self._at_boundary.get(life, ran))
            self._since[life] = min(since, ran - awaited[life[0]])
        return self._do_member(self.machine.quiesced(epoch, progress))

    def wants(self, view: View) -> bool:
        """Whether the `EnterView` for `view` is still to be carried out."""
        return self.machine.view is view and self.machine.phase is mem.Phase.ENTERING

    def reaching(self, replicas: tuple[int, ...]) -> list[RankAction]:
        """Note the replicas whose memory this rank is about to reach. If that takes long, they count as waited for, and
        there is no complaint of them."""
        self._reaching = replicas
        return []

    def unreachable(self, epoch: int, replica: int, reason: str, cause: Cause, now: float) -> list[RankAction]:
        """Note that the memory of a member of the view of `epoch` cannot be reached."""
        self._unreachable.add(replica)
        return self.dial_failed(replica, epoch, f"its memory cannot be reached: {reason}", cause, now)

    def entered(self, view: View, report: m.Report | None = None) -> list[RankAction]:
        """Note that the exchange runs in `view`, and tell the leader with the `report` of that: it hears both from
        thousands of ranks."""
        self.view = view
        self._outbox.only(view)
        if view.proposal:
            self._at_boundary.clear()  # all have come
        forgiven = [action for replica in sorted(self._unreachable) for action in self.peer_back(replica)]
        self._unreachable.clear()
        self._reaching = ()
        return forgiven + self._do_member(self.machine.entered(view.epoch, report))

    def stalled(self, epoch: int, op: int, waiting_on: tuple[int, ...], lasted: float) -> list[RankAction]:
        """Note that the exchange has made no progress for its deadline, in a wait of `lasted` seconds. To be repeated
        every `REPORT` seconds."""
        return self.tell(m.Stalled(self.shard, epoch, op, waiting_on, True, lasted))

    def waits(self, op: int, waiting_on: tuple[int, ...]) -> list[RankAction]:
        """Tell on whom the exchange waits; on nobody if it does not wait. This answers `LookAtWaits`."""
        what, missing = self.waiting()
        if missing or what == CHANGE:
            op, waiting_on = what, missing
        return self.tell(m.Stalled(self.shard, self._epoch(), op, waiting_on, False))

    def failed(self, reason: str) -> list[RankAction]:
        """Note that this rank cannot go on."""
        if self.machine.phase is mem.Phase.FAILED:
            return []
        self.machine.fail()
        return [ToLeader(m.Finished(False, reason)), Failed(reason)]

    @property
    def all_finished(self) -> bool:
        """Whether no rank is left in the replica whose end this rank should wait for, as far as it can know."""
        return self._all_finished or not self._up

    @property
    def has_finished(self) -> bool:
        """Whether the script of this rank has said that it has ended, well or not."""
        return m.Finished.__name__ in self._lasting

    @property
    def leader_ended(self) -> bool:
        """Whether the leader of this rank has ended, as far as this rank can know."""
        return self._up_refused

    # -- time ----------------------------------------------------------------------------------------------------

    def beat(self, now: float) -> list[RankAction]:
        """Send the leader a sign of life, if one is due. To be called every `Timeouts.beat`, right before `tick`."""
        before = self._ran.seconds
        self._passed = self._ran.at(now) - before
        ended = self._look_up(now)
        due, self._beat = self._beat % self._beats == 0, self._beat + 1
        divided = "does not hear its leader" if self._leaderless else ""
        return [ToLeader(self.machine.heartbeat(divided)), *ended] if due else ended

    def tick(self, now: float) -> list[RankAction]:
        """Send the members a sign of life, and report waits that are too long."""
        self._short = self._dials.is_short(now)
        return [*self._listen(now), *self._severed_still(now), *self._watch(now), *self._wait_on(self._passed)]

    def _wait_on(self, away: float) -> list[RankAction]:
        """Let waits go on without a coordinator, but not for ever. Of each silence the time until it is noticed counts,
        so waits end also with a coordinator that is heard now and then."""
        seconds = self._ran.seconds - self._heard_coordinator
        waits = self._unheard and self.view is not None and seconds <= self._timeouts.absence
        return [WaitOn(seconds, away)] if waits else []

    def _look_up(self, now: float) -> list[RankAction]:
        """Watch the leader. One whose host is gone, or that is cut off from its ranks, tells them nothing. So they wait
        for it until a member tells them that the job goes on without them (`passed_by`), and for as long as an op may
        take at most."""
        if self._from_above:
            self._from_above = False
            self._above.heard("leader", now)
        if self._answers_above:
            self._answers_above = False
            self._above.acknowledged("leader", now)
        silent = self._above.silent(now)
        self._leaderless = bool(silent) or self._up_refused
        for leader, seconds in silent.items():
            if seconds > self._timeouts.give_up:
                self._above.forget(leader)
                return self._orphaned(f"the leader of the replica is lost: silent for {seconds:.1f} s")
        return []

    def passed_by(self, alive: m.Message) -> m.RemovedIn | None:
        """Returns the answer to a peer that is in no view any more."""
        if not isinstance(alive, m.Alive) or self.view is None or self.view.has(alive.replica, alive.incarnation):
            return None
        return m.RemovedIn(self.view.bare())

    def peer_answered(self, message: m.Message) -> list[RankAction]:
        """Take what a member of the view has answered: maybe a later view, without this replica. Who hears its leader
        and the coordinator is told that by them."""
        if not (self._leaderless or self._up_refused or self._unheard) or not isinstance(message, m.RemovedIn):
            return []
        known, later = self.machine.view, message.view
        me = self.machine
        out = known is not None and later.epoch > known.epoch and not later.has(me.replica, me.incarnation)
        return self._from_leader(m.NewView(later)) if out else []

    def _watch(self, now: float) -> list[RankAction]:
        """Report a change of view or a boundary that does not come about: it is a stall like that of an op. Who has not
        moved since an earlier view has been waited for since then."""
        what, missing = self.waiting()
        ran = self._ran.seconds
        if self._joins:  # a joiner waits for the computation of all, for as long as that takes
            self._since.clear()
        elif missing or not self.machine.quiescing:
            self._since = {life: self._since.get(life, ran) for life in self._lives(missing)}
            if what == BOUNDARY and self.machine.phase is mem.Phase.RUNNING:
                self._at_boundary = dict(self._since)
        late = {life[0]: ran - since for life, since in self._since.items() if ran - since > self._deadline(what)}
        late = {replica: late[replica] for replica in missing if replica in late}
        if not late or now - self._said < REPORT:
            return []
        self._said = now
        return self.stalled(self._epoch(), what, tuple(late), max(late.values()))

    def _lives(self, replicas: Iterable[int]) -> list[Life]:
        members = self.machine.view.members if self.machine.view is not None else ()
        these = frozenset(replicas)
        return [(member.replica, member.incarnation) for member in members if member.replica in these]

    @property
    def _joins(self) -> bool:
        """Whether this rank has run in no view yet, and the others are still on their way to the one that has it. The
        first view of a job, and one after a loss, are in force at once."""
        view = self.machine.view
        return not self.machine.ran and view is not None and view.proposal != 0

    def _deadline(self, what: int) -> float:
        """Returns the seconds that a wait may take. A change of view after a loss takes milliseconds; at a boundary a
        rank waits for the computation of others."""
        view = self.machine.view
        at_once = what == CHANGE and view is not None and view.proposal == 0 and self.machine.ran
        return self._timeouts.op_floor if at_once else self._timeouts.op

    def waiting(self) -> tuple[int, tuple[int, ...]]:
        """Returns what this rank waits for, and which replicas have to move for it."""
        missing = self.machine.missing()
        if self._short and self.machine.phase is not mem.Phase.RUNNING:
            return CHANGE, ()  # the others wait for this one
        if self.machine.phase is mem.Phase.ENTERING:
            missing = self._reaching or tuple(self._unreachable)
        if missing:
            return CHANGE, missing
        return BOUNDARY, self._boundary_waits.replicas if self.machine.asked() else ()

    def not_come(self) -> list[tuple[int, int]]:
        """Returns the ranks, as (replica, rank in it), that have to move for this one to pass the boundary where it
        stands. Only shard 0 knows of others than itself: its leader tells it."""
        me, (what, missing) = self.machine.replica, self.waiting()
        if what == CHANGE:
            return [(replica, self.shard) for replica in missing]
        if self.shard != 0:
            return [(me, 0)] if self.machine.asked() else []
        return [(me, shard) for shard in self._boundary_waits.ranks] or [(replica, 0) for replica in missing]

    def _epoch(self) -> int:
        return self.machine.view.epoch if self.machine.view is not None else 0

    # -- between the machines ------------------------------------------------------------------------------------

    def _from_leader(self, message: m.Message) -> list[RankAction]:
        if isinstance(message, m.FinishAck):
            return [Acked()]
        if isinstance(message, m.WhoWaits):
            return [LookAtWaits()]
        return self._do_member(self.machine.from_leader(message))

    def _do_member(self, actions: list[mem.MemberAction]) -> list[RankAction]:
        result: list[RankAction] = []
        for action in actions:
            if isinstance(action, ToLeader):
                result += self._say(action.message)
            elif isinstance(action, mem.ToMember):
                result.append(ToPeer(action.replica, action.message))
            else:
                if isinstance(action, Passed) and self._at_boundary:
                    ran = self._ran.seconds
                    members = self._lives([replica for replica, _ in self._at_boundary])
                    waits = {life[0]: ran - self._at_boundary[life] for life in members if life in self._at_boundary}
                    result += [HandWaits(waits)] if waits else []
                    self._at_boundary.clear()
                result.append(action)
        return result
