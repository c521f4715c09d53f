"""The roster that all members use in a step is the same, in whatever order they pass boundaries and hear of losses."""

from __future__ import annotations

import dataclasses
import random
import threading

import pytest

from ftcomm.collective.plan import GroupView
from ftcomm.collective.roster import NONE, RosterTracker, agree, at, pass_boundary
from ftcomm.control.messages import Progress, Roster
from ftcomm.errors import CollectiveTimeout


def test_a_loss_shows_at_the_boundary_that_all_have_before_them() -> None:
    known = (Roster(NONE, (0, 1, 2, 3), (0, 1, 2)),)
    told = {m: Progress(0, (), step=step, epoch=4, rosters=known) for m, step in ((0, 7), (1, 7), (3, 6))}
    rosters = agree((0, 1, 3), (0, 1), told)
    assert [at(rosters, step).members for step in (6, 7, 8, 9)] == [(0, 1, 2, 3)] * 2 + [(0, 1, 3)] * 2
    assert at(rosters, 7).contributors == (0, 1, 2)
    assert at(rosters, 8).contributors == (0, 1)


def test_a_joiner_takes_over_what_the_others_agreed() -> None:
    told = {m: Progress(0, (), step=4, epoch=2, rosters=(Roster(NONE, (0, 1), (0, 1)),)) for m in (0, 1)}
    rosters = agree((0, 1, 2), (0, 1), {**told, 2: Progress(0, (), fresh=True)})
    assert at(rosters, 4).members == (0, 1)
    assert at(rosters, 5) == Roster(5, (0, 1, 2), (0, 1))


def test_who_missed_a_view_learns_what_was_agreed_in_it() -> None:
    """1 has not entered view 2, and 0 has gone on to boundary 6 in it, where 2 was removed."""
    before = (Roster(NONE, (0, 1, 2, 3), (0, 1, 2, 3)),)
    after = (*before, Roster(6, (0, 1, 3), (0, 1, 3)))
    told = {
        0: Progress(0, (), step=6, epoch=2, rosters=after),
        1: Progress(0, (), step=5, epoch=1, rosters=before),
    }
    rosters = agree((0, 1), (0, 1), told)
    assert [at(rosters, step).members for step in (5, 6, 7)] == [(0, 1, 2, 3), (0, 1, 3), (0, 1)]


@dataclasses.dataclass
class Member:
    step: int = NONE
    epoch: int = 0
    rosters: tuple[Roster, ...] = ()
    frozen_for: int = 0  # the newest view that it has told where it stands
    fresh: bool = True


class World:
    """Members that pass boundaries, hear of views and enter them, in any order that the exchange allows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.members = {m: Member() for m in range(self.random.randint(2, 5))}
        self.views: list[tuple[int, ...]] = [(), tuple(self.members)]
        self.told: dict[int, dict[int, Progress]] = {1: {}}
        self.used: dict[int, dict[int, Roster]] = {}  # by step and member
        for m in self.members:
            self.hear(m)
        for m in self.members:
            self.enter(m)

    def hear(self, m: int) -> None:
        member = self.members[m]
        later = [e for e in range(member.frozen_for + 1, len(self.views)) if m in self.views[e]]
        if later:
            member.frozen_for = self.random.choice(later)
            self.told[member.frozen_for][m] = Progress(
                0, (), fresh=member.fresh, step=member.step, epoch=member.epoch, rosters=member.rosters
            )

    def enter(self, m: int) -> None:
        member, epoch = self.members[m], self.members[m].frozen_for
        if epoch > member.epoch and set(self.told[epoch]) == set(self.views[epoch]):
            contributors = tuple(x for x in self.views[epoch] if x % 2 == 0)
            member.rosters = agree(self.views[epoch], contributors, self.told[epoch])
            member.epoch, member.fresh = epoch, False

    def pass_boundary(self, m: int) -> None:
        """Nobody is more than a few steps ahead: ops keep members together, but not step by step."""
        member = self.members[m]
        slowest = min(self.members[x].step for x in self.views[-1])
        if member.frozen_for == member.epoch and member.step < slowest + 3:
            member.step += 1
            roster = at(member.rosters, member.step)
            used = self.used.setdefault(member.step, {})
            used[m] = roster
            assert all(used[x] == roster for x in self.views[-1] if x in used)  # the lost may have gone another way

    def lose(self) -> None:
        if len(self.views[-1]) > 1:
            lost = self.random.choice(self.views[-1])
            self.views.append(tuple(m for m in self.views[-1] if m != lost))
            self.told[len(self.views) - 1] = {}

    def run(self) -> None:
        for _ in range(300):
            m = self.random.choice(self.views[-1])
            kind = self.random.random()
            if kind < 0.02:
                self.lose()
            elif kind < 0.3:
                self.hear(m)
            elif kind < 0.6:
                self.enter(m)
            else:
                self.pass_boundary(m)


def test_in_no_history_do_two_members_use_different_rosters() -> None:
    for seed in range(400):
        try:
            World(seed).run()
        except BaseException:
            print(f"seed {seed}")
            raise


def test_no_boundary_is_passed_between_telling_and_entering() -> None:
    rosters, changed, frozen = RosterTracker(), threading.Condition(), False

    def passes(step: int, timeout: float) -> Roster:
        return pass_boundary(rosters, changed, lambda: not frozen, step, timeout)

    rosters.agree(GroupView(1, 0, (0, 1), frozenset({0, 1})), {0: Progress(0, (), fresh=True)})
    assert passes(0, 1.0).members == (0, 1)
    frozen = True
    with pytest.raises(CollectiveTimeout, match="boundary 1: no view"):
        passes(1, 0.01)
    told = rosters.told(Progress(3, ()))
    assert told.step == 0
    passed: list[Roster] = []
    thread = threading.Thread(target=lambda: passed.append(passes(1, 60.0)))
    thread.start()
    with changed:
        rosters.agree(GroupView(2, 0, (0,), frozenset({0})), {0: told})
        frozen = False
        changed.notify_all()
    thread.join(60)
    assert passed == [Roster(1, (0,), (0,))]


def test_a_boundary_waits_anew_for_each_change_of_view() -> None:
    """A member waits for a view, and those that hold it up are removed one after the other: it gives up when no view
    has come for so long."""
    rosters, changed, asked = RosterTracker(), threading.Condition(), []

    def changes() -> int:
        asked.append(0)
        return min(len(asked), 30)

    def moves() -> bool:
        return False

    with pytest.raises(CollectiveTimeout, match="boundary 1: no view"):
        pass_boundary(rosters, changed, moves, 1, 0.001, changes)
    assert len(asked) > 30
