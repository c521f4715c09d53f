"""Waits that give up without harm, and signals: what a kernel knows of the others, of the host and of the time.

A flag is a 64-bit word with one writer, `epoch << COUNTER | counter`, which only grows; a wait asks for
`low <= flag < high`. Flags lie in memory of their owner's GPU, where a poll takes a tenth of one over PCIe. Hosts see a
copy in pinned memory, which the owner stores without a wait. Both are only loaded and stored, never changed by an
atomic, which over PCIe is a read and a write.

    signal  all threads' stores, barrier, then one thread: st.release.sys
    wait    ld.volatile (which is ld.relaxed.sys) until the flag is there, then all threads: fence.acq_rel.sys, barrier

What lies behind the barrier sees what lay before the signal. The flags of all members are polled at once, a thread
each. After every `OFTEN` polls a program looks at the words of the host and at the clock, and ends its wait if it is
told to: with a status, never by a trap, so the context lives and the next kernel runs.

All threads of a program have to see one value of a word that changes, or they part ways and meet at no barrier again.
A scalar `tl.load` is done by every thread for itself. So such words are loaded as a vector as wide as the program
(`THREADS`, 32 a warp), of which one thread loads the one element, and summed: the sum goes through shared memory.
"""

from __future__ import annotations

import time
from typing import Any

import triton
import triton.language as tl

from ftcomm.kernels.device import INTERPRETED

OFTEN = tl.constexpr(4 if INTERPRETED else 16)  # polls of the flags for one look around


@triton.jit
def pointer(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def read(address):
    """A word that does not change meanwhile."""
    return tl.load(pointer(address))


@triton.jit
def write(address, value):
    tl.store(pointer(address), tl.cast(value, tl.int64))


@triton.jit
def transfer(source, to, WORDS: tl.constexpr):
    """Copy words, a power of two of them."""
    at = 8 * tl.arange(0, WORDS)
    tl.store(pointer(to + at), tl.load(pointer(source + at), volatile=True))
    tl.debug_barrier()


@triton.jit
def add(address, value):
    """Add to a word of this device, behind all that this program has done; returns what it was before."""
    tl.debug_barrier()
    return tl.atomic_add(pointer(address), tl.cast(value, tl.int64), sem="acq_rel", scope="gpu")


@triton.jit
def exchange(address, value):
    """Set a word of this device, behind all that this program has done."""
    tl.debug_barrier()
    tl.atomic_xchg(pointer(address), tl.cast(value, tl.int64), sem="acq_rel", scope="gpu")


@triton.jit
def load(address, THREADS: tl.constexpr):
    """A word that others may change meanwhile."""
    return tl.sum(tl.load(_first(address, THREADS), mask=tl.arange(0, THREADS) == 0, other=0, volatile=True), 0)


@triton.jit
def _first(address, THREADS: tl.constexpr):
    """A vector of pointers to the same word; not adjacent, so that no thread gets two of them."""
    return pointer(tl.zeros((THREADS,), tl.int64) + address)


@triton.jit
def clock(THREADS: tl.constexpr):
    """Nanoseconds, the same for all threads."""
    return tl.sum(tl.where(tl.arange(0, THREADS) == 0, now(), 0), 0)


if INTERPRETED:

    def now() -> Any:
        """Nanoseconds."""
        return tl.full((), time.monotonic_ns(), tl.int64)

    def rest(polls: Any = 0) -> None:
        """Yield between two polls: the one we wait for may need this core, and its interpreter lock. As long as they
        take, and longer with each, up to 10 ms: who waits for a stall leaves the core to others."""
        time.sleep(min(0.01, 0.001 + 0.0001 * int(polls)))

    @triton.jit
    def fence():
        """Do nothing: x86-64 loads in program order."""

    @triton.jit
    def full_fence():
        """Do nothing: `publish` is an exchange here, which x86-64 orders with the loads behind it."""

    @triton.jit
    def publish(address, value):
        """All that this program has stored can be seen by whoever sees `value`."""
        tl.atomic_xchg(pointer(address), tl.cast(value, tl.int64), sem="release", scope="sys")

    @triton.jit
    def announce(flag, copy, value):
        """`publish` a flag. Its copy can be seen with what is published next."""
        publish(flag, value)
        write(copy, value)

else:

    @triton.jit
    def now():
        """Nanoseconds."""
        return tl.extra.cuda.globaltimer()

    @triton.jit
    def rest(polls=0):
        """A GPU has other warps to run."""

    @triton.jit
    def fence():
        """Loads of all threads that follow are not done before those of the flags."""
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()

    @triton.jit
    def full_fence():
        """A fence: neither loads nor stores that follow are done before stores of this thread that precede."""
        tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()

    @triton.jit
    def publish(address, value):
        """All that this program has stored can be seen by whoever sees `value`."""
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [address, tl.cast(value, tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def announce(flag, copy, value):
        """`publish` a flag. Its copy can be seen with what is published next."""
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.u64 [$1], $3;
            @first st.relaxed.sys.global.u64 [$2], $3;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,l",
            [flag, copy, tl.cast(value, tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def behind(addresses, mask, low, high):
    """Counts the flags, one a thread, that are not within low .. high - 1."""
    flags = tl.load(pointer(addresses), mask=mask, other=0, volatile=True)
    return tl.sum((mask & ((flags < low) | (flags >= high))).to(tl.int32), 0)
