"""Computes the launch that runs an op, and from the words of its lanes what it has done: pure functions."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import triton.language as tl

from ftcomm.collective.compression import FP8
from ftcomm.collective.gate import Gate
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE
from ftcomm.engines.gpu_kernel.collective import NOBODY, CollectiveOperation
from ftcomm.engines.gpu_kernel.device import Reached
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.kernels.device import words
from ftcomm.kernels.device.launch import element, operator
from ftcomm.kernels.device.variant import MOVED, REDUCED, CollectiveVariant, Variant
from ftcomm.kernels.epochs import COUNTER, COUNTS
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import Layout

_UNROLLED = (2, 4, 8)  # sources for which the reduction is unrolled
_ONE_SHOT = 64 << 10  # bytes, with three members and more; see ftcomm.settings.tuning, which is of the host's engine


def variant(op: KernelOperation, address: int, layout: Layout, view: GroupView) -> Variant:
    """Returns what the kernel is compiled for. In another view the launch goes on with it: W changes the speed, never
    the result."""
    coded = op.compression == FP8
    unrolled = 0 if coded else _unrolled(len(view.contributors))
    return _variant(op.dtype, op.op, coded, unrolled, address % 16 == 0, layout.lanes, layout.chunk)


@functools.cache
def _variant(dtype: str, op: str, coded: bool, unrolled: int, aligned: bool, lanes: int, chunk: int) -> Variant:
    return Variant(element(dtype), operator(dtype, op), unrolled, aligned, lanes, chunk, _ONE_SHOT, coded)


def collective_variant(op: CollectiveOperation, layout: Layout, view: GroupView) -> CollectiveVariant:
    """The same of a collective that is no all-reduce."""
    aligned = op.alignment == 16
    if op.op:
        return _reduces(op.dtype, op.op, _unrolled(len(view.contributors)), aligned, layout.lanes, layout.chunk)
    return _moves(op.width, aligned, layout.lanes, layout.chunk)


@functools.cache
def _reduces(dtype: str, op: str, unrolled: int, aligned: bool, lanes: int, chunk: int) -> CollectiveVariant:
    return CollectiveVariant(element(dtype), operator(dtype, op), unrolled, aligned, lanes, chunk, REDUCED)


@functools.cache
def _moves(width: int, aligned: bool, lanes: int, chunk: int) -> CollectiveVariant:
    return CollectiveVariant(tl.dtype(f"int{8 * width}"), 0, 1, aligned, lanes, chunk, MOVED)


def _unrolled(sources: int) -> int:
    """Returns for how many sources a reduction is unrolled; 0: it takes a loop, for any number of them."""
    return sources if sources in _UNROLLED else 0


def task_words(op: KernelOperation, view: GroupView) -> tuple[int, ...]:
    """Returns what is left of `op`, as the kernel reads it."""
    index = {replica: i for i, replica in enumerate(view.members)}
    if isinstance(op, CollectiveOperation):
        return tuple(
            task.chunk
            | (0 if task.holder < 0 else index[task.holder] + 1) << words.HOLDER
            | (op.finals[task.chunk] is not None) << words.SKIP
            | (task.holder == NOBODY) << words.EMPTY
            for task in op.tasks
        )
    return tuple(
        task.chunk
        if task.holder == REDUCE
        else task.chunk | (index[task.holder] + 1) << words.HOLDER | (op.finals[task.chunk] is not None) << words.SKIP
        for task in op.tasks
    )


def view_words(view: GroupView, reached: Mapping[int, Reached], returned: int) -> list[int]:
    """The table of the members, of ops from number `returned` on. `reached` is of all of them, this one too."""
    if len(view.members) > words.MOST_MEMBERS:
        raise ValueError(f"{len(view.members)} members; the kernel has room for {words.MOST_MEMBERS}")
    table = [0] * words.VIEW_WORDS
    contributors = view.contributors
    table[words.EPOCH] = view.epoch
    table[words.MEMBERS] = len(view.members)
    table[words.ME] = view.members.index(view.me)
    table[words.SOURCES] = len(contributors)
    table[words.CONTRIBUTES] = view.me in view.contributing
    table[words.SOLE] = view.members.index(contributors[0]) if len(contributors) == 1 else -1
    table[words.ONE_HOST] = view.one_host
    table[words.RESUMED] = returned
    table[words.PRESENT] = sum(1 << member for member in view.members if member < words.MOST_REPLICAS)
    table[words.COPY] = reached[view.me].words + 8 * words.LANES_AT
    for i, member in enumerate(view.members):
        table[words.FLAGS_OF + i] = reached[member].flags
        table[words.STAGING_OF + i] = reached[member].staging
    for i, member in enumerate(contributors):
        table[words.SOURCE_STAGING + i] = reached[member].staging
    return table


# -- what the words of the lanes say ---------------------------------------------------------------------------------


def lane_word(lane: int, word: int) -> int:
    """Index in the words of a member's segment."""
    return words.LANES_AT + lane * words.LINE + word


def lanes_of(op: KernelOperation, layout: Layout) -> int:
    """Returns how many lanes have tasks of it."""
    return max(1, min(layout.lanes, len(op.tasks)))


def counter(lanes: memoryview, lane: int, word: int, epoch: int) -> int:
    """Returns how far the word of a lane has come in `epoch`; 0 if it is of an earlier one, and -1 of a later one."""
    value: int = lanes[lane_word(lane, word)]
    return value & (COUNTS - 1) if value >> COUNTER == epoch else -(value >> COUNTER > epoch)


def account(op: KernelOperation, own: memoryview, layout: Layout, view: GroupView, base: int) -> None:
    """Write down which chunks are FINAL, of an op that was begun at `base` and is not returned. Repeatable."""
    lanes = lanes_of(op, layout)
    taken = [counter(own, lane, words.TAKEN, view.epoch) - base for lane in range(lanes)]
    for i, task in enumerate(op.tasks):
        if i // lanes < taken[i % lanes]:
            op.took(task, view)


class _Lanes(Peer):
    """The words of the lanes of a member, for a gate to look at."""

    address = 0  # no thread of a host sleeps on these words

    def __init__(self, replica: int, words: memoryview) -> None:
        super().__init__(replica)
        self.words = words


def missing(
    op: KernelOperation, own: memoryview, others: Mapping[int, memoryview], layout: Layout, view: GroupView, base: int
) -> tuple[int, ...]:
    """The replicas whose words stand in the way of an op that runs."""
    lanes = lanes_of(op, layout)
    peers = [_Lanes(replica, theirs) for replica, theirs in others.items()]
    late: set[int] = set()

    def waits(lane: int, word: int, count: int) -> None:
        late.update(peer.replica for peer in Gate(view, lane_word(lane, word), peers).behind(base + count))

    for lane in range(lanes):
        posted, reduced, taken = (
            counter(own, lane, word, view.epoch) - base for word in (words.POSTED, words.REDUCED, words.TAKEN)
        )
        if posted <= 0:
            continue  # no program has come to this lane
        steps = -(-(len(op.tasks) - lane) // lanes)
        if taken >= steps:
            waits(lane, words.TAKEN, taken)
        else:
            waits(lane, words.POSTED, max(0, taken) + 1)
            if reduced > max(0, taken):
                waits(lane, words.REDUCED, reduced)
    return tuple(sorted(late))
