"""Does anything grow? What /proc says of each process while the job is whole, and a straight line through it.

Processes live short lives here, so one line is fitted through all ranks at once: each process has its own level, all
have one slope (a regression with a fixed effect for each process). A leak is a slope that is clearly not chance and
would matter in a day.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WARM_UP = 20.0  # s of a process's life in which caches fill, imports end and buffers find their size
SURE = 5.0  # standard errors
ENOUGH = 30  # samples before a slope says anything

LIMITS = {"fds": 1.0, "threads": 1.0, "segments": 1.0, "memory": 1.0}  # a minute: counts, and MB of memory


@dataclasses.dataclass(frozen=True)
class Sample:
    time: float  # s
    fds: int
    threads: int
    segments: int  # mappings of shared memory of ftcomm
    memory: float  # MB that are resident; without pages of files, such as code that is used for the first time

    def value(self, what: str) -> float:
        return float(getattr(self, what))


@dataclasses.dataclass(frozen=True)
class Slope:
    """Growth a minute, with its standard error."""

    growth: float
    error: float
    samples: int

    def leaks(self, limit: float) -> bool:
        return self.samples >= ENOUGH and self.growth > limit and self.growth > SURE * self.error


def look(pid: int, now: float) -> Sample | None:
    """Returns a sample of a process; None if it is gone."""
    proc = Path("/proc", str(pid))
    with contextlib.suppress(OSError, KeyError, ValueError):
        fds = sum(1 for _ in (proc / "fd").iterdir())
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        segments = (proc / "maps").read_text().count("/memfd:ftcomm")
        memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024
        return Sample(now, fds, int(fields["Threads"]), segments, memory)
    return None


def slope(histories: Sequence[Sequence[Sample]], what: str) -> Slope:
    """The common slope of all processes, each after its warm-up."""
    products = squares = 0.0
    centred: list[tuple[float, float]] = []
    processes = 0
    for history in histories:
        late = [sample for sample in history if sample.time - history[0].time >= WARM_UP]
        if len(late) < 2:
            continue
        processes += 1
        middle = sum(sample.time for sample in late) / len(late)
        level = sum(sample.value(what) for sample in late) / len(late)
        centred += [((sample.time - middle) / 60, sample.value(what) - level) for sample in late]
    for time, value in centred:
        products += time * value
        squares += time * time
    if squares == 0:
        return Slope(0.0, math.inf, len(centred))
    growth = products / squares
    rest = sum((value - growth * time) ** 2 for time, value in centred)
    freedom = max(1, len(centred) - processes - 1)
    return Slope(growth, math.sqrt(rest / freedom / squares), len(centred))


class Leaks:
    """Samples by process, of the ranks and of the launcher."""

    def __init__(self) -> None:
        self.ranks: dict[int, list[Sample]] = {}
        self.launcher: list[Sample] = []

    def sample(self, launcher: int, ranks: Sequence[int], now: float) -> None:
        if (sample := look(launcher, now)) is not None:
            self.launcher.append(sample)
        for pid in ranks:
            if (sample := look(pid, now)) is not None:
                self.ranks.setdefault(pid, []).append(sample)

    def slopes(self) -> dict[str, dict[str, Slope]]:
        """Returns the slope of each resource of the ranks and of the launcher."""
        who: Mapping[str, list[list[Sample]]] = {"ranks": list(self.ranks.values()), "launcher": [self.launcher]}
        return {name: {what: slope(histories, what) for what in LIMITS} for name, histories in who.items()}

    def unsure(self) -> list[str]:
        """The processes of which too little was seen to tell."""
        return [
            f"{slopes['fds'].samples} of {ENOUGH} samples of {'the launcher' if who == 'launcher' else 'ranks'}"
            for who, slopes in self.slopes().items()
            if slopes["fds"].samples < ENOUGH
        ]

    def found(self) -> list[str]:
        return [
            f"{what} of the {who} grow by {growth.growth:.2f} a minute"
            for who, slopes in self.slopes().items()
            for what, growth in slopes.items()
            if growth.leaks(LIMITS[what])
        ]
