"""The mark that a dead process leaves before it is gone."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time

import pytest

from ftcomm.kernels.life import died, hold
from ftcomm.transport.segment import LIFE, Segment

HOLDER = """
import ctypes, mmap, sys, time
from ftcomm.kernels.life import hold
memory = mmap.mmap(int(sys.argv[1]), 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print(hold(address), flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_its_mark() -> None:
    fd = os.memfd_create("life")
    os.ftruncate(fd, 4096)
    words = memoryview(mmap.mmap(fd, 4096, prot=mmap.PROT_READ)).cast("Q")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != "True\n":
            pytest.skip("this C library lays out its mutexes in another way")
        assert words[0] != 0
        assert not died(words[0])
        holder.kill()
        end = time.monotonic() + 10
        while not died(words[0]):
            assert time.monotonic() < end, "no mark"
    finally:
        holder.kill()
        holder.wait(10)
        os.close(fd)


def test_the_mark_of_a_thread_that_ends() -> None:
    """Why the control thread holds it, and not whoever calls `init`."""
    segment = Segment()
    thread = threading.Thread(target=hold, args=(segment.address + 8 * LIFE,))
    thread.start()
    thread.join(10)
    end = time.monotonic() + 10
    while not died(segment.words[LIFE]):  # the thread is joined a moment before the kernel is through with it
        assert time.monotonic() < end, "no mark"
    segment.close()
