"""Takes replicas in that come to the coordinator: new ones and members that connect again; refuses others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ftcomm.control import messages as m
from ftcomm.control.blame import Removal
from ftcomm.control.boundary_changes import BoundaryChanges
from ftcomm.control.coordinator_actions import Close, Conn, CoordinatorAction, Keep, Log, Send, Unfit
from ftcomm.control.decisions import Decisions
from ftcomm.control.join_terms import other_job, too_large
from ftcomm.control.joiner_messages import OVER, WAITS, JoinerMessages
from ftcomm.control.known_job import KnownJob
from ftcomm.control.leader_links import LeaderLink
from ftcomm.control.lost_members import LostMembers
from ftcomm.control.presence import Presence
from ftcomm.control.reconfiguration import contributing
from ftcomm.control.removals import removed
from ftcomm.control.suspects import Suspects
from ftcomm.control.unstarted import NamedRank, Unstarted, UnstartedRanks
from ftcomm.control.views import Member


class Admissions:
    """The way of a replica into the job, as far as the coordinator has a say in it."""

    def __init__(
        self,
        known: KnownJob,
        joiner_messages: JoinerMessages,
        decisions: Decisions,
        changes: BoundaryChanges,
        lost: LostMembers,
        suspects: Suspects,
        presence: Presence,
        unstarted: Iterable[Unstarted],
    ) -> None:
        """`unstarted` is what was kept by `Keep`."""
        self._known, self._joiner_messages, self._decisions, self._changes = known, joiner_messages, decisions, changes
        self._lost, self._suspects, self._presence = lost, suspects, presence
        self._refusals: dict[int, tuple[str, str]] = {}  # by replica: the last life that was refused, and why
        self._unstarted = UnstartedRanks(known.expected, unstarted)

    def join(self, conn: Conn, join: m.Join, now: float) -> list[CoordinatorAction]:
        known = self._known
        replica = join.replica
        refusal = self._refusal(join)
        refused = "" if refusal is None else refusal.reason
        if not refused and known.view is not None and max(join.epoch, join.heard) > known.job.epoch:
            return self._outdated(conn, join, now)
        if refused and join.epoch > 0 and not known.done:  # it runs: this coordinator may be the one started wrongly
            return [*self._refuse(replica, join.incarnation, refused), Close(conn)]
        if refusal is not None:
            said_so = self._refuse(replica, join.incarnation, refused)
            return [*said_so, Send(conn, refusal), Close(conn), *self._tell_forming()]
        if known.job.counts(replica, join.incarnation):
            known.unvisited = False
        actions: list[CoordinatorAction] = []
        said = known.links.get(conn)
        if said is not None and (said.replica, said.incarnation) != (replica, join.incarnation):
            # A connection speaks for one life of one replica.
            return [*self._suspects.disconnected(conn, now), Close(conn)]
        if join.epoch > 0 and not known.job.counts(replica, join.incarnation):
            return self._outlived(conn, join, now)
        if self._is_taken(replica, join.incarnation, now):
            reason = (
                f"another process is replica {replica}, and answers; give each replica a number of its own "
                "(FTCOMM_REPLICA)"
            )
            again = Send(conn, m.Queued(reason))  # it tries again
            return [*self._refuse(replica, join.incarnation, reason), again, Close(conn)]
        if join.heard > 0 and known.view is None:  # the replica may enter that view at any moment
            reason = f"it was told of epoch {join.heard} of a job that this coordinator has no file of views of"
            return [*self._refuse(replica, join.incarnation, reason), Close(conn)]  # it tries again
        old = known.links.conn_of(replica)
        if old is not None and old != conn:
            if known.links[old].incarnation == join.incarnation:
                del known.links[old]  # it has connected again before the old connection closed
            else:
                actions += self._suspects.disconnected(old, now)
            actions.append(Close(old))
        if not known.job.counts(replica, join.incarnation) and known.job.is_member(replica):
            if known.is_early(now):
                return [*actions, Close(conn)]  # it tries again
            known.note_loss({replica})
            if known.others_may_hold({replica}):
                return [*actions, *self._lost.postpone({replica: "restarted"}), Close(conn)]  # it tries again
            known.job.unfinish(replica)  # the earlier life is lost, however it ended
            actions += self._decisions.store_finishes()
            actions += self._lost.lose({replica: "restarted"}, proved=True)
            if known.done:
                return [*actions, Send(conn, m.Removed("the job has ended with its earlier life")), Close(conn)]
        link = known.links[conn] = LeaderLink(replica, join.incarnation, join.step, join.epoch, join.loop)
        known.not_reconnected.discard((replica, join.incarnation))
        known.blame.connected(replica)
        actions += self._presence.heard(link, now)
        if known.job.counts(replica, join.incarnation):
            if join.leaving:
                known.leaving.add(replica)
            if join.caught_up:
                known.job.caught_up.add(replica)
            return [*actions, *self._rejoined(conn, join), *self._reach(join)]
        if known.job.unfinish(replica):
            actions += self._decisions.store_finishes()
        known.leaving.discard(replica)  # the earlier life wanted that
        known.job.caught_up.discard(replica)
        actions.append(Log("joined", {"replica": replica}))
        return [*actions, *self._register(conn, join), *self._reach(join)]

    def _refuse(
        self, replica: int, incarnation: str, reason: str, *, hopeless: bool = False
    ) -> list[CoordinatorAction]:
        """Log once why a life is refused, since it may try again twice a second. `hopeless`: the job cannot begin."""
        refusal = incarnation, reason
        if self._refusals.get(replica) == refusal:
            return []
        self._refusals[replica] = refusal
        return [Log("refused", {"replica": replica, "reason": reason, **({"hopeless": True} if hopeless else {})})]

    def unstarted(
        self, rank: NamedRank, reason: str, lasting: bool, conns: Mapping[Conn, NamedRank], now: float
    ) -> list[CoordinatorAction]:
        """Note that a rank cannot start; `lasting`: nor if it is started again. `conns` are all leaders that are here.
        The one of its replica, which has not joined yet, waits for that rank; that of another replica asks, if it is in
        no view."""
        known = self._known
        replica = rank.replica
        here = {conn: leader for conn, leader in conns.items() if leader.replica == replica and conn not in known.links}
        waiting = [conn for conn, leader in here.items() if leader.needs(rank)]
        if known.links.conn_of(replica) is not None or (here and not waiting):  # another process has its number, too
            return self._refuse(replica, "", reason)
        report = self._unstarted.said(rank, reason, lasting, now)
        hopeless = lasting and known.view is None and replica < known.expected
        refused = self._refuse(replica, "", report.reason, hopeless=hopeless)
        removed = m.Removed(report.reason)
        told: list[CoordinatorAction] = [Send(conn, removed) for conn in waiting]
        others = self._joiner_messages.turn_away(removed) if hopeless else self._tell_forming()
        return [Keep(self._unstarted.reports), *refused, *told, *others]

    def asked(self, conn: Conn, rank: NamedRank, lived: float, now: float) -> list[CoordinatorAction]:
        """Tell a process, which is in no view and has run for `lived` seconds, whether it waits for a rank that cannot
        start."""
        reason = self._unstarted.why(rank, now - lived, self._known.view is None)
        return [*([Send(conn, m.Removed(reason))] if reason else []), Close(conn)]

    def _is_taken(self, replica: int, incarnation: str, now: float) -> bool:
        """Whether another life of the replica answers, or is a member that may answer. A second life is then no proof
        that the first one has ended. A member that connects again has the number in any case."""
        known = self._known
        if known.job.counts(replica, incarnation) or replica in known.job.finished:
            return False
        old = known.links.conn_of(replica)
        if old is not None:
            other = known.links[old].incarnation != incarnation
            return other and known.detector.answers(replica, known.timeouts.silence, now)
        members = [member for member in known.job.running if member.replica == replica]
        return any(known.suspicions.may_live((replica, member.incarnation), known.ran.seconds) for member in members)

    def _reach(self, join: m.Join) -> list[CoordinatorAction]:
        """Find out while a life runs whether its port answers, and so whether a later refusal means anything."""
        took = self._known.suspicions.took((join.replica, join.incarnation))
        return [] if took else self._suspects.search(join.replica, join.incarnation)

    def _outdated(self, conn: Conn, join: m.Join, now: float) -> list[CoordinatorAction]:
        """Decide nothing more: the replica has been in views that the store lacks, whose numbers would be used
        twice."""
        known = self._known
        reason = (
            f"the store is older than the job: it ends with epoch {known.job.epoch}, and replica {join.replica} knows "
            f"of epoch {max(join.epoch, join.heard)}. The job goes on without a coordinator; start one with the store "
            "that it had"
        )
        if not known.job.counts(join.replica, join.incarnation) and not known.is_early(now) and not known.alone:
            # All known members have come and this one is unknown: it may belong to another job.
            return [*self._refuse(join.replica, join.incarnation, reason), Close(conn)]
        known.unfit = True
        return [Log("outdated", {"replica": join.replica, "reason": reason}), Close(conn), Unfit(reason)]

    def _register(self, conn: Conn, join: m.Join) -> list[CoordinatorAction]:
        """Take the replica in as a joiner. In a running job no member waits for it before its script is ready."""
        replica = join.replica
        member = Member(replica, join.incarnation, join.ranks, contributing=False)
        self._known.joiners.add(member, ready=join.ready or self._known.view is None)
        self._refusals.pop(replica, None)
        kept: list[CoordinatorAction] = [Keep(self._unstarted.reports)] if self._unstarted.started(replica) else []
        return [*kept, *self._let_in(conn, join)]

    def _let_in(self, conn: Conn, join: m.Join) -> list[CoordinatorAction]:
        known = self._known
        replica = join.replica
        if known.view is None:
            return self._form()
        if join.leaving:
            return self.dismiss(conn, replica)
        if join.ready:
            return [Log("ready", {"replica": replica}), Send(conn, known.unheard or WAITS), *self._changes.propose()]
        if known.unheard is not None:
            return [Send(conn, known.unheard)]
        reason = "joins when a step boundary was passed; no member has come to one yet (ftcomm.steps, Group.boundary)"
        return self._joiner_messages.register() or [Send(conn, m.Queued(reason, m.Stage.JOINING))]

    def dismiss(self, conn: Conn, replica: int) -> list[CoordinatorAction]:
        """Let a joiner go that has asked to leave before it was in any view: there is no boundary to wait for."""
        reason = "it has asked to leave before it had joined"
        return [
            Log("dismissed", {"replica": replica, "reason": reason}),
            Send(conn, m.Dismissed(reason)),
            *self._changes.forget(replica),
        ]

    def _outlived(self, conn: Conn, join: m.Join, now: float) -> list[CoordinatorAction]:
        """Send a replica away that says it runs in the job, when the job has gone on without it. Another life may have
        its number by now."""
        known = self._known
        replica = join.replica
        actions: list[CoordinatorAction] = []
        old = known.links.conn_of(replica)
        if old is not None and known.links[old].incarnation == join.incarnation:
            actions += self._suspects.disconnected(old, now)
            known.detector.forget(replica)
            if old != conn:
                actions.append(Close(old))
        if known.view is None:  # let it train on: a lost file is no reason to end a job
            reason = f"it runs in epoch {join.epoch} of a job that this coordinator has no file of views of"
            return [*actions, *self._refuse(replica, join.incarnation, reason), Close(conn)]
        reason = (
            f"replica {replica} was removed from the job in epoch {known.job.epoch} or before, while it was not heard"
        )
        event = removed(replica, Removal.SILENCE, "the job went on without it while it was not heard")
        return [*actions, event, Send(conn, m.Removed(reason)), Close(conn)]

    def _refusal(self, join: m.Join) -> m.Removed | None:
        known = self._known
        other = other_job(join, known.expected, known.ranks_per_replica, known.timeouts) or too_large(
            join, known.expected
        )
        if other:
            return m.Removed(other)
        member = known.job.counts(join.replica, join.incarnation)  # in a view that it may not have installed yet
        if known.done or (known.draining and join.epoch == 0 and not member):
            return OVER
        return None

    def _tell_forming(self) -> list[CoordinatorAction]:
        """Tell those that wait for the first view of the job for which replicas they wait, and why."""
        known = self._known
        if known.view is not None:
            return []
        here = known.joiners.waiting
        whys = {replica: f" (refused: {reason})" for replica, (_, reason) in self._refusals.items()}
        missing = (f"{replica}{whys.get(replica, '')}" for replica in range(known.expected) if replica not in here)
        reason = f"{len(here)} of {known.expected} replicas are here; missing: {', '.join(missing)}"
        return [Send(known.conn_of(replica), m.Queued(reason)) for replica in here]

    def _form(self) -> list[CoordinatorAction]:
        here = self._known.joiners.waiting
        if len(here) < self._known.expected:
            return self._tell_forming()
        members = [contributing(member) for member in here.values()]
        self._known.joiners.clear()
        return self._decisions.decide(tuple(sorted(members, key=lambda x: x.replica)), 0, "all replicas are here")

    def _rejoined(self, conn: Conn, join: m.Join) -> list[CoordinatorAction]:
        """Take back a member that has connected again, after a restart of the coordinator or a lost connection."""
        known = self._known
        assert known.view is not None
        if join.replica in known.job.holders:
            known.not_lost()
        if join.epoch == known.view.epoch:
            asked = self._changes.proposal is not None and join.replica not in self._changes.proposal.promised
            again = self._changes.cancel() if asked else []  # the question or its answer may have been lost
            return [*again, *self._changes.installed(join.replica, join.epoch), *self._joiner_messages.register()]
        actions: list[CoordinatorAction] = [Send(conn, m.NewView(known.view))]
        if known.unheard is not None and join.epoch == 0:  # maybe no member will run in that view
            actions.append(Send(conn, known.unheard))
        return [*actions, *self._joiner_messages.register()]
