"""Changes of membership at a step boundary: what is wanted, and what remains of a change that was given up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from ftcomm.control.views import Member, View


@dataclasses.dataclass
class Proposal:
    """A change of membership at the boundary of `step`, waiting for the promise of every leader."""

    number: int
    step: int
    joins: dict[int, Member]
    contributes: frozenset[int]
    leaves: frozenset[int]
    promised: set[int] = dataclasses.field(default_factory=set)

    def applied(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        kept = [
            contributing(member) if member.replica in self.contributes else member
            for member in members
            if member.replica not in self.leaves
        ]
        return tuple(sorted([*kept, *self.joins.values()], key=lambda member: member.replica))

    def why(self) -> str:
        parts = [
            f"{verb} {', '.join(map(str, sorted(replicas)))}"
            for verb, replicas in (("join", self.joins), ("contribute", self.contributes), ("leave", self.leaves))
            if replicas
        ]
        return "; ".join(parts)


def contributing(member: Member) -> Member:
    return Member(member.replica, member.incarnation, member.ranks, contributing=True)


def wanted(
    view: View, waiting: Mapping[int, Member], caught_up: Set[int], leaving: Set[int], draining: bool
) -> tuple[dict[int, Member], frozenset[int], frozenset[int]]:
    """The replicas to join, to begin to contribute and to leave at the next boundary after `view`; each may be
    empty."""
    here = frozenset(view.replicas)
    leaves = here if draining else here & leaving
    if leaves == here:
        return {}, frozenset(), leaves
    if leaves >= view.contributing:  # a holder of the state stays until another has caught up
        leaves -= {min(view.contributing)}
    joins = {replica: member for replica, member in waiting.items() if replica not in here}
    return joins, here & caught_up - view.contributing, leaves


def given_up(change: View, before: View, gone: Set[int], withdrawn: bool) -> tuple[Member, ...]:
    """Returns the members of the next view when `change` is given up before all have installed it, without those in
    `gone`.

    A replica that was to leave stays away, since the others may be steps ahead already; unless all withdrew together,
    or no other replica is left that could be ahead.
    """
    stay = tuple(member for member in before.members if member.replica in change.replicas)
    if withdrawn or not any(member.contributing and member.replica not in gone for member in stay):
        return before.members
    return stay
