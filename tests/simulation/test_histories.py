"""The whole protocol in virtual time, with everything going wrong: see `ftcomm.simulation`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from click.testing import CliRunner

from ftcomm.collective.watchdog import Watchdog
from ftcomm.control import messages as m
from ftcomm.control import timeouts
from ftcomm.control.rank_node import ToPeer
from ftcomm.control.rank_with_leader import InProcessAction, RankWithLeader
from ftcomm.control.removals import LINGER
from ftcomm.simulation.history import run
from ftcomm.simulation.job import Replica, SimulatedJob
from ftcomm.simulation.network import NetworkConditions, SimulatedNetwork
from ftcomm.simulation.promises import BrokenPromise, Promises
from ftcomm.simulation.scenario import KINDS, TIMEOUTS, Scenario
from ftcomm.simulation.script import Workload
from ftcomm.simulation.simulate_cli import simulate
from ftcomm.simulation.world import World

pytestmark = pytest.mark.protocol

SEEDS = int(os.environ.get("FTCOMM_SIMULATION_SEEDS", "500"))


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_promise_is_broken(kind: str, others: bool) -> None:
    """As many histories of each kind as `ftcomm simulate` draws of `SEEDS`, and at least 20: a fifth of them, and the
    others as a sweep; and they do something. Of every fourth there are up to 10 members, in the sweep up to 16. Those
    take most of the time, and all that test_mutations.py takes out is noticed among up to 6."""
    count = max(SEEDS // 25, SEEDS * KINDS[kind] // sum(KINDS.values()))
    returns = views = 0
    seeds = range(count // 5, count) if others else range(count // 5)
    for seed in seeds:
        most = 6 if seed % 4 else 16 if others else 10
        history = run(seed, 2, most, kind)
        again = f"ftcomm simulate --replay {seed} --members 2..{most} --kinds {kind}"
        assert not history.broken, f"{history.broken}\n{again}"
        returns, views = returns + history.returns, max(views, history.views)
    assert returns > 12 * len(seeds)
    if others and kind not in ("calm", "quiet", "frozen", "stuck", "suspended", "resets"):
        assert views > 2


@pytest.mark.parametrize(
    ("kind", "members", "seed", "trees"),
    [
        ("kills", 24, 0, False),
        ("storm", 24, 3, False),
        ("kills", 40, 1, True),
        pytest.param("kills", 24, 1, False, marks=pytest.mark.sweep),
        pytest.param("kills", 64, 1, True, marks=pytest.mark.sweep),
        pytest.param("storm", 64, 1, False, marks=pytest.mark.sweep),
        pytest.param("kills", 256, 1, True, marks=pytest.mark.sweep),
    ],
)
def test_no_promise_is_broken_among_many(kind: str, members: int, seed: int, trees: bool) -> None:
    """Of more members than the first page of a segment has words for. `ftcomm simulate --members 24..64` runs more."""
    history = run(seed, members, members, kind, trees=trees)
    assert not history.broken, history.broken
    assert history.views > 1


@pytest.mark.parametrize("seeds", [range(1000, 1002), pytest.param(range(1002, 1005), marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", ["cut-off", "halves", "partitions", "storm"])
def test_no_promise_is_broken_if_members_give_signs_of_life_beats_apart(
    kind: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do in groups that are too large for so many histories."""
    monkeypatch.setattr(timeouts, "MEMBERS_PER_BEAT", 2)
    assert TIMEOUTS.beats_between(3) == 2
    for seed in seeds:
        history = run(seed, 3, 9, kind)
        assert not history.broken, f"seed {seed}: {history.broken}"


@pytest.mark.parametrize(
    ("kind", "least", "most", "seeds"),
    [
        ("kills", 3, 9, range(6)),
        ("severed", 3, 9, range(6)),
        ("storm", 3, 9, range(3)),
        ("kills", 17, 17, range(1)),
        ("severed", 24, 24, range(1)),
        pytest.param("kills", 3, 9, range(6, 20), marks=pytest.mark.sweep),
        pytest.param("severed", 3, 9, range(6, 20), marks=pytest.mark.sweep),
        pytest.param("storm", 3, 9, range(3, 10), marks=pytest.mark.sweep),
    ],
)
def test_no_promise_is_broken_by_a_tree(kind: str, least: int, most: int, seeds: range) -> None:
    """Through which small ops go. `ftcomm simulate --trees --members 17..64` runs more."""
    returns = 0
    for seed in seeds:
        history = run(seed, least, most, kind, trees=True)
        again = f"ftcomm simulate --replay {seed} --members {least}..{most} --kinds {kind} --trees"
        assert not history.broken, f"{history.broken}\n{again}"
        returns += history.returns
    assert returns > 12 * len(seeds)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 5), marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", ["kills", "resets", "growth", "held", "halves", "divided"])
def test_no_promise_is_broken_with_host_agents(kind: str, seeds: range) -> None:
    """Which are killed, stopped and cut off as their ranks are. `ftcomm simulate --agents` runs more."""
    returns = 0
    for seed in seeds:
        history = run(seed, 2, 5, kind, agents=True)
        again = f"ftcomm simulate --replay {seed} --members 2..5 --kinds {kind} --agents"
        assert not history.broken, f"{history.broken}\n{again}"
        returns += history.returns
    assert returns > 20 * len(seeds)


@pytest.mark.parametrize("told", [True, False])
def test_no_survivor_goes_with_members_that_hold_the_job_up_one_after_the_other(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five end, and another program has the port of each, so each is removed as a stall, and in a view of its
    own. An op of a subgroup waits all the while, longer than one that nothing moves. If the subgroup is not told of the
    views, it gives up, and a survivor with it."""
    if not told:
        monkeypatch.setattr(Watchdog, "job_changes", lambda self: None)
    work = Workload(4, (32, 80), (False, False), 2.0, 2, 0.0, 1, groups=((0, 1, 2, 3, 4),))
    world, promises = World(1), Promises()
    scenario = _of_ones("squatted", 5, work)
    job = SimulatedJob(scenario, world, SimulatedNetwork(world, scenario.conditions), promises)
    job.start()

    def lose(replica: Replica) -> None:
        promises.excuse(replica.ranks[0].incarnation, "killed, and its port taken")
        job.lose_ports(replica)

    for number, when in ((1, 0.8), (3, 2.4), (2, 6.7)):
        world.after(when, None, lose, job.replicas[number])
    if not told:
        with pytest.raises(BrokenPromise, match="which no fault forces to go"):
            world.run(until=100.0)
        return
    world.run(until=100.0)
    assert world.over, job.describe()
    assert not job.ended
    assert promises.steps == 4


def test_who_leaves_and_was_not_heard_by_all_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message that it stands at the boundary reaches one of those who stay, and is lost on the way to the others
    with a connection. It is gone before that is there again."""
    world, promises = World(1), Promises()
    scenario = _of_ones("leaving", 4, Workload(20, (32,), (False,), 0.05, 1, 0.0, 1))
    job = SimulatedJob(scenario, world, SimulatedNetwork(world, scenario.conditions), promises)
    job.start()
    leaver = job.replicas[2]
    carry, lost = RankWithLeader.carry, list[m.Boundary]()

    def reaches_one(self: RankWithLeader, actions: Sequence[InProcessAction]) -> list[InProcessAction]:
        wanted = carry(self, actions)
        said = [x for x in wanted if isinstance(x, ToPeer) and isinstance(x.message, m.Boundary) and x.replica > 0]
        unheard = [x for x in said if self.rank is leaver.ranks[0].node and x.message.view is not None]
        lost.extend(x.message for x in unheard)
        return [x for x in wanted if x not in unheard]

    def leave() -> None:
        promises.excuse(leaver.ranks[0].incarnation, "asked to leave")
        leaver.ranks[0].do(leaver.ranks[0].node.tell(m.Leave()))

    monkeypatch.setattr(RankWithLeader, "carry", reaches_one)
    world.after(0.6, None, leave)
    world.run(until=0.6 + LINGER + 2.0)
    assert len(lost) == 2
    assert job.stored[-1].replicas == (0, 1, 3)
    assert job.stored[-1].proposal == 0
    world.run(until=100.0)
    assert world.over, job.describe()
    assert promises.steps == 20


def _of_ones(kind: str, replicas: int, work: Workload) -> Scenario:
    """One rank in each replica, and each on a host of its own."""
    hosts = tuple((host,) for host in range(replicas))
    more = dict(restart_pause=0.02, storm=0.0, every=1.0, drains=False, wrong=0)
    return Scenario(kind, replicas, 1, hosts, 99, work, NetworkConditions(), TIMEOUTS, 3, 0.0005, 0.0, {}, **more)


def test_a_seed_is_a_history_whatever_the_order_of_hashes() -> None:
    script = (
        "from ftcomm.simulation.history import run; print(hash(sum(run(s, traced=True).events for s in range(12))))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_the_command_counts_and_replays() -> None:
    counted = CliRunner().invoke(simulate, ["--seeds", "8", "--jobs", "1", "--members", "2..3"])
    assert counted.exit_code == 0, counted.output
    assert "8 histories" in counted.output
    some = CliRunner().invoke(simulate, ["--seeds", "8", "--jobs", "1", "--members", "2..3", "--kinds", "held,cut-off"])
    assert some.exit_code == 0, some.output
    assert {line.split()[0] for line in some.output.splitlines()[1:3]} == {"cut-off", "held"}
    replayed = CliRunner().invoke(simulate, ["--replay", "3", "--members", "2..3"])
    assert replayed.exit_code == 0
    assert "enters view 1" in replayed.output
    wrong = CliRunner().invoke(simulate, ["--members", "3..2"])
    assert wrong.exit_code == 2
    unknown = CliRunner().invoke(simulate, ["--kinds", "kills,floods"])
    assert unknown.exit_code == 2
    assert "'floods' is not one of 'accused', 'attacked'," in " ".join(unknown.output.replace("│", " ").split())
    assert "expected 1 <= first <= last <= 1024" in wrong.output
