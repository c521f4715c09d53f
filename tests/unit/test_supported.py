"""The page of launchers and trainers says what the marks of the tests say, and no cell of it is without a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import supported
from tests.supported import CLAIMS, LAUNCHERS, TRAINERS, Shown

pytestmark = pytest.mark.protocol
PAGE = Path(__file__).parents[2] / "docs" / "supported.md"


def test_the_page_has_what_the_marks_say() -> None:
    text = PAGE.read_text()
    found = supported.told(text)
    assert [each._replace(outcome="") for each in found] == supported.marks(), "run: make supported"
    assert text == supported.page(found), "the tables of the page differ; run: make supported"
    assert "failed" not in {each.outcome for each in found}


def test_the_marks_have_known_words() -> None:
    for each in supported.marks():
        assert each.launcher in LAUNCHERS, each
        assert each.trainer in TRAINERS, each
        assert each.claims, each
        assert set(each.claims) <= CLAIMS.keys(), each


def test_what_did_not_pass_is_not_shown() -> None:
    passed = Shown("Slurm", "DDP", "".join(CLAIMS), "tests/test_x.py::test_x", "passed")
    cells = {}
    for outcome in ("passed", "skipped", "failed", "not run"):
        [row] = [
            line for line in supported.page([passed._replace(outcome=outcome)]).splitlines() if line[:6] == "| DDP "
        ]
        cells[outcome] = row.split("|")[2 + LAUNCHERS.index("Slurm")].strip()
    assert cells.pop("passed") == " ".join(CLAIMS)
    assert all(cell.startswith("(") for cell in cells.values()), cells


def test_a_report_of_two_environments_tells_the_better_but_no_failure_is_hidden(tmp_path: Path) -> None:
    case = '<testcase classname="tests.torch.test_x" name="{}">{}</testcase>'
    reports = []
    for i, ends in enumerate([("<skipped/>", "", "<failure/>"), ("", "", "")]):
        cases = "".join(
            case.format(name, end) for name, end in zip(("test_a[x]", "test_b", "test_c"), ends, strict=True)
        )
        reports.append(tmp_path / f"{i}.xml")
        reports[-1].write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = supported.outcomes(reports)
    assert found == {
        f"tests/torch/test_x.py::test_{name}": end
        for name, end in zip("abc", ("passed", "passed", "failed"), strict=True)
    }


def test_a_part_of_the_tests_leaves_the_rest_of_the_page(tmp_path: Path) -> None:
    page, report = tmp_path / "page.md", tmp_path / "report.xml"
    page.write_text(PAGE.read_text())
    some, *others = supported.marks()
    path, name = some.test.split("::")
    classname = path.removesuffix(".py").replace("/", ".")
    case = f'<testcase classname="{classname}" name="{name}"><failure/></testcase>'
    report.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    before = {each.test: each.outcome for each in supported.told(PAGE.read_text())}
    for keep, outcomes in ((["--keep"], before), ([], {test: "not run" for test in before})):
        supported.main([*keep, "--page", str(page), str(report)])
        found = {each.test: each.outcome for each in supported.told(page.read_text())}
        assert found == {**outcomes, some.test: "failed"}
    assert others
