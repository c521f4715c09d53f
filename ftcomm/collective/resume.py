"""What is left to do of the ops in flight after a view change: a pure function of what the members say they hold.

    some member has returned the op     it is FINAL everywhere (an op returns only when all hold it): it is done
    every member holds the chunk FINAL  nothing
    some members hold it FINAL          the others copy it from the lowest of them
    nobody holds it                     reduced again among the members of the new view; all inputs are intact

The members may have different numbers of ops in flight, and some may call an op only after the view change. Their
streams of tasks agree all the same: a chunk is FINAL somewhere only if every member of an earlier view had called the
op, and so had every member of this one that ran in that view. Hence an op that is not in flight at some member is all
to be reduced at every member, which is also what an op called later does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from ftcomm.collective.chunks import Contributors, unpack
from ftcomm.control.messages import OpProgress, Progress
from ftcomm.errors import FtcommError

REDUCE = -1  # as `Task.holder`


class Task(NamedTuple):
    """One chunk to bring to FINAL. `holder` has it already, or is REDUCE; then the view says who contributes."""

    chunk: int
    holder: int
    contributors: Contributors


class ProtocolError(FtcommError):
    """The members contradict each other in a way that the protocol excludes. A defect, never a user's mistake."""


@lru_cache(maxsize=256)
def all_reduce(chunks: int) -> tuple[Task, ...]:
    """The tasks of an op that nobody holds any part of."""
    return tuple(Task(chunk, REDUCE, ()) for chunk in range(chunks))


def base(progress: Iterable[Progress]) -> int:
    """The first op that nobody has returned. The stream of tasks of the new epoch begins with it."""
    return max((p.returned for p in progress if not p.fresh), default=0)


def failure(number: int, progress: Iterable[Progress]) -> str | None:
    """What op `number` failed with at any member: then it fails everywhere, and has no tasks."""
    return next((failed.message for p in progress for failed in p.failed if failed.number == number), None)


def resume_tasks(number: int, chunks: int, progress: Mapping[int, Progress]) -> tuple[Task, ...]:
    """The tasks of op `number`, which has `chunks` chunks and which nobody has returned; `progress` is by replica.

    Raises `ProtocolError` if the members contradict each other.
    """
    reports = {replica: _report(number, p) for replica, p in progress.items()}
    held = {replica: _held(report) for replica, report in reports.items()}
    if not any(held.values()):
        return all_reduce(chunks)
    absent = [replica for replica, report in reports.items() if report is None]
    if absent:
        raise ProtocolError(f"op {number} is FINAL in part, but replicas {absent} have not called it")
    if max(bits.bit_length() for bits in held.values()) > chunks:
        raise ProtocolError(f"op {number} has {chunks} chunks, but a member holds more")
    everywhere = (1 << chunks) - 1
    for bits in held.values():
        everywhere &= bits
    tasks = []
    for chunk in range(chunks):
        if everywhere >> chunk & 1:
            continue
        holder = min((replica for replica, bits in held.items() if bits >> chunk & 1), default=REDUCE)
        tasks.append(Task(chunk, holder, () if holder == REDUCE else _contributors(chunk, reports)))
    return tuple(tasks)


def _report(number: int, progress: Progress) -> OpProgress | None:
    return next((op for op in progress.ops if op.number == number), None)


def _held(report: OpProgress | None) -> int:
    bits = 0
    for final in report.finals if report else ():
        bits |= unpack(final.chunks)
    return bits


def _contributors(chunk: int, reports: Mapping[int, OpProgress | None]) -> Contributors:
    """Whose inputs the chunk holds; all holders must say the same."""
    said = {
        tuple(final.contributors)
        for report in reports.values()
        if report
        for final in report.finals
        if unpack(final.chunks) >> chunk & 1
    }
    if len(said) != 1:
        raise ProtocolError(f"chunk {chunk} is FINAL with different contributors: {sorted(said)}")
    return said.pop()
