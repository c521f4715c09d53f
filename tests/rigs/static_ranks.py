"""Ranks of static groups as threads of the test, each with an endpoint of its own; and what any group must do."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcomm.control.sealed import Connection
from ftcomm.groups.calls import Calls
from ftcomm.groups.static_endpoint import Endpoint
from ftcomm.groups.static_group import StaticGroup
from ftcomm.transport.segment import Segment
from ftcomm.transport.tcp import mirror, writer
from tests.rigs.exchange import DEADLINE, Caller


class Ranks:
    """`with Ranks(3) as ranks:` opens the endpoints; at the end all are closed, and the groups that were made."""

    def __init__(self, size: int) -> None:
        self.endpoints = [Endpoint() for _ in range(size)]
        self.handles = [endpoint.handle for endpoint in self.endpoints]
        self.groups: list[StaticGroup] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for group in self.groups:
            group.abort("the test is over")
        for group in self.groups:
            group.close()
        for endpoint in self.endpoints:
            endpoint.close()

    def make(self, name: str, who: list[int] | None = None, **arguments: Any) -> list[StaticGroup]:
        """A group of the ranks `who` (all), in this order."""
        members = list(range(len(self.endpoints))) if who is None else who
        handles = [self.handles[i] for i in members]
        arguments = {"op_timeout": DEADLINE, "timeout": DEADLINE, **arguments}
        made = together(
            lambda i: StaticGroup.from_handles(self.endpoints[members[i]], name, handles, **arguments), len(members)
        )
        self.groups += made
        return made


def together(body: Callable[[int], Any], count: int) -> list[Any]:
    """What `body(i)` returns for each i, each in a thread of its own; raises what the first of them raises."""
    results: dict[int, Any] = {}

    def run(i: int) -> None:
        results[i] = body(i)

    callers = [Caller.start(run, i) for i in range(count)]
    for caller in callers:
        caller.join()
    return [results[i] for i in range(count)]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def mappings_of_segments() -> int:
    """How many this process has, of its own and of others."""
    return sum("memfd:ftcomm" in line for line in Path("/proc/self/maps").read_text().splitlines())


def nothing_left(test: Callable[..., None]) -> Callable[..., None]:
    """For a test that is to leave no thread and no descriptor behind (a mapping holds one as long as it is referred to,
    so the local variables of the test have to be gone)."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        Segment().close()  # opens what a process opens once and keeps
        gc.collect()
        threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        test(*args, **kwargs)
        for thread in set(threading.enumerate()) - threads:
            thread.join(DEADLINE)
        assert set(threading.enumerate()) <= threads
        gc.collect()
        now = len(os.listdir("/proc/self/fd"))
        assert now <= descriptors, f"{now - descriptors} descriptors more than before"

    return run


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections for data have room for a part of a large payload only."""

    def less(sock: Connection) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 16 << 10)

    for module in (mirror, writer):
        monkeypatch.setattr(module, "for_bulk", less)


def returns_before_the_next(ahead: Calls, behind: Calls) -> None:
    """What `behind` has returned returns at `ahead`, too, which has called large ops after it. Meanwhile `behind` has
    no op, and takes in nothing."""
    works = [ahead.allreduce(np.ones(count, np.float32), async_op=True) for count in (10, *[120_000] * 4)]
    Caller.start(behind.allreduce, np.ones(10, np.float32)).join()
    assert (works[0].wait(DEADLINE) == 2).all()
    assert not works[1].done()
    for work in works[1:]:
        Caller.start(behind.allreduce, np.ones(120_000, np.float32)).join()
        assert (work.wait(DEADLINE) == 2).all()
