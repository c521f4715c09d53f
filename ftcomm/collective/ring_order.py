"""Decides in which order a ring goes through its members, and which order of hosts is the fastest.

The members of a host are side by side, and so are the hosts of a rack, so that one flow enters them and one leaves
them. The tuning file gives the order of racks and hosts, if the bandwidth between the hosts was measured (`ftcomm bench
tune`); otherwise it follows from their labels. In either case the place of a member does not depend on others: a member
that comes or goes has two neighbours, and between all others the ring stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ftcomm.settings.tuning import BUILT_IN, Tuning

ALIKE = 1.1  # rates that differ by less count as equal: another measurement might swap them


def ring_order(
    hosts: Mapping[int, str],
    racks: Mapping[int, str] | None = None,
    addresses: Mapping[int, str] | None = None,
    tuning: Tuning = BUILT_IN,
) -> tuple[int, ...]:
    """Orders the members by the host of each, the label of its rack ("": unknown), and the address by which the file
    knows it. Hosts and racks that are not in the file come after those that are."""
    racks, addresses = racks or {}, addresses or {}
    through_racks, through_hosts = _places(tuning.ring_racks), _places(tuning.ring_hosts)
    where: dict[str, str] = {}  # a host is in one rack, whatever its members say
    place: dict[str, int] = {}  # the place of a host in the file
    for member, host in hosts.items():
        where[host] = max(where.get(host, ""), racks.get(member, ""))
        known = through_hosts.get(addresses.get(member, ""), len(through_hosts))
        place[host] = min(place.get(host, known), known)

    def key(member: int) -> tuple[int, str, int, str, int]:
        host = hosts[member]
        rack = where[host]
        return through_racks.get(rack, len(through_racks)), rack, place[host], host, member

    return tuple(sorted(hosts, key=key))


def _places(names: Sequence[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


def fastest_ring(racks: Sequence[str], rates: Mapping[tuple[int, int], float]) -> tuple[int, ...]:
    """Returns the order of hosts 0, 1 ... in which the slowest link of the ring is as fast as possible. As many bytes
    cross each link at the same time, so the ring waits for that one.

    `racks`: the rack of each host; racks stay together. `rates`: of each two hosts, (lower, higher). Otherwise hosts
    are in the order of their numbers. Exact, by the sets of hosts on a path (Held and Karp, 1962): at most some seconds
    for 16 hosts.
    """
    classes = {pair: math.floor(math.log(rate) / math.log(ALIKE)) for pair, rate in rates.items()}
    levels = sorted(set(classes.values()))
    best: tuple[int, ...] = tuple(range(len(racks)))
    low, high = 0, len(levels) - 1
    while low <= high:
        middle = (low + high + 1) // 2
        near = [0] * len(racks)  # as bits, the hosts to which a link is fast enough
        for (a, b), found in classes.items():
            if found >= levels[middle]:
                near[a] |= 1 << b
                near[b] |= 1 << a
        ring = _ring(racks, near)
        if ring is None:
            high = middle - 1
        else:
            best, low = ring, middle + 1
    return best


def _ring(racks: Sequence[str], near: Sequence[int]) -> tuple[int, ...] | None:
    """Returns all hosts, each near the next one and the last near the first, rack by rack. Sets of hosts are bits."""
    count = len(racks)
    mates = [sum(1 << other for other in range(count) if racks[other] == rack) for rack in racks]
    everybody = (1 << count) - 1
    starts = range(1) if mates[0] == everybody else [host for host in range(count) if mates[0] >> host & 1]
    for start in starts:
        ends = [0] * (everybody + 1)  # for each set, the hosts in which a path from `start` through all of it can end
        ends[1 << start] = 1 << start
        for been in range(1 << start, everybody + 1):
            if not been >> start & 1:
                continue
            for host in range(count):
                rest = been ^ 1 << host
                if rest < been and (ends[rest] & near[host]) and ends[rest] & near[host] & _before(host, rest, mates):
                    ends[been] |= 1 << host
        last = ends[everybody] & near[start]
        if last:
            order = [_highest(last)]
            rest = everybody
            while rest := rest ^ 1 << order[-1]:
                order.append(_highest(ends[rest] & _before(order[-1], rest, mates) & near[order[-1]]))
            return tuple(reversed(order))
    return None


def _before(host: int, been: int, mates: Sequence[int]) -> int:
    """Returns the hosts from which a path that has been through `been` may come to `host`. It leaves a rack after it
    has been through all of it, so if the rack of `host` is begun, it comes from there."""
    if been & mates[host]:
        return been
    return sum(1 << other for other in range(len(mates)) if not mates[other] & ~been)


def _highest(hosts: int) -> int:
    return hosts.bit_length() - 1
