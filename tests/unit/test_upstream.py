"""What is said of the suites of others: outcomes are counted once, nothing is passed over, and the page has reasons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.upstream import outcomes
from tests.upstream.page import page, tables
from tests.upstream.reasons import REASONS, reason

PAGE = Path(__file__).resolve().parents[2] / "docs" / "upstream.md"

REPORT = """<testsuites><testsuite>
<testcase classname="tests.upstream.suite_torch.TestDistributed" name="test_one"/>
<testcase classname="tests.upstream.suite_torch.TestDistributed" name="test_two"><failure message="no"/></testcase>
<testcase classname="tests.upstream.suite_torch.TestDistributed" name="test_three"><skipped message="a GPU"/></testcase>
</testsuite></testsuites>"""


def told(gloo: dict[str, str], ftcomm: dict[str, str], version: str = "2.13.0+cpu") -> dict[str, Any]:
    suites = {"torch": {"gloo": gloo, "ftcomm": ftcomm}}
    return {"date": "2026-01-02", "versions": {"torch": version}, "suites": suites, "selected": {}}


def test_a_report_is_read(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    assert outcomes.read(tmp_path / "report.xml") == {
        "TestDistributed.test_one": "passed",
        "TestDistributed.test_two": "failed",
        "TestDistributed.test_three": "skipped: a GPU",
    }


@pytest.mark.parametrize("ours", ["failed", "skipped: why", None])
def test_what_gloo_passes_is_to_pass_or_to_have_a_reason(ours: str | None) -> None:
    found = {} if ours is None else {"T.test_new": ours}
    assert outcomes.unexplained(told({"T.test_new": "passed"}, found), "torch") == ["T.test_new"]
    name = f"T.{REASONS[0].begin}_sum"
    assert outcomes.unexplained(told({name: "passed"}, {name: "failed"}), "torch") == []
    assert outcomes.unexplained(told({"T.test_new": "failed"}, found), "torch") == []


def test_a_reason_may_end_with_a_version() -> None:
    assert reason("T.test_monitored_barrier_gloo", "2.13.0+cpu")
    assert not reason("T.test_monitored_barrier_gloo", "2.14.1+cu132")
    assert not reason("T.test_all_reduce_sum", "2.13.0+cpu")


def test_outcomes_are_added_to_those_of_the_same_versions(tmp_path: Path) -> None:
    kept = outcomes.load(tmp_path / "none.json")
    outcomes.add(kept, "torch", "gloo", {"T.a": "failed", "T.b": "passed"})
    (tmp_path / "some.json").write_text(json.dumps(kept))
    again = outcomes.load(tmp_path / "some.json")
    outcomes.add(again, "torch", "gloo", {"T.a": "passed"})
    assert again["suites"]["torch"] == {"gloo": {"T.a": "passed", "T.b": "passed"}, "ftcomm": {}}
    outcomes.add(again, "torch", "gloo", {}, "barrier")
    assert outcomes.partial(again, "torch") == []  # since all had run before
    outcomes.add(again, "torchft", "gloo", {}, "barrier")
    assert "Of torchft only a part has run: `-k 'barrier'`." in tables(again)
    (tmp_path / "other.json").write_text(json.dumps(kept | {"versions": {"torch": "1.0"}}))
    with pytest.raises(SystemExit, match="take another file"):
        outcomes.load(tmp_path / "other.json")


def test_the_page_counts_all_and_names_what_ran() -> None:
    names = {"T.both": "passed", "T.neither": "skipped: a GPU", "T.ours": "passed"}
    text = tables(told(names, names | {"T.ours": "failed"}))
    assert "| gloo | 2 | 0 | 1 |" in text
    assert "| ftcomm | 1 | 1 | 1 |" in text
    assert "| `T.ours` | passed | failed |  |" in text
    assert "Both pass (1): `T.both`." in text
    assert "T.neither" not in text


def test_the_page_that_is_shown_leaves_nothing_unexplained() -> None:
    text = PAGE.read_text()
    assert text.startswith(page([]).split("\n## ")[0])  # written by this command
    different = re.findall(r"^\| `([^`]+)` \| (\w+) \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, gloo, ours, why in different if gloo == "passed" != ours and not why] == []
