"""Two levels: an all-reduce in which members that share a host reduce among themselves first.

There are as many *flows* as the smallest host has members. The first members of a host are its heads, one a flow;
what crosses between two hosts goes between heads of one flow alone. A chunk has a slice for each flow and host:

    host           A            B            2 hosts with 3 and 2 members, so 2 flows; slices 0A 0B 1A 1B
    heads          a0  a1       b0  b1       each makes the slice of its flow and host whole
    other          a2

    POSTED    all       own input                                    read by the heads of the same host
    level 1   a0        0B: a0 + a1 + a2                             read by b0, and so on for each head
    level 2   a0        0A: (a0 + a1 + a2) + (b0 + b1): whole        read by b0
    level 3   a0        0A, and 0B from b0: all of its flow          read by a1 and a2

    word      written by         value                               polled by
    level 1   heads              tasks whose inputs of this host     the heads of the flow on other hosts
                                 are summed
    level 2   heads              tasks whose own slice is whole      the heads of the flow on other hosts
    level 3   heads that are     tasks of whose flow all is here     the others of the host
              not alone there

In a group of so many members that the slices of a task would get small (`Tuning.slices`), a flow has fewer slices than
there are hosts: some hosts have one, as owners, and the others none (`ftcomm.collective.plan.flow_slices`). The owners
of the next flow and those of the next slot are other hosts, so that each host owns as much as any. If all members of
such a group are on hosts of their own, *rows* of members stand for hosts: so a member exchanges data with its row and
with its flow, with about 2 sqrt(n) others in all.

Every element is reduced by one head alone, the members of a host ascending and then the hosts in their order, so
that all copy the same bytes and the order is the same for all elements. A host sends and receives 2 (hosts - 1) / hosts
of a chunk, however many members it has.

All levels lie in the REDUCED region, in which the flow of a member begins at the beginning of the slot, and each slice
has its own place, with room for partial sums that are wider than elements (`ftcomm.collective.compression`). What comes
from another head at level 3 takes the place of the partial sum that was sent to it, which it has read, as its slice is
whole. In a group of many members wider sums lie behind the flow, if there is room, and whole slices side by side. The
caller's buffer stays INPUT until the chunk is taken: then all heads of the host have read what they need of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ftcomm.collective.algorithms.base import Algorithm, AlgorithmStep, Array
from ftcomm.collective.compression import hands_on, partial_dtype, widest
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import ALIGN, GroupView, flow_slices, slices
from ftcomm.kernels.call_codes import COMPRESSIONS
from ftcomm.kernels.dtypes import HOST_DTYPES
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.transport.segment import POSTED, REDUCED, Memory, level

if TYPE_CHECKING:
    from ftcomm.collective.pipeline import Slot

_SUMMED, _WHOLE, _IN_THE_HOST = map(level, (1, 2, 3))  # words of the levels


class SliceStaging(NamedTuple):
    """Staging views of one host's slice, on the flow of a head."""

    part: slice  # its elements of the chunk
    summed: Array  # in my REDUCED region: the sum of my host
    whole: Array  # the complete slice, in the same place
    inputs: tuple[Array | None, ...]  # the posted inputs of my host; None: mine, in the caller's buffer


class Other(NamedTuple):
    """Another host, as the head of my flow there shows it in its REDUCED region."""

    summed: Array  # its sum of the slice of my host
    whole: Array  # the slice of its host


class HierarchicalViews(NamedTuple):
    bounds: tuple[tuple[int, int], ...]  # the bounds of all slices, flow by flow
    begin: int  # the first element of my flow
    itemsize: int
    partial: str  # dtype of partial sums
    width: int  # bytes of an element of a partial sum
    room: int  # bytes from one whole element to the next, where whole slices lie
    sums_at: int  # byte of my slot in REDUCED where the partial sums begin
    places: tuple[SliceStaging, ...]  # one a host, in order; empty unless I am a head
    others: Mapping[int, Other]  # keyed by the number of the host
    result: tuple[tuple[slice, Array], ...]  # where I read the chunk in the end
    given: tuple[tuple[slice, Array], ...]  # slices of my input, and where they are staged


class Hierarchical(Algorithm):
    name = "hierarchical"
    straight = True

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        super().__init__(view, memories, reducer)
        me, hosts = view.me, view.hosts
        self._hosts = hosts
        self._flows = min(map(len, hosts))
        self._home = next(number for number, members in enumerate(hosts) if me in members)
        host = hosts[self._home]
        self._heads = host[: self._flows]
        self._alone = len(host) == 1
        self._flow = host.index(me)
        self._inputs = tuple(m for m in host if m in view.contributing)
        self._giving = frozenset(
            number for number, members in enumerate(hosts) if not view.contributing.isdisjoint(members)
        )
        self._divisor = len(view.contributors)
        self._slot, self._span = memories[me].layout.span * memories[me].chunk, memories[me].layout.span
        self._slices = view.tuning.slices
        self._many = len(view.members) > self._slices
        self._handled: dict[tuple[str, str, str], bool] = {}
        # Holds the sum of my host's inputs for its own slice. What is not used takes no memory.
        self._scratch = np.empty(self._slot, np.uint8)
        self._opposite: dict[int, int] = {}  # number of another host -> the head of my flow there
        if me in self._heads:
            self._opposite = {i: members[self._flow] for i, members in enumerate(hosts) if i != self._home}
        self._at = {m: number for number, m in self._opposite.items()}
        self.steps = self._plan()
        ends = frozenset(self._opposite.values()), frozenset(host) - {me}
        self.readers = {step.makes: ends[step.makes == _IN_THE_HOST] for step in self.steps if step.makes}

    def _plan(self) -> tuple[AlgorithmStep, ...]:
        if not self._opposite:
            return (AlgorithmStep(_IN_THE_HOST, self._heads, 0),)
        summed = tuple(m for number, m in self._opposite.items() if number in self._giving)
        steps = [
            AlgorithmStep(POSTED, (), _SUMMED if self._inputs else 0),
            AlgorithmStep(_SUMMED, summed, _WHOLE),
            AlgorithmStep(_WHOLE, tuple(self._opposite.values()), 0 if self._alone else _IN_THE_HOST),
            AlgorithmStep(_IN_THE_HOST, tuple(m for m in self._heads if m != self.me), 0),
        ]
        return tuple(steps[:3] if self._alone else steps)

    def handles(self, op: Operation) -> bool:
        """Whether sums of `op` can be passed on."""
        key = op.dtype, op.op, op.compression
        found = self._handled.get(key)
        if found is None:
            form = self._form(op.compression)
            widened = HOST_DTYPES[op.dtype].kind == "half" and form != op.compression
            found = hands_on(op.dtype, op.op, form) and (not widened or self._apart(op.dtype, op.compression))
            self._handled[key] = found
        return found

    def _form(self, compression: str) -> str:
        """Returns the form in which sums travel. In a group of many members they are a small part of what travels, so
        halves are passed on, too, in float32: each with each, their slices would be small."""
        return "fp32" if self._many and compression == COMPRESSIONS[0] else compression

    def _apart(self, dtype: str, compression: str) -> bool:
        """Whether wider partial sums of a flow lie behind it: in a group of many members, if a slot has room."""
        own, held = HOST_DTYPES[dtype].itemsize, HOST_DTYPES[partial_dtype(dtype, self._form(compression))].itemsize
        if not self._many or held == own:
            return False
        cut = slices(self._slot // widest(dtype, compression), own, self._flows)
        return max(stop - start for start, stop in cut) * (own + held) <= self._slot

    def _bounds(self, dtype: str, compression: str, count: int, chunk: int) -> tuple[tuple[int, int], ...]:
        """Returns the bounds of all slices. In a group of many members no more hosts own one than can own a large one
        of a task that fills its slot."""
        own, hosts, owners = HOST_DTYPES[dtype].itemsize, len(self._hosts), len(self._hosts)
        if self._many:
            owners = min(hosts, max(1, self._slices * own // widest(dtype, compression) // self._flows))
        return flow_slices(count, own, self._flows, hosts, owners, chunk // self._span)

    def make_views(self, dtype: str, op: str, compression: str, count: int, chunk: int) -> HierarchicalViews:
        held = partial_dtype(dtype, self._form(compression))
        carrier, partial = HOST_DTYPES[dtype].carrier, HOST_DTYPES[held].carrier
        hosts, flow = len(self._hosts), self._flow * len(self._hosts)
        bounds = self._bounds(dtype, compression, count, chunk)
        apart = self._apart(dtype, compression)
        scale = 1 if apart else partial.itemsize // carrier.itemsize

        def begin(number: int) -> int:
            """Returns the first element of the flow of a slice."""
            return bounds[number // hosts * hosts][0]

        def sums_at(number: int) -> int:
            """Returns the byte of a slot where the partial sums of that flow begin."""
            end = bounds[number // hosts * hosts + hosts - 1][1]
            return -(-(end - begin(number)) * carrier.itemsize // ALIGN) * ALIGN if apart else 0

        def posted(member: int, number: int) -> Array:
            start, stop = bounds[number]
            return self.memories[member].carve(POSTED, chunk, start, stop - start, carrier)

        def summed(member: int, number: int) -> Array:
            start, stop = bounds[number]
            at = sums_at(number) // partial.itemsize + start - begin(number)
            return self.memories[member].carve(REDUCED, chunk, at, stop - start, partial)

        def whole(member: int, number: int) -> Array:
            start, stop = bounds[number]
            return self.memories[member].carve(REDUCED, chunk, scale * (start - begin(number)), stop - start, carrier)

        places = tuple(
            SliceStaging(
                slice(*bounds[number]),
                summed(self.me, number),
                whole(self.me, number),
                tuple(None if m == self.me else posted(m, number) for m in self._inputs),
            )
            for number in (range(flow, flow + hosts) if self._opposite else ())
        )
        others = {
            host: Other(summed(m, flow + self._home), whole(m, flow + host)) for host, m in self._opposite.items()
        }
        if self._alone:
            result = [
                (place.part, place.whole if host == self._home else others[host].whole)
                for host, place in enumerate(places)
            ]
        else:
            result = [
                (slice(start, stop), whole(self._heads[number // hosts], number))
                for number, (start, stop) in enumerate(bounds)
            ]
        given = {self._given_to(m, bounds) for m in self.others} - {(0, 0)}
        return HierarchicalViews(
            bounds=bounds,
            begin=begin(flow) if self._opposite else 0,
            itemsize=carrier.itemsize,
            partial=held,
            width=partial.itemsize,
            room=scale * carrier.itemsize,
            sums_at=sums_at(flow) if self._opposite else 0,
            places=places,
            others=others,
            result=tuple((part, source) for part, source in result if source.size),
            given=tuple(
                (slice(a, b), self.memories[self.me].carve(POSTED, chunk, a, b - a, carrier)) for a, b in sorted(given)
            ),
        )

    def reads(self, slot: Slot) -> Collection[int]:
        return ()

    def post(self, slot: Slot) -> None:
        if self.me in self._inputs and not slot.straight:
            for part, staged in slot.views.given:
                staged[...] = slot.here[part]

    def step(self, slot: Slot) -> None:
        op, here, views, makes = slot.op, slot.here, slot.views, self.steps[slot.number].makes
        if makes == _SUMMED:
            for host, place in enumerate(views.places):
                if host != self._home:
                    self._sum(op, here, views, place, place.summed)
        elif makes == _WHOLE:
            self._make_whole(op, here, views)
        elif makes == _IN_THE_HOST:
            for host, other in views.others.items():
                views.places[host].whole[...] = other.whole

    def finish(self, slot: Slot) -> None:
        here = slot.here
        for part, source in slot.views.result:
            here[part] = source

    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        views = slot.views
        if word == POSTED:
            start, stop = self._given_to(reader, views.bounds)
            return start * views.itemsize, stop * views.itemsize
        hosts = len(self._hosts)
        flow = self._flow * hosts
        if word == _IN_THE_HOST:
            last, stop = views.bounds[flow + hosts - 1]
            return 0, (last - views.begin) * views.room + (stop - last) * views.itemsize
        if word == _SUMMED:
            start, stop = views.bounds[flow + self._at[reader]]
            at, width = views.sums_at + (start - views.begin) * views.width, views.width
        else:
            start, stop = views.bounds[flow + self._home]
            at, width = (start - views.begin) * views.room, views.itemsize
        return at, at + (stop - start) * width

    def _given_to(self, reader: int, bounds: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        """Returns the elements of my input that another head of my host reads."""
        if reader not in self._heads or self.me not in self._inputs:
            return 0, 0
        flow = self._heads.index(reader) * len(self._hosts)
        return bounds[flow][0], bounds[flow + len(self._hosts) - 1][1]

    def _sum(self, op: Operation, here: Array, views: HierarchicalViews, place: SliceStaging, out: Array) -> None:
        """Sum the inputs of this host."""
        if out.size:
            sources = [operand(op.dtype, here[place.part] if given is None else given) for given in place.inputs]
            self._reduce(op.dtype, "sum" if op.op == "avg" else op.op, sources, operand(op.dtype, out, views.partial))

    def _make_whole(self, op: Operation, here: Array, views: HierarchicalViews) -> None:
        """Make the slice of this host from the sums of all hosts."""
        place = views.places[self._home]
        if not place.whole.size:
            return
        mine = self._scratch[: place.summed.nbytes].view(place.summed.dtype)
        if self._inputs:
            self._sum(op, here, views, place, mine)
        sums = [mine if host == self._home else views.others[host].summed for host in sorted(self._giving)]
        sources = [operand(op.dtype, x, views.partial) for x in sums]
        self._reduce(op.dtype, op.op, sources, operand(op.dtype, place.whole))

    def _reduce(self, dtype: str, op: str, sources: list[Any], out: Any) -> None:
        self.reducer.get(dtype, op, self._divisor)(sources, out)
