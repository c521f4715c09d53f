"""Statistics of interruptions: the table of Llama 3, effective training time, failures by host. Pure.

The table is the one of the Llama 3 report (arXiv 2407.21783, table 5): component, category, count, and share of all
unplanned interruptions. A host is to be taken out of service if chance hardly explains its failures: if
all hosts failed at one rate, each failure would hit this one with the share that it has of all observed time, so their
number would be binomial. The probability of as many or more has to be below `DOUBT`, divided by the number of hosts,
since each of them is another chance to be wrong. So an even fleet is wronged in at most one of a hundred reports.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from ftcomm.monitoring.causes import Kind
from ftcomm.monitoring.gpu_time import Use
from ftcomm.monitoring.history import JobRecord
from ftcomm.monitoring.interruptions import Interruption

DOUBT = 0.01
LEAST = 3  # failures of a host before it is judged

# Causes that may be the host's fault; what a program or a person does follows the job to any host.
OF_HOST = frozenset(Kind) - {Kind.PROGRAM, Kind.OPERATOR, Kind.PREEMPTION}


class CategoryRow(msgspec.Struct, frozen=True):
    """A row of the table of Llama 3."""

    component: str
    category: str
    count: int
    share: float  # of all unplanned interruptions
    gpu_seconds: float
    planned: bool = False


class HostRow(msgspec.Struct, frozen=True):
    """A host: how often it failed, and how long it was observed."""

    host: str
    seconds: float
    failures: int  # that may be the host's fault
    interruptions: int
    mtbf: float | None  # seconds between failures; None: there was none
    chance: float  # the probability of so many failures or more, if all hosts were alike
    suspect: bool  # take it out of service


class Statistics(msgspec.Struct, frozen=True):
    """All that `ftcomm report` says; times are seconds, amounts GPU-seconds."""

    jobs: int
    seconds: float  # for which jobs were observed
    gpu_seconds: float
    uses: dict[str, float]  # of each `Use`
    effective: float | None  # the share of all GPU-seconds since the first view that was training
    unplanned: int
    planned: int
    mtbf: float | None  # between unplanned interruptions
    lost: float  # by interruptions
    phases: dict[str, float]  # the same by phase
    causes: dict[str, int]
    categories: list[CategoryRow]
    hosts: list[HostRow]


def effective(uses: dict[str, float]) -> float | None:
    """Returns the effective training time ratio: training over all since the first view, or None before it."""
    total = sum(amount for use, amount in uses.items() if use != Use.START.value)
    return uses.get(Use.TRAINING.value, 0.0) / total if total > 0 else None


def binomial_tail(count: int, total: int, share: float) -> float:
    """Returns the probability that of `total` events `count` or more come to one that has `share` of the time."""
    if count <= 0 or share >= 1.0:
        return 1.0
    if share <= 0.0:
        return 0.0
    return min(1.0, math.fsum(_binomial(number, total, share) for number in range(count, total + 1)))


def _binomial(number: int, total: int, share: float) -> float:
    ways = math.lgamma(total + 1) - math.lgamma(number + 1) - math.lgamma(total - number + 1)
    return math.exp(ways + number * math.log(share) + (total - number) * math.log1p(-share))


def statistics(jobs: Sequence[JobRecord], interruptions: Iterable[Interruption]) -> Statistics:
    """Compute the statistics."""
    every = list(interruptions)
    unplanned = [x for x in every if not x.cause.planned]
    uses: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    for job in jobs:
        uses.update(job.gpu_seconds)
    for each in every:
        phases.update(each.price)
    seconds = sum(max(0.0, job.seen - job.began) for job in jobs)
    return Statistics(
        jobs=len(jobs),
        seconds=seconds,
        gpu_seconds=sum(uses.values()),
        uses=dict(uses),
        effective=effective(dict(uses)),
        unplanned=len(unplanned),
        planned=len(every) - len(unplanned),
        mtbf=seconds / len(unplanned) if unplanned else None,
        lost=sum(phases.values()),
        phases=dict(phases),
        causes=dict(Counter(x.cause.kind.value for x in every).most_common()),
        categories=_categories(every, len(unplanned)),
        hosts=_hosts(jobs, unplanned),
    )


def _categories(every: Sequence[Interruption], unplanned: int) -> list[CategoryRow]:
    groups: dict[tuple[bool, str, str], list[Interruption]] = {}
    for each in every:
        groups.setdefault((each.cause.planned, each.cause.component, each.cause.category), []).append(each)
    rows = [
        CategoryRow(
            component,
            category,
            len(those),
            0.0 if planned else len(those) / unplanned,
            sum(x.gpu_seconds for x in those),
            planned,
        )
        for (planned, component, category), those in groups.items()
    ]
    return sorted(rows, key=lambda row: (row.planned, -row.count, row.component))


def _hosts(jobs: Sequence[JobRecord], unplanned: Sequence[Interruption]) -> list[HostRow]:
    seconds: Counter[str] = Counter()
    for job in jobs:
        seconds.update(job.hosts)
    everything = Counter(x.host for x in unplanned if x.host)
    failures = Counter(x.host for x in unplanned if x.host and x.cause.kind in OF_HOST)
    hosts = sorted(seconds.keys() | everything.keys())
    rows = []
    for host in hosts:
        share = seconds[host] / sum(seconds.values()) if seconds[host] else 1.0
        chance = binomial_tail(failures[host], sum(failures.values()), share)
        rows.append(
            HostRow(
                host,
                seconds[host],
                failures[host],
                everything[host],
                seconds[host] / failures[host] if failures[host] else None,
                chance,
                failures[host] >= LEAST and chance < DOUBT / len(hosts),
            )
        )
    return sorted(rows, key=lambda row: (not row.suspect, -row.failures, row.host))
