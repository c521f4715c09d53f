"""What is provoked, and which verdict on it is right."""

from __future__ import annotations

from typing import Any, NamedTuple

from ftcomm.diagnosis.causes import StallCause

CULPRIT = 2  # of the replicas 0, 1 and 2


class StallKind(NamedTuple):
    """A stall. `network`: it needs hosts of their own. `alone`: the job begins with it. `heals`: its cause goes
    away when it is told to, else the culprit is killed."""

    name: str
    cause: StallCause
    culprits: frozenset[int] = frozenset((CULPRIT,))
    line: str = ""  # the function that the verdict names
    network: bool = False
    alone: bool = False
    heals: bool = True


ALL = frozenset((0, 1, CULPRIT))
KINDS = (
    StallKind("own code", StallCause.OWN_CODE, line="own_code"),
    StallKind("data loader", StallCause.DATA_LOADER, line="__getitem__"),
    StallKind("compilation", StallCause.COMPILATION, line="compil"),
    StallKind("frozen process", StallCause.FROZEN),
    StallKind("garbage collector", StallCause.GARBAGE, line="garbage"),
    StallKind("no CPU", StallCause.STARVED),
    StallKind("full disk", StallCause.FULL_DISK, line="full_disk"),
    StallKind("own code, held", StallCause.OWN_CODE, line="holds_the_interpreter", heals=False),
    StallKind("other group", StallCause.OTHER_GROUP, frozenset((0, CULPRIT)), heals=False),
    StallKind("slow network", StallCause.SLOW_NETWORK, network=True),
    StallKind("cut network", StallCause.CUT, frozenset((1, CULPRIT)), network=True),
    StallKind("cut network, one way", StallCause.CUT_ONE_WAY, frozenset((1, CULPRIT)), network=True),
    StallKind("dead host", StallCause.DEAD_HOST, network=True),
    StallKind("never joined", StallCause.NEVER_JOINED, alone=True),
    StallKind("mismatch of calls", StallCause.MISMATCH, line="acts.py"),
    StallKind("swapped order of ops", StallCause.SWAPPED, line="acts.py"),
)
NAMED = {kind.name: kind for kind in KINDS}


def wrong(kind: StallKind, verdict: dict[str, Any]) -> str:
    """Returns what is wrong with a verdict; empty if it is right."""
    if verdict["cause"] != kind.cause.value:
        return f"the cause is {verdict['cause']!r}"
    culprits = {replica for replica, _ in verdict["culprits"]}
    if kind.cause is StallCause.SLOW_NETWORK:  # its cable is slow both ways, so that the other end may be any
        culprits &= kind.culprits
    if culprits != kind.culprits:
        return f"the culprits are {sorted(culprits)}"
    if not any(kind.line in line for line in [*verdict["lines"], verdict["who"]]):
        return f"the lines are {verdict['lines']}"
    return ""
