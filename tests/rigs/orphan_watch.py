"""Ranks that a test has forked end with pytest, however that ends: nobody is left to tell them.

PR_SET_PDEATHSIG would wait for the wrong one: their parent is a fork server, which lives as long as they do. But each
has the reading end of a pipe whose other end is pytest's, and the kernel can answer the end of that with a signal.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal


def end_with_pytest() -> None:
    """First of all in a process of `multiprocessing`. What it forks itself is not bound to it."""
    pytest = multiprocessing.parent_process()
    assert pytest is not None
    pipe = pytest.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not pytest.is_alive():  # it ended before the kernel was asked
        os._exit(1)
