"""Computes what is left to do of the ops in flight after a view change: a pure function of what the members say they
hold.

    some member has returned the op     it is FINAL everywhere (an op returns only when all hold it): it is done
    every member holds the chunk FINAL  nothing
    some members hold it FINAL          the others copy it from the lowest of them
    no member holds it                  it is reduced again among the members of the new view; all inputs are intact

The members may have different numbers of ops in flight, and some may call an op only after the view change. Their
streams of tasks agree in any case: a chunk is FINAL somewhere only if every member of an earlier view had called the
op, and so had every member of this one that ran in that view. Hence an op that is not in flight at some member is to be
reduced completely at every member, which is also what an op called later does.

An atomic op ends with one set of contributors in all its chunks:

    each chunk is FINAL somewhere, all with one set      as above: copied where it is missing
    FINAL with those who contribute in the new view      as above
    FINAL with others                                    reduced again, by all, from the inputs that they have kept

By the first two rows what remains has one set, as it must to return. A member goes back to its input only when it posts
the chunk again. Until then its account is the old one, and the next plan, if another member is lost meanwhile, may keep
what this one gave up. Two members never hold one chunk with different contributors: a member that has it FINAL in this
epoch has seen all others post it in this epoch, so all have gone back before. And what any member has returned is never
reduced again: then each member of the view holds all chunks, with one set.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ftcomm.collective.chunks import Contributors, unpack
from ftcomm.control.messages import FailedOp, Progress
from ftcomm.errors import FtcommError

if TYPE_CHECKING:
    from ftcomm.collective.operation import Operation

REDUCE = -1  # a value of `Task.holder`


class Task(NamedTuple):
    """One chunk to bring to FINAL. `holder` has it already, or is REDUCE; then the view says who contributes.

    A stream asks the same of it as of a `Batch` (`ftcomm.collective.schedule`).
    """

    chunk: int
    holder: int
    contributors: Contributors

    def keep(self, op: Operation, span: int) -> None:
        """Keep the input of this chunk and of the next ones, `span` in all, before it is posted."""
        for chunk in range(self.chunk, self.chunk + span):
            op.keep(chunk, self.holder == REDUCE)

    def mark(self, op: Operation, span: int, contributors: Contributors) -> None:
        """Note that they are FINAL, with `contributors` if they were reduced."""
        if span == 1:
            op.finals[self.chunk] = self.contributors or contributors
        else:
            op.finals[self.chunk : self.chunk + span] = [self.contributors or contributors] * span


class ProtocolError(FtcommError):
    """The members contradict each other in a way that the protocol excludes. A defect, never a user's mistake."""


@lru_cache(maxsize=256)
def all_reduce(chunks: int) -> tuple[Task, ...]:
    """Returns the tasks of an op of which no member holds any part."""
    return tuple(Task(chunk, REDUCE, ()) for chunk in range(chunks))


def side_by_side(tasks: Sequence[Task]) -> int:
    """Returns how many of the first tasks, at least one, can be done as one: adjacent chunks that are all to be
    reduced."""
    if tasks[0].holder != REDUCE:
        return 1
    alike = (task == (tasks[0].chunk + number, REDUCE, ()) for number, task in enumerate(tasks))
    return sum(itertools.takewhile(bool, alike))


def base(progress: Iterable[Progress]) -> int:
    """Returns the first op that no member has returned. The stream of tasks of the new epoch begins with it."""
    return max((p.returned for p in progress if not p.fresh), default=0)


def failure(number: int, progress: Mapping[int, Progress]) -> FailedOp | None:
    """Returns what op `number` failed with at any member: then it fails everywhere, and has no tasks."""
    told = (failed for _, p in sorted(progress.items()) for failed in p.failed if failed.number == number)
    return next(told, None)


def resume_tasks(
    number: int, chunks: int, progress: Mapping[int, Progress], only: Contributors | None = None
) -> tuple[Task, ...]:
    """Returns the tasks of op `number`, which has `chunks` chunks and which no member has returned; `progress` is by
    replica.

    `only`: for an atomic op, the contributors in the new view. A task with holder REDUCE of a chunk that a member holds
    FINAL tells it to go back to its input.

    Raises `ProtocolError` if the members contradict each other.
    """
    held = holdings(number, progress)
    if not any(held.values()):
        return all_reduce(chunks)
    if only is not None and _one_set(chunks, held.values()):
        only = None
    tasks = []
    for chunk in range(chunks):
        bit = 1 << chunk
        holders = {m: who for m, finals in held.items() for who, bits in finals.items() if bits & bit}
        if len(set(holders.values())) > 1:
            raise ProtocolError(f"op {number}: chunk {chunk} is FINAL with different contributors: {holders}")
        if not holders or (only is not None and only not in holders.values()):
            tasks.append(Task(chunk, REDUCE, ()))
        elif len(holders) < len(held):
            tasks.append(Task(chunk, min(holders), holders[min(holders)]))
    if any(bits >> chunks for finals in held.values() for bits in finals.values()):
        raise ProtocolError(f"op {number} has {chunks} chunks, but a member holds more")
    return tuple(tasks)


def holdings(number: int, progress: Mapping[int, Progress]) -> dict[int, dict[Contributors, int]]:
    """Returns the FINAL chunks of op `number` at each member, a bitmap for each set of contributors.

    Raises `ProtocolError` if the op is FINAL in part, and not in flight at some member.
    """
    told = {replica: _held(number, p) for replica, p in progress.items()}
    absent = [replica for replica, finals in told.items() if finals is None]
    if absent and any(told.values()):
        raise ProtocolError(f"op {number} is FINAL in part, but replicas {absent} have not called it")
    return {replica: finals or {} for replica, finals in told.items()}


def _one_set(chunks: int, held: Iterable[dict[Contributors, int]]) -> bool:
    """Whether every chunk is FINAL at some member, and all that are FINAL have the same contributors."""
    union: dict[Contributors, int] = {}
    for finals in held:
        for who, bits in finals.items():
            union[who] = union.get(who, 0) | bits
    whole = (1 << chunks) - 1
    return [bits & whole for bits in union.values() if bits] == [whole]


def _held(number: int, progress: Progress) -> dict[Contributors, int] | None:
    """Returns the FINAL chunks of an op at one member, a bitmap for each set of contributors; None if it is not in
    flight."""
    ops = progress.ops  # in order; of thousands, each is looked for
    at = bisect.bisect_left(ops, number, key=lambda op: op.number)
    if at == len(ops) or ops[at].number != number:
        return None
    return {tuple(final.contributors): unpack(final.chunks) for final in ops[at].finals}
