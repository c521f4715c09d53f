"""`ftcomm bench allreduce` and the other collectives, beside peers.

Each library runs in processes of its own, which take turns (`interleave`). In a rank a turn is one block:

    fill, one op, check exactly | a few ops to warm up | timed ops, back to back | check

Nothing but ops lies between two timed ops: the time of an op then contains no waiting for a rank that came late from
somewhere else. Sums in place grow with each op; where they could overflow, a block is cut and the array filled again.
On a GPU events of its stream tell the times, and with a graph one op is captured and replayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import click
import msgspec
import torch

from ftcomm.bench.checks import check_memory
from ftcomm.bench.collectives import COLLECTIVES, IN, OUT, ROOT, Case
from ftcomm.bench.data import FLOATS, INTEGERS, REDOPS, Pattern, item_size
from ftcomm.bench.harness import INTS, SIZE, SIZES, BenchReport, Experiment, Table, figure_text, option
from ftcomm.bench.interleave import BenchTurn, Interleaver, OpDeclined, RankChannel, RanksGone, TimedBlock
from ftcomm.bench.job import OnProgress, part, rank_arguments, written_task
from ftcomm.bench.libraries import BoundCall, Library, Mpi, Ours, open_library, rank_of_environment
from ftcomm.bench.peers import TRANSPORT, missing, ours, theirs
from ftcomm.bench.plots import COLOURS, INK, MUTED, figure
from ftcomm.bench.sizes import format_size, sweep
from ftcomm.bench.stats import algbw, median, percentile, slowest
from ftcomm.collective.compression import FP8, unsupported_compression
from ftcomm.control.limits import MEMBERS
from ftcomm.errors import SettingsError
from ftcomm.kernels.call_codes import COMPRESSIONS
from ftcomm.launch.commands.option_types import choices
from ftcomm.settings import TRANSPORTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GLOO_REDOPS = ("sum", "min", "max", "product")
GLOO_DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "int32", "int64", "uint8")
COPY = "copy"  # all ranks copy as many bytes at once: the bound
BLOCK_TIMEOUT = 120.0  # s that a block may take, and as many as its bytes take at SLOWEST
SLOWEST = 20e6  # bytes a second and rank


MPI_JOB = "mpi"
STYLES = ("-", "--", ":", "-.")  # of lines of ftcomm, in turn


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to do the op. Those with one `job` are one set of processes."""

    library: str
    transport: str
    job: str
    env: tuple[tuple[str, str], ...] = ()  # of the ranks
    sms: int | None = None
    options: tuple[tuple[str, float], ...] = ()  # of the launcher
    wire: str | None = None

    @property
    def op(self) -> str:
        """The name by which its ranks know what to do."""
        return self.library if self.wire is None else f"{self.library} {self.wire}"


@dataclasses.dataclass(frozen=True)
class CollectiveRequest:
    """Flags and columns are those of nccl-tests, with a line for each library. Each library runs in processes of its
    own, which take turns within each round: so the ratio ("x": time over ftcomm's, the median of the rounds' ratios) is
    of what ran in the same second, and a machine that changes its speed for minutes does not change it. Time is of the
    slowest rank of each op; p50 is the median over rounds of the rounds' medians, p99 of all ops. "%limit": what the
    bytes that have to move, inputs read once and results written once, take at the rate at which as many ranks copy an
    array of this size in the same round. Results of every round are checked; #wrong counts elements, and makes the
    exit code 1. A library that is not installed is named and left out, one that fails has a line that says so.
    """

    sizes: Sequence[int] = option((), kind=SIZES, help="These sizes, instead of -b -e -f -i.")
    ranks: Sequence[int] = option((2,), kind=INTS, help="Processes.")
    minbytes: int = option(1 << 10, "-b", "--minbytes", kind=SIZE, help="Smallest array, in bytes, K, M, G.")
    maxbytes: int = option(64 << 20, "-e", "--maxbytes", kind=SIZE, help="Largest array.")
    stepfactor: int | None = option(None, "-f", "--stepfactor", kind=click.INT, help="Factor between sizes.", show="4")
    stepbytes: int | None = option(None, "-i", "--stepbytes", kind=SIZE, help="Step between sizes, not a factor.")
    iterations: int | None = option(
        None, "-n", "--iters", kind=click.INT, help="Timed ops in a round.", show="100 to 10, by size"
    )
    warmup: int | None = option(
        None, "-w", "--warmup_iters", kind=click.INT, help="Ops before them.", show="5 to 1, by size"
    )
    dtype: str = option("float32", "-d", "--datatype", help="Type of the elements.")
    redop: str = option("sum", "-o", "--op", help="sum, avg, min, max or product.")
    check_results: int = option(1, "-c", "--check", kind=click.IntRange(0, 1), help="Check results.")
    graph: bool = option(False, "-G", "--cudagraph", help="Capture one op in a CUDA graph and replay it.")
    transports: Sequence[str] = option(
        ("auto",), "--transport", kind=choices(*TRANSPORTS), help="Of ftcomm; several are measured side by side."
    )
    device: str = option("cpu", kind=click.Choice(["cpu", "cuda"]))
    sms: Sequence[int] = option((), kind=INTS, help="Multiprocessors that an op of ftcomm may use.")
    wires: Sequence[str] = option(
        (),
        "--compression",
        kind=choices(*COMPRESSIONS),
        help="In which form elements cross, by allreduce(..., compression=); several are measured side by side.",
    )
    compare: Sequence[str] = option(
        (),
        kind=choices("gloo", "mpi", "torchft", "nccl", "atomic"),
        help="Measure gloo, mpi, torchft, nccl in turn with it; atomic: ftcomm with atomic=True.",
    )
    rounds: int = option(5, help="So many times one after the other.")
    collective: str = "allreduce"

    def smoke(self) -> CollectiveRequest:
        """A few ops at 1K and 1M, to see that it runs."""
        return dataclasses.replace(self, sizes=(1 << 10, 1 << 20), rounds=1, iterations=5)

    @property
    def swept(self) -> Sequence[int]:
        """The sizes to measure."""
        if self.sizes:
            return self.sizes
        factor = 4 if self.stepfactor is None and self.stepbytes is None else self.stepfactor
        return sweep(self.minbytes, self.maxbytes, factor=factor, step=self.stepbytes)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        reduces = COLLECTIVES[self.collective].reduces
        if self.dtype not in FLOATS + INTEGERS:
            raise SettingsError(f"-d {self.dtype}: expected one of {', '.join(FLOATS + INTEGERS)}.")
        if self.redop not in REDOPS or (self.redop == "avg" and self.dtype not in FLOATS):
            raise SettingsError(
                f"-o {self.redop} of {self.dtype}: expected one of {', '.join(REDOPS)}, and avg only of floats."
            )
        if "gloo" in self.compare and reduces and (self.redop not in GLOO_REDOPS or self.dtype not in GLOO_DTYPES):
            raise SettingsError(
                f"gloo has no {self.redop} of {self.dtype}, only {', '.join(GLOO_REDOPS)} of {', '.join(GLOO_DTYPES)}; "
                "leave --compare gloo away."
            )
        if "atomic" in self.compare and self.collective != "allreduce":
            raise SettingsError(f"--compare atomic: only an all-reduce can be atomic, not {self.collective}.")
        if min(self.rounds, 1 if self.iterations is None else self.iterations) < 1 or (self.warmup or 0) < 0:
            raise SettingsError("--rounds and -n have to be at least 1, -w at least 0.")
        if self.device == "cpu" and (self.sms or self.graph):
            raise SettingsError("--sms and -G are of kernels on a GPU; add --device cuda.")
        if self.device == "cuda" and self.collective != "allreduce":
            raise SettingsError(f"--device cuda: only allreduce is measured there, not {self.collective}.")
        if self.wires and self.collective != "allreduce":
            raise SettingsError(f"--compression {self.wires[0]}: only an all-reduce has another form on the wire.")
        for wire in self.wires:
            reason = unsupported_compression(self.dtype, self.redop, wire)
            if reason is not None:
                raise SettingsError(f"--compression {wire}: {reason}")
        if any(one < 1 for one in self.sms):
            raise SettingsError(f"--sms {min(self.sms)}: an all-reduce needs at least 1 to reduce with.")
        for ranks in self.ranks:
            if not 2 <= ranks <= MEMBERS:
                raise SettingsError(f"--ranks {ranks}: expected 2 to {MEMBERS}.")
            least = item_size(self.dtype) * (ranks if COLLECTIVES[self.collective].parts else 1)
            if min(self.swept) < least:
                raise SettingsError(
                    f"{min(self.swept)} bytes are less than one element of {self.dtype}"
                    + (" for each rank" if least > item_size(self.dtype) else "")
                    + "; raise -b."
                )
            jobs = len({one.job for one in self.contestants()})
            what = f"{ranks} ranks of {jobs} libraries with messages of {format_size(max(self.swept))}"
            arrays = (3 + ("atomic" in self.compare)) * max(self.swept)  # the one in its turn has some
            check_memory(what, ranks * jobs, arrays // jobs, "--ranks or -e")

    def contestants(self) -> list[Contestant]:
        """The bound first, then ours, the one that others are compared with first of these."""
        found: list[Contestant] = []
        for transport in self.transports:
            for sms in self.sms or (None,):
                engine = "gpu-kernel" if transport in ("auto", "shm") else "gpu-reduce"
                env = (("FTCOMM_ENGINE", engine),) if self.device == "cuda" else ()
                if sms is not None:
                    env = (*env, ("FTCOMM_SMS", str(sms)))
                job = f"ftcomm-{transport}" + (f"-{sms}" if sms is not None else "")
                if not found:
                    found.append(Contestant(COPY, TRANSPORT[COPY], job))
                for wire in self.wires or (None,):
                    found.append(Contestant("ftcomm", transport, job, env, sms, wire=wire))
                    if "atomic" in self.compare:
                        found.append(Contestant("atomic", transport, job, env, sms, wire=wire))
        found[0] = dataclasses.replace(found[0], env=found[1].env)
        return found + [Contestant(peer, TRANSPORT[peer], peer) for peer in self.compare if peer in TRANSPORT]

    def task(self, ranks: int, folder: str = "") -> CollectiveTask:
        most = Pattern(ranks, self.dtype, self.redop).max_ops()
        whole = item_size(self.dtype) * (ranks if COLLECTIVES[self.collective].parts else 1)
        sizes = []
        for size in self.swept:
            iterations, warmup = _iterations(size)
            warmup = min(warmup if self.warmup is None else self.warmup, most - 2)
            count = size // whole * whole // item_size(self.dtype)
            sizes.append(Size(count * item_size(self.dtype), count, self.iterations or iterations, warmup))
        return CollectiveTask(
            self.collective,
            ranks,
            self.dtype,
            self.redop,
            self.device,
            tuple(sizes),
            bool(self.check_results),
            self.graph,
            folder,
        )


class Size(msgspec.Struct, frozen=True):
    bytes: int
    count: int  # of the whole array
    iterations: int
    warmup: int


class CollectiveTask(msgspec.Struct, frozen=True):
    """The task of the ranks of all libraries; written by the command, read by each rank."""

    collective: str
    ranks: int
    dtype: str
    redop: str
    device: str  # cpu or cuda
    sizes: tuple[Size, ...]
    check: bool
    graph: bool
    folder: str  # where the socket is

    @property
    def socket(self) -> str:
        return f"{self.folder}/turns"


class CollectiveRow(msgspec.Struct, frozen=True):
    """One library at one size. Times are of the slowest rank of each op; p50 is the median over rounds of medians.

    With an `error` there are no times.
    """

    op: str
    library: str
    device: str
    transport: str
    ranks: int
    dtype: str
    redop: str
    root: int  # -1: there is none
    in_place: bool
    bytes: int
    count: int
    rounds: int = 0
    iterations: int = 0  # in all rounds together
    time_us_p50: float | None = None
    time_us_p99: float | None = None
    time_us_mean: float | None = None  # of the whole loop, as nccl-tests has it
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    limit_pct: float | None = None  # of the time: what the bytes to be moved take at the rate of a copy of this size
    wrong: int = 0  # elements, over all ranks and checks
    round_us: list[float] = []  # median of each round
    ratio: float | None = None  # time over the first ftcomm's, median over rounds; None for that one
    round_ratio: list[float] = []
    sms: int | None = None
    wire: str | None = None
    error: str = ""


def rows(
    blocks: Mapping[Contestant, Sequence[Sequence[TimedBlock]]],
    errors: Mapping[Contestant, str],
    task: CollectiveTask,
    size: Size,
    place: str,
) -> list[CollectiveRow]:
    """Returns a row for each contestant but the bound, of one size and place, from the ranks' blocks of each round."""
    kind = COLLECTIVES[task.collective]
    slow = {who: [slowest([b.times for b in ranks]) for ranks in by_round] for who, by_round in blocks.items()}
    medians = {who: [median(times) / 1e3 for times in by_round] for who, by_round in slow.items()}
    bound = next((us for who, us in medians.items() if who.library == COPY), [])
    share = kind.bytes_moved(task.ranks, place) / (2 * task.ranks)  # of what the copies moved
    everyone = [who for who in (*blocks, *(e for e in errors if e not in blocks)) if who.library != COPY]
    first = next((who for who in blocks if who.library == "ftcomm"), None)
    found = []
    for who in everyone:
        fields = {
            "op": task.collective,
            "library": who.library,
            "device": task.device,
            "transport": who.transport,
            "ranks": task.ranks,
            "dtype": task.dtype,
            "redop": task.redop if kind.reduces else "none",
            "root": ROOT if kind.rooted else -1,
            "in_place": place != OUT,
            "bytes": size.bytes,
            "count": size.count,
            "sms": who.sms,
            "wire": who.wire,
        }
        if who in errors or not medians[who]:
            found.append(CollectiveRow(**fields, error=errors.get(who, "not measured")))
            continue
        p50 = median(medians[who])
        ratios = [a / b for a, b in zip(medians[who], medians.get(first, []), strict=False)] if who != first else []
        limits = [100 * share * a / b for a, b in zip(bound, medians[who], strict=False)]
        bandwidth = algbw(size.bytes, p50 / 1e6)
        found.append(
            CollectiveRow(
                **fields,
                rounds=len(medians[who]),
                iterations=sum(map(len, slow[who])),
                time_us_p50=p50,
                time_us_p99=percentile([t for times in slow[who] for t in times], 99) / 1e3,
                time_us_mean=median([max(b.elapsed for b in r) / len(r[0].times) / 1e3 for r in blocks[who]]),
                algbw_gbps=bandwidth,
                busbw_gbps=bandwidth * kind.busbw(task.ranks),
                limit_pct=median(limits) if limits else None,
                wrong=sum(block.wrong for ranks in blocks[who] for block in ranks),
                round_us=medians[who],
                ratio=median(ratios) if ratios else None,
                round_ratio=ratios,
            )
        )
    return found


async def measure(request: CollectiveRequest, report: BenchReport) -> None:
    """Each row when it is measured; the terminal has a line when a library is measured in all places."""
    places = [place == IN for place in COLLECTIVES[request.collective].places]
    held: list[CollectiveRow] = []

    def on_rows(new: list[CollectiveRow]) -> None:
        for row in new:
            report.add(row)
        held.extend(new)
        if {row.in_place for row in held} == set(places):
            report.line(*lines(held, places))
            held.clear()

    await measure_sizes(request, rank, on_rows, report.progress, report.line)


async def measure_sizes(
    request: CollectiveRequest,
    function: Callable[..., None],
    on_rows: Callable[[list[CollectiveRow]], None],
    progress: OnProgress,
    say: Callable[[str], None],
) -> None:
    """Start all libraries, whose ranks call `function`, and hand over the rows of one size and place when they are
    measured, a row a library.

    `say(line)` is called for each peer that is left out. A library that fails has rows that say so, and the rest goes
    on. No process is left, whether this returns, raises or is cancelled.
    """
    for number, ranks in enumerate(request.ranks):
        contestants = []
        for who in request.contestants():
            why = missing(who.job, request.device, ranks)
            if why is None:
                contestants.append(who)
            else:
                say(f"# {why}")
        with written_task(request.task(ranks)) as (task, path):
            async with Interleaver(Path(task.socket)) as turns, _Contest(turns, task) as contest:
                await contest.start(contestants, function, path)
                await contest.run(request.rounds, on_rows, part(progress, number, len(request.ranks)))


class _Contest:
    """All libraries with one number of ranks."""

    def __init__(self, turns: Interleaver, task: CollectiveTask) -> None:
        self._turns, self._task = turns, task
        self._jobs: dict[str, asyncio.Future[str]] = {}
        self._stacks: dict[str, contextlib.AsyncExitStack] = {}
        self._errors: dict[Contestant, str] = {}  # of those that are gone
        self._contestants: list[Contestant] = []

    async def __aenter__(self) -> _Contest:
        return self

    async def __aexit__(self, *error: object) -> None:
        for stack in self._stacks.values():
            await stack.aclose()

    async def start(self, contestants: Sequence[Contestant], function: Callable[..., None], path: Path) -> None:
        self._contestants = list(contestants)
        task = self._task
        jobs = {who.job: who for who in contestants}
        for name, who in jobs.items():
            arguments = rank_arguments(function, path, name)
            if name.startswith("ftcomm"):
                context = ours(task.ranks, arguments, who.transport, dict(who.env), **dict(who.options))
            else:
                context = theirs(name, task.ranks, arguments, task.folder)
            self._stacks[name] = contextlib.AsyncExitStack()
            self._jobs[name] = await self._stacks[name].enter_async_context(context)
        for name, job in self._jobs.items():
            try:
                await self._turns.expect(name, task.ranks, job)
            except RanksGone as gone:
                await self._lose(name, str(gone))

    async def run(self, rounds: int, on_rows: Callable[[list[CollectiveRow]], None], progress: OnProgress) -> None:
        task = self._task
        for index, size in enumerate(task.sizes):
            for place in COLLECTIVES[task.collective].places:
                blocks: dict[Contestant, list[list[TimedBlock]]] = {who: [] for who in self._contestants}
                errors = dict(self._errors)  # and those that do not have this op, but others
                for number in range(rounds):
                    progress(
                        f"{task.ranks} ranks, {format_size(size.bytes)}", (index + number / rounds) / len(task.sizes)
                    )
                    for who in self._contestants:
                        if who not in errors:
                            await self._turn(who, BenchTurn(who.op, index, place), size, blocks[who], errors)
                on_rows(rows({who: b for who, b in blocks.items() if who not in errors}, errors, task, size, place))

    async def _turn(
        self, who: Contestant, turn: BenchTurn, size: Size, into: list[list[TimedBlock]], errors: dict[Contestant, str]
    ) -> None:
        ops = size.iterations + size.warmup + 2
        timeout = BLOCK_TIMEOUT + math.ceil(ops * size.bytes * self._task.ranks / SLOWEST)
        try:
            into.append(await self._turns.turn(who.job, turn, timeout, self._jobs[who.job]))
        except OpDeclined as refused:
            errors[who] = str(refused)
        except RanksGone as gone:
            await self._lose(who.job, str(gone))
            errors.update(self._errors)

    async def _lose(self, job: str, why: str) -> None:
        """End one that hangs: it may do so on a core that the others need."""
        await self._stacks[job].aclose()
        self._errors.update({who: why for who in self._contestants if who.job == job})


def _iterations(size: int) -> tuple[int, int]:
    """-> (timed ops, ops before them) in a block: about a second for the slowest peer known, at any size."""
    if size <= 64 << 10:
        return 100, 5
    if size <= 4 << 20:
        return 40, 3
    return 10, 1


# -- for the terminal, and the picture ---------------------------------------------------------------------------------


PLACES = {False: "out of place", True: "in place"}


def heading(places: Sequence[bool]) -> list[str]:
    """Columns of nccl-tests, a line for each library; `places`: whether in place, in the order of their columns."""
    left = f"#{'size':>10} {'count':>11} {'type':>9} {'op':>7} {'root':>4} {'ranks':>5} {'library':>14}"
    units = f"#{'(B)':>10} {'(elements)':>11} {'':>43}"
    first = f"#{'':>{len(left) - 1}}"
    for place in places:
        first += f"  {f' {PLACES[place]} '.center(56, '-')}"
        left += f"  {'p50':>9} {'p99':>9} {'algbw':>7} {'busbw':>7} {'%limit':>6} {'x':>6} {'#wrong':>6}"
        units += f"  {'(us)':>9} {'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>20}"
    return [first, left, units.rstrip()]


def lines(rows: Sequence[CollectiveRow], places: Sequence[bool]) -> list[str]:
    """The rows of one size and number of ranks: all libraries, in one place or both."""
    found = []
    for who in dict.fromkeys(label(row) for row in rows):
        mine = {row.in_place: row for row in rows if label(row) == who}
        one = next(iter(mine.values()))
        text = f" {one.bytes:>10} {one.count:>11} {one.dtype:>9} {one.redop:>7} {one.root:>4} {one.ranks:>5} {who:>14}"
        for place in places:
            row = mine[place]
            if row.time_us_p50 is None or row.time_us_p99 is None or row.algbw_gbps is None or row.busbw_gbps is None:
                text += f"  {row.error[:56]:<56}"
                continue
            times = f"{figure_text(row.time_us_p50):>9} {figure_text(row.time_us_p99):>9}"
            rates = f"{row.algbw_gbps:>7.2f} {row.busbw_gbps:>7.2f}"
            limit = "-" if row.limit_pct is None else f"{row.limit_pct:.1f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            text += f"  {times} {rates} {limit:>6} {ratio:>6} {row.wrong:>6}"
        found.append(text.rstrip())
    return found


def label(row: CollectiveRow) -> str:
    """A library with what distinguishes it from itself."""
    own = row.library in ("ftcomm", "atomic")
    via = f":{row.transport}" if own and row.transport != "auto" else ""
    return f"{row.library}{via}" + (f"/{row.sms}" if row.sms is not None else "") + (f" {row.wire}" if row.wire else "")


def footer(wrong: int) -> str:
    return f"# Wrong elements: {wrong} {'OK' if wrong == 0 else 'FAILED'}"


def draw(rows: Sequence[CollectiveRow], header: Mapping[str, str | int | float], path: Path) -> None:
    """Write `path` in both formats. In place where the collective has that, else out of place."""
    if all(row.time_us_p50 is None for row in rows):
        return
    shown = [row for row in rows if row.time_us_p50 is not None and row.in_place == rows[-1].in_place]
    everybody = sorted({row.ranks for row in shown})
    place = "in place" if shown[0].in_place else "out of place"
    subtitle = (
        f"{shown[0].dtype}, {place}, {header['cpu']} with {header['cores']} cores, torch {header['torch']}, "
        f"{str(header['date'])[:10]}. Median of {max(row.rounds for row in shown)} rounds, bars from least to most."
    )
    names = list(dict.fromkeys(label(row) for row in shown))
    with figure(path, f"{shown[0].op} beside its peers", subtitle, (11, 1.0 + 3.6 * len(everybody))) as drawn:
        grid = drawn.subplots(len(everybody), 2, squeeze=False)
        for (left, right), ranks in zip(grid, everybody, strict=True):
            own = 0
            for name in names:
                mine = sorted(
                    (row for row in shown if row.ranks == ranks and label(row) == name), key=lambda r: r.bytes
                )
                if not mine:
                    continue
                style = STYLES[own % len(STYLES)] if mine[0].library == "ftcomm" else "-"
                own += mine[0].library == "ftcomm"
                _line(left, mine, name, style, lambda us, row: us)
                _line(right, mine, name, style, lambda us, row: row.busbw_gbps * row.time_us_p50 / us)
            _axes(left, f"{ranks} ranks: time of an op", "us", shown)
            _axes(right, f"{ranks} ranks: bus bandwidth", "GB/s", shown)
            left.legend(loc="upper left")


def _line(axes: Axes, rows: Sequence[CollectiveRow], name: str, style: str, value) -> None:  # type: ignore[no-untyped-def]
    x = [row.bytes for row in rows]
    y = [value(row.time_us_p50, row) for row in rows]
    ends = [sorted((value(min(row.round_us), row), value(max(row.round_us), row))) for row in rows]
    bars = [[middle - low for middle, (low, _) in zip(y, ends, strict=True)]]
    bars += [[high - middle for middle, (_, high) in zip(y, ends, strict=True)]]
    colour = COLOURS.get(rows[0].library, INK)
    axes.errorbar(
        x, y, yerr=bars, fmt=style, marker="o", markersize=4, color=colour, label=name, elinewidth=1, alpha=0.9
    )


def _axes(axes: Axes, title: str, unit: str, rows: Sequence[CollectiveRow]) -> None:
    sizes = sorted({row.bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], fontsize=8.5)
    axes.minorticks_off()
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel("size of the array", color=MUTED)


def _footer(report: BenchReport) -> list[str]:
    rows = report["rows"]
    failed = dict.fromkeys(f"# {row.library}: {row.error}" for row in rows if row.error)
    return [*failed, footer(sum(row.wrong for row in rows))]


def _experiment(name: str, said: str) -> Experiment:
    request = dataclasses.make_dataclass(
        "Request",
        [("collective", str, name)],
        bases=(CollectiveRequest,),
        frozen=True,
        namespace={"__module__": __name__},
    )
    request.__doc__ = f"{said}\n\n{inspect.getdoc(CollectiveRequest)}"
    return Experiment(
        name.replace("_", "-"),
        request,
        measure,
        [Table("rows", CollectiveRow)],
        csv="rows",
        heading=lambda request: heading([place == IN for place in COLLECTIVES[name].places]),
        footer=_footer,
        good=lambda report: not any(row.wrong or (row.error and row.library == "ftcomm") for row in report["rows"]),
        draw=lambda report, path: draw(report["rows"], report.fields, path),
        on_device=lambda request: request.device == "cuda",
    )


ALLREDUCE = _experiment("allreduce", "All-reduce: the sum of all on all.")
ALLGATHER = _experiment("allgather", "All-gather: the parts of all on all.")
REDUCE_SCATTER = _experiment("reduce_scatter", "Reduce-scatter: on each rank one part of the sum of all.")
ALLTOALL = _experiment("alltoall", "All-to-all: from each rank a part to each.")
BROADCAST = _experiment("broadcast", "Broadcast: what rank 0 has to all.")
REDUCE = _experiment("reduce", "Reduce: the sum of all on rank 0.")
GATHER = _experiment("gather", "Gather: the parts of all on rank 0.")
SCATTER = _experiment("scatter", "Scatter: from rank 0 a part to each.")


# -- in a rank ---------------------------------------------------------------------------------------------------------


def rank(task: CollectiveTask, job: str) -> None:
    run(task, job)


def run(task: CollectiveTask, job: str, before_op: Callable[[Any, str], None] | None = None) -> None:
    """Measure. `before_op(group, name)` is called before the ops of a turn of ftcomm, alike on all ranks."""
    rank = rank_of_environment()
    torch.set_num_threads(1)
    device = "cpu"
    if task.device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    library: Library
    try:
        if job == MPI_JOB:
            library = Mpi(task.ranks)
            rank = library.rank
        else:
            library = open_library(job, rank, task.ranks, task.folder, device)
        if isinstance(library, Ours):
            library.before_op = before_op
    except Exception as error:
        RankChannel(task.socket, job, rank, f"{type(error).__name__}: {error}")
        raise
    channel = RankChannel(task.socket, job, rank)
    for turn in channel.turns():
        channel.answer(_answer(library, turn, task, rank, device))
    library.close()


def _answer(library: Library, turn: BenchTurn, task: CollectiveTask, rank: int, device: str) -> TimedBlock:
    size = task.sizes[turn.size]
    name, _, wire = turn.library.partition(" ")
    pattern = Pattern(task.ranks, task.dtype, task.redop, coded=wire == FP8)
    case = Case(COLLECTIVES[task.collective], pattern, rank, size.count, turn.place, device)
    try:
        op = library.op(name, case, wire or None)
    except NotImplementedError as error:
        return TimedBlock(rank, error=str(error), refused=True)
    try:
        return _block(library, op, case, size, task, turn.library == "copy")
    except Exception as error:
        return TimedBlock(rank, error=f"rank {rank}: {type(error).__name__}: {error}"[:500])


def _block(library: Library, op: BoundCall, case: Case, size: Size, task: CollectiveTask, bare: bool) -> TimedBlock:
    times: list[int] = []
    elapsed = wrong = 0
    check = task.check and not bare
    feeds_on_itself = case.collective.name == "allreduce" and case.place == IN and not bare
    most = case.pattern.max_ops() - 1 - size.warmup if feeds_on_itself else size.iterations
    gc.collect()
    gc.disable()  # a collection in the middle would be charged to whoever runs
    try:
        while len(times) < size.iterations:
            timed = min(size.iterations - len(times), most)
            case.fill()
            library.begin()
            op()
            if check:
                wrong += case.wrong(1)
            if check and case.repeats:
                case.fill()  # before the ops to warm up: they are what all ranks meet in again
            for _ in range(size.warmup):
                op()
            new, whole = _time_on_gpu(library, op, timed, task.graph) if task.device == "cuda" else _time(op, timed)
            times += new
            elapsed += whole
            if check and (case.repeats or feeds_on_itself):
                wrong += case.wrong(1 + size.warmup + timed)
            library.end()
    finally:
        gc.enable()
    return TimedBlock(case.rank, times, elapsed, wrong)


def _time(op: BoundCall, timed: int) -> tuple[list[int], int]:
    stamps = [perf_counter_ns()]
    for _ in range(timed):
        op()
        stamps.append(perf_counter_ns())
    return [after - before for before, after in itertools.pairwise(stamps)], stamps[-1] - stamps[0]


def _time_on_gpu(library: Library, op: BoundCall, timed: int, graph: bool) -> tuple[list[int], int]:
    replay: Any = op
    if graph:
        captured = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(captured):
            op()
        replay = captured.replay
        library.begin()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    times = [round(1e6 * before.elapsed_time(after)) for before, after in itertools.pairwise(events)]
    return times, sum(times)
