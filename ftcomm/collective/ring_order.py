"""In which order a ring goes through its members, and which order of hosts is the fastest.

The members of a host stand side by side, and so do the hosts of a rack, so that one flow enters them and one leaves
them. Which rack and which host comes first is in the tuning file, if the bandwidth between the hosts was measured
(`ftcomm bench tune`); else it follows from their labels. In either case the place of a member depends on nobody else's
being there: who comes or goes has two neighbours, and between all others the ring stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ftcomm.tuning import BUILT_IN, Tuning

ALIKE = 1.1  # rates that differ by less are as good as equal: measured again, they might be the other way round


def ring_order(
    hosts: Mapping[int, str],
    racks: Mapping[int, str] | None = None,
    addresses: Mapping[int, str] | None = None,
    tuning: Tuning = BUILT_IN,
) -> tuple[int, ...]:
    """From the host of each member, the label of the rack in which it stands ("": not told), and the address by which
    it is known to the file. Hosts and racks that are not in the file come behind those that are."""
    racks, addresses = racks or {}, addresses or {}
    through_racks, through_hosts = _places(tuning.ring_racks), _places(tuning.ring_hosts)
    where: dict[str, str] = {}  # a host stands in one rack, whatever its members say
    place: dict[str, int] = {}  # of a host in the file
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
    """The order of hosts 0, 1 ... in which the slowest link of the ring is as fast as it can be: as many bytes cross
    each link, at the same time, so that one is what the ring waits for.

    `racks`: that of each host, which stay together. `rates`: of each two, (lower, higher). Where nothing speaks against
    it, they are in the order of their numbers. Exact, by the sets of hosts that a way may have been through (Held and
    Karp, 1962): at most some seconds for 16 hosts.
    """
    classes = {pair: math.floor(math.log(rate) / math.log(ALIKE)) for pair, rate in rates.items()}
    levels = sorted(set(classes.values()))
    best: tuple[int, ...] = tuple(range(len(racks)))
    low, high = 0, len(levels) - 1
    while low <= high:
        middle = (low + high + 1) // 2
        near = [0] * len(racks)  # bits of the hosts to which a link is fast enough
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
    """All hosts, each near the next one and the last near the first, rack by rack. Sets of hosts are bits."""
    count = len(racks)
    mates = [sum(1 << other for other in range(count) if racks[other] == rack) for rack in racks]
    everybody = (1 << count) - 1
    starts = range(1) if mates[0] == everybody else [host for host in range(count) if mates[0] >> host & 1]
    for start in starts:
        ends = [0] * (everybody + 1)  # of each set, in which hosts a way from `start` through all of it can end
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
    """From which hosts a way that has been through `been` may come to `host`: it leaves a rack when it has been through
    all of it, so if that of `host` is begun, it is there."""
    if been & mates[host]:
        return been
    return sum(1 << other for other in range(len(mates)) if not mates[other] & ~been)


def _highest(hosts: int) -> int:
    return hosts.bit_length() - 1
