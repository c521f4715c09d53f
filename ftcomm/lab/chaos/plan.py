"""Chooses the next fault. Pure, so that a seed gives the same choices on the same job."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Set

LOCAL = ("kill", "stop", "slow", "coordinator", "coordinator-stop", "roll-back")  # possible on any job
TOLD = ("hold", "fork", "orphan")  # need a script that does it when it is told to, as `ftcomm.lab.chaos.train` does
NETWORK = ("partition", "oneway", "cut-off")  # need hosts of their own: `ftcomm run --hosts netns`
NETEM = ("delay", "loss")  # and a kernel with netem
KINDS = (*LOCAL, *TOLD, *NETWORK, *NETEM)
REMOVES_NOBODY = (
    "coordinator",
    "coordinator-stop",
    "roll-back",
    "hold",
    "fork",
    "cut-off",
)  # no replica should go for one of these

COORDINATOR = -1  # as the other end of a cut

LONGEST_AWAY = 3.0  # s that a coordinator is away
SLOW = (2.0, 6.0)  # s that a replica is slowed down
CUT = (1.0, 4.0)  # s that a cut lasts after it has been noticed, or in all if it need not be noticed
STOPPED = (0.2, 2.0)  # s from the removal of a stopped replica to SIGCONT
HOLD = 1.5  # heartbeats that an interpreter is held: longer than silence may last, shorter than an op may
FORKED = 2.0  # heartbeats that forked children live: a death that they hide is known by silence, while they do
QUIET = (0.5, 3.0)  # heartbeats that a coordinator is stopped, cut off from all, or has an older store


@dataclasses.dataclass(frozen=True)
class Fault:
    """`replicas` are those that may be lost by it; the first is hit. `seconds` is how long it lasts, see the constants
    above; `ranks` are those of the first that are hit. A cut is between the first and `other` (None: everybody)."""

    number: int
    kind: str
    replicas: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    other: int | None = None
    outgoing: bool = True  # which way a one-way cut stops, seen from the first
    views: int = 0  # that a store is rolled back by
    cable: bool = False  # of one that is slowed down: its network is, and not its processes

    def __str__(self) -> str:
        if self.kind == "coordinator":
            return f"coordinator away for {self.seconds:.1f} s"
        if self.kind == "coordinator-stop":
            return f"coordinator stopped for {self.seconds:.1f} heartbeats"
        if self.kind == "roll-back":
            return f"store of the coordinator {self.views} views older for {self.seconds:.1f} heartbeats"
        if self.kind == "cut-off":
            which = "it is not heard" if self.outgoing else "it hears nobody"
            way = f", one way: {which}" if self.other is not None else ""
            return f"cut the coordinator from everybody for {self.seconds:.1f} heartbeats{way}"
        if self.kind == "hold":
            which = f"replica{'s' if len(self.replicas) > 1 else ''} {', '.join(map(str, self.replicas))}"
            return f"hold the interpreters of {which}"
        where = f"replica {self.replicas[0]}"
        if self.kind == "orphan":
            return f"kill {where} shard {self.ranks[0]}, whose forked children live on"
        if self.kind == "slow" and self.cable:
            return f"slow network of {where}"
        if self.kind in ("kill", "stop", "slow", "fork"):
            return f"{self.kind} {where} shard{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        far = {None: "everybody", COORDINATOR: "the coordinator"}.get(self.other, f"replica {self.other}")
        if self.kind == "partition":
            return f"cut {where} from {far}"
        if self.kind == "oneway":
            return f"cut {where} {'to' if self.outgoing else 'from'} {far}, one way"
        return f"{self.kind} on the network of {where}"


class Plan:
    """Draws faults. Kinds come in shuffled rounds, so that all of them come equally often."""

    def __init__(self, kinds: Collection[str], ranks_per_replica: int, seed: int, cables: bool = False) -> None:
        """Draw faults; with `cables` each replica has its own network."""
        self._cables = cables
        self._kinds = sorted(kinds)
        self._ranks = ranks_per_replica
        self._random = random.Random(seed)
        self._round: list[str] = []
        self._count = 0

    def next(self, untouched: Set[int], away: bool) -> Fault | None:
        """`untouched` contribute and are hit by nothing now; one of them is left alone. None if nothing is possible."""
        for _ in range(2):
            for kind in self._round:
                fault = self._draw(kind, sorted(untouched), away)
                if fault is not None:
                    self._round.remove(kind)
                    self._count += 1
                    return fault
            # Over, or nothing of it is possible now: the next round begins, what is left of this one stays for later.
            if len(self._round) < len(self._kinds):
                self._round += self._random.sample(self._kinds, len(self._kinds))
        return None

    def _draw(self, kind: str, untouched: list[int], away: bool) -> Fault | None:
        draw, number = self._random, self._count + 1
        if kind == "coordinator":
            return None if away else Fault(number, kind, seconds=draw.uniform(0.0, LONGEST_AWAY))
        if kind == "coordinator-stop":
            return None if away else Fault(number, kind, seconds=draw.uniform(*QUIET))
        if kind == "roll-back":
            views, seconds = draw.choice((1, 1, 2, 5)), draw.uniform(*QUIET)
            return None if away else Fault(number, kind, seconds=seconds, views=views)
        if kind == "cut-off":
            other, outgoing = draw.choice((None, COORDINATOR)), draw.random() < 0.5
            return None if away else Fault(number, kind, seconds=draw.uniform(*QUIET), other=other, outgoing=outgoing)
        if kind == "hold":  # also of all of them at once
            count = draw.choice((1, len(untouched)))
            return Fault(number, kind, tuple(draw.sample(untouched, count)), seconds=HOLD) if untouched else None
        ranks = tuple(range(self._ranks))
        one = (draw.choice(ranks),)
        if kind == "fork":
            return Fault(number, kind, (draw.choice(untouched),), one, FORKED) if untouched else None
        if len(untouched) < 2:
            return None
        hit = draw.choice(untouched)
        if kind in ("kill", "orphan"):
            return Fault(number, kind, (hit,), one)
        if kind == "stop":
            return Fault(number, kind, (hit,), draw.choice((one, ranks)), draw.uniform(*STOPPED))
        if kind == "slow":
            return Fault(number, kind, (hit,), ranks, draw.uniform(*SLOW), cable=self._cables and draw.random() < 0.5)
        if kind in NETEM:
            return Fault(number, kind, (hit,), seconds=draw.uniform(*SLOW))
        seconds, outgoing = draw.uniform(*CUT), draw.random() < 0.5
        # From one other only while a third is left alone: either of the two may go.
        others = [replica for replica in untouched if replica != hit] if len(untouched) > 2 else []
        other = draw.choice([None, COORDINATOR, *others])
        both = (hit,) if other in (None, COORDINATOR) else (hit, other)
        return Fault(number, kind, tuple(x for x in both if x is not None), ranks, seconds, other, outgoing)
