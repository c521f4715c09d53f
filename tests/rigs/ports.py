"""Ports for servers that come back to them.

The kernel gives one that was let go to whoever asks for any; so these are of a range that it gives none of, and each
process has a part of that for itself, whatever else runs tests on this machine.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Iterator

_FIRST, _PARTS, _EACH = 10_000, 64, 350  # Linux gives out the ports from 32,768 on


def _claim() -> tuple[socket.socket, int]:
    """-> (what holds it until this process ends, the first port of a part that nobody else has in this network)."""
    for part in range(_PARTS):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0ports of the tests of ftcomm, part {part}")
        except OSError:
            holder.close()
            continue
        return holder, _FIRST + part * _EACH
    raise AssertionError(f"{_PARTS} processes on this machine run tests of ftcomm")


@functools.cache
def _part(pid: int) -> tuple[socket.socket, int, Iterator[int]]:
    """That of this process: a fork has one of its own."""
    holder, begin = _claim()
    return holder, begin, itertools.cycle(range(begin, begin + _EACH))


def free_port() -> int:
    """On which nobody listens, and which nobody gets who does not ask for this very one."""
    _, begin, ports = _part(os.getpid())
    for port in itertools.islice(ports, _EACH):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"all ports from {begin} to {begin + _EACH - 1} are taken")
