"""`ftcomm bench detection`: kill one rank after the other, anywhere in its step, and time until that is known."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.detection_rank import WIDTH, Task
from ftcomm.bench.job import Job
from ftcomm.bench.limits import check_at_least_one, check_memory, check_replicas
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, percentile
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch import RunOptions

RANK_MEMORY = 400 << 20  # bytes of a rank before any array
PATIENCE = 60.0  # s that the return of a replica may take before the measurement gives up
RUN_IN = 0.2  # s at least of training with all replicas before the next kill


@dataclasses.dataclass(frozen=True)
class Request:
    replicas: int = 4
    ranks_per_replica: int = 2
    size: int = 4 << 20
    compute_ms: float = 50.0
    memory: int = 256 << 20
    kills: int = 100
    transport: str = "auto"
    seed: int = 0

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_replicas(self.replicas)
        check_at_least_one("--ranks-per-replica", self.ranks_per_replica)
        check_at_least_one("--kills", self.kills)
        if self.compute_ms < 0:
            raise SettingsError(f"--compute {self.compute_ms}: expected 0 (all-reduces back to back) or more.")
        if not 4 * WIDTH * WIDTH <= self.size <= self.memory:
            raise SettingsError(
                f"--size {format_size(self.size)}: expected at least {format_size(4 * WIDTH * WIDTH)}, and no more "
                f"than --memory {format_size(self.memory)}."
            )
        ranks = self.replicas * self.ranks_per_replica
        need = ranks * (RANK_MEMORY + self.memory + self.size)
        check_memory(f"{ranks} ranks of {format_size(self.memory)}", need, "--replicas or --memory")


class Event(msgspec.Struct, frozen=True):
    """One kill. Milliseconds since the SIGKILL was sent; None where that did not happen within the patience."""

    number: int
    replica: int
    rank: int
    detect_ms: float | None  # the coordinator has heard of it
    view_ms: float | None  # the coordinator has decided on the view without it, and that is on the disk
    how: str  # the reason that the coordinator heard first


class Summary(msgspec.Struct, frozen=True):
    kills: int
    detected: int
    detect_ms: dict[str, float]  # p50, p90, p99, max
    view_ms: dict[str, float]


def summarize(events: Sequence[Event]) -> Summary:
    def spread(values: list[float]) -> dict[str, float]:
        if not values:
            return {}
        return {
            "p50": median(values),
            "p90": percentile(values, 90),
            "p99": percentile(values, 99),
            "max": max(values),
        }

    detected = [event.detect_ms for event in events if event.detect_ms is not None]
    views = [event.view_ms for event in events if event.view_ms is not None]
    return Summary(len(events), len(detected), spread(detected), spread(views))


async def measure(request: Request, on_event: Callable[[Event], None], progress: Callable[[str, float], None]) -> None:
    """Run a job, kill a rank, and the next when all are back; hand over what happened after every kill.

    Raises `FtcommError` when the job fails or a replica does not come back; no process is left, however this ends.
    """
    chance = random.Random(request.seed)
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(Task(request.size // 4, request.compute_ms / 1e3, request.memory)))
        log: list[dict[str, Any]] = []
        mark = 0
        async with Job(_options(request, str(path)), log.append) as job:
            for number in range(request.kills):
                progress(f"kill {number + 1} of {request.kills}", number / request.kills)
                await _until(job, lambda mark=mark: _complete(log[mark:], request.replicas))  # type: ignore[misc]
                step = max(RUN_IN, 8 * request.compute_ms / 1e3)
                await asyncio.sleep(RUN_IN + chance.uniform(0, step))
                replica, rank = number % request.replicas, number // request.replicas % request.ranks_per_replica
                mark = len(log)
                killed = time.monotonic()
                os.kill(job.launcher.pids()[replica, rank], signal.SIGKILL)
                await _until(job, lambda mark=mark, replica=replica: _view(log[mark:], replica) is not None)  # type: ignore[misc]
                on_event(_event(number, replica, rank, killed, log[mark:]))
            progress("draining", 1.0)
            await _until(job, lambda: _complete(log[mark:], request.replicas))
            job.launcher.drain()
            await job.finish()


async def _until(job: Job, true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if not await job.runs(0.02):
            await job.finish()
            raise FtcommError("the job ended by itself")
        if time.monotonic() > deadline:
            raise FtcommError(
                f"the replicas did not all run together within {PATIENCE:g} s of a kill; their last lines:\n  "
                + "\n  ".join(job.lines)
            )


def _complete(log: list[dict[str, Any]], replicas: int) -> bool:
    """The newest view has all replicas, contributing."""
    views = [entry for entry in log if entry["kind"] == "view"]
    return bool(views) and [m["contributing"] for m in views[-1]["members"]] == [True] * replicas


def _view(log: list[dict[str, Any]], lost: int) -> dict[str, Any] | None:
    """The first view without `lost`."""
    views = (entry for entry in log if entry["kind"] == "view")
    return next((view for view in views if all(m["replica"] != lost for m in view["members"])), None)


def _event(number: int, replica: int, rank: int, killed: float, log: list[dict[str, Any]]) -> Event:
    view = _view(log, replica)
    suspect = next((entry for entry in log if entry["kind"] == "suspect" and entry["replica"] == replica), view)
    return Event(
        number=number,
        replica=replica,
        rank=rank,
        detect_ms=None if suspect is None else (suspect["mono"] - killed) * 1e3,
        view_ms=None if view is None else (view["mono"] - killed) * 1e3,
        how="" if suspect is None else str(suspect.get("reason", suspect.get("why", ""))),
    )


def _options(request: Request, task_file: str) -> RunOptions:
    return RunOptions(
        replicas=request.replicas,
        ranks_per_replica=request.ranks_per_replica,
        script="ftcomm.bench.detection_rank",
        module=True,
        args=(task_file,),
        max_restarts=request.kills,
        backoff=0.05,  # the deaths are ours; waiting would only make the measurement longer
        backoff_limit=0.05,
        transport=request.transport,
        env={"OMP_NUM_THREADS": "1"},
    )
