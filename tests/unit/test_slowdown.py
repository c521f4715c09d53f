"""Who makes the others wait: a rank that is slower by a third is named within 50 steps, and under even load nobody."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.diagnosis.facts import Rank
from ftcomm.diagnosis.slowdown import HOUR, STEPS, SlowdownOfGroup, StepTimes, slowdowns

STEP, NETWORK = 0.1, 0.01  # s


def steps(
    seed: int,
    ranks: int,
    number: int,
    noise: float,
    *,
    factors: dict[int, float] | None = None,
    pauses: float = 0.02,
    memory: float = 0.0,
    together: float = 0.0,
) -> dict[Rank, dict[int, StepTimes]]:
    """What ranks record that compute for `STEP`, times `factors`, with noise. It has a `memory` from step to step, and
    pauses of up to ten steps. With `together` the machine makes all of them slow now and then."""
    chance = random.Random(seed)
    state = [0.0] * ranks
    times: dict[Rank, dict[int, StepTimes]] = {(rank, 0): {} for rank in range(ranks)}
    for step in range(number):
        busy = chance.uniform(1, 4) if chance.random() < together else 1.0
        own = []
        for rank in range(ranks):
            state[rank] = memory * state[rank] + math.sqrt(1 - memory * memory) * chance.gauss(0, noise)
            pause = chance.uniform(1, 10) if chance.random() < pauses else 1.0
            own.append(STEP * math.exp(state[rank]) * pause * busy * (factors or {}).get(rank, 1.0))
        for rank in range(ranks):
            times[rank, 0][step] = StepTimes(max(own) + NETWORK, max(own) - own[rank])
    return times


def named(group: SlowdownOfGroup) -> dict[int, str]:
    return {one.rank[0]: one.named for one in group.ranks if one.named}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_a_rank_that_is_slower_by_a_third_is_named_within_50_steps(ranks: int, noise: float) -> None:
    for seed in range(4):
        group = slowdowns("*", steps(seed, ranks, 50, noise, factors={1: 1.3}), {})
        assert named(group) == {1: "compute"}, f"seed {seed}"
        assert group.ranks[0].rank == (1, 0)
        assert 1.15 < group.ranks[0].slowdown < 1.45
        assert group.ranks[0].since < 50


@pytest.mark.parametrize(
    ("ranks", "noise", "memory", "together"),
    [(2, 0.2, 0.0, 0.0), (4, 0.5, 0.3, 0.2), (8, 0.1, 0.5, 0.0), (3, 0.02, 0, 0)],
)
def test_nobody_is_named_in_minutes_of_even_load(ranks: int, noise: float, memory: float, together: float) -> None:
    """Five minutes, at ten steps a second."""
    seed = random.randrange(1 << 32)
    times = steps(seed, ranks, HOUR // 12, noise, pauses=0.05, memory=memory, together=together)
    for end in range(STEPS // 2, HOUR // 12 + 1, STEPS // 2):  # asked again and again
        window = {rank: {step: row[step] for step in range(max(0, end - STEPS), end)} for rank, row in times.items()}
        assert not named(slowdowns("*", window, {})), f"seed {seed}, step {end}"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(2, 6), st.floats(0, 0.5), st.floats(0, 0.1))
def test_nobody_is_named_by_chance(seed: int, ranks: int, noise: float, pauses: float) -> None:
    assert not named(slowdowns("*", steps(seed, ranks, 300, noise, pauses=pauses), {}))


def test_a_small_difference_is_not_worth_a_line() -> None:
    assert not named(slowdowns("*", steps(1, 4, 500, 0.01, factors={1: 1.07}, pauses=0.0), {}))


def test_one_long_pause_names_nobody() -> None:
    times = steps(1, 4, 60, 0.02, pauses=0.0)
    for rank, row in times.items():
        row[30] = StepTimes(1000.0, 0.0 if rank == (1, 0) else 999.9)
    group = slowdowns("*", times, {})
    assert not named(group)
    assert group.ranks[0].rank == (1, 0)
    assert group.ranks[0].share > 0.9, "its share of the time is said all the same"


def test_a_rank_that_keeps_up_again_is_named_no_more() -> None:
    slow, well = steps(1, 4, 100, 0.02, factors={1: 1.5}), steps(2, 4, 100, 0.02)
    times = {rank: {**slow[rank], **{step + 100: row for step, row in well[rank].items()}} for rank in slow}
    assert named(slowdowns("*", slow, {})) == {1: "compute"}
    assert not named(slowdowns("*", times, {}))


def test_a_slow_network_is_told_from_slow_computing() -> None:
    times = steps(1, 4, 50, 0.02, pauses=0.0)
    for rank, row in times.items():
        for step, one in row.items():
            late = {} if rank == (3, 0) else {3: 0.05, 0: 0.001}
            row[step] = StepTimes(one.length + 0.05, one.waited, late)
    group = slowdowns(
        "*", times, {(3, 0): ("h3", "r1"), (0, 0): ("h0", "r0"), (1, 0): ("h1", "r0"), (2, 0): ("h2", "r1")}
    )
    assert named(group) == {3: "network"}
    assert group.hosts[0][0] == "h3"
    assert group.racks[0][0] == "r1"


def test_shares_are_shares() -> None:
    group = slowdowns("*", steps(5, 4, 200, 0.2, factors={2: 2.0}), {})
    assert all(0 <= one.share <= 1 for one in group.ranks)
    assert sum(one.share for one in group.ranks) <= 1
    assert group.ranks[0].share == pytest.approx(0.45, abs=0.1)


def test_without_steps_nobody_is_named() -> None:
    assert not named(slowdowns("*", {}, {}))
    assert not named(slowdowns("*", {(0, 0): {}, (1, 0): {}}, {}))
    assert not named(slowdowns("*", steps(1, 1, 50, 0.0), {}))
