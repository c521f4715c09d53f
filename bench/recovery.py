"""`ftcomm bench recovery`: take a replica out of an all-reduce, again and again, and time what the others do.

In the ranks all-reduces run back to back, one a step, until the job is drained. Replica r puts in 2^r times a common
pattern, so every element of a result tells whose inputs are in it. Around a change of the view the bytes of the results
are hashed, for the command to compare between the survivors, and every element has to hold the inputs of all that
contributed before, or of all that contribute after. Hashing takes longer than an op. It waits until the next op has
returned, so that it holds up no op that is timed; two arrays take turns for that.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import torch
import torch.distributed as dist

import ftcomm
from ftcomm.bench import peers
from ftcomm.bench.checks import check_at_least_one, check_memory, check_replicas
from ftcomm.bench.data import PERIOD
from ftcomm.bench.harness import SIZE, BenchReport, Column, Experiment, Table, figure_text, option
from ftcomm.bench.job import FOREVER, WAIT_TIMEOUT, Observer, Records, observed, together
from ftcomm.bench.plots import COLOURS, INK, MUTED, figure
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, percentile
from ftcomm.bench.torchft import TIMEOUT, manager
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.lab.chaos.network_faults import Unplugged
from ftcomm.lab.netns.hosts import NamespaceHosts
from ftcomm.lab.netns.slow_network import settle
from ftcomm.lab.observe import open_words, stop
from ftcomm.launch.admin.handlers import status
from ftcomm.launch.commands.option_types import choices
from ftcomm.settings import TRANSPORTS, Settings
from ftcomm.transport.segment import POSTED, STAGED, TAKEN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETTLED = 3  # ops that every replica has run in the full view before the next fault
STOPPED = 20.0  # s after which one that is stopped is lost (--op-timeout), which is within `WAIT_TIMEOUT`
TRIES = 2000  # looks at a process, to stop it in the middle of an op
PARTS = (  # of a stall, in the picture
    ("heard of by the coordinator", "#7c2d12"),
    ("new view decided and on disk", "#c2410c"),
    ("survivors in that op again", "#f59e0b"),
    ("the rest of the op", "#d9dee5"),
)


@dataclasses.dataclass(frozen=True)
class RecoveryRequest:
    """Take a replica out of an all-reduce, and time what the others do.

    Replicas under the launcher run all-reduces back to back. One is stopped, seen to be in the middle of an op, and
    killed, left stopped, or cut off. Counted from there: `detect` until the coordinator has heard of it, `view` until
    it has decided on the view without it, `stall` until that very op has returned on the last survivor, with the time
    that the op usually takes beside it, `rejoin` until the replica contributes again; then the next is hit. `resume` is
    what the last survivor took from hearing of the view until it was in that op again, `resent` what survivors had
    posted and posted again. Results are compared by their SHA-256, and every element with the sums that there can be.
    Exits with 1 if ftcomm lost an op, if its bytes were not equal or wrong, or if more was sent again than was in
    flight: as much as the slots of each survivor hold. A peer that fails has a line that says so, and the rest goes on.
    """

    replicas: int = option(4, help="Processes; one of them is hit each time.")
    size: int = option(64 << 20, kind=SIZE, help="Array of the all-reduce (fp32).")
    kills: int = option(20, help="Of each fault, a replica after the other.")
    transport: str = option("auto", kind=click.Choice(TRANSPORTS), help="Of ftcomm.")
    seed: int = option(0, help="Of the points in an op at which they come.")
    faults: Sequence[str] = option(
        ("kill",),
        kind=choices("kill", "stop", "cut"),
        help="SIGKILL; SIGSTOP; its cable, between network namespaces and by root.",
    )
    compare: Sequence[str] = option((), kind=choices("gloo", "torchft"), help="The same faults, but cuts, for these.")

    def smoke(self) -> RecoveryRequest:
        """Two kills of three replicas at 4M, to see that it runs."""
        return dataclasses.replace(self, replicas=3, size=4 << 20, kills=2)

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
        what = f"{self.replicas} replicas with messages of {format_size(self.size)}"
        check_memory(what, self.replicas, 4 * self.size, "--replicas or --size")


class RecoveryEvent(msgspec.Struct, frozen=True):
    """One fault. Milliseconds since it; None where that did not happen within `WAIT_TIMEOUT`, or nobody can tell."""

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
    heartbeat_ms: float | None = None  # silence, or of a stopped one the op timeout, after which it is lost


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


def summarize(events: Sequence[RecoveryEvent]) -> Summary:
    """Summarize at least one event, all of one library and one fault."""

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


def summaries(events: Sequence[RecoveryEvent]) -> list[Summary]:
    kinds = dict.fromkeys((event.library, event.fault) for event in events)
    return [summarize([e for e in events if (e.library, e.fault) == kind]) for kind in kinds]


def good(summary: Summary) -> bool:
    """Whether it went as ftcomm promises; peers are not asked for that."""
    every = summary.completed == summary.equal == summary.kills
    lost = summary.wrong or summary.steps_lost or summary.over_bound
    return summary.library != "ftcomm" or (every and not lost)


async def measure(request: RecoveryRequest, report: BenchReport) -> None:
    await measure_ftcomm(request, report)
    errors = report.more["errors"] = {}  # peer -> why it could not be measured to the end
    for peer in request.compare:
        if (why := peers.missing(peer, "cpu", request.replicas)) is not None:
            report.line(f"# {why}")
            continue
        try:
            await measure_peer(peer, request, report)
        except FtcommError as error:  # what was measured of it stays, and the rest goes on
            errors[peer] = str(error)
            report.line(f"# {peer}: {error}")


async def measure_ftcomm(request: RecoveryRequest, report: BenchReport) -> None:
    """Hit the replicas of a job in turn, each when all are back. Raises `FtcommError` when the job fails or a replica
    does not come back; no process is left, however this ends."""
    chance = random.Random(request.seed)
    for fault in request.faults:
        cut = fault == "cut"
        where: dict[str, Any] = dict(
            hosts=NamespaceHosts() if cut else None, transport="tcp" if cut else request.transport
        )
        if fault == "stop":
            where["op_timeout"] = STOPPED
        async with observed(
            rank, RecoveryTask(request.size // 4, apart=cut), TimedOp, request.replicas, **where
        ) as job:
            for number in range(request.kills):
                report.progress(f"{fault} {number + 1} of {request.kills}", number / request.kills)
                await _settle(job)
                report.add(await _hit(job, number, fault, chance))


async def _settle(job: Observer[TimedOp]) -> None:
    """Wait until all replicas contribute and have run a few ops in that view."""

    def settled() -> bool:
        view = job.full_view(0)
        return view is not None and together(
            [op for op in job.records if op.epoch == view["epoch"]], job.replicas, SETTLED
        )

    job.records.clear()
    await job.until("all replicas run together", settled)


class Hit(msgspec.Struct, frozen=True):
    number: int
    fault: str
    victim: int
    pid: int
    at: float
    usual: float  # s of an op
    mark: int  # how many events there were before


async def _hit(job: Observer[TimedOp], number: int, fault: str, chance: random.Random) -> RecoveryEvent:
    victim = number % job.replicas
    usual = median([op.end - op.start for op in job.records[-8 * job.replicas :]])
    pid = job.job.pids()[victim, 0]
    mark = len(job.events)
    hit = Hit(number, fault, victim, pid, await stop_inside_op(pid, usual, chance), usual, mark)
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
        await _survive(job, hit)
    elif fault == "stop":
        await _survive(job, hit)
        os.kill(pid, signal.SIGKILL)  # so that it comes back
    else:
        # In a thread: pyroute2 has an event loop of its own.
        unplugged = await asyncio.to_thread(Unplugged, status(job.job.launcher), victim)
        try:
            hit = msgspec.structs.replace(hit, at=time.monotonic())
            os.kill(pid, signal.SIGCONT)
            await _survive(job, hit)
        finally:
            await asyncio.to_thread(unplugged.close)
    return await _outcome(job, hit)


async def stop_inside_op(pid: int, op_seconds: float, chance: random.Random) -> float:
    """Stop `pid` while it has chunks posted that it has not taken, at a random point of an op; it stays stopped.

    Stopped, looked at, and let go on if it was between two ops: what was seen holds for as long as it is stopped.
    Returns `time.monotonic()` of the moment in which that was seen.
    """
    try:
        words = open_words(pid)
    except OSError as error:
        raise FtcommError(str(error)) from error
    for _ in range(TRIES):
        await asyncio.sleep(chance.uniform(0, op_seconds))
        stop(pid)
        if words[POSTED] > words[TAKEN]:
            return time.monotonic()
        os.kill(pid, signal.SIGCONT)
    raise FtcommError(f"process {pid} was never inside an op in {TRIES} looks at it")


def _step(job: Observer[TimedOp], hit: Hit) -> int:
    """Returns the step of the op in which the victim was hit: the one after the last that it wrote down."""
    return max(op.step for op in job.records if op.pid == hit.pid) + 1


def _returned(job: Observer[TimedOp], hit: Hit) -> dict[int, TimedOp]:
    """Returns that op on each survivor."""
    step = _step(job, hit)
    return {op.replica: op for op in job.records if op.replica != hit.victim and op.step == step}


def _resumed(job: Observer[TimedOp], hit: Hit) -> list[dict[str, Any]]:
    return [event for event in job.said("resumed", hit.mark) if event["replica"] != hit.victim]


async def _survive(job: Observer[TimedOp], hit: Hit) -> None:
    """Wait until the op has returned on all others, been hashed there, and all have told how they resumed it."""
    others = job.replicas - 1
    await job.comes(lambda: sum(op.digest != "" for op in _returned(job, hit).values()) == others)
    await job.comes(lambda: len(_resumed(job, hit)) >= others, 5.0)


async def _outcome(job: Observer[TimedOp], hit: Hit) -> RecoveryEvent:
    """Follow a fault, which the others have survived or not, up to the return of the victim."""
    step, ops = _step(job, hit), _returned(job, hit)
    completed = len(ops) == job.replicas - 1
    stalls = {replica: (op.end - hit.at) * 1e3 for replica, op in sorted(ops.items())}
    digests = {op.digest for op in ops.values()}
    suspects = [event for event in job.said("suspect", hit.mark) if event.get("replica") == hit.victim]
    without = job.view_without(hit.victim, hit.mark)
    resumed = _resumed(job, hit)
    if without is not None:
        resumed = [event for event in resumed if event["epoch"] == without["epoch"]]
    await job.comes(lambda: job.full_view(hit.mark) is not None)

    times = job.job.launcher.options.timeouts

    def since(event: dict[str, Any] | None) -> float | None:
        return None if event is None else (event["mono"] - hit.at) * 1e3

    return RecoveryEvent(
        number=hit.number,
        victim=hit.victim,
        step=step,
        detect_ms=since(suspects[0] if suspects else without),
        stall_ms=max(stalls.values()) if completed else None,
        survivor_ms=stalls,
        usual_ms=hit.usual * 1e3,
        completed=completed,
        equal=completed and "" not in digests and len(digests) == 1,
        wrong=sum(op.wrong for op in ops.values()),
        rejoin_ms=since(job.full_view(hit.mark)),
        fault=hit.fault,
        view_ms=since(without),
        resume_ms=max((float(event["resume_ms"]) for event in resumed), default=None),
        steps_lost=0 if completed else 1,
        bytes_resent=sum(int(event["resent"]) for event in resumed) if resumed else None,
        bytes_in_flight=STAGED * len(resumed) if resumed else None,
        heartbeat_ms=None if hit.fault == "kill" else 1e3 * (times.op if hit.fault == "stop" else times.heartbeat),
    )


# -- the same for peers ------------------------------------------------------------------------------------------------
#
# A peer's words do not tell when it is inside an op, so it is hit at a random moment of ops that follow each other
# without a pause. It is timed by what the survivors write down:
#
#     torchft  stall until all survivors have committed a step of their own; lost are the steps they threw away before
#     gloo     detected when the last survivor has its error; then all are started again, and rejoin when all have
#              completed an op. The op itself never returns


async def measure_peer(library: str, request: RecoveryRequest, report: BenchReport) -> None:
    """Report what happened after every fault. Raises `FtcommError`; no process is left, however this ends."""
    chance = random.Random(request.seed)
    task = PeerTask(request.size // 4, request.replicas)
    for fault in (fault for fault in request.faults if fault != "cut"):
        with peers.observed_peer(library, PEERS[library], task, Attempt, request.replicas) as job:
            for number in range(request.kills):
                report.progress(f"{library}: {fault} {number + 1} of {request.kills}", number / request.kills)
                report.add(await _hit_peer(job, library, number, fault, chance))


async def _hit_peer(
    job: Observer[Attempt], library: str, number: int, fault: str, chance: random.Random
) -> RecoveryEvent:
    replicas, victim = job.replicas, number % job.replicas
    others = set(range(replicas)) - {victim}
    await job.until("all replicas run together", lambda: _whole(job, SETTLED), 2 * WAIT_TIMEOUT)
    usual = median([one.end - one.start for one in job.records[-8 * replicas :]])
    await asyncio.sleep(chance.uniform(0, usual))
    step, at = max(one.step for one in job.records), time.monotonic()
    os.kill(job.job.pids()[victim, 0], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    def after() -> list[Attempt]:
        return [one for one in job.records if one.end > at and one.replica != victim]

    def failed() -> list[Attempt]:
        return [one for one in after() if not one.committed]

    def alone() -> dict[int, Attempt]:
        """The first step that each survivor has committed without the victim."""
        return {one.replica: one for one in reversed(after()) if one.committed and one.members < replicas}

    if library == "gloo":
        await job.until("survivors failed", lambda: {one.replica for one in failed()} == others, 2 * WAIT_TIMEOUT)
    else:
        await job.until("survivors went on", lambda: alone().keys() == others, 2 * WAIT_TIMEOUT)
    lost, stalls = failed(), {replica: 1e3 * (one.end - at) for replica, one in sorted(alone().items())}
    await job.job.again([victim])
    again = time.monotonic()
    job.records[:] = [one for one in job.records if one.end > again]
    await job.until("the replica came back", lambda: _whole(job, 1), 2 * WAIT_TIMEOUT)
    full = [one for one in job.records if one.members == replicas]
    back = min(max(one.end for one in full if one.replica == replica) for replica in range(replicas))
    return RecoveryEvent(
        number=number,
        victim=victim,
        step=step + 1,
        detect_ms=max((1e3 * (one.end - at) for one in lost), default=None),
        stall_ms=max(stalls.values(), default=None),
        survivor_ms=stalls,
        usual_ms=1e3 * usual,
        completed=bool(stalls) and not lost,
        equal=False,  # is not looked at
        wrong=0,
        rejoin_ms=1e3 * (back - at),
        library=library,
        fault=fault,
        steps_lost=max(sum(one.replica == replica for one in lost) for replica in others),
    )


def _whole(job: Observer[Attempt], steps: int) -> bool:
    """Whether all replicas have done so many steps with all, in processes that live."""
    alive = set(job.job.pids().values())
    full = [one for one in job.records if one.members == job.replicas and one.committed and one.pid in alive]
    return together(full, job.replicas, steps)


# -- for the terminal --------------------------------------------------------------------------------------------------


def _figure(name: str, unit: str, value: Any) -> Column:
    return Column(name, unit, 10, lambda event: figure_text(value(event)))


def _equal(event: RecoveryEvent) -> str:
    return "-" if event.library != "ftcomm" else "equal" if event.equal else "NOT EQUAL"


def _megabytes(value: float | None) -> float | None:
    return None if value is None else value / 1e6


COLUMNS = (
    Column("library", "", 8, lambda event: event.library),
    Column("fault", "", 5, lambda event: event.fault),
    Column("no", "", 4, lambda event: str(event.number + 1)),
    Column("replica", "", 8, lambda event: str(event.victim)),
    Column("in step", "", 8, lambda event: str(event.step)),
    _figure("detect", "(ms)", lambda event: event.detect_ms),
    _figure("view", "(ms)", lambda event: event.view_ms),
    _figure("resume", "(ms)", lambda event: event.resume_ms),
    _figure("stall", "(ms)", lambda event: event.stall_ms),
    _figure("usual op", "(ms)", lambda event: event.usual_ms),
    _figure("rejoin", "(ms)", lambda event: event.rejoin_ms),
    _figure("resent", "(MB)", lambda event: _megabytes(event.bytes_resent)),
    Column("lost", "", 5, lambda event: str(event.steps_lost)),
    Column("bytes", "", 9, _equal),
    Column("#wrong", "", 7, lambda event: str(event.wrong)),
)


def summary_lines(summary: Summary) -> list[str]:
    spreads = (summary.detect_ms, summary.view_ms, summary.resume_ms, summary.stall_ms, summary.usual_ms)
    spreads += (summary.rejoin_ms, {name: value / 1e6 for name, value in summary.bytes_resent.items()})
    lines = [
        f"#{summary.library:>9} {summary.fault:>5} {name:>4} {'':>17}"
        + "".join(f" {figure_text(s.get(name)):>10}" for s in spreads)
        for name in ("p50", "p99", "max")
    ]
    said = [f"ops that survived: {summary.completed} of {summary.kills}"]
    if summary.library == "ftcomm":
        said += [
            f"equal bytes on all survivors: {summary.equal} of {summary.kills}",
            f"wrong elements: {summary.wrong}",
            f"steps lost: {summary.steps_lost}",
            f"sent again more than was in flight: {summary.over_bound} {'OK' if good(summary) else 'FAILED'}",
        ]
        if over := summary.over_heartbeat_ms:
            lines.append(
                f"# stall beyond the timeout that ends it: p50 {over['p50']:.0f} ms, p99 {over['p99']:.0f} ms, max "
                f"{over['max']:.0f} ms"
            )
    else:
        said.append(f"steps lost: {summary.steps_lost}")
    return [*lines, f"# {summary.library}, {summary.fault}: {'; '.join(said)}"]


def _footer(report: BenchReport) -> list[str]:
    return [line for summary in summaries(report["events"]) for line in summary_lines(summary)]


def _draw(report: BenchReport, path: Path) -> None:
    if report["events"]:
        draw(report["events"], report.request, report.fields, path)


TABLE = Table("events", RecoveryEvent, COLUMNS)
EXPERIMENT = Experiment(
    "recovery",
    RecoveryRequest,
    measure,
    [TABLE],
    csv="events",
    summary=lambda report: {"summary": summaries(report["events"])} if report["events"] else {},
    footer=_footer,
    good=lambda report: all(map(good, summaries(report["events"]))),
    draw=_draw,
)


# -- the picture: what each stall is made of, and the same faults with the peers ---------------------------------------


def spans(event: RecoveryEvent) -> list[float]:
    """Milliseconds at which each of PARTS has ended; what is unknown takes no time."""
    ends = [event.detect_ms or 0.0]
    ends.append(max(ends[-1], event.view_ms or 0.0))
    ends.append(ends[-1] + (event.resume_ms or 0.0))
    ends.append(event.stall_ms or 0.0)
    return [min(end, ends[-1]) for end in ends]


def draw(
    events: Sequence[RecoveryEvent], request: RecoveryRequest, header: Mapping[str, str | int | float], path: Path
) -> None:
    """Write `path` in both formats."""
    own = [event for event in events if event.library == "ftcomm" and event.stall_ms is not None]
    faults = list(dict.fromkeys(event.fault for event in own))
    subtitle = (
        f"{request.replicas} replicas on {header['cores']} cores of {header['cpu']}, all-reduces of "
        f"{format_size(request.size)}, {str(header['date'])[:10]}. "
        f"Steps lost by ftcomm: {sum(event.steps_lost for event in events if event.library == 'ftcomm')}."
    )
    rows = max(len(own), 6)
    with figure(path, "A replica is lost inside an all-reduce", subtitle, (12, 1.6 + 0.16 * rows + 1.2)) as drawn:
        grid = drawn.add_gridspec(len(faults) or 1, 2, width_ratios=(1.5, 1))
        for place, fault in enumerate(faults):
            axes = drawn.add_subplot(grid[place, 0])
            _timelines(axes, [event for event in own if event.fault == fault], fault)
            if not place:
                drawn.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
        _compare(drawn.add_subplot(grid[:, 1]), events)


def _timelines(axes: Axes, events: Sequence[RecoveryEvent], fault: str) -> None:
    ordered = sorted(events, key=lambda event: event.stall_ms or 0.0)
    for row, event in enumerate(ordered):
        start = 0.0
        for end, (label, colour) in zip(spans(event), PARTS, strict=True):
            name = label if not row else None
            axes.barh(row, max(end - start, 0.0), left=start, height=0.74, color=colour, label=name)
            start = max(start, end)
    usual = sum(event.usual_ms for event in ordered) / len(ordered)
    axes.axvline(usual, color=INK, linewidth=1, linestyle=":", label="an op without a fault")
    axes.set_title(f"{len(ordered)} x {fault}: milliseconds from the fault to the op's return on all survivors")
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)


def _compare(axes: Axes, events: Sequence[RecoveryEvent]) -> None:
    found = summaries(events)
    names = []
    for row, one in enumerate(found):
        colour = COLOURS.get(one.library, INK)
        names.append(f"{one.library}\n{one.fault}")
        if one.stall_ms:
            low, high = one.stall_ms["p50"], one.stall_ms["p99"]
            axes.plot([low, high], [row, row], color=colour, linewidth=5, solid_capstyle="round", alpha=0.35)
            axes.plot(low, row, "o", color=colour, markersize=8)
            said = f"{_time(low)}, p99 {_time(high)}" + (f"; {one.steps_lost} steps lost" if one.steps_lost else "")
        else:
            low = one.rejoin_ms.get("p50", 1.0)
            axes.plot(low, row, "X", color=colour, markersize=9)
            said = f"never; all started again {_time(low)}"
        place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
        axes.annotate(said, (low, row), fontsize=9, color=colour, **place)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.margins(x=0.35)
    axes.grid(axis="y", visible=False)
    axes.set_title("The stall of the survivors: median to p99")
    axes.set_xlabel("milliseconds", color=MUTED)


def _time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"


# -- in a rank ---------------------------------------------------------------------------------------------------------


class RecoveryTask(msgspec.Struct, frozen=True):
    count: int  # fp32 elements
    folder: str = ""
    apart: bool = False  # each replica takes itself for a host of its own


class TimedOp(msgspec.Struct, frozen=True):
    """Times are of `time.monotonic()`, one clock for all processes of a host. Written again once `digest` is known."""

    replica: int
    pid: int
    step: int
    epoch: int  # of the view in force when it returned
    start: float
    end: float
    digest: str = ""  # of the result
    wrong: int = 0  # elements


def rank(task: RecoveryTask) -> None:
    torch.set_num_threads(1)
    if task.apart:
        settle(f"host-{Settings.from_env().replica}")
    group = ftcomm.init()
    pattern = torch.arange(PERIOD, dtype=torch.float32) % 7 + 1
    mine = pattern * 2.0**group.replica
    x, other = torch.empty(task.count), torch.empty(task.count)
    # Of the last two ops: a replica may learn of a loss while it leaves one op and the others are in the next already.
    epochs = collections.deque([group.epoch] * 2, maxlen=2)
    contributing = collections.deque([group.contributing] * 3, maxlen=3)
    due: TimedOp | None = None  # its result, in `other`, is to be hashed
    records = Records(task.folder, group.replica)
    for step in ftcomm.steps(FOREVER):
        _fill(x, mine)
        start = time.monotonic()
        ftcomm.allreduce(x)
        op = TimedOp(group.replica, os.getpid(), step, group.epoch, start, time.monotonic())
        records.write(op)
        if due is not None:
            digest = hashlib.sha256(other.numpy().data).hexdigest()
            records.write(msgspec.structs.replace(due, digest=digest, wrong=_wrong(other, pattern, set(contributing))))
        contributing.append(group.contributing)
        due = op if op.epoch != epochs[0] else None
        epochs.append(op.epoch)
        x, other = other, x
    ftcomm.shutdown()


def _fill(x: torch.Tensor, row: torch.Tensor) -> None:
    whole = x.numel() // PERIOD * PERIOD
    x[:whole].view(-1, PERIOD).copy_(row)
    x[whole:].copy_(row[: x.numel() - whole])


def _wrong(x: torch.Tensor, pattern: torch.Tensor, allowed: Iterable[Iterable[int]]) -> int:
    """Elements of `x` (count,) that are no sum over one of the `allowed` sets of replicas."""
    wanted = torch.empty_like(x)
    right = torch.zeros_like(x, dtype=torch.bool)
    for replicas in allowed:
        _fill(wanted, pattern * float(sum(1 << replica for replica in replicas)))
        right |= x == wanted
    return x.numel() - int(right.sum())


# -- in a rank of a peer ----------------------------------------------------------------------------------------------


Note = Callable[[int, float, bool, int], None]


class PeerTask(msgspec.Struct, frozen=True):
    count: int  # fp32 elements
    replicas: int
    folder: str = ""


class Attempt(msgspec.Struct, frozen=True):
    """Times are of `time.monotonic()`. Not `committed`: failed, or thrown away."""

    replica: int
    pid: int
    step: int
    start: float
    end: float
    committed: bool
    members: int


def noting(task: PeerTask, replica: str) -> Note:
    records = Records(task.folder, int(replica))
    return lambda step, start, committed, members: records.write(
        Attempt(int(replica), os.getpid(), step, start, time.monotonic(), committed, members)
    )


def gloo_rank(task: PeerTask, replica: str, life: str) -> None:
    """All-reduces back to back, one a step, up to the first error."""
    torch.set_num_threads(1)
    x, note = torch.empty(task.count), noting(task, replica)
    where = f"file://{task.folder}/rendezvous-{life}"
    dist.init_process_group("gloo", init_method=where, rank=int(replica), world_size=task.replicas, timeout=TIMEOUT)
    for step in range(FOREVER):
        x.fill_(1)
        start = time.monotonic()
        try:
            dist.all_reduce(x)
        except RuntimeError:
            note(step, start, False, 0)
            os._exit(0)  # what gloo destroys on the way out may wait for the dead
        note(step, start, True, task.replicas)


def torchft_rank(task: PeerTask, replica: str, life: str) -> None:
    """Run a rank of torchft. Its manager swallows errors, discards the step and forms a quorum of those that are
    left."""
    torch.set_num_threads(1)
    x, note = torch.empty(task.count), noting(task, replica)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    managed = manager(int(replica), store, lambda: {"nothing": torch.zeros(1)}, lambda state: None)
    while True:
        x.fill_(1)
        start, step = time.monotonic(), managed.current_step()
        managed.start_quorum()
        managed.allreduce(x, reduce_op=dist.ReduceOp.SUM).wait()
        members = managed.num_participants()
        note(step, start, managed.should_commit(), members)


PEERS = {"gloo": gloo_rank, "torchft": torchft_rank}
