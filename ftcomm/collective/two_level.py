"""Two levels: an all-reduce in which members that share a host reduce among themselves first.

There are as many *rails* as the smallest host has members. The first members of a host are its carriers, one a rail;
what crosses between two hosts goes between carriers of one rail alone. A chunk has a shard for each rail and host:

    host           A            B            2 hosts with 3 and 2 members, so 2 rails; shards 0A 0B 1A 1B
    carriers       a0  a1       b0  b1       each makes the shard of its rail and host whole
    other          a2

    POSTED    all       own input                                    read by the carriers of the same host
    level 1   a0        0B: a0 + a1 + a2                             read by b0, and so on for each carrier
    level 2   a0        0A: (a0 + a1 + a2) + (b0 + b1): whole        read by b0
    level 3   a0        0A, and 0B from b0: all of its rail          read by a1 and a2

    word      written by         value                               polled by
    level 1   carriers           tasks whose inputs of this host     the carriers of the rail on other hosts
                                 are summed
    level 2   carriers           tasks whose own shard is whole      the carriers of the rail on other hosts
    level 3   carriers that are  tasks of whose rail all is here     the others of the host
              not alone there

Every element is reduced by one carrier alone, the members of a host ascending and then the hosts in their order, so
that all copy the same bytes and the order is the same for all elements. A host sends and receives 2 (hosts - 1) / hosts
of a chunk, however many members it has.

All levels lie in the REDUCED region, each shard at its own place, with room for partial sums that are wider than
elements (`ftcomm.collective.wire`). What comes from another carrier at level 3 takes the
place of the partial sum that was sent to it, which it has read, as its shard is whole. The caller's buffer stays INPUT
until the chunk is taken: then all carriers of the host have read what they need of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView, shards
from ftcomm.collective.route import Array, Hop, Route
from ftcomm.collective.wire import partial_dtype
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import POSTED, REDUCED, Memory

_SUMMED, _WHOLE, _IN_THE_HOST = 1, 2, 3  # levels


class Place(NamedTuple):
    """Of the shard of one host in a carrier's rail. Views of the staging."""

    part: slice  # of the chunk
    summed: Array  # in my REDUCED region: what my host adds to it
    whole: Array  # in the same place
    inputs: tuple[Array | None, ...]  # of my host, as posted; None: mine, which is in the caller's buffer


class Other(NamedTuple):
    """Another host, as its carrier of my rail shows it in its REDUCED region."""

    summed: Array  # its sum of the shard of my host
    whole: Array  # the shard of its host


class TwoLevelLane(NamedTuple):
    bounds: tuple[tuple[int, int], ...]  # of all shards, rail by rail
    itemsize: int
    partial: str  # dtype of partial sums
    room: int  # bytes of each element in REDUCED: a whole shard begins where its partial sum did
    places: tuple[Place, ...]  # one a host, in order; none at who is no carrier
    others: Mapping[int, Other]  # by the number of the host
    result: tuple[tuple[slice, Array], ...]  # the chunk, where I read it in the end


class TwoLevel(Route):
    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        me, hosts = view.me, view.hosts
        self._me, self._hosts, self._memories, self._reducer = me, hosts, memories, reducer
        self._rails = min(map(len, hosts))
        self._home = next(number for number, members in enumerate(hosts) if me in members)
        host = hosts[self._home]
        self._carriers = host[: self._rails]
        self._alone = len(host) == 1
        self._rail = host.index(me)
        self._inputs = tuple(m for m in host if m in view.contributing)
        self._giving = frozenset(
            number for number, members in enumerate(hosts) if not view.contributing.isdisjoint(members)
        )
        self._divisor = len(view.contributors)
        self._scratch = np.empty(memories[me].chunk, np.uint8)  # for the sum of my host's inputs of its own shard
        self._opposite: dict[int, int] = {}  # number of another host -> the carrier of my rail there
        if me in self._carriers:
            self._opposite = {i: members[self._rail] for i, members in enumerate(hosts) if i != self._home}
        self._at = {m: number for number, m in self._opposite.items()}
        self.hops = self._plan()
        ends = frozenset(self._opposite.values()), frozenset(host) - {me}
        self.readers = {hop.makes: ends[hop.makes == _IN_THE_HOST] for hop in self.hops if hop.makes}

    def _plan(self) -> tuple[Hop, ...]:
        if not self._opposite:
            return (Hop(_IN_THE_HOST, self._carriers, 0),)
        summed = tuple(m for number, m in self._opposite.items() if number in self._giving)
        hops = [
            Hop(0, (), _SUMMED if self._inputs else 0),
            Hop(_SUMMED, summed, _WHOLE),
            Hop(_WHOLE, tuple(self._opposite.values()), 0 if self._alone else _IN_THE_HOST),
            Hop(_IN_THE_HOST, tuple(m for m in self._carriers if m != self._me), 0),
        ]
        return tuple(hops[:3] if self._alone else hops)

    def lane(self, dtype: str, wire: str, count: int, slot: int) -> TwoLevelLane:
        carrier = HOST_DTYPES[dtype].carrier
        partial = HOST_DTYPES[partial_dtype(dtype, wire)].carrier
        scale = partial.itemsize // carrier.itemsize
        hosts, rail = len(self._hosts), self._rail * len(self._hosts)
        bounds = shards(count, carrier.itemsize, self._rails * hosts)

        def posted(member: int, number: int) -> Array:
            start, stop = bounds[number]
            return self._memories[member].carve(POSTED, slot, start, stop - start, carrier)

        def summed(member: int, number: int) -> Array:
            start, stop = bounds[number]
            return self._memories[member].carve(REDUCED, slot, start, stop - start, partial)

        def whole(member: int, number: int) -> Array:
            start, stop = bounds[number]
            return self._memories[member].carve(REDUCED, slot, scale * start, stop - start, carrier)

        places = tuple(
            Place(
                slice(*bounds[number]),
                summed(self._me, number),
                whole(self._me, number),
                tuple(None if m == self._me else posted(m, number) for m in self._inputs),
            )
            for number in (range(rail, rail + hosts) if self._opposite else ())
        )
        others = {
            host: Other(summed(m, rail + self._home), whole(m, rail + host)) for host, m in self._opposite.items()
        }
        if self._alone:
            result = [
                (place.part, place.whole if host == self._home else others[host].whole)
                for host, place in enumerate(places)
            ]
        else:
            result = [
                (slice(start, stop), whole(self._carriers[number // hosts], number))
                for number, (start, stop) in enumerate(bounds)
            ]
        read = tuple((part, source) for part, source in result if source.size)
        return TwoLevelLane(
            bounds, carrier.itemsize, partial_dtype(dtype, wire), partial.itemsize, places, others, read
        )

    def hop(self, op: Operation, here: Array, lane: TwoLevelLane, number: int) -> None:
        hop = self.hops[number]
        if hop.makes == _SUMMED:
            for host, place in enumerate(lane.places):
                if host != self._home:
                    self._sum(op, here, lane, place, place.summed)
        elif hop.makes == _WHOLE:
            self._make_whole(op, here, lane)
        elif hop.makes == _IN_THE_HOST:
            for host, other in lane.others.items():
                lane.places[host].whole[...] = other.whole

    def finish(self, here: Array, lane: TwoLevelLane) -> None:
        for part, source in lane.result:
            here[part] = source

    def read_by(self, reader: int, level: int, lane: TwoLevelLane) -> tuple[int, int]:
        hosts = len(self._hosts)
        if level == 0:
            if reader not in self._carriers or self._me not in self._inputs:
                return 0, 0
            rail = self._carriers.index(reader) * hosts
            return lane.bounds[rail][0] * lane.itemsize, lane.bounds[rail + hosts - 1][1] * lane.itemsize
        rail = self._rail * hosts
        if level == _IN_THE_HOST:
            (start, _), (last, stop) = lane.bounds[rail], lane.bounds[rail + hosts - 1]
            return start * lane.room, last * lane.room + (stop - last) * lane.itemsize
        start, stop = lane.bounds[rail + (self._at[reader] if level == _SUMMED else self._home)]
        size = lane.room if level == _SUMMED else lane.itemsize
        return start * lane.room, start * lane.room + (stop - start) * size

    def _sum(self, op: Operation, here: Array, lane: TwoLevelLane, place: Place, out: Array) -> None:
        """The inputs of this host."""
        if out.size:
            sources = [operand(op.dtype, here[place.part] if given is None else given) for given in place.inputs]
            self._reduce(op.dtype, "sum" if op.op == "avg" else op.op, sources, operand(op.dtype, out, lane.partial))

    def _make_whole(self, op: Operation, here: Array, lane: TwoLevelLane) -> None:
        """The shard of this host, from the sums of all hosts."""
        place = lane.places[self._home]
        if not place.whole.size:
            return
        mine = self._scratch[: place.summed.nbytes].view(place.summed.dtype)
        if self._inputs:
            self._sum(op, here, lane, place, mine)
        sums = [mine if host == self._home else lane.others[host].summed for host in sorted(self._giving)]
        sources = [operand(op.dtype, x, lane.partial) for x in sums]
        self._reduce(op.dtype, op.op, sources, operand(op.dtype, place.whole))

    def _reduce(self, dtype: str, op: str, sources: list[Any], out: Any) -> None:
        self._reducer.get(dtype, op, self._divisor)(sources, out)
