"""The coordinator decides who is in the job. It is a pure state machine that `ftcomm.control.server` drives.

The job needs it only to change membership. It persists a view before it sends it, so that no epoch is used twice and a
restarted coordinator knows the job; and who has finished, who cannot say so again. The members tell it everything else
when they connect again.

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
proved to have ended, and none that catches up has become one (`KnownJob.others_may_hold`). If a connection for data
ends between two members that live, a view of the same members makes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ftcomm.control import messages as m
from ftcomm.control.admissions import Admissions
from ftcomm.control.boundary_changes import BoundaryChanges
from ftcomm.control.coordinator_actions import Close, Conn, CoordinatorAction, Log, Send
from ftcomm.control.decisions import Decisions
from ftcomm.control.finishes import NO_FINISHES, Finishes
from ftcomm.control.joiner_messages import DRAINED, WAITS, JoinerMessages
from ftcomm.control.known_job import KnownJob
from ftcomm.control.leader_links import LeaderLink
from ftcomm.control.lost_members import LostMembers
from ftcomm.control.presence import Presence
from ftcomm.control.probe_schedule import Accusation, Probe, ProbeOutcome
from ftcomm.control.reconfiguration import Proposal
from ftcomm.control.removals import Removals
from ftcomm.control.script_end import ScriptEnd
from ftcomm.control.suspects import Suspects
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank, Unstarted
from ftcomm.control.views import Address, Life, View


class Coordinator:
    """The state machine, which hands each event to the part that it concerns. Not thread-safe. Every method takes the
    time `now` (s, any origin) and returns actions in order."""

    def __init__(
        self,
        replicas: int,
        ranks_per_replica: int,
        timeouts: Timeouts,
        views: list[View],
        now: float,
        lifetime: int,
        state: Callable[[Address], str] = lambda there: "",
        boot: str = "",
        unstarted: Iterable[Unstarted] = (),
        finishes: Finishes = NO_FINISHES,
    ) -> None:
        """`views` are the last two that were persisted. No earlier run of this job's coordinator had the number
        `lifetime`. `state` tells what the process at an address does, where this host can see it
        (`ftcomm.control.liveness.state_of`). `boot` names the kernel of this host, `unstarted` is what was kept by
        `Keep`, and `finishes` what was stored by `StoreFinishes`."""
        self.known = known = KnownJob(replicas, ranks_per_replica, timeouts, views, now, finishes)
        self.job, self.links, self.joiners = known.job, known.links, known.joiners
        self._joiner_messages = JoinerMessages(known)
        self._decisions = Decisions(known, self._joiner_messages)
        self._changes = BoundaryChanges(known, self._decisions, lifetime)
        self._lost = LostMembers(known, self._joiner_messages, self._decisions, self._changes)
        self._suspects = Suspects(known, self._changes, self._lost, boot)
        self._presence = Presence(known, self._joiner_messages, self._suspects)
        self._removals = Removals(known, self._changes, self._lost, self._suspects, state)
        self._admissions = Admissions(
            *(known, self._joiner_messages, self._decisions, self._changes, self._lost, self._suspects, self._presence),
            unstarted,
        )

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self.known.view

    @property
    def alone(self) -> bool:
        """Whether no contributing member can be heard."""
        return self.known.alone

    @property
    def lives(self) -> set[Life]:
        """The lives that run, or want to join."""
        return self.known.lives

    @property
    def proposal(self) -> Proposal | None:
        """The change at a boundary that waits for promises."""
        return self._changes.proposal

    # -- events --------------------------------------------------------------------------------------------------

    def receive(self, conn: Conn, message: m.Message, now: float) -> list[CoordinatorAction]:
        known = self.known
        if known.unfit:
            return [Close(conn)]
        known.ran.at(now)
        if isinstance(message, m.Join):
            return self._admissions.join(conn, message, now)
        link = known.links.get(conn)
        if link is None:
            return [Close(conn)]
        met = self._presence.heard(link, now)
        if isinstance(message, m.Report):
            return [*met, Log(message.kind, {**message.fields, "replica": link.replica})]
        if not known.job.counts(link.replica, link.incarnation):
            return [*met, *self._from_joiner(conn, link, message, now)]
        return [*met, *self._from_member(conn, link, message, now)]

    def _from_joiner(self, conn: Conn, link: LeaderLink, message: m.Message, now: float) -> list[CoordinatorAction]:
        known = self.known
        replica = link.replica
        if isinstance(message, m.Finished):
            return [Send(conn, m.FinishAck())]
        if not known.joiners.has(replica, link.incarnation):
            return []
        if isinstance(message, m.Suspect) and (message.replica, message.proof) == (replica, True):
            said = Log("suspect", {"replica": replica, "reason": message.reason, "by": replica})
            return [said, Close(conn), *self._suspects.disconnected(conn, now)]
        if known.view is None:
            return []
        if isinstance(message, m.Ready) and known.joiners.ready(replica):
            link.loop = message.loop
            return [Log("ready", {"replica": replica}), Send(conn, known.unheard or WAITS), *self._changes.propose()]
        if isinstance(message, m.Leave):
            return self._admissions.dismiss(conn, replica)
        return []

    def _from_member(self, conn: Conn, link: LeaderLink, message: m.Message, now: float) -> list[CoordinatorAction]:
        known = self.known
        replica = link.replica
        if isinstance(message, m.Heartbeat):
            link.step, link.loop, link.mute = message.step, message.loop, message.mute
            link.since = link.since if link.divided else known.ran.seconds
            link.divided = message.divided
            sent_on = self._changes.send_on()
            return [*self._joiner_messages.register(), *sent_on, *(self._changes.propose() if sent_on else [])]
        elif isinstance(message, m.Suspect):
            return self._suspects.suspected(replica, message, now)
        elif isinstance(message, m.Severed):
            return self._suspects.connection_ended(replica, message, now)
        elif isinstance(message, m.Stalled):
            return self._removals.stalled(replica, message)
        elif isinstance(message, m.Reachable):
            known.blame.withdraw(replica, message.replica)
        elif isinstance(message, m.Promise):
            return self._changes.promised(link, message)
        elif isinstance(message, m.Withdrawn) and known.is_early(now):
            known.held[conn] = message
        elif isinstance(message, m.Withdrawn):
            return self._lost.withdrawn(message)
        elif isinstance(message, m.Installed):
            link.epoch = message.epoch
            return self._changes.installed(replica, message.epoch)
        elif isinstance(message, m.CaughtUp):
            repeated = replica in known.job.caught_up  # as when all its ranks have connected again
            known.job.caught_up.add(replica)
            told = Log("caught_up", {"replica": replica, "step": message.step})
            return [] if repeated else [told, *self._changes.propose()]
        elif isinstance(message, m.Leave):
            known.leaving.add(replica)
            return self._changes.propose()
        elif isinstance(message, m.Finished):
            known.job.finish(replica, now)
            known.unacknowledged.discard((replica, link.incarnation))
            stored = self._decisions.store_finishes()
            ack = Send(conn, m.FinishAck())
            return [*stored, Log("finished", {"replica": replica}), ack, *self._decisions.check_done()]
        return []

    def exited(self, replica: int, code: int, now: float) -> list[CoordinatorAction]:
        """The launcher of a replica has seen it exit with `code`, which is that of an error. The replica may have said
        that it has finished, since no process knows its own exit code."""
        if self.known.done or not self.known.job.unfinish(replica):
            return []
        stored = self._decisions.store_finishes()
        life = next(((x.replica, x.incarnation) for x in self.known.job.running if x.replica == replica), None)
        if life is None:
            return stored
        script = ScriptEnd.with_code(code)
        accusation = Accusation(life, 0, replica, str(script), own=True, script=script)
        return [*stored, *self._suspects.accuse(accusation, now)]

    def leaderless(self, replica: int, incarnation: str, reason: str, now: float) -> list[CoordinatorAction]:
        """Note that the leader of a replica has ended, as its shard 0 says, which ends with it."""
        if self.known.done or self.known.unfit:
            return []
        self.known.ran.at(now)
        return self._suspects.suspected(replica, m.Suspect(replica, incarnation, reason, proof=True), now)

    def drain(self) -> list[CoordinatorAction]:
        """Let all members leave at one common step boundary, and turn joiners away."""
        self.known.draining = True
        actions: list[CoordinatorAction] = [Log("draining", {})]
        if self.known.view is None:
            return [*actions, *self._joiner_messages.turn_away(m.Removed(DRAINED)), *self._decisions.finish()]
        if self._changes.proposal is not None:
            actions += self._changes.cancel()
        return [*actions, *self._joiner_messages.turn_away(m.Dismissed(DRAINED)), *self._changes.propose()]

    def disconnected(self, conn: Conn, now: float) -> list[CoordinatorAction]:
        return self._suspects.disconnected(conn, now)

    def probed(self, probe: Probe, outcome: ProbeOutcome, now: float) -> list[CoordinatorAction]:
        """Take the outcome of a `Probe`."""
        return self._suspects.probed(probe, outcome, now)

    def unstarted(
        self, rank: NamedRank, reason: str, lasting: bool, conns: Mapping[Conn, NamedRank], now: float
    ) -> list[CoordinatorAction]:
        """Note that a rank cannot start; see `Admissions`."""
        return self._admissions.unstarted(rank, reason, lasting, conns, now)

    def asked(self, conn: Conn, rank: NamedRank, lived: float, now: float) -> list[CoordinatorAction]:
        """Tell a process that asks whether it waits for a rank that cannot start; see `Admissions`."""
        return self._admissions.asked(conn, rank, lived, now)

    def mute(self, longer: float, now: float) -> set[Conn]:
        """Returns the connections of leaders that have not spoken for `longer` seconds, and whose kernels answer."""
        mute = self.known.detector.mute(now).items()
        conns = (self.known.links.conn_of(replica) for replica, seconds in mute if seconds > longer)
        return {conn for conn in conns if conn is not None}

    def acknowledged(self, conn: Conn, at: float) -> None:
        """Note that the kernel at the other end has answered, whatever its process does."""
        link = self.known.links.get(conn)
        if link is not None:
            link.acknowledged = max(link.acknowledged, at)
            self.known.detector.acknowledged(link.replica, at)

    def tick(self, now: float) -> list[CoordinatorAction]:
        """Act on what is due. The caller does so several times per heartbeat timeout."""
        known = self.known
        if known.done or known.unfit:
            return []
        known.ran.at(now)
        silent = known.detector.silent(now)
        known.ticked()
        actions: list[CoordinatorAction] = [*self._presence.look(silent, now)]
        if known.is_early(now):
            return actions
        actions += self._decisions.check_done()  # they may have finished before this coordinator came
        held, known.held = known.held, {}
        for message in held.values():
            actions += self._lost.withdrawn(message)
        actions += self._suspects.pursue(now)
        if known.done:
            return actions
        return actions + self._removals.due(silent, now)
