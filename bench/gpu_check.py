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

import msgspec

IN_ALL = 540.0  # seconds
_GRACE = 5.0  # for a process that is told to end; then it is killed
_TAIL = 60  # lines of what it wrote
_JSON = ("{", "[{")  # a line that begins so is a result
_TESTS = Path(__file__).parents[1] / "tests"  # only in a source tree

OK, FAILED, ABSENT, TIMED_OUT, INTERRUPTED = "ok", "failed", "absent", "timed out", "interrupted"


@dataclasses.dataclass(frozen=True)
class Stage:
    """`{json}` in the command stands for a file into which it writes its result."""

    name: str
    command: Sequence[str]
    seconds: float  # its deadline
    needs: Sequence[str] = ()  # files, programs on the path, and modules of Python
    environment: tuple[tuple[str, str], ...] = ()

    def missing(self) -> str | None:
        """The first of `needs` that is not there."""
        return next((need for need in self.needs if not _there(need)), None)


class Outcome(msgspec.Struct, frozen=True):
    stage: str
    outcome: str
    seconds: float
    code: int | None = None  # of the process; negative: the signal that ended it
    said: list[str] = []  # what it wrote last, or what is missing
    result: Any = None  # its own JSON


def stages() -> list[Stage]:
    """In order of worth: what comes last may find no time left, and is begun by its name the next time."""
    python = sys.executable
    bench = (python, "-m", "ftcomm.cli", "bench")
    # By a thread, since a test that hangs in a call of CUDA sees no signal; and the stacks before that.
    pytest = (python, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "timeout_method=thread")
    pytest = (*pytest, "-o", "faulthandler_timeout=40")

    def tests(name: str, seconds: float, *arguments: str) -> Stage:
        return Stage(name, (*pytest, *arguments), seconds, (str(_TESTS / "gpu"), "pytest"))

    def gpu(file: str) -> str:
        return str(_TESTS / "gpu" / file)

    # One op of each kernel, on arrays that end in the middle of a tile, with memory that is not pooled, so that an
    # access behind the end of an array is one behind the end of an allocation.
    sanitizer = ("compute-sanitizer", "--error-exitcode", "99", "--report-api-errors", "no", "--tool")
    small = (*bench, "kernels", "-b", "100002", "-e", "100002", "--sources", "2,3,8", "-n", "1", "-w", "0", "--hot")
    small = (*small, "-d", "bfloat16")
    bare = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    allreduce, processes = gpu("test_allreduce_gpu.py"), gpu("test_processes_gpu.py")
    one_kill = "by_ipc or gpu-shm-1000"
    return [
        Stage("facts", (python, "-m", "ftcomm.bench.gpu_facts", "--json", "{json}"), 150),
        Stage("warm", (python, "-m", "ftcomm.bench.gpu_warm"), 60),
        tests("two ranks", 60, "-x", allreduce, "-k", "2-float32"),
        tests("eight ranks", 110, allreduce, "-k", "not 2-float32"),
        Stage("bench all-reduce", (python, "-m", "ftcomm.bench.allreduce_gpu"), 60),
        tests("one of eight killed", 150, processes, "-k", one_kill),
        Stage("bench kernels", (*bench, "kernels", "--sms", "4,8,16,all", "--json", "{json}"), 110),
        tests("graphs", 60, gpu("test_graph.py")),
        tests("copies", 60, gpu("test_copies_gpu.py"), gpu("test_slots_gpu.py")),
        tests("arrays", 60, gpu("test_arrays.py"), gpu("test_device_arrays_gpu.py")),
        tests("reducer", 100, gpu("test_reducer_gpu.py"), "-n", "8"),
        tests("kernels", 150, str(_TESTS / "kernels"), f"--ignore={_TESTS}/kernels/test_compiled.py", "-n", "12"),
        tests("processes", 300, processes, "-k", f"not ({one_kill})"),
        Stage("memcheck", (*sanitizer, "memcheck", *small), 90, ("compute-sanitizer",), bare),
        Stage("racecheck", (*sanitizer, "racecheck", *small), 90, ("compute-sanitizer",), bare),
    ]


def check(
    stages: Sequence[Stage],
    in_all: float,
    on_outcome: Callable[[Outcome], None],
    progress: Callable[[str, float], None],
) -> None:
    """Run one after the other, each until its deadline or that of all. Ctrl-C ends the one that runs, and is raised."""
    end = time.monotonic() + in_all
    for i, stage in enumerate(stages):
        progress(stage.name, i / len(stages))
        began = time.monotonic()
        missing = stage.missing()
        if missing is not None:
            on_outcome(Outcome(stage.name, ABSENT, 0.0, said=[f"{missing} is not there"]))
        elif end - began < 1:
            on_outcome(Outcome(stage.name, TIMED_OUT, 0.0, said=["no time was left to begin it"]))
        else:
            on_outcome(_run(stage, min(stage.seconds, end - began), on_outcome))


def _run(stage: Stage, seconds: float, on_outcome: Callable[[Outcome], None]) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ftcomm-gpu-check-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [str(result) if part == "{json}" else part for part in stage.command]

        def outcome(kind: str, code: int | None) -> Outcome:
            lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
            found = _decoded(result, lines)
            said = [line for line in lines if not line.startswith(_JSON)]
            return Outcome(stage.name, kind, round(time.monotonic() - began, 1), code, said, found)

        environment = {**os.environ, **dict(stage.environment)}
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
    """In a group of its own, which is told to end if it has not, so that it can write what it has, and then is gone."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _decoded(path: Path, lines: list[str]) -> Any:
    """The file that it was given, or a line of JSON that it wrote; None if neither is whole."""
    text = path.read_text() if path.exists() else next((line for line in lines if line.startswith(_JSON)), "")
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text)
    return None


def _there(need: str) -> bool:
    if "/" in need:
        return Path(need).exists()
    return shutil.which(need) is not None or importlib.util.find_spec(need.replace("-", "_")) is not None


def outcome_lines(outcome: Outcome) -> list[str]:
    """For the table: the figures, or what it said last if it went wrong."""
    line = f" {outcome.stage:>16} {outcome.outcome:>12} {outcome.seconds:>8.1f} s"
    if outcome.outcome != OK:
        return [line, *(f"    | {text}" for text in outcome.said[-12:])]
    if outcome.result is None:
        return [f"{line}  {' '.join(outcome.said[-1:])[:100]}".rstrip()]
    return [line, *(f"    {text}" for text in _figures(outcome.result))]


_SHOWN = ("kernel", "name", "dtype", "kind", "sources", "bytes", "gbps", "of_best_copy", "us", "p99", "limit", "target")


def _figures(result: Any) -> Iterator[str]:
    """The rows of a bench that are not about a cap on blocks."""
    for row in result["rows"] if isinstance(result, dict) else result:
        if row.get("sms") is None and {"gbps", "us"} & row.keys():
            shown = {name: row[name] for name in _SHOWN if row.get(name) is not None}
            yield " ".join(f"{name}={x:.4g}" if isinstance(x, float) else f"{name}={x}" for name, x in shown.items())


def failed(outcomes: Sequence[Outcome]) -> bool:
    """Whether anything that was there to be run did not pass."""
    return any(outcome.outcome not in (OK, ABSENT) for outcome in outcomes)
