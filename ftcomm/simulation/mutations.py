"""The protocol with one of its rules taken out, to see that the exhaustive check finds what goes wrong then.

Each is a difference to the product, kept out of it: a stream, a way to stop, or a plan of what is left to do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ftcomm.collective.inflight import Inflight
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.publisher import Publisher
from ftcomm.collective.resume import REDUCE, all_reduce
from ftcomm.kernels.epochs import COUNTS
from ftcomm.simulation.live import Resumption, SteppedGate, SteppedPipeline, SteppedStream
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import POSTED, REDUCED, SLOTS


class _Unstable(SteppedStream):
    class pipeline_type(SteppedPipeline):
        def is_stable(self, op: Operation) -> bool:
            return 0 <= op.end <= self.taken


class _AnyEpoch(SteppedGate):
    def is_open(self, count: int) -> bool:
        return super().is_open(count) if self.seen else not self.behind(count)

    def behind(self, count: int) -> list[Peer]:
        return [peer for peer in self.peers if peer.words[self.word] & (COUNTS - 1) < count]


class _Unfenced(SteppedStream):
    class pipeline_type(SteppedPipeline):
        gate = _AnyEpoch


class _Late(SteppedStream):
    """Enters an epoch without a word: each is raised only when there is something to announce."""

    class publisher_type(Publisher):
        def publish(self, word: int, count: int, *, last: bool = True) -> None:
            if count:
                super().publish(word, count, last=last)


class _NobodyPosts(SteppedGate):
    def is_open(self, count: int) -> bool:
        return self.word == POSTED or super().is_open(count)


class _Hasty(SteppedStream):
    class pipeline_type(SteppedPipeline):
        gate = _NobodyPosts


class _NobodyReduces(SteppedGate):
    def is_open(self, count: int) -> bool:
        return self.word == REDUCED or super().is_open(count)


class _HastySlices(SteppedStream):
    class pipeline_type(SteppedPipeline):
        gate = _NobodyReduces


class _Ahead(SteppedStream):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pipeline.ahead = SLOTS


def _leave(flight: Inflight[Operation], view: GroupView) -> None:
    """Leaves what is to be done as the product says."""


def _all_again(flight: Inflight[Operation], view: GroupView) -> None:
    for op in flight.ops:
        op.tasks = all_reduce(len(op.finals))


def _any_holder(flight: Inflight[Operation], view: GroupView) -> None:
    def other(holder: int) -> int:
        return holder if holder == REDUCE else next((x for x in reversed(view.members) if x != holder), holder)

    for op in flight.ops:
        if op.schedule is None:
            tasks: Any = op.tasks
            op.tasks = tuple(task._replace(holder=other(task.holder)) for task in tasks)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """`what` goes wrong. `atomic`: whether ops that are promised to be atomic are called as such."""

    what: str = ""
    stream: type[SteppedStream] = SteppedStream
    quiesces: bool = True
    spoil: Resumption = _leave
    atomic: bool = True


MUTATIONS: dict[str, Mutation] = {
    "stability": Mutation("an op returns as soon as this member holds all of it", stream=_Unstable),
    "quiesce": Mutation("a member goes on with the old view after it has told what it holds", quiesces=False),
    "fencing": Mutation("words are compared without their epoch", stream=_Unfenced),
    "late-words": Mutation("a member enters an epoch without raising its words first", stream=_Late),
    "hasty": Mutation("a chunk is reduced before all have posted it", stream=_Hasty),
    "hasty-slices": Mutation("two-shot: slices are copied out before all have reduced theirs", stream=_HastySlices),
    "ahead": Mutation("a slot of the staging is used again before all have read it", stream=_Ahead),
    "all-again": Mutation("after a loss every chunk is reduced again, FINAL or not", spoil=_all_again),
    "any-holder": Mutation("after a loss a chunk is copied from some member, not from a holder", spoil=_any_holder),
    "not-atomic": Mutation("an atomic op is repaired like any other", atomic=False),
}
