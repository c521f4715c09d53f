"""Run the suites of torch and torchft, as they are installed, on ftcomm and on gloo, and say where they differ.

    python -m tests.upstream                                      # all of torch's, and torchft's if it is there
    python -m tests.upstream -k all_gather --json out.json        # some; added to what is in the file
    python -m tests.upstream --page docs/upstream.md out.json ... # nothing is run: what the files have, as a page

Needs expecttest (pip install 'ftcomm[dev]'). The exit code is 1 if a test that gloo passes fails on ftcomm without a
reason in `reasons`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.upstream.outcomes import BACKENDS, Outcomes, add, load, new, read, unexplained
from tests.upstream.page import SUITES, page, tables

HERE = Path(__file__).parent


def run(suite: str, backend: str, select: str, folder: Path) -> Outcomes:
    """Runs one suite on one backend in a process of its own."""
    report = folder / f"{suite}-{backend}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--timeout=300"]
    command += [str(HERE / f"suite_{suite}.py"), *(["-k", select] if select else [])]
    settings = {"FTCOMM_UPSTREAM_BACKEND": backend, "FTCOMM_LOG": "error", "OMP_NUM_THREADS": "1"}
    settings["PYTHONHASHSEED"] = "0"  # some names of torchft's tests have the place in a set in them
    with (folder / f"{suite}-{backend}.log").open("w") as log:
        done = subprocess.run(
            command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, cwd=HERE.parents[1]
        )
    if not report.exists():
        raise SystemExit(f"{suite} on {backend} has ended with code {done.returncode}; see {log.name}")
    return read(report)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="which tests, as pytest takes it")
    parser.add_argument("--suites", help="comma-separated: torch, torchft")
    parser.add_argument("--json", type=Path, help="a file to which all outcomes are added")
    parser.add_argument("--page", nargs="+", type=Path, metavar="FILE", help="the page, and the files that it is of")
    asked = parser.parse_args()
    if asked.page:
        asked.page[0].write_text(page([json.loads(path.read_text()) for path in asked.page[1:]]))
        return 0
    there = [suite for suite in SUITES if suite != "torchft" or importlib.util.find_spec("torchft") is not None]
    folder = Path(tempfile.mkdtemp(prefix="ftcomm-upstream-"))
    print(f"logs in {folder}", flush=True)
    told = new() if asked.json is None else load(asked.json)
    bad = []
    for suite in asked.suites.split(",") if asked.suites else there:
        for backend in BACKENDS:
            add(told, suite, backend, run(suite, backend, asked.k, folder), asked.k)
        if asked.json is not None:
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            asked.json.write_text(json.dumps(told, indent=1, sort_keys=True))
        bad += unexplained(told, suite)
    print(tables(told))
    if bad:
        print(f"passed with gloo, and not with ftcomm, for no reason that is known: {', '.join(bad)}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
