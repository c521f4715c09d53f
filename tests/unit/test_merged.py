"""What the ranks of a host say alike goes to their leader as one message, and nothing of a rank overtakes another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control import messages as m
from ftcomm.control.merged import Merged, merge
from ftcomm.control.replica_reports import RESUMED


def resumed(epoch: int, took: float) -> m.Report:
    return m.Report(RESUMED, {"epoch": epoch, "resume_ms": took})


@pytest.mark.parametrize(
    "message", [m.Installed(3), m.AtBoundary(7), m.Ready(1), m.CaughtUp(4), m.Finished(), m.Promise(7, True, 2)]
)
def test_what_all_say_is_told_once_when_the_last_one_has_said_it(message: m.Message) -> None:
    merged = Merged(3)
    assert [merged.say(shard, message) for shard in (4, 5)] == [[], []]
    assert merged
    assert merged.say(6, message) == [((4, 5, 6), message)]
    assert not merged


def test_what_only_some_have_said_is_told_with_the_flush() -> None:
    merged = Merged(3)
    merged.say(6, m.Installed(3))
    merged.say(4, m.Installed(3))
    assert merged.flush() == [((4, 6), m.Installed(3))]
    assert merged.flush() == []


@pytest.mark.parametrize(
    "message", [m.Promise(7, False, 2), m.Finished(False, "why"), m.Leave(), m.Report("else", {}), m.Reachable(1)]
)
def test_what_one_rank_alone_says_waits_for_nobody_and_overtakes_nothing(message: m.Message) -> None:
    merged = Merged(3)
    merged.say(4, m.Installed(3))
    assert merged.say(5, message) == [((4,), m.Installed(3)), ((5,), message)]


def test_the_newest_step_and_the_slowest_report_stand_for_all() -> None:
    assert merge(m.Promise(7, True, 2), m.Promise(7, True, 4)) == m.Promise(7, True, 4)
    assert merge(m.Promise(7, True, 2), m.Promise(8, True, 2)) is None
    assert merge(resumed(2, 5.0), resumed(2, 9.0)) == merge(resumed(2, 9.0), resumed(2, 5.0)) == resumed(2, 9.0)
    assert merge(resumed(2, 5.0), resumed(3, 5.0)) is None
    assert merge(m.Installed(2), m.Installed(3)) is None
    assert merge(m.Installed(2, resumed(2, 5.0)), m.Installed(2, resumed(2, 9.0))) == m.Installed(2, resumed(2, 9.0))
    assert merge(m.Installed(2, resumed(2, 5.0)), m.Installed(2)) is None, "one of the two has no report"
    assert merge(m.Installed(2), m.Ready(2)) is None


KINDS = st.sampled_from(
    [m.Installed(1), m.Installed(2), m.AtBoundary(1), m.Ready(1), m.Leave(), m.Promise(1, False, 0)]
)


@given(st.lists(st.tuples(st.integers(0, 2), st.one_of(KINDS, st.just(None)))))
def test_the_leader_hears_of_each_rank_all_that_it_has_said_in_order(said: list[tuple[int, m.Message | None]]) -> None:
    """None is a flush, by nobody in particular."""
    merged, heard = Merged(3), []
    for shard, message in said:
        heard += merged.flush() if message is None else merged.say(shard, message)
    heard += merged.flush()
    for rank in range(3):
        told = [message for shards, message in heard if rank in shards]
        assert told == [message for shard, message in said if shard == rank and message is not None]
