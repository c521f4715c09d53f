"""The ops in flight at one member: submitted and not returned, numbered, returned in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from ftcomm.collective.chunks import Contributors, pack
from ftcomm.collective.operation import Operation
from ftcomm.collective.resume import REDUCE, ProtocolError, Task, base, failure
from ftcomm.control.messages import FailedOp, Final, OpProgress, Progress
from ftcomm.errors import CollectiveTimeout, LostError, MismatchError


class Resumed(NamedTuple):
    """What a view change left to do at this member."""

    ops: int  # in flight
    copied: int  # chunks that this member gets from one that holds them FINAL
    reduced: int  # chunks that are reduced again
    again: int = 0  # of both, chunks that this member had posted before; not counted of scripted ops


class Flight:
    """Threads may `add` (one at a time) and `drain` while the driver returns ops; all else only when nobody drives."""

    def __init__(self) -> None:
        self.ops: deque[Operation] = deque()
        self.returned = 0
        self.issued = 0
        self.common: Contributors | None = None  # whose input is in every chunk that was reduced since it was reset

    def add(self, op: Operation) -> None:
        op.number = self.issued
        self.issued += 1
        self.ops.append(op)

    def drain(self, mutex: AbstractContextManager[object], timeout: float | None) -> None:
        """Block until what is in flight now is done. Raises `CollectiveTimeout`; not the ops' errors."""
        with mutex:
            last = self.ops[-1] if self.ops else None
        if last is not None and not last.wait(timeout):
            raise CollectiveTimeout(f"op {last.number} was still in flight after {timeout:g}s")

    def return_first(self) -> None:
        """The first op is done, with a result or with the error that it has already."""
        op = self.ops[0]
        if op.atomic and op.error is None and len(set(op.finals)) > 1:
            raise ProtocolError(f"op {op.number} is atomic, and its chunks have several sets of contributors")
        if op.error is None and op.script is None and (op.finals[0] is not self.common or len(op.finals) > 1):
            for who in set(op.finals):
                if who is not None:
                    self.narrow(who)
        self.returned += 1
        self.ops.popleft()
        op.finish(op.error)

    def narrow(self, who: Contributors) -> None:
        """A chunk was reduced from the inputs of `who`."""
        if who != self.common:
            self.common = who if self.common is None else tuple(r for r in self.common if r in who)

    def abandon(self, error: BaseException) -> None:
        while self.ops:
            self.ops.popleft().finish(error)

    def progress(self, begun: int | None = None) -> Progress:
        """What the others need to know to go on with this member in a new view.

        Ops from number `begun` on, if it is given, count as not called: a device has not come to them, so the others
        cannot have gone beyond their first tasks.
        """
        ops = [op for op in self.ops if begun is None or op.number < begun]
        return Progress(
            returned=self.returned,
            ops=tuple(OpProgress(op.number, _finals(op)) for op in ops),
            failed=tuple(
                FailedOp(op.number, str(op.error), isinstance(op.error, LostError))
                for op in ops
                if op.error is not None
            ),
        )

    def number_from(self, progress: Mapping[int, Progress]) -> None:
        """A joiner's ops are numbered on from those of the others."""
        self.returned = self.issued = base(progress.values())
        for op in self.ops:
            op.number = self.issued
            self.issued += 1

    def resume(self, progress: Mapping[int, Progress], contributors: Contributors) -> Resumed:
        """Return the ops that somebody has returned, and give the others the tasks that are left of them.

        `contributors` are those of the new view, `progress` is of all its members.
        Raises `ProtocolError` if the members contradict each other.
        """
        count = len(self.ops)
        start = base(progress.values())
        while self.ops and self.ops[0].number < start:
            op = self.ops[0]
            self._fail_as_elsewhere(op, progress)
            if op.error is None and None in op.finals:
                raise ProtocolError(f"op {op.number} was returned elsewhere, but is not FINAL here")
            self.return_first()
        copied = reduced = again = 0
        for op in self.ops:
            posted = {task.chunk for task in op.tasks[: op.next] if isinstance(task, Task)}
            op.next, op.end, op.verified = 0, -1, False
            self._fail_as_elsewhere(op, progress)
            tasks = op.resume(progress, contributors)
            copied += sum(task.holder != REDUCE and op.finals[task.chunk] is None for task in tasks)
            reduced += sum(task.holder == REDUCE for task in tasks)
            again += sum(task.chunk in posted for task in tasks)
        return Resumed(count, copied, reduced, again)

    @staticmethod
    def _fail_as_elsewhere(op: Operation, progress: Mapping[int, Progress]) -> None:
        failed = failure(op.number, progress)
        if failed is not None and op.error is None:
            op.error = (LostError if failed.lost else MismatchError)(failed.message)


def _finals(op: Operation) -> tuple[Final, ...]:
    chunks: dict[Contributors, list[int]] = {}
    for chunk, contributors in enumerate(op.finals):
        if contributors:
            chunks.setdefault(contributors, []).append(chunk)
    return tuple(Final(who, pack(held, len(op.finals))) for who, held in chunks.items())
