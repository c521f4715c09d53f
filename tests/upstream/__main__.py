"""Run the suites of torch and torchft, as they are installed, on ftcomm and on gloo, and print where they differ.

    python -m tests.upstream                       # make test-upstream: all of torch's, and torchft's if it is there
    python -m tests.upstream -k all_gather --json out.json

Needs expecttest (pip install 'ftcomm[dev]'). The exit code is 1 if a test that gloo passes fails on ftcomm without a
reason in `REASONS`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import torch

HERE = Path(__file__).parent
BACKENDS = ("gloo", "ftcomm")
SUITES = {"torch": "suite_torch.py", "torchft": "suite_torchft.py"}

# Why a test that gloo passes fails on ftcomm: the beginning of its name -> what is so.
REASONS = {
    "test_barrier_timeout": "timeouts of a second, not above the heartbeat timeout of 5 s: refused",
    "test_monitored_barrier": "a plain barrier, which names no rank; torch lets gloo alone have it before 2.14",
    "test_sparse_all_reduce": "sparse tensors are refused",
}


def run(suite: str, backend: str, select: str, folder: Path) -> dict[str, str]:
    """Each test -> passed, failed or skipped."""
    report = folder / f"{suite}-{backend}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--timeout=300"]
    command += [str(HERE / SUITES[suite]), *(["-k", select] if select else [])]
    env = {**os.environ, "FTCOMM_UPSTREAM_BACKEND": backend, "FTCOMM_LOG": "error", "OMP_NUM_THREADS": "1"}
    with (folder / f"{suite}-{backend}.log").open("w") as log:
        done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=HERE.parents[1])
    if not report.exists():
        raise SystemExit(f"{suite} on {backend} has ended with code {done.returncode}; see {log.name}")
    outcomes = {}
    for case in xml.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = case.get("name", "")
        outcomes[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return outcomes


def reason(name: str) -> str:
    return next((why for begin, why in REASONS.items() if name.startswith(begin)), "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="which tests, as pytest takes it")
    parser.add_argument("--suites", default="torch,torchft", help="comma-separated")
    parser.add_argument("--json", type=Path, help="where to write all outcomes")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ftcomm-upstream-"))
    print(f"torch {torch.__version__}; logs in {folder}")
    code, told = 0, {}
    for suite in asked.suites.split(","):
        outcomes = {backend: run(suite, backend, asked.k, folder) for backend in BACKENDS}
        told[suite] = outcomes
        print(f"\n| {suite} | passed | failed | skipped |\n|---|---|---|---|")
        for backend, of_all in outcomes.items():
            count = Counter(of_all.values())
            print(f"| {backend} | {count['passed']} | {count['failed']} | {count['skipped']} |")
        different = [name for name, outcome in outcomes["ftcomm"].items() if outcomes["gloo"].get(name) != outcome]
        if different:
            print("\n| test | gloo | ftcomm | why |\n|---|---|---|---|")
        for name in sorted(different):
            gloo, ours = outcomes["gloo"].get(name, "absent"), outcomes["ftcomm"][name]
            worse = gloo == "passed" and ours == "failed"
            print(f"| {name} | {gloo} | {ours} | {reason(name) if worse else ''} |")
            code |= worse and not reason(name)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"torch": torch.__version__, "outcomes": told}, indent=1, sort_keys=True))
    return code


if __name__ == "__main__":
    sys.exit(main())
