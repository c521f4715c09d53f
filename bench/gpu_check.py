"""`ftcomm bench gpu-check`: all that needs a GPU, in one command of bounded time.

A list of stages, each a process of its own with its own deadline and its own outcome, so that one which hangs, or takes
the CUDA context down with it, costs its own time and no more. What has been found out is written after every stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from ftcomm.bench.harness import BenchReport, Experiment, Table, option
from ftcomm.errors import SettingsError
from ftcomm.launch.commands.option_types import Several

IN_ALL = 540.0  # seconds
_GRACE = 5.0  # for a process that is told to end, and again for one that is killed
_TAIL = 200  # lines of what it wrote
_JSON = ("{", "[{")  # a line that begins so is a result
_TESTS = Path(__file__).parents[1] / "tests"  # only in a source tree

OK, FAILED, ABSENT, TIMED_OUT, INTERRUPTED = "ok", "failed", "absent", "timed out", "interrupted"


@dataclasses.dataclass(frozen=True)
class GpuStage:
    """`{json}` in the command stands for a file into which it writes its result."""

    name: str
    command: Sequence[str]
    seconds: float  # its deadline
    needs: Sequence[str] = ()  # files, programs on the path, and modules of Python
    environment: tuple[tuple[str, str], ...] = ()

    def missing(self) -> str | None:
        """The first of `needs` that is not there."""
        return next((need for need in self.needs if not _there(need)), None)


class StageOutcome(msgspec.Struct, frozen=True):
    stage: str
    outcome: str
    seconds: float
    code: int | None = None  # of the process; negative: the signal that ended it
    said: list[str] = []  # what it wrote last, or what is missing
    result: Any = None  # its own JSON


@dataclasses.dataclass(frozen=True)
class GpuCheckRequest:
    """All that needs a GPU, in stages: tests, sanitizer, benches, each with a deadline.

    Run it on a machine with a GPU, from the source tree, whose tests it runs. It goes on when a stage fails; the exit
    code is 1 if any did, and the JSON, which is written after each stage, says how. Stages for which no time is left
    are named at the end, to be given to --stages.
    """

    names: Sequence[str] = option(
        (),
        "--stages",
        kind=Several(click.STRING, "NAME,..."),
        help="These alone, in this order; --stages list names all.",
    )
    seconds: float = option(IN_ALL, "--for", kind=click.FloatRange(1), help="Seconds that it may take.")

    @property
    def stages(self) -> list[GpuStage]:
        """The stages that are asked for. Raises `SettingsError` for an unknown one."""
        known = {stage.name: stage for stage in stages()}
        for name in self.names:
            if name not in known:
                raise SettingsError(f"--stages: there is no stage {name!r}; they are {', '.join(known)}")
        return [known[name] for name in self.names or known]

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, where there is no GPU. Ends where the stages are to be named alone."""
        if tuple(self.names) == ("list",):
            for stage in stages():
                click.echo(f"{stage.name:>20}  at most {stage.seconds:g} s")
            raise click.exceptions.Exit(0)
        import torch

        if self.stages and not torch.cuda.is_available():
            raise SettingsError(
                f"gpu-check needs a GPU that torch can use, and torch {torch.__version__} finds none. Run it on a "
                "machine with an NVIDIA GPU and driver and a torch for CUDA; without one, pytest tests/kernels runs "
                "the same kernels in Triton's interpreter."
            )


def stages() -> list[GpuStage]:
    """Returns the stages in order of worth: what comes last may find no time left, and is begun by its name the next
    time."""
    python = sys.executable
    bench = (python, "-m", "ftcomm.cli", "bench")
    # By a thread, since a test that hangs in a call of CUDA sees no signal; and the stacks before that.
    pytest = (python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "timeout_method=thread")
    pytest = (*pytest, "-o", "faulthandler_timeout=40")

    source = str(_TESTS / "gpu")

    def tests(name: str, seconds: float, *arguments: str, **environment: str) -> GpuStage:
        asked = {"FTCOMM_TESTS_NEED_GPU": "1", **environment}
        return GpuStage(name, (*pytest, *arguments), seconds, (source, "pytest"), tuple(asked.items()))

    def jobs(name: str, seconds: float, *arguments: str) -> GpuStage:
        """Tests of jobs with one rank a process, which need not load all kernels at the start, each of them in turn."""
        return tests(name, seconds, *arguments, CUDA_MODULE_LOADING="LAZY")

    def module(name: str, seconds: float, module: str, *arguments: str) -> GpuStage:
        return GpuStage(name, (python, "-m", f"tests.gpu.{module}", *arguments), seconds, (source,))

    def gpu(file: str) -> str:
        return str(_TESTS / "gpu" / file)

    # One op of each kernel, on arrays that end in the middle of a tile, with memory that is not pooled, so that an
    # access behind the end of an array is one behind the end of an allocation.
    sanitizer = ("compute-sanitizer", "--error-exitcode", "99", "--report-api-errors", "no", "--tool")
    small = (*bench, "kernels", "-b", "100002", "-e", "100002", "--sources", "2,3,8", "-n", "1", "-w", "0", "--hot")
    small = (*small, "-d", "bfloat16")
    bare = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    allreduce, processes = gpu("test_allreduce_gpu.py"), gpu("test_processes_gpu.py")
    by_ipc, one_kill = "by_ipc and not 1000003", "killed and gpu-kernel-auto-1000"
    return [
        module("facts", 160, "facts", "--json", "{json}"),
        module("warm", 100, "warm"),
        tests("two ranks", 60, "-x", allreduce, "-k", "2-float32"),
        tests("eight ranks", 110, allreduce, "-k", "not 2-float32"),
        tests("collectives", 100, gpu("test_collectives_gpu.py")),
        module("bench all-reduce", 60, "bench_allreduce"),
        jobs("eight processes", 90, processes, "-k", by_ipc),
        jobs("one of eight killed", 90, processes, "-k", one_kill),
        GpuStage("bench kernels", (*bench, "kernels", "--sms", "4,8,16,all", "--json", "{json}"), 110),
        tests("graphs", 60, gpu("test_graph.py")),
        tests("copies", 60, gpu("test_copies_gpu.py"), gpu("test_slots_gpu.py")),
        tests("arrays", 60, gpu("test_arrays.py"), gpu("test_device_arrays_gpu.py")),
        tests("reducer", 100, gpu("test_reducer_gpu.py"), "-n", "8"),
        tests("kernels", 150, str(_TESTS / "kernels"), f"--ignore={_TESTS}/kernels/test_compiled.py", "-n", "12"),
        jobs("processes", 300, processes, "-k", f"not ({by_ipc}) and not ({one_kill})"),
        GpuStage("memcheck", (*sanitizer, "memcheck", *small), 90, ("compute-sanitizer",), bare),
        GpuStage("racecheck", (*sanitizer, "racecheck", *small), 90, ("compute-sanitizer",), bare),
    ]


def check(
    stages: Sequence[GpuStage],
    in_all: float,
    on_outcome: Callable[[StageOutcome], None],
    progress: Callable[[str, float], None],
) -> None:
    """Run one after the other, each until its deadline or that of all. Ctrl-C ends the one that runs, and is raised."""
    end = time.monotonic() + in_all
    for i, stage in enumerate(stages):
        progress(stage.name, i / len(stages))
        began = time.monotonic()
        missing = stage.missing()
        if missing is not None:
            on_outcome(StageOutcome(stage.name, ABSENT, 0.0, said=[f"{missing} is not there"]))
        elif end - began < 1:
            on_outcome(StageOutcome(stage.name, TIMED_OUT, 0.0, said=["no time was left to begin it"]))
        else:
            try:
                outcome = _run(stage, min(stage.seconds, end - began), on_outcome)
            except OSError as error:  # no disk, no memory, no process: the next stage may do with less
                outcome = StageOutcome(stage.name, FAILED, round(time.monotonic() - began, 1), said=[str(error)])
            on_outcome(outcome)


def _run(stage: GpuStage, seconds: float, on_outcome: Callable[[StageOutcome], None]) -> StageOutcome:
    """Raises `OSError` if it cannot be begun."""
    from ftcomm.engines.gpu.probe import ENVIRONMENT

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ftcomm-gpu-check-", ignore_cleanup_errors=True) as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [str(result) if part == "{json}" else part for part in stage.command]

        def outcome(kind: str, code: int | None) -> StageOutcome:
            lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
            found = _decoded(result, lines)
            said = [line for line in lines if not line.startswith(_JSON)]
            return StageOutcome(stage.name, kind, round(time.monotonic() - began, 1), code, said, found)

        # PyTorch, when it has looked for a GPU, leaves what it prefers in the environment of this process.
        environment = {**os.environ, **ENVIRONMENT, **dict(stage.environment)}
        environment.pop("TRITON_INTERPRET", None)
        try:
            with log.open("wb") as file, _process(command, environment, file) as process:
                code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return outcome(TIMED_OUT, None)
        except KeyboardInterrupt:
            on_outcome(outcome(INTERRUPTED, None))
            raise
        return outcome(FAILED if code else OK, code)


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own. If it has not ended, the group is told to, so that it can write what it
    has, and is then killed. One that the driver keeps even then is left behind."""
    process = subprocess.Popen(
        command,
        cwd=_TESTS.parent,  # the stages' modules are found there
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        try:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_GRACE)


def _decoded(path: Path, lines: list[str]) -> Any:
    """The file that it was given, or a line of JSON that it wrote; None if neither is whole."""
    there = path.exists()
    text = path.read_bytes() if there else next((line for line in lines if line.startswith(_JSON)), "").encode()
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text)
    return None


def _there(need: str) -> bool:
    if "/" in need:
        return Path(need).exists()
    return shutil.which(need) is not None or importlib.util.find_spec(need.replace("-", "_")) is not None


def outcome_lines(outcome: StageOutcome) -> str:
    """Returns lines for the table: the figures, or what it said last if it went wrong."""
    line = f" {outcome.stage:>16} {outcome.outcome:>12} {outcome.seconds:>8.1f} s"
    if outcome.outcome != OK:
        return "\n".join([line, *(f"    | {text}" for text in outcome.said[-12:])])
    if outcome.result is None:
        return f"{line}  {' '.join(outcome.said[-1:])[:100]}".rstrip()
    return "\n".join([line, *(f"    {text}" for text in _figures(outcome.result))])


_SHOWN = ("kernel", "name", "dtype", "kind", "sources", "bytes", "gbps", "of_best_copy", "us", "p99", "limit", "target")


def _figures(result: Any) -> Iterator[str]:
    """The rows of a bench that are not about a cap on blocks."""
    rows = result.get("rows", []) if isinstance(result, dict) else result
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and row.get("sms") is None and {"gbps", "us"} & row.keys():
            shown = {name: row[name] for name in _SHOWN if row.get(name) is not None}
            yield " ".join(f"{name}={x:.4g}" if isinstance(x, float) else f"{name}={x}" for name, x in shown.items())


def measure(request: GpuCheckRequest, report: BenchReport) -> None:
    def on_outcome(outcome: StageOutcome) -> None:
        report.add(outcome)
        try:
            report.save()
        except OSError as error:  # the next stage may leave room; what was written before is whole
            report.line(f"    the JSON is not written: {error}")

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a check that is told to end writes what there is, too
    check(request.stages, request.seconds, on_outcome, report.progress)


def failed(outcomes: Sequence[StageOutcome]) -> bool:
    """Whether anything that was there to be run did not pass."""
    return any(outcome.outcome not in (OK, ABSENT) for outcome in outcomes)


def _footer(report: BenchReport) -> list[str]:
    unbegun = [outcome.stage for outcome in report["stages"] if outcome.outcome == TIMED_OUT and not outcome.seconds]
    again = f"ftcomm bench gpu-check --stages '{','.join(unbegun)}'"
    return [f"No time was left for some. Run them by: {again}"] if unbegun else []


EXPERIMENT = Experiment(
    "gpu-check",
    GpuCheckRequest,
    measure,
    [Table("stages", StageOutcome, line=outcome_lines)],
    footer=_footer,
    good=lambda report: not failed(report["stages"]),
    on_device=lambda request: True,
)
