"""`ftcomm bench recovery`: take a replica out of an all-reduce, again and again, and time what the others do."""

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

from ftcomm.bench.data import PERIOD
from ftcomm.bench.job import Job, Tail
from ftcomm.bench.limits import check_at_least_one, check_memory, check_replicas
from ftcomm.bench.recovery_rank import Op, Task
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, percentile
from ftcomm.bench.victim import stop_inside_op
from ftcomm.chaos.cut import Unplugged
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch import RunOptions
from ftcomm.launch.answers import status
from ftcomm.transport.segment import STAGED

RANK_MEMORY = 400 << 20  # bytes of a rank before any message
PATIENCE = 60.0  # s that a return of the op, or of the replica, may take before the measurement gives up
SETTLED = 3  # ops that every replica has run in the full view before the next fault
FAULTS = ("kill", "stop", "cut")
PEERS = ("gloo", "torchft")


@dataclasses.dataclass(frozen=True)
class Request:
    replicas: int = 4
    size: int = 64 << 20
    kills: int = 20  # of each of `faults`
    transport: str = "auto"
    seed: int = 0
    faults: Sequence[str] = ("kill",)
    compare: Sequence[str] = ()

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_replicas(self.replicas)
        check_at_least_one("--kills", self.kills)
        if self.size < PERIOD * 4:
            raise SettingsError(f"--size {format_size(self.size)}: expected at least {PERIOD * 4} bytes.")
        if "cut" in self.faults and os.geteuid() != 0:
            raise SettingsError("--faults cut needs network namespaces, which only root may make; leave it away.")
        if "cut" in self.faults and self.transport == "shm":
            raise SettingsError("--faults cut: shared memory has no network to cut; leave --transport shm away.")
        need = self.replicas * (RANK_MEMORY + 4 * self.size)
        what = f"{self.replicas} replicas with messages of {format_size(self.size)}"
        check_memory(what, need, "--replicas or --size")


class Event(msgspec.Struct, frozen=True):
    """One fault. Milliseconds since it; None where that did not happen within the patience, or nobody can tell."""

    number: int
    victim: int
    step: int  # of the op that it was hit in
    detect_ms: float | None  # the coordinator, or of a peer the last survivor, has heard of it
    stall_ms: float | None  # the op has returned on the last survivor; of a peer, an op among the survivors
    survivor_ms: dict[int, float]  # replica -> the op has returned there
    usual_ms: float  # median of the ops before, for comparison: what the op would have taken anyway
    completed: bool  # that very op, on all survivors
    equal: bool  # the same bytes on all survivors, of ftcomm
    wrong: int  # elements that are no sum over those contributing before, or after
    rejoin_ms: float | None  # all replicas contribute again
    library: str = "ftcomm"
    fault: str = "kill"
    view_ms: float | None = None  # the coordinator has decided on the view without it
    resume_ms: float | None = None  # the last survivor was in that op again; by its clock, since it heard of the view
    steps_lost: int = 0  # ops of survivors whose work was thrown away
    bytes_resent: int | None = None  # of chunks that survivors had posted, and posted again
    bytes_in_flight: int | None = None  # that could be on the way: what is sent again may not be more
    heartbeat_ms: float | None = None  # silence after which a replica is lost, where nothing else tells of it


class Summary(msgspec.Struct, frozen=True):
    library: str
    fault: str
    kills: int  # events
    completed: int
    equal: int
    wrong: int
    steps_lost: int
    detect_ms: dict[str, float]  # p50, p99, max
    view_ms: dict[str, float]
    resume_ms: dict[str, float]
    stall_ms: dict[str, float]
    usual_ms: dict[str, float]
    rejoin_ms: dict[str, float]
    bytes_resent: dict[str, float]
    over_bound: int = 0  # events in which more was sent again than was in flight
    over_heartbeat_ms: dict[str, float] = {}  # stall without the heartbeat timeout


def summarize(events: Sequence[Event]) -> Summary:
    """Of at least one event, all of one library and one fault."""

    def spread(name: str) -> dict[str, float]:
        return of([value for event in events if (value := getattr(event, name)) is not None])

    def of(values: Sequence[float]) -> dict[str, float]:
        return {"p50": median(values), "p99": percentile(values, 99), "max": max(values)} if values else {}

    return Summary(
        library=events[0].library,
        fault=events[0].fault,
        kills=len(events),
        completed=sum(event.completed for event in events),
        equal=sum(event.equal for event in events),
        wrong=sum(event.wrong for event in events),
        steps_lost=sum(event.steps_lost for event in events),
        detect_ms=spread("detect_ms"),
        view_ms=spread("view_ms"),
        resume_ms=spread("resume_ms"),
        stall_ms=spread("stall_ms"),
        usual_ms=spread("usual_ms"),
        rejoin_ms=spread("rejoin_ms"),
        bytes_resent=spread("bytes_resent"),
        over_bound=sum((e.bytes_resent or 0) > e.bytes_in_flight for e in events if e.bytes_in_flight is not None),
        over_heartbeat_ms=of([e.stall_ms - e.heartbeat_ms for e in events if e.stall_ms and e.heartbeat_ms]),
    )


def summaries(events: Sequence[Event]) -> list[Summary]:
    kinds = dict.fromkeys((event.library, event.fault) for event in events)
    return [summarize([e for e in events if (e.library, e.fault) == kind]) for kind in kinds]


def good(summary: Summary) -> bool:
    """What ftcomm promises; of its peers it is not asked."""
    every = summary.completed == summary.equal == summary.kills
    lost = summary.wrong or summary.steps_lost or summary.over_bound
    return summary.library != "ftcomm" or (every and not lost)


async def measure(request: Request, on_event: Callable[[Event], None], progress: Callable[[str, float], None]) -> None:
    """Run a job, hit its replicas in turn, each when all are back, and hand over what happened after every fault.

    Raises `FtcommError` when the job fails or a replica does not come back; no process is left, however this ends.
    """
    chance = random.Random(request.seed)
    for fault in request.faults:
        with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
            path = Path(folder) / "task.json"
            path.write_bytes(msgspec.json.encode(Task(request.size // 4, folder, apart=fault == "cut")))
            tail = Tail([Path(folder) / f"replica-{replica}.jsonl" for replica in range(request.replicas)], Op)
            log: list[dict[str, Any]] = []
            async with Job(_options(request, fault, str(path)), log.append) as job:
                watch = _Watch(job, tail, log, request.replicas)
                for number in range(request.kills):
                    progress(f"{fault} {number + 1} of {request.kills}", number / request.kills)
                    await watch.settle()
                    on_event(await _hit(watch, job, number, fault, chance, request.replicas))
                progress("draining", 1.0)
                job.launcher.drain()
                await job.finish()


async def _hit(watch: _Watch, job: Job, number: int, fault: str, chance: random.Random, replicas: int) -> Event:
    victim = number % replicas
    usual = median([op.end - op.start for op in watch.ops[-8 * replicas :]])
    pid = job.launcher.pids()[victim, 0]
    mark = len(watch.log)
    hit = await stop_inside_op(pid, usual, chance)
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
        await watch.survive(victim, pid, mark)
    elif fault == "stop":
        await watch.survive(victim, pid, mark)
        os.kill(pid, signal.SIGKILL)  # so that it comes back
    else:
        # In a thread: pyroute2 has an event loop of its own.
        unplugged = await asyncio.to_thread(Unplugged, status(job.launcher), victim)
        try:
            hit = time.monotonic()
            os.kill(pid, signal.SIGCONT)
            await watch.survive(victim, pid, mark)
        finally:
            await asyncio.to_thread(unplugged.close)
    return await watch.after(Hit(number, fault, victim, pid, hit, usual, mark))


class Hit(msgspec.Struct, frozen=True):
    number: int
    fault: str
    victim: int
    pid: int
    at: float
    usual: float  # s of an op
    mark: int  # how long the log was before


class _Watch:
    """What the replicas and the coordinator have said so far."""

    def __init__(self, job: Job, tail: Tail[Op], log: list[dict[str, Any]], replicas: int) -> None:
        self.ops: list[Op] = []
        self.log = log
        self._job, self._tail = job, tail
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

    def _returned(self, victim: int, pid: int) -> dict[int, Op]:
        """The op that the victim was hit in, on each survivor: the one after the last that the victim wrote down."""
        step = max(op.step for op in self.ops if op.pid == pid) + 1
        return {op.replica: op for op in self.ops if op.replica != victim and op.step == step}

    async def survive(self, victim: int, pid: int, mark: int) -> None:
        """Until the op has returned on all others, been hashed there, and all have told of how they resumed it."""
        others = len(self._replicas) - 1

        def told() -> bool:
            return len(self._said("resumed", mark, victim)) >= others

        await self._until(lambda: sum(op.digest != "" for op in self._returned(victim, pid).values()) == others)
        await self._until(told, 5.0)

    async def after(self, hit: Hit) -> Event:
        """Follow a fault, that the others have survived or not, up to the return of the victim."""
        ops = self._returned(hit.victim, hit.pid)
        completed = len(ops) == len(self._replicas) - 1
        stalls = {replica: (op.end - hit.at) * 1e3 for replica, op in sorted(ops.items())}
        digests = {op.digest for op in ops.values()}
        suspects = [one for one in self.log[hit.mark :] if (one["kind"], one.get("replica")) == ("suspect", hit.victim)]
        without = self._view(hit.mark, lambda view: hit.victim not in _members(view))
        resumed = self._said("resumed", hit.mark, hit.victim)
        if without is not None:
            resumed = [event for event in resumed if event["epoch"] == without["epoch"]]
        back = await self._until(lambda: self._full_view(hit.mark) is not None)
        full = self._full_view(hit.mark)

        def since(event: dict[str, Any] | None) -> float | None:
            return None if event is None else (event["mono"] - hit.at) * 1e3

        return Event(
            number=hit.number,
            victim=hit.victim,
            step=max(op.step for op in self.ops if op.pid == hit.pid) + 1,
            detect_ms=since(suspects[0] if suspects else without),
            stall_ms=max(stalls.values()) if completed else None,
            survivor_ms=stalls,
            usual_ms=hit.usual * 1e3,
            completed=completed,
            equal=completed and "" not in digests and len(digests) == 1,
            wrong=sum(op.wrong for op in ops.values()),
            rejoin_ms=since(full) if back else None,
            fault=hit.fault,
            view_ms=since(without),
            resume_ms=max((float(event["resume_ms"]) for event in resumed), default=None),
            steps_lost=0 if completed else 1,
            bytes_resent=sum(int(event["resent"]) for event in resumed) if resumed else None,
            bytes_in_flight=STAGED * len(resumed) if resumed else None,
            heartbeat_ms=None if hit.fault == "kill" else self._job.launcher.options.timeouts.heartbeat * 1e3,
        )

    async def _until(self, true: Callable[[], bool], patience: float = PATIENCE) -> bool:
        deadline = time.monotonic() + patience
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
        views = [event for event in self.log[mark:] if event["kind"] == "view"]
        if views and all(m["contributing"] for m in views[-1]["members"]) and _members(views[-1]) == self._replicas:
            return views[-1]
        return None

    def _view(self, mark: int, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        return next((event for event in self.log[mark:] if event["kind"] == "view" and wanted(event)), None)

    def _said(self, kind: str, mark: int, victim: int) -> list[dict[str, Any]]:
        return [event for event in self.log[mark:] if event["kind"] == kind and event["replica"] != victim]


def _members(view: dict[str, Any]) -> frozenset[int]:
    return frozenset(member["replica"] for member in view["members"])


def _options(request: Request, fault: str, task_file: str) -> RunOptions:
    return RunOptions(
        replicas=request.replicas,
        script="ftcomm.bench.recovery_rank",
        module=True,
        args=(task_file,),
        max_restarts=request.kills,
        backoff=0.05,  # the deaths are ours; waiting would only make the measurement longer
        backoff_limit=0.05,
        transport="tcp" if fault == "cut" else request.transport,
        hosts="netns" if fault == "cut" else "shared",
        env={"OMP_NUM_THREADS": "1"},
    )
