"""`ftcomm bench rejoin`: what the others notice of a replica that comes back, and how fast its state gets there."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.job import Job, Tail
from ftcomm.bench.limits import check_memory, check_replicas
from ftcomm.bench.rejoin_rank import WIDTH, Step, Task, layers_for
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch import RunOptions

PATIENCE = 180.0  # s for a replica to come back and contribute
SETTLED = 8  # steps that all replicas have done together before the next kill
TARGET = 0.1  # of a step: what a rejoin may stall a healthy replica


@dataclasses.dataclass(frozen=True)
class Request:
    replicas: int = 3
    size: int = 400_000_000
    batch: int = 256
    rejoins: int = 3
    mbps: float | None = None  # FTCOMM_CATCHUP_MBPS of the sources

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_replicas(self.replicas)
        if self.rejoins < 1 or self.batch < 1:
            raise SettingsError(f"--rejoins {self.rejoins}, --batch {self.batch}: expected at least 1.")
        if self.size < 12 * WIDTH * WIDTH:
            raise SettingsError(f"--size {format_size(self.size)}: expected at least {12 * WIDTH * WIDTH} bytes.")
        need = self.replicas * (400_000_000 + 3 * self.size)  # state, gradients and buckets, a snapshot or kept ones
        check_memory(f"{self.replicas} replicas with a state of {format_size(self.size)}", need, "--replicas or --size")


class Rejoin(msgspec.Struct, frozen=True):
    """One replica that was killed and came back. Times in seconds."""

    number: int
    replica: int
    nbytes: int  # of the state
    transfer: float  # from the first connection to the last block
    load: float  # into the model and the optimizer, at the joiner
    replayed: int  # steps that the joiner made up for
    stalls: dict[int, float]  # healthy replica -> for how long its loop stood still for the copy
    step: float  # median of the healthy replicas' steps with all there, just before the kill
    step_without: float | None  # while the replica was away
    step_meanwhile: float | None  # while it was catching up; it computes, too
    longest: float | None  # of the healthy replicas' steps from the kill until it contributed
    back: float  # from the kill until then

    @property
    def share(self) -> float:
        """Of one step, that the most stalled healthy replica stood still."""
        return max(self.stalls.values(), default=0.0) / self.step


async def measure(
    request: Request, on_rejoin: Callable[[Rejoin], None], progress: Callable[[str, float], None]
) -> None:
    """Kill replicas in turn, each when all are back, and hand over what its return took.

    Raises `FtcommError` when the job fails or a replica does not come back; no process is left, however this ends.
    """
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(Task(layers_for(request.size), request.batch, folder)))
        tail = Tail([Path(folder) / f"replica-{replica}.jsonl" for replica in range(request.replicas)], Step)
        log: list[dict[str, Any]] = []
        async with Job(_options(request, str(path)), log.append) as job:
            watch = _Watch(job, tail, log, request.replicas)
            for number in range(request.rejoins):
                progress(f"rejoin {number + 1} of {request.rejoins}: all train", number / request.rejoins)
                await watch.settle()
                victim = request.replicas - 1 - number % (request.replicas - 1)
                progress(f"rejoin {number + 1} of {request.rejoins}: replica {victim}", number / request.rejoins)
                on_rejoin(await watch.kill(number, victim))
            progress("draining", 1.0)
            job.launcher.drain()
            await job.finish()


class _Watch:
    """What the replicas and the coordinator have said so far."""

    def __init__(self, job: Job, tail: Tail[Step], log: list[dict[str, Any]], replicas: int) -> None:
        self._job, self._tail, self._log, self._replicas = job, tail, log, replicas
        self._steps: list[Step] = []

    async def settle(self) -> None:
        """Until all have done some steps together."""
        self._steps.clear()

        def together() -> bool:
            full = [step for step in self._steps if step.counted == self._replicas]
            each = [sum(step.replica == replica for step in full) for replica in range(self._replicas)]
            return min(each) >= SETTLED

        await self._until("all replicas train together", together)

    async def kill(self, number: int, victim: int) -> Rejoin:
        before = self._times(lambda step: step.counted == self._replicas)
        self._steps.clear()
        mark = len(self._log)
        killed = time.monotonic()
        os.kill(self._job.launcher.pids()[victim, 0], signal.SIGKILL)
        await self._until(f"replica {victim} contributes again", lambda: self._full(mark) is not None)
        await self._until("its state was told of", lambda: bool(self._said(mark, "state_fetched")))
        full, (fetched, *_) = self._full(mark), self._said(mark, "state_fetched")
        assert full is not None
        after = {replica for replica in range(self._replicas) if replica != victim}
        await self._until(
            "the others have ended the step after that",
            lambda: after <= {step.replica for step in self._steps if step.start > full["mono"]},
        )
        healthy = [step for step in self._steps if step.replica != victim]
        stalls = {event["replica"]: float(event["seconds"]) for event in self._said(mark, "state_snapshot")}
        return Rejoin(
            number=number,
            replica=victim,
            nbytes=fetched["bytes"],
            transfer=fetched["seconds"],
            load=fetched["load_seconds"],
            replayed=fetched["replayed"],
            stalls=stalls,
            step=median(before),
            step_without=_middle(lengths(healthy, lambda step: step.members < self._replicas)),
            step_meanwhile=_middle(lengths(healthy, lambda step: step.counted < self._replicas == step.members)),
            longest=max(lengths(healthy, lambda step: step.end > killed), default=None),
            back=full["mono"] - killed,
        )

    def _times(self, wanted: Callable[[Step], bool]) -> list[float]:
        return lengths(self._steps, wanted)

    async def _until(self, what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if not await self._job.runs(0.1):
                await self._job.finish()
                raise FtcommError("the job ended by itself")
            self._steps += self._tail.read()
            if true():
                return
        raise FtcommError(
            f"it did not come to pass within {PATIENCE:g} s that {what}; the last lines:\n  "
            + "\n  ".join(self._job.lines)
        )

    def _full(self, mark: int) -> dict[str, Any] | None:
        """The last view since `mark`, if all replicas contribute in it."""
        views = self._said(mark, "view")
        members = views[-1]["members"] if views else []
        return views[-1] if len(members) == self._replicas and all(m["contributing"] for m in members) else None

    def _said(self, mark: int, kind: str) -> list[dict[str, Any]]:
        return [event for event in self._log[mark:] if event["kind"] == kind]


def lengths(steps: Sequence[Step], wanted: Callable[[Step], bool]) -> list[float]:
    """From the begin of a step to that of the next, on the same process: what lies between them counts, too."""
    found = []
    last: dict[int, Step] = {}
    for step in steps:
        before = last.get(step.pid)
        if before is not None and before.number == step.number - 1 and wanted(before):
            found.append(step.start - before.start)
        last[step.pid] = step
    return found


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def heading() -> list[str]:
    names = (
        ("rejoin", "replica", "state", "transfer", "rate", "stall"),
        ("stall", "step", "without", "joining", "longest", "back"),
    )
    units = (("", "", "(MB)", "(s)", "(MB/s)", "(ms)"), ("(% step)", "(s)", "(s)", "(s)", "(s)", "(s)"))
    return ["#" + "".join(f"{text:>9}" for part in row for text in part) for row in (names, units)]


def line(rejoin: Rejoin) -> str:
    mb = rejoin.nbytes / 1e6
    stall = 1e3 * max(rejoin.stalls.values(), default=0.0)
    times = "".join(
        f"{'-' if x is None else f'{x:.3f}':>9}" for x in (rejoin.step_without, rejoin.step_meanwhile, rejoin.longest)
    )
    first = f" {rejoin.number + 1:>9}{rejoin.replica:>9}{mb:>9.1f}{rejoin.transfer:>9.2f}{mb / rejoin.transfer:>9.0f}"
    return f"{first}{stall:>9.2f}{100 * rejoin.share:>9.2f}{rejoin.step:>9.3f}{times}{rejoin.back:>9.2f}"


def footer(rejoins: Sequence[Rejoin]) -> str:
    worst = max((rejoin.share for rejoin in rejoins), default=0.0)
    verdict = "OK" if worst <= TARGET else "FAILED"
    return (
        f"# most that a healthy replica was stalled: {100 * worst:.2f}% of a step, allowed {100 * TARGET:g}%: {verdict}"
    )


def _options(request: Request, task_file: str) -> RunOptions:
    env = {"OMP_NUM_THREADS": "1"}
    if request.mbps is not None:
        env["FTCOMM_CATCHUP_MBPS"] = str(request.mbps)
    return RunOptions(
        replicas=request.replicas,
        script="ftcomm.bench.rejoin_rank",
        module=True,
        args=(task_file,),
        max_restarts=request.rejoins,
        backoff=0.05,  # the deaths are ours; waiting would only make the measurement longer
        backoff_limit=0.05,
        env=env,
    )
