"""The coordinator decides who is in the job. It is a pure state machine that `ftcomm.control.server` drives.

The job needs it only to change membership. It persists a view before it sends it, so that no epoch is used twice and a
restarted coordinator knows the job. The members tell it everything else when they connect again.

    forming   fewer replicas than expected have joined, and there is no view yet
    steady    all members have installed the view
    losing    a view without lost members is out, and not all have installed it yet
    changing  a proposal (join, contribute, leave) for a step boundary waits for promises; or it is committed, and not
              all have installed it yet. A loss gives it up as long as no member has said that it runs in it. Such a
              member has heard from all others that they have stopped for it, so from then on the change stands

Neither silence nor a connection that ends proves a death. A member is removed in these cases:

    its process has ended         its port refuses, the kernel of its host says so, the replica comes with another
                                  life, or another member has proof and the accused does not answer
    its kernel is silent          and a contributing member that speaks complains of it, too
    it is divided                 its leader does not hear one of its ranks
    it stalls                     the others wait for it

If no contributing member can be heard, the coordinator itself is cut off: it decides nothing and goes on looking for
them. It decides nothing either while no holder of the state is whole. The job ends when all holders of its state are
proved to have ended. If a connection for data ends between two members that live, a view of the same members makes it
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Set

from ftcomm.control import messages as m
from ftcomm.control.admission import MESSAGE, Room, other_job, too_large
from ftcomm.control.blame import FRESH, Blame, Culprit, Removal
from ftcomm.control.detector import Detector
from ftcomm.control.job_views import JobViews
from ftcomm.control.joiners import Joiners
from ftcomm.control.limits import EPOCHS
from ftcomm.control.liveness import described
from ftcomm.control.reconfiguration import Proposal, contributing, given_up, wanted
from ftcomm.control.severed import SeveredPairs
from ftcomm.control.suspicion import Accusation, Conclusion, Life, Outcome, Probe, Suspicions, Why
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.unstarted import UnstartedRanks
from ftcomm.control.views import Address, Member, View

Conn = int  # a connection of a leader, numbered by the runtime

WAITS = m.Queued(
    "joins at the next step boundary that all replicas can agree on (ftcomm.steps, Group.boundary)", m.Stage.JOINING
)
ALONE = m.Queued(
    "waits for the replicas that hold the state of the training, of which none is heard; if they have ended for good, "
    "end this coordinator, remove its store, and start the job again from its last checkpoint"
)
MUTE = m.Queued(
    "waits for the replicas that hold the state of the training: they live, and none has said a word for longer than "
    "FTCOMM_OP_TIMEOUT. They hold their interpreter locks, or are stopped; continue or end them"
)
FINISHED = m.Expelled("the job has finished", m.Ending.TOO_LATE)
OVER = m.Expelled("the job has ended or is being drained", m.Ending.TOO_LATE)
DRAINED = "the job is being drained"
EARLY = 100  # ticks: as many as come in ten heartbeat timeouts, if they come in time; connections are heard in each
LINGER = 2.0  # s that a finished member stays in the view, so that the end of a job needs no view per member


@dataclasses.dataclass(frozen=True)
class Send:
    conn: Conn
    message: m.Message


@dataclasses.dataclass(frozen=True)
class Close:
    conn: Conn


@dataclasses.dataclass(frozen=True)
class Persist:
    """The view must be on the disk before the actions after this one are carried out."""

    view: View


@dataclasses.dataclass(frozen=True)
class Log:
    """An entry for the event log."""

    kind: str
    fields: dict[str, object]


@dataclasses.dataclass(frozen=True)
class Done:
    """The job has ended; `failed` says why if it did not end well."""

    failed: str = ""


@dataclasses.dataclass(frozen=True)
class Unfit:
    """This coordinator must not decide anything more in the job, which goes on, or has ended in an unknown way; says
    why."""

    reason: str


Action = Send | Close | Persist | Probe | Log | Done | Unfit


@dataclasses.dataclass
class _LeaderLink:
    replica: int
    incarnation: str
    step: int
    epoch: int
    loop: int  # the step loop that the replica has come to, or waits in to join; 0: none
    mute: str = ""  # what a rank of it does that lives and does not speak
    divided: str = ""  # which of its ranks the leader does not hear
    since: float = 0.0  # when the leader began to say so


class Coordinator:
    """The state machine. Not thread-safe. Every method takes the time `now` (s, any origin) and returns actions in
    order."""

    def __init__(
        self,
        replicas: int,
        ranks_per_replica: int,
        timeouts: Timeouts,
        views: list[View],
        now: float,
        lifetime: int,
        state: Callable[[Address], str] = lambda there: "",
        room: Room = MESSAGE,
        boot: str = "",
    ) -> None:
        """`views` are the last two that were persisted. No earlier run of this job's coordinator had the number
        `lifetime`, so a proposal of a dead one is never taken for one of ours. `state` tells what the process at an
        address does, where this host can see it (`ftcomm.control.liveness.state_of`). `room` is what a persisted view
        has to fit in, and `boot` names the kernel of this host."""
        self._state, self._room, self._boot = state, room, boot
        self.expected = replicas
        self.ranks_per_replica = ranks_per_replica
        self.job = JobViews(views)
        self._lifetime, self._proposals = lifetime & 0xFFFF_FFFF, 0
        self.timeouts = timeouts
        self.detector: Detector[int] = Detector(timeouts.silence)
        self.links: dict[Conn, _LeaderLink] = {}
        self.joiners = Joiners()  # in no view, or in one that no member will install
        self.proposal: Proposal | None = None
        self._margin = 1  # a change is proposed so many steps ahead; doubled as long as members are faster
        self.leaving: set[int] = set()
        self.draining = False
        self._refusals: dict[int, tuple[str, str]] = {}  # by replica: the last life that was refused, and why
        self._unstarted = UnstartedRanks(replicas)
        self._blame = Blame(timeouts.patience, timeouts.grace, timeouts.op)
        self._suspicions = Suspicions(timeouts.op, FRESH)
        self._severed = SeveredPairs(timeouts.patience, timeouts.op)
        self.done = False
        self._unfit = False
        self._unheard = ALONE if views else None  # what joiners wait for, if not for a boundary
        self._begun = now
        self._met = not views  # all known members have come, or had the time to, see `_early`
        self._ticks = 0  # until `_met`
        self._held: dict[Conn, m.Withdrawn] = {}  # what is to be decided once `_met`
        self._refused_in = 0  # the epoch in which a verdict without proof was not carried out
        self._held_up: dict[int, float] = {}  # when a member that lives was mute last
        self._doubted = float("-inf")  # when last no holder of the state was known to be whole
        self._unvisited = bool(views)  # no member of the job has come to this coordinator yet
        self._untold: set[Life] = set()  # those that still catch up according to the store
        for member in self.job.running:
            if not self.job.contributes(member.replica, member.incarnation):
                self._untold.add((member.replica, member.incarnation))
        for member in self.job.running:
            self.detector.heard(member.replica, now)

    # -- events --------------------------------------------------------------------------------------------------

    def receive(self, conn: Conn, message: m.Message, now: float) -> list[Action]:
        if self._unfit:
            return [Close(conn)]
        if isinstance(message, m.Join):
            return self._join(conn, message, now)
        link = self.links.get(conn)
        if link is None:
            return [Close(conn)]
        met = self._heard(link, now)
        if isinstance(message, m.Report):
            return [*met, Log(message.kind, {**message.fields, "replica": link.replica})]
        if not self.job.counts(link.replica, link.incarnation):
            return [*met, *self._from_joiner(conn, link, message)]
        return [*met, *self._from_member(conn, link, message, now)]

    def _heard(self, link: _LeaderLink, now: float) -> list[Action]:
        """Note that a process speaks. A coordinator that was cut off gives the members a heartbeat timeout to show up,
        from when the first one does."""
        self.detector.heard(link.replica, now)
        self._suspicions.heard((link.replica, link.incarnation))
        if self._unheard is None or not self.job.contributes(link.replica, link.incarnation):
            return []
        if self.alone:
            self.detector.pardon(now)
        self._unheard = None
        return self._tell_all_joiners(WAITS)

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self.job.view

    @property
    def alone(self) -> bool:
        """Whether no contributing member can be heard."""
        return self._unheard is ALONE

    def _early(self, now: float) -> bool:
        """Whether it is too early to decide. A restarted coordinator knows only its store. That may be older than the
        job: a member that has caught up since says so when it connects. So nothing is decided before all members have
        connected, or have had a heartbeat timeout for it.

        No member could connect while this process was stopped, so the timeout begins anew after a pause. On a host
        where ticks are always late it would never end, so it ends after `EARLY` ticks.
        """
        if not self._met:
            here = {(link.replica, link.incarnation) for link in self.links.values()}
            all_here = here >= {(member.replica, member.incarnation) for member in self.job.running}
            since = max(self._begun, self.detector.since(now))
            self._met = all_here or now - since > self.timeouts.heartbeat or self._ticks > EARLY
        return not self._met

    def acknowledged(self, conn: Conn, at: float) -> None:
        """Note that the kernel at the other end has answered, whatever its process does."""
        link = self.links.get(conn)
        if link is not None:
            self.detector.acknowledged(link.replica, at)

    @property
    def lives(self) -> set[Life]:
        """The lives that run, or want to join."""
        return {(member.replica, member.incarnation) for member in (*self.job.running, *self.joiners)}

    def _from_joiner(self, conn: Conn, link: _LeaderLink, message: m.Message) -> list[Action]:
        replica = link.replica
        if isinstance(message, m.Finished):
            return [Send(conn, m.FinishAck())]
        if self.view is None or not self.joiners.has(replica, link.incarnation):
            return []
        if isinstance(message, m.Ready) and self.joiners.ready(replica):
            link.loop = message.loop
            return [Log("ready", {"replica": replica}), Send(conn, self._unheard or WAITS), *self._propose()]
        if isinstance(message, m.Leave):
            return self._dismiss(conn, replica)
        return []

    def _from_member(self, conn: Conn, link: _LeaderLink, message: m.Message, now: float) -> list[Action]:
        replica = link.replica
        if isinstance(message, m.Heartbeat):
            link.step, link.loop, link.mute = message.step, message.loop, message.mute
            link.since = link.since if link.divided else now
            link.divided = message.divided
            sent_on = self._send_on()
            return [*self._tell_joiners(), *sent_on, *(self._propose() if sent_on else [])]
        elif isinstance(message, m.Suspect):
            return self._suspected(replica, message, now)
        elif isinstance(message, m.Severed):
            return self._connection_ended(replica, message, now)
        elif isinstance(message, m.Stalled):
            return self._stalled(replica, message, now)
        elif isinstance(message, m.Reachable):
            self._blame.withdraw(replica, message.replica)
        elif isinstance(message, m.Promise):
            return self._promised(link, message)
        elif isinstance(message, m.Withdrawn) and self._early(now):
            self._held[conn] = message
        elif isinstance(message, m.Withdrawn):
            return self._withdrawn(message)
        elif isinstance(message, m.Installed):
            link.epoch = message.epoch
            return self._installed(replica, message.epoch)
        elif isinstance(message, m.CaughtUp):
            known = replica in self.job.caught_up  # it repeats this at every boundary until it contributes
            self.job.caught_up.add(replica)
            return [] if known else [Log("caught_up", {"replica": replica, "step": message.step}), *self._propose()]
        elif isinstance(message, m.Leave):
            self.leaving.add(replica)
            return self._propose()
        elif isinstance(message, m.Finished):
            self.job.finished[replica] = now
            return [Log("finished", {"replica": replica}), Send(conn, m.FinishAck()), *self._check_done()]
        return []

    def _installed(self, replica: int, epoch: int) -> list[Action]:
        if self.view is None or epoch != self.view.epoch:
            return []
        self.job.installed.add(replica)
        if self.job.settled:
            self._severed.entered(epoch)
        if self.job.settled and self.view.proposal:  # a view after a withdrawn change says nothing of the next
            self._margin = 1
        return self._propose()

    def disconnected(self, conn: Conn, now: float) -> list[Action]:
        link = self.links.pop(conn, None)
        if link is None:
            return []
        self._held.pop(conn, None)  # the leader repeats it
        replica = link.replica
        if self.job.counts(replica, link.incarnation):
            return [] if replica in self.job.finished else self._search(replica, link.incarnation, now)
        if self.joiners.has(replica, link.incarnation):
            self.detector.forget(replica)
            self._suspicions.forget((replica, link.incarnation))
            return self._forget(replica)
        return []

    def exited(self, replica: int, reason: str, now: float) -> list[Action]:
        """The launcher of a replica has seen it end with an error. The replica may have said that it has finished,
        since no process knows its own exit code."""
        if self.done or self.job.finished.pop(replica, None) is None:
            return []
        life = next(((x.replica, x.incarnation) for x in self.job.running if x.replica == replica), None)
        return [] if life is None else self._accuse(Accusation(life, 0, replica, reason, own=True), now)

    def drain(self) -> list[Action]:
        """Let all members leave at one common step boundary, and turn joiners away."""
        self.draining = True
        actions: list[Action] = [Log("draining", {})]
        if self.view is None:
            return [*actions, *self._turn_away(m.Expelled(DRAINED)), *self._finish()]
        if self.proposal is not None:
            actions += self._cancel()
        return [*actions, *self._turn_away(m.Dismissed(DRAINED)), *self._propose()]

    def tick(self, now: float) -> list[Action]:
        """Act on what is due. The caller does so several times per heartbeat timeout."""
        if self.done or self._unfit:
            return []
        silent = self.detector.silent(now)
        self._ticks += not self._met
        actions: list[Action] = [*self._look(silent, now)]
        if self._early(now):
            return actions
        held, self._held = self._held, {}
        for message in held.values():
            actions += self._withdrawn(message)
        actions += self._pursue(now)
        if self.done:
            return actions
        lost: dict[int, str] = {}
        asked = self._suspicions.asked(now)  # their silence is decided on with the proof against them
        for replica, seconds in silent.items():
            conn = self._conn(replica)
            if conn is not None and not self.job.counts(replica, self.links[conn].incarnation):
                self.detector.forget(replica)
                actions += [Close(conn), *self.disconnected(conn, now)]
            elif replica not in {*self.job.finished, *asked} and self._corroborated(replica, silent, now):
                lost[replica] = f"silent for {seconds:.1f} s"
        finished = {
            replica: "finished"
            for replica, since in self.job.finished.items()
            if self.view is not None and replica in self.view.replicas and now - since > LINGER
        }
        if finished:
            return actions + self._lose(finished, proved=True)
        divided = self._divided()
        refused = {life[0]: why for life, why in self._suspicions.refusals(now).items() if self.job.counts(*life)}
        ripe = {replica: why for replica, (why, since) in divided.items() if now - since > self.timeouts.patience}
        holders = self.job.unfinished_holders
        whole = holders - set(silent) - set(divided) - set(refused)
        if holders and not whole:
            self._doubted = now  # the network may be cut, with those that only catch up on this side
            doubtful = {replica: why for replica, (why, _) in divided.items()} | refused
            return actions + (self._refuse_to_remove({**doubtful, **lost}) if ripe or lost or refused else [])
        if now - self._doubted > self.timeouts.heartbeat:
            lost = {**ripe, **lost}
        culprits = {} if lost or not whole else self._culprit(now, divided.keys() | refused.keys())
        lost = lost or {replica: culprit.why for replica, culprit in culprits.items()}
        if not lost:
            here = [member.replica for member in self.job.running]
            late = bool(whole) and self._severed.ripe(now, self._present(here, divided.keys() | refused.keys(), now))
            return actions + self._reconnect() if late else actions
        decided = self._lose(lost, proved=False)
        if not any(isinstance(action, Persist) for action in decided):
            return actions + decided
        # None of them has told its end: their launcher may have to end them.
        for replica, reason in lost.items():
            removal = culprits[replica].removal if replica in culprits else Removal.SILENCE
            decided.append(_removed(replica, removal, reason))
        return [*actions, *decided]

    def _look(self, silent: Collection[int], now: float) -> list[Action]:
        """Dial the members that are not heard. If no contributing member is heard, this coordinator is cut off."""
        actions: list[Action] = []
        for member in self.job.running:
            quiet = not self.detector.within(member.replica, self.timeouts.silence / 2, now)
            if quiet or self._conn(member.replica) is None:
                actions += self._search(member.replica, member.incarnation, now)
        holders = self.view.contributing - set(self.job.finished) if self.view is not None else frozenset()
        if holders and holders <= set(silent) and not self.alone:
            self._unheard = ALONE
            reason = (
                "none of the replicas that contribute is heard: this coordinator itself may be cut off, so it waits"
            )
            actions += [Log("cut_off", {"reason": reason}), *self._tell_all_joiners(ALONE)]
        spoken = any(self.detector.within(replica, self.timeouts.op, now) for replica in holders)
        if holders and not spoken and self._unheard is None:
            self._unheard = MUTE
            actions += self._tell_all_joiners(MUTE)
        return actions

    def _divided(self) -> dict[int, tuple[str, float]]:
        """The members whose leaders do not hear one of their ranks: the reason, and since when they say so."""
        members = (
            link for link in self.links.values() if link.divided and self.job.counts(link.replica, link.incarnation)
        )
        return {link.replica: (link.divided, link.since) for link in members if link.replica not in self.job.finished}

    def _corroborated(self, replica: int, silent: Collection[int], now: float) -> bool:
        """Whether a contributing member that speaks misses the replica, too. Otherwise the network of the coordinator
        may be the cause."""
        if self.view is None or not self.job.is_member(replica):
            return False
        return any(
            by in self.view.contributing and by not in silent and self._conn(by) is not None
            for by in self._blame.accusers(replica, now)
        )

    # -- looking for who is not heard ----------------------------------------------------------------------------

    def _search(self, replica: int, incarnation: str, now: float) -> list[Action]:
        member = self._life(replica, incarnation)
        return [] if member is None else [*self._suspicions.search(member, self._conn(replica) is None, now)]

    def probed(self, probe: Probe, outcome: Outcome, now: float) -> list[Action]:
        """Take the outcome of a `Probe`."""
        replica, life = probe.life[0], probe.life
        found = self._suspicions.probed(probe, outcome, now)
        if self._life(*life) is None:
            self._suspicions.forget(life)  # the replica has gone meanwhile
            return []
        if self.done or self._unfit:
            return []
        if isinstance(found, Probe):
            return [found]
        if probe.why is Why.SEVERED:
            mends = found is Conclusion.LIVES and self._severed and not self.job.changing
            return self._reconnect() if mends else []
        if probe.why is Why.SEARCH and self._stands(life, found, now):
            return []
        if found is Conclusion.NOTHING or replica in self.job.finished or self._early(now):
            return []
        if not self.job.counts(*life):
            conn = self._conn(replica)
            return self._forget(replica) if conn is None else [Close(conn), *self.disconnected(conn, now)]
        if isinstance(found, Accusation):
            return self._judge(found)
        why = self._suspicions.why(probe)
        if found is Conclusion.REFUSED:
            return self._refused(life, 0, why, now)
        return self._lose({replica: why}, proved=found is Conclusion.ENDED)

    def _stands(self, life: Life, found: object, now: float) -> bool:
        """Whether the outcome of a probe at the port of a leader proves nothing: the leader lives, or its connection
        stands."""
        replica = life[0]
        if found is Conclusion.LIVES:
            self.detector.acknowledged(replica, now)
        if self._conn(replica) is None:
            return found is Conclusion.LIVES
        if self.detector.within(replica, self.timeouts.presence, now):
            self._suspicions.heard(life)
        # Otherwise something in between refuses, or that connection is about to end.
        return self.detector.answers(replica, self.timeouts.presence, now)

    def _refused(self, life: Life, shard: int, why: str, now: float) -> list[Action]:
        """Take the report that another host refuses a rank. Something in between may refuse as well while it restarts,
        for all that are behind it. So the rank is lost as soon as a second host takes a connection and the first one
        still refuses; otherwise it is lost when it is missed like a silent one. The last holder of the state is never
        lost in this way."""
        member = self._life(*life)
        if member is None or shard >= len(member.ranks):
            return []
        others = (x.ranks[shard] for x in self.job.running if x.replica != life[0] and x.replica in self.job.holders)
        hosts = {there.boot: there for there in others if there.boot != self._boot}
        return [*self._suspicions.refused(life, shard, member.ranks[shard], why, hosts.values(), now)]

    def _culprit(self, now: float, doubtful: Set[int]) -> dict[int, Culprit]:
        """Choose whom to remove by the complaints of members. Of two that do not reach each other it is the `doubtful`
        one, a rank of which others miss, too."""
        if self.view is None:
            return {}
        present = self._present(self.view.replicas, doubtful, now)
        mute = {link.replica: link.mute for link in self.links.values() if link.mute}
        for replica, seconds in self.detector.mute(now).items():
            member = self.view.member(replica)
            mute[replica] = described(seconds, self._state(member.ranks[0]) if member is not None else "")
        self._held_up.update(dict.fromkeys(mute, now))  # one word in between does not change that
        # Longer than a report holds: its sender may fall mute before it can say that the op goes on.
        lately = max(self.timeouts.op_floor, FRESH + REPORT)
        held = {replica for replica, last in self._held_up.items() if now - last <= lately}
        held |= self.detector.unheard()
        return self._blame.culprit(now, self.view.contributing, present, mute, held)

    def _present(self, replicas: Collection[int], doubtful: Set[int], now: float) -> set[int]:
        """Returns those of `replicas` that have just given a sign of life. After a restart all count as heard, so they
        must have a connection, too."""
        within = self.detector.within
        here = {x for x in replicas if self._conn(x) is not None and within(x, self.timeouts.presence, now)}
        return here - doubtful

    # -- joining -------------------------------------------------------------------------------------------------

    def _join(self, conn: Conn, join: m.Join, now: float) -> list[Action]:
        replica = join.replica
        refusal = self._refusal(join)
        refused = "" if refusal is None else refusal.reason
        if not refused and self.view is not None and max(join.epoch, join.heard) > self.job.epoch:
            return self._outdated(conn, join, now)
        if refused and join.epoch > 0 and not self.done:  # it runs: this coordinator may be the one started wrongly
            return [*self._refuse(replica, join.incarnation, refused), Close(conn)]
        if refusal is not None:
            said_so = self._refuse(replica, join.incarnation, refused)
            return [*said_so, Send(conn, refusal), Close(conn), *self._tell_forming()]
        if self.job.counts(replica, join.incarnation):
            self._unvisited = False
        actions: list[Action] = []
        said = self.links.get(conn)
        if said is not None and (said.replica, said.incarnation) != (replica, join.incarnation):
            return [*self.disconnected(conn, now), Close(conn)]  # a connection speaks for one life of one replica
        if join.epoch > 0 and not self.job.counts(replica, join.incarnation):
            return self._outlived(conn, join, now)
        if self._is_taken(replica, join.incarnation, now):
            reason = (
                f"another process is replica {replica}, and answers; give each replica a number of its own "
                "(FTCOMM_REPLICA)"
            )
            again = Send(conn, m.Queued(reason))  # it tries again
            return [*self._refuse(replica, join.incarnation, reason), again, Close(conn)]
        if join.heard > 0 and self.view is None:  # the replica may enter that view at any moment
            reason = f"it was told of epoch {join.heard} of a job that this coordinator has no file of views of"
            return [*self._refuse(replica, join.incarnation, reason), Close(conn)]  # it tries again
        old = self._conn(replica)
        if old is not None and old != conn:
            if self.links[old].incarnation == join.incarnation:
                del self.links[old]  # it has connected again before the old connection closed
            else:
                actions += self.disconnected(old, now)
            actions.append(Close(old))
        if not self.job.counts(replica, join.incarnation) and self.job.is_member(replica):
            if self._early(now) or self._may_hold({replica}):
                return [*actions, Close(conn)]  # it tries again
            self.job.finished.pop(replica, None)  # the earlier life is lost, however it ended
            actions += self._lose({replica: "restarted"}, proved=True)
            if self.done:
                return [*actions, Send(conn, m.Expelled("the job has ended with its earlier life")), Close(conn)]
        link = self.links[conn] = _LeaderLink(replica, join.incarnation, join.step, join.epoch, join.loop)
        self._untold.discard((replica, join.incarnation))
        actions += self._heard(link, now)
        if self.job.counts(replica, join.incarnation):
            if join.leaving:
                self.leaving.add(replica)
            if join.caught_up:
                self.job.caught_up.add(replica)
            return [*actions, *self._rejoined(conn, join), *self._reach(join, now)]
        self.job.finished.pop(replica, None)
        self.leaving.discard(replica)  # the earlier life wanted that
        self.job.caught_up.discard(replica)
        actions.append(Log("joined", {"replica": replica}))
        return [*actions, *self._register(conn, join), *self._reach(join, now)]

    def _refuse(self, replica: int, incarnation: str, reason: str, *, hopeless: bool = False) -> list[Action]:
        """Log once why a life is refused, since it may try again twice a second. `hopeless`: the job cannot begin."""
        refusal = incarnation, reason
        if self._refusals.get(replica) == refusal:
            return []
        self._refusals[replica] = refusal
        return [Log("refused", {"replica": replica, "reason": reason, **({"hopeless": True} if hopeless else {})})]

    def unstarted(
        self, replica: int, reason: str, lasting: bool, conns: Mapping[Conn, int], now: float
    ) -> list[Action]:
        """Note that a rank of a replica cannot start; `lasting`: nor if it is started again. `conns` are all leaders
        with the replicas that they have named. Of that replica, one that has not joined yet waits for that rank; of
        another one it asks, if it is in no view."""
        if self._conn(replica) is not None:  # all its ranks are here: another process has its number, too
            return self._refuse(replica, "", reason)
        word = self._unstarted.said(replica, reason, lasting, now)
        hopeless = lasting and self.view is None and replica < self.expected
        refused = self._refuse(replica, "", word.reason, hopeless=hopeless)
        expelled = m.Expelled(word.reason)
        waiting = [conn for conn, named in conns.items() if conn not in self.links and named == replica]
        told: list[Action] = [Send(conn, expelled) for conn in waiting]
        return [*refused, *told, *(self._turn_away(expelled) if hopeless else self._tell_forming())]

    def asked(self, conn: Conn, replica: int, lived: float, now: float) -> list[Action]:
        """Tell a process of a replica, which is in no view and has run for `lived` seconds, whether it waits for a rank
        that cannot start."""
        reason = self._unstarted.why(replica, now - lived, self.view is None)
        return [*([Send(conn, m.Expelled(reason))] if reason else []), Close(conn)]

    def _is_taken(self, replica: int, incarnation: str, now: float) -> bool:
        """Whether another life of the replica answers, or is a member that may answer. A second life is then no proof
        that the first one has ended. A member that connects again has the number in any case."""
        if self.job.counts(replica, incarnation) or replica in self.job.finished:
            return False
        old = self._conn(replica)
        if old is not None:
            other = self.links[old].incarnation != incarnation
            return other and self.detector.answers(replica, self.timeouts.silence, now)
        members = [member for member in self.job.running if member.replica == replica]
        return any(self._suspicions.may_live((replica, member.incarnation), now) for member in members)

    def _reach(self, join: m.Join, now: float) -> list[Action]:
        """Find out while a life runs whether its port answers, and so whether a later refusal means anything."""
        took = self._suspicions.took((join.replica, join.incarnation))
        return [] if took else self._search(join.replica, join.incarnation, now)

    def _outdated(self, conn: Conn, join: m.Join, now: float) -> list[Action]:
        """Decide nothing more: the replica has been in views that the store lacks, whose numbers would be used
        twice."""
        reason = (
            f"the store is older than the job: it ends with epoch {self.job.epoch}, and replica {join.replica} knows "
            f"of epoch {max(join.epoch, join.heard)}. The job goes on without a coordinator; start one with the store "
            "that it had"
        )
        if not self.job.counts(join.replica, join.incarnation) and not self._early(now) and not self.alone:
            # All known members have come and this one is unknown: it may belong to another job.
            return [*self._refuse(join.replica, join.incarnation, reason), Close(conn)]
        self._unfit = True
        return [Log("outdated", {"replica": join.replica, "reason": reason}), Close(conn), Unfit(reason)]

    def _register(self, conn: Conn, join: m.Join) -> list[Action]:
        """Take the replica in as a joiner. In a running job no member waits for it before its script is ready."""
        replica = join.replica
        member = Member(replica, join.incarnation, join.ranks, contributing=False)
        self.joiners.add(member, ready=join.ready or self.view is None)
        self._refusals.pop(replica, None)
        self._unstarted.started(replica)
        if self.view is None:
            return self._form()
        if join.leaving:
            return self._dismiss(conn, replica)
        if join.ready:
            return [Log("ready", {"replica": replica}), Send(conn, self._unheard or WAITS), *self._propose()]
        if self._unheard is not None:
            return [Send(conn, self._unheard)]
        reason = "joins when a step boundary was passed; nobody has come to one yet (ftcomm.steps, Group.boundary)"
        return self._tell_joiners() or [Send(conn, m.Queued(reason, m.Stage.JOINING))]

    def _tell_joiners(self) -> list[Action]:
        """Let joiners prepare that have not been told yet. Nothing is told before the first boundary of the job: a job
        that passes none takes no replica in, and the script would train by itself while it waits."""
        if self.view is None or max(link.step for link in self.links.values()) < 0:
            return []
        told = self.joiners.tell(self.view)
        return [Send(self._link_of(replica), m.Registered(seen, self._loop)) for replica, seen in told]

    @property
    def _loop(self) -> int:
        """The step loop that the job is in, as far as a member has said."""
        return max((link.loop for link in self.links.values() if link.epoch), default=0)

    def _send_on(self) -> list[Action]:
        """Send joiners on that wait in a step loop which is over. A member holds the others up on its way to theirs."""
        conns = [self._link_of(replica) for replica in self.joiners.waiting]
        late = [conn for conn in conns if 0 < self.links[conn].loop < self._loop]
        actions: list[Action] = []
        for conn in late:
            replica = self.links[conn].replica
            self.joiners.go_on(replica)
            if self.proposal is not None and replica in self.proposal.joins:
                actions += self._cancel()
            actions.append(Send(conn, m.Behind(self._loop)))
        return actions

    def _tell_all_joiners(self, news: m.Queued) -> list[Action]:
        """Send `news` to all joiners, also to those in a view in which no member runs yet."""
        waiting = (
            conn
            for conn, link in self.links.items()
            if link.epoch == 0 or self.joiners.has(link.replica, link.incarnation)
        )
        return [Send(conn, news) for conn in waiting]

    def _dismiss(self, conn: Conn, replica: int) -> list[Action]:
        """Let a joiner go that has asked to leave before it was in any view: there is no boundary to wait for."""
        reason = "it has asked to leave before it had joined"
        return [
            Log("dismissed", {"replica": replica, "reason": reason}),
            Send(conn, m.Dismissed(reason)),
            *self._forget(replica),
        ]

    def _forget(self, replica: int) -> list[Action]:
        """Forget a joiner that does not want to join any more."""
        self.joiners.drop(replica)
        if self.proposal is not None and replica in self.proposal.joins:
            return [*self._cancel(), *self._propose()]
        return []

    def _outlived(self, conn: Conn, join: m.Join, now: float) -> list[Action]:
        """Send a replica away that says it runs in the job, when the job has gone on without it. Another life may have
        its number by now."""
        replica = join.replica
        actions: list[Action] = []
        old = self._conn(replica)
        if old is not None and self.links[old].incarnation == join.incarnation:
            actions += self.disconnected(old, now)
            self.detector.forget(replica)
            if old != conn:
                actions.append(Close(old))
        if self.view is None:  # let it train on: a lost file is no reason to end a job
            reason = f"it runs in epoch {join.epoch} of a job that this coordinator has no file of views of"
            return [*actions, *self._refuse(replica, join.incarnation, reason), Close(conn)]
        reason = (
            f"replica {replica} was removed from the job in epoch {self.job.epoch} or before, while it was not heard"
        )
        removed = _removed(replica, Removal.SILENCE, "the job went on without it while it was not heard")
        return [*actions, removed, Send(conn, m.Expelled(reason)), Close(conn)]

    def _refusal(self, join: m.Join) -> m.Expelled | None:
        other = other_job(join, self.expected, self.ranks_per_replica, self.timeouts) or too_large(
            join, self.expected, self._room
        )
        if other:
            return m.Expelled(other)
        member = self.job.counts(join.replica, join.incarnation)  # in a view that it may not have installed yet
        if self.done or (self.draining and join.epoch == 0 and not member):
            return OVER
        return None

    def _tell_forming(self) -> list[Action]:
        """Tell those that wait for the first view of the job for which replicas they wait, and why."""
        if self.view is not None:
            return []
        here = self.joiners.waiting
        whys = {replica: f" (refused: {reason})" for replica, (_, reason) in self._refusals.items()}
        missing = (f"{replica}{whys.get(replica, '')}" for replica in range(self.expected) if replica not in here)
        reason = f"{len(here)} of {self.expected} replicas are here; missing: {', '.join(missing)}"
        return [Send(self._link_of(replica), m.Queued(reason)) for replica in here]

    def _form(self) -> list[Action]:
        here = self.joiners.waiting
        if len(here) < self.expected:
            return self._tell_forming()
        members = [contributing(member) for member in here.values()]
        self.joiners.clear()
        return self._decide(tuple(sorted(members, key=lambda x: x.replica)), 0, "all replicas are here")

    def _rejoined(self, conn: Conn, join: m.Join) -> list[Action]:
        """Take back a member that has connected again, after a restart of the coordinator or a lost connection."""
        assert self.view is not None
        if join.epoch == self.view.epoch:
            asked = self.proposal is not None and join.replica not in self.proposal.promised
            again = self._cancel() if asked else []  # the question or its answer may have been lost
            return [*again, *self._installed(join.replica, join.epoch), *self._tell_joiners()]
        actions: list[Action] = [Send(conn, m.NewView(self.view))]
        if self._unheard is not None and join.epoch == 0:  # maybe no member will run in that view
            actions.append(Send(conn, self._unheard))
        return [*actions, *self._tell_joiners()]

    # -- losses --------------------------------------------------------------------------------------------------

    def _suspected(self, by: int, suspect: m.Suspect, now: float) -> list[Action]:
        replica, life = suspect.replica, (suspect.replica, suspect.incarnation)
        if not self.job.counts(*life) or replica in self.job.finished:
            return []
        if suspect.proof:
            return self._accuse(Accusation(life, suspect.shard, by, suspect.reason, own=by == replica), now)
        if by == replica:
            return self._refused(life, suspect.shard, suspect.reason, now)
        first = self._blame.complaint(by, replica, now, suspect.reason)
        return [Log("suspect", {"replica": replica, "reason": suspect.reason, "by": by})] if first else []

    def _accuse(self, accusation: Accusation, now: float) -> list[Action]:
        """Keep the proof that a process has ended. It is sent once, and its sender may end."""
        member = self._life(*accusation.life)
        if member is None or accusation.shard >= len(member.ranks) or not self._suspicions.accuse(accusation):
            return []
        fields = {"replica": member.replica, "reason": accusation.why, "by": accusation.by}
        return [Log("suspect", fields), *self._pursue(now)]

    def _pursue(self, now: float) -> list[Action]:
        """Act on proofs where that is possible now. A proof by another member holds unless the accused answers the
        coordinator."""
        actions: list[Action] = []
        for accusation in [] if self._early(now) else self._suspicions.accusations():
            member = self._life(*accusation.life)
            if member is None or member.replica in self.job.finished or self.done:
                self._suspicions.drop(accusation)
            elif accusation.own:
                actions += self._judge(accusation)
            elif not self._may_hold({member.replica}):
                actions.append(self._suspicions.ask(accusation, member.ranks[accusation.shard], now))
        return actions

    def _judge(self, accusation: Accusation) -> list[Action]:
        replica = accusation.life[0]
        if not accusation.refuted and self._may_hold({replica}):
            return []  # decided later
        self._suspicions.drop(accusation)
        if not accusation.refuted:
            return self._lose({replica: accusation.why}, proved=True)
        reason = f"replica {accusation.by} says that it has ended ({accusation.why}), and it answers"
        return [Log("not_removed", {"replica": replica, "reason": reason})]

    def _connection_ended(self, by: int, ended: m.Severed, now: float) -> list[Action]:
        """Take the report that a connection for data has ended, which is no fault of a process that lives."""
        replica, life = ended.replica, (ended.replica, ended.incarnation)
        member = (
            self._life(*life) if self.job.counts(*life) and replica not in self.job.finished and replica != by else None
        )
        if member is None or self._early(now) or all(view.epoch != ended.epoch for view in self.job.in_force):
            return []  # the sender repeats it; or a new view makes the connection again
        log: list[Action] = [Log("suspect", {"replica": replica, "reason": ended.reason, "by": by})]
        known = self._severed.knows(by, replica)
        if not self._severed.said(by, replica, ended.epoch, now):
            return log if self._blame.complaint(by, replica, now, ended.reason) else []
        there = [address for shard, address in enumerate(member.ranks) if shard == ended.shard]
        probes = [probe for address in there for probe in self._suspicions.sever(life, ended.shard, address)]
        return [*([] if known else log), *probes]

    def _reconnect(self) -> list[Action]:
        """Make a view of the same members, in which the connections that have ended are made again. It gives up a
        change under way, as a loss does."""
        return self._lose({}, proved=True, why=self._severed.mend())

    def _stalled(self, by: int, stall: m.Stalled, now: float) -> list[Action]:
        if all(stall.epoch != view.epoch for view in self.job.in_force):
            return []
        here = {replica for view in self.job.in_force for replica in view.replicas}
        # A rank that answers may wait for another rank of its replica, which reports its own wait.
        waiting_on = tuple(x for x in stall.waiting_on if x in here and (x != by or not stall.due))
        if not self._blame.stalled(by, stall.shard, stall.op, waiting_on, stall.due, now, stall.lasted):
            return []
        conns = [self._conn(replica) for replica in sorted(here)]
        return [Send(conn, m.WhoWaits()) for conn in conns if conn is not None]

    def _lose(self, lost: dict[int, str], *, proved: bool, why: str = "") -> list[Action]:
        """Make a view without `lost` at once, and give up a change in which no member is known to run. With `proved`
        their processes have ended, or need nothing more; without it nothing is done that would end the job. If `lost`
        is empty, `why` is the reason for the view, and "" means that all have withdrawn a change."""
        assert self.view is not None
        base = self.view
        if lost and self.job.installed and not set(lost) & set(base.replicas):
            return []  # the change under way removes it
        if not proved and self.job.unfinished_holders <= set(lost):
            return self._refuse_to_remove(lost)
        if self._may_hold(set(lost)):
            return []  # until those connect, or are proved to have ended; the lost ones are probed again
        actions = self._cancel()
        step = None if self.job.settled else base.step  # members that have not run yet begin there
        gone = set(lost) | {replica for replica in self.job.finished if self._conn(replica) is None}
        members = base.members
        if base.proposal and self.job.before is not None and not self.job.installed:
            self.job.caught_up |= base.contributing - self.job.before.contributing  # they hold the state in any case
            old = set(self.job.before.replicas)  # the joiners of this change wait again
            joiners = [x for x in base.members if x.replica not in old | gone and self._conn(x.replica) is not None]
            for member in joiners:
                self.joiners.add(member, ready=True)
            if self.draining:  # no later view could have them
                actions += self._turn_away(m.Dismissed(DRAINED))
            members = given_up(base, self.job.before, gone, withdrawn=not (lost or why))
            base, step = self.job.before, None
        members = tuple(member for member in members if member.replica not in gone)
        if not any(member.contributing for member in members):  # those that have caught up hold the state
            holders = self.job.caught_up | (self.view.contributing - gone)
            members = tuple(contributing(member) if member.replica in holders else member for member in members)
        for replica in gone:
            self.detector.forget(replica)
            self.job.caught_up.discard(replica)
            self._held_up.pop(replica, None)
            self._blame.forget(replica)
        for replica, why in lost.items():
            conn = self._conn(replica)
            if replica not in self.job.finished and conn is not None:
                said = f"replica {replica} was removed from the job after epoch {self.job.epoch}: {why}"
                actions.append(Send(conn, m.Expelled(said)))
        reasons = [f"lost {replica}: {reason}" for replica, reason in lost.items()]
        why = "; ".join(reasons) or why or "a change was withdrawn"
        if any(member.contributing for member in members):
            persist, *rest = self._decide(members, step, why)
            return [persist, *actions, *rest]  # persisted before any replica is sent away
        if base.contributing & set(self.job.finished):  # the training is complete, also for those that catch up
            return [*actions, *self._turn_away(FINISHED), *self._finish()]
        if self._unvisited:
            return [*actions, *self._unknown(why)]
        failed = (
            f"{why}: no replica that holds the state of the training is left; restart the job from its last checkpoint"
        )
        conns = [self._conn(member.replica) for member in members]
        self.job.view = View(self.job.epoch, None, (), failed)
        expelled = [Send(conn, m.Expelled(failed)) for conn in conns if conn is not None]
        return [*actions, *expelled, *self._turn_away(m.Expelled(failed)), *self._finish(failed)]

    def _unknown(self, why: str) -> list[Action]:
        """Give up: all members have ended while no coordinator was there. Each may have finished without being able to
        tell that."""
        self._unfit = True
        reason = (
            f"all replicas ended while no coordinator was there ({why}), and whether they had finished is not known: "
            "look at their output. What is stored is kept; to start the job again, from its last checkpoint, remove it"
        )
        return [Log("ended", {"reason": reason}), Unfit(reason)]

    def _may_hold(self, lost: set[int]) -> bool:
        """Whether `lost` are all known holders of the state, while another member may hold it and cannot say so: the
        store has it catching up and it has not connected since, or its leader does not hear all of its ranks."""
        if lost <= set(self.job.finished) or not self.job.unfinished_holders <= lost:
            return False
        untold = {replica for replica, life in self._untold if self.job.counts(replica, life)}
        return bool((untold | self._divided().keys()) - lost)

    def _refuse_to_remove(self, lost: dict[int, str]) -> list[Action]:
        if not lost or self._refused_in == self.job.epoch:
            return []
        self._refused_in = self.job.epoch
        why = "; ".join(f"{replica}: {reason}" for replica, reason in lost.items())
        reason = f"nobody else holds the state of the training, and it is not proved that its process has ended ({why})"
        return [Log("not_removed", {"replica": replica, "reason": reason}) for replica in lost]

    # -- changes at a step boundary ------------------------------------------------------------------------------

    def _propose(self) -> list[Action]:
        """Ask every leader for its promise if there is a change to make and none is under way."""
        return [*self._send_on(), *self._prepare()]

    def _prepare(self) -> list[Action]:
        view = self.view
        if view is None or self.proposal is not None or not self.job.settled or self.done:
            return []
        here = set(view.replicas)
        if here & set(self.job.finished) or any(self._conn(replica) is None for replica in here):
            return []
        joins, contributes, leaves = wanted(view, self.joiners.waiting, self.job.caught_up, self.leaving, self.draining)
        if not (joins or contributes or leaves):
            return []
        self._proposals += 1
        step = max(self.links[self._link_of(replica)].step for replica in here) + self._margin
        number = self._proposals << 32 | self._lifetime
        loops = {self.links[self._link_of(replica)].loop for replica in joins} - {0}
        self.proposal = Proposal(number, step, joins, contributes, leaves)
        prepare = m.Prepare(number, view.epoch, step, min(loops, default=0))
        return [Send(self._link_of(replica), prepare) for replica in view.replicas]

    def _promised(self, link: _LeaderLink, promise: m.Promise) -> list[Action]:
        link.step = max(link.step, promise.step)
        proposal, view = self.proposal, self.view
        if proposal is None or view is None or self.done or promise.proposal != proposal.number:
            return []
        if not promise.ok:
            self._margin = min(2 * self._margin, 1 << 20)
            return [*self._cancel(), *self._propose()]
        proposal.promised.add(link.replica)
        if proposal.promised < set(view.replicas):
            return []
        self.proposal = None
        for replica in proposal.joins:
            self.joiners.drop(replica)
        self.job.caught_up -= proposal.contributes
        members = proposal.applied(view.members)
        return self._decide(members, proposal.step, proposal.why(), proposal.number)

    def _withdrawn(self, message: m.Withdrawn) -> list[Action]:
        if self.proposal is not None and self.proposal.number == message.proposal:
            self._margin = min(2 * self._margin, 1 << 20)
            return [*self._cancel(), *self._propose()]
        if self.view is not None and 0 != self.view.proposal == message.proposal and not self.job.installed:
            self._margin = min(2 * self._margin, 1 << 20)
            return self._lose({}, proved=True)
        return []

    def _cancel(self) -> list[Action]:
        if self.proposal is None or self.view is None:
            return []
        number, self.proposal = self.proposal.number, None
        conns = [self._conn(replica) for replica in self.view.replicas]
        return [Send(conn, m.Cancel(number)) for conn in conns if conn is not None]

    # -- deciding ------------------------------------------------------------------------------------------------

    def _decide(self, members: tuple[Member, ...], step: int | None, why: str, proposal: int = 0) -> list[Action]:
        if self.job.epoch + 1 >= EPOCHS:
            return self._finish(
                f"all {EPOCHS - 1:,} epochs that a job can have are used up; start it again from its last checkpoint, "
                "with an empty --store"
            )
        view, hearers = self.job.decide(members, step, why, proposal)
        self._blame.clear()
        self._severed.clear()
        self._suspicions.keep(self.lives)
        conns = [self._conn(replica) for replica in sorted(hearers)]
        described = [{"replica": member.replica, "contributing": member.contributing} for member in members]
        begins = step if proposal or self.job.before is None else None  # a loss has no boundary
        return [
            Persist(view),
            *[Send(conn, m.NewView(view)) for conn in conns if conn is not None],
            Log("view", {"epoch": view.epoch, "step": begins, "members": described, "why": why}),
        ]

    def _check_done(self) -> list[Action]:
        if self.view is None or self.done:
            return []
        # After a drain the members are those of the view before.
        last = self.view if self.view.members or self.job.before is None else self.job.before
        if set(last.replicas) <= set(self.job.finished):
            return [*self._turn_away(FINISHED), *self._finish()]
        return []

    def _finish(self, failed: str = "") -> list[Action]:
        if self.done:
            return []
        self.done = True
        return [Log("failed", {"reason": failed}), Done(failed)] if failed else [Done()]

    def _turn_away(self, word: m.Expelled | m.Dismissed) -> list[Action]:
        """Send `word` to all joiners and forget them."""
        conns = [self._conn(replica) for replica in self.joiners.clear()]
        return [Send(conn, word) for conn in conns if conn is not None]

    # -- look-ups ------------------------------------------------------------------------------------------------

    def _life(self, replica: int, incarnation: str) -> Member | None:
        """A member of a view in force, or a joiner."""
        known = (*(x for view in self.job.in_force for x in view.members), *self.joiners)
        return next((x for x in known if (x.replica, x.incarnation) == (replica, incarnation)), None)

    def _conn(self, replica: int) -> Conn | None:
        return next((conn for conn, link in self.links.items() if link.replica == replica), None)

    def _link_of(self, replica: int) -> Conn:
        conn = self._conn(replica)
        assert conn is not None, f"replica {replica} has no connection"
        return conn


def _removed(replica: int, removal: Removal, reason: str) -> Log:
    """Tell the launcher of a replica that its process may live, and has to be ended."""
    return Log("removed", {"replica": replica, "removal": removal.value, "reason": reason})
