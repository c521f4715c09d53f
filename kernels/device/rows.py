"""The work of a program in one lane of a collective that is no all-reduce: tasks are rows, which members give and take.

Each rank has a *piece* of the array that all pieces make up, and pieces are cut into parts. A row has one part of each
piece, side by side, as many as a slot has room for:

    3 ranks    piece 0     piece 1     piece 2
    row 0      0.0         1.0         2.0         piece.part: a third of a slot each
    row 1      0.1         1.1         2.1

Part j of a row lies at place j of a slot, whoever gives it. Who gives and who takes what:

    collective       gives into its slot                  takes from the slots
    allgather        its own part                         of each rank that one's part
    gather           its own part                         the root: of each rank that one's part
    broadcast        the root: the only part              of the root
    scatter          the root: the parts for all ranks    of the root the part that is for it
    alltoall         the parts for all ranks              of each rank the part that is for it
    reduce           the only part, if it contributes     the root: of all that contribute, and reduces them
    reduce_scatter   the parts for all ranks, if it       of all that contribute the part that is for it, and reduces
                     contributes                          them
    barrier          nothing                              nothing

Pieces of an alltoall may have unequal lengths. Then rows are as many as the longest has parts, and a table of PIECE
words for each rank j says

    GIVEN, GIVEN + 1    where the piece for rank j begins in what this rank gives, and its elements
    TAKEN, TAKEN + 1    where that of rank j begins in the result, and its elements
    TAKERS              bits of the ranks to which rank j gives anything

What a rank takes of itself it takes from what it gives, if that is only moved. All post a row before any takes it, and
a row is INPUT at a member until that has taken all that it takes of it; so what `ftcomm.kernels.device.allreduce` says
of words, slots and lanes holds here, too. After a loss:

    allgather,       a row that a survivor has is given by that one, as it is in its result; all parts of it
    broadcast
    others           a row that a survivor does not have is given once more by all; who has it takes nothing
    no survivor has  the call fails on all. A task that moves nothing remains, since all have to know that all have
    it, and who      called
    gave is lost
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftcomm.kernels.call_codes import KINDS
from ftcomm.kernels.device import words
from ftcomm.kernels.device.lane import slot_of
from ftcomm.kernels.device.offsets import (
    CALL_OF,
    CONTRIBUTES,
    DIFFERED,
    EMPTY,
    HOLDER,
    KIND,
    ME,
    MEMBERS,
    MISMATCHED,
    NUMBER_OF,
    PRESENT,
    ROOT,
    SEEN,
    SEEN_WHO,
    SKIP,
    SOURCE_STAGING,
    SOURCES,
    STAGING_OF,
    WHO_OF,
)
from ftcomm.kernels.device.signal import pointer, publish, read
from ftcomm.kernels.device.tile import copy_span, reduce_span
from ftcomm.kernels.device.variant import REDUCED


def _mask(*kinds: str) -> tl.constexpr:
    return tl.constexpr(sum(1 << KINDS.index(kind) for kind in kinds))


_ONE_PART = _mask("broadcast", "reduce")
_NO_PART = _mask("barrier")
_BY_ROOT = _mask("broadcast", "scatter")  # that alone gives
_FOR_ROOT = _mask("reduce", "gather")  # that alone takes
_OWN_PART = _mask("allgather", "gather")  # is what a rank gives
_FOR_EACH = _mask("alltoall", "scatter")  # another part is given
_BY_ALL = _mask("allgather", "alltoall", "gather")  # what each of them gives moves
_PIECE, _GIVEN, _TAKEN, _TAKERS = (tl.constexpr(8 * word) for word in (5, 0, 2, 4))  # bytes
_REDUCED = tl.constexpr(REDUCED)
_LINE = tl.constexpr(64)  # bytes; parts begin on cache lines
_REPLICAS = tl.constexpr((1 << words.ROOT) - 1)  # of WHO


@triton.jit
def _is(kind, MASK: tl.constexpr):
    """Whether the kind is one of those. Comparisons with each would become a jump table, which nobody can check."""
    return (((tl.zeros((), tl.int64) + MASK) >> kind) & 1) != 0


@triton.jit
def _ones(x):
    """The bits of x, which is not negative, that are set."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return x & 0x7F


@triton.jit
def _piece(pieces, j, count, SIDE: tl.constexpr):
    """(where piece j begins, its elements)"""
    begin = j * count
    if pieces != 0:
        at = pieces + _PIECE * j + SIDE
        begin = read(at)
        count = read(at + 8)
    return begin, count


@triton.jit
def ranks_of(view, call, who, pieces):
    """(kind, ranks, my rank, rank of the root or -1, for each rank 4 bits that are its index among the members, whether
    somebody is lost without whom a member cannot get all that it takes, if no member has any of it)"""
    kind = call >> KIND
    by_root = _is(kind, _BY_ROOT)
    roster = who & _REPLICAS
    root = (who >> ROOT) - 1
    present = read(view + PRESENT)
    me = read(view + ME)
    ranks = tl.zeros((), tl.int64)
    rank = tl.zeros((), tl.int64)
    indices = tl.zeros((), tl.int64)
    lost = tl.zeros((), tl.int64)
    rooted = tl.zeros((), tl.int64)
    there = tl.zeros((), tl.int64)
    ahead = roster
    while ahead != 0:
        bit = ahead & -ahead
        ahead = ahead ^ bit
        index = _ones(present & (bit - 1))
        here = (present & bit) != 0
        rank = tl.where(here & (index == me), ranks, rank)
        lost += tl.where(here | (by_root & (root != ranks)), 0, 1)
        rooted += tl.where(here & (root == ranks), 1, 0)
        there = there | (tl.where(here, 1, 0) << ranks)
        indices = indices | ((index & 15) << (4 * ranks))
        ranks += 1
    if pieces != 0:
        lost = lost * 0
        j = tl.zeros((), tl.int64)
        while j < ranks:
            takers = read(pieces + _PIECE * j + _TAKERS)
            lost += tl.where((((there >> j) & 1) == 0) & ((takers & there) != 0), 1, 0)
            j += 1
    needed = by_root | (_is(kind, _BY_ALL) & ((rooted > 0) | (root < 0)))
    return kind, ranks, rank, root, indices, (lost > 0) & needed


@triton.jit
def part_of(kind, ranks, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """(parts of a row, elements of a part)"""
    parts = tl.where(_is(kind, _ONE_PART), 1, tl.where(_is(kind, _NO_PART), 0, ranks))
    unit: tl.constexpr = _LINE // SIZE
    return parts, tl.maximum(unit, CHUNK // SIZE // tl.maximum(parts, 1) // unit * unit)


@triton.jit
def _row(tasks, i, lost):
    """Task i: (row, 1 + index of the member that has it and gives it, or 0, whether this member has it already,
    whether nothing is moved)"""
    word = i
    empty = lost
    if tasks != 0:
        word = read(tasks + 8 * i)
        empty = ((word >> EMPTY) & 1) != 0
    return word & 0xFFFFFFFF, (word >> HOLDER) & 0xFF, ((word >> SKIP) & 1) != 0, empty


@triton.jit
def give(
    tasks, i, lane, index, view, array, source, count, pieces, kind, ranks, rank, root, lost, T, COPIED: tl.constexpr,
    ALIGNED, LANES, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """My parts of a row into my staging. `count`: elements of a piece, or of the longest if there are `pieces`."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    row, holder, _, empty = _row(tasks, i, lost)
    parts, part = part_of(kind, ranks, size, CHUNK)
    me = read(view + ME)
    start = row * part
    slot = read(view + STAGING_OF + 8 * me) + slot_of(lane, index, LANES, CHUNK)
    whole = source
    first = tl.zeros((), tl.int64)
    last = parts
    none = empty | ((holder > 0) & (holder != me + 1))
    if ROWS == _REDUCED:
        last = tl.where(read(view + CONTRIBUTES) != 0, parts, 0)
    else:
        none = none | (read(view + MEMBERS) == 1)
        if holder == me + 1:
            whole = array
        elif _is(kind, _OWN_PART):
            whole = source - rank * count * size
            first = rank
            last = tl.where(rank == root, rank, rank + 1)
        elif _is(kind, _BY_ROOT):
            last = tl.where(root == rank, parts, 0)
    if none:
        last = first
    j = first
    while j < last:
        if (j != rank) | (not _is(kind, _FOR_EACH)):
            begin, length = _piece(pieces, j, count, _GIVEN)
            n = tl.maximum(0, tl.minimum(part, length - start))
            copy_span(whole + (begin + start) * size, slot + j * part * size, n, T, COPIED, ALIGNED)
        j += 1


@triton.jit
def verify_rows(flags, mask, ctl, state, number, call, who, lane, THREADS: tl.constexpr):
    """Whether all members have made the same call. Lane 0 tells the host what they have called."""
    i = tl.arange(0, THREADS)
    numbers = tl.load(pointer(flags + NUMBER_OF), mask=mask, other=0, volatile=True)
    calls = tl.load(pointer(flags + CALL_OF), mask=mask, other=0, volatile=True)
    whos = tl.load(pointer(flags + WHO_OF), mask=mask, other=0, volatile=True)
    same = tl.sum((mask & ((numbers != number) | (calls != call) | (whos != who))).to(tl.int32), 0) == 0
    if not same:
        if lane == 0:
            tl.store(pointer(ctl + SEEN + 16 * i), numbers, mask=mask)
            tl.store(pointer(ctl + SEEN + 16 * i + 8), calls, mask=mask)
            tl.store(pointer(ctl + SEEN_WHO + 8 * i), whos, mask=mask)
            publish(ctl + MISMATCHED, number + 1)
            publish(state + DIFFERED, number + 1)
    return same


@triton.jit
def receive(
    tasks, i, lane, index, view, array, source, count, pieces, kind, ranks, rank, root, indices, lost, T,
    OP: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, COPIED: tl.constexpr, ALIGNED, LANES, CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """All have posted row i: what I take of it goes from their slots into `array`. Nothing is awaited here."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    row, holder, skip, empty = _row(tasks, i, lost)
    parts, part = part_of(kind, ranks, size, CHUNK)
    me = read(view + ME)
    start = row * part
    slot = slot_of(lane, index, LANES, CHUNK)
    none = skip | empty | (holder == me + 1) | (_is(kind, _FOR_ROOT) & (rank != root))
    if ROWS == _REDUCED:
        place = tl.where(parts == 1, 0, rank)
        if not none:
            n = tl.maximum(0, tl.minimum(part, count - start))
            w = read(view + SOURCES).to(tl.int32)
            at = slot // size + place * part
            out = array + start * size
            if w == W:
                reduce_span(view, SOURCE_STAGING, w, W, at, out, n, w, T, OP, BLOCK, ALIGNED)
            else:
                reduce_span(view, SOURCE_STAGING, w, 0, at, out, n, w, T, OP, BLOCK, ALIGNED)
    else:
        by_root = _is(kind, _BY_ROOT)
        for_each = _is(kind, _FOR_EACH)
        last = tl.where(none, 0, tl.where(by_root, 1, parts))
        k = tl.zeros((), tl.int64)
        while k < last:
            j = (rank + 1 + k) % parts  # each begins with the next rank, so that not all read from one
            owner = (indices >> (4 * tl.where(by_root, root, j))) & 15
            j = tl.where(by_root, 0, j)
            if holder > 0:
                owner = holder - 1
            there = read(view + STAGING_OF + 8 * owner) + slot + tl.where(for_each, rank, j) * part * size
            if (holder == 0) & (owner == me):
                begin, _ = _piece(pieces, tl.where(for_each, rank, 0), count, _GIVEN)
                there = source + (begin + start) * size
            begin, length = _piece(pieces, j, count, _TAKEN)
            n = tl.maximum(0, tl.minimum(part, length - start))
            to = array + (begin + start) * size
            if there != to:
                copy_span(there, to, n, T, COPIED, ALIGNED)
            k += 1
