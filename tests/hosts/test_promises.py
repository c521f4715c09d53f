"""The promises between hosts whose network fails: survivors finish with equal bytes, nobody else goes, no hang."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftcomm.errors import SettingsError
from ftcomm.lab.chaos.network_faults import Misrouted
from ftcomm.lab.chaos.plan import COORDINATOR
from ftcomm.lab.netns.network import LabNetwork, inside
from ftcomm.lab.netns.slow_network import SlowNetwork
from tests.process.test_kills import check

from .bodies import around, mixed, tell_bandwidth
from .job import HostJob

ROUNDS = int(os.environ.get("FTCOMM_HOST_ROUNDS", "0"))  # of faults drawn by the seed, beside the usual
pytestmark = [pytest.mark.protocol, pytest.mark.timeout(480 + 60 * ROUNDS)]

SEED = int(os.environ.get("FTCOMM_TEST_SEED", str(random.randrange(1 << 30))))
ENDLESS = 10_000_000
HEARTBEAT = 5.0  # s; of a busy machine, on which nobody may be lost for being slow
SETTINGS: dict[str, Any] = dict(body=mixed, steps=ENDLESS, heartbeat_timeout=HEARTBEAT, op_timeout=30.0)
GOES_ON = 6  # steps that a job has to make to be alive


@pytest.fixture
def cables() -> Iterator[LabNetwork]:
    """Four hosts at the cables of the kernel."""
    yield from _made(lambda: LabNetwork(4))


@pytest.fixture
def wide_area() -> Iterator[LabNetwork]:
    """Three hosts that are far from each other, over a line that loses packets."""
    yield from _made(lambda: SlowNetwork(3, rate=2e8, delay=0.003, loss=1e-4, seed=SEED))


def _made(make: Callable[[], LabNetwork]) -> Iterator[Any]:
    try:
        network = make()
    except SettingsError as error:
        pytest.skip(str(error))
    for host in (network.hub, *network.hosts):
        with inside(host):  # which every kernel has; others do not back off alike
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    yield network
    network.close()


class Watch:
    """What happens to a job between two moments, and what may."""

    def __init__(self, job: HostJob) -> None:
        self.job = job
        self.everybody = set(range(job.replicas))
        self._since = len(job.events)

    def newest(self) -> set[int]:
        views = [event for event in self.job.events if event["kind"] == "view"]
        return {member["replica"] for member in views[-1]["members"]}

    def steps(self, replica: int) -> int:
        return sum(note["kind"] == "step" for r, _, note in self.job.notes() if r == replica)

    def goes_on(self, replicas: set[int]) -> None:
        """Each of `replicas` makes more steps."""
        goal = {replica: self.steps(replica) + GOES_ON for replica in replicas}
        end = time.monotonic() + 100
        while behind := {replica for replica in replicas if self.steps(replica) < goal[replica]}:
            assert time.monotonic() < end, f"seed {SEED}: {behind} make no steps"
            time.sleep(0.02)

    def without(self, *candidates: int) -> int:
        """Wait for a view without one of them, from which nobody else is missing; returns whom."""
        self.job.wait_event(
            f"view without one of {candidates}", lambda events: any(self._lost(e) for e in events[self._since :])
        )
        lost = set().union(*(self._lost(event) for event in self.job.events[self._since :]))
        assert len(lost) == 1, f"seed {SEED}: {lost} were lost, not one of {candidates}"
        assert lost <= set(candidates), f"seed {SEED}: {lost} was lost, not one of {candidates}"
        return lost.pop()

    def nobody(self) -> None:
        """All are still there, and were all the time."""
        assert not [event for event in self.job.events[self._since :] if self._lost(event)], f"seed {SEED}"

    def no_view(self) -> None:
        """All run in the same view as before."""
        assert not [event for event in self.job.events[self._since :] if event["kind"] in ("view", "failed")], SEED

    def comes_back(self, replica: int) -> None:
        """Another life of it; its last one has ended."""
        self.job.start(replica)
        self.job.wait_contributing(self.everybody, since=self._since)
        self._since = len(self.job.events)

    def _lost(self, event: dict[str, Any]) -> set[int]:
        if event["kind"] != "view":
            return set()
        return self.everybody - {member["replica"] for member in event["members"]}


def assert_removed(job: HostJob, replica: int) -> None:
    """It was cut off and lives: it hears of it as soon as it can be reached, and ends by saying so."""
    assert job.join(replica) == [1]
    *_, text = [text for r, _, text in job.errors() if r == replica]
    assert text.startswith(("RemovedError", "LostError")), text


def agree(job: HostJob) -> None:
    """All that has returned somewhere returned the same everywhere, or failed alike."""
    check(job)
    results: dict[tuple[int, str], set[str]] = defaultdict(set)
    for _, _, note in job.notes():
        if note["kind"] == "call":
            results[note["step"], note["call"]].add(note["result"])
    assert results
    differ = {key: found for key, found in results.items() if len(found) > 1}
    assert not differ, f"seed {SEED}: {differ}"


def slowed(job: HostJob, watch: Watch, rng: random.Random) -> None:
    slow = job.slow(rng.randrange(job.replicas), 1e8)
    watch.goes_on(watch.everybody)
    slow.close()
    watch.goes_on(watch.everybody)
    watch.nobody()


def cut_off(job: HostJob, watch: Watch, rng: random.Random) -> None:
    """A host is cut off in mid-op, and lives on."""
    victim = rng.randrange(job.replicas)
    cable = job.unplug(victim)
    assert watch.without(victim) == victim
    watch.goes_on(watch.everybody - {victim})
    cable.close()
    assert_removed(job, victim)
    watch.comes_back(victim)


def half_open(job: HostJob, watch: Watch, rng: random.Random) -> None:
    """A connection of which the other end is gone and nobody was told: it dies while its cable is pulled."""
    victim = rng.randrange(job.replicas)
    cable = job.unplug(victim)
    job.kill(victim)
    assert watch.without(victim) == victim
    watch.goes_on(watch.everybody - {victim})
    cable.close()
    watch.comes_back(victim)


def one_way(job: HostJob, watch: Watch, rng: random.Random) -> None:
    """What one sends to another is lost; all others hear both, and both hear the coordinator: one of the two goes."""
    sender, receiver = rng.sample(sorted(watch.everybody), 2)
    lost = job.mislead(sender, receiver)
    gone = watch.without(sender, receiver)
    watch.goes_on(watch.everybody - {gone})
    lost.close()
    assert_removed(job, gone)
    watch.comes_back(gone)


def coordinator_hears_nobody(job: HostJob, watch: Watch, rng: random.Random) -> None:
    """What all send to the coordinator is lost, and they reach each other: it is the coordinator that is cut off."""
    unheard(job, watch, sorted(watch.everybody))


def coordinator_misses_one(job: HostJob, watch: Watch, rng: random.Random) -> None:
    """It does not reach the coordinator, which hears all others; and these hear it."""
    unheard(job, watch, [rng.randrange(job.replicas)])


def unheard(job: HostJob, watch: Watch, replicas: Sequence[int]) -> None:
    """What these send to the coordinator is lost for a while, and nobody has to go."""
    lost = Misrouted(job._status(), replicas, [COORDINATOR])
    end = time.monotonic() + 3 * HEARTBEAT
    while time.monotonic() < end:
        watch.goes_on(watch.everybody)
    lost.close()
    watch.goes_on(watch.everybody)
    watch.no_view()


def killed(job: HostJob, watch: Watch, rng: random.Random) -> None:
    victim = rng.randrange(job.replicas)
    job.kill(victim)
    assert watch.without(victim) == victim
    watch.comes_back(victim)


ONCE = (slowed, coordinator_hears_nobody, coordinator_misses_one, half_open, one_way)
FAULTS = (*ONCE, cut_off, killed)


def test_hosts_that_do_not_hear_each_other_and_hosts_that_are_only_slow(cables: LabNetwork, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with HostJob(tmp_path, cables, elements=1_000_003, **SETTINGS) as job:
        job.wait_contributing(set(range(4)))
        watch = Watch(job)
        watch.goes_on(watch.everybody)
        for fault in [*ONCE, *rng.choices(FAULTS, k=ROUNDS)]:
            print(fault.__name__)
            fault(job, watch, rng)
            watch.goes_on(watch.everybody)
        job.drain()
        for replica in watch.everybody:
            assert job.join(replica) == [0], job.errors()
        agree(job)


def test_hosts_that_are_shared(tmp_path: Path) -> None:
    """Three replicas on one host and two on the other, which go by two levels: who carries what crosses is killed, and
    one that does not, and each comes back."""
    print(f"seed {SEED}")
    for network in _made(lambda: LabNetwork(2)):
        with HostJob(tmp_path, network, replicas=5, elements=300_007, **SETTINGS) as job:
            job.wait_contributing(set(range(5)))
            watch = Watch(job)
            for victim in (0, 4):
                watch.goes_on(watch.everybody)
                job.kill(victim)
                assert watch.without(victim) == victim
                watch.goes_on(watch.everybody - {victim})
                watch.comes_back(victim)
            watch.goes_on(watch.everybody)
            job.drain()
            for replica in watch.everybody:
                assert job.join(replica) == [0], job.errors()
            agree(job)


def test_a_host_is_cut_off_while_others_are_shared(tmp_path: Path) -> None:
    """Two replicas on one host, one on each other: by two levels before the cut and after it."""
    for network in _made(lambda: LabNetwork(3)):
        with HostJob(tmp_path, network, replicas=4, elements=300_007, **SETTINGS) as job:
            _outlives_a_cut(job, 1)
            agree(job)


def test_a_ring_in_which_neighbours_alone_are_connected_outlives_a_cut(cables: LabNetwork, tmp_path: Path) -> None:
    settings = {**SETTINGS, "body": around, "transport": "tcp", "algorithm": "ring"}
    with HostJob(tmp_path, cables, elements=300_007, **settings) as job:
        _outlives_a_cut(job, 1)
        check(job)
        begun = [note for _, _, note in job.notes() if note["kind"] == "open"]
        assert [len(note["to"]) for note in begun] == [2] * 4  # nobody has dialled the one opposite


def _outlives_a_cut(job: HostJob, victim: int) -> None:
    job.wait_contributing(set(range(job.replicas)))
    watch = Watch(job)
    watch.goes_on(watch.everybody)
    cable = job.unplug(victim)
    assert watch.without(victim) == victim
    watch.goes_on(watch.everybody - {victim})
    cable.close()
    assert_removed(job, victim)
    job.drain()
    for replica in watch.everybody - {victim}:
        assert job.join(replica) == [0], job.errors()


def test_a_ring_keeps_apart_two_hosts_whose_link_is_slow(tmp_path: Path) -> None:
    for network in _made(lambda: SlowNetwork(4, delay=0.0005)):
        network.change([0, 1], [0, 1], delay=0.05)
        with HostJob(tmp_path, network, body=tell_bandwidth, nbytes=1 << 20, transport="tcp") as job:
            for replica in range(4):
                assert job.join(replica) == [0], job.errors()
            found = [note for _, _, note in job.notes() if note["kind"] == "links"]
    assert len({note["said"] for note in found}) == 1  # all find the same
    order = found[0]["order"]
    assert sorted(order) == [0, 1, 2, 3]
    assert abs(order.index(0) - order.index(1)) == 2, found[0]["said"]


def test_hosts_far_apart_on_a_line_that_flaps(wide_area: SlowNetwork, tmp_path: Path) -> None:
    """A cable is pulled again and again, for less than a heartbeat timeout: nobody may go. Then for good."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    with HostJob(tmp_path, wide_area, elements=100_003, **SETTINGS) as job:
        job.wait_contributing(set(range(3)))
        watch = Watch(job)
        watch.goes_on(watch.everybody)
        for _ in range(5):
            cable = job.unplug(1)
            time.sleep(rng.uniform(0.05, 0.3))
            cable.close()
            time.sleep(rng.uniform(0.0, 0.3))
        watch.goes_on(watch.everybody)
        watch.nobody()
        print(wide_area.counts())
        cable = job.unplug(1)
        assert watch.without(1) == 1
        watch.goes_on({0, 2})
        cable.close()
        assert_removed(job, 1)
        watch.comes_back(1)
        watch.goes_on(watch.everybody)
        job.drain()
        for replica in watch.everybody:
            assert job.join(replica) == [0], job.errors()
        agree(job)
