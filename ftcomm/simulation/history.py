"""One seed, one history: run it, and say what came of it."""

from __future__ import annotations

import dataclasses
import random
import time
import traceback

from ftcomm.collective.resume import ProtocolError
from ftcomm.errors import FtcommError
from ftcomm.simulation.faults import Faults
from ftcomm.simulation.job import SimulatedJob
from ftcomm.simulation.network import SimulatedNetwork
from ftcomm.simulation.promises import BrokenPromise, Promises
from ftcomm.simulation.scenario import (
    draw,
    with_agents,
    with_groups,
    with_loops,
    with_protection,
    with_small_ops,
    with_statics,
)
from ftcomm.simulation.world import World

# Kinds of histories in which some holder is never hit.
ENDS_WELL = ("calm", "quiet", "frozen", "stuck", "suspended", "away")
CALM = 25  # deadlines of an op in a row, within which a job must end once faults have


@dataclasses.dataclass(frozen=True)
class History:
    seed: int
    kind: str
    members: int
    broken: str = ""  # the promise that does not hold
    ended: str = ""  # why the job ended, if not well
    virtual: float = 0.0  # s
    seconds: float = 0.0  # of the processor
    events: int = 0
    views: int = 0
    steps: int = 0
    returns: int = 0  # ops that returned, at all members together
    copies: int = 0  # chunks that were copied from a survivor
    mismatches: int = 0
    trace: tuple[str, ...] = ()


def run(
    seed: int,
    least: int = 2,
    most: int = 16,
    *kinds: str,
    traced: bool = False,
    extended: bool = True,
    trees: bool = False,
    agents: bool = False,
) -> History:
    """The history of a seed; the same for the same arguments. Raises nothing that happens in it. Some that are
    `extended` have static groups, or protected data. `trees`: with small ops, which go through a tree.
    `agents`: with replicas of several ranks and hosts, which have host agents."""
    began = time.process_time()
    world = World(seed, traced=traced, trees=trees)
    scenario = draw(world.random, least, most, kinds)
    if seed % 4 == 0:
        scenario = with_groups(scenario, random.Random(f"groups of {seed}"))
    if seed % 3 == 0:
        scenario = with_loops(scenario, random.Random(f"loops of {seed}"))
    waits = scenario.kind in ("standing", "missed", "unsaid")  # a member that meets for a static group waits, too
    if extended and seed % 7 == 3 and not waits:
        scenario = with_statics(scenario, random.Random(f"static groups of {seed}"))
    if (extended and seed % 5 == 2) or scenario.kind == "attacked":
        scenario = with_protection(scenario, random.Random(f"protection of {seed}"))
    if trees:
        scenario = with_small_ops(scenario, random.Random(f"small ops of {seed}"))
    if agents:
        scenario = with_agents(scenario)
    promises = Promises()
    network = SimulatedNetwork(world, scenario.conditions, scenario.data, attacked=scenario.kind == "attacked")
    job = SimulatedJob(scenario, world, network, promises)
    world.say("seed", "%s: %s", seed, scenario)
    broken = ""
    try:
        job.start()
        faults = Faults(job)
        calm = CALM * scenario.timeouts.give_up
        world.run(until=faults.end + calm)
        if not world.over and not job.is_waiting_for_the_lost:
            broken = f"the job has not ended {calm:g} s after the last fault:\n{job.describe()}"
        elif scenario.kind in ENDS_WELL and not scenario.conditions.loss and job.ended:
            broken = f"the job did not end well: {job.ended}"
    except (AssertionError, FtcommError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        expected = isinstance(error, BrokenPromise | ProtocolError)
        broken = str(error) if expected else "".join(traceback.format_exception(error)[-6:]).rstrip()
        broken = f"{type(error).__name__}: {broken}" if isinstance(error, ProtocolError) else broken
    return History(
        seed=seed,
        kind=scenario.kind,
        members=scenario.replicas,
        broken=broken,
        ended=job.ended or "",
        virtual=world.now,
        seconds=time.process_time() - began,
        events=world.events,
        views=len(job.stored),
        steps=promises.steps,
        returns=promises.returns,
        copies=promises.copies,
        mismatches=promises.mismatches,
        trace=tuple(
            f"{now:10.6f} {who:>8} {text % args if args else text}" for now, who, text, args in world.trace or ()
        ),
    )
