"""What tests have ended with: read from a report of pytest, kept in a file, one for each version of torch."""

from __future__ import annotations

import datetime
import json
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import torch

from tests.upstream.reasons import reason

BACKENDS = ("gloo", "ftcomm")
Outcomes = dict[str, str]  # test -> passed, failed, or "skipped: why"


def read(report: Path) -> Outcomes:
    """All tests of a JUnit report; of those in classes with the class, since names come twice."""
    found: Outcomes = {}
    for case in xml.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}.{case.get('name', '')}"
        kinds = {child.tag: child for child in case}
        if kinds.keys() & {"failure", "error"}:
            found[name] = "failed"
        elif "skipped" in kinds:
            found[name] = f"skipped: {kinds['skipped'].get('message', '')}"
        else:
            found[name] = "passed"
    return found


def new() -> dict[str, Any]:
    """Nothing has run yet. The versions and the date say where what is added comes from."""
    versions = {"torch": torch.__version__}
    try:
        from importlib.metadata import version

        versions["torchft-nightly"] = version("torchft-nightly")
    except ImportError:
        pass
    return {"date": datetime.date.today().isoformat(), "versions": versions, "suites": {}, "selected": {}}


def add(told: dict[str, Any], suite: str, backend: str, outcomes: Outcomes, selection: str = "") -> None:
    """Tests that ran before have their newest outcome. Without a `selection` all of the suite have run."""
    known: list[str] = told["selected"].setdefault(suite, [])
    if selection not in known and "" not in known:
        known.append(selection)
    told["suites"].setdefault(suite, {each: {} for each in BACKENDS})[backend].update(outcomes)


def load(path: Path) -> dict[str, Any]:
    """What is kept there, of the torch that is installed; or nothing yet."""
    if not path.exists():
        return new()
    told: dict[str, Any] = json.loads(path.read_text())
    fresh = new()
    if told["versions"] != fresh["versions"]:
        raise SystemExit(f"{path} is of {told['versions']}, and here are {fresh['versions']}: take another file")
    return told | {"date": fresh["date"]}


def partial(told: dict[str, Any], suite: str) -> list[str]:
    """Which tests of a suite have run, as expressions of pytest; none if all have."""
    selected: list[str] = told["selected"].get(suite, [])
    return [] if "" in selected else selected


def rows(told: dict[str, Any], suite: str) -> list[tuple[str, str, str, str]]:
    """(test, with gloo, with ftcomm, why), of all that ran with one of them."""
    both = told["suites"][suite]
    found = []
    for name in sorted(both["gloo"].keys() | both["ftcomm"].keys()):
        gloo, ours = (both[backend].get(name, "absent").split(":")[0] for backend in BACKENDS)
        if {gloo, ours} == {"skipped"}:
            continue
        worse = gloo == "passed" and ours != "passed"
        found.append((name, gloo, ours, reason(name, told["versions"]["torch"]) if worse else ""))
    return found


def unexplained(told: dict[str, Any], suite: str) -> list[str]:
    """Tests that gloo passes and ftcomm does not, without a reason."""
    return [name for name, gloo, ours, why in rows(told, suite) if gloo == "passed" != ours and not why]
