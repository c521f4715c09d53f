"""Decides on the next view, or that the job has ended. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ftcomm.control import messages as m
from ftcomm.control.coordinator_actions import CoordinatorAction, Done, Log, Persist, Send, StoreFinishes
from ftcomm.control.joiner_messages import FINISHED, JoinerMessages
from ftcomm.control.known_job import KnownJob
from ftcomm.control.limits import EPOCHS
from ftcomm.control.views import Member


class Decisions:
    """The decisions that are in force from then on. A view is persisted before any replica hears of it."""

    def __init__(self, known: KnownJob, joiner_messages: JoinerMessages) -> None:
        self._known, self._joiner_messages = known, joiner_messages
        self._finishes = known.job.finishes  # what the store has of them

    def decide(
        self,
        members: tuple[Member, ...],
        step: int | None,
        why: str,
        proposal: int = 0,
        *,
        lost: Collection[int] = (),
    ) -> list[CoordinatorAction]:
        known = self._known
        if known.job.epoch + 1 >= EPOCHS:
            return self.finish(
                f"all {EPOCHS - 1:,} epochs that a job can have are used up; start it again from its last checkpoint, "
                "with an empty --store"
            )
        view, hearers = known.job.decide(members, step, why, proposal)
        known.blame.clear()
        known.severed.clear()
        known.suspicions.keep(known.lives)
        known.not_lost()
        conns = [known.links.conn_of(replica) for replica in sorted(hearers)]
        told = m.NewView(view)
        described = [{"replica": member.replica, "contributing": member.contributing} for member in members]
        begins = step if proposal or known.job.before is None else None  # a loss has no boundary
        return [
            Persist(view),
            *[Send(conn, told) for conn in conns if conn is not None],
            Log("view", {"epoch": view.epoch, "step": begins, "members": described, "why": why, "lost": sorted(lost)}),
        ]

    def store_finishes(self) -> list[CoordinatorAction]:
        """Store who has finished, if that has changed."""
        before, now = self._finishes, self._known.job.finishes
        if (before.lives, before.completed) == (now.lives, now.completed):
            return []
        self._finishes = now
        return [StoreFinishes(now)]

    def check_done(self) -> list[CoordinatorAction]:
        known = self._known
        last = known.job.last
        if last is None or known.done or known.unacknowledged:
            return []
        if set(last.replicas) <= set(known.job.finished):
            return [*self._joiner_messages.turn_away(FINISHED), *self.finish()]
        return []

    def finish(self, failed: str = "") -> list[CoordinatorAction]:
        if self._known.done:
            return []
        self._known.done = True
        return [Log("failed", {"reason": failed}), Done(failed)] if failed else [Done()]
