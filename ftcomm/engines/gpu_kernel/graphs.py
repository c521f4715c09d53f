"""All-reduces inside CUDA graphs: captured once, and replayed as often as the caller likes without the host.

To capture an op runs nothing and counts as no call. Its launch says CAPTURED or more as its template, by which the host
finds what it was. Each replay is an op of its own, with the number that is next on the device (NUMBER, BASE lie there),
so the other members may have captured it, too, or call it: only the order counts, as ever. The host numbers the ops
that it calls only when it has to, at a view change: by then a word says how many have returned, replays among them.

    eager     template 0, 1, 2 ...        in flight from its call on; CALLED says when it has returned
    captured  template CAPTURED + i       not in flight, but for a replay that was broken off: as a new op, the first,
                                          until it has returned, so that it is accounted for and goes on like others

Replays and calls of a group follow each other: on one stream, or on streams that wait for each other. An error of a
replay is raised by the next call or boundary. The memory that a captured op works on is kept until the group ends.
"""

from __future__ import annotations

from typing import NamedTuple

from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.kernels.device.words import CAPTURED


class Running(NamedTuple):
    """The op that has begun and not returned, as the words of the device have it."""

    number: int  # among the ops of the group
    template: int
    base: int


def captured(template: int) -> bool:
    return template >= CAPTURED


def replay_of(op: KernelOperation, chunk: int) -> KernelOperation:
    """One replay of the captured `op`, to be numbered. `chunk` is that of the device."""
    replay = KernelOperation(op.array, op.dtype, op.op, chunk, op.atomic, op.compression, op.max_sms)
    replay.template = op.template
    return replay
