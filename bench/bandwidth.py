"""The bandwidth between each two hosts of a job, and the order in which a ring goes through them for it.

Measured in the ranks of the job, by the transport that they have: the first members of two hosts send each other so
many bytes at once, through their slots like any collective. One pair after the other, so that no pair takes from
another what they share; the best of a few times, as whatever disturbs one makes it slower.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from ftcomm.collective.ring_order import fastest_ring

NBYTES = 8 << 20  # each way
FEWEST = 4  # hosts; of three a ring has one order alone
TIMES = 3


class Host(msgspec.Struct, frozen=True):
    address: str
    rack: str
    member: int  # the first one there


class Links(msgspec.Struct, frozen=True):
    """`rates`: bytes a second each way, of each two `hosts`, by their numbers in that list: (lower, higher)."""

    hosts: list[Host]
    rates: dict[tuple[int, int], float]

    def order(self) -> list[Host]:
        racks = [host.rack for host in self.hosts]
        return [self.hosts[number] for number in fastest_ring(racks, self.rates)]

    def __str__(self) -> str:
        order = [self.hosts.index(host) for host in self.order()]
        ring = min(self.rates[min(a, b), max(a, b)] for a, b in zip(order, [*order[1:], order[0]], strict=True))
        where = ", ".join(self.hosts[number].address for number in order)
        slowest, fastest = min(self.rates.values()), max(self.rates.values())
        return (
            f"a ring goes through {where}: its slowest link carries {ring / 1e6:.0f} MB/s, the slowest of all "
            f"{slowest / 1e6:.0f}, the fastest {fastest / 1e6:.0f}"
        )


def hosts(members: Mapping[int, Any]) -> list[Host]:
    """Returns the hosts of a group by address, from the address of each member (`ftcomm.control.views.Address`). Two
    hosts with the same address cannot be told apart, and count as one."""
    by_boot: dict[str, Host] = {}
    for member, there in sorted(members.items()):
        by_boot.setdefault(there.boot, Host(there.host, there.rack, member))
    return sorted({host.address: host for host in by_boot.values()}.values(), key=lambda host: host.address)


def measure(group: Any, told: Callable[[str], object] = lambda text: None, *, nbytes: int = NBYTES) -> Links | None:
    """Measure the links, on all members alike; None where there is nothing to choose. Raises what a collective
    raises."""
    found = hosts({one.replica: one.ranks[group.settings.shard] for one in group.view.members})
    if len(found) < FEWEST:
        return None
    rates = {}
    for a, b in itertools.combinations(range(len(found)), 2):
        us = _both_ways(group, found[a].member, found[b].member, nbytes)
        rates[a, b] = nbytes / us * 1e6
        told(f"{found[a].address} and {found[b].address}: {rates[a, b] / 1e6:.0f} MB/s")
    return Links(found, rates)


def _both_ways(group: Any, a: int, b: int, nbytes: int) -> float:
    """Returns the us of the slower of the two. They have a group of their own: in that of all, no member is
    further ahead than the slowest link allows."""
    times = np.zeros(1 + TIMES)
    pair = group.subgroup(f"{__name__} {a} {b}", (a, b)) if group.replica in (a, b) else None
    if pair is not None:
        given, taken = np.zeros(nbytes, np.uint8), np.zeros(2 * nbytes, np.uint8)
        for number in range(1 + TIMES):  # the first one lets the connections come to speed
            begin = time.perf_counter_ns()
            pair.allgather(taken, given)
            times[number] = (time.perf_counter_ns() - begin) / 1e3
    group.allreduce(times, op="max")
    if pair is not None:
        pair.close()
    return float(min(times[1:]))
