"""Measures who makes the others wait, over the steps that recordings hold; pure.

A rank waits in an op from its call until all others have called, by its own clock. The rest of a step is its own: what
it computes, and what the network takes. Its slowdown is its own time over the median of the others', so a rank that
takes 1.3 times as long has a slowdown of 1.3. What comes after all have called is the network's: a wait of an op for a
replica that began then counts against the way to that replica.

Somebody is named by a test that holds however long one looks (an e-detector: arXiv 2203.03532, section 3). Under even
load, whatever came before, no rank is among the slowest `1 / odds` of all more often than its share of steps. A gambler
who bets on it at these odds then wins nothing on average, and one who begins again whenever he has lost his stake has
at most `n` times the stake after `n` steps on average. `_worth` is what he has to have before somebody is named: among
all ranks, in an hour of ten steps a second, that comes by chance in one of twenty hours at most, and far less often
since a slowdown up to `TOLERATED` is no win either. It takes some 20 to 40 steps of a rank that is slower by a third. A
pause in one step is one bet, however long it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from ftcomm.diagnosis.facts import Rank
from ftcomm.recorder.reader import Recording

TOLERATED = 1.05  # a slowdown up to this has no cause that could be named
TELLING = 1.1  # a median slowdown below this is not worth a word, however sure it is
BETS = (0.2, 0.5, 0.8)  # shares of what the gambler has
SLOWEST = 4  # a rank that is late is among a quarter of all
HOUR = 36_000  # steps
CHANCE = 0.05  # that anybody is named in an hour of even load, at most
RECENT = 30  # steps of which that median is
STEPS = 1000  # the newest that are looked at


class StepTimes(msgspec.Struct, frozen=True):
    """A step of a rank, in seconds of its own clock: how long it took, how much of that the rank waited for others to
    call, and, by replica, for the network."""

    length: float
    waited: float
    network: Mapping[int, float] = {}


class SlowdownOfRank(msgspec.Struct, frozen=True):
    """The slowdown of one rank. `share` is the share of all time in which the others waited for it alone to come,
    `network` the share in which members that had all come waited for it. `named`: "compute", "network", or ""; `since`
    is the step or op from which on that holds."""

    rank: Rank
    host: str
    rack: str
    steps: int
    slowdown: float
    share: float
    network: float
    named: str = ""
    since: int = -1


class SlowdownOfGroup(msgspec.Struct, frozen=True):
    """The slowdowns of the members of a group, those first that cost most; and what hosts and racks cost, by share."""

    group: str
    steps: int
    seconds: float
    ranks: tuple[SlowdownOfRank, ...]
    hosts: tuple[tuple[str, float], ...]
    racks: tuple[tuple[str, float], ...]


class BettingTest:
    """A sequential test by betting: it bets that a rank is late again, against odds of one in `odds`, and begins anew
    when that has cost the stake."""

    def __init__(self, ranks: int, odds: float) -> None:
        self._worth = math.log(ranks * HOUR / CHANCE)
        self._wins = [math.log1p(bet * (odds - 1)) for bet in BETS]
        self._loses = [math.log1p(-bet) for bet in BETS]
        self._has = [0.0] * len(BETS)
        self._named = False

    def step(self, late: bool) -> bool:
        """Bet on one more step. Returns whether the rank is named by now."""
        most = self._worth + math.log(len(BETS))  # more would only delay the word that it keeps up again
        changes = self._wins if late else self._loses
        self._has = [min(most, max(0.0, has) + change) for has, change in zip(self._has, changes, strict=True)]
        best = max(self._has)
        if best < self._worth / 2:
            self._named = False
        else:  # the mean of the three counts
            worth = best + math.log(sum(math.exp(has - best) for has in self._has) / len(BETS))
            self._named = worth >= self._worth or (self._named and worth >= self._worth / 2)
        return self._named


def slowdowns(
    group: str, times: Mapping[Rank, Mapping[int, StepTimes]], where: Mapping[Rank, tuple[str, str]]
) -> SlowdownOfGroup:
    """Returns how the members of one group keep up. `times` are by step, `where` says host and rack of each."""
    members = sorted(times)
    common = sorted(set.intersection(*(set(times[rank]) for rank in members)))[-STEPS:] if members else []
    alone = dict.fromkeys(members, 0.0)
    network = dict.fromkeys(members, 0.0)
    ratios: dict[Rank, list[float]] = {rank: [] for rank in members}
    few = max(1, len(members) // SLOWEST)
    late = {rank: BettingTest(len(members), len(members) / few) for rank in members}
    cut = {rank: BettingTest(len(members), max(2, len(members))) for rank in members}
    named: dict[Rank, tuple[str, int]] = {}
    total = 0.0
    for step in common if len(members) > 1 else ():
        row = {rank: times[rank][step] for rank in members}
        length = median(one.length for one in row.values())
        if length <= 0:
            continue
        total += length
        blamed = _by_network(row)
        ordered = sorted(members, key=lambda rank: row[rank].waited)
        alone[ordered[0]] += max(0.0, row[ordered[1]].waited - row[ordered[0]].waited)
        own = {rank: row[rank].length - row[rank].waited for rank in members}
        slowest = set(sorted(members, key=lambda rank: -own[rank])[:few])
        for rank in members:
            others = median(own[other] for other in members if other != rank)
            slowdown = own[rank] / max(others, length / 1000)
            ratios[rank].append(slowdown)
            network[rank] += blamed.get(rank, 0.0)
            computes = late[rank].step(slowdown > TOLERATED and rank in slowest)
            carries = cut[rank].step(_stands_out(rank, blamed, length))
            if computes and median(ratios[rank][-RECENT:]) < TELLING:
                computes = False
            phase = "compute" if computes else "network" if carries else ""
            if not phase:
                named.pop(rank, None)
            elif named.get(rank, ("", 0))[0] != phase:
                named[rank] = phase, step
    found = [
        SlowdownOfRank(
            rank=rank,
            host=where.get(rank, ("", ""))[0],
            rack=where.get(rank, ("", ""))[1],
            steps=len(ratios[rank]),
            slowdown=median(ratios[rank]) if ratios[rank] else 1.0,
            share=alone[rank] / total if total else 0.0,
            network=network[rank] / total if total else 0.0,
            named=named.get(rank, ("", 0))[0],
            since=named.get(rank, ("", -1))[1],
        )
        for rank in members
    ]
    found.sort(key=lambda one: (not one.named, -one.share - one.network, one.rank))
    return SlowdownOfGroup(
        group=group,
        steps=len(common),
        seconds=total,
        ranks=tuple(found),
        hosts=_summed((one.host, one.share + one.network) for one in found),
        racks=_summed((one.rack, one.share + one.network) for one in found),
    )


def _by_network(row: Mapping[Rank, StepTimes]) -> dict[Rank, float]:
    """Returns for how long each rank was waited for by the network: by whom it was longest."""
    blamed: dict[Rank, float] = {}
    for (_, shard), one in row.items():
        for replica, seconds in one.network.items():
            key = replica, shard
            if key in row:
                blamed[key] = max(blamed.get(key, 0.0), seconds)
    return blamed


def _stands_out(rank: Rank, blamed: Mapping[Rank, float], length: float) -> bool:
    """Whether the way to one rank alone held a step up. With two members each waits for the other, and nobody stands
    out."""
    mine = blamed.get(rank, 0.0)
    return mine > (TELLING - 1) * length and all(2 * other < mine for r, other in blamed.items() if r != rank)


def _summed(shares: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    found: dict[str, float] = {}
    for name, share in shares:
        if name:
            found[name] = found.get(name, 0.0) + share
    return tuple(sorted(found.items(), key=lambda item: (-item[1], item[0])))


# -- from recordings ---------------------------------------------------------------------------------------------------


def step_times(life: Recording, group: str) -> dict[int, StepTimes]:
    """Returns the steps of one group that a recording holds from beginning to end: by step boundary, or by op where the
    script passes none. Steps in which the view changed are left out."""
    ops: dict[int, list[tuple[float, float, float]]] = {}
    disturbed = set()
    waits: dict[int, dict[int, float]] = {}
    came_at: dict[int, tuple[int, float]] = {}
    stepped = any(op.boundary is not None for op in life.ops if op.group == group)
    for op in life.ops:
        if op.group != group or op.returned is None:
            continue
        key = op.boundary if stepped else op.number
        if key is None:
            continue
        if op.retries or op.failed or op.last_epoch not in (0, op.epoch):
            disturbed.add(key)
        came = op.returned if op.arrived is None else min(op.arrived, op.returned)
        came_at[op.number] = key, came
        ops.setdefault(key, []).append((op.called, came, op.returned))
    for wait in life.waits:
        if wait.group == group and wait.op in came_at:
            key, came = came_at[wait.op]
            if wait.began >= came:
                spent = waits.setdefault(key, {})
                spent[wait.replica] = spent.get(wait.replica, 0.0) + wait.seconds
    found = {}
    keys = sorted(ops)
    for before, key in pairwise(keys):
        began = max(returned for _, _, returned in ops[before])
        ended = max(returned for _, _, returned in ops[key])
        if before in disturbed or key in disturbed or key - before != 1 or ended <= began:
            continue
        waited = _covered([(max(called, began), came) for called, came, _ in ops[key]])
        found[key] = StepTimes(ended - began, waited, waits.get(key, {}))
    return found


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the length of the union of spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def of_job(lives: Mapping[Rank, Recording], racks: Mapping[Rank, str]) -> tuple[SlowdownOfGroup, ...]:
    """Returns how the ranks of a job keep up, one group for each rank i of all replicas, from recordings of living
    ranks."""
    columns: dict[tuple[int, str], dict[Rank, Mapping[int, StepTimes]]] = {}
    for rank, life in lives.items():
        for group in life.groups:
            if group.kind == "job" and group.closed is None and (times := step_times(life, group.name)):
                columns.setdefault((rank[1], group.name), {})[rank] = times
    where = {rank: (life.host, racks.get(rank, "")) for rank, life in lives.items()}
    return tuple(
        slowdowns(name if column == 0 else f"{name}, shard {column}", times, where)
        for (column, name), times in sorted(columns.items())
        if len(times) > 1
    )
