"""The collectives as one kernel: the stream of `ftcomm.collective.stream`, run by the device for one op.

Here an op is an all-reduce; what the tasks of the other collectives are, `ftcomm.kernels.device.rows` says. All are
served by the same lanes, with the same words, and compiled for what they are.

The chunk tasks of an op are dealt to lanes, task i to lane i % lanes. A lane is a stream of its own: it posts, reduces
and takes its tasks in order, with its own words and its own slots of staging, and a program serves one lane after the
other. No lane ever waits for another, so there is no barrier of the grid; members may launch grids of different sizes;
and a program that ends between two steps leaves every chunk INPUT or FINAL, which the words of its lanes tell.

    flag      written by      value                   polled by   before
    POSTED    owner's lane    tasks posted            all others  they read its POSTED staging of that lane
    REDUCED   owner's lane    tasks reduced           all others  they read its REDUCED staging (two-shot)
    TAKEN     owner's lane    tasks taken             all others  they call the lane stable
    NUMBER, CALL  the lane    which op, which call    all others, once, behind POSTED; and WHO, but in an all-reduce

All are `epoch << COUNTER | counter` but the last. In one epoch the counters of all lanes go on from op to op: an op
takes the indices BASE .. BASE + steps - 1 in each lane, and the next op begins where the longest lane ended. Task
`index` has slot `index % SLOTS`: I post task p after I have taken p - AHEAD, so all had posted that, so all had taken
p - 2 * AHEAD, which had the same slot. A lane is stable when all members are seen to have taken all its tasks; the op
returns when all lanes are.

If the calls differ, lane 0 says so to the host (MISMATCHED, SEEN), and the op ends, without a chunk touched, when all
members are seen to know it. Other lanes may have posted AHEAD tasks by then, and so many indices the op takes. A lane
that finds a difference only ends when lane 0 has found it, too.

A launch that is broken off waits for the next epoch and goes on: `ftcomm.kernels.device.attempts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftcomm.kernels.device.attempts import begin, depart, end, join, leave
from ftcomm.kernels.device.lane import await_flags, post, stable, take, verify
from ftcomm.kernels.device.offsets import (
    ABORTED,
    AHEAD,
    ATTEMPTS,
    BASE,
    CALL_OF,
    CLOSED,
    COPY,
    FLAGS_OF,
    LINE,
    ME,
    MEMBERS,
    MISMATCH,
    NEXT,
    NTODO,
    NUMBER,
    NUMBER_OF,
    ONE_HOST,
    OPEN,
    POSTED,
    RUNNING,
    TAKEN,
    TODO,
    TODO_OF,
    WHO_OF,
)
from ftcomm.kernels.device.rows import give, ranks_of, receive, verify_rows
from ftcomm.kernels.device.signal import add, announce, clock, load, pointer, read, write
from ftcomm.kernels.device.variant import COLLECTIVE_SCALARS, SCALARS
from ftcomm.kernels.epochs import COUNTER

_COUNTER = tl.constexpr(COUNTER)


@triton.jit
def _serve(
    ctl, state, view, array, kept, chunks, count, call, epoch, deadline, T: tl.constexpr, OP: tl.constexpr,
    W: tl.constexpr, BLOCK: tl.constexpr, COPIED: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, ONE_SHOT: tl.constexpr, THREADS: tl.constexpr, who, pieces, ROWS: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """Serve one lane after the other, until none is left or the attempt is broken off: (its lanes, the steps of the
    longest, how many this program has brought to their end, how it went)."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    number = read(state + NUMBER)
    base = read(state + BASE)
    tasks = tl.zeros((), tl.int64)
    ntasks = chunks
    if read(view + TODO_OF) == number + 1:
        tasks = read(view + TODO)
        ntasks = read(view + NTODO)
    if ROWS > 0:
        kind, ranks, rank, root, indices, lost = ranks_of(view, call, who, pieces)
        if (tasks == 0) & lost & (count > 0):
            ntasks = ntasks * 0 + 1
    members = read(view + MEMBERS)
    me = read(view + ME)
    low = (epoch << _COUNTER) + base
    high = (epoch + 1) << _COUNTER
    lanes = tl.maximum(1, tl.minimum(LANES, ntasks))
    two_shot = (read(view + ONE_HOST) == 0) | ((members > 2) & (count * size > ONE_SHOT))
    i = tl.arange(0, THREADS)
    others = (i < members) & (i != me)
    theirs = tl.load(pointer(view + FLAGS_OF + 8 * i), mask=i < members, other=0)
    mine = read(view + FLAGS_OF + 8 * me)
    copies = read(view + COPY)

    status = RUNNING
    if load(ctl + OPEN, THREADS) != epoch:
        status = ABORTED
    done = tl.zeros((), tl.int64)
    lane = add(state + NEXT, 0 + 1)
    while (lane < lanes) & ((status == RUNNING) | (status == MISMATCH)):
        own = mine + lane * LINE
        copy = copies + lane * LINE
        flags = theirs + lane * LINE
        steps = (ntasks - lane + lanes - 1) // lanes
        posted = tl.zeros((), tl.int64)
        taken = tl.zeros((), tl.int64)
        if status == RUNNING:
            write(own + NUMBER_OF, number)
            write(own + CALL_OF, call)
            if ROWS > 0:
                write(own + WHO_OF, who)
        while (taken < steps) & (status == RUNNING):
            while posted < tl.minimum(steps, taken + AHEAD):
                if ROWS > 0:
                    give(tasks, lane + posted * lanes, lane, base + posted, view, array, kept, count, pieces, kind,
                         ranks, rank, root, lost, T, COPIED, ALIGNED, LANES, CHUNK, ROWS)  # fmt: skip
                else:
                    post(tasks, lane + posted * lanes, lane, base + posted, view, array, kept, count, T, BLOCK, COPIED,
                         ALIGNED, LANES, CHUNK, CODED)  # fmt: skip
                posted += 1
                announce(own + POSTED, copy + POSTED, low + posted)
            index = base + taken
            status = await_flags(
                flags + POSTED, others, low + taken + 1, high, ctl, state, epoch, number, deadline, status, THREADS
            )
            if (status == RUNNING) & (taken == 0):
                if ROWS > 0:
                    if not verify_rows(flags, i < members, ctl, state, number, call, who, lane, THREADS):
                        status = MISMATCH
                else:
                    if not verify(flags, i < members, ctl, state, number, call, lane, THREADS):
                        status = MISMATCH
            if ROWS > 0:
                if status == RUNNING:
                    receive(
                        tasks, lane + taken * lanes, lane, index, view, array, kept, count, pieces, kind, ranks, rank,
                        root, indices, lost, T, OP, W, BLOCK, COPIED, ALIGNED, LANES, CHUNK, ROWS,
                    )  # fmt: skip
                    taken += 1
                    announce(own + TAKEN, copy + TAKEN, low + taken)
            else:
                if status == RUNNING:
                    status = take(
                        own, copy, flags, others, view, tasks, lane + taken * lanes, lane, index, low + taken + 1, high,
                        array, count, two_shot, ctl, state, epoch, number, deadline, T, OP, W, BLOCK, COPIED, ALIGNED,
                        LANES, CHUNK, THREADS, CODED,
                    )  # fmt: skip
                    if status == RUNNING:
                        taken += 1
        status, ended = stable(
            own, copy, flags, others, lane, steps, low, high, ctl, state, epoch, number, deadline, status, THREADS
        )
        done += ended
        if (status == RUNNING) | (status == MISMATCH):
            lane = add(state + NEXT, 0 + 1)
    return lanes, (ntasks + lanes - 1) // lanes, done, status


@triton.jit
def _launch(
    ctl, state, view, array, kept, chunks, count, call, template, deadline_ns, T: tl.constexpr, OP: tl.constexpr,
    W: tl.constexpr, BLOCK: tl.constexpr, COPIED: tl.constexpr, ALIGNED: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, ONE_SHOT: tl.constexpr, THREADS: tl.constexpr, who, pieces, ROWS: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """One launch, of one op: its attempts, until the op has returned."""
    array = tl.cast(array, tl.int64)
    kept = tl.cast(kept, tl.int64)
    chunks = tl.cast(chunks, tl.int64)
    count = tl.cast(count, tl.int64)
    template = tl.cast(template, tl.int64)
    deadline = tl.cast(deadline_ns, tl.int64)
    if ROWS > 0:
        call = tl.cast(call, tl.int64)
        who = tl.cast(who, tl.int64)
        pieces = tl.cast(pieces, tl.int64)
    if deadline > 0:
        deadline += clock(THREADS)
    first = tl.program_id(0) == 0
    epoch = tl.zeros((), tl.int64)
    number = tl.zeros((), tl.int64) - 1
    launches = tl.zeros((), tl.int64)
    if first:
        launches = read(state + ATTEMPTS)
    over = False
    while not over:
        if first:
            epoch, number, launches = begin(ctl, state, view, template, number, launches, deadline, LANES, THREADS)
        else:
            epoch = join(state, epoch)
        over = epoch == CLOSED
        if not over:
            lanes, steps, done, status = _serve(
                ctl, state, view, array, kept, chunks, count, call, epoch, deadline, T, OP, W, BLOCK, COPIED, ALIGNED,
                LANES, CHUNK, ONE_SHOT, THREADS, who, pieces, ROWS, CODED,
            )  # fmt: skip
            if first:
                over = end(ctl, state, epoch, number, template, lanes, steps, done, status, launches, THREADS)
            else:
                leave(state, done)
    depart(state, tl.num_programs(0))


@triton.jit(do_not_specialize=SCALARS)
def allreduce(
    ctl: tl.int64,  # addresses of the words
    state: tl.int64,
    view: tl.int64,
    array: tl.int64,  # address of the caller's elements
    kept: tl.int64,  # address of a copy of them, aligned as they are, of an op that is reduced again as a whole; or 0
    chunks: tl.int64,  # tasks of the op, all to be reduced, if it is not one that was begun before; see words.py
    count: tl.int64,  # elements
    call: tl.int64,
    template: tl.int64,
    deadline_ns: tl.int64,  # for the whole launch; 0: none
    T: tl.constexpr,  # of the elements
    OP: tl.constexpr,  # index in dtypes.OPS
    W: tl.constexpr,  # sources that the reduction is unrolled for; any other number takes a loop, with the same bits
    BLOCK: tl.constexpr,  # elements of a tile that is reduced
    COPIED: tl.constexpr,  # of one that is copied
    ALIGNED: tl.constexpr,  # array % 16 == 0
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,  # bytes
    ONE_SHOT: tl.constexpr,  # bytes up to which every member reduces all of it by itself
    THREADS: tl.constexpr,  # of a program: 32 a warp
    CODED: tl.constexpr,  # elements travel as fp8; OP is a sum or an average, W is of no matter
):  # fmt: skip
    """One op in place. A grid of 1 .. LANES programs; one launch at a time. Blocks only its stream, and that
    until the op has returned; if members have made different calls, until the host has heard."""
    _launch(ctl, state, view, array, kept, chunks, count, call, template, deadline_ns, T, OP, W, BLOCK, COPIED, ALIGNED,
            LANES, CHUNK, ONE_SHOT, THREADS, 0, 0, 0, CODED)  # fmt: skip


@triton.jit(do_not_specialize=COLLECTIVE_SCALARS)
def collective(
    ctl: tl.int64,  # as in `allreduce`, if nothing else is said
    state: tl.int64,
    view: tl.int64,
    array: tl.int64,  # address of the result
    source: tl.int64,  # address of what this rank gives, which may be its place in the result
    chunks: tl.int64,  # rows
    count: tl.int64,  # elements of a piece, of the longest
    call: tl.int64,  # with the kind of the collective
    template: tl.int64,
    deadline_ns: tl.int64,
    who: tl.int64,  # the ranks, and the root
    pieces: tl.int64,  # address of the table of pieces that have unequal lengths, see ftcomm.kernels.device.rows; or 0
    T: tl.constexpr,  # of what is only moved, any that is as wide as the alignment of all addresses and pieces allows
    OP: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
    ALIGNED: tl.constexpr,  # array, source and the bytes of a piece are multiples of 16
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    THREADS: tl.constexpr,
    ROWS: tl.constexpr,  # MOVED or REDUCED, of ftcomm.kernels.device.variant
):  # fmt: skip
    """One op that is no all-reduce; launched like one, in one order with those."""
    _launch(ctl, state, view, array, source, chunks, count, call, template, deadline_ns, T, OP, W, BLOCK, COPIED,
            ALIGNED, LANES, CHUNK, 0, THREADS, who, pieces, ROWS, False)  # fmt: skip
