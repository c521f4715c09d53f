"""A collective that is no all-reduce, as a kernel runs it: what its rows are, and what is left of them after a loss.

The host's engine cuts the same collectives into parts that it packs anew in every epoch (`ftcomm.collective.schedule`).
Here the unit of recovery is the row (`ftcomm.kernels.device.rows`), since a row is a task: INPUT or FINAL at a member,
as a chunk of an all-reduce is. So members tell each other after a loss which rows they have, and each finds the same:

    allgather, broadcast    a row that some have is copied from the lowest of them; else it is given anew
    others                  a row that somebody does not have is given anew, by all; who has it leaves it
    nobody can give it      all that is left is one task that moves nothing, and the call fails on all

Who takes nothing of a row, as all but the root of a reduce or gather, has it when all have given it. So if the root of
one of these is lost, what is left moves nothing, and the call returns.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ftcomm.collective.chunks import Contributors
from ftcomm.collective.operation import Operation, call_of, describe
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import REDUCE, Task, all_reduce, holdings
from ftcomm.collective.schedule import Schedule
from ftcomm.control.messages import Progress
from ftcomm.engines.base import CollectiveCall
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.errors import ArgumentError, LostError
from ftcomm.kernels.call_codes import KINDS
from ftcomm.kernels.device import words
from ftcomm.kernels.dtypes import unsupported

CALLS = KINDS[1:]
NOBODY = -2  # as the holder of a task: it moves nothing
_LINE = 64  # bytes; parts begin on cache lines
_WIDEST = 8  # bytes of an element, for what is only moved


def parts_of(kind: str, ranks: int, chunk: int) -> tuple[int, int]:
    """Returns how many parts a row has, and the bytes of a part, in slots of `chunk` bytes: as `part_of` in
    `ftcomm.kernels.device.rows`."""
    parts = {"broadcast": 1, "reduce": 1, "barrier": 0}.get(kind, ranks)
    return parts, max(_LINE, chunk // max(1, parts) // _LINE * _LINE)


class CollectiveOperation(KernelOperation):
    """Gives from `source` and takes into `array`, flat arrays of the device, which overlap only where one is this
    rank's part of the other. `count` elements, of `size` bytes, of each rank, or as many as `call.counts` says, if they
    are unequal; `addresses` of both arrays."""

    schedule: Schedule
    table: Any = None  # `pieces` in memory of the device; whoever has made the op puts them there

    def __init__(
        self, call: CollectiveCall, array: Any, source: Any, dtype: str, count: int, size: int, chunk: int,
        addresses: tuple[int, int], max_sms: int | None = None,
    ) -> None:  # fmt: skip
        kind, roster, root, op = call.kind, call.roster, call.root, call.op
        if op and (reason := unsupported(dtype, op)):
            raise ArgumentError(f"hosts can do this, kernels that run whole ops (gpu-kernel) cannot: {reason}")
        if max(roster) >= words.MOST_REPLICAS:
            raise ArgumentError(
                f"{kind} among replicas {', '.join(map(str, roster))}: kernels that run whole ops do that among the "
                f"replicas 0 to {words.MOST_REPLICAS - 1}; set FTCOMM_ENGINE=host on all ranks"
            )
        code = call_of(dtype, op)[0]
        self.max_sms = max_sms
        self.kind, self.roster, self.rank, self.root = kind, roster, call.rank, root
        self.source = source
        self.counts = call.counts if len({number for row in call.counts for number in row}) > 1 else ()
        self.piece = size * max(map(max, self.counts), default=count)  # bytes of the longest
        count = sum(map(sum, self.counts)) or count
        parts, self.part = parts_of(kind, len(roster), chunk)
        rows = max(1, -(-self.piece // self.part))
        nbytes = max(array.nbytes, source.nbytes)
        detail = detail_of(KINDS.index(kind) << words.KIND, who_of(roster, root))
        outline = (count, size, nbytes, count, count << 16 | code, all_reduce(rows))
        Operation.__init__(self, array, dtype, op, outline=outline)
        self.detail = detail
        self.schedule = Schedule(kind, (), detail, 0, 1, tuple(self.finals))
        # How kernels see it
        self.who = who_of(roster, root)
        self.compared = self.call | KINDS.index(kind) << words.KIND
        pieces = list(self._pieces())
        lengths = [n * size for piece in pieces for n in piece[:4]] or [0 if op and parts == 1 else self.piece]
        self.alignment = math.gcd(16, *lengths, *addresses)
        self.width = size if op else min(_WIDEST, self.alignment)
        self.elements = -(-self.piece // self.width)
        self.pieces = [n for *four, takers in pieces for n in (*(n * size // self.width for n in four), takers)]

    def _pieces(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yields for each rank, if pieces have unequal lengths, where the piece for it begins and how long it is, the
        same of the piece from it, and to which ranks it gives anything; in elements."""
        at = to = 0
        for rank, row in enumerate(self.counts):
            given, taken = self.counts[self.rank][rank], row[self.rank]
            yield at, given, to, taken, sum(1 << taker for taker, n in enumerate(row) if n)
            at, to = at + given, to + taken

    # -- views -----------------------------------------------------------------------------------------------------

    def prepare(self, view: GroupView) -> None:
        """Plan all of it for `view`, in which it is called."""
        self._plan({member: {} for member in view.members})

    def resume(self, progress: Mapping[int, Progress], contributors: Contributors) -> tuple[Task, ...]:
        if self.error is not None:
            self.tasks = ()
            return ()
        held = holdings(self.number, progress)
        self._plan(held if any(held.values()) else {member: {} for member in progress})
        return self.tasks

    def _plan(self, held: Mapping[int, Mapping[Contributors, int]]) -> None:
        self.tasks, lost = rows_left(self.kind, self.roster, len(self.finals), self.part, self._bytes, held)
        self.doom = self._lost_error(lost) if lost else None

    def _bytes(self, giver: int, taker: int) -> int:
        """Returns how many bytes one rank gives to another, which that gets from nobody else at first."""
        if self.kind in ("broadcast", "scatter"):
            return self.piece if giver == self.root else 0
        if self.kind == "gather":
            return self.piece if taker == self.root else 0
        if self.counts:
            return self.counts[giver][taker] * self.itemsize
        return self.piece if self.kind in ("allgather", "alltoall") else 0

    def _lost_error(self, lost: Sequence[int]) -> LostError:
        several = len(lost) > 1
        return LostError(
            f"op {self.number}, {describe(self.call, self.detail)}: replica{'s' * several} {', '.join(map(str, lost))} "
            f"{'were' if several else 'was'} lost before the data were with any survivor that needs them; the group "
            "goes on, and every survivor gets this error. Go on without the data, or call it again after the next step "
            "boundary"
        )

    def took(self, task: Task, view: GroupView) -> None:
        """Note that this member has taken `task`; all members have called the op."""
        if task.holder == NOBODY:
            self.error = self.error or self.doom
        elif self.finals[task.chunk] is None:
            self.finals[task.chunk] = task.contributors or (view.contributors if self.op else self._contributors())

    def _contributors(self) -> Contributors:
        return (self.roster[self.root],) if self.root is not None and self.kind != "gather" else self.roster

    def spans(self) -> tuple[tuple[int, int, Contributors], ...]:
        """Returns (start, stop, contributors) in elements of the result, for a finished op."""
        takes_none = self.kind in ("reduce", "gather") and self.rank != self.root
        if not self.count or self.kind == "barrier" or takes_none:
            return ()
        if self.kind in ("broadcast", "scatter"):
            return ((0, self.count, self._contributors()),)
        if not self.op:
            lengths = [row[self.rank] for row in self.counts] or [self.count] * len(self.roster)
            ends = itertools.accumulate(lengths)
            each = zip(lengths, ends, self.roster, strict=True)
            return tuple((end - length, end, (member,)) for length, end, member in each if length)
        made: list[tuple[int, int, Contributors]] = []
        rows = self.part // self.itemsize
        for row, who in enumerate(self.finals):
            stop = min(self.count, (row + 1) * rows)
            if who and made and made[-1][2] == who:
                made[-1] = made[-1][0], stop, who
            elif who:
                made.append((row * rows, stop, who))
        return tuple(made)


def rows_left(
    kind: str, roster: Sequence[int], rows: int, part: int, given: Callable[[int, int], int],
    held: Mapping[int, Mapping[Contributors, int]],
) -> tuple[tuple[Task, ...], tuple[int, ...]]:  # fmt: skip
    """Returns the rows that the members still need, and the lost members without which they cannot get them.

    `part`: bytes of each piece in a row. `given`: bytes from one rank to another. `held`: for each member, bitmaps of
    the rows that it has. The kernel finds the same by itself of an op of which nobody has anything (`ranks_of`).
    """
    union = {member: 0 for member in held}
    for member, finals in held.items():
        for bits in finals.values():
            union[member] |= bits
    gone = [rank for rank, member in enumerate(roster) if member not in union]
    tasks: list[Task] = []
    lost: set[int] = set()
    for row in range(rows):
        have = [member for member in sorted(union) if union[member] >> row & 1]
        if len(have) == len(union):
            continue
        if have and kind in ("allgather", "broadcast"):
            who = next(who for who, bits in held[have[0]].items() if bits >> row & 1)
            tasks.append(Task(row, have[0], who))
            continue
        tasks.append(Task(row, REDUCE, ()))
        without = [rank for rank, member in enumerate(roster) if member in union and member not in have]
        lost.update(rank for rank in gone if any(given(rank, taker) > row * part for taker in without))
    return ((Task(0, NOBODY, ()),) if lost else tuple(tasks)), tuple(roster[rank] for rank in sorted(lost))


# -- numbers that kernels compare ----------------------------------------------------------------------------------


def who_of(roster: Sequence[int], root: int | None) -> int:
    return sum(1 << replica for replica in roster) | (0 if root is None else root + 1) << words.ROOT


def detail_of(call: int, who: int) -> int:
    """Returns the detail of a call that a kernel has compared as these two numbers, for
    `ftcomm.collective.schedule.explained`."""
    replicas, root = who & (1 << words.MOST_REPLICAS) - 1, who >> words.ROOT
    return call >> words.KIND | root << 8 | zlib.crc32(replicas.to_bytes(8, "little")) << 32
