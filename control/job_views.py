"""The views of a job as its coordinator knows them, and what members have said about them. Pure.

While a change at a boundary is under way, two views may be in force: the newest, and the one before, in which members
run that have not installed the newest yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftcomm.control.finishes import Finishes
from ftcomm.control.views import Member, View


class JobViews:
    """The newest view and the one before. Not thread-safe; `epoch` is the highest that was used."""

    def __init__(self, views: Sequence[View]) -> None:
        """`views` are the last two that were persisted."""
        self.view = views[-1] if views else None
        self.before = views[-2] if len(views) > 1 else None  # what a change not yet installed replaces
        self.epoch = self.view.epoch if self.view is not None else 0
        self.installed: set[int] = set()  # the replicas that run in the newest
        self.finished: dict[int, float] = {}  # the replicas that have said so, and when
        self.completed: set[int] = set()  # those of them that contributed to the end: the training is complete
        self.caught_up: set[int] = set()  # members that hold the state and do not contribute yet

    @property
    def settled(self) -> bool:
        """Whether all members run in the newest view. After a drain none does; that ends when all finish."""
        return self.view is not None and bool(self.view.members) and self.installed >= set(self.view.replicas)

    @property
    def changing(self) -> bool:
        """Whether a change at a boundary is decided, and not all members run in it yet."""
        return self.view is not None and self.view.proposal != 0 and not self.settled

    @property
    def in_force(self) -> list[View]:
        """The newest view, and the one before as long as some members may still run in that."""
        return [view for view in (self.view, self.before if self.changing else None) if view is not None]

    @property
    def running(self) -> list[Member]:
        """Members of the views in force that have not finished."""
        members = {member.replica: member for view in reversed(self.in_force) for member in view.members}
        return [members[replica] for replica in sorted(members.keys() - self.finished.keys())]

    @property
    def holders(self) -> set[int]:
        """The replicas that hold the state of the training."""
        views = self.in_force if not self.installed else self.in_force[:1]
        here = {replica for view in views for replica in view.replicas}
        return {replica for view in views for replica in view.contributing} | (self.caught_up & here)

    @property
    def unfinished_holders(self) -> set[int]:
        return self.holders - self.finished.keys()

    @property
    def finishes(self) -> Finishes:
        """The finishes that another coordinator would have to know."""
        here = {(x.replica, x.incarnation) for view in self.in_force for x in view.members}
        lives = tuple(sorted(life for life in here if life[0] in self.finished))
        return Finishes(self.epoch, lives, tuple(sorted(self.completed)))

    @property
    def last(self) -> View | None:
        """The newest view that has members: after a drain the one before."""
        return self.before if self.view is not None and not self.view.members and self.before else self.view

    def finish(self, replica: int, now: float) -> None:
        """Note that a member has said that it has finished. One that leaves is in no view any more by then, unless all
        do."""
        self.finished[replica] = now
        if self.last is not None and replica in self.last.contributing:
            self.completed.add(replica)

    def unfinish(self, replica: int) -> bool:
        """Note that it has not: its script has failed after all, or its number is that of another life now. True if it
        had said so."""
        said = replica in self.finished or replica in self.completed
        self.finished.pop(replica, None)
        self.completed.discard(replica)
        return said

    def counts(self, replica: int, incarnation: str) -> bool:
        """Whether this life of the replica is a member that others may wait for."""
        return any(view.has(replica, incarnation) for view in self.in_force)

    def contributes(self, replica: int, incarnation: str) -> bool:
        """Whether this life of the replica contributes in a view that may be in force."""
        return any(view.has(replica, incarnation) and replica in view.contributing for view in self.in_force)

    def is_member(self, replica: int) -> bool:
        """Whether any life of the replica is a member."""
        return any(replica in view.replicas for view in self.in_force)

    def needs(self, replica: int) -> bool:
        """Whether members may wait for this one: for its part in an op; or until it says that all its ranks stand at
        the boundary, where it leaves by a change that others stay in and no member has installed."""
        if self.view is None or not self.view.members:
            return False
        return replica in self.view.replicas or (not self.installed and self.is_member(replica))

    def decide(self, members: tuple[Member, ...], step: int | None, why: str, proposal: int) -> tuple[View, set[int]]:
        """Make the next view the newest. Returns it, and the replicas that have to hear of it: its members, and those
        of the views that it replaces."""
        replaced = self.in_force if not self.installed or self.view is None else [self.view]
        hearers = {member.replica for member in members}.union(*(view.replicas for view in replaced))
        self.epoch += 1
        self.before, self.view, self.installed = self.view, View(self.epoch, step, members, why, proposal), set()
        return self.view, hearers
