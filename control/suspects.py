"""Finds out whether a process that is suspected has ended: one that is not heard, or that others accuse. Pure."""

from __future__ import annotations

from ftcomm.control import messages as m
from ftcomm.control.boundary_changes import BoundaryChanges
from ftcomm.control.coordinator_actions import Close, Conn, CoordinatorAction, Log
from ftcomm.control.known_job import KnownJob
from ftcomm.control.lost_members import LostMembers
from ftcomm.control.probe_schedule import Accusation, Conclusion, Probe, ProbeOutcome, ProbeReason
from ftcomm.control.views import Life


class Suspects:
    """The suspected processes: they are probed as `ftcomm.control.probe_schedule` says; what is proved is acted on."""

    def __init__(self, known: KnownJob, changes: BoundaryChanges, lost: LostMembers, boot: str) -> None:
        """`boot` names the kernel of this host."""
        self._known, self._changes, self._lost, self._boot = known, changes, lost, boot

    def search(self, replica: int, incarnation: str) -> list[CoordinatorAction]:
        known = self._known
        member = known.life(replica, incarnation)
        return (
            []
            if member is None
            else [*known.suspicions.search(member, known.links.conn_of(replica) is None, known.ran.seconds)]
        )

    def disconnected(self, conn: Conn, now: float) -> list[CoordinatorAction]:
        known = self._known
        known.ran.at(now)
        link = known.links.pop(conn, None)
        if link is None:
            return []
        known.held.pop(conn, None)  # the leader repeats it
        replica = link.replica
        if known.job.counts(replica, link.incarnation):
            return [] if replica in known.job.finished else self.search(replica, link.incarnation)
        if known.joiners.has(replica, link.incarnation):
            known.detector.forget(replica)
            known.suspicions.forget((replica, link.incarnation))
            return self._changes.forget(replica)
        return []

    def probed(self, probe: Probe, outcome: ProbeOutcome, now: float) -> list[CoordinatorAction]:
        """Take the outcome of a `Probe`."""
        known = self._known
        replica, life = probe.life[0], probe.life
        found = known.suspicions.probed(probe, outcome, known.ran.at(now))
        if outcome in (ProbeOutcome.ENDED, ProbeOutcome.REFUSED):
            known.unacknowledged.discard(life)
        if known.life(*life) is None:
            known.suspicions.forget(life)  # the replica has gone meanwhile
            return []
        if known.done or known.unfit:
            return []
        if isinstance(found, Probe):
            return [found]
        if probe.why is ProbeReason.SEVERED:
            mends = found is Conclusion.LIVES and known.severed and not known.job.changing
            return self.reconnect() if mends else []
        if probe.why is ProbeReason.SEARCH and self._stands(life, found, now):
            return []
        if found is Conclusion.NOTHING or replica in known.job.finished or known.is_early(now):
            return []
        if not known.job.counts(*life):
            conn = known.links.conn_of(replica)
            return self._changes.forget(replica) if conn is None else [Close(conn), *self.disconnected(conn, now)]
        if isinstance(found, Accusation):
            return self._judge(found)
        why = known.suspicions.why(probe)
        if found is Conclusion.REFUSED:
            return self._refused(life, 0, why)
        return self._lost.lose({replica: why}, proved=found is Conclusion.ENDED)

    def _stands(self, life: Life, found: object, now: float) -> bool:
        """Whether the outcome of a probe at the port of a leader proves nothing: the leader lives, or its connection
        stands."""
        known = self._known
        replica = life[0]
        if found is Conclusion.LIVES:
            known.detector.acknowledged(replica, now)
        if known.links.conn_of(replica) is None:
            return found is Conclusion.LIVES
        if known.detector.within(replica, known.timeouts.presence, now):
            known.suspicions.heard(life)
        # Otherwise something in between refuses, or that connection is about to end.
        return known.detector.answers(replica, known.timeouts.presence, now)

    def _refused(self, life: Life, shard: int, why: str) -> list[CoordinatorAction]:
        """Take the report that another host refuses a rank. Something in between may refuse as well while it restarts,
        for all that are behind it. So the rank is lost as soon as a second host takes a connection and the first one
        still refuses; otherwise it is lost when it is missed like a silent one. The last holder of the state is never
        lost in this way."""
        known = self._known
        member = known.life(*life)
        if member is None or shard >= len(member.ranks):
            return []
        others = (x.ranks[shard] for x in known.job.running if x.replica != life[0] and x.replica in known.job.holders)
        hosts = {there.boot: there for there in others if there.boot != self._boot}
        return [*known.suspicions.refused(life, shard, member.ranks[shard], why, hosts.values(), known.ran.seconds)]

    def suspected(self, by: int, suspect: m.Suspect, now: float) -> list[CoordinatorAction]:
        known = self._known
        replica, life = suspect.replica, (suspect.replica, suspect.incarnation)
        if not known.job.counts(*life) or replica in known.job.finished:
            return []
        if suspect.proof:
            accusation = Accusation(life, suspect.shard, by, suspect.reason, own=by == replica, script=suspect.script)
            return self.accuse(accusation, now)
        if by == replica:
            return self._refused(life, suspect.shard, suspect.reason)
        news = known.blame.complaint(by, replica, known.ran.seconds, suspect.reason)
        fields: dict[str, object] = {"replica": replica, "reason": suspect.reason, "by": by}
        if suspect.silent:
            fields["silent"] = True
        return [Log("suspect", fields)] if news else []

    def accuse(self, accusation: Accusation, now: float) -> list[CoordinatorAction]:
        """Keep the proof that a process has ended. It is sent once, and its sender may end."""
        member = self._known.life(*accusation.life)
        if member is None or accusation.shard >= len(member.ranks) or not self._known.suspicions.accuse(accusation):
            return []
        how = accusation.script.fields if accusation.script is not None else {}
        fields = {"replica": member.replica, "reason": accusation.why, "by": accusation.by, **how}
        return [Log("suspect", fields), *self.pursue(now)]

    def pursue(self, now: float) -> list[CoordinatorAction]:
        """Act on proofs where that is possible now. A proof by another member holds unless the accused answers the
        coordinator."""
        known = self._known
        actions: list[CoordinatorAction] = []
        for accusation in [] if known.is_early(now) else known.suspicions.accusations():
            member = known.life(*accusation.life)
            if member is None or member.replica in known.job.finished or known.done:
                known.suspicions.drop(accusation)
            elif accusation.own:
                actions += self._judge(accusation)
            else:
                known.note_loss({member.replica})
                if known.others_may_hold({member.replica}):
                    actions += self._lost.postpone({member.replica: accusation.why})
                else:
                    actions.append(known.suspicions.ask(accusation, member.ranks[accusation.shard], known.ran.seconds))
        return actions

    def _judge(self, accusation: Accusation) -> list[CoordinatorAction]:
        replica = accusation.life[0]
        if not accusation.refuted:
            self._known.note_loss({replica})
            if self._known.others_may_hold({replica}):
                return self._lost.postpone({replica: accusation.why})
            self._known.suspicions.drop(accusation)
            return self._lost.lose({replica: accusation.why}, proved=True)
        self._known.suspicions.drop(accusation)
        self._known.not_lost()
        reason = f"replica {accusation.by} says that it has ended ({accusation.why}), and it answers"
        return [Log("not_removed", {"replica": replica, "reason": reason})]

    def connection_ended(self, by: int, ended: m.Severed, now: float) -> list[CoordinatorAction]:
        """Take the report that a connection for data has ended, which is no fault of a process that lives."""
        known = self._known
        replica, life = ended.replica, (ended.replica, ended.incarnation)
        member = (
            known.life(*life)
            if known.job.counts(*life) and replica not in known.job.finished and replica != by
            else None
        )
        if member is None or known.is_early(now) or all(view.epoch != ended.epoch for view in known.job.in_force):
            return []  # the sender repeats it; or a new view makes the connection again
        log: list[CoordinatorAction] = [Log("suspect", {"replica": replica, "reason": ended.reason, "by": by})]
        told = known.severed.knows(by, replica)
        if not known.severed.said(by, replica, ended.epoch, known.ran.seconds):
            return log if known.blame.complaint(by, replica, known.ran.seconds, ended.reason) else []
        there = [address for shard, address in enumerate(member.ranks) if shard == ended.shard]
        probes = [probe for address in there for probe in known.suspicions.sever(life, ended.shard, address)]
        return [*([] if told else log), *probes]

    def reconnect(self) -> list[CoordinatorAction]:
        """Make a view of the same members, in which the connections that have ended are made again. It gives up a
        change under way, as a loss does."""
        return self._lost.lose({}, proved=True, why=self._known.severed.mend())
