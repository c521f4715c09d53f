"""`ftcomm bench`: what it costs, and what a failure costs. Heavy modules are imported by the command that runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftcomm.bench.sizes import parse_size, sweep
from ftcomm.errors import SettingsError

if TYPE_CHECKING:
    from ftcomm.bench.allreduce import Row

SMOKE_SIZES = ("1K", "1M")


@click.group()
def bench() -> None:
    """Measure ftcomm on this machine, beside what else there is."""


class SizeType(click.ParamType):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except SettingsError as error:
            self.fail(str(error), param, ctx)


class ListType(click.ParamType):
    """Values of one kind with commas between them."""

    def __init__(self, kind: click.ParamType, name: str) -> None:
        self.kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self.kind.convert(part.strip(), param, ctx) for part in str(value).split(","))


SIZE = SizeType()
json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write header and rows to this file."
)
transport_option = click.option(
    "--transport", type=click.Choice(["auto", "shm", "tcp"]), default="auto", show_default=True, help="Of ftcomm."
)


@bench.command()
@click.option("-b", "--minbytes", type=SIZE, default="1K", show_default=True, help="Smallest array, in bytes, K, M, G.")
@click.option("-e", "--maxbytes", type=SIZE, default="64M", show_default=True, help="Largest array.")
@click.option("-f", "--stepfactor", type=int, help="Factor between sizes.  [default: 4]")
@click.option("-i", "--stepbytes", type=SIZE, help="Step between sizes, instead of a factor.")
@click.option("--sizes", type=ListType(SIZE, "SIZE,..."), help="These sizes, instead of -b -e -f -i.")
@click.option("-n", "--iters", type=int, help="Timed ops in a round.  [default: 100 to 10, by size]")
@click.option("-w", "--warmup_iters", type=int, help="Ops before them.  [default: 5 to 1, by size]")
@click.option("-d", "--datatype", default="float32", show_default=True, help="Type of the elements.")
@click.option("-o", "--op", "redop", default="sum", show_default=True, help="sum, avg, min, max or product.")
@click.option("--ranks", type=ListType(click.INT, "N,..."), default="2", show_default=True, help="Processes.")
@transport_option
@click.option(
    "--compare",
    type=ListType(click.Choice(["gloo", "atomic"]), "[gloo,atomic]"),
    default=(),
    help="Measure these beside it; atomic: ftcomm with atomic=True, for the price of the copy.",
)
@click.option("--rounds", type=int, default=5, show_default=True, help="So many times ftcomm, peer.")
@json_option
@click.option("--smoke", is_flag=True, help=f"A few ops at {' and '.join(SMOKE_SIZES)}, to see that it runs.")
def allreduce(
    *,
    minbytes: int,
    maxbytes: int,
    stepfactor: int | None,
    stepbytes: int | None,
    sizes: tuple[int, ...] | None,
    iters: int | None,
    warmup_iters: int | None,
    datatype: str,
    redop: str,
    ranks: tuple[int, ...],
    transport: str,
    compare: tuple[str, ...],
    rounds: int,
    json_file: Path | None,
    smoke: bool,
) -> None:
    """All-reduce in place on CPU tensors; the flags and columns of nccl-tests.

    Time is of the slowest rank of each op; p50 is the median over rounds of the rounds' medians, p99 of all ops. The
    ratio is taken within each round, where both ran in the same second, and its median is shown: a machine that changes
    its speed for minutes at a time does not change it. The result of every round is checked; #wrong counts elements.
    """
    from ftcomm.bench.allreduce import Request, measure
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.table import footer, heading, line

    if stepfactor is None and stepbytes is None:
        stepfactor = 4
    wanted = sizes or sweep(minbytes, maxbytes, factor=stepfactor, step=stepbytes)
    if smoke:
        wanted, rounds, iters = [parse_size(size) for size in SMOKE_SIZES], 1, 5
    request = Request(wanted, ranks, datatype, redop, rounds, iters, warmup_iters, transport, compare)
    request.check()
    fields = header()
    rows: list[Row] = []
    with _written(json_file, {"header": fields, "rows": rows}), Watch() as watch:
        for text in (*header_lines(fields), *heading(compare)):
            watch.line(text)

        def on_rows(new: list[Row]) -> None:
            rows.extend(new)
            watch.line(line(new))

        _run(measure(request, on_rows, watch.update))
    wrong = sum(row.wrong for row in rows)
    click.echo(footer(wrong))
    if wrong:
        raise click.exceptions.Exit(1)


@bench.command()
@click.option("--replicas", type=int, default=4, show_default=True, help="Processes; one of them is killed each time.")
@click.option("--size", type=SIZE, default="64M", show_default=True, help="Array of the all-reduce (fp32).")
@click.option("--kills", type=int, default=20, show_default=True, help="SIGKILLs, a replica after the other.")
@transport_option
@click.option("--seed", type=int, default=0, show_default=True, help="Of the points in an op at which they come.")
@json_option
@click.option("--smoke", is_flag=True, help="Two kills of three replicas at 4M, to see that it runs.")
def recovery(
    *, replicas: int, size: int, kills: int, transport: str, seed: int, json_file: Path | None, smoke: bool
) -> None:
    """Kill a replica inside an all-reduce, and time what the others do.

    Replicas under the launcher run all-reduces back to back. One is stopped, seen to be in the middle of an op, and
    killed with SIGKILL. Counted from there: `detect` until the coordinator has decided on the view without it, `stall`
    until that very op has returned on the last survivor, with the time that the op usually takes beside it, `rejoin`
    until the restarted replica contributes again; then the next is killed. Results are compared by their SHA-256, and
    every element with the sums that there can be. Exits with 1 if an op was lost, or its bytes were not equal or wrong.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.recovery import Event, Request, measure, summarize
    from ftcomm.bench.table import event_heading, event_line, summary_lines

    request = Request(3, 4 << 20, 2, transport, seed) if smoke else Request(replicas, size, kills, transport, seed)
    request.check()
    fields = header()
    events: list[Event] = []
    result: dict[str, Any] = {"header": fields, "request": request, "events": events}
    with _written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), *event_heading()):
            watch.line(text)

        def on_event(event: Event) -> None:
            events.append(event)
            result["summary"] = summarize(events)
            watch.line(event_line(event))

        _run(measure(request, on_event, watch.update))
    summary = summarize(events)
    for text in summary_lines(summary):
        click.echo(text)
    if summary.wrong or summary.steps_lost or summary.equal < summary.kills:
        raise click.exceptions.Exit(1)


@bench.command()
@click.option("--replicas", type=int, default=4, show_default=True, help="What is lost as one.")
@click.option("--ranks-per-replica", type=int, default=2, show_default=True, help="Processes of each.")
@click.option("--compute", type=float, default=50.0, show_default=True, help="Milliseconds of computing in a step.")
@click.option("--size", type=SIZE, default="4M", show_default=True, help="Array of the all-reduce of a step (fp32).")
@click.option("--memory", type=SIZE, default="256M", show_default=True, help="Of each rank's model, torch not counted.")
@click.option("--kills", type=int, default=100, show_default=True, help="SIGKILLs, one rank after the other.")
@transport_option
@click.option("--seed", type=int, default=0, show_default=True, help="Of the points in a step at which they come.")
@json_option
@click.option("--smoke", is_flag=True, help="Two kills of two replicas, to see that it runs.")
def detection(
    *,
    replicas: int,
    ranks_per_replica: int,
    compute: float,
    size: int,
    memory: int,
    kills: int,
    transport: str,
    seed: int,
    json_file: Path | None,
    smoke: bool,
) -> None:
    """Kill ranks of a training anywhere in its steps, and time until the coordinator knows.

    Counted from the call of kill(2): `detect` until the coordinator has heard of the loss, `view` until it has decided
    on the view without the replica and has that on the disk. Everything that lies between is counted: that the victim
    gets a core to die on, that the one who notices gets one to say so. The next kill comes when all train again.
    """
    from ftcomm.bench.detection import Event, Request, measure, summarize
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.table import detection_heading, detection_line, detection_summary

    request = Request(replicas, ranks_per_replica, size, compute, memory, kills, transport, seed)
    if smoke:
        request = Request(2, 2, 1 << 20, 5.0, 8 << 20, 2, transport, seed)
    request.check()
    fields = header()
    events: list[Event] = []
    result: dict[str, Any] = {"header": fields, "request": request, "events": events}
    with _written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), *detection_heading()):
            watch.line(text)

        def on_event(event: Event) -> None:
            events.append(event)
            result["summary"] = summarize(events)
            watch.line(detection_line(event))

        _run(measure(request, on_event, watch.update))
    for text in detection_summary(summarize(events)):
        click.echo(text)


@bench.command()
@click.option("--width", type=int, default=512, show_default=True, help="Of the transformer; with 8 layers 25 M.")
@click.option("--layers", type=int, default=8, show_default=True)
@click.option("--batch", type=int, default=2, show_default=True, help="Sequences of 64 bytes of a replica in a step.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Libraries take turns; 0: compare no steps.")
@click.option("-n", "--iters", type=int, default=4, show_default=True, help="Timed steps of a library in a round.")
@click.option("--replicas", type=int, default=4, show_default=True, help="Of the training that is disturbed.")
@click.option("--steps", type=int, default=40, show_default=True, help="Undisturbed, then killed; 0: no kills.")
@click.option("--kill-every", type=int, default=10, show_default=True, help="Steps between two SIGKILLs.")
@click.option(
    "--compare", type=ListType(click.STRING, "LIBRARY,..."), default="gloo", show_default=True, help="gloo, torchft."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the points in a step at which kills come.")
@json_option
@click.option("--smoke", is_flag=True, help="A tiny model and one kill, to see that it runs.")
def train(
    *,
    width: int,
    layers: int,
    batch: int,
    rounds: int,
    iters: int,
    replicas: int,
    steps: int,
    kill_every: int,
    compare: tuple[str, ...],
    seed: int,
    json_file: Path | None,
    smoke: bool,
) -> None:
    """Time steps of DDP beside gloo, then kill replicas of a training and see what is left of its pace.

    First two ranks: whole steps, forward to update, of one model, each library in turn. "none" exchanges nothing. Then
    replicas under the step loop: so many steps undisturbed, and as many in which one of them gets SIGKILL every few
    steps, anywhere in a step, and is started again. With --compare torchft its lighthouse and gloo do the same. Exits
    with 1 if the weights were not equal on all in the end.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.train import (
        KillRow,
        Request,
        StepRow,
        kill_heading,
        kill_line,
        measure,
        step_heading,
        step_line,
        torchft_missing,
    )

    request = Request(width, layers, batch, rounds, iters, replicas, steps, kill_every, compare, seed)
    if smoke:
        request = Request(16, 1, 1, 1, 2, 2, 20, 20, compare, seed)
    request.check()
    fields = header()
    step_rows: list[StepRow] = []
    kill_rows: list[KillRow] = []
    result = {"header": fields, "request": request, "steps": step_rows, "kills": kill_rows}
    with _written(json_file, result), Watch() as watch:
        for text in header_lines(fields):
            watch.line(text)
        if "torchft" in compare and (missing := torchft_missing()) is not None:
            watch.line(f"# {missing}")

        def on_step(row: StepRow) -> None:
            if not step_rows:
                watch.line(step_heading())
            step_rows.append(row)
            watch.line(step_line(row))

        def on_kills(row: KillRow) -> None:
            if not kill_rows:
                watch.line(kill_heading())
            kill_rows.append(row)
            watch.line(kill_line(row))

        _run(measure(request, on_step, on_kills, watch.update))
    if any(row.equal is False for row in kill_rows):
        raise click.exceptions.Exit(1)


@bench.command()
@click.option("--replicas", type=int, default=3, show_default=True, help="Processes; one is killed and comes back.")
@click.option("--size", type=SIZE, default=400_000_000, help="Of weights and moments, in bytes.  [default: 400 MB]")
@click.option("--batch", type=int, default=256, show_default=True, help="Samples of a step: how long it takes.")
@click.option("--rejoins", type=int, default=3, show_default=True, help="One replica after the other.")
@click.option("--mbps", type=float, help="Throttle of the sources.  [default: none]")
@json_option
@click.option("--smoke", is_flag=True, help="One return of one of two replicas with 40 MB, to see that it runs.")
def rejoin(
    *, replicas: int, size: int, batch: int, rejoins: int, mbps: float | None, json_file: Path | None, smoke: bool
) -> None:
    """Kill a training replica, and see what the others notice of its return.

    `transfer` is what its state took to arrive, of weights and AdamW's moments, while all trained on; `stall` for how
    long the loop of a healthy replica stood still for the copy that it serves, the worst of them, and that beside one
    of its steps. The steps are those of the healthy replicas: with all, without the one, and while it catches up; it
    computes then as they do, so on few cores they share those with it; the longest of all these. Exits with 1 above a
    tenth of a step.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.rejoin import TARGET, Rejoin, Request, footer, heading, line, measure

    request = Request(2, 40_000_000, 32, 1, mbps) if smoke else Request(replicas, size, batch, rejoins, mbps)
    request.check()
    fields = header()
    found: list[Rejoin] = []
    with _written(json_file, {"header": fields, "request": request, "rejoins": found}), Watch() as watch:
        for text in (*header_lines(fields), *heading()):
            watch.line(text)

        def on_rejoin(new: Rejoin) -> None:
            found.append(new)
            watch.line(line(new))

        _run(measure(request, on_rejoin, watch.update))
    click.echo(footer(found))
    if not smoke and max(one.share for one in found) > TARGET:
        raise click.exceptions.Exit(1)


class CapType(click.ParamType):
    """A number, or all: None."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        return None if value == "all" else click.INT.convert(value, param, ctx)


@bench.command()
@click.option("--kernels", "names", type=ListType(click.STRING, "NAME,..."), help="Only these.  [default: all]")
@click.option("-b", "--minbytes", type=SIZE, help="Smallest array.  [default: 64M; without a GPU 64K]")
@click.option("-e", "--maxbytes", type=SIZE, help="Largest array.  [default: 1G; without a GPU 64K]")
@click.option("-f", "--stepfactor", type=int, default=4, show_default=True, help="Factor between sizes.")
@click.option(
    "-d", "--datatypes", type=ListType(click.STRING, "TYPE,..."), default="bfloat16,float32", show_default=True
)
@click.option("-o", "--op", "redop", default="sum", show_default=True, help="sum, avg, min, max or product.")
@click.option("--sources", type=ListType(click.INT, "W,..."), default="2,4,8", show_default=True, help="Of reductions.")
@click.option("--sms", type=ListType(CapType(), "N,..."), default="all", show_default=True, help="Most blocks; all.")
@click.option("-n", "--iters", type=int, help="Timed calls of a point.  [default: 100 or 30, by size]")
@click.option("-w", "--warmup_iters", type=int, help="Calls before them.  [default: 20 or 10, by size]")
@click.option("--hot", is_flag=True, help="Do not flush the cache before each call.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the rows to this file.")
@json_option
def kernels(
    *,
    names: tuple[str, ...] | None,
    minbytes: int | None,
    maxbytes: int | None,
    stepfactor: int,
    datatypes: tuple[str, ...],
    redop: str,
    sources: tuple[int, ...],
    sms: tuple[int | None, ...],
    iters: int | None,
    warmup_iters: int | None,
    hot: bool,
    csv_file: Path | None,
    json_file: Path | None,
) -> None:
    """Copy, reduce and quantise on one GPU: time, bytes moved a second, and that beside a copy in the same run.

    "% copy" is of the best copy of that size, the CUDA runtime's (memcpy) included; "% same blocks" of the copy with
    the same --sms. What is written is compared with the host's, bit for bit, at both ends and in the middle; #wrong
    counts elements. Without a GPU Triton's interpreter runs the kernels, and there are no speeds: those would be its
    own.
    """
    import torch

    from ftcomm.bench.header import device_fields, device_lines, header, header_lines
    from ftcomm.bench.kernels import KERNELS, Request, Row, measure
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.table import footer, kernel_heading, kernel_line

    there = torch.cuda.is_available()
    if not there:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    first = minbytes or (64 << 20 if there else 64 << 10)
    sizes = sweep(first, maxbytes or max(first, 1 << 30 if there else 64 << 10), factor=stepfactor)
    request = Request(sizes, names or KERNELS, datatypes, redop, sources, sms, iters, warmup_iters, hot)
    request.check()
    fields = {**header(), **device_fields()}
    rows: list[Row] = []
    with _written(json_file, {"header": fields, "rows": rows}), _written_csv(csv_file, rows, Row), Watch() as watch:
        for text in (*header_lines(fields), *device_lines(fields), *kernel_heading()):
            watch.line(text)

        def on_row(new: Row) -> None:
            rows.append(new)
            watch.line(kernel_line(new))

        try:
            measure(request, on_row, watch.update)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
    wrong = sum(row.wrong for row in rows)
    click.echo(footer(wrong))
    if wrong:
        raise click.exceptions.Exit(1)


@bench.command("gpu-check")
@json_option
def gpu_check(*, json_file: Path | None) -> None:
    """All that needs a GPU, in less than eight minutes: tests, sanitizer, benches, each with a deadline.

    Run it on a machine with a GPU, from the source tree, whose tests it runs. It goes on when a part fails; the exit
    code is 1 if any did, and the JSON, which is written after each part, says how.
    """
    import signal

    import torch

    from ftcomm.bench.gpu_check import IN_ALL, Outcome, check, failed, outcome_lines, stages
    from ftcomm.bench.header import device_fields, device_lines, header, header_lines
    from ftcomm.bench.progress import Watch

    if not torch.cuda.is_available():
        raise SettingsError(
            f"gpu-check needs a GPU that torch can use, and torch {torch.__version__} finds none. Run it on a machine "
            "with an NVIDIA GPU and driver and a torch for CUDA; without one, pytest tests/kernels runs the same "
            "kernels in Triton's interpreter."
        )
    fields = {**header(), **device_fields()}
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who is told to end writes what there is, too
    result = {"header": fields, "stages": outcomes}
    with _written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), *device_lines(fields)):
            watch.line(text)

        def on_outcome(outcome: Outcome) -> None:
            outcomes.append(outcome)
            for text in outcome_lines(outcome):
                watch.line(text)
            if json_file is not None:
                _write(json_file, result)

        try:
            check(stages(torch.cuda.get_device_capability()), IN_ALL, on_outcome, watch.update)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None
    if failed(outcomes):
        raise click.exceptions.Exit(1)


def _run(measurement: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(measurement)
    except KeyboardInterrupt:  # all processes are gone by now
        raise click.exceptions.Exit(130) from None


@contextlib.contextmanager
def _written(path: Path | None, result: dict[str, Any]) -> Iterator[None]:
    """Write the JSON however the block ends: what was measured before Ctrl-C or a crash is worth keeping."""
    if path is None:
        yield
        return
    _touch("--json", path)
    try:
        yield
    finally:
        _write(path, result)


def _write(path: Path, result: dict[str, Any]) -> None:
    import msgspec

    path.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


@contextlib.contextmanager
def _written_csv(path: Path | None, rows: list[Any], kind: type[Any]) -> Iterator[None]:
    """The rows, structs of one `kind`, a line each; likewise."""
    import csv

    if path is None:
        yield
        return
    _touch("--csv", path)
    try:
        yield
    finally:
        names = kind.__struct_fields__
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows([getattr(row, name) for name in names] for row in rows)


def _touch(option: str, path: Path) -> None:
    """Find out before anything is measured."""
    try:
        path.touch()
    except OSError as error:
        raise SettingsError(f"{option} {path}: {error.strerror}; choose a file that you can write to.") from None
