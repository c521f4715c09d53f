"""The ops in flight at one member: submitted and not returned, numbered, returned in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from ftcomm.collective.chunks import Contributors, pack
from ftcomm.collective.operation import Operation
from ftcomm.collective.resume import REDUCE, ProtocolError, Task, base, failure
from ftcomm.control.limits import IN_FLIGHT
from ftcomm.control.messages import FailedOp, Final, OpProgress, Progress
from ftcomm.errors import ArgumentError, CollectiveTimeout, LostError, MismatchError


class Resumed(NamedTuple):
    """What a view change left to do at this member."""

    ops: int  # in flight
    copied: int  # chunks that this member gets from one that holds them FINAL
    reduced: int  # chunks that are reduced again
    again: int = 0  # chunks that this member had posted before and may give again; not counted of scripted ops
    resent: int = 0  # their bytes, which a neighbour gets once more, or a part of them; SLOTS x SPAN at most, see below


class Inflight:
    """Threads may `add` (one at a time) and `drain` while the driver returns ops; all else only when nobody drives."""

    def __init__(self) -> None:
        self.ops: deque[Operation] = deque()
        self.returned = 0
        self.issued = 0
        self.common: Contributors | None = None  # whose input is in every chunk that was reduced since it was reset
        # Ops that failed before the last view change. Whoever enters the view returns them at once; who does not, as
        # the next one comes, has this alone to hear of it.
        self._failed: dict[int, FailedOp] = {}

    def add(self, op: Operation) -> None:
        """Raises `ArgumentError` where no account could tell of it: a change of view would never end."""
        ops = self.ops
        if len(ops) >= IN_FLIGHT:
            raise ArgumentError(
                f"op {self.issued}: {IN_FLIGHT} ops of this group are in flight, and there can be no more. Wait for "
                "some (Work.wait) before you start the next"
            )
        op.number = self.issued
        self.issued += 1
        ops.append(op)

    def drain(self, mutex: AbstractContextManager[object], timeout: float | None) -> None:
        """Block until what is in flight now is done. Raises `CollectiveTimeout`; not the ops' errors."""
        with mutex:
            last = self.ops[-1] if self.ops else None
        if last is not None and not last.wait(timeout):
            raise CollectiveTimeout(f"op {last.number} was still in flight after {timeout:g}s")

    def return_first(self) -> None:
        """The first op is done, with a result or with the error that it has already."""
        op = self.ops[0]
        if op.error is None and op.schedule is None:
            finals = op.finals
            who = finals[0] if len(finals) == 1 else None
            if who is None:
                self._return_chunks(op)
            elif who is not self.common:
                self.narrow(who)
        self.returned += 1
        self.ops.popleft()
        op.finish(op.error)

    def _return_chunks(self, op: Operation) -> None:
        sets = set(op.finals)
        if op.atomic and len(sets) > 1:
            raise ProtocolError(f"op {op.number} is atomic, and its chunks have several sets of contributors")
        for who in sets:
            if who is not None:
                self.narrow(who)

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
            failed=tuple({**self._failed, **{op.number: _failed(op) for op in ops if op.error is not None}}.values()),
        )

    def number_from(self, progress: Mapping[int, Progress]) -> None:
        """A joiner's ops are numbered on from those of the others."""
        self.returned = self.issued = base(progress.values())
        for op in self.ops:
            op.number = self.issued
            self.issued += 1

    def resume(self, progress: Mapping[int, Progress], contributors: Contributors) -> Resumed:
        """Return the ops that somebody has returned, and give the others the tasks that are left of them.

        `contributors` are those of the new view, `progress` is of all its members. What is sent again was in flight: a
        member posts what uses a slot again when all others have taken what it held, and what all have taken is FINAL
        everywhere. Only an atomic op, all of which may have to be reduced again, sends more.

        Raises `ProtocolError` if the members contradict each other.
        """
        count = len(self.ops)
        start = base(progress.values())
        behind = min((p.returned for p in progress.values() if not p.fresh), default=0)
        self._failed = {number: failed for number, failed in self._failed.items() if number >= behind}
        while self.ops and self.ops[0].number < start:
            op = self.ops[0]
            self._fail_as_elsewhere(op, progress)
            if op.error is None and None in op.finals:
                raise ProtocolError(f"op {op.number} was returned elsewhere, but is not FINAL here")
            self.return_first()
        copied = reduced = again = resent = 0
        for op in self.ops:
            posted = {task.chunk for task in op.tasks[: op.next] if isinstance(task, Task)}
            op.next, op.end, op.verified = 0, -1, False
            self._fail_as_elsewhere(op, progress)
            tasks = op.resume(progress, contributors)
            copied += sum(task.holder != REDUCE and op.finals[task.chunk] is None for task in tasks)
            reduced += sum(task.holder == REDUCE for task in tasks)
            mine = [task.chunk for task in tasks if task.holder == REDUCE or op.finals[task.chunk] is not None]
            twice = [chunk for chunk in mine if chunk in posted]  # whoever is given a chunk sends nothing of it
            again += len(twice)
            resent += sum(op.size(chunk) for chunk in twice)
        return Resumed(count, copied, reduced, again, resent)

    def _fail_as_elsewhere(self, op: Operation, progress: Mapping[int, Progress]) -> None:
        failed = failure(op.number, progress)
        if failed is None:
            return
        self._failed[op.number] = failed
        if op.error is None:
            op.error = (LostError if failed.lost else MismatchError)(failed.message)


def _failed(op: Operation) -> FailedOp:
    return FailedOp(op.number, str(op.error), isinstance(op.error, LostError))


def _finals(op: Operation) -> tuple[Final, ...]:
    chunks: dict[Contributors, list[int]] = {}
    for chunk, contributors in enumerate(op.finals):
        if contributors:
            chunks.setdefault(contributors, []).append(chunk)
    return tuple(Final(who, pack(held, len(op.finals))) for who, held in chunks.items())
