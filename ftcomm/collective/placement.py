"""Tells where the members of a group are, as they say it, and what follows for how they work together."""

from __future__ import annotations

from collections.abc import Mapping, Set

from ftcomm.collective.plan import GroupView, rows, shared_hosts
from ftcomm.collective.ring_order import ring_order
from ftcomm.control.views import Address
from ftcomm.settings.tuning import Tuning
from ftcomm.transport.connect import common_traits


def order(members: Mapping[int, Address], tuning: Tuning) -> tuple[int, ...]:
    """Returns the order in which a ring goes through the members."""
    hosts = {member: there.boot for member, there in members.items()}
    racks = {member: there.rack for member, there in members.items()}
    return ring_order(hosts, racks, {member: there.host for member, there in members.items()}, tuning)


def group_view(
    epoch: int,
    me: int,
    members: Mapping[int, Address],
    contributing: Set[int],
    *,
    ring: bool = False,
    hierarchical: bool,
    tuning: Tuning,
) -> GroupView:
    """Returns the view of the group, which all members make alike. Large all-reduces go by a `ring`, or, if
    `hierarchical`, by hosts; in a group of many members, each on its own host, by rows."""
    hosts = shared_hosts({member: there.boot for member, there in members.items()}) if hierarchical else ()
    traits = common_traits(members.values())
    if hierarchical and not hosts and len(members) > tuning.slices and not traits["one_host"]:
        hosts = rows(order(members, tuning))
    return GroupView(
        epoch,
        me,
        tuple(sorted(members)),
        frozenset(contributing),
        ring=order(members, tuning) if ring else (),
        hosts=hosts,
        tuning=tuning,
        **traits,
    )
