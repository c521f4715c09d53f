"""The schedule of a collective other than the all-reduce: a pure function of its kind, its sizes and the roster.

A schedule is a list of *parts*, the same on all members. A part is one chunk: the unit of transfer and recovery, INPUT
or FINAL at each of its takers. Members differ only in where it lies in their arrays.

    collective      parts                  holder         takers
    broadcast       the array              root           all
    allgather       one piece a member     that member    all
    gather          one piece a member     that member    root
    scatter         one piece a member     root           that member
    alltoall        one piece a pair       the sender     the receiver
    reduce          the array              all, reduced   root
    reduce_scatter  one piece a member     all, reduced   that member
    barrier         none

Pieces are cut into parts, and parts are packed into *batches*: the tasks of the stream. Each member stages what it
gives of a batch in its own slot, so that in a batch all members give and take at the same time:

    allgather, 3 members    slot of 0       slot of 1       slot of 2
    batch 0                 0.0             1.0             2.0             piece.part
    batch 1                 0.1             1.1             2.1

    reduce_scatter          slot of 0       slot of 1       slot of 2
    batch 0                 0.0 1.0 2.0     0.0 1.0 2.0     0.0 1.0 2.0     each a third of a slot; member 1 reduces 1.0
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ftcomm.collective.chunks import Contributors
from ftcomm.collective.resume import REDUCE, Task
from ftcomm.kernels.call_codes import KINDS

if TYPE_CHECKING:
    from ftcomm.collective.operation import Operation

AROUND = 1 << 8  # the detail of an all-reduce, if large ones go around a ring
HIERARCHICAL = 2 << 8  # if they are hierarchical

_ALIGN = 64  # bytes; adjacent parts of a slot begin on cache lines


class Part(NamedTuple):
    """A part: `size` elements that `holder` gives to `takers` (None: to all), or that are reduced for them (REDUCE)."""

    size: int
    holder: int
    takers: tuple[int, ...] | None
    source: int  # its offset in the array that this member gives from; -1: it gives none of it
    dest: int  # its offset in the result at this member; -1: it takes none of it


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The schedule of a call. It is made once for each size of each collective, and compared by identity."""

    kind: str
    parts: tuple[Part, ...]
    detail: int  # kind, root and sizes as one word, for members to compare; see `explained`
    room: int  # elements in a slot
    unit: int  # elements in a cache line
    begin: tuple[Contributors | None, ...]  # the state of each part at first: None for INPUT, () if it is not taken


class Move(NamedTuple):
    """A part in a batch, from `holder` or reduced, through `size` elements from `at` on in the slots."""

    part: int
    holder: int
    contributors: Contributors  # of a part that a member gives FINAL; else ()
    takers: tuple[int, ...]
    at: int
    size: int


class Batch(NamedTuple):
    """A batch: one task of the stream, as a `Task` of one chunk is."""

    moves: tuple[Move, ...]
    itemsize: int

    @property
    def chunk(self) -> int:
        """The chunk where it begins: the input and the result of its op are no rows of chunks."""
        return 0

    @property
    def holder(self) -> int:
        """The member that has all of it: none, since each move has a holder."""
        return REDUCE

    def keep(self, op: Operation, span: int) -> None:
        """Keep nothing: an op that follows a schedule is not atomic."""

    def mark(self, op: Operation, span: int, contributors: Contributors) -> None:
        """Mark nothing: each part became FINAL as it was unpacked."""

    def span(self, giver: int, reduces: bool, taker: int) -> tuple[int, int]:
        """Returns the elements (start, stop) of `giver`'s slot that `taker` has to read; `reduces`: its input
        counts."""
        given = [
            move
            for move in self.moves
            if taker in move.takers and (move.holder == giver or (move.holder == REDUCE and reduces))
        ]
        if not given:
            return 0, 0
        return min(move.at for move in given), max(move.at + move.size for move in given)


class Lost(NamedTuple):
    """The members that are not in the view and whose data its members need."""

    members: tuple[int, ...]


# -- scripts: rank order everywhere, `me` is this rank ---------------------------------------------------------------


@lru_cache(maxsize=1024)
def broadcast(count: int, roster: Sequence[int], me: int, root: int, chunk: int, itemsize: int) -> Schedule:
    """Builds the schedule of a broadcast, which works in place."""
    room, unit = _slot(chunk, itemsize)
    piece = [Part(size, roster[root], None, at if me == root else -1, at) for at, size in _cut(count, room)]
    return _script("broadcast", [piece], roster, root, (count,), room, unit)


@lru_cache(maxsize=1024)
def allgather(count: int, roster: Sequence[int], me: int, in_place: bool, chunk: int, itemsize: int) -> Schedule:
    """Builds the schedule of an allgather of `count` elements from each. In place: the input is the own part of the
    result."""
    room, unit = _slot(chunk, itemsize)
    pieces = []
    for rank, member in enumerate(roster):
        begin = rank * count
        given = begin if in_place else 0
        pieces.append(
            [Part(size, member, None, given + at if rank == me else -1, begin + at) for at, size in _cut(count, room)]
        )
    return _script("allgather", pieces, roster, None, (count,), room, unit)


@lru_cache(maxsize=1024)
def gather(count: int, roster: Sequence[int], me: int, root: int, chunk: int, itemsize: int) -> Schedule:
    """Builds the schedule of a gather of `count` elements from each."""
    room, unit = _slot(chunk, itemsize)
    pieces = []
    for rank, member in enumerate(roster):
        begin = rank * count
        pieces.append(
            [
                Part(size, member, (roster[root],), at if rank == me else -1, begin + at if me == root else -1)
                for at, size in _cut(count, room)
            ]
        )
    return _script("gather", pieces, roster, root, (count,), room, unit)


@lru_cache(maxsize=1024)
def scatter(count: int, roster: Sequence[int], me: int, root: int, chunk: int, itemsize: int) -> Schedule:
    """Builds the schedule of a scatter of `count` elements to each."""
    room, unit = _slot(chunk, itemsize)
    pieces = []
    for rank, member in enumerate(roster):
        begin = rank * count
        pieces.append(
            [
                Part(size, roster[root], (member,), begin + at if me == root else -1, at if rank == me else -1)
                for at, size in _cut(count, _share(room, unit, len(roster) - 1))
            ]
        )
    return _script("scatter", pieces, roster, root, (count,), room, unit)


@lru_cache(maxsize=256)
def alltoall(counts: Sequence[Sequence[int]], roster: Sequence[int], me: int, chunk: int, itemsize: int) -> Schedule:
    """Builds the schedule of an alltoall of `counts[i][j]` elements from rank i to rank j."""
    room, unit = _slot(chunk, itemsize)
    sent = (0, *itertools.accumulate(counts[me]))
    got = (0, *itertools.accumulate(row[me] for row in counts))
    pieces = []
    for i, j in itertools.product(range(len(roster)), repeat=2):
        pieces.append(
            [
                Part(size, roster[i], (roster[j],), sent[j] + at if i == me else -1, got[i] + at if j == me else -1)
                for at, size in _cut(counts[i][j], _share(room, unit, len(roster) - 1))
            ]
        )
    return _script("alltoall", pieces, roster, None, tuple(map(tuple, counts)), room, unit)


@lru_cache(maxsize=1024)
def reduce(count: int, roster: Sequence[int], me: int, root: int, chunk: int, itemsize: int) -> Schedule:
    """Builds the schedule of a reduce, which works in place."""
    room, unit = _slot(chunk, itemsize)
    piece = [Part(size, REDUCE, (roster[root],), at, at if me == root else -1) for at, size in _cut(count, room)]
    return _script("reduce", [piece], roster, root, (count,), room, unit)


@lru_cache(maxsize=1024)
def reduce_scatter(count: int, roster: Sequence[int], me: int, in_place: bool, chunk: int, itemsize: int) -> Schedule:
    """Builds the schedule of a reduce_scatter of `count` elements to each. In place: the result is the own part of the
    input."""
    room, unit = _slot(chunk, itemsize)
    pieces = []
    for rank, member in enumerate(roster):
        begin = rank * count
        taken = begin if in_place else 0
        pieces.append(
            [
                Part(size, REDUCE, (member,), begin + at, taken + at if rank == me else -1)
                for at, size in _cut(count, _share(room, unit, len(roster)))
            ]
        )
    return _script("reduce_scatter", pieces, roster, None, (count,), room, unit)


@lru_cache(maxsize=64)
def barrier(roster: Sequence[int], me: int) -> Schedule:
    return _script("barrier", [], roster, None, (), 1, 1)


def _slot(chunk: int, itemsize: int) -> tuple[int, int]:
    """Returns the elements in a slot and in a cache line."""
    return chunk // itemsize, max(1, _ALIGN // itemsize)


def _share(room: int, unit: int, parts: int) -> int:
    """Returns the elements of a part if a slot has to hold `parts` of them."""
    return max(unit, room // max(1, parts) // unit * unit)


def _cut(count: int, most: int) -> list[tuple[int, int]]:
    """Returns (begin, size) of the parts of a piece."""
    return [(at, min(most, count - at)) for at in range(0, count, most)]


def _script(
    kind: str,
    pieces: Sequence[Sequence[Part]],
    roster: Sequence[int],
    root: int | None,
    sizes: tuple[object, ...],
    room: int,
    unit: int,
) -> Schedule:
    """Orders the first parts of all pieces, then the second ones, and so on: a member that gives or takes a piece has a
    part in each batch."""
    rows = itertools.zip_longest(*pieces)
    parts = tuple(part for row in rows for part in row if part is not None)
    detail = (
        KINDS.index(kind) | (0 if root is None else root + 1) << 8 | zlib.crc32(repr((roster, sizes)).encode()) << 32
    )
    taken = tuple(() if part.dest < 0 else None for part in parts)
    return Schedule(kind, parts, detail, room, unit, taken)


def explained(detail: int) -> tuple[str, str]:
    """Returns the kind of a collective, and what its detail tells of its arguments, in words."""
    code, root, sizes = detail & 0xFF, detail >> 8 & 0xFF_FFFF, detail >> 32
    kind = KINDS[code] if code < len(KINDS) else f"collective {code}"
    said = [f"root={root - 1}"] if root else []
    if kind == "allreduce" and root:
        said = [f"FTCOMM_ALGORITHM={'ring' if detail == AROUND else 'auto'}"]
    return kind, ", ".join([*said, f"members and sizes {sizes:08x}"] if sizes else said)


# -- what is left to do, and in which batches ------------------------------------------------------------------------


def left(
    schedule: Schedule, members: Iterable[int], held: Mapping[int, Mapping[Contributors, int]]
) -> tuple[Task, ...]:
    """Returns the parts that `members` still need. `held`: for each, the bitmaps of the parts that it has FINAL.

    A part is copied from the lowest member that has it FINAL; otherwise it comes from its holder, or is reduced, again.
    """
    everybody = tuple(sorted(members))
    union: dict[int, int] = {member: 0 for member in everybody}
    for member, finals in held.items():
        for bits in finals.values():
            union[member] |= bits
    tasks = []
    for number, part in enumerate(schedule.parts):
        bit = 1 << number
        takers = everybody if part.takers is None else [m for m in everybody if m in part.takers]
        if all(union[member] & bit for member in takers):
            continue
        holder = next((member for member in takers if union[member] & bit), None)
        if holder is None:
            tasks.append(Task(number, part.holder, ()))
        else:
            who = next(who for who, bits in held[holder].items() if bits & bit)
            tasks.append(Task(number, holder, who))
    return tuple(tasks)


@lru_cache(maxsize=4096)
def from_start(schedule: Schedule, members: tuple[int, ...], itemsize: int) -> tuple[Batch, ...] | Lost:
    """Returns the batches of an op of which no member holds anything. At least one: an op without any still compares
    calls."""
    return batches(schedule, left(schedule, members, {}), members, itemsize) or NOTHING


def batches(
    schedule: Schedule, tasks: Sequence[Task], members: tuple[int, ...], itemsize: int
) -> tuple[Batch, ...] | Lost:
    """Packs `tasks` in order into batches, as many in each as the slots have room for; or returns lost givers."""
    lost = {task.holder for task in tasks if task.holder != REDUCE and task.holder not in members}
    if lost:
        return Lost(tuple(sorted(lost)))
    made = []
    moves: list[Move] = []
    filled: dict[int, int] = {}  # elements staged by each member
    by_all = 0  # elements that all have staged
    for number, holder, contributors in tasks:
        part = schedule.parts[number]
        takers = members if part.takers is None else tuple(m for m in members if m in part.takers)
        alone = takers == (holder,)  # it needs no slot
        while True:
            at = max(by_all, *filled.values(), 0) if holder == REDUCE else max(by_all, filled.get(holder, 0))
            if alone or at + part.size <= schedule.room:
                break
            made.append(Batch(tuple(moves), itemsize))
            moves, filled, by_all = [], {}, 0
        moves.append(Move(number, holder, contributors, takers, 0 if alone else at, part.size))
        end = at + -(-part.size // schedule.unit) * schedule.unit
        if holder == REDUCE:
            by_all = end
        elif not alone:
            filled[holder] = end
    if moves:
        made.append(Batch(tuple(moves), itemsize))
    return tuple(made)


NOTHING = (Batch((), 1),)  # a task that moves nothing: calls are compared, and all wait for all
