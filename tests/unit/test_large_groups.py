"""Members of a large group give each other signs of life some beats apart, and still find out together who is cut
off."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control import timeouts
from ftcomm.control.actions import ToLeader
from ftcomm.control.finishes import Finishes
from ftcomm.control.known_job import KnownJob
from ftcomm.control.timeouts import Timeouts
from tests.rigs.rank_node import address, running, view

COUNT, AT_ONCE = 16, 4
TIMEOUTS = Timeouts.derive()
BEAT = TIMEOUTS.beat


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen members are many."""
    monkeypatch.setattr(timeouts, "MEMBERS_PER_BEAT", AT_ONCE)


class Member:
    """A rank beside shard 0, and what its kernel knows of its peers'."""

    def __init__(self, replica: int, count: int) -> None:
        self.replica = replica
        self.node = n.RankNode(replica, 1, address(replica, 1), TIMEOUTS, ranks=2)
        self.node.up_opened()
        self.node.from_up(m.Welcome(f"life-{replica}"))
        to = view(1, tuple(range(count)), ranks=2)
        self.node.from_up(m.NewView(to))
        self.node.quiesced(1, m.Progress(0, ()))
        for other in range(count):
            if other != replica:
                self.node.from_peer(m.MemberProgress(other, f"life-{other}", 1, m.Progress(0, (), fresh=True)), 0.0)
        assert self.node.wants(to)
        self.node.entered(to)
        self.unanswered: dict[int, float] = {}  # since when a kernel has not answered

    def tick(self, now: float) -> list[n.RankAction]:
        others = (x for x in range(COUNT) if x != self.replica)
        self.node.peers_acknowledged({other: self.unanswered.get(other, now) for other in others})
        return [*self.node.beat(now), *self.node.tick(now)]


class World:
    """All members, each with a clock of its own, and what the coordinator makes of their complaints."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.members = [Member(replica, COUNT) for replica in range(COUNT)]
        self.due = [self.random.uniform(0.0, BEAT) for _ in self.members]
        for member in self.members:
            for _ in range(self.random.randrange(AT_ONCE)):  # they have begun at any time before
                member.tick(0.0)
        self.blame = KnownJob(COUNT, 2, TIMEOUTS, [], 0.0, Finishes()).blame
        self.cut: set[tuple[int, int]] = set()
        self.sent: Counter[tuple[int, int]] = Counter()
        self.last: dict[tuple[int, int], float] = {}  # when that was

    def step(self) -> float:
        """The next tick of a member; returns when it is."""
        now = min(self.due)
        replica = self.due.index(now)
        self.due[replica] += BEAT * self.random.uniform(1.0, 1.1)
        for action in self.members[replica].tick(now):
            if isinstance(action, ToLeader) and isinstance(action.message, m.Suspect):
                self.blame.complaint(replica, action.message.replica, now, action.message.reason)
            elif isinstance(action, n.ToPeer):
                there, back = (replica, action.replica), (action.replica, replica)
                self.sent[there] += 1
                self.last[there] = now
                if self.cut & {there, back}:  # the answer of the kernel there would go the other way
                    self.members[replica].unanswered.setdefault(action.replica, now)
                if there not in self.cut:
                    self.members[action.replica].node.from_peer(action.message, now)
        return now

    def culprits(self, now: float) -> set[int]:
        everybody = set(range(COUNT))
        return set(self.blame.culprit(now, everybody, everybody))


def test_each_member_gets_its_sign_in_a_beat_of_its_own() -> None:
    world = World(0)
    beats = TIMEOUTS.beats_between(COUNT)
    assert beats == COUNT // AT_ONCE
    world.sent.clear()
    member = world.members[5]
    for tick in range(3 * beats):
        given = [action.replica for action in member.tick(tick * BEAT) if isinstance(action, n.ToPeer)]
        assert len(given) <= AT_ONCE
        world.sent.update((5, other) for other in given)
    assert world.sent == {(5, other): 3 for other in range(COUNT) if other != 5}


def test_in_a_small_group_all_get_one_in_each_beat() -> None:
    node = running(tuple(range(AT_ONCE)))
    for tick in range(3):
        given = [action.replica for action in node.tick(tick * BEAT) if isinstance(action, n.ToPeer)]
        assert given == [1, 2, 3]


def test_nobody_is_missed_in_a_large_group_that_is_well() -> None:
    world, now = World(1), 0.0
    while now < 3 * TIMEOUTS.heartbeat:
        now = world.step()
        assert not world.culprits(now)
    assert not world.blame.accusers(0, now)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("some", ["", "of which one has just given it a sign, and one will now"])
@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
def test_the_one_that_is_cut_off_from_some_goes_and_no_other(seed: int, some: str, both: bool) -> None:
    """The first one, which would stay if one complaint counted as much as all."""
    world, now = World(seed), 0.0
    victim, begins = 0, world.random.uniform(1.0, 3.0) * TIMEOUTS.heartbeat
    while now < begins:
        now = world.step()
    others = world.random.sample(range(1, COUNT), world.random.randint(2, COUNT - 1))
    if some:
        last = sorted(range(1, COUNT), key=lambda other: world.last[other, victim])
        others = [last[0], last[-1]]
    world.cut = {(victim, other) for other in others} | ({(other, victim) for other in others} if both else set())
    while not (found := world.culprits(now)):
        now = world.step()
        assert now < begins + (0.6 * TIMEOUTS.beats_between(COUNT) + 0.55) * TIMEOUTS.heartbeat
    assert found == {victim}
