"""The ops in flight at one member: submitted and not returned, numbered, returned in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

from ftcomm.collective.chunks import Contributors, pack
from ftcomm.collective.operation import Operation
from ftcomm.collective.resume import REDUCE, ProtocolError, base, failure
from ftcomm.control.limits import IN_FLIGHT
from ftcomm.control.messages import FailedOp, Final, OpProgress, Progress
from ftcomm.errors import ArgumentError, CollectiveTimeout, LostError, MismatchError

OpT = TypeVar("OpT", bound=Operation)


class Resumed(NamedTuple):
    """The work that a view change has left to do at this member."""

    ops: int  # ops in flight
    copied: int  # chunks that it gets from a member that holds them FINAL
    reduced: int  # chunks that are reduced again
    again: int = 0  # chunks that it had posted before and may post again; not counted of scheduled ops
    resent: int = 0  # their bytes, which a neighbour may get again; SLOTS x SPAN at most, see below


class Inflight(Generic[OpT]):
    """The ops in flight. Threads may `add` (one at a time) and `wait_all` while a driver returns ops; while it runs,
    they may call nothing else."""

    def __init__(self) -> None:
        self.ops: deque[OpT] = deque()
        self.returned = 0
        self.issued = 0
        self.common: Contributors | None = None  # contributors to every chunk that was reduced since the reset
        # Ops that failed before the last view change. A member that enters the view returns them at once; one that does
        # not, as the next view comes, learns of them only here.
        self._failed: dict[int, FailedOp] = {}

    def add(self, op: OpT) -> None:
        """Add an op. Raises `ArgumentError` if no message could describe so many: a change of view would never end."""
        ops, number = self.ops, self.issued
        if ops and len(ops) >= IN_FLIGHT:  # nearly every op finds none
            raise ArgumentError(
                f"op {number}: {IN_FLIGHT} ops of this group are in flight, and there can be no more. Wait for "
                "some (Work.wait) before you start the next"
            )
        op.number = number
        op.place = number | op.stamp
        self.issued = number + 1
        ops.append(op)

    def wait_all(self, mutex: AbstractContextManager[object], timeout: float | None) -> None:
        """Block until all ops now in flight are done. Raises `CollectiveTimeout`, but not the errors of the ops."""
        with mutex:
            last = self.ops[-1] if self.ops else None
        if last is not None and not last.wait(timeout):
            raise CollectiveTimeout(f"op {last.number} was still in flight after {timeout:g}s")

    def return_first(self) -> None:
        """Return the first op, with its result or with the error that it has."""
        op = self.ops[0]
        if op.error is None and op.schedule is None and op.finals != [self.common]:
            self._return_chunks(op)
        self.returned += 1
        self.ops.popleft()
        op.finish(op.error)

    def _return_chunks(self, op: Operation) -> None:
        if op.finals.count(self.common) == len(op.finals):
            return
        sets = set(op.finals)
        if op.atomic and len(sets) > 1:
            raise ProtocolError(f"op {op.number} is atomic, and its chunks have several sets of contributors")
        for who in sets:
            if who is not None:
                self.narrow(who)

    def narrow(self, who: Contributors) -> None:
        """Note that a chunk was reduced from the inputs of `who`."""
        if self.common is None or who == self.common:
            self.common = who  # also if it is equal: that of the next op is the same, which compares at once
        else:
            self.common = tuple(r for r in self.common if r in who)

    def return_below(self, number: int) -> None:
        """Return the first ops up to `number`, as a member has done that is in no view any more: it knew that all held
        them FINAL. One that is not FINAL here has returned there with an error, which it will get here as well."""
        while self.ops and self.ops[0].number < number and _holds(self.ops[0]):
            self.return_first()

    def abandon(self, error: BaseException) -> None:
        while self.ops:
            self.ops.popleft().finish(error)

    def progress(self, begun: int | None = None) -> Progress:
        """Returns what the others need to know to go on with this member in a new view.

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
        """Number the ops of a joiner on from those of the others."""
        self.returned = self.issued = base(progress.values())
        for op in self.ops:
            op.number = self.issued
            op.place = op.number | op.stamp
            self.issued += 1

    def resume(self, progress: Mapping[int, Progress], contributors: Contributors) -> Resumed:
        """Return the ops that any member has returned, and give the others the tasks that are left of them.

        `contributors` are those of the new view, and `progress` is of all its members. What is sent again was in
        flight: a member posts into a slot again when all others have taken what it held, and what all have taken is
        FINAL everywhere. Only an atomic op, all of which may have to be reduced again, sends more.

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
            posted = op.posted()
            op.next, op.end, op.verified = 0, -1, False
            self._fail_as_elsewhere(op, progress)
            tasks = op.resume(progress, contributors)
            copied += sum(task.holder != REDUCE and op.finals[task.chunk] is None for task in tasks)
            reduced += sum(task.holder == REDUCE for task in tasks)
            mine = [task.chunk for task in tasks if task.holder == REDUCE or op.finals[task.chunk] is not None]
            twice = [chunk for chunk in mine if chunk in posted]  # a member that is given a chunk sends nothing of it
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


def _holds(op: Operation) -> bool:
    """Whether all of it is FINAL here, and all members have called the same."""
    if op.error is not None or None in op.finals:
        return False
    return op.schedule is None or op.verified or op.finals != list(op.schedule.begin)


def _failed(op: Operation) -> FailedOp:
    return FailedOp(op.number, str(op.error), isinstance(op.error, LostError))


def _finals(op: Operation) -> tuple[Final, ...]:
    chunks: dict[Contributors, list[int]] = {}
    for chunk, contributors in enumerate(op.finals):
        if contributors:
            chunks.setdefault(contributors, []).append(chunk)
    return tuple(Final(who, pack(held, len(op.finals))) for who, held in chunks.items())
