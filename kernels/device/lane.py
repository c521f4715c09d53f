"""The work of a program in one lane of the all-reduce: post, await, verify, take, and see that all are through.

CODED   elements travel as fp8 (`ftcomm.kernels.device.fp8`)

    inputs                encoded into the POSTED staging of each contributor
    what is reduced       decoded, summed and encoded into the REDUCED staging: my slice, or in one-shot all of it
    the result            decoded from there into the array, at all members from the same bytes
    a chunk of a holder   as it is in its array: what was decoded

So nothing but decoded elements comes into the array, also where one alone contributes or is there at all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftcomm.kernels.device.fp8 import ELEMENTS, RECORD, decode_span, encode_span, reduce_records
from ftcomm.kernels.device.offsets import (
    ABORTED,
    AHEAD,
    CALL_OF,
    CONTRIBUTES,
    DIFFERED,
    HOLDER,
    ME,
    MEMBERS,
    MISMATCH,
    MISMATCHED,
    NUMBER_OF,
    OPEN,
    REDUCED,
    RUNNING,
    SEEN,
    SKIP,
    SLOTS,
    SOLE,
    SOURCE_STAGING,
    SOURCES,
    STAGING_OF,
    TAKEN,
    TIMED_OUT,
)
from ftcomm.kernels.device.signal import OFTEN, announce, behind, clock, fence, load, pointer, publish, read, rest
from ftcomm.kernels.device.tile import copy_span, reduce_span

_SLICE = tl.constexpr(64)  # bytes; slices begin on cache lines


@triton.jit
def await_flags(flags, mask, low, high, ctl, state, epoch, number, deadline, status, THREADS: tl.constexpr):
    """Wait until all flags are within low .. high - 1, or the launch is to end; not at all if `status` is not
    RUNNING."""
    polls = 0
    waiting = status == RUNNING
    while waiting:
        if behind(flags, mask, low, high) == 0:
            waiting = False
        else:
            rest(polls)
            polls += 1
            if polls % OFTEN == 0:
                if load(ctl + OPEN, THREADS) != epoch:
                    status = ABORTED
                elif load(state + DIFFERED, THREADS) == number + 1:
                    status = MISMATCH
                elif deadline > 0:
                    if clock(THREADS) > deadline:
                        status = TIMED_OUT
                waiting = status == RUNNING
    fence()
    return status


@triton.jit
def slot_of(lane, index, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Returns where a slot lies in the POSTED staging of a member, in bytes."""
    return (lane * SLOTS + index % SLOTS) * CHUNK


@triton.jit
def _task(tasks, i, view, CODED: tl.constexpr):
    """Task i: (chunk, 1 + index of the holder or 0, whether the op was begun before and it is to be reduced, whether
    this member has it already). Who alone contributes holds all, unless they are to be coded."""
    word = i
    if tasks != 0:
        word = read(tasks + 8 * i)
    holder = (word >> HOLDER) & 0xFF
    again = (tasks != 0) & (holder == 0)
    if not CODED:
        if holder == 0:
            holder = read(view + SOLE) + 1
    return word & 0xFFFFFFFF, holder, again, (word >> SKIP) & 1


@triton.jit
def post(
    tasks, i, lane, index, view, array, kept, count, T, BLOCK: tl.constexpr, COPIED: tl.constexpr, ALIGNED, LANES,
    CHUNK: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """My input of the chunk, or, if I am to hand it on, my FINAL chunk, into my staging. What is reduced again, though
    it may be FINAL here, is first made INPUT, from `kept`."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    me = read(view + ME)
    chunk, holder, again, _ = _task(tasks, i, view, CODED)
    start = chunk * (CHUNK // size)
    n = tl.minimum(count - start, CHUNK // size)
    inputs = array + start * size
    staging = read(view + STAGING_OF + 8 * me) + slot_of(lane, index, LANES, CHUNK)
    mine = (holder == me + 1) | ((holder == 0) & (read(view + CONTRIBUTES) != 0))
    turn = tl.where(again & (kept != 0), 0, 1)
    posts = read(view + MEMBERS) > 1
    if CODED:
        posts = posts | (holder == 0)
    last = tl.where(mine & posts, 1, 0)
    while turn <= last:  # one loop: a second copy in the text takes more registers than sm_80 has
        source = tl.where(turn == 0, kept + start * size, inputs)
        to = tl.where(turn == 0, inputs, staging)
        if CODED:
            if (turn == 0) | (holder > 0):
                copy_span(source, to, n, T, COPIED, ALIGNED)
            else:
                # Not from what was just made INPUT: another thread of this program has stored it.
                source = tl.where(again & (kept != 0), kept + start * size, inputs)
                encode_span(source, staging, n, T, BLOCK, ALIGNED)
        else:
            copy_span(source, to, n, T, COPIED, ALIGNED)
        turn += 1


@triton.jit
def verify(flags, mask, ctl, state, number, call, lane, THREADS: tl.constexpr):
    """Whether all members have made the same call. Lane 0 tells the host what they have called."""
    i = tl.arange(0, THREADS)
    numbers = tl.load(pointer(flags + NUMBER_OF), mask=mask, other=0, volatile=True)
    calls = tl.load(pointer(flags + CALL_OF), mask=mask, other=0, volatile=True)
    same = tl.sum((mask & ((numbers != number) | (calls != call))).to(tl.int32), 0) == 0
    if not same:
        if lane == 0:
            tl.store(pointer(ctl + SEEN + 16 * i), numbers, mask=mask)
            tl.store(pointer(ctl + SEEN + 16 * i + 8), calls, mask=mask)
            publish(ctl + MISMATCHED, number + 1)
            publish(state + DIFFERED, number + 1)
    return same


@triton.jit
def _bound(part, parts, n, UNIT: tl.constexpr):
    """Returns where slice `part` of n elements begins; see ftcomm.collective.plan.slices."""
    units = (n + UNIT - 1) // UNIT
    return tl.minimum(n, units * part // parts * UNIT)


@triton.jit
def _reduce(
    view, lane, index, array, start, n, two_shot, T, OP: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ALIGNED,
    LANES, CHUNK: tl.constexpr,
):  # fmt: skip
    """One-shot: the chunk into the caller's array. Two-shot: my slice of it into my REDUCED staging."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    members = read(view + MEMBERS)
    me = read(view + ME)
    first = tl.zeros((), tl.int64)
    last = n
    out = array + start * size
    posted = slot_of(lane, index, LANES, CHUNK)
    if two_shot:
        first = _bound(me, members, n, _SLICE // size)
        last = _bound(me + 1, members, n, _SLICE // size)
        out = read(view + STAGING_OF + 8 * me) + LANES * SLOTS * CHUNK + posted + first * size
    w = read(view + SOURCES).to(tl.int32)
    at = posted // size + first
    if w == W:
        reduce_span(view, SOURCE_STAGING, w, W, at, out, last - first, w, T, OP, BLOCK, ALIGNED)
    else:
        reduce_span(view, SOURCE_STAGING, w, 0, at, out, last - first, w, T, OP, BLOCK, ALIGNED)


@triton.jit
def _gather(view, lane, index, array, start, n, T, COPIED: tl.constexpr, ALIGNED, LANES, CHUNK: tl.constexpr):
    """Two-shot: the slices of all into the caller's array."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    members = read(view + MEMBERS)
    at = LANES * SLOTS * CHUNK + slot_of(lane, index, LANES, CHUNK)
    member = tl.zeros((), tl.int64)
    while member < members:
        first = _bound(member, members, n, _SLICE // size)
        last = _bound(member + 1, members, n, _SLICE // size)
        source = read(view + STAGING_OF + 8 * member) + at + first * size
        copy_span(source, array + (start + first) * size, last - first, T, COPIED, ALIGNED)
        member += 1


@triton.jit
def _reduce_coded(view, lane, index, n, two_shot, OP: tl.constexpr, BLOCK: tl.constexpr, LANES, CHUNK: tl.constexpr):
    """The records of my slice of the chunk, in one-shot of all of it, into my REDUCED staging."""
    members = read(view + MEMBERS)
    me = read(view + ME)
    blocks = (n + ELEMENTS - 1) // ELEMENTS
    first = tl.where(two_shot, _bound(me, members, blocks, 1), 0)
    last = tl.where(two_shot, _bound(me + 1, members, blocks, 1), blocks)
    posted = slot_of(lane, index, LANES, CHUNK)
    out = read(view + STAGING_OF + 8 * me) + LANES * SLOTS * CHUNK + posted + first * RECORD
    w = read(view + SOURCES).to(tl.int32)
    reduce_records(view, SOURCE_STAGING, w, posted + first * RECORD, out, last - first, OP, BLOCK)


@triton.jit
def _gather_coded(
    view, lane, index, array, start, n, two_shot, T, BLOCK: tl.constexpr, ALIGNED, LANES, CHUNK: tl.constexpr
):  # fmt: skip
    """The records of all slices, in one-shot of mine, which is all, into the caller's array."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    members = tl.where(two_shot, read(view + MEMBERS), 1)
    me = tl.where(two_shot, 0, read(view + ME))
    blocks = (n + ELEMENTS - 1) // ELEMENTS
    at = LANES * SLOTS * CHUNK + slot_of(lane, index, LANES, CHUNK)
    part = tl.zeros((), tl.int64)
    while part < members:
        first = _bound(part, members, blocks, 1)
        last = _bound(part + 1, members, blocks, 1)
        source = read(view + STAGING_OF + 8 * (me + part)) + at + first * RECORD
        elements = tl.minimum(last * ELEMENTS, n) - first * ELEMENTS
        decode_span(source, array + (start + first * ELEMENTS) * size, elements, T, BLOCK, ALIGNED)
        part += 1


@triton.jit
def take(
    own, copy, flags, others, view, tasks, i, lane, index, reached, high, array, count, two_shot, ctl, state, epoch,
    number, deadline, T, OP: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, COPIED: tl.constexpr, ALIGNED, LANES,
    CHUNK: tl.constexpr, THREADS: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """All have posted task i: INPUT becomes FINAL; nothing is awaited between the first byte and the word for it."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    chunk, holder, _, skip = _task(tasks, i, view, CODED)
    start = chunk * (CHUNK // size)
    n = tl.minimum(count - start, CHUNK // size)
    status = RUNNING
    if holder > 0:
        if (holder != read(view + ME) + 1) & (skip == 0):
            source = read(view + STAGING_OF + 8 * (holder - 1)) + slot_of(lane, index, LANES, CHUNK)
            copy_span(source, array + start * size, n, T, COPIED, ALIGNED)
    elif CODED:
        _reduce_coded(view, lane, index, n, two_shot, OP, BLOCK, LANES, CHUNK)
        if two_shot:
            announce(own + REDUCED, copy + REDUCED, reached)
        # In one-shot for nobody: what other threads of this program have written can be read behind it.
        reducing = others & (tl.arange(0, THREADS) < tl.where(two_shot, THREADS, 0))
        status = await_flags(
            flags + REDUCED, reducing, reached, high, ctl, state, epoch, number, deadline, status, THREADS
        )
        if status == RUNNING:
            _gather_coded(view, lane, index, array, start, n, two_shot, T, BLOCK, ALIGNED, LANES, CHUNK)
    else:
        _reduce(view, lane, index, array, start, n, two_shot, T, OP, W, BLOCK, ALIGNED, LANES, CHUNK)
        if two_shot:
            announce(own + REDUCED, copy + REDUCED, reached)
            status = await_flags(
                flags + REDUCED, others, reached, high, ctl, state, epoch, number, deadline, status, THREADS
            )
            if status == RUNNING:
                _gather(view, lane, index, array, start, n, T, COPIED, ALIGNED, LANES, CHUNK)
    if status == RUNNING:
        announce(own + TAKEN, copy + TAKEN, reached)
    return status


@triton.jit
def stable(
    own, copy, flags, others, lane, steps, low, high, ctl, state, epoch, number, deadline, status,
    THREADS: tl.constexpr,
):  # fmt: skip
    """The end of a lane: until all members have taken what I have. (status, 1 if the lane is done)

    After calls that differed nothing was taken. Lane 0 then waits until all know, the others until lane 0 has said so.
    """
    flags += TAKEN
    low += steps
    ended = status
    if status == MISMATCH:
        ended = RUNNING
        if lane == 0:
            low += AHEAD - steps
            announce(own + TAKEN, copy + TAKEN, low)
        else:
            i = tl.arange(0, THREADS)
            flags = tl.zeros((THREADS,), tl.int64) + state + DIFFERED
            others = i == 0
            low = number + 1
            high = number + 2
    ended = await_flags(flags, others, low, high, ctl, state, epoch, -2, deadline, ended, THREADS)
    if (status == RUNNING) | (ended != RUNNING):
        status = ended
    return status, (ended == RUNNING).to(tl.int32)
