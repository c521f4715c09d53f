"""`ftcomm bench overhead`: what fault tolerance costs while nothing fails, by taking it out of the same engine.

    off         an op returns as soon as this rank has its result; nobody looks how long ops take, or for signs of life
    stability   an op returns when all are known to hold it, which is what a survivor's result rests on
    ftcomm      and detection: heartbeats, deadlines, who waits for whom. The product
    verify      and FTCOMM_VERIFY=1: all compare their results

What is taken out is taken out here, by subclasses that nobody else has: the product has no such switch. What sleeps
until a process ends is there in all four.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.bench.collective import Contestant, Request, Row
from ftcomm.bench.stats import median
from ftcomm.collective.operation import Operation
from ftcomm.collective.stall import Due, StallWatch
from ftcomm.collective.stream import Stream

if TYPE_CHECKING:
    from ftcomm.group import Group

LEVELS = ("off", "stability", "ftcomm", "verify")
BIG, MOST_PCT = 1 << 20, 3.0  # of `ftcomm` over `off`: per cent from this size on
SMALL, MOST_US = 1 << 10, 1.0  # and microseconds at this one
# s without a sign of life, and that an op may take: so long that nothing of either comes while we measure
QUIET = (("heartbeat_timeout", 3600.0), ("op_timeout", 100_000.0))


class Hasty(Stream):
    """Returns an op without knowing that the others hold it: right while nobody is lost, wrong at the first loss."""

    def stable(self, op: Operation) -> bool:
        return 0 <= op.end <= self.taken


class Blind(StallWatch):
    """Does not know how long anything takes."""

    def returns(self, op: Operation) -> None:
        pass

    def waits(self, epoch: int, op: Operation, missing: tuple[int, ...]) -> Due:
        return Due.NOTHING


def take_out(group: Group, level: str) -> None:
    """From here on ops of this rank run at that level; all ranks must call it between the same two ops."""
    exchange: Any = group._exchange
    exchange._stream.__class__ = Hasty if level == "off" else Stream
    exchange._watch.__class__ = Blind if level in ("off", "stability") else StallWatch


@dataclasses.dataclass(frozen=True)
class Overhead(Request):
    def contestants(self) -> list[Contestant]:
        return [
            Contestant("off", "shm", "ftcomm-quiet", options=QUIET),
            Contestant("stability", "shm", "ftcomm-quiet", options=QUIET),
            Contestant("ftcomm", "shm", "ftcomm"),
            Contestant("verify", "shm", "ftcomm-verify", (("FTCOMM_VERIFY", "1"),)),
        ]


class Cost(msgspec.Struct, frozen=True):
    """Of one level at one size, beside the level before: medians over the rounds' differences."""

    level: str
    ranks: int
    bytes: int
    rounds: int
    time_us_p50: float
    over_off_us: float | None  # None for off itself
    over_off_pct: float | None
    round_over_off_us: list[float]
    wrong: int

    @property
    def good(self) -> bool:
        """Whether fault tolerance costs no more than it may; of other levels and sizes in between nothing is asked."""
        if self.level != "ftcomm" or self.over_off_us is None or self.over_off_pct is None:
            return True
        if self.bytes >= BIG:
            return self.over_off_pct <= MOST_PCT
        return self.bytes > SMALL or self.over_off_us <= MOST_US


def costs(rows: Sequence[Row]) -> list[Cost]:
    """Of one size and place. Raises `ValueError` where a level failed."""
    by = {row.library: row for row in rows}
    found = []
    for level in LEVELS:
        row, off = by[level], by["off"]
        if row.time_us_p50 is None:
            raise ValueError(f"{level}: {row.error}")
        more = [a - b for a, b in zip(row.round_us, off.round_us, strict=True)]
        shares = [100 * (a / b - 1) for a, b in zip(row.round_us, off.round_us, strict=True)]
        found.append(
            Cost(
                level=level,
                ranks=row.ranks,
                bytes=row.bytes,
                rounds=row.rounds,
                time_us_p50=row.time_us_p50,
                over_off_us=None if level == "off" else median(more),
                over_off_pct=None if level == "off" else median(shares),
                round_over_off_us=[] if level == "off" else more,
                wrong=row.wrong,
            )
        )
    return found


# -- for the terminal --------------------------------------------------------------------------------------------------


def heading() -> list[str]:
    first = f"#{'size':>10} {'ranks':>5} {'level':>10} {'p50':>10} {'over off':>10} {'over off':>9} {'over rounds':>19}"
    return [f"{first} {'#wrong':>7}", f"#{'(B)':>10} {'':>16} {'(us)':>10} {'(us)':>10} {'(%)':>9} {'(us)':>19}"]


def line(cost: Cost) -> str:
    text = f" {cost.bytes:>10} {cost.ranks:>5} {cost.level:>10} {cost.time_us_p50:>10.2f}"
    if cost.over_off_us is None or cost.over_off_pct is None:
        return f"{text} {'':>10} {'':>9} {'':>19} {cost.wrong:>7}"
    spread = f"{min(cost.round_over_off_us):.2f} to {max(cost.round_over_off_us):.2f}"
    return f"{text} {cost.over_off_us:>10.2f} {cost.over_off_pct:>9.1f} {spread:>19} {cost.wrong:>7}"


def footer(costs: Sequence[Cost]) -> str:
    missed = [cost for cost in costs if not cost.good]
    said = f"fault tolerance on against off: {MOST_PCT:g}% at most from 1M on, {MOST_US:g} us at 1K"
    return f"# {said}: " + ("OK" if not missed else f"missed at {', '.join(str(cost.bytes) for cost in missed)} bytes")
