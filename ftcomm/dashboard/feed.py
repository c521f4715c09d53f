"""Asks a job for its overview each second while somebody looks, and hands it to all who do, with the
stragglers and the traffic that were found in between."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.dashboard.ranks import NO_RECORDING, RankDetail, RankWaits, with_waits
from ftcomm.dashboard.stragglers import REST, RankComparison, Stragglers
from ftcomm.errors import FtcommError
from ftcomm.launch.admin.client import AdminClient, JobEnded
from ftcomm.monitoring.job import Overview
from ftcomm.recorder.files import FOLDER

EVERY = 1.0  # s between two looks while somebody is there
STACKS = 4  # ranks that are asked for theirs at once
IDLE = 5.0  # s without a viewer, to notice the end of the job


class Feed:
    """The newest overview and stragglers of one job, of a thread each. All methods may be called from any thread."""

    def __init__(self, socket: Path) -> None:
        """Take the first overview. Raises `FtcommError`, `JobEnded`."""
        self._socket = socket
        self._waits = RankWaits(socket)
        self._changed = threading.Condition()
        self._looking = threading.Lock()  # guards _waits; held for milliseconds
        self._asking = threading.Semaphore(STACKS)
        self._wanted = threading.Event()
        self._viewers = 0
        self.ended = threading.Event()
        self._number, self._overview, self._stragglers = 1, self._ask(), Stragglers()
        threading.Thread(target=self._run, name="ftcomm-feed", daemon=True).start()
        threading.Thread(target=self._compare, name="ftcomm-stragglers", daemon=True).start()

    @property
    def overview(self) -> Overview:
        return self._overview

    def now(self) -> Overview:
        """Returns an overview of this moment, or the last one if the job has ended. Blocks for the answer."""
        if not self.ended.is_set():
            self._look()
        return self._overview

    def detail(self, replica: int, shard: int, ranks: int = 1) -> RankDetail:
        """Returns what a rank does, of so many ranks the one that waits longest. Blocks for milliseconds."""
        with self._looking:
            shard = self._waits.longest(replica, shard, ranks)
        lines = self._waits.detail(replica, shard)
        return RankDetail(shard, lines, lines != [NO_RECORDING])

    def stack(self, replica: int, shard: int) -> list[str]:
        """Returns where the threads of a rank stand, in lines. Blocks for seconds if the rank is slow to answer, and
        refuses at once, in a line, if `STACKS` others are being asked."""
        if not self._asking.acquire(blocking=False):
            return [f"{STACKS} ranks are being asked for their stacks already; try again in a moment"]
        try:
            return self._waits.stack(replica, shard)
        finally:
            self._asking.release()

    def watch(self, by: int) -> None:
        """One viewer more (1), or fewer (-1)."""
        with self._changed:
            self._viewers += by
            self._changed.notify_all()
        self._wanted.set()

    def close(self, timeout: float) -> None:
        """Tell all viewers that the job is over, and wait for `timeout` seconds at most until they have gone."""
        self.ended.set()
        self._wanted.set()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._viewers == 0, timeout)

    def newer(self, number: int, timeout: float) -> tuple[int, Overview, Stragglers] | None:
        """Wait for an overview after the one of `number`; None after `timeout` seconds, or at the end of the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number or self.ended.is_set(), timeout)
            return (self._number, self._overview, self._stragglers) if self._number > number else None

    def _run(self) -> None:
        while not self.ended.is_set():
            self._look()
            if self._viewers:
                time.sleep(EVERY)
            else:
                self._wanted.wait(IDLE)
            self._wanted.clear()

    def _compare(self) -> None:
        comparison, rest = RankComparison(self._socket.parent / FOLDER), EVERY
        while not self.ended.wait(rest):
            began = time.thread_time()
            if self._viewers:
                self._stragglers = comparison.go_on(self._overview.now)
            rest = max(EVERY, REST * (time.thread_time() - began))

    def _look(self) -> None:
        try:
            overview = self._ask()
        except JobEnded:
            overview = None
        except FtcommError:  # it is stopped, or busy; ask again
            return
        with self._changed:
            if overview is None:
                self.ended.set()
            else:
                self._number, self._overview = self._number + 1, overview
            self._changed.notify_all()

    def _ask(self) -> Overview:
        with AdminClient(self._socket) as job:
            overview = job.overview()
        with self._looking:
            return with_waits(overview, self._waits.now())


class Changes:
    """Finds what one page has not seen yet: the fields that have changed since it was told."""

    def __init__(self) -> None:
        self._told: dict[str, bytes] = {}
        self._last = float("-inf")  # of the points that were told

    def of(self, *seen: msgspec.Struct) -> bytes:
        """Returns a JSON object of the fields of these structs that are new; of `points` only new ones."""
        fields: dict[str, Any] = {}
        for name, value in ((name, getattr(each, name)) for each in seen for name in each.__struct_fields__):
            if name == "points":
                value = [point for point in value if point.at > self._last]
                if value:
                    self._last = value[-1].at
                    fields[name] = value
                continue
            encoded = msgspec.json.encode(value)
            if self._told.get(name) != encoded:
                self._told[name] = encoded
                fields[name] = msgspec.Raw(encoded)
        return msgspec.json.encode(fields)
