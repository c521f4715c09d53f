"""Provokes stalls in real jobs, and compares the verdicts of the launcher with what was provoked.

    python -m tests.verdicts --runs 20 --load 4 --json FILE       # all kinds, with four processes that take the CPU
    python -m tests.verdicts --kinds "own code;frozen process"

Root, for hosts of their own and a disk that is full. Replica 2 of three does what the kind says. The verdict is the one
that the launcher tells by itself; before there is a view, the one that is asked for. All that it says of waits that
have begun with the stall counts: one wrong verdict, also after a right one, and the stall was told wrongly. What it
says of earlier waits is kept as `others`: a busy machine has stalls of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from ftcomm.bench.header import header
from tests.verdicts.kinds import KINDS, StallKind
from tests.verdicts.provoke import Told, run


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def batches(kinds: list[StallKind], runs: int) -> list[list[StallKind]]:
    """Returns the stalls of each job, such that what was cut off has about as much of each kind. Those that need no
    network follow each other, so that few jobs have to start; those that kill somebody come last."""
    alone = [[kind] for kind in kinds if kind.alone or kind.network]
    together = sorted((kind for kind in kinds if not (kind.alone or kind.network)), key=lambda kind: not kind.heals)
    return [*alone, *([together] if together else [])] * runs


def summary(told: list[Told]) -> list[dict[str, Any]]:
    rows = []
    for name, group in itertools.groupby(sorted(told, key=lambda one: one.kind), key=lambda one: one.kind):
        ones = list(group)
        waits = sorted(one.latency for one in ones if one.latency == one.latency)
        rows.append(
            {
                "kind": name,
                "runs": len(ones),
                "right": sum(not one.mistake for one in ones),
                "latency_p50": round(statistics.median(waits), 3) if waits else None,
                "latency_max": round(waits[-1], 3) if waits else None,
                "within_1_s": sum(wait <= 1.0 for wait in waits),
                "load_p50": round(statistics.median(one.load for one in ones), 1),
            }
        )
    return rows


def write(path: Path, begun: dict[str, Any], told: list[Told]) -> None:
    """Replaces the results, so that a run that is cut off leaves what it has found."""
    result = {"header": begun, "summary": summary(told), "stalls": [msgspec.to_builtins(one) for one in told]}
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(result, indent=1).replace(f"{Path.cwd()}/", "").replace("NaN", "null") + "\n")
    new.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--load", type=int, default=0, metavar="N", help="processes that take the CPU")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once")
    parser.add_argument("--kinds", default="", help=f"of {'; '.join(kind.name for kind in KINDS)}, with ; between them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after each stall")
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.kinds.split(";") if name.strip()]
    if unknown := set(wanted) - {kind.name for kind in KINDS}:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; see --help")
    kinds = [kind for kind in KINDS if not wanted or kind.name in wanted]
    begun, told = header(), list[Told]()
    spawn = multiprocessing.get_context("spawn")
    found = spawn.Manager().Queue()
    with load(arguments.load), ProcessPoolExecutor(arguments.jobs, spawn) as pool:
        jobs = [pool.submit(run, batch, found) for batch in batches(kinds, arguments.runs)]
        for job in jobs:
            job.add_done_callback(lambda _: found.put(None))
        for _ in jobs:
            while (one := found.get()) is not None:
                told.append(one)
                print(f"{len(told)} of {len(kinds) * arguments.runs}: {one.sentence}", flush=True)
                if arguments.json:
                    write(arguments.json, begun, told)
        for job in jobs:
            job.result()
    for row in summary(told):
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    failed = sum(bool(one.mistake) for one in told)
    sys.exit(f"{failed} of {len(told)} wrong" if failed else 0)


if __name__ == "__main__":
    main()
