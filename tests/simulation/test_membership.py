"""The membership protocol under random schedules: nobody runs another view of an epoch, nobody is left behind."""

from __future__ import annotations

import os
import random

import pytest

from .cluster import Cluster

pytestmark = pytest.mark.protocol

SEEDS = int(os.environ.get("FTCOMM_SIMULATION_SEEDS", "750"))


def run(seed: int) -> Cluster:
    """A history: faults for a while, then calm until the job ends."""
    rng = random.Random(seed)
    drained = rng.random() < 0.3
    steps = 1_000_000 if drained else rng.randint(4, 25)  # a drained job ends by that alone
    cluster = Cluster(seed, replicas=rng.randint(1, 4), ranks=rng.choice((1, 1, 2)), steps=steps)
    faults = rng.choice((0.0, 0.002, 0.01))
    storm = rng.randint(100, 1500)
    calm = rng.choice((storm, storm + 300))  # a drain may have to stand faults, too
    for turn in range(40_000):
        if cluster.done or forgotten(cluster):
            return cluster
        if turn < calm and rng.random() < faults:
            fault(cluster, rng)
        if drained and turn >= storm and turn % 500 == 0:
            cluster.drain()  # and again: a restarted coordinator has not heard of it
        if turn % 20 == 0:
            heal(cluster, rng)
        if rng.random() < 0.02:
            cluster.tick()
        options = cluster.choices()
        if options:
            rng.choice(options)()
        else:
            cluster.tick()
    raise AssertionError("the job hangs: " + states(cluster))


def forgotten(cluster: Cluster) -> bool:
    """All have ended, and said so to a coordinator that was restarted then and has forgotten it. As long as nobody
    comes it takes itself for cut off, and waits for who has started it to end it."""
    coordinator = cluster.coordinator
    if coordinator is None or coordinator.view is None:
        return False
    return all(replica.over for replica in cluster.replicas.values()) and not coordinator.links


def fault(cluster: Cluster, rng: random.Random) -> None:
    alive = [number for number, replica in cluster.replicas.items() if replica.alive]
    kind = rng.choice(("kill", "kill", "kill", "leave", "cut", "flap", "flap", "coordinator"))
    if kind == "kill" and len(alive) > 1:
        cluster.kill(rng.choice(alive))
    elif kind == "cut" and alive and rng.random() < 0.3:
        cluster.cut(rng.choice(alive))
    elif kind == "flap":
        cluster.flap()
    elif kind == "leave" and len(alive) > 1:
        cluster.leave(rng.choice(alive))
    elif kind == "coordinator":
        cluster.restart_coordinator()


def heal(cluster: Cluster, rng: random.Random) -> None:
    """What `ftcomm run` does: a replica that died or gave up is started again."""
    for number, replica in list(cluster.replicas.items()):
        failed = any(rank.state == "failed" for rank in replica.ranks)
        gone = all(rank.state in ("left", "done") for rank in replica.ranks) and replica.leader.finished
        if replica.alive and (failed or (gone and rng.random() < 0.2)):
            cluster.kill(number)  # its processes end
            replica.over = not failed
        if not replica.alive and not replica.over and rng.random() < 0.3:
            cluster.start(number)


def states(cluster: Cluster) -> str:
    return "; ".join(
        f"{replica.incarnation} alive={replica.alive} "
        + ",".join(f"{rank.state}@{rank.step}/{rank.machine.phase.value}/e{rank.epoch}" for rank in replica.ranks)
        for replica in cluster.replicas.values()
    )


@pytest.mark.parametrize("block", [*range(3), *(pytest.param(each, marks=pytest.mark.sweep) for each in range(3, 10))])
def test_random_histories(block: int) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        check(seed)


def check(seed: int) -> None:
    try:
        run(seed)
    except AssertionError as error:
        cluster_trace = trace(seed)
        raise AssertionError(f"seed {seed}: {error}\n{cluster_trace}") from error


def trace(seed: int) -> str:
    """The last lines of the history of a seed, for a person."""
    kept: list[Cluster] = []
    original = Cluster.__init__

    def keep(self: Cluster, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        kept.append(self)

    Cluster.__init__ = keep  # type: ignore[method-assign]
    try:
        run(seed)
    except AssertionError:
        pass
    finally:
        Cluster.__init__ = original  # type: ignore[method-assign]
    return "\n".join(kept[0].trace[-40:]) + "\n" + states(kept[0])


if __name__ == "__main__":
    import sys

    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        check(seed)
