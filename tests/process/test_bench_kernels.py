"""`ftcomm bench kernels` in Triton's interpreter, and what `ftcomm bench gpu-check` makes of its stages, GPU or not."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftcomm.bench.gpu_check import (
    ABSENT,
    FAILED,
    INTERRUPTED,
    OK,
    TIMED_OUT,
    GpuStage,
    StageOutcome,
    check,
    failed,
    outcome_lines,
    stages,
)
from ftcomm.bench.harness import write_json
from ftcomm.bench.kernel_points import MEMCPY, KernelPoint, KernelPointsRequest
from ftcomm.bench.kernels import EXPERIMENT, KernelRow, Rates, row
from ftcomm.cli import main
from ftcomm.errors import SettingsError
from tests.rigs import preforked_ranks

pytestmark = pytest.mark.protocol

COUNT = 33 * 256 + 7  # more than one block of threads takes


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked("-m", "ftcomm.cli", "bench", *arguments)


def forked(*command: str) -> subprocess.CompletedProcess[str]:
    """`python COMMAND` by a fork of a process that has imported torch."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # so that it says the same on a machine with a GPU
    return subprocess.CompletedProcess(command, *preforked_ranks.completed(command, hidden))


# ---- kernels ------------------------------------------------------------------------------------------------------


def test_every_kernel_interpreted(tmp_path: Path) -> None:
    """One call each: right, and without a figure that could be taken for a GPU's."""
    files = tmp_path / "out.json", tmp_path / "out.csv"
    size = str(2 * COUNT)
    arguments = ("-d", "bfloat16", "-b", size, "-e", size, "--sources", "2", "--sms", "1,all", "-n", "1", "-w", "0")
    done = bench("kernels", *arguments, "--json", str(files[0]), "--csv", str(files[1]))
    assert done.returncode == 0, done.stderr
    assert "# Wrong elements: 0 OK" in done.stdout
    result = json.loads(files[0].read_text())
    rows = result["rows"]
    assert {"gpu", "driver", "triton", "git", "torch", "command"} <= result["header"].keys()
    seen = {(r["kernel"], r["sources"], r["sms"]) for r in rows}
    assert seen == {(kernel, w, sms) for kernel, w in (("copy", 1), ("reduce", 2)) for sms in (1, None)}
    assert len(rows) == len(seen)
    for r in rows:
        assert r.keys() == set(KernelRow.__struct_fields__)
        assert (r["device"], r["l2"], r["registers"]) == ("interpreted", "", None)
        assert r["gbps"] is r["of_best_copy"] is r["of_same_blocks"] is None
        assert (r["count"], r["checked"], r["wrong"]) == (COUNT, COUNT, 0)
        assert r["blocks"] == 1 if r["sms"] == 1 else r["blocks"] > 1
        assert 0 < r["time_us_p20"] <= r["time_us_p50"] <= r["time_us_p80"]
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == len(rows)
    assert all(line.split()[-1] == "interpreted" and line.split()[-5:-2] == ["-"] * 3 for line in lines)
    with files[1].open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [list(line) for line in table] == [list(KernelRow.__struct_fields__)] * len(rows)
    assert [line["kernel"] for line in table] == [r["kernel"] for r in rows]
    assert {line["gbps"] for line in table} == {""}


WRONG = """
import sys
from ftcomm.bench import kernel_runs
from ftcomm.cli import main

def late(sources, out, op="sum", *, sms=None):  # a kernel that leaves the last element out
    kernel(sources, out, op, sms=sms)
    if len(sources) > 1:
        out[-1] = 0

kernel, kernel_runs.reduce = kernel_runs.reduce, late
main(sys.argv[1:])
"""


def test_a_wrong_element_is_counted(tmp_path: Path) -> None:
    """One, the last, of an array of which only three windows are compared."""
    path = tmp_path / "out.json"
    arguments = (
        "bench",
        "kernels",
        "--kernels",
        "reduce",
        "-d",
        "float32",
        "-b",
        "256K",
        "-e",
        "256K",
        "--sources",
        "2",
    )
    done = forked("-c", WRONG, *arguments, "-n", "1", "-w", "0", "--json", str(path))
    assert done.returncode == 1, done.stderr
    assert "# Wrong elements: 1 FAILED" in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [(r["kernel"], r["wrong"]) for r in rows] == [("copy", 0), ("reduce", 1)]
    assert rows[1]["checked"] < rows[1]["count"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--kernels", "copy,cpoy"), "--kernels cpoy: expected some of copy"),
        (("-d", "complex64"), "dtype complex64 cannot be reduced"),
        (("-o", "median"), "op='median' is not known"),
        (("--sources", "17"), "--sources: expected 1 to 16"),
        (("--sms", "0"), "--sms: expected numbers of at least 1"),
        (("--sms", "some"), "'some' is not a valid integer"),
        (("-n", "0"), "-n has to be at least 1"),
        (("-b", "1M", "-e", "1K"), "swap them"),
        (("-b", "2", "-e", "2"), "less than one element of float32"),
        (("-b", "64G", "-e", "64G"), "GB are free; lower -e or --sources"),
        (("--csv", "/nowhere/out.csv"), "choose a file that you can write to"),
    ],
)
def test_what_cannot_be_measured(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernels", *arguments])
    assert ended.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


class Measured(msgspec.Struct):
    """As kernel_runs.Timings, which needs torch."""

    seconds: list[float]
    blocks: int | None = 4
    registers: int | None = 40
    checked: int = 10
    wrong: int = 0


def test_rows_are_compared_with_copies() -> None:
    """The best copy of the size for one figure, whoever made it; the copy with as many blocks for the other."""
    request = KernelPointsRequest(("reduce",), 1000, 1000, dtypes=("float32",), sources=(2,), sms=(4, None))
    points = list(request.points(memcpy=True))
    assert [(p.kernel, p.sms) for p in points] == [
        *((MEMCPY, None), ("copy", 4), ("copy", None)),
        *(("reduce", 4), ("reduce", None)),
    ]
    micros = (2.0, 10.0, 2.5, 16.0, 4.0)
    rates = Rates()
    rows = [
        row(request, p, Measured([m * 1e-6, m * 1e-6, 9.0]), "H200")  # type: ignore[arg-type]
        for p, m in zip(points, micros, strict=True)
    ]
    for point, one in zip(points, rows, strict=True):
        assert one.gbps is not None
        rates.add(point, one.gbps)
    done = [rates.compared(p, one) for p, one in zip(points, rows, strict=True)]
    assert [one.moved_bytes for one in done] == [2000, 2000, 2000, 3000, 3000]
    assert [one.gbps for one in done] == pytest.approx([1.0, 0.2, 0.8, 0.1875, 0.75])
    assert [one.of_best_copy for one in done] == pytest.approx([1.0, 0.2, 0.8, 0.1875, 0.75])
    assert [one.of_same_blocks for one in done[1:]] == pytest.approx([1.0, 1.0, 0.9375, 0.9375])
    assert done[0].of_same_blocks is None
    assert {one.l2 for one in done} == {"cold"}
    assert EXPERIMENT.tables[0].lines(done[3])[0].split()[-6:] == ["0.19", "18.8", "93.8", "0", "H200", "cold"]


def test_bytes_that_a_kernel_moves() -> None:
    """1000 elements of bf16 are 2000 bytes."""
    assert [KernelPoint("reduce", "bfloat16", 2000, sources=w).moved for w in (1, 3)] == [4000, 8000]


def test_an_average_of_bool_is_refused() -> None:
    with pytest.raises(SettingsError, match="avg"):
        KernelPointsRequest(minbytes=64, maxbytes=64, dtypes=("bool",), redop="avg").check()


# ---- gpu-check ----------------------------------------------------------------------------------------------------


def test_gpu_check_says_that_there_is_no_gpu() -> None:
    done = bench("gpu-check")
    assert done.returncode == 2
    assert re.match(r"ftcomm: gpu-check needs a GPU that torch can use, and torch \S+ finds none\.", done.stderr)


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def run(*made: GpuStage, in_all: float = 60.0) -> list[StageOutcome]:
    outcomes: list[StageOutcome] = []
    check(made, in_all, outcomes.append, lambda text, fraction: None)
    return outcomes


def test_stages_go_on_after_one_that_fails() -> None:
    writes = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"rows\": [1]}')"
    outcomes = run(
        GpuStage("works", python("print('fine')"), 30),
        GpuStage("fails", python("print('why'); raise SystemExit(3)"), 30),
        GpuStage("crashes", python("import os; os.abort()"), 30),
        GpuStage("is not there", ("no-such-program",), 30, ("no-such-program",)),
        GpuStage("has no tests", ("true",), 30, ("/no/such/folder",)),
        GpuStage("writes", (*python(writes), "{json}"), 30),
        GpuStage("prints", python("print('[{\"a\": 1}]')"), 30),
        GpuStage("writes half", (*python(writes.replace("}'", "'")), "{json}"), 30),
        GpuStage("writes no text", (*python(writes.replace("write_text('{", "write_bytes(b'\\xff")), "{json}"), 30),
        GpuStage("cannot be begun", ("/dev/null",), 30),
        GpuStage("steps on nothing", python("import ctypes; ctypes.string_at(0)"), 30),
        GpuStage("has another shape", python('print(\'{"rows": [1, {"us": null}], "a": 2}\')'), 30),
    )
    assert [(o.stage, o.outcome) for o in outcomes] == [
        *(("works", OK), ("fails", FAILED), ("crashes", FAILED), ("is not there", ABSENT), ("has no tests", ABSENT)),
        *(("writes", OK), ("prints", OK), ("writes half", OK), ("writes no text", OK)),
        *(("cannot be begun", FAILED), ("steps on nothing", FAILED), ("has another shape", OK)),
    ]
    works, fails, crashes, absent, _, wrote, printed, half, bytes_, unbegun, lost, other = outcomes
    assert all(outcome_lines(outcome) for outcome in outcomes)
    assert bytes_.result is None
    assert "Permission denied" in unbegun.said[0]
    assert lost.code == -signal.SIGSEGV
    assert other.result == {"rows": [1, {"us": None}], "a": 2}
    assert (works.said, works.code, fails.said, fails.code) == (["fine"], 0, ["why"], 3)
    assert crashes.code == -signal.SIGABRT
    assert absent.said == ["no-such-program is not there"]
    assert (wrote.result, printed.result, printed.said, half.result) == ({"rows": [1]}, [{"a": 1}], [], None)
    assert failed(outcomes)
    assert not failed([works, absent])
    assert outcome_lines(fails).splitlines()[1:] == ["    | why"]
    assert outcome_lines(printed).splitlines()[1:] == []
    rows = [{"kernel": "copy", "sms": sms, "gbps": 4000.0, "us": None, "wrong": 0} for sms in (4, None)]
    for result in (rows, {"header": {}, "rows": rows}):
        shown = outcome_lines(StageOutcome("bench", OK, 1.0, 0, result=result)).splitlines()
        assert shown[1:] == ["    kernel=copy gbps=4000"]


def test_a_stage_ends_at_its_deadline_with_all_that_it_started() -> None:
    """It is told first, so that it can write what it has, and nothing of it is left."""
    starts = (
        "import subprocess, sys, time\n"
        "deaf = 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', deaf])\n"
        "print(child.pid, flush=True)\n"
        "try: time.sleep(600)\n"
        "except KeyboardInterrupt: print('told', flush=True)"
    )
    outcomes = run(GpuStage("hangs", python(starts), 8), GpuStage("is next", ("true",), 30))
    assert [o.outcome for o in outcomes] == [TIMED_OUT, OK]
    pid, told = outcomes[0].said
    assert told == "told"
    assert gone(int(pid))


def test_the_deadline_of_all() -> None:
    outcomes = run(
        GpuStage("hangs", python("import time; time.sleep(600)"), 600), GpuStage("is late", ("true",), 30), in_all=2
    )
    assert [o.outcome for o in outcomes] == [TIMED_OUT, TIMED_OUT]
    assert outcomes[1].said == ["no time was left to begin it"]


INTERRUPT = """
import sys
from pathlib import Path
import torch
from ftcomm.bench import gpu_check
from ftcomm.bench.gpu_check import GpuStage
from ftcomm.cli import main

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda: (9, 0)
torch.cuda.get_device_name = lambda: "no GPU"
hangs = "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)"
begun = sys.argv.pop()
gpu_check.stages = lambda: [
    GpuStage("works", ("true",), 30),
    GpuStage("hangs", (sys.executable, "-c", hangs, begun), 600),
    GpuStage("is next", ("true",), 30),
]
main(sys.argv[1:])
"""


def test_a_full_disk_hides_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one without room for what a stage writes, nor one without room for the JSON."""
    room = [False, True]
    real = tempfile.TemporaryDirectory

    def folder(*arguments: Any, **more: Any) -> Any:
        if room.pop(0):
            return real(*arguments, **more)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", folder)
    outcomes = run(GpuStage("has no room", ("true",), 30), GpuStage("has", ("true",), 30))
    assert [(o.outcome, o.said) for o in outcomes] == [(FAILED, ["[Errno 28] No space left on device"]), (OK, [])]
    script = INTERRUPT.replace("time.sleep(600)", "print('fine')")
    done = forked("-c", script, "bench", "gpu-check", "--json", "/dev/full", os.devnull)
    assert done.returncode == 2, done.stderr
    assert "--json /dev/full is not complete: No space left on device" in done.stderr
    assert done.stdout.count("the JSON is not written: [Errno 28]") == 3
    assert " is next " in done.stdout


def test_json_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    write_json(path, [1])
    write_json(path, [1, 2])

    def full(where: Path, data: bytes) -> int:
        with where.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, [1, 2, 3])
    assert json.loads(path.read_text()) == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.sweep), signal.SIGTERM])
def test_what_was_done_is_written_when_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    path, begun = tmp_path / "out.json", tmp_path / "begun"
    command = [sys.executable, "-c", INTERRUPT, "bench", "gpu-check", "--json", str(path), str(begun)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 120
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.05)
        before = path.read_text()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert [s["stage"] for s in json.loads(before)["stages"]] == ["works"]
    done = json.loads(path.read_text())
    assert [(s["stage"], s["outcome"]) for s in done["stages"]] == [("works", OK), ("hangs", INTERRUPTED)]
    assert done["header"]["gpu"] == "no GPU"


def test_the_stages_of_a_gpu() -> None:
    """They run every test of tests/gpu, and what they name is there."""
    made = stages()
    assert len({stage.name for stage in made}) == len(made)
    parts = [part for stage in made for part in stage.command]
    named = {Path(part).name for part in parts if "/tests/gpu/" in part}
    assert named == {path.name for path in Path("tests/gpu").glob("test_*.py")}
    assert all(Path(part).exists() for part in parts if part.startswith("/"))
    needy = [dict(stage.environment).get("FTCOMM_TESTS_NEED_GPU") for stage in made if "pytest" in stage.command]
    assert set(needy) == {"1"}, "a stage whose tests are all skipped would be ok"
    chosen = [stage.command for stage in made if "-k" in stage.command]
    files = ["-v"] + [str(Path("tests/gpu", name)) for name in ("test_allreduce_gpu.py", "test_processes_gpu.py")]
    *some, whole = collected(*[command[command.index("pytest") + 1 :] for command in chosen], files)
    assert sum(some) == whole


def collected(*arguments: Sequence[str]) -> list[int]:
    """How many tests pytest finds, for each of these; in one process, as their modules take seconds to import."""
    collect = (
        "import json, pytest, sys; [print(pytest.main([*a, '--collect-only', '-qq'])) for a in json.loads(sys.argv[1])]"
    )
    command = [sys.executable, "-c", collect, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    counts, found = [], 0
    for line in done.stdout.splitlines():
        found += "::test_" in line
        if line.startswith("ExitCode") or line.isdigit():
            assert line in ("ExitCode.OK", "0"), done.stdout
            counts.append(found)
            found = 0
    return counts


def test_stages_by_name() -> None:
    done = bench("gpu-check", "--stages", "list")
    assert done.returncode == 0
    assert [line.split("  at most")[0].strip() for line in done.stdout.splitlines()] == [s.name for s in stages()]
    done = bench("gpu-check", "--stages", "facts,fact")
    assert done.returncode == 2
    assert done.stderr.startswith("ftcomm: --stages: there is no stage 'fact'; they are facts, warm,")


def gone(pid: int) -> bool:
    """Dead, and at most waiting for someone to ask."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
