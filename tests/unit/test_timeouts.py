"""The chain of timeouts: whatever is let through can work, and what cannot is told with its mend."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control.timeouts import REPORT, Timeouts


@given(st.floats(3.0, 1e5))
def test_one_number_is_enough(op: float) -> None:
    chain = Timeouts.derive(op)
    assert chain.beat < chain.heartbeat < chain.op_floor <= chain.op
    assert chain.op + chain.grace + 2 * REPORT + chain.heartbeat < chain.give_up


@given(st.floats(0, 1e3), st.none() | st.floats(-1, 1e3), st.none() | st.floats(-1, 1e3))
def test_what_is_let_through_is_a_chain(op: float, heartbeat: float | None, op_floor: float | None) -> None:
    try:
        chain = Timeouts.derive(op, heartbeat, op_floor)
    except ValueError:
        return
    assert 0 < chain.beat < chain.heartbeat < chain.op_floor <= chain.op
    assert chain.op + chain.grace + 2 * REPORT + chain.heartbeat < chain.give_up


@pytest.mark.parametrize(
    ("ranks", "beats"), [(1, 1), (1024, 1), (1025, 2), (2048, 2), (3000, 3), (4096, 4), (8192, 4), (65536, 4)]
)
def test_signs_of_life_of_many_ranks_are_beats_apart(ranks: int, beats: int) -> None:
    """But never so many that a host which is gone would be a stall before it is missed."""
    assert Timeouts.derive().beats(ranks) == beats
    assert Timeouts.derive(120.0, 10.0, 20.0).beats(ranks) == min(beats, 2)
    assert Timeouts.derive(120.0, 10.0, 11.0).beats(ranks) == 1


@given(st.floats(3.0, 1e4), st.floats(0.1, 100.0), st.floats(0.1, 1e3), st.integers(1025, 65536))
def test_a_host_of_many_ranks_is_missed_before_that_is_a_stall(
    op: float, heartbeat: float, op_floor: float, ranks: int
) -> None:
    try:
        chain = Timeouts.derive(op, heartbeat, op_floor)
    except ValueError:
        return
    beats = chain.beats(ranks)
    assert beats == 1 or (0.6 * beats + 0.55) * chain.heartbeat < chain.op_floor


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0.0,), "the floor of the op timeout of 0.0 s; expected a positive number"),
        ((120.0, 0.05), "below 0.1 s: a host whose network is merely busy"),
        ((5.0, 5.0), "an op would give up before a silent replica is found"),
        ((10.0, 2.0, 1.0), "is not between the heartbeat timeout (2 s) and the op timeout (10 s)"),
        ((10.0, 2.0, 11.0), "is not between"),
        ((2.0,), "leaves too little time before an op gives up"),
    ],
)
def test_a_chain_that_cannot_work_is_refused_with_the_reason(arguments: tuple[float, ...], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Timeouts.derive(*arguments)
