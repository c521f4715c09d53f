"""What follows from the declaration of an experiment, shown with a small one; and that all real ones are declared."""

from __future__ import annotations

import ast
import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from ftcomm.bench import cli
from ftcomm.bench.cli import Experiments
from ftcomm.bench.harness import SIZE, SIZES, BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import Records, rank_arguments, tail, written_task
from ftcomm.bench.rank import main as rank_main
from ftcomm.cli import main
from ftcomm.errors import SettingsError
from ftcomm.launch.commands.option_types import choices

BENCH = Path(cli.__file__).parent


@dataclasses.dataclass(frozen=True)
class Request:
    """Count to the largest size."""

    sizes: Sequence[int] = option((1 << 10, 2 << 20), kind=SIZES, help="Of arrays.")
    most: int = option(3, "-m", "--most", help="Rows.")
    floor: int | None = option(None, kind=SIZE, help="Least.", show="none")
    ways: Sequence[str] = option((), kind=choices("up", "down"))
    loud: bool = option(False, help="Say it.")
    hidden: int = 7

    def smoke(self) -> Request:
        """One row."""
        return dataclasses.replace(self, most=1)

    def check(self) -> None:
        if self.most < 1:
            raise SettingsError("--most: expected at least 1.")


class Row(msgspec.Struct, frozen=True):
    number: int
    good: bool = True


class Remark(msgspec.Struct, frozen=True):
    text: str


async def measure(request: Request, report: BenchReport) -> None:
    for number in range(request.most):
        report.progress(f"row {number}", number / request.most)
        report.add(Row(number, number < 2))
    report.add(Remark("that is all"))


COLUMNS = (Column("no", "(1)", 4, lambda row: str(row.number)), Column("ok", "", -3, lambda row: str(row.good)))
TOY = Experiment(
    "toy",
    Request,
    measure,
    [
        Table(
            "rows", Row, (Column("no", "(1)", 4, lambda r: str(r.number)), Column("ok", "", -3, lambda r: str(r.good)))
        ),
        Table("remarks", Remark, line=lambda remark: f"# {remark.text}"),
    ],
    csv="rows",
    summary=lambda report: {"sum": sum(row.number for row in report["rows"])},
    footer=lambda report: [f"# {len(report['rows'])} rows"],
    good=lambda report: all(row.good for row in report["rows"]),
)


def test_options_rows_files_and_exit_code_follow_from_the_declaration(tmp_path: Path) -> None:
    files = [tmp_path / "out.json", tmp_path / "out.csv"]
    arguments = ["--sizes", "1K,3M", "-m", "2", "--ways", "down,up", "--loud", "--json", str(files[0]), "--csv"]
    done = CliRunner().invoke(TOY.command(), [*arguments, str(files[1])])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[3:] == ["#   no ok", "#  (1)", "     0 True", "     1 True", "# that is all", "# 2 rows"]
    result = json.loads(files[0].read_text())
    assert {"command", "cpu", "date"} <= result["header"].keys()
    asked = {"sizes": [1 << 10, 3 << 20], "most": 2, "floor": None, "ways": ["down", "up"], "loud": True, "hidden": 7}
    assert result["request"] == asked
    assert (result["rows"][1], result["remarks"], result["sum"]) == (
        {"number": 1, "good": True},
        [{"text": "that is all"}],
        1,
    )
    assert list(csv.reader(files[1].open())) == [["number", "good"], ["0", "True"], ["1", "True"]]


def test_defaults_smoke_and_what_is_bad() -> None:
    help = CliRunner().invoke(TOY.command(), ["--help"]).output
    assert "Count to the largest size." in help
    for text in ("[default: 1K,2M]", "-m, --most", "[default: 3]", "[default: none]", "One row."):
        assert text in help
    assert "# 1 rows" in CliRunner().invoke(TOY.command(), ["--smoke"]).output
    bad = CliRunner().invoke(TOY.command(), [])
    assert bad.exit_code == 1, "the third row is bad"
    refused = CliRunner().invoke(TOY.command(), ["--sizes", "1Q"])
    assert (refused.exit_code, "is no size" in refused.output) == (2, True)
    with pytest.raises(SettingsError, match="--most"):
        TOY.run(Request(most=0))
    with pytest.raises(SettingsError, match="choose a file that you can write to"):
        TOY.run(Request(), json_file=Path("/nonexistent/out.json"))


def test_what_was_measured_is_written_when_it_is_interrupted_or_fails(tmp_path: Path) -> None:
    async def interrupted(request: Request, report: BenchReport) -> None:
        report.add(Row(5))
        raise KeyboardInterrupt

    path = tmp_path / "out.json"
    done = CliRunner().invoke(dataclasses.replace(TOY, measure=interrupted).command(), ["--json", str(path)])
    assert done.exit_code == 130
    assert json.loads(path.read_text())["rows"] == [{"number": 5, "good": True}]

    def fails(request: Request, report: BenchReport) -> None:
        report.add(Row(6))
        report.save()
        assert json.loads(path.read_text())["rows"] == [{"number": 6, "good": True}]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        dataclasses.replace(TOY, measure=fails).run(Request(), path)
    assert json.loads(path.read_text())["rows"][0]["number"] == 6


class Task(msgspec.Struct, frozen=True):
    count: int
    folder: str = ""


def count(task: Task, place: str) -> None:
    records = Records(task.folder, int(place))
    for number in range(task.count):
        records.write(Row(number))


def test_a_rank_gets_its_task_and_is_read_from_its_file() -> None:
    with written_task(Task(3)) as (task, path):
        for place in ("0", "1"):
            rank_main(["rank", *rank_arguments(count, path, place)])
        assert [row.number for row in tail(task.folder, 2, Row).read()] == [0, 1, 2, 0, 1, 2]
    assert not path.exists()


@pytest.mark.parametrize("name", Experiments.LAZY)
def test_every_command_says_what_it_measures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", name, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"bench {name} [OPTIONS]" in said
    assert len(said.splitlines()) > 8


def test_no_module_of_the_bench_imports_in_a_circle() -> None:
    """Imports within functions count: they would hide a circle, not break it."""
    names = {
        path: ".".join(("ftcomm.bench", *path.relative_to(BENCH).with_suffix("").parts)) for path in BENCH.rglob("*.py")
    }
    known = set(names.values())
    arrows: dict[str, set[str]] = {}
    for path, name in names.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        arrows[name] = found & known - {name}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for other in arrows[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in arrows:
        visit(name, ())


def test_results_that_are_kept_are_read_by_the_experiments_that_wrote_them() -> None:
    from ftcomm.bench import collective, recovery

    kinds: dict[str, tuple[str, Any]] = {
        "allreduce": ("rows", collective.CollectiveRow),
        "recovery": ("events", recovery.RecoveryEvent),
    }
    for name, (key, kind) in kinds.items():
        path = max((BENCH / "results").glob(f"*-{name}-cpu.json"))
        rows = msgspec.convert(json.loads(path.read_text())[key], list[kind], str_keys=True)
        assert rows
