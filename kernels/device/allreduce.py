"""The all-reduce as one kernel: the stream of `ftcomm.collective.stream`, run by the device for one op.

The chunk tasks of an op are dealt to lanes, task i to lane i % lanes. A lane is a stream of its own: it posts, reduces
and takes its tasks in order, with its own words and its own slots of staging, and a program serves one lane after the
other. No lane ever waits for another, so there is no barrier of the grid; members may launch grids of different sizes;
and a program that ends between two steps leaves every chunk INPUT or FINAL, which the words of its lanes tell.

    word      written by      value                   polled by   before
    POSTED    owner's lane    tasks posted            all others  they read its POSTED staging of that lane
    REDUCED   owner's lane    tasks reduced           all others  they read its REDUCED staging (two-shot)
    TAKEN     owner's lane    tasks taken             all others  they call the lane stable
    NUMBER, CALL  the lane    which op, which call    all others, once, behind POSTED

All are `epoch << COUNTER | counter` but the last. In one epoch the counters of all lanes go on from op to op: an op
takes the indices BASE .. BASE + steps - 1 in each lane, and the next op begins where the longest lane ended. Task
`index` has slot `index % SLOTS`: I post task p after I have taken p - AHEAD, so all had posted that, so all had taken
p - 2 * AHEAD, which had the same slot. A lane is stable when all members are seen to have taken all its tasks; the op
returns when all lanes are.

If the calls differ, lane 0 says so to the host (MISMATCHED, SEEN), and the op ends, without a chunk touched, when all
members are seen to know it. Other lanes may have posted AHEAD tasks by then, and so many indices the op takes. A lane
that finds a difference only ends when lane 0 has found it, too.

A launch begins with the first program that enters. While OPEN is 0 it holds there, and the op counts as not called;
then it says that it begins (BEGUN) and looks once more whether OPEN is still the same, as the host looks at BEGUN after
it has written OPEN: one of the two sees the other. If it is, all programs of the launch run in that epoch or not at
all. The last program to leave says how it went (STATUS, RETURNED, FINISHED).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from ftcomm.kernels.device.lane import await_flags, post, read, stable, take, verify, write
from ftcomm.kernels.device.offsets import (
    ABORTED,
    AHEAD,
    BASE,
    BASE_OF,
    BEGUN,
    CALL_OF,
    CALLED,
    CAPTURED,
    CLOSED,
    ENTERED,
    EPOCH_NOW,
    FINISHED,
    HEARD,
    LANES_AT,
    LANES_DONE,
    LEFT,
    LINE,
    ME,
    MEMBERS,
    MISMATCH,
    MISMATCHED,
    NUMBER,
    NUMBER_OF,
    OK,
    ONE_HOST,
    OPEN,
    POSTED,
    RETURNED,
    RUNNING,
    STARTED,
    STATUS,
    TEMPLATE,
    WORDS_OF,
)
from ftcomm.kernels.device.signal import clock, fence, full_fence, load, pointer, publish, rest
from ftcomm.kernels.epochs import COUNTER

_COUNTER = tl.constexpr(COUNTER)

_SCALARS = ("ctl", "state", "view", "array", "tasks", "ntasks", "count", "call", "template", "only", "deadline_ns")


# ---- the launch ---------------------------------------------------------------------------------------------------


@triton.jit
def _add(address, value):
    """Add to a counter of this device; returns what it was before."""
    return tl.atomic_add(pointer(address), tl.cast(value, tl.int64), sem="acq_rel", scope="gpu")


@triton.jit
def _enter(ctl, state, template, only, THREADS: tl.constexpr):
    """The epoch that this launch runs in; CLOSED if in none: at the end of the engine, or if meant for another one."""
    if _add(state + ENTERED, 0 + 1) == 0:
        epoch = load(ctl + OPEN, THREADS)
        begun = False
        while (epoch != CLOSED) & (not begun):
            if epoch == 0:
                rest()
            elif (only == 0) | (epoch == only):
                launches = read(ctl + BEGUN) + 1
                publish(ctl + BEGUN, launches)
                full_fence()
                begun = load(ctl + OPEN, THREADS) == epoch
                if begun:
                    write(ctl + TEMPLATE, template)
                    write(ctl + BASE_OF, read(state + BASE))
                    write(ctl + STATUS, RUNNING)
                    publish(ctl + STARTED, read(state + NUMBER) + 1)
                else:
                    publish(ctl + FINISHED, launches)
            if not begun:
                epoch = load(ctl + OPEN, THREADS)
                if (only != 0) & (epoch != 0) & (epoch != only):
                    epoch = tl.zeros((), tl.int64) + CLOSED
        tl.atomic_xchg(pointer(state + EPOCH_NOW), epoch, sem="release", scope="gpu")
    now = _add(state + EPOCH_NOW, 0)
    while now == 0:
        rest()
        now = _add(state + EPOCH_NOW, 0)
    return now


@triton.jit
def _leave(ctl, state, epoch, number, template, base, lanes, steps, done, status, programs, THREADS: tl.constexpr):
    """The last program to leave says how it went and sets the counters of a launch back."""
    tl.debug_barrier()
    _add(state + LANES_DONE, done)
    if _add(state + LEFT, 0 + 1) == programs - 1:
        stable = _add(state + LANES_DONE, 0) == lanes
        write(state + LANES_DONE, 0)
        write(state + ENTERED, 0)
        write(state + LEFT, 0)
        write(state + EPOCH_NOW, 0)
        if epoch != CLOSED:
            if stable:
                differ = load(ctl + MISMATCHED, THREADS) == number + 1
                write(state + NUMBER, number + 1)
                write(state + BASE, base + tl.where(differ, AHEAD, steps))
                write(ctl + STATUS, tl.where(differ, MISMATCH, OK))
                if template < CAPTURED:
                    publish(ctl + CALLED, template + 1)
                publish(ctl + RETURNED, number + 1)
            else:
                write(ctl + STATUS, status)
            publish(ctl + FINISHED, read(ctl + BEGUN))


# ---- the kernels ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_SCALARS)
def allreduce(
    ctl: tl.int64,  # addresses of the words
    state: tl.int64,
    view: tl.int64,
    array: tl.int64,  # address of the caller's elements
    tasks: tl.int64,  # address of words, see words.py; 0: chunks 0 .. ntasks - 1, all to be reduced
    ntasks: tl.int64,
    count: tl.int64,  # elements
    call: tl.int64,
    template: tl.int64,
    only: tl.int64,  # the one epoch in which it may run; 0: any. The tasks of a repair are of one epoch
    deadline_ns: tl.int64,  # for the whole launch; 0: none
    T: tl.constexpr,  # of the elements
    OP: tl.constexpr,  # index in dtypes.OPS
    W: tl.constexpr,  # sources that the reduction is unrolled for; any other number takes a loop, with the same bits
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,  # array % 16 == 0
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,  # bytes
    ONE_SHOT: tl.constexpr,  # bytes up to which every member reduces all of it by itself
    THREADS: tl.constexpr,  # of a program: 32 a warp
):  # fmt: skip
    """One op in place. A grid of 1 .. LANES programs; one launch at a time. Blocks nobody but its stream."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    ntasks = tl.cast(ntasks, tl.int64)
    count = tl.cast(count, tl.int64)
    array = tl.cast(array, tl.int64)
    tasks = tl.cast(tasks, tl.int64)
    epoch = _enter(ctl, state, template, only, THREADS)
    number = read(state + NUMBER)
    base = read(state + BASE)
    members = read(view + MEMBERS)
    me = read(view + ME)
    deadline = tl.cast(deadline_ns, tl.int64)
    if deadline > 0:
        deadline += clock(THREADS)
    low = (epoch << _COUNTER) + base
    high = (epoch + 1) << _COUNTER
    lanes = tl.maximum(1, tl.minimum(LANES, ntasks))
    two_shot = (read(view + ONE_HOST) == 0) | ((members > 2) & (count * size > ONE_SHOT))
    i = tl.arange(0, THREADS)
    others = (i < members) & (i != me)
    theirs = tl.load(pointer(view + WORDS_OF + 8 * i), mask=i < members, other=0) + LANES_AT
    mine = read(view + WORDS_OF + 8 * me) + LANES_AT

    status = RUNNING
    if (epoch == CLOSED) | (load(ctl + OPEN, THREADS) != epoch):
        status = ABORTED
    done = tl.zeros((), tl.int32)
    lane = tl.zeros((), tl.int64) + tl.program_id(0)
    while (lane < lanes) & ((status == RUNNING) | (status == MISMATCH)):
        own = mine + lane * LINE
        flags = theirs + lane * LINE
        steps = (ntasks - lane + lanes - 1) // lanes
        posted = tl.zeros((), tl.int64)
        taken = tl.zeros((), tl.int64)
        if status == RUNNING:
            write(own + NUMBER_OF, number)
            write(own + CALL_OF, call)
        while (taken < steps) & (status == RUNNING):
            while posted < tl.minimum(steps, taken + AHEAD):
                post(tasks, lane + posted * lanes, lane, base + posted, view, array, count, T, BLOCK, ALIGNED, LANES,
                      CHUNK)  # fmt: skip
                posted += 1
                publish(own + POSTED, low + posted)
            index = base + taken
            status = await_flags(
                flags + POSTED, others, low + taken + 1, high, ctl, epoch, number, deadline, status, THREADS
            )
            if (status == RUNNING) & (taken == 0):
                if not verify(flags, i < members, ctl, number, call, lane, THREADS):
                    status = MISMATCH
            if status == RUNNING:
                status = take(
                    own, flags, others, view, tasks, lane + taken * lanes, lane, index, low + taken + 1, high, array,
                    count, two_shot, ctl, epoch, number, deadline, T, OP, W, BLOCK, ALIGNED, LANES, CHUNK, THREADS,
                )  # fmt: skip
                if status == RUNNING:
                    taken += 1
        status, ended = stable(
            own, flags, others, lane, steps, low, high, ctl, epoch, number, deadline, status, THREADS
        )
        done += ended
        lane += tl.num_programs(0)
    _leave(ctl, state, epoch, number, tl.cast(template, tl.int64), base, lanes, (ntasks + lanes - 1) // lanes, done,
           status, tl.num_programs(0), THREADS)  # fmt: skip


@triton.jit(do_not_specialize=("ctl", "state"))
def gate(ctl: tl.int64, state: tl.int64, THREADS: tl.constexpr):
    """One program behind the all-reduce in its stream: holds what follows until the op has returned. If it was broken
    off it is repaired meanwhile on another stream. An error waits until the host knows it."""
    started = load(ctl + STARTED, THREADS)
    while load(ctl + RETURNED, THREADS) < started:
        rest()
    if load(ctl + MISMATCHED, THREADS) == started:
        while load(ctl + HEARD, THREADS) < started:
            rest()
    fence()


# ---- the launch, seen from the host ----------------------------------------------------------------------------------


_WARPS = 8
_BYTES = 64  # of every source that a thread has in flight, so 16 KB of it in a program
_REGISTERS = 255  # a thread may have; the compiler aims at two programs a multiprocessor else, and spills


def compiled_for(constants: Mapping[str, Any]) -> dict[str, Any]:
    """All that the kernel is compiled for: what the exchange asks for, and the shape of a program on a GPU."""
    return {
        **constants,
        "BLOCK": 32 * _WARPS * _BYTES * 8 // constants["T"].primitive_bitwidth,
        "THREADS": 32 * _WARPS,
        "num_warps": _WARPS,
        "maxnreg": _REGISTERS,
        "enable_fp_fusion": False,
    }
