"""Measures what the all-reduces of a job carry between its replicas, from the newest records of their ranks; pure.

A recording has no bytes of wires. It has each op's size, its algorithm, and the order of the ring; those say how much
comes to a member, and from whom:

    ring             2 (n - 1) / n of the size, from its left neighbour
    two-shot         as much, from each other the same
    one-shot         the size from each other; the fast path does the same
    hierarchical     not counted: what crosses depends on the hosts
    tree             not counted: it carries small ops

The other collectives are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

import msgspec

from ftcomm.diagnosis.facts import Rank
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.recorder.reader import RecordedOp, Recording, numbers

SHOWN = 4  # kinds of ops
COMPRESSED = {"fp8": 1}  # bytes of an element under way
ONE_SHOT = ("one-shot", "compressed one-shot", "fast path")
TWO_SHOT = ("two-shot", "compressed two-shot")


class TrafficLink(msgspec.Struct, frozen=True, array_like=True):
    """The traffic from one replica to another: bytes a second of all ranks, and the largest share of the time in which
    an op of a rank waited for these data alone, though all had called it."""

    source: int
    target: int
    rate: float
    waited: float


class TrafficFlow(msgspec.Struct, frozen=True):
    """All-reduces of one size. `each` is the size in bytes, `speed` what comes to a member while one runs, in bytes a
    second (the busbw of nccl-tests): the median."""

    dtype: str
    each: int
    algorithm: str
    transports: str
    a_second: float
    speed: float


class Traffic(msgspec.Struct, frozen=True):
    """The traffic between the replicas, which are in the `order` in which a ring goes through them."""

    order: tuple[int, ...] = ()
    ring: bool = False  # large ops go around it
    links: tuple[TrafficLink, ...] = ()
    flows: tuple[TrafficFlow, ...] = ()


def of_column(lives: Mapping[Rank, Recording]) -> Traffic:
    """Returns the traffic between the ranks of one index in all replicas, of which these recordings are known."""
    order: tuple[int, ...] = ()
    came: dict[int, float] = {}  # op -> when the last of those that are known has called it
    members: list[tuple[int, list[RecordedOp], Mapping[int, float]]] = []
    for (replica, _), life in sorted(lives.items()):
        for group in (one for one in life.groups if one.kind == "job" and one.closed is None):
            order = tuple(numbers(group.members))
            of_group = [op for op in life.ops if op.group == group.name and op.returned is not None]
            ops = [op for op in of_group if op.kind == "allreduce" and not op.failed and not op.retries]
            for op in ops:
                came[op.number] = max(op.called, came.get(op.number, 0.0))
            members.append((replica, ops, _network(life, group.name, of_group)))
    rates: dict[tuple[int, int], list[float]] = {}  # source, target -> rate and wait
    times: dict[tuple[str, int, str, str], list[float]] = {}  # of each op of a kind
    spans = []
    for replica, ops, network in members:
        span = max((op.returned or 0.0 for op in ops), default=0.0) - min((op.called for op in ops), default=0.0)
        if span <= 0.0 or replica not in order:
            continue
        spans.append(span)
        for op in ops:
            size = op.elements * (COMPRESSED.get(op.compression) or HOST_DTYPES[op.dtype].itemsize)
            for source, share in _sources(op, order, replica):
                rates.setdefault((source, replica), [0.0, 0.0])[0] += size * share / span
            lasted = (op.returned or 0.0) - (came[op.number] if op.arrived is None else op.arrived)
            times.setdefault((op.dtype, size, op.algorithm, op.transports), []).append(max(lasted, 1e-9))
        for source, seconds in network.items():
            if (source, replica) in rates:  # else it was waited for a message of it, not for data
                rates[source, replica][1] = seconds / span
    factor = 2 * (len(order) - 1) / max(1, len(order))
    seconds = sum(spans)
    flows = [
        TrafficFlow(*kind, a_second=len(lasted) / seconds, speed=kind[1] * factor / median(lasted))
        for kind, lasted in times.items()
    ]
    ring = any("ring" in flow.algorithm for flow in flows)
    return Traffic(order, ring, tuple(TrafficLink(*way, *rates[way]) for way in sorted(rates)), _largest(flows))


def merged(columns: Iterable[Traffic]) -> Traffic:
    """Returns the traffic of the ranks of all indices."""
    found = [column for column in columns if column.links]
    rates: dict[tuple[int, int], tuple[float, float]] = {}
    kinds: dict[tuple[str, int, str, str], list[TrafficFlow]] = {}
    for column in found:
        for link in column.links:
            rate, waited = rates.get((link.source, link.target), (0.0, 0.0))
            rates[link.source, link.target] = rate + link.rate, max(waited, link.waited)
        for flow in column.flows:
            kinds.setdefault((flow.dtype, flow.each, flow.algorithm, flow.transports), []).append(flow)
    flows = [
        TrafficFlow(*kind, a_second=sum(one.a_second for one in ones), speed=median(one.speed for one in ones))
        for kind, ones in kinds.items()
    ]
    links = tuple(TrafficLink(*way, *rates[way]) for way in sorted(rates))
    order = max((column.order for column in found), key=len, default=())
    return Traffic(order, any(column.ring for column in found), links, _largest(flows))


def _sources(op: RecordedOp, order: Sequence[int], me: int) -> Iterator[tuple[int, float]]:
    """Yields from whom data come to a member, and how much, as a share of the size."""
    n = len(order)
    if op.algorithm == "ring":
        yield order[order.index(me) - 1], 2 * (n - 1) / n
    elif op.algorithm in ONE_SHOT or op.algorithm in TWO_SHOT:
        for other in order:
            if other != me:
                yield other, 1.0 if op.algorithm in ONE_SHOT else 2 / n


def _network(life: Recording, group: str, ops: Iterable[RecordedOp]) -> dict[int, float]:
    """Returns for how long a rank waited for the data of each replica: for those that had called."""
    came = {op.number: op.arrived for op in ops if op.arrived is not None}
    found: dict[int, float] = {}
    for wait in life.waits:
        if wait.group == group and wait.op in came and wait.began >= came[wait.op]:
            found[wait.replica] = found.get(wait.replica, 0.0) + wait.seconds
    return found


def _largest(flows: Iterable[TrafficFlow]) -> tuple[TrafficFlow, ...]:
    """Returns the flows that carry most."""
    return tuple(sorted(flows, key=lambda flow: -flow.each * flow.a_second)[:SHOWN])
