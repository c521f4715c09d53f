"""Which trainers run under which launchers, as far as the suite has shown it: a page, from the reports of pytest.

    make supported                                             # runs the tests that show something, and writes the page
    python -m tests.supported --page docs/supported.md A.xml B.xml     # the page alone, from reports (--junitxml)

A test says by a mark what it shows, of one launcher and one trainer:

    @pytest.mark.shows("ftcomm run", "Lightning", "RSJE")

What no test shows has a reason here. `tests/unit/test_supported.py` compares the page, the marks and the reasons.
"""

from __future__ import annotations

import argparse
import ast
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CLAIMS = {
    "R": "runs",
    "S": "the others survive a SIGKILL",
    "J": "who was killed rejoins",
    "E": "all weights are equal to the last bit",
}
LAUNCHERS = ("ftcomm run", "ftcomm run --nnodes", "own processes", "torchrun", "mpirun", "Slurm", "Ray", "Kubernetes")
TRAINERS = (
    "NumPy arrays",
    "JAX in jit",
    "DDP",
    "FSDP2",
    "FSDP2 x TP",
    "FSDP2 x PP, compiled",
    "FSDP2 x TP x PP",
    "Hugging Face Trainer",
    "Accelerate",
    "Lightning",
    "Lightning, FSDP2",
    "torchft Manager",
    "torchtitan's hooks",
)
ALL = "all"
_TRAINER = "the launcher starts the same processes with the same variables whatever they train; tried with NumPy arrays"
_ITS_OWN = "torchft has a coordinator and a launcher of its own; the test has three of its groups in one process"
_TITAN = "torchtitan needs torchft's lighthouse, which knows replicas of any launcher alike; tried with own processes"
# (launcher, trainer) -> why something is not shown; `ALL` where the two have no reason of their own.
REASONS: Mapping[tuple[str, str], str] = {
    ("ftcomm run", ALL): "what a loss does is tried with own processes, which have the same variables",
    ("ftcomm run --nnodes", ALL): _TRAINER,
    ("own processes", ALL): "`ftcomm run` starts them with the same variables, and is what the suite tries it with",
    ("torchrun", ALL): "it starts the same processes with the same variables whatever they train; tried with trainers",
    ("mpirun", "NumPy arrays"): "mpirun starts no rank again",
    ("mpirun", ALL): _TRAINER,
    ("Slurm", ALL): "the batch script starts `ftcomm run --nnodes` on each node; tried with NumPy arrays",
    ("Ray", ALL): "a worker of Ray Train is a replica of one rank, whatever it trains; tried with DDP",
    ("Kubernetes", ALL): "there was no cluster: the manifests are held against the schemas of its API",
    **{(launcher, "torchft Manager"): _ITS_OWN for launcher in LAUNCHERS},
    **{(launcher, "torchtitan's hooks"): _TITAN for launcher in LAUNCHERS},
}


class Shown(NamedTuple):
    """What a test shows, and how it has ended."""

    launcher: str
    trainer: str
    claims: str
    test: str  # path::name
    outcome: str = ""


def marks() -> list[Shown]:
    """Returns what the tests say that they show, by their text: nothing is imported."""
    found = []
    for path in sorted(HERE.rglob("test_*.py")):
        text = path.read_text()
        if "mark.shows(" not in text:
            continue
        for node in ast.parse(text).body:
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.shows":
                    launcher, trainer, claims = (ast.literal_eval(each) for each in call.args)
                    assert isinstance(node, ast.FunctionDef)
                    found.append(Shown(launcher, trainer, claims, f"{path.relative_to(HERE.parent)}::{node.name}"))
    return sorted(found)


def outcomes(reports: Iterable[Path]) -> dict[str, str]:
    """Returns the outcome of each test in these reports: failed before passed, and passed before skipped."""
    found: dict[str, list[str]] = {}
    for report in reports:
        for case in xml.parse(report).getroot().iter("testcase"):
            path = case.get("classname", "").replace(".", "/") + ".py"
            name = case.get("name", "").partition("[")[0]
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
            found.setdefault(f"{path}::{name}", []).append(outcome)
    return {
        test: next(each for each in ("failed", "passed", "skipped") if each in ends) for test, ends in found.items()
    }


def reason(launcher: str, trainer: str) -> str:
    """Returns why not all is shown of these two."""
    for key in ((launcher, trainer), (launcher, ALL)):
        if key in REASONS:
            return REASONS[key]
    raise KeyError(
        f"{launcher} with {trainer}: no test shows all of {', '.join(CLAIMS.values())}, and no reason is given"
    )


def page(found: Sequence[Shown]) -> str:
    """Returns the page about what these tests have shown."""
    reasons: list[str] = []

    def cell(launcher: str, trainer: str) -> str:
        shown = {
            claim
            for each in found
            if (each.launcher, each.trainer, each.outcome) == (launcher, trainer, "passed")
            for claim in each.claims
        }
        letters = " ".join(claim for claim in CLAIMS if claim in shown)
        if len(shown) == len(CLAIMS):
            return letters
        why = reason(launcher, trainer)
        if why not in reasons:
            reasons.append(why)
        return f"{letters} ({reasons.index(why) + 1})".strip()

    rows = [(trainer, *(cell(launcher, trainer) for launcher in LAUNCHERS)) for trainer in TRAINERS]
    lines = [
        "# Launchers and trainers",
        "",
        "What the suite has shown of each launcher with each trainer. `make supported` runs the tests and writes this",
        "page.",
        "",
        *(f"- **{letter}**: {claim}" for letter, claim in CLAIMS.items()),
        "",
        *_table(("", *LAUNCHERS), rows),
        "",
        '"own processes" are started one by one, beside `ftcomm coordinator`, as a supervisor of a cluster does.',
        '"torchrun" is one torchrun for each replica, with `--max-restarts`, beside `ftcomm coordinator`; one for all',
        "ends all ranks when one dies, and starts all again, which meet anew (`tests/torch/test_rendezvous.py`). A",
        "number says why there is no more in a cell:",
        "",
        *(f"{number}. {text}." for number, text in enumerate(reasons, 1)),
        "",
        "## By which test",
        "",
        *_table(
            ("launcher", "trainer", "shows", "test", "outcome"),
            [(*each[:3], f"`{each.test}`", each.outcome) for each in found],
        ),
    ]
    return "\n".join(lines) + "\n"


def told(text: str) -> list[Shown]:
    """Returns what a page has in its second table."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count("|") == 6 and "::" in line]
    return [
        Shown(launcher, trainer, claims, test.strip("`"), outcome) for launcher, trainer, claims, test, outcome in rows
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.supported", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, required=True, help="the page to write")
    parser.add_argument("--keep", action="store_true", help="what the page says of tests that did not run")
    parser.add_argument("reports", nargs="+", type=Path, help="of pytest --junitxml")
    asked = parser.parse_args(argv)
    ended = {each.test: each.outcome for each in told(asked.page.read_text())} if asked.keep else {}
    ended.update(outcomes(asked.reports))
    asked.page.write_text(page([each._replace(outcome=ended.get(each.test, "not run")) for each in marks()]))


if __name__ == "__main__":
    main()
