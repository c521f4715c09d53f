"""The attempts of a launch: one in each epoch, until the op has returned.

A launch that is broken off by a view change waits in the kernel for the next epoch, reads there what is left of its op,
and goes on; so between a failure and the return of an op the host only writes words. The first program speaks with the
host, opens each attempt to the others and closes it, and stays until the op has returned. A program claims one lane
after the other, so one that has not come yet, or that the GPU has no room for, holds up none.

    first    hold until OPEN is an epoch; BEGUN + 1; is OPEN the same? if not, FINISHED, and hold again
             copy NEWS and raise the flags if the epoch is new; say which op begins; NEXT = DONE = 0; NOW = epoch;
             serve lanes
             none is left: NOW = 0; wait for INSIDE == 0; DONE == lanes: the op has returned. FINISHED
             if it has not, hold again
    others   wait for NOW; INSIDE + 1; is NOW the same? if so, serve lanes and add them to DONE; INSIDE - 1; wait again
    all      at the end LEFT + 1; the last sets LEFT and NOW back, for the next launch

Twice two look at each other: each writes its own word and then reads that of the other, so that one of both sees the
other. The first program and the host do so with BEGUN and OPEN, by a full fence; programs with INSIDE and NOW, which
are only changed and read by atomic operations that acquire and release: of two operations on a word the second sees
what was before the first. So when FINISHED == BEGUN and OPEN is 0 no program is within an attempt, and none reads NEWS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ftcomm.kernels.device.offsets import (
    ABORTED,
    AHEAD,
    ATTEMPTS,
    BASE,
    BASE_OF,
    BEGUN,
    CALLED,
    CAPTURED,
    CLOSED,
    DIFFERED,
    DONE,
    EPOCH,
    FINISHED,
    FLAGS_OF,
    HEARD,
    INSIDE,
    LEFT,
    LINE,
    ME,
    MISMATCH,
    NEWS,
    NEXT,
    NOW,
    NUMBER,
    OK,
    OPEN,
    POSTED,
    REDUCED,
    RESUMED,
    RETURNED,
    RUNNING,
    STARTED,
    STATUS,
    TAKEN,
    TEMPLATE,
    TIMED_OUT,
    VIEW_WORDS,
)
from ftcomm.kernels.device.signal import (
    add,
    clock,
    exchange,
    fence,
    full_fence,
    load,
    pointer,
    publish,
    read,
    rest,
    transfer,
    write,
)
from ftcomm.kernels.epochs import COUNTER

_COUNTER = tl.constexpr(COUNTER)


@triton.jit
def raise_flags(view, epoch, LANES: tl.constexpr):
    """Raise our flags, so that a member which was left behind in another epoch sees that we have left it before it
    sees any byte change: it goes by them until it is told."""
    flags = read(view + FLAGS_OF + 8 * read(view + ME)) + LINE * tl.arange(0, LANES)
    value = tl.zeros((LANES,), tl.int64) + (epoch << _COUNTER)
    tl.store(pointer(flags + POSTED), value)
    tl.store(pointer(flags + REDUCED), value)
    tl.store(pointer(flags + TAKEN), value)
    fence()


@triton.jit
def begin(ctl, state, view, template, number, launches, deadline, LANES: tl.constexpr, THREADS: tl.constexpr):
    """The first program's: (epoch, number of the op, attempts begun ever). The epoch is CLOSED when nothing is left to
    do: at the end of the engine, by the deadline, or as the host has returned the op `number`, which had begun."""
    epoch = load(ctl + OPEN, THREADS)
    ready = epoch == CLOSED
    while not ready:
        if epoch == 0:
            rest()
            if deadline > 0:
                if clock(THREADS) > deadline:
                    epoch = tl.zeros((), tl.int64) + CLOSED
        else:
            fence()
            if (number >= 0) & (load(ctl + RETURNED, THREADS) > number):
                epoch = tl.zeros((), tl.int64) + CLOSED
            else:
                launches += 1
                write(state + ATTEMPTS, launches)
                publish(ctl + BEGUN, launches)
                full_fence()
                ready = load(ctl + OPEN, THREADS) == epoch
                if not ready:
                    publish(ctl + FINISHED, launches)
        ready = ready | (epoch == CLOSED)
        if not ready:
            epoch = load(ctl + OPEN, THREADS)
            ready = epoch == CLOSED
    if epoch != CLOSED:
        if load(view + EPOCH, THREADS) != epoch:
            transfer(ctl + NEWS, view, VIEW_WORDS)
            raise_flags(view, epoch, LANES)
            number = read(view + RESUMED)
            write(state + NUMBER, number)
            write(state + BASE, 0)
        else:
            number = read(state + NUMBER)
        write(ctl + TEMPLATE, template)
        write(ctl + BASE_OF, read(state + BASE))
        write(ctl + STATUS, RUNNING)
        publish(ctl + STARTED, number + 1)
        write(state + NEXT, 0)
        write(state + DONE, 0)
    exchange(state + NOW, epoch)
    return epoch, number, launches


@triton.jit
def join(state, before):
    """The others': the epoch of the attempt that is open, but `before`; CLOSED if none will be."""
    now = add(state + NOW, 0)
    inside = now == CLOSED
    while not inside:
        if (now == 0) | (now == before):
            rest()
            now = add(state + NOW, 0)
        else:
            add(state + INSIDE, 1)
            again = add(state + NOW, 0)
            inside = again == now
            if not inside:
                add(state + INSIDE, 0 - 1)
            now = again
        inside = inside | (now == CLOSED)
    fence()
    return now


@triton.jit
def leave(state, done):
    """The others' end of an attempt, of whose lanes they have brought `done` to their end."""
    add(state + DONE, done)
    add(state + INSIDE, 0 - 1)


@triton.jit
def end(ctl, state, epoch, number, template, lanes, steps, done, status, launches, THREADS: tl.constexpr):
    """The first program's end of an attempt, of whose `lanes` it has brought `done` to their end: whether that is the
    end of the launch. All lanes have been claimed, or it is broken off; so those inside come to their end, too."""
    add(state + DONE, done)
    exchange(state + NOW, 0)
    while add(state + INSIDE, 0) != 0:
        rest()
    returned = add(state + DONE, 0) == lanes
    differ = False
    if returned:
        differ = load(state + DIFFERED, THREADS) == number + 1
        write(state + NUMBER, number + 1)
        write(state + BASE, read(state + BASE) + tl.where(differ, AHEAD, steps))
        write(ctl + STATUS, tl.where(differ, MISMATCH, OK))
        if template < CAPTURED:
            publish(ctl + CALLED, template + 1)
        publish(ctl + RETURNED, number + 1)
    else:
        if (status == RUNNING) | (status == MISMATCH):  # it was another program that gave up
            status = tl.where(load(ctl + OPEN, THREADS) != epoch, ABORTED, TIMED_OUT)
        write(ctl + STATUS, status)
    publish(ctl + FINISHED, launches)
    if differ:
        while load(ctl + HEARD, THREADS) <= number:
            rest()
    over = returned | (status == TIMED_OUT)
    if over:
        exchange(state + NOW, CLOSED)
    return over


@triton.jit
def depart(state, programs):
    """The last to leave sets the words of a launch back."""
    if add(state + LEFT, 1) == programs - 1:
        write(state + LEFT, 0)
        write(state + NOW, 0)
