"""`ftcomm bench first-use` runs jobs whose ranks say what their beginning took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Bench

pytestmark = pytest.mark.protocol


def test_each_rank_of_each_job_says_what_its_beginning_took(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("first-use", "--smoke", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(row["round"], row["rank"]) for row in rows] == [(0, 0), (0, 1)]
    for row in rows:
        assert row["cpu_ms"] == pytest.approx(row["import_ms"] + row["init_ms"] + row["allreduce_ms"])
        assert row["clock_ms"] > 0
