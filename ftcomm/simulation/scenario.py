"""Draws a history from its seed: the job, its network, and how things go wrong."""

from __future__ import annotations

import dataclasses
import random

from ftcomm.control.timeouts import Timeouts
from ftcomm.simulation.network import NetworkConditions
from ftcomm.simulation.promises import ELEMENTS
from ftcomm.simulation.script import Workload

# One number of the chain of timeouts in 15 of the product's, so that stalls do not take minutes of ticks.
TIMEOUTS = Timeouts(heartbeat=1.0, op_floor=2.0, op=8.0)

# What members say to each other goes with the square of how many they are. So histories of more than `MANY` are of few
# ops, and members give a sign of life as often as by default.
MANY = 32
SELDOM = Timeouts(heartbeat=5.0, op_floor=10.0, op=40.0)

# What goes wrong, and how often a history is of that kind.
KINDS = {
    "calm": 2,
    "kills": 5,
    "growth": 6,  # members come, go and come back, with the news of it late
    "storm": 5,
    "partitions": 3,
    "frozen": 1,  # exactly one member is stopped, and nobody else may be removed
    "stuck": 1,  # the script of exactly one stands still
    "standing": 2,  # exactly one stands still, while others are lost and come back, in one view after the other
    "missed": 2,  # two do not come to the boundary of a change, and one of them is killed
    "suspended": 1,  # all processes are stopped for longer than ops wait, and go on one after the other
    "quiet": 2,  # the coordinator is away until the training has ended
    "away": 2,  # the coordinator is, for longer than ops wait, and a member is lost meanwhile
    "rolling": 1,  # all replicas are restarted one by one
    "coordinator": 2,  # it dies again and again, in the middle of a decision, too
    "leaving": 1,
    "cut-off": 2,  # the coordinator hears nobody, or nobody hears it, for up to twelve heartbeats
    "resets": 2,  # connections break, one or all at a time
    "held": 3,  # interpreters are, and processes stopped: one, several or all, the coordinator too
    "rolled-back": 2,  # the coordinator comes back with an older store
    "ending": 2,  # when the first has finished, the others die one after the other, and the coordinator comes and goes
    "together": 2,  # the coordinator dies with replicas, as on one host
    "forks": 2,  # a process that dies leaves a child with its connections open
    "accused": 2,  # members take for proved that another one has ended, and it lives
    "rejected": 2,  # what stands before the coordinator's host resets and refuses all connections, and so for others
    "halves": 2,  # the host of one rank of a replica loses power, and the other rank lives
    "squatted": 2,  # a replica that dies stays away, and another program has its port
    "divided": 2,  # the hosts of the ranks of every replica hear nothing of each other, for up to twelve heartbeats
    "severed": 3,  # connections for data are reset, at both ends or at one
    "unsaid": 2,  # a leader is stopped before it can say that its ranks run in a view, and none of them misses it
    "attacked": 1,  # an attacker on the path changes, repeats, inserts, leaves out or swaps records
}


_STILL = ("standing", "missed", "unsaid")  # the members that stand still are chosen
_LONG = ("storm", "partitions", "coordinator", "together", "forks", "accused")
_LONGER = (
    "cut-off",
    "resets",
    "held",
    "rolled-back",
    "divided",
    "rejected",
    "halves",
    "squatted",
)  # for silences that are longer than a heartbeat


@dataclasses.dataclass(frozen=True)
class Scenario:
    kind: str
    replicas: int
    ranks: int
    hosts: tuple[tuple[int, ...], ...]  # of each replica, of its ranks
    coordinator_host: int
    work: Workload
    conditions: NetworkConditions
    timeouts: Timeouts
    burst: int  # tasks of an op in a row
    pace: float  # s that they take
    skew: float
    slow: dict[int, float]
    restart_pause: float
    storm: float  # s that faults go on for
    every: float  # s between two faults, on the average
    drains: bool
    wrong: int  # calls with other arguments
    data: str = "none"  # how data are protected between hosts
    agents: bool = False  # all ranks but the first of a replica are on another host than that, and have an agent there


def draw(rng: random.Random, least: int, most: int, kinds: tuple[str, ...] = ()) -> Scenario:
    """Draw a scenario of one of these kinds, or of any."""
    among = kinds or tuple(KINDS)
    kind = rng.choices(among, [KINDS[kind] for kind in among])[0] if len(among) > 1 else among[0]
    replicas = _members(rng, least, most)
    ranks = 1 if replicas > 6 else rng.choice((1, 1, 1, 1, 2))
    if kind == "standing":  # one that stands still, one that waits for it, and who comes and goes
        replicas = max(replicas, 3)
    if kind == "missed":  # one that makes the change, two that do not come, and one that waits for them
        replicas = min(max(replicas, 4), 5)
    if kind == "unsaid":  # one that is lost, one whose leader is stopped, and one that goes on
        replicas, ranks = min(max(replicas, 3), 5), 2
    topology = rng.choice(("one", "one", "each", "pairs") if kind not in ("growth", "missed", "unsaid") else ("each",))
    if kind in ("rejected", "squatted", "severed", "attacked") and topology == "one":
        topology = "each"
    if kind == "halves":
        replicas, ranks, topology = min(replicas, 6), 2, "each"
    if kind == "divided":
        replicas, ranks, topology = min(replicas, 6), 2, "one"
    spread = (
        replicas if kind in ("divided", "halves") or (ranks > 1 and rng.random() < 0.5) else 0
    )  # a host for each rank
    bases = [{"one": 0, "each": i, "pairs": i // 2}[topology] for i in range(replicas)]
    hosts = tuple(tuple(base + spread * rank for rank in range(ranks)) for base in bases)
    many = replicas > MANY
    ops = rng.choice((1, 1, 2, 3)) if kind != "growth" and not many else 1
    steps = max(2, rng.choice((4, 8, 12)) // ops) if replicas <= 6 else 4
    steps += 6 * (kind == "growth")
    work = Workload(
        steps=steps,
        counts=tuple(rng.choice((1, 2 * ELEMENTS, 3 * ELEMENTS + 4, 5 * ELEMENTS)) for _ in range(ops)),
        atomic=tuple(rng.random() < 0.3 for _ in range(ops)),
        compute=0.2 if many else rng.choice((0.0005, 0.005, 0.05)),
        ahead=rng.choice((1, 2, 3)),
        prepare=rng.choice((0.0, 0.0, 0.01, 0.3)),
        blocks=rng.choice((1, 5, 12)),
    )
    lossy = (topology != "one" or spread > 0) and rng.random() < 0.25
    conditions = NetworkConditions(
        latency=rng.choice((0.0001, 0.0005, 0.005)),
        loss=rng.choice((0.01, 0.05)) if lossy else 0.0,
        user_timeout=rng.choice((2.0, 6.0)),
        rough=0.1 if rng.random() < 0.1 else 0.0,
    )
    pace = rng.choice((0.00002, 0.00002, 0.0005, 0.005))
    if kind in _LONG:  # enough for what takes time to be found out
        work = dataclasses.replace(work, compute=max(work.compute, rng.choice((0.0, 0.3, 2.0)) / steps))
    if kind in _LONGER:
        work = dataclasses.replace(work, compute=max(work.compute, rng.choice((0.3, 3.0, 9.0)) / steps))
    if kind == "standing":  # it is waited for at once
        work = dataclasses.replace(work, steps=10 * steps, compute=min(work.compute, 0.005))
    restart_pause = rng.choice((0.002, 0.02, 0.2))
    if kind == "growth":  # a step takes about as long as a message
        pace, restart_pause = 0.00002, 0.002
        compute = conditions.latency * rng.choice((2, 8, 30))
        prepare = conditions.latency * rng.choice((0, 1, 10))
        work = dataclasses.replace(work, compute=compute, counts=(1,), ahead=1, prepare=prepare)
    length = steps * (work.compute + 10 * ops * pace) + 0.01
    drains = kind in ("calm", "kills", "storm", "coordinator") and rng.random() < 0.15
    if drains:  # it goes on until it is told to end
        work = dataclasses.replace(work, steps=1_000_000, compute=max(work.compute, length / 16))
    if kind in ("missed", "unsaid"):
        drains = True
        compute = rng.choice((0.1, 0.4) if kind == "missed" else (0.4, 1.0))
        work = dataclasses.replace(work, steps=1_000_000, compute=compute)
    return Scenario(
        kind=kind,
        replicas=replicas,
        ranks=ranks,
        hosts=hosts,
        coordinator_host=rng.choice((0, 99)) if kind not in ("cut-off", "rejected", "missed", "unsaid") else 99,
        work=work,
        conditions=conditions,
        timeouts=SELDOM if many else TIMEOUTS,
        burst=rng.choice((1, 1, 3, 20)),
        pace=pace,
        skew=rng.choice((0.0, 0.0, 0.05)),
        slow={rng.randrange(replicas): rng.choice((3.0, 20.0))} if rng.random() < 0.15 and kind not in _STILL else {},
        restart_pause=restart_pause,
        storm=length,
        every=length / rng.choice((1, 2, 4)),
        drains=drains,
        wrong=1 if rng.random() < 0.1 else 0,
    )


def with_groups(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with groups of some of its replicas."""
    replicas = range(scenario.replicas)
    groups = [
        rng.sample(replicas, rng.randint(min(2, len(replicas)), len(replicas))) for _ in range(rng.choice((1, 2)))
    ]
    work = dataclasses.replace(
        scenario.work, groups=tuple(tuple(sorted(some)) for some in groups), renew=rng.choice((0, 0, 2, 3))
    )
    return dataclasses.replace(scenario, work=work)


def with_loops(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with several step loops in the script."""
    steps = range(1, min(scenario.work.steps, 20))
    loops = tuple(sorted(rng.sample(steps, min(len(steps), rng.choice((1, 2, 4))))))
    return dataclasses.replace(scenario, work=dataclasses.replace(scenario.work, loops=loops))


def with_statics(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with static groups of all members."""
    return dataclasses.replace(scenario, work=dataclasses.replace(scenario.work, statics=rng.choice((1, 2, 4))))


def with_small_ops(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with ops of one chunk among its ops, which are atomic in any case."""
    counts = tuple(rng.choice((1, ELEMENTS, count)) for count in scenario.work.counts)
    return dataclasses.replace(scenario, work=dataclasses.replace(scenario.work, counts=counts))


def with_agents(scenario: Scenario) -> Scenario:
    """The same, with replicas of three ranks, on two hosts, with an agent on the second one."""
    bases = [hosts[0] for hosts in scenario.hosts]
    hosts = tuple((base, base + 50, base + 50) for base in bases)
    return dataclasses.replace(scenario, ranks=3, hosts=hosts, agents=True)


def with_protection(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with data protected between hosts."""
    return dataclasses.replace(scenario, data=rng.choice(("mac", "aes-gcm")))


def _members(rng: random.Random, least: int, most: int) -> int:
    """Draws how many members there are: mostly few, since four are enough for what can go wrong."""
    number = least
    while number < most and rng.random() < 0.55:
        number += 1
    return number
