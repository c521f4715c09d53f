"""Every event of the product is in the documents, with its fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ftcomm.control.replica_reports import RESUMED
from tests.rigs.sources import ROOT, files, name, nodes

ELSEWHERE = {"demo", "lab", "simulation"}
SAID_BY = {"Log", "Report", "emit", "_emit", "report", "_report", "_say", "_log"}
NO_EVENTS = ROOT / "ftcomm/launch/torchrun/store.py"  # its `_say` writes a line of the log


def _said() -> Iterator[tuple[str, set[str]]]:
    """Yields the kinds that stand in the text of the product, with the fields that stand beside them."""
    for path in files("ftcomm", "control"):
        if ELSEWHERE & set(path.parts) or path == NO_EVENTS:
            continue
        for node in nodes(path):
            if not isinstance(node, ast.Call) or name(node.func).rpartition(".")[2] not in SAID_BY:
                continue
            match node.args:
                case [ast.Constant(value=str(kind)), *fields]:
                    named = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                    for each in fields:
                        if isinstance(each, ast.Dict):
                            named |= {key.value for key in each.keys if isinstance(key, ast.Constant)}
                    yield kind, named


def _documented() -> dict[str, set[str]]:
    page = (ROOT / "docs/observability.md").read_text().partition("\n## Events\n")[2]
    rows = re.findall(r"^\| (`[^|]*) \| ?([^|]*)\|", page, re.MULTILINE)
    names = re.compile(r"`(\w+)`")
    return {kind: set(names.findall(fields)) for kinds, fields in rows for kind in names.findall(kinds)}


def test_each_kind_is_documented_with_its_fields() -> None:
    documented = _documented()
    said = list(_said())
    assert len({kind for kind, _ in said}) > 30
    lacking = {
        (kind, field)
        for kind, fields in said
        for field in ({""} if kind not in documented else fields - documented[kind] - {"shard"})
    }
    assert not lacking


def test_what_is_documented_is_said() -> None:
    assert _documented().keys() - {kind for kind, _ in _said()} == {RESUMED}  # said by this name
