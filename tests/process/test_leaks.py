"""A survivor of many losses holds no more than before: descriptors, threads, mappings of peers' memory, memory."""

from __future__ import annotations

import collections
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from .bodies import reduce_forever
from .job import SLOWER, Job
from .test_faults import _members, _until
from .test_kills import ENDLESS, check

pytestmark = pytest.mark.protocol

VICTIM = 2
KILLS = 21 if SLOWER == 1 else 12
WARM = KILLS // 3  # kills after which everything that is made once has been made
ELEMENTS = 300_001  # three chunks: all of the staging is touched
SLACK = 16 << 20  # bytes of memory that an allocator may keep; fourteen leaked segments are 56 MB


class Held(NamedTuple):
    """What a process holds, as the kernel counts it."""

    descriptors: dict[str, int]  # kind -> how many
    threads: dict[str, int]
    segments: int  # mappings of our own and of others
    mappings: int
    resident: int  # bytes

    def beyond(self, before: Held) -> str:
        """What there is more of than `before`; empty if nothing."""
        more = []
        for name in ("descriptors", "threads"):
            now, then = (collections.Counter(getattr(held, name)) for held in (self, before))
            more += [f"{name}: {count} x {kind}" for kind, count in (now - then).items()]
        if self.segments > before.segments:
            more.append(f"segments: {before.segments} -> {self.segments}")
        if self.mappings > before.mappings + 8:  # thread stacks and arenas come and go
            more.append(f"mappings: {before.mappings} -> {self.mappings}")
        if self.resident > before.resident + SLACK:
            more.append(f"resident: {before.resident >> 20} -> {self.resident >> 20} MB")
        return "; ".join(more)


def held(pid: int) -> Held:
    descriptors: collections.Counter[str] = collections.Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            descriptors[os.readlink(entry).partition(":")[0]] += 1  # "socket:[123]", or a path
        except FileNotFoundError:
            continue
    threads: collections.Counter[str] = collections.Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            threads[(task / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    segments = sum("memfd:ftcomm" in line for line in maps)
    return Held(dict(descriptors), dict(threads), segments, len(maps), resident)


@pytest.mark.parametrize(
    ("transport", "verify"), [pytest.param("shm", False, marks=pytest.mark.sweep), ("shm", True), ("tcp", False)]
)
def test_losses_leave_nothing_behind(tmp_path: Path, transport: str, verify: bool) -> None:
    how = {"transport": transport, "verify": verify}
    with Job(tmp_path, replicas=3, body=reduce_forever, elements=ELEMENTS, steps=ENDLESS, pause=0.0, **how) as job:
        job.wait_contributing({0, 1, 2})
        pids = [job.processes[replica, 0].pid for replica in (0, 1)]
        before: list[Held] = []
        for number in range(KILLS):
            if number == WARM:
                before = [held(pid) for pid in pids]
            seen = len(job.events)
            job.kill(VICTIM)
            job.wait_event(
                f"view without {VICTIM}",
                lambda events, seen=seen: any(_members(e) == [0, 1] for e in events[seen:]),  # type: ignore[misc]
            )
            job.processes[VICTIM, 0].join(10)
            job.start(VICTIM)
            job.wait_contributing({0, 1, 2}, since=seen)
        for pid, then in zip(pids, before, strict=True):
            # What serves a change of view (a thread, a connection) may be on its way out.
            for _ in _until(lambda pid=pid, then=then: not held(pid).beyond(then), held(pid).beyond(then), 30.0):  # type: ignore[misc]
                time.sleep(0.1)
        job.drain()
        for replica in (0, 1, 2):
            assert job.join(replica) == [0]
        check(job)
