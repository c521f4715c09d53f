"""Makes views without lost members, and says when no replica is left that holds the state of the training. Pure."""

from __future__ import annotations

from ftcomm.control import messages as m
from ftcomm.control.boundary_changes import BoundaryChanges
from ftcomm.control.coordinator_actions import CoordinatorAction, Log, Send, Unfit
from ftcomm.control.decisions import Decisions
from ftcomm.control.joiner_messages import DRAINED, FINISHED, JoinerMessages
from ftcomm.control.known_job import KnownJob
from ftcomm.control.reconfiguration import contributing, given_up
from ftcomm.control.views import View


class LostMembers:
    """Decides what follows from the loss of members."""

    def __init__(
        self, known: KnownJob, joiner_messages: JoinerMessages, decisions: Decisions, changes: BoundaryChanges
    ) -> None:
        self._known, self._joiner_messages, self._decisions, self._changes = known, joiner_messages, decisions, changes
        self._refused_in = 0  # the epoch in which a verdict without proof was not carried out
        self._postponed_in = 0  # the epoch in which a proof was not acted on at once

    def lose(self, lost: dict[int, str], *, proved: bool, why: str = "") -> list[CoordinatorAction]:
        """Make a view without `lost` at once, and give up a change in which no member is known to run. With `proved`
        their processes have ended, or need nothing more; without it nothing is done that would end the job. If `lost`
        is empty, `why` is the reason for the view, and "" means that all have withdrawn a change."""
        known = self._known
        assert known.view is not None
        base = known.view
        if lost and known.job.installed and not set(lost) & set(base.replicas):
            return []  # the change under way removes it
        if not proved and known.job.unfinished_holders <= set(lost):
            return self.refuse_to_remove(lost)
        known.note_loss(set(lost))
        if known.others_may_hold(set(lost)):
            return self.postpone(lost)
        actions = self._changes.cancel()
        step = None if known.job.settled else base.step  # members that have not run yet begin there
        gone = set(lost) | {replica for replica in known.job.finished if known.links.conn_of(replica) is None}
        members = base.members
        if base.proposal and known.job.before is not None and not known.job.installed:
            known.job.caught_up |= base.contributing - known.job.before.contributing  # they hold the state in any case
            old = set(known.job.before.replicas)  # the joiners of this change wait again
            joiners = [
                x for x in base.members if x.replica not in old | gone and known.links.conn_of(x.replica) is not None
            ]
            for member in joiners:
                known.joiners.add(member, ready=True)
            if known.draining:  # no later view could have them
                actions += self._joiner_messages.turn_away(m.Dismissed(DRAINED))
            members = given_up(base, known.job.before, gone, withdrawn=not (lost or why))
            base, step = known.job.before, None
        members = tuple(member for member in members if member.replica not in gone)
        if not any(member.contributing for member in members):  # those that have caught up hold the state
            holders = known.job.caught_up | (known.view.contributing - gone)
            members = tuple(contributing(member) if member.replica in holders else member for member in members)
        for replica in gone:
            known.detector.forget(replica)
            known.job.caught_up.discard(replica)
            known.held_up.pop(replica, None)
            known.blame.forget(replica)
        for replica, why in lost.items():
            conn = known.links.conn_of(replica)
            if replica not in known.job.finished and conn is not None:
                said = f"replica {replica} was removed from the job after epoch {known.job.epoch}: {why}"
                actions.append(Send(conn, m.Removed(said)))
        reasons = [f"lost {replica}: {reason}" for replica, reason in lost.items()]
        why = "; ".join(reasons) or why or "a change was withdrawn"
        if any(member.contributing for member in members):
            persist, *rest = self._decisions.decide(members, step, why, lost=lost)
            return [persist, *actions, *rest]  # persisted before any replica is sent away
        if known.job.completed or base.contributing & set(known.job.finished):  # also for those that catch up
            return [*actions, *self._joiner_messages.turn_away(FINISHED), *self._decisions.finish()]
        if known.unvisited:
            return [*actions, *self._unknown(why)]
        failed = (
            f"{why}: no replica that holds the state of the training is left; restart the job from its last checkpoint"
        )
        conns = [known.links.conn_of(member.replica) for member in members]
        known.job.view = View(known.job.epoch, None, (), failed)
        message = m.Removed(failed)
        removed = [Send(conn, message) for conn in conns if conn is not None]
        return [*actions, *removed, *self._joiner_messages.turn_away(message), *self._decisions.finish(failed)]

    def _unknown(self, why: str) -> list[CoordinatorAction]:
        """Give up: all members have ended while no coordinator was there. Each may have finished without being able to
        tell that."""
        self._known.unfit = True
        reason = (
            f"all replicas ended while no coordinator was there ({why}), and whether they had finished is not known: "
            "look at their output. What is stored is kept; to start the job again, from its last checkpoint, remove it"
        )
        return [Log("ended", {"reason": reason}), Unfit(reason)]

    def postpone(self, lost: dict[int, str]) -> list[CoordinatorAction]:
        """Say that the job does not end with `lost` yet; see `KnownJob.others_may_hold`. They are asked for again."""
        if self._postponed_in == self._known.job.epoch:
            return []
        self._postponed_in = self._known.job.epoch
        return [Log("postponed", {"replica": replica, "reason": why}) for replica, why in lost.items()]

    def refuse_to_remove(self, lost: dict[int, str]) -> list[CoordinatorAction]:
        if not lost or self._refused_in == self._known.job.epoch:
            return []
        self._refused_in = self._known.job.epoch
        why = "; ".join(f"{replica}: {reason}" for replica, reason in lost.items())
        reason = (
            f"no other replica holds the state of the training, and it is not proved that its process has ended ({why})"
        )
        return [Log("not_removed", {"replica": replica, "reason": reason}) for replica in lost]

    def withdrawn(self, message: m.Withdrawn) -> list[CoordinatorAction]:
        if self._changes.proposal is not None and self._changes.proposal.number == message.proposal:
            self._changes.postpone()
            return [*self._changes.cancel(), *self._changes.propose()]
        if (
            self._known.view is not None
            and 0 != self._known.view.proposal == message.proposal
            and not self._known.job.installed
        ):
            self._changes.postpone()
            return self.lose({}, proved=True)
        return []
