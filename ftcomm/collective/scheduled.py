"""An op that follows a schedule: any collective but the all-reduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ftcomm.collective.chunks import Contributors
from ftcomm.collective.operation import Operation, call_of, describe
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import Task, holdings
from ftcomm.collective.schedule import NOTHING, Batch, Lost, Schedule, batches, from_start, left
from ftcomm.control.messages import Progress
from ftcomm.errors import LostError


class ScheduledOperation(Operation):
    """An op that gives from `source` and takes into `array`, which may be one array; both are flat, contiguous, and
    untouched by the caller until `done`. `source` stays INPUT until then, except for what is reduced in place.

    `dtype` and `count` are those of the caller's elements, for members to compare. What only moves is carried as bytes,
    and `itemsize` is then 1.
    """

    schedule: Schedule

    def __init__(
        self,
        schedule: Schedule,
        source: np.ndarray[Any, Any],
        array: np.ndarray[Any, Any],
        dtype: str,
        op: str,
        count: int,
        size: int,
    ) -> None:
        """`op` is "" for what only moves. `size`: bytes of an element of the caller's."""
        call = call_of(dtype, op)[0]
        self.schedule = schedule
        self.source, self.array = source, array
        self.dtype, self.op, self.count = dtype, op, count
        self.itemsize = array.itemsize
        self.nbytes = max(source.nbytes, array.nbytes)
        self._scale = size // array.itemsize
        self.call = count << 16 | call
        self.detail = schedule.detail
        self.finals: list[Contributors | None] = list(schedule.begin)
        self.left: tuple[Task, ...] | None = None  # the tasks of this epoch; None: all
        self.tasks: tuple[Batch, ...] = NOTHING

    def resume(self, progress: Mapping[int, Progress], contributors: Contributors) -> tuple[Task, ...]:
        self.left = None
        if self.error is not None:
            return ()
        held = holdings(self.number, progress)
        tasks = left(self.schedule, progress, held)
        if any(held.values()):
            self.left = tasks
        return tasks

    def posted(self) -> set[int]:
        """Returns none: its tasks are batches of parts, and not chunks."""
        return set()

    def enter(self, view: GroupView) -> None:
        """Turn what is left into tasks, or fail the op."""
        if self.error is not None:  # it has failed with this at some member, before this epoch
            self.tasks = ()
            return
        if self.left is None:
            made = from_start(self.schedule, view.members, self.itemsize)
        else:
            made = batches(self.schedule, self.left, view.members, self.itemsize)
        self.doom = None
        if isinstance(made, Lost):
            self.doom = self._lost_error(made)
            made = NOTHING  # once all have taken this task, all have called the op and know that it fails
        self.tasks = made

    def _lost_error(self, lost: Lost) -> LostError:
        who = f"replica{'s' if len(lost.members) > 1 else ''} {', '.join(map(str, lost.members))}"
        return LostError(
            f"op {self.number}, {describe(self.call, self.detail)}: {who} {'were' if len(lost.members) > 1 else 'was'} "
            "lost before the data were with any survivor that needs them; the group goes on, and every survivor gets "
            "this error. Go on without the data, or call it again after the next step boundary"
        )

    def spans(self) -> tuple[tuple[int, int, Contributors], ...]:
        """Returns (start, stop, contributors) in elements of the result, for a finished op."""
        found = sorted(
            (part.dest, part.dest + part.size, who)
            for part, who in zip(self.schedule.parts, self.finals, strict=True)
            if who
        )
        made: list[tuple[int, int, Contributors]] = []
        for start, stop, who in found:
            if made and made[-1][1:] == (start, who):
                made[-1] = made[-1][0], stop, who
            else:
                made.append((start, stop, who))
        return tuple((a // self._scale, b // self._scale, who) for a, b, who in made)
