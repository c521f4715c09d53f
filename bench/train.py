"""`ftcomm bench train`: what a step costs with each library, and what kills leave of the pace of a training."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ftcomm.bench.job import Job, Tail
from ftcomm.bench.limits import check_memory, check_replicas
from ftcomm.bench.stats import median, percentile, slowest
from ftcomm.bench.train_rank import Step, Task, Timed
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch import RunOptions

RANK_MEMORY = 500 << 20  # bytes of a rank without its model
COPIES = 7  # of the weights, at most: gradients and buckets of three libraries, the optimizer's, a snapshot
PATIENCE = 120.0  # s without a step that was done, after which the measurement gives up
SETTLED = 3  # steps that all replicas have done together before anything is measured
PEERS = ("gloo", "torchft", "restart")


@dataclasses.dataclass(frozen=True)
class Request:
    width: int = 512  # with 8 layers 25 M parameters
    layers: int = 8
    batch: int = 2
    rounds: int = 5  # 0: do not compare steps
    iterations: int = 4
    replicas: int = 4
    steps: int = 40  # undisturbed, and as many under kills; 0: no kills
    kill_every: int = 10
    compare: Sequence[str] = ("gloo",)
    seed: int = 0

    @property
    def parameters(self) -> int:
        return self.layers * (12 * self.width**2 + 2 * self.width) + self.width * (2 * 256 + 64 + 1)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if self.width % 8 or self.width < 8 or min(self.layers, self.batch, self.iterations, self.kill_every) < 1:
            raise SettingsError("--width has to be a multiple of 8, --layers, --batch, -n and --kill-every at least 1.")
        if min(self.rounds, self.steps) < 0 or self.rounds + self.steps == 0:
            raise SettingsError("--rounds and --steps have to be at least 0, and one of them more.")
        check_replicas(self.replicas)
        if unknown := set(self.compare) - set(PEERS):
            raise SettingsError(f"--compare {', '.join(sorted(unknown))}: expected of {', '.join(PEERS)}.")
        need = self.replicas * (RANK_MEMORY + COPIES * 4 * self.parameters)
        check_memory(
            f"{self.replicas} replicas of {self.parameters / 1e6:.1f} M parameters", need, "--replicas or --width"
        )

    def task(self, folder: str, **other: Any) -> Task:
        return Task(self.width, self.layers, self.batch, folder, **other)


class StepRow(msgspec.Struct, frozen=True):
    """A whole step of DDP on two ranks. Times are of the slower rank of each step."""

    library: str  # "none": nothing is exchanged
    ranks: int
    parameters: int
    rounds: int
    iterations: int
    step_ms_p50: float
    step_ms_p99: float
    round_ms: list[float]  # median of each round
    ratio: float | None  # over ftcomm's, median over rounds; None for ftcomm itself


class KillRow(msgspec.Struct, frozen=True):
    """A training, first undisturbed, then with a SIGKILL every so many steps."""

    library: str
    replicas: int
    parameters: int
    steps: int  # useful ones, in either part
    kills: int
    steps_per_minute: float
    steps_per_minute_killed: float
    share: float  # of the undisturbed rate
    lost: int  # attempts of survivors that did not count
    usual_gap_ms: float  # between two steps that count, undisturbed, median
    longest_gap_ms: float  # after a kill
    equal: bool | None  # the same weights on all in the end; None where the library does not tell


def torchft_missing() -> str | None:
    """Why torchft cannot be measured here, in words; None if it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed (pip install torchft-nightly, which needs torch >= 2.14); left out"
    return None


async def compare_steps(
    request: Request, on_row: Callable[[StepRow], None], progress: Callable[[str, float], None]
) -> None:
    """Raises `FtcommError` when a rank fails; no process is left, however this ends."""
    libraries = ("ftcomm", *(peer for peer in request.compare if peer == "gloo"), "none")
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        task = request.task(folder, libraries=libraries, rounds=request.rounds, iterations=request.iterations)
        tail = Tail([Path(folder) / f"replica-{replica}.jsonl" for replica in range(2)], Timed)
        timed: list[Timed] = []
        async with Job(_options(task, folder, 2)) as job:
            while await job.runs(0.1):
                timed += tail.read()
                share = len(timed) / (2 * len(libraries) * request.rounds)
                progress("steps of 2 ranks, one library after the other", share)
            await job.finish()
        timed += tail.read()
    for row in step_rows(timed, libraries, request):
        on_row(row)


def step_rows(timed: Sequence[Timed], libraries: Sequence[str], request: Request) -> list[StepRow]:
    """Pure."""
    rounds: dict[str, list[list[float]]] = {
        library: [
            slowest([t.times for t in timed if (t.library, t.round) == (library, number)])
            for number in range(request.rounds)
        ]
        for library in libraries
    }
    own = [median(times) for times in rounds["ftcomm"]]
    rows = []
    for library in libraries:
        medians = [median(times) for times in rounds[library]]
        every = [seconds for times in rounds[library] for seconds in times]
        rows.append(
            StepRow(
                library=library,
                ranks=2,
                parameters=request.parameters,
                rounds=request.rounds,
                iterations=len(every),
                step_ms_p50=median(every) * 1e3,
                step_ms_p99=percentile(every, 99) * 1e3,
                round_ms=[seconds * 1e3 for seconds in medians],
                ratio=None if library == "ftcomm" else median([a / b for a, b in zip(medians, own, strict=True)]),
            )
        )
    return rows


class Training(Protocol):
    """A training that is under way, of whichever library."""

    def pids(self) -> Mapping[int, int]:
        """Replica -> pid of those that live."""

    async def runs(self, seconds: float) -> bool:
        """Wait; False if it has ended by itself."""


async def kill_ftcomm(request: Request, progress: Callable[[str, float], None]) -> KillRow:
    """Raises `FtcommError` when the job fails; no process is left, however this ends."""
    log: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        options = _options(request.task(folder), folder, request.replicas)
        async with Job(options, log.append) as job:
            row = await measure_kills("ftcomm", request, _Ours(job), folder, progress)
            job.launcher.drain()
            await job.finish()
    hashes = {event["final_hash"] for event in log if event["kind"] == "report" and event.get("contributes")}
    return msgspec.structs.replace(row, equal=len(hashes) == 1)


class _Ours:
    def __init__(self, job: Job) -> None:
        self._job = job

    def pids(self) -> dict[int, int]:
        return {replica: pid for (replica, _), pid in self._job.launcher.pids().items()}

    async def runs(self, seconds: float) -> bool:
        if await self._job.runs(seconds):
            return True
        await self._job.finish()
        return False


async def measure_kills(
    library: str, request: Request, training: Training, folder: str, progress: Callable[[str, float], None]
) -> KillRow:
    """Follow a training that runs, kill its replicas, and say what became of its pace."""
    chance = random.Random(request.seed)
    tail = Tail([Path(folder) / f"replica-{replica}.jsonl" for replica in range(request.replicas)], Step)
    watch = _Watch(training, tail)
    await watch.until(lambda: watch.together(request.replicas) >= SETTLED, "the replicas did not all train together")
    begin = watch.last
    await watch.until(lambda: watch.last >= begin + request.steps, "no step came to its end")
    usual = median(watch.gaps(begin, watch.last))
    calm = watch.rate(begin, begin + request.steps)
    start, kills, lost = watch.last, 0, watch.lost
    while watch.last < start + request.steps:
        victim = watch.victim(kills)
        await watch.pause(chance.uniform(0, usual))  # anywhere in a step
        os.kill(training.pids()[victim], signal.SIGKILL)
        kills += 1
        progress(f"{library}: kill {kills}", (watch.last - start) / request.steps)
        due = min(start + kills * request.kill_every, start + request.steps)
        await watch.until(lambda due=due: watch.last >= due, "the survivors did not go on")  # type: ignore[misc]
    end = start + request.steps
    disturbed = watch.rate(start, end)
    lost = watch.lost - lost
    await watch.until(lambda: watch.together(request.replicas) >= SETTLED, "the killed replicas did not come back")
    return KillRow(
        library=library,
        replicas=request.replicas,
        parameters=request.parameters,
        steps=request.steps,
        kills=kills,
        steps_per_minute=60 * calm,
        steps_per_minute_killed=60 * disturbed,
        share=disturbed / calm,
        lost=lost,
        usual_gap_ms=usual * 1e3,
        longest_gap_ms=max(watch.gaps(start, end)) * 1e3,
        equal=None,
    )


class _Watch:
    """When each step counted, as the first replica that says so has it."""

    def __init__(self, training: Training, tail: Tail[Step]) -> None:
        self._training, self._tail = training, tail
        self._done: dict[int, float] = {}  # step -> when
        self._latest: dict[int, Step] = {}  # of each replica
        self._who: dict[int, set[int]] = {}  # step -> who contributed
        self._discarded: set[int] = set()

    @property
    def last(self) -> int:
        return max(self._done, default=-1)

    @property
    def lost(self) -> int:
        return len(self._discarded)

    def together(self, replicas: int) -> int:
        """Steps, up to the last but one, that all replicas have done one after the other."""
        count = 0
        while len(self._who.get(self.last - 1 - count, ())) == replicas:
            count += 1
        return count

    def gaps(self, begin: int, end: int) -> list[float]:
        return [self._done[step + 1] - self._done[step] for step in range(begin, end)]

    def rate(self, begin: int, end: int) -> float:
        """Steps a second."""
        return (end - begin) / (self._done[end] - self._done[begin])

    def victim(self, number: int) -> int:
        """One that takes part now, in turn."""
        taking = sorted(self._who[self.last] | self._who.get(self.last - 1, set()))
        alive = [replica for replica in taking if self._training.pids().get(replica) == self._latest[replica].pid]
        if len(alive) < 2:
            raise FtcommError("less than two replicas are there to kill one; raise --kill-every or --replicas")
        return alive[number % len(alive)]

    async def pause(self, seconds: float) -> None:
        await self._training.runs(seconds)

    async def until(self, true: Callable[[], bool], otherwise: str) -> None:
        deadline, last = time.monotonic() + PATIENCE, self.last
        while not true():
            if not await self._training.runs(0.02):
                raise FtcommError("the training ended by itself")
            for step in self._tail.read():
                self._read(step)
            if self.last > last:
                deadline, last = time.monotonic() + PATIENCE, self.last
            if time.monotonic() > deadline:
                raise FtcommError(
                    f"{otherwise} within {PATIENCE:g} s; last seen: {sorted(self._latest.values(), key=repr)}"
                )

    def _read(self, step: Step) -> None:
        self._latest[step.replica] = step
        if not step.contributes:
            return
        if step.committed:
            self._done[step.step] = min(step.end, self._done.get(step.step, step.end))
            self._who.setdefault(step.step, set()).add(step.replica)
        else:
            self._discarded.add(step.step)


async def measure(
    request: Request,
    on_step: Callable[[StepRow], None],
    on_kills: Callable[[KillRow], None],
    progress: Callable[[str, float], None],
) -> None:
    if request.rounds:
        await compare_steps(request, on_step, progress)
    if request.steps:
        runs: list[Callable[[Request, Callable[[str, float], None]], Awaitable[KillRow]]] = [kill_ftcomm]
        if "torchft" in request.compare and torchft_missing() is None:
            from ftcomm.bench.train_torchft import kill_torchft

            runs.append(kill_torchft)
        if "restart" in request.compare:
            from ftcomm.bench.train_restart import kill_restart

            runs.append(kill_restart)
        for run in runs:
            on_kills(await run(request, progress))


def _options(task: Task, folder: str, replicas: int) -> RunOptions:
    path = Path(folder) / "task.json"
    path.write_bytes(msgspec.json.encode(task))
    return RunOptions(
        replicas=replicas,
        script="ftcomm.bench.train_rank",
        module=True,
        args=(str(path),),
        max_restarts=1000,
        backoff=0.05,  # the deaths are ours; waiting would only make the measurement longer
        backoff_limit=0.05,
        env={"OMP_NUM_THREADS": "1"},
    )


# -- for the terminal --------------------------------------------------------------------------------------------------


def step_heading() -> str:
    return f"#{'step of':>9} {'ranks':>6} {'params':>9} {'p50 (ms)':>10} {'p99 (ms)':>10} {'/ ftcomm':>9}"


def step_line(row: StepRow) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    times = f"{row.step_ms_p50:>10.1f} {row.step_ms_p99:>10.1f}"
    return f" {row.library:>9} {row.ranks:>6} {f'{row.parameters / 1e6:.1f} M':>9} {times} {ratio:>9}"


def kill_heading() -> str:
    rates = f"{'steps/min':>10} {'killed':>10} {'share':>7} {'lost':>5} {'gap (ms)':>9} {'longest':>9}"
    return f"#{'':>9} {'kills':>6} {'params':>9} {rates} {'equal':>6}"


def kill_line(row: KillRow) -> str:
    rates = f"{row.steps_per_minute:>10.1f} {row.steps_per_minute_killed:>10.1f} {row.share:>7.1%}"
    rates += f" {row.lost:>5} {row.usual_gap_ms:>9.1f} {row.longest_gap_ms:>9.1f}"
    equal = {None: "-", True: "yes", False: "NO"}[row.equal]
    return f" {row.library:>9} {row.kills:>6} {f'{row.parameters / 1e6:.1f} M':>9} {rates} {equal:>6}"
