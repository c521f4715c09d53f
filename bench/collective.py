"""`ftcomm bench allreduce` and its like: what is measured, and what comes of the timings of all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ftcomm.bench.collective_rank import Size, Task
from ftcomm.bench.collectives import COLLECTIVES, OUT, ROOT
from ftcomm.bench.data import FLOATS, INTEGERS, REDOPS, Pattern, item_size
from ftcomm.bench.limits import check_memory
from ftcomm.bench.peers import TRANSPORT, missing, ours, theirs
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import algbw, median, percentile, slowest
from ftcomm.bench.turns import Block, Gone, Refused, Turn, Turns
from ftcomm.collective.wire import FP8, unsupported_wire
from ftcomm.errors import SettingsError

RANK_MEMORY = 400 << 20  # bytes of a rank before any message: torch, and ftcomm's staging
MAX_RANKS = 16
GLOO_REDOPS = ("sum", "min", "max", "product")
GLOO_DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "int32", "int64", "uint8")
COPY = "copy"  # all ranks copy as many bytes at once: the bound
PATIENCE = 120.0  # s that a block may take, and as many as its bytes take at SLOWEST
SLOWEST = 20e6  # bytes a second and rank


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
class Request:
    """One sweep. `iterations` and `warmup` None: by size."""

    sizes: Sequence[int]  # bytes
    ranks: Sequence[int]
    dtype: str = "float32"
    redop: str = "sum"
    rounds: int = 5
    iterations: int | None = None
    warmup: int | None = None
    transports: Sequence[str] = ("auto",)
    compare: Sequence[str] = ()
    collective: str = "allreduce"
    device: str = "cpu"
    sms: Sequence[int] = ()
    check_results: bool = True
    graph: bool = False
    wires: Sequence[str] = ()

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
            raise SettingsError(f"--device cuda: its kernels all-reduce, and have no {self.collective} yet.")
        if self.wires and self.collective != "allreduce":
            raise SettingsError(f"--wire {self.wires[0]}: only an all-reduce has another form on the wire.")
        for wire in self.wires:
            reason = unsupported_wire(self.dtype, self.redop, wire)
            if reason is not None:
                raise SettingsError(f"--wire {wire}: {reason}")
            if wire == FP8 and self.device == "cuda":
                raise SettingsError(f"--wire {wire}: kernels of a GPU send elements as they are; add --device cpu.")
        if any(one < 1 for one in self.sms):
            raise SettingsError(f"--sms {min(self.sms)}: an all-reduce needs at least 1 to reduce with.")
        for ranks in self.ranks:
            if not 2 <= ranks <= MAX_RANKS:
                raise SettingsError(f"--ranks {ranks}: expected 2 to {MAX_RANKS}.")
            least = item_size(self.dtype) * (ranks if COLLECTIVES[self.collective].parts else 1)
            if min(self.sizes) < least:
                raise SettingsError(
                    f"{min(self.sizes)} bytes are less than one element of {self.dtype}"
                    + (" for each rank" if least > item_size(self.dtype) else "")
                    + "; raise -b."
                )
            jobs = len({one.job for one in self.contestants()})
            need = ranks * (jobs * RANK_MEMORY + (3 + ("atomic" in self.compare)) * max(self.sizes))
            check_memory(f"{ranks} ranks with messages of {format_size(max(self.sizes))}", need, "--ranks or -e")

    def contestants(self) -> list[Contestant]:
        """The bound first, then ours, the one that others are compared with first of these."""
        found: list[Contestant] = []
        for transport in self.transports:
            for sms in self.sms or (None,):
                env = (("FTCOMM_ENGINE", "cuda"),) if self.device == "cuda" else ()
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

    def task(self, ranks: int, folder: str) -> Task:
        most = Pattern(ranks, self.dtype, self.redop).max_ops()
        whole = item_size(self.dtype) * (ranks if COLLECTIVES[self.collective].parts else 1)
        sizes = []
        for size in self.sizes:
            iterations, warmup = _iterations(size)
            warmup = min(warmup if self.warmup is None else self.warmup, most - 2)
            count = size // whole * whole // item_size(self.dtype)
            sizes.append(Size(count * item_size(self.dtype), count, self.iterations or iterations, warmup))
        return Task(
            self.collective,
            ranks,
            self.dtype,
            self.redop,
            self.device,
            tuple(sizes),
            self.check_results,
            self.graph,
            folder,
        )


class Row(msgspec.Struct, frozen=True):
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
    rounds: int
    iterations: int  # in all rounds together
    time_us_p50: float | None
    time_us_p99: float | None
    time_us_mean: float | None  # of the whole loop, as nccl-tests has it
    algbw_gbps: float | None
    busbw_gbps: float | None
    limit_pct: float | None  # of the time: what the bytes that have to move take at the rate of a copy of this size
    wrong: int  # elements, over all ranks and checks
    round_us: list[float]  # median of each round
    ratio: float | None  # time over the first ftcomm's, median over rounds; None for that one
    round_ratio: list[float]
    sms: int | None = None
    wire: str | None = None
    error: str = ""


def rows(
    blocks: Mapping[Contestant, Sequence[Sequence[Block]]],
    errors: Mapping[Contestant, str],
    task: Task,
    size: Size,
    place: str,
) -> list[Row]:
    """Of one size and place: contestant -> for each round the ranks' blocks; a row each but for the bound."""
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
            found.append(
                Row(
                    **fields,
                    rounds=0,
                    iterations=0,
                    time_us_p50=None,
                    time_us_p99=None,
                    time_us_mean=None,
                    algbw_gbps=None,
                    busbw_gbps=None,
                    limit_pct=None,
                    wrong=0,
                    round_us=[],
                    ratio=None,
                    round_ratio=[],
                    error=errors.get(who, "not measured"),
                )
            )
            continue
        p50 = median(medians[who])
        ratios = [a / b for a, b in zip(medians[who], medians.get(first, []), strict=False)] if who != first else []
        limits = [100 * share * a / b for a, b in zip(bound, medians[who], strict=False)]
        bandwidth = algbw(size.bytes, p50 / 1e6)
        found.append(
            Row(
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


async def measure(
    request: Request,
    on_rows: Callable[[list[Row]], None],
    progress: Callable[[str, float], None],
    say: Callable[[str], None],
) -> None:
    """Start all libraries, and hand over the rows of one size, a row a library and place, when they are measured.

    `progress(words, fraction)` is called before each turn, `say(line)` for each peer that is left out. A library that
    fails has rows that say so, and the rest goes on. No process is left, whether this returns, raises or is cancelled.
    """
    for number, ranks in enumerate(request.ranks):
        contestants = []
        for who in request.contestants():
            why = missing(who.job, request.device, ranks)
            if why is None:
                contestants.append(who)
            else:
                say(f"# {why}")

        def part(words: str, fraction: float, number: int = number) -> None:
            progress(words, (number + fraction) / len(request.ranks))

        with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
            task = request.task(ranks, folder)
            (Path(folder) / "task.json").write_bytes(msgspec.json.encode(task))
            async with Turns(Path(task.socket)) as turns, _Contest(turns, task) as contest:
                await contest.start(contestants)
                await contest.run(request.rounds, on_rows, part)


class _Contest:
    """All libraries with one number of ranks."""

    def __init__(self, turns: Turns, task: Task) -> None:
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

    async def start(self, contestants: Sequence[Contestant]) -> None:
        self._contestants = list(contestants)
        task, module = self._task, "ftcomm.bench.collective_rank"
        jobs = {who.job: who for who in contestants}
        for name, who in jobs.items():
            args = (f"{task.folder}/task.json", name)
            if name.startswith("ftcomm"):
                context = ours(task.ranks, module, args, who.transport, dict(who.env), **dict(who.options))
            else:
                context = theirs(name, task.ranks, module, args, task.folder)
            self._stacks[name] = contextlib.AsyncExitStack()
            self._jobs[name] = await self._stacks[name].enter_async_context(context)
        for name, job in self._jobs.items():
            try:
                await self._turns.expect(name, task.ranks, job)
            except Gone as gone:
                await self._lose(name, str(gone))

    async def run(
        self, rounds: int, on_rows: Callable[[list[Row]], None], progress: Callable[[str, float], None]
    ) -> None:
        task = self._task
        for index, size in enumerate(task.sizes):
            for place in COLLECTIVES[task.collective].places:
                blocks: dict[Contestant, list[list[Block]]] = {who: [] for who in self._contestants}
                errors = dict(self._errors)  # and those that do not have this op, but others
                for number in range(rounds):
                    progress(
                        f"{task.ranks} ranks, {format_size(size.bytes)}", (index + number / rounds) / len(task.sizes)
                    )
                    for who in self._contestants:
                        if who not in errors:
                            await self._turn(who, Turn(who.op, index, place), size, blocks[who], errors)
                on_rows(rows({who: b for who, b in blocks.items() if who not in errors}, errors, task, size, place))

    async def _turn(
        self, who: Contestant, turn: Turn, size: Size, into: list[list[Block]], errors: dict[Contestant, str]
    ) -> None:
        ops = size.iterations + size.warmup + 2
        patience = PATIENCE + math.ceil(ops * size.bytes * self._task.ranks / SLOWEST)
        try:
            into.append(await self._turns.turn(who.job, turn, patience, self._jobs[who.job]))
        except Refused as refused:
            errors[who] = str(refused)
        except Gone as gone:
            await self._lose(who.job, str(gone))
            errors.update(self._errors)

    async def _lose(self, job: str, why: str) -> None:
        """What hangs may well do so on a core that the others need."""
        await self._stacks[job].aclose()
        self._errors.update({who: why for who in self._contestants if who.job == job})


def _iterations(size: int) -> tuple[int, int]:
    """-> (timed ops, ops before them) in a block: about a second for the slowest peer known, at any size."""
    if size <= 64 << 10:
        return 100, 5
    if size <= 4 << 20:
        return 40, 3
    return 10, 1
