"""`ftcomm bench train`: what a step costs with each library, and what kills leave of the pace of a training.

In a rank with rounds, DDP over each library in turn, A B A B, in the same process on the same weights: the time of
whole steps, forward to update. "none" is DDP that exchanges nothing (`no_sync`), the least that a step can take.
Without, one training under the step loop, which goes on until the job is drained, for the command to kill replicas of.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftcomm
from ftcomm.bench.checks import check_memory, check_replicas
from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import FOREVER, Observer, OnProgress, Records, observed, records_path, run_ranks
from ftcomm.bench.peers import missing, observed_peer
from ftcomm.bench.stats import median, percentile, slowest
from ftcomm.bench.torchft import TIMEOUT, manager
from ftcomm.demo.model import Transformer
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch.commands.option_types import Several
from ftcomm.training import StepLoop
from ftcomm.training.state import digest

COPIES = 7  # of the weights, at most: gradients and buckets of three libraries, the optimizer's, a snapshot
STEP_TIMEOUT = 120.0  # s without a step that was done, after which the measurement gives up
SETTLED = 3  # steps that all replicas have done together before anything is measured
EVERY = 5  # steps between checkpoints
PEERS = ("gloo", "torchft", "restart")
CONTEXT = 64  # bytes of a sequence


@dataclasses.dataclass(frozen=True)
class TrainRequest:
    """Time steps of DDP beside gloo, then kill replicas of a training and see what is left of its pace.

    First two ranks: whole steps, forward to update, of one model, each library in turn. "none" exchanges nothing. Then
    replicas under the step loop: so many steps undisturbed, and as many in which one of them gets SIGKILL every few
    steps, anywhere in a step, and is started again. With --compare torchft its lighthouse and gloo do the same; with
    restart plain gloo does, where one that dies ends all, and all begin again with the last of their checkpoints. Exits
    with 1 if the weights were not equal on all in the end.
    """

    width: int = option(512, help="Of the transformer; with 8 layers 25 M parameters.")
    layers: int = option(8)
    batch: int = option(2, help="Sequences of 64 bytes of a replica in a step.")
    rounds: int = option(5, help="Libraries take turns; 0: compare no steps.")
    iterations: int = option(4, "-n", "--iters", help="Timed steps of a library in a round.")
    replicas: int = option(4, help="Of the training that is disturbed.")
    steps: int = option(40, help="Undisturbed, then killed; 0: no kills.")
    kill_every: int = option(10, help="Steps between two SIGKILLs.")
    compare: Sequence[str] = option(
        ("gloo",), kind=Several(click.STRING, "LIBRARY,..."), help="gloo, torchft, restart."
    )
    seed: int = option(0, help="Of the points in a step at which kills come.")

    def smoke(self) -> TrainRequest:
        """A tiny model and one kill, to see that it runs."""
        return TrainRequest(16, 1, 1, 1, 2, 2, 20, 20, self.compare, self.seed)

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
        what = f"{self.replicas} replicas of {self.parameters / 1e6:.1f} M parameters"
        check_memory(what, self.replicas, COPIES * 4 * self.parameters, "--replicas or --width")

    def task(self, **other: Any) -> TrainTask:
        return TrainTask(self.width, self.layers, self.batch, replicas=self.replicas, **other)


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


async def compare_steps(request: TrainRequest, report: BenchReport) -> None:
    """Raises `FtcommError` when a rank fails; no process is left, however this ends."""
    libraries = ("ftcomm", *(peer for peer in request.compare if peer == "gloo"), "none")
    task = request.task(libraries=libraries, rounds=request.rounds, iterations=request.iterations)
    total = 2 * len(libraries) * request.rounds
    for row in step_rows(await run_ranks(rank, task, 2, Timed, total, report.progress), libraries, request):
        report.add(row)


def step_rows(timed: Sequence[Timed], libraries: Sequence[str], request: TrainRequest) -> list[StepRow]:
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


async def kill_ftcomm(request: TrainRequest, progress: OnProgress) -> KillRow:
    """Raises `FtcommError` when the job fails; no process is left, however this ends."""
    async with observed(rank, request.task(), StepAttempt, request.replicas) as job:
        row = await measure_kills("ftcomm", request, job, progress)
    hashes = {event["final_hash"] for event in job.said("report") if event.get("contributes")}
    return msgspec.structs.replace(row, equal=len(hashes) == 1)


async def kill_peer(library: str, request: TrainRequest, progress: OnProgress) -> KillRow:
    """Raises `FtcommError` when a rank ends of itself; no process is left, however this ends."""
    function = {"torchft": torchft_rank, "restart": restarted_rank}[library]
    with observed_peer(library, function, request.task(), StepAttempt, request.replicas, restarts=True) as job:
        return await measure_kills(library, request, job, progress)


async def measure_kills(
    library: str, request: TrainRequest, job: Observer[StepAttempt], progress: OnProgress
) -> KillRow:
    """Follow a training that runs, kill its replicas, and say what became of its pace."""
    chance = random.Random(request.seed)
    pace = _Pace(job)
    await pace.until("all train together", lambda: pace.together(request.replicas) >= SETTLED)
    begin = pace.last
    await pace.until("steps are done", lambda: pace.last >= begin + request.steps)
    usual = median(pace.gaps(begin, pace.last))
    calm = pace.rate(begin, begin + request.steps)
    start, kills, lost = pace.last, 0, pace.lost
    while pace.last < start + request.steps:
        victim = pace.victim(kills)
        await job.job.runs(chance.uniform(0, usual))  # anywhere in a step
        job.kill(victim)
        kills += 1
        progress(f"{library}: kill {kills}", (pace.last - start) / request.steps)
        due = min(start + kills * request.kill_every, start + request.steps)
        await pace.until("the survivors go on", lambda due=due: pace.last >= due)  # type: ignore[misc]
    end = start + request.steps
    disturbed = pace.rate(start, end)
    lost = pace.lost - lost
    await pace.until("the killed replicas are back", lambda: pace.together(request.replicas) >= SETTLED)
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
        longest_gap_ms=max(pace.gaps(start, end)) * 1e3,
        equal=None,
    )


class _Pace:
    """The time at which each step counted, by the first replica that says so."""

    def __init__(self, job: Observer[StepAttempt]) -> None:
        self._job = job
        self._done: dict[int, float] = {}  # step -> when
        self._latest: dict[int, StepAttempt] = {}  # of each replica
        self._who: dict[int, set[int]] = {}  # step -> who contributed
        self._discarded: set[int] = set()
        job.saw = self._saw

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
        pids = self._job.job.pids()
        alive = [replica for replica in taking if pids.get((replica, 0)) == self._latest[replica].pid]
        if len(alive) < 2:
            raise FtcommError("less than two replicas are there to kill one; raise --kill-every or --replicas")
        return alive[number % len(alive)]

    async def until(self, what: str, true: Callable[[], bool]) -> None:
        """Wait for `true`. The timeout is for one step."""
        await self._job.until(what, true, STEP_TIMEOUT, moved=lambda: self.last)

    def _saw(self, step: StepAttempt) -> None:
        self._latest[step.replica] = step
        if not step.contributes:
            return
        if step.committed:
            self._done[step.step] = min(step.end, self._done.get(step.step, step.end))
            self._who.setdefault(step.step, set()).add(step.replica)
        else:
            self._discarded.add(step.step)


async def measure(request: TrainRequest, report: BenchReport) -> None:
    left_out = missing("torchft", "cpu", request.replicas) if "torchft" in request.compare else None
    if left_out is not None:
        report.line(f"# {left_out}")
    if request.rounds:
        await compare_steps(request, report)
    if request.steps:
        report.add(await kill_ftcomm(request, report.progress))
        for peer in ("torchft", "restart"):
            if peer in request.compare and not (peer == "torchft" and left_out):
                report.add(await kill_peer(peer, request, report.progress))


def _millions(row: StepRow | KillRow) -> str:
    return f"{row.parameters / 1e6:.1f} M"


STEPS = (
    Column("step of", "", 8, lambda row: row.library),
    Column("ranks", "", 6, lambda row: str(row.ranks)),
    Column("params", "", 9, _millions),
    Column("p50 (ms)", "", 10, lambda row: f"{row.step_ms_p50:.1f}"),
    Column("p99 (ms)", "", 10, lambda row: f"{row.step_ms_p99:.1f}"),
    Column("/ ftcomm", "", 9, lambda row: "" if row.ratio is None else f"{row.ratio:.3f}"),
)
KILLS = (
    Column("", "", 8, lambda row: row.library),
    Column("kills", "", 6, lambda row: str(row.kills)),
    Column("params", "", 9, _millions),
    Column("steps/min", "", 10, lambda row: f"{row.steps_per_minute:.1f}"),
    Column("killed", "", 10, lambda row: f"{row.steps_per_minute_killed:.1f}"),
    Column("share", "", 7, lambda row: f"{row.share:.1%}"),
    Column("lost", "", 5, lambda row: str(row.lost)),
    Column("gap (ms)", "", 9, lambda row: f"{row.usual_gap_ms:.1f}"),
    Column("longest", "", 9, lambda row: f"{row.longest_gap_ms:.1f}"),
    Column("equal", "", 6, lambda row: {None: "-", True: "yes", False: "NO"}[row.equal]),
)
EXPERIMENT = Experiment(
    "train",
    TrainRequest,
    measure,
    [Table("steps", StepRow, STEPS, late=True), Table("kills", KillRow, KILLS, late=True)],
    good=lambda report: all(row.equal is not False for row in report["kills"]),
)


# -- in a rank ---------------------------------------------------------------------------------------------------------


class TrainTask(msgspec.Struct, frozen=True):
    width: int  # of the model
    layers: int
    batch: int  # sequences of a replica
    replicas: int = 0  # of the training that is disturbed
    folder: str = ""
    libraries: tuple[str, ...] = ()
    rounds: int = 0
    iterations: int = 0  # timed steps of a round


class Timed(msgspec.Struct, frozen=True):
    """Steps of one library on one rank, back to back; seconds."""

    replica: int
    library: str
    round: int
    times: list[float]


class StepAttempt(msgspec.Struct, frozen=True):
    """An attempt at a step, of a replica. `end` is of `time.monotonic()`, one clock for all processes of a host."""

    replica: int
    pid: int
    step: int
    end: float
    committed: bool
    contributes: bool


def build(task: TrainTask) -> Transformer:
    """The same weights in all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Transformer(task.width, task.layers, 8, CONTEXT)


def batch(task: TrainTask, step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(0, 256, (task.batch, CONTEXT + 1), generator=generator)


def rank(task: TrainTask) -> None:
    # What takes long comes first: from the moment at which a replica has joined, the others wait for its steps.
    model = build(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(batch(task, 0, 0)).backward()
    dist.init_process_group("ftcomm")
    group = ftcomm.default_group()
    records = Records(task.folder, group.replica)
    if task.rounds:
        compare(task, group, records, model, optimizer)
    else:
        train(task, group, records, model, optimizer)
    dist.destroy_process_group()


def compare(
    task: TrainTask, group: ftcomm.Group, records: Records, model: Transformer, optimizer: torch.optim.Optimizer
) -> None:
    wrapped = {"none": DistributedDataParallel(model), "ftcomm": DistributedDataParallel(model)}
    if "gloo" in task.libraries:
        wrapped["gloo"] = DistributedDataParallel(model, process_group=_gloo(task, group.replica, len(group.members)))
    for number in range(-1, task.rounds):  # the first is to warm up: DDP orders its buckets in it
        for library in task.libraries:
            times = []
            for iteration in range(task.iterations):
                x = batch(task, iteration, group.replica)
                group.allreduce(torch.zeros(1))  # all begin together
                started = time.perf_counter()
                _step(wrapped[library], optimizer, x, library != "none")
                times.append(time.perf_counter() - started)
            if number >= 0:
                records.write(Timed(group.replica, library, number, times))


def _step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, x: torch.Tensor, reduce: bool = True
) -> None:
    optimizer.zero_grad()
    if reduce:
        model(x).backward()
    else:
        with model.no_sync():
            model(x).backward()
    optimizer.step()


def _gloo(task: TrainTask, rank: int, ranks: int) -> dist.ProcessGroup:
    store = dist.FileStore(f"{task.folder}/rendezvous", ranks)
    group = dist.ProcessGroup(store, rank, ranks)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, ranks, timedelta(minutes=5))
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def train(
    task: TrainTask, group: ftcomm.Group, records: Records, model: Transformer, optimizer: torch.optim.Optimizer
) -> None:
    state = {"model": model, "optimizer": optimizer}
    parallel = DistributedDataParallel(model)
    note = noting(records, group.replica)
    loop = StepLoop(state)
    for step in loop.steps(FOREVER):
        optimizer.zero_grad()
        parallel(batch(task, step, group.replica)).backward()
        optimizer.step()
        note(step, loop.commit(), group.contributes)
    group.report(final_hash=digest(state), contributes=group.contributes)


def noting(records: Records, replica: int) -> Callable[[int, bool, bool], None]:
    return lambda step, committed, contributes: records.write(
        StepAttempt(replica, os.getpid(), step, time.monotonic(), committed, contributes)
    )


def torchft_rank(task: TrainTask, place: str, life: str) -> None:
    """The same training as torchft has it, with gloo."""
    from torchft import DistributedDataParallel, Optimizer

    replica = int(place)
    model = build(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(batch(task, 0, 0)).backward()  # to warm up, as `rank` does

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    state = lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # noqa: E731
    with_torchft = manager(replica, store, state, load_state_dict)
    parallel = DistributedDataParallel(with_torchft, model)
    managed = Optimizer(with_torchft, optimizer)
    note = noting(Records(task.folder, replica), replica)
    while True:
        managed.zero_grad()
        step = with_torchft.current_step()
        parallel(batch(task, step, replica)).backward()
        contributes = with_torchft.is_participating()
        managed.step()
        committed = with_torchft.current_step() > step
        note(with_torchft.current_step() - committed, committed, contributes)


def restarted_rank(task: TrainTask, place: str, life: str) -> None:
    """The same training over plain gloo, with checkpoints. Ends with the first error; the command then starts
    all ranks again, which begin with the last checkpoint."""
    replica, where = int(place), f"file://{task.folder}/rendezvous-{life}"
    dist.init_process_group("gloo", init_method=where, rank=replica, world_size=task.replicas, timeout=TIMEOUT)
    model = build(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path = Path(task.folder) / "checkpoint.pt"
    first = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    furthest = last_step(task, replica)
    parallel = DistributedDataParallel(model)
    note = noting(Records(task.folder, replica), replica)
    for step in range(first, FOREVER):
        try:
            optimizer.zero_grad()
            parallel(batch(task, step, replica)).backward()
        except RuntimeError:
            os._exit(0)  # what gloo destroys on the way out may wait for the dead
        optimizer.step()
        note(step, step > furthest, True)  # a step that had been done before is one that was lost
        if replica == 0 and (step + 1) % EVERY == 0:
            new = path.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, new)
            os.replace(new, path)


def last_step(task: TrainTask, replica: int) -> int:
    """Returns the last step that an earlier life of this replica has done; -1: none."""
    path = records_path(task.folder, replica)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return max((msgspec.json.decode(line, type=StepAttempt).step for line in lines), default=-1)
