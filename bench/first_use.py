"""`ftcomm bench first-use`: what a job of NumPy arrays takes from `import ftcomm` to its first all-reduce.

Each round is a job under the real launcher, whose ranks are interpreters that have imported NumPy alone. Times of the
processor are of all threads of a rank; what a rank waits for the others is in the times of the clock.

    import     import ftcomm
    init       ftcomm.init(): settings, the coordinator, the group
    allreduce  the first all-reduce, of 4 KB: the regions, the peers, and the modules that an op needs
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import msgspec

from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, option
from ftcomm.bench.stats import median
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch import Launcher, RunOptions
from ftcomm.launch.run import FINISHED

MOST_MS = 300.0  # of the processor
SCRIPT = Path(__file__).with_name("first_use_rank.py")
MARK = "first-use "


@dataclasses.dataclass(frozen=True)
class FirstUseRequest:
    """Time what a rank of a NumPy job takes until its first all-reduce has returned, without torch.

    Times of the processor hardly depend on what else the machine does; those of the clock do.
    """

    ranks: int = option(2, help="Replicas of one rank each.")
    rounds: int = option(5, kind=click.INT, help="Jobs one after the other.")

    def smoke(self) -> FirstUseRequest:
        """One job of two ranks."""
        return FirstUseRequest(2, 1)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if self.ranks < 2 or self.rounds < 1:
            raise SettingsError("--ranks has to be at least 2, and --rounds at least 1.")


class FirstUse(msgspec.Struct, frozen=True):
    """One rank of one job. Milliseconds of the processor, but for `clock_ms`."""

    round: int
    rank: int
    numpy_ms: float  # before the rest, and no part of it
    import_ms: float
    init_ms: float
    allreduce_ms: float
    cpu_ms: float  # of the last three
    clock_ms: float
    modules: int  # imported by the last three


class _Said(msgspec.Struct, frozen=True):
    parts: dict[str, tuple[float, float]]
    modules: int


async def measure(request: FirstUseRequest, report: BenchReport) -> None:
    for number in range(request.rounds):
        report.progress(f"job {number + 1}", number / request.rounds)
        lines: list[tuple[int, str]] = []
        options = RunOptions(script=str(SCRIPT), replicas=request.ranks, env={"OMP_NUM_THREADS": "1"})
        launcher = Launcher(options, on_line=lambda replica, _, line, lines=lines: lines.append((replica, line)))
        if await launcher.run() != FINISHED:
            raise FtcommError("the ranks failed; their lines:\n  " + "\n  ".join(line for _, line in lines))
        found = {replica: line.removeprefix(MARK) for replica, line in lines if line.startswith(MARK)}
        for replica, line in sorted(found.items()):
            report.add(_record(number, replica, msgspec.json.decode(line, type=_Said)))


def _record(number: int, rank: int, said: _Said) -> FirstUse:
    cpu = {name: 1e3 * seconds for name, (seconds, _) in said.parts.items()}
    own = [name for name in cpu if name != "numpy"]
    return FirstUse(
        round=number,
        rank=rank,
        numpy_ms=cpu["numpy"],
        import_ms=cpu["import"],
        init_ms=cpu["init"],
        allreduce_ms=cpu["allreduce"],
        cpu_ms=sum(cpu[name] for name in own),
        clock_ms=sum(1e3 * said.parts[name][1] for name in own),
        modules=said.modules,
    )


COLUMNS = (
    Column("round", "", 5, lambda row: str(row.round + 1)),
    Column("rank", "", 4, lambda row: str(row.rank)),
    Column("import", "(ms)", 7, lambda row: f"{row.import_ms:.0f}"),
    Column("init", "(ms)", 7, lambda row: f"{row.init_ms:.0f}"),
    Column("allreduce", "(ms)", 9, lambda row: f"{row.allreduce_ms:.0f}"),
    Column("in all", "(ms)", 7, lambda row: f"{row.cpu_ms:.0f}"),
    Column("clock", "(ms)", 7, lambda row: f"{row.clock_ms:.0f}"),
    Column("modules", "", 7, lambda row: str(row.modules)),
    Column("NumPy", "(ms)", 7, lambda row: f"{row.numpy_ms:.0f}"),
)


def footer(rows: list[FirstUse]) -> list[str]:
    cpu, clock = median([row.cpu_ms for row in rows]), median([row.clock_ms for row in rows])
    good = "OK" if cpu <= MOST_MS else "missed"
    return [f"# first use: {cpu:.0f} ms of the processor, {clock:.0f} by the clock; at most {MOST_MS:g}: {good}"]


EXPERIMENT = Experiment(
    "first-use",
    FirstUseRequest,
    measure,
    (Table("rows", FirstUse, COLUMNS),),
    csv="rows",
    footer=lambda report: footer(report["rows"]) if report["rows"] else [],
)
