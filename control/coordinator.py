"""The coordinator: decides who is in the job. A pure state machine, driven by `ftcomm.control.server`.

It is needed only to change membership. Views are persisted before they are sent, so that an epoch is never reused
and a restarted coordinator knows the job; what else it must know its members tell it when they connect again.

    forming   fewer replicas than expected have joined, no view yet
    steady    all members have installed the view
    losing    a view without lost members is out; not all have installed it yet
    changing  a proposal (join, contribute, leave) for a step boundary waits for promises, or is committed and not yet
              installed by all. A loss meanwhile gives it up: nobody can have run in it, since everybody must install it
"""

from __future__ import annotations

import dataclasses

from ftcomm.control import messages as m
from ftcomm.control.admission import other_job
from ftcomm.control.blame import Blame
from ftcomm.control.detector import Detector
from ftcomm.control.growth import Proposal, contributing, given_up, wanted
from ftcomm.control.joiners import Joiners
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Member, View

Conn = int  # a connection of a leader, numbered by the runtime

WAITS = "joins at the next step boundary that all replicas can agree on (ftcomm.steps, Group.boundary)"
DRAINED = "the job is being drained"
LINGER = 2.0  # s that a finished member stays in the view, so that a job's end is not a cascade of views


@dataclasses.dataclass(frozen=True)
class Send:
    conn: Conn
    message: m.Message


@dataclasses.dataclass(frozen=True)
class Close:
    conn: Conn


@dataclasses.dataclass(frozen=True)
class Persist:
    """Must be on the disk before the actions after it are carried out."""

    view: View


@dataclasses.dataclass(frozen=True)
class Log:
    """For the event log."""

    kind: str
    fields: dict[str, object]


@dataclasses.dataclass(frozen=True)
class Done:
    """The job has ended; `failed` says why if it did not end well."""

    failed: str = ""


Action = Send | Close | Persist | Log | Done


@dataclasses.dataclass
class _Link:
    replica: int
    incarnation: str
    step: int
    epoch: int


class Coordinator:
    """Not thread-safe. Every method takes the time `now` (seconds, any origin) and returns actions in order."""

    def __init__(
        self,
        replicas: int,
        ranks_per_replica: int,
        timeouts: Timeouts,
        views: list[View],
        now: float,
        lifetime: int,
    ) -> None:
        """`views`: the last two that were persisted. `lifetime`: a number that no earlier run of this job's
        coordinator had, so that a proposal of a dead one is never taken for one of ours."""
        self.expected = replicas
        self.ranks_per_replica = ranks_per_replica
        self.view: View | None = views[-1] if views else None
        self._before: View | None = views[-2] if len(views) > 1 else None  # what a change not yet installed replaces
        self._epoch = self.view.epoch if self.view else 0
        self._lifetime, self._proposals = lifetime & 0xFFFF_FFFF, 0
        self.timeouts = timeouts
        self.detector: Detector[int] = Detector(timeouts.silence)
        self.links: dict[Conn, _Link] = {}
        self.joiners = Joiners()  # no view has them, or one that nobody will install
        self.installed: set[int] = set()
        self.proposal: Proposal | None = None
        self._margin = 1  # steps ahead that a change is proposed for; doubled for as long as members are faster
        self.caught_up: set[int] = set()
        self.leaving: set[int] = set()
        self.draining = False
        self.finished: dict[int, float] = {}
        self._blame = Blame(timeouts.patience, timeouts.grace)
        self.done = False
        self._alone = bool(views)  # restarted, and nobody has come yet

    # -- events --------------------------------------------------------------------------------------------------

    def receive(self, conn: Conn, message: m.Message, now: float) -> list[Action]:
        if isinstance(message, m.Join):
            self._met(now)
            return self._join(conn, message, now)
        link = self.links.get(conn)
        if link is None:
            return [Close(conn)]
        self.detector.heard(link.replica, now)
        if isinstance(message, m.Report):
            return [Log(message.kind, {**message.fields, "replica": link.replica})]
        if not self._counts(link.replica, link.incarnation):
            return self._from_joiner(conn, link, message)
        return self._from_member(conn, link, message, now)

    def _met(self, now: float) -> None:
        """Restarted, the members have a heartbeat timeout to show up, from when the first one does: as long as nobody
        comes it is we who are cut off, and nobody is served by ending the job for that."""
        if self._alone:
            self._alone = False
            for member in self.awaited():
                self.detector.heard(member.replica, now)

    def awaited(self) -> list[Member]:
        """Of a restarted coordinator: members that run, as far as it knows, and have not come to it yet."""
        here = {link.replica for link in self.links.values()} | set(self.finished)
        return [member for view in self._in_force() for member in view.members if member.replica not in here]

    def _from_joiner(self, conn: Conn, link: _Link, message: m.Message) -> list[Action]:
        replica = link.replica
        if isinstance(message, m.Finished):
            return [Send(conn, m.FinishAck())]
        if self.view is None or not self.joiners.has(replica, link.incarnation):
            return []
        if isinstance(message, m.Ready) and self.joiners.ready(replica):
            return [Log("ready", {"replica": replica}), Send(conn, m.Queued(WAITS)), *self._propose()]
        if isinstance(message, m.Leave):
            return self._dismiss(conn, replica)
        return []

    def _from_member(self, conn: Conn, link: _Link, message: m.Message, now: float) -> list[Action]:
        replica = link.replica
        if isinstance(message, m.Heartbeat):
            link.step = message.step
            return self._tell_joiners()
        elif isinstance(message, m.Suspect):
            return self._suspected(replica, message, now)
        elif isinstance(message, m.Stalled):
            return self._stalled(replica, message, now)
        elif isinstance(message, m.Reachable):
            self._blame.withdraw(replica, message.replica)
        elif isinstance(message, m.Promise):
            return self._promised(link, message)
        elif isinstance(message, m.Withdrawn):
            return self._withdrawn(message)
        elif isinstance(message, m.Installed):
            link.epoch = message.epoch
            return self._installed(replica, message.epoch)
        elif isinstance(message, m.CaughtUp):
            known = replica in self.caught_up  # it says so at every boundary until a view has it contributing
            self.caught_up.add(replica)
            return [] if known else [Log("caught_up", {"replica": replica, "step": message.step}), *self._propose()]
        elif isinstance(message, m.Leave):
            self.leaving.add(replica)
            return self._propose()
        elif isinstance(message, m.Finished):
            self.finished[replica] = now
            return [Log("finished", {"replica": replica}), Send(conn, m.FinishAck()), *self._check_done()]
        return []

    def _installed(self, replica: int, epoch: int) -> list[Action]:
        if self.view is None or epoch != self.view.epoch:
            return []
        self.installed.add(replica)
        if self._settled() and self.view.proposal:  # the view after one that was withdrawn says nothing of the next
            self._margin = 1
        return self._propose()

    def disconnected(self, conn: Conn, now: float) -> list[Action]:
        link = self.links.pop(conn, None)
        if link is None:
            return []
        replica = link.replica
        if self._counts(replica, link.incarnation):
            return [] if replica in self.finished else self._lose({replica: "its connection closed"})
        if self.joiners.has(replica, link.incarnation):
            self.detector.forget(replica)
            return self._forget(replica)
        return []

    def drain(self) -> list[Action]:
        """All members leave at one common step boundary; joiners are turned away."""
        self.draining = True
        actions: list[Action] = [Log("draining", {})]
        if self.view is None:
            return [*actions, *self._turn_away(DRAINED), *self._finish()]
        if self.proposal is not None:
            actions += self._cancel()
        return [*actions, *self._turn_away(DRAINED, m.Dismissed), *self._propose()]

    def tick(self, now: float) -> list[Action]:
        """To be called several times per heartbeat timeout."""
        if self.done:
            return []
        silent = self.detector.silent(now)
        lost: dict[int, str] = {}
        actions: list[Action] = []
        for replica, seconds in silent.items():
            self.detector.forget(replica)
            conn = self._conn(replica)
            if conn is not None and not self._counts(replica, self.links[conn].incarnation):
                actions += [Close(conn), *self.disconnected(conn, now)]
            elif replica not in self.finished and self._is_member(replica):
                lost[replica] = f"silent for {seconds:.1f} s"
        for replica, since in self.finished.items():
            if self.view is not None and replica in self.view.replicas and now - since > LINGER:
                lost[replica] = "finished"
        if not lost:
            lost = self._culprit(now)
        return actions + (self._lose(lost) if lost else [])

    def _culprit(self, now: float) -> dict[int, str]:
        if self.view is None:
            return {}
        present = {  # after a restart all count as heard, so ask for a connection, too
            replica
            for replica in self.view.replicas
            if self._conn(replica) is not None and self.detector.within(replica, self.timeouts.presence, now)
        }
        return self._blame.culprit(now, self.view.contributing, present)

    # -- joining -------------------------------------------------------------------------------------------------

    def _join(self, conn: Conn, join: m.Join, now: float) -> list[Action]:
        replica = join.replica
        refused = self._refusal(join)
        if refused and join.epoch > 0 and not self.done:  # it runs: its job must not end with a wrong start of ours
            return [Log("refused", {"replica": replica, "reason": refused}), Close(conn)]
        if refused:
            return [
                Log("refused", {"replica": replica, "reason": refused}),
                Send(conn, m.Expelled(refused)),
                Close(conn),
            ]
        actions: list[Action] = []
        said = self.links.get(conn)
        if said is not None and (said.replica, said.incarnation) != (replica, join.incarnation):
            return [*self.disconnected(conn, now), Close(conn)]  # it speaks for one life of one replica, or for none
        if join.epoch > 0 and not self._counts(replica, join.incarnation):
            return self._outlived(conn, join, now)
        old = self._conn(replica)
        if old is not None and old != conn:
            if self.links[old].incarnation == join.incarnation:
                del self.links[old]  # it connected again before we saw the old connection close
            else:
                actions += self.disconnected(old, now)
            actions.append(Close(old))
        if not self._counts(replica, join.incarnation) and self._is_member(replica):
            self.finished.pop(replica, None)  # its earlier life is lost, whatever became of it
            actions += self._lose({replica: "restarted"})
            if self.done:
                return [*actions, Send(conn, m.Expelled("the job has ended with its earlier life")), Close(conn)]
        self.links[conn] = _Link(replica, join.incarnation, join.step, join.epoch)
        self.detector.heard(replica, now)
        if self._counts(replica, join.incarnation):
            if join.leaving:
                self.leaving.add(replica)
            return actions + self._rejoined(conn, join)
        self.finished.pop(replica, None)
        self.leaving.discard(replica)  # what its earlier life wanted
        self.caught_up.discard(replica)
        actions.append(Log("joined", {"replica": replica}))
        return [*actions, *self._register(conn, join)]

    def _register(self, conn: Conn, join: m.Join) -> list[Action]:
        """It has come to stay: it is known. In a running job nobody is to wait for it before its script is ready."""
        replica = join.replica
        member = Member(replica, join.incarnation, join.ranks, contributing=False)
        self.joiners.add(member, ready=join.ready or self.view is None)
        if self.view is None:
            return self._form()
        if join.leaving:
            return self._dismiss(conn, replica)
        if join.ready:
            return [Log("ready", {"replica": replica}), Send(conn, m.Queued(WAITS)), *self._propose()]
        reason = "joins when a step boundary was passed; nobody has come to one yet (ftcomm.steps, Group.boundary)"
        return self._tell_joiners() or [Send(conn, m.Queued(reason))]

    def _tell_joiners(self) -> list[Action]:
        """Let those prepare who do not know yet that they may. Not before some boundary was passed: a job that passes
        none takes nobody in, and a script would train by itself while it waits for that."""
        if self.view is None or max(link.step for link in self.links.values()) < 0:
            return []
        return [Send(self._link_of(replica), m.Registered(seen)) for replica, seen in self.joiners.tell(self.view)]

    def _dismiss(self, conn: Conn, replica: int) -> list[Action]:
        """It has asked to leave before it was in any view, so there is no boundary to wait for."""
        reason = "it has asked to leave before it had joined"
        return [
            Log("dismissed", {"replica": replica, "reason": reason}),
            Send(conn, m.Dismissed(reason)),
            *self._forget(replica),
        ]

    def _forget(self, replica: int) -> list[Action]:
        """It does not want to join any more."""
        self.joiners.drop(replica)
        if self.proposal is not None and replica in self.proposal.joins:
            return [*self._cancel(), *self._propose()]
        return []

    def _outlived(self, conn: Conn, join: m.Join, now: float) -> list[Action]:
        """It says that it runs in the job, which went on without it; another life may have its number by now."""
        replica = join.replica
        actions: list[Action] = []
        old = self._conn(replica)
        if old is not None and self.links[old].incarnation == join.incarnation:
            actions += self.disconnected(old, now)
            self.detector.forget(replica)
            if old != conn:
                actions.append(Close(old))
        if self.view is None:  # let it train on: nobody is served by ending a job for a lost file
            reason = f"it runs in epoch {join.epoch} of a job that this coordinator has no file of views of"
            return [*actions, Log("refused", {"replica": replica, "reason": reason}), Close(conn)]
        reason = f"replica {replica} was removed from the job in epoch {self._epoch} or before, while it was not heard"
        return [*actions, Send(conn, m.Expelled(reason)), Close(conn)]

    def _refusal(self, join: m.Join) -> str:
        other = other_job(join, self.ranks_per_replica, self.timeouts)
        if other:
            return other
        member = self._counts(join.replica, join.incarnation)  # of a view that it may not have installed yet
        if self.done or (self.draining and join.epoch == 0 and not member):
            return "the job has ended or is being drained"
        return ""

    def _form(self) -> list[Action]:
        here = self.joiners.waiting
        if len(here) < self.expected:
            missing = ", ".join(str(replica) for replica in range(self.expected) if replica not in here)
            reason = f"{len(here)} of {self.expected} replicas are here; missing: {missing}"
            return [Send(self._link_of(replica), m.Queued(reason)) for replica in here]
        members = [contributing(member) for member in here.values()]
        self.joiners.clear()
        return self._decide(tuple(sorted(members, key=lambda x: x.replica)), 0, "all replicas are here")

    def _rejoined(self, conn: Conn, join: m.Join) -> list[Action]:
        """A member connected again: after a restart of the coordinator, or a lost connection."""
        assert self.view is not None
        if join.epoch == self.view.epoch:
            return [*self._installed(join.replica, join.epoch), *self._tell_joiners()]
        return [Send(conn, m.NewView(self.view)), *self._tell_joiners()]

    # -- losses --------------------------------------------------------------------------------------------------

    def _suspected(self, by: int, suspect: m.Suspect, now: float) -> list[Action]:
        if not self._counts(suspect.replica, suspect.incarnation) or suspect.replica in self.finished:
            return []
        fields = {"replica": suspect.replica, "reason": suspect.reason, "by": by}
        if suspect.proof or by == suspect.replica:
            return [Log("suspect", fields), *self._lose({suspect.replica: suspect.reason})]
        self._blame.complaint(by, suspect.replica, now, suspect.reason)
        return [Log("suspect", fields)]

    def _stalled(self, by: int, stall: m.Stalled, now: float) -> list[Action]:
        if all(stall.epoch != view.epoch for view in self._in_force()):
            return []
        here = {replica for view in self._in_force() for replica in view.replicas}
        waiting_on = tuple(replica for replica in stall.waiting_on if replica in here and replica != by)
        if not self._blame.stalled(by, stall.rank, stall.op, waiting_on, stall.due, now):
            return []
        conns = [self._conn(replica) for replica in sorted(here)]
        return [Send(conn, m.WhoWaits()) for conn in conns if conn is not None]

    def _lose(self, lost: dict[int, str]) -> list[Action]:
        """A view without `lost`, at once. A change that is not installed everywhere is given up with it."""
        assert self.view is not None
        actions = self._cancel()
        base = self.view
        step = base.step if base.proposal == 0 and not self._settled() else None  # the first view: its start stands
        gone = set(lost) | {replica for replica in self.finished if self._conn(replica) is None}
        members = base.members
        if base.proposal and self._before is not None and not self._settled():
            old = set(self._before.replicas)  # its joiners wait again: who ran with them has to start anew, too
            joiners = [x for x in base.members if x.replica not in old | gone and self._conn(x.replica) is not None]
            for member in joiners:
                self.joiners.add(member, ready=True)
            members = given_up(base, self._before, gone, withdrawn=not lost)
            base = self._before
        members = tuple(member for member in members if member.replica not in gone)
        if not any(member.contributing for member in members):  # who has caught up holds the state, boundary or not
            holders = self.caught_up | (self.view.contributing - gone)
            members = tuple(contributing(member) if member.replica in holders else member for member in members)
        for replica in gone:
            self.detector.forget(replica)
            self.caught_up.discard(replica)
        for replica, why in lost.items():
            conn = self._conn(replica)
            if why != "finished" and conn is not None:
                said = f"replica {replica} was removed from the job after epoch {self._epoch}: {why}"
                actions.append(Send(conn, m.Expelled(said)))
        why = "; ".join(f"lost {replica}: {reason}" for replica, reason in lost.items()) or "a change was withdrawn"
        if any(member.contributing for member in members):
            persist, *rest = self._decide(members, step, why)
            return [persist, *actions, *rest]  # nobody is sent away before that is written down
        if base.contributing & set(self.finished):  # the training is complete; who still catches up may end in peace
            return [*actions, *self._turn_away("the job has finished"), *self._finish()]
        failed = (
            f"{why}: no replica that holds the state of the training is left; restart the job from its last checkpoint"
        )
        conns = [self._conn(member.replica) for member in members]
        self.view = View(self._epoch, None, (), failed)
        expelled = [Send(conn, m.Expelled(failed)) for conn in conns if conn is not None]
        return [*actions, *expelled, *self._turn_away(failed), *self._finish(failed)]

    # -- changes at a step boundary ------------------------------------------------------------------------------

    def _settled(self) -> bool:
        """All members run in the newest view. After a drain nobody does: that it was taken shows when all finish."""
        return self.view is not None and bool(self.view.members) and self.installed >= set(self.view.replicas)

    def _propose(self) -> list[Action]:
        """Ask every leader for its promise, if there is something to change and nothing else is under way."""
        view = self.view
        if view is None or self.proposal is not None or not self._settled() or self.done:
            return []
        here = set(view.replicas)
        if here & set(self.finished) or any(self._conn(replica) is None for replica in here):
            return []
        joins, contributes, leaves = wanted(view, self.joiners.waiting, self.caught_up, self.leaving, self.draining)
        if not (joins or contributes or leaves):
            return []
        self._proposals += 1
        step = max(self.links[self._link_of(replica)].step for replica in here) + self._margin
        number = self._proposals << 32 | self._lifetime
        self.proposal = Proposal(number, step, joins, contributes, leaves)
        prepare = m.Prepare(number, view.epoch, step)
        return [Send(self._link_of(replica), prepare) for replica in view.replicas]

    def _promised(self, link: _Link, promise: m.Promise) -> list[Action]:
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
        self.caught_up -= proposal.contributes
        members = proposal.applied(view.members)
        return self._decide(members, proposal.step, proposal.why(), proposal.number)

    def _withdrawn(self, message: m.Withdrawn) -> list[Action]:
        if self.proposal is not None and self.proposal.number == message.proposal:
            self._margin = min(2 * self._margin, 1 << 20)
            return [*self._cancel(), *self._propose()]
        if self.view is not None and 0 != self.view.proposal == message.proposal and not self._settled():
            self._margin = min(2 * self._margin, 1 << 20)
            return self._lose({})
        return []

    def _cancel(self) -> list[Action]:
        if self.proposal is None or self.view is None:
            return []
        number, self.proposal = self.proposal.number, None
        conns = [self._conn(replica) for replica in self.view.replicas]
        return [Send(conn, m.Cancel(number)) for conn in conns if conn is not None]

    # -- deciding ------------------------------------------------------------------------------------------------

    def _decide(self, members: tuple[Member, ...], step: int | None, why: str, proposal: int = 0) -> list[Action]:
        self._epoch += 1
        hearers = {member.replica for member in members}.union(*(view.replicas for view in self._in_force()))
        self._before = self.view
        self.view = View(self._epoch, step, members, why, proposal)
        self.installed = set()
        self._blame.clear()
        conns = [self._conn(replica) for replica in sorted(hearers)]
        described = [{"replica": member.replica, "contributing": member.contributing} for member in members]
        return [
            Persist(self.view),
            *[Send(conn, m.NewView(self.view)) for conn in conns if conn is not None],
            Log("view", {"epoch": self._epoch, "step": step, "members": described, "why": why}),
        ]

    def _check_done(self) -> list[Action]:
        if self.view is None or self.done:
            return []
        last = self.view if self.view.members or self._before is None else self._before  # after a drain: who left
        if set(last.replicas) <= set(self.finished):
            return [*self._turn_away("the job has finished"), *self._finish()]
        return []

    def _finish(self, failed: str = "") -> list[Action]:
        if self.done:
            return []
        self.done = True
        return [Log("failed", {"reason": failed}), Done(failed)] if failed else [Done()]

    def _turn_away(self, reason: str, how: type[m.Expelled | m.Dismissed] = m.Expelled) -> list[Action]:
        """All joiners."""
        conns = [self._conn(replica) for replica in self.joiners.clear()]
        return [Send(conn, how(reason)) for conn in conns if conn is not None]

    # -- look-ups ------------------------------------------------------------------------------------------------

    def _in_force(self) -> list[View]:
        """The newest view, and the one that it changes as long as some members may still run in that."""
        changing = self.view is not None and self.view.proposal != 0 and not self._settled()
        return [view for view in (self.view, self._before if changing else None) if view is not None]

    def _counts(self, replica: int, incarnation: str) -> bool:
        """Whether this life of the replica is a member that others may wait for."""
        return any(view.has(replica, incarnation) for view in self._in_force())

    def _is_member(self, replica: int) -> bool:
        """Whether some life of the replica is."""
        return any(replica in view.replicas for view in self._in_force())

    def _conn(self, replica: int) -> Conn | None:
        return next((conn for conn, link in self.links.items() if link.replica == replica), None)

    def _link_of(self, replica: int) -> Conn:
        conn = self._conn(replica)
        assert conn is not None, f"replica {replica} has no connection"
        return conn
