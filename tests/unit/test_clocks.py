"""No deadline hangs on the wall clock: somebody may set it, and NTP does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ftcomm
from tests.rigs.sources import nodes

TREE = Path(ftcomm.__file__).parent.parent
WALL = {("time", "time"), ("time", "time_ns"), ("time", "ctime"), ("time", "localtime"), ("time", "gmtime")}
WALL |= {("time", "strftime"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}
STAMPS = {  # what people read, and nothing waits for
    "control/server.py",
    "ftcomm/dashboard/report.py",
    "ftcomm/diagnosis/collect.py",
    "ftcomm/diagnosis/text.py",
    "ftcomm/launch/commands/job.py",
    "ftcomm/launch/coordinator/embedded.py",
    "ftcomm/launch/monitor.py",
    "ftcomm/launch/places.py",
    "ftcomm/launch/report.py",
    "ftcomm/recorder/dump.py",
    "ftcomm/recorder/recorder.py",
}


def looks(path: Path) -> list[int]:
    """The lines that read the wall clock."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            whose = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            found += [node.lineno] if (whose, node.attr) in WALL or node.attr == "CLOCK_REALTIME" else []
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [node.lineno for name in node.names if ("time", name.name) in WALL]
    return found


@pytest.mark.parametrize("folder", ["control", "ftcomm", "kernels"])
def test_nothing_that_waits_looks_at_the_wall_clock(folder: str) -> None:
    read = {path.relative_to(TREE).as_posix(): looks(path) for path in sorted((TREE / folder).rglob("*.py"))}
    assert {path for path, lines in read.items() if lines} == {path for path in STAMPS if path.startswith(f"{folder}/")}
