"""`ftcomm bench recovery`: kill a replica inside an all-reduce, again and again, and time what the others do."""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.data import PERIOD
from ftcomm.bench.header import available_memory
from ftcomm.bench.job import Job, Tail
from ftcomm.bench.recovery_rank import Op, Task
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, percentile
from ftcomm.bench.victim import kill_inside_op
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch import RunOptions

RANK_MEMORY = 400 << 20  # bytes of a rank before any message
PATIENCE = 60.0  # s that a return of the op, or of the replica, may take before the measurement gives up
SETTLED = 3  # ops that every replica has run in the full view before the next kill


@dataclasses.dataclass(frozen=True)
class Request:
    replicas: int = 4
    size: int = 64 << 20
    kills: int = 20
    transport: str = "auto"
    seed: int = 0

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if not 2 <= self.replicas <= 16:
            raise SettingsError(f"--replicas {self.replicas}: expected 2 to 16.")
        if self.kills < 1:
            raise SettingsError(f"--kills {self.kills}: expected at least 1.")
        if self.size < PERIOD * 4:
            raise SettingsError(f"--size {format_size(self.size)}: expected at least {PERIOD * 4} bytes.")
        need = self.replicas * (RANK_MEMORY + 4 * self.size)
        if need > available_memory():
            raise SettingsError(
                f"{self.replicas} replicas with messages of {format_size(self.size)} need about {need / 1e9:.1f} GB, "
                f"{available_memory() / 1e9:.1f} GB are free; lower --replicas or --size."
            )


class Event(msgspec.Struct, frozen=True):
    """One kill. Milliseconds since the SIGKILL; None where it did not happen within the patience."""

    number: int
    victim: int
    step: int  # of the op that it was killed in
    detect_ms: float | None  # the coordinator has decided on the view without it
    stall_ms: float | None  # the op has returned on the last survivor
    survivor_ms: dict[int, float]  # replica -> the op has returned there
    usual_ms: float  # median of the ops before, for comparison: what the op would have taken anyway
    completed: bool  # on all survivors
    equal: bool  # the same bytes on all survivors
    wrong: int  # elements that are no sum over those contributing before, or after
    rejoin_ms: float | None  # the restarted replica contributes again


class Summary(msgspec.Struct, frozen=True):
    kills: int
    completed: int
    equal: int
    wrong: int
    steps_lost: int
    detect_ms: dict[str, float]  # p50, p99, max
    stall_ms: dict[str, float]
    usual_ms: dict[str, float]
    rejoin_ms: dict[str, float]


def summarize(events: Sequence[Event]) -> Summary:
    def spread(name: str) -> dict[str, float]:
        values = [value for event in events if (value := getattr(event, name)) is not None]
        return {"p50": median(values), "p99": percentile(values, 99), "max": max(values)} if values else {}

    completed = sum(event.completed for event in events)
    return Summary(
        kills=len(events),
        completed=completed,
        equal=sum(event.equal for event in events),
        wrong=sum(event.wrong for event in events),
        steps_lost=len(events) - completed,
        detect_ms=spread("detect_ms"),
        stall_ms=spread("stall_ms"),
        usual_ms=spread("usual_ms"),
        rejoin_ms=spread("rejoin_ms"),
    )


async def measure(request: Request, on_event: Callable[[Event], None], progress: Callable[[str, float], None]) -> None:
    """Run a job, kill its replicas in turn, each when all are back, and hand over what happened after every kill.

    Raises `FtcommError` when the job fails or a replica does not come back; no process is left, however this ends.
    """
    chance = random.Random(request.seed)
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(Task(request.size // 4, folder)))
        tail = Tail([Path(folder) / f"replica-{replica}.jsonl" for replica in range(request.replicas)], Op)
        log: list[dict[str, Any]] = []
        async with Job(_options(request, str(path)), log.append) as job:
            watch = _Watch(job, tail, log, request.replicas)
            for number in range(request.kills):
                victim = number % request.replicas
                progress(f"kill {number + 1} of {request.kills}", number / request.kills)
                await watch.settle()
                before = watch.ops
                usual = median([op.end - op.start for op in before[-8 * request.replicas :]])
                pid = job.launcher.pids()[victim, 0]
                mark = len(log)
                killed = await kill_inside_op(pid, usual, chance)
                on_event(await watch.after(number, victim, pid, killed, usual, mark))
            progress("draining", 1.0)
            job.launcher.drain()
            await job.finish()


class _Watch:
    """What the replicas and the coordinator have said so far."""

    def __init__(self, job: Job, tail: Tail[Op], log: list[dict[str, Any]], replicas: int) -> None:
        self.ops: list[Op] = []
        self._job, self._tail, self._log = job, tail, log
        self._replicas = frozenset(range(replicas))

    async def settle(self) -> None:
        """Until all replicas contribute and have run a few ops in that view."""

        def settled() -> bool:
            view = self._full_view(0)
            return view is not None and all(
                sum(op.replica == replica and op.epoch == view["epoch"] for op in self.ops) >= SETTLED
                for replica in self._replicas
            )

        self.ops.clear()
        if not await self._until(settled):
            seen = ", ".join(f"{op.replica} in step {op.step}" for op in {op.replica: op for op in self.ops}.values())
            raise FtcommError(
                f"the {len(self._replicas)} replicas did not all run together within {PATIENCE:g} s; "
                f"last seen: {seen or 'none'}\n  " + "\n  ".join(self._job.lines)
            )

    async def after(self, number: int, victim: int, pid: int, killed: float, usual: float, mark: int) -> Event:
        """Follow the kill of `victim` up to its return. `mark` is how long the log was before."""
        survivors = self._replicas - {victim}

        def returned() -> dict[int, Op]:
            """The op that the victim died in, on each survivor: the one after the last that the victim wrote down."""
            step = max(op.step for op in self.ops if op.pid == pid) + 1
            return {op.replica: op for op in self.ops if op.replica in survivors and op.step == step}

        await self._until(lambda: sum(op.digest != "" for op in returned().values()) == len(survivors))
        ops = returned()
        completed = len(ops) == len(survivors)
        stalls = {replica: (op.end - killed) * 1e3 for replica, op in sorted(ops.items())}
        digests = {op.digest for op in ops.values()}
        without = self._view(mark, lambda view: victim not in _members(view))
        back = await self._until(lambda: self._full_view(mark) is not None)
        full = self._full_view(mark)
        return Event(
            number=number,
            victim=victim,
            step=max(op.step for op in self.ops if op.pid == pid) + 1,
            detect_ms=None if without is None else (without["mono"] - killed) * 1e3,
            stall_ms=max(stalls.values()) if completed else None,
            survivor_ms=stalls,
            usual_ms=usual * 1e3,
            completed=completed,
            equal=completed and "" not in digests and len(digests) == 1,
            wrong=sum(op.wrong for op in ops.values()),
            rejoin_ms=(full["mono"] - killed) * 1e3 if back and full is not None else None,
        )

    async def _until(self, true: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if not await self._job.runs(0.05):
                await self._job.finish()
                raise FtcommError("the job ended by itself")
            self.ops += self._tail.read()
            if true():
                return True
        return False

    def _full_view(self, mark: int) -> dict[str, Any] | None:
        """The latest view since `mark` of the log, if all replicas contribute in it."""
        views = [event for event in self._log[mark:] if event["kind"] == "view"]
        if views and all(m["contributing"] for m in views[-1]["members"]) and _members(views[-1]) == self._replicas:
            return views[-1]
        return None

    def _view(self, mark: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        return next((event for event in self._log[mark:] if event["kind"] == "view" and wanted(event)), None)


def _members(view: dict[str, Any]) -> frozenset[int]:
    return frozenset(member["replica"] for member in view["members"])


def _options(request: Request, task_file: str) -> RunOptions:
    return RunOptions(
        replicas=request.replicas,
        script="ftcomm.bench.recovery_rank",
        module=True,
        args=(task_file,),
        max_restarts=request.kills,
        backoff=0.05,  # the deaths are ours; waiting would only make the measurement longer
        backoff_limit=0.05,
        transport=request.transport,
        env={"OMP_NUM_THREADS": "1"},
    )
