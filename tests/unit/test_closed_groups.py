"""Who calls a group that this member has closed is answered, and who means the next one of its name is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftcomm.transport import closed_groups
from ftcomm.transport.closed_groups import ClosedGroups
from ftcomm.transport.group_connection import ASK, ENTERED, LINK, P2P, GroupConnection

SOCK: Any = SimpleNamespace()


def call(what: str = ASK, **fields: Any) -> GroupConnection:
    return GroupConnection("pairs", what, 1, "", SOCK, **fields)


@pytest.mark.parametrize("what", [ASK, ENTERED])
def test_a_caller_of_a_closed_group_is_known_by_either_segment(what: str) -> None:
    closed: ClosedGroups[str] = ClosedGroups()
    closed.add("pairs", ["mine", "theirs"], "left", 0)
    assert closed.answer(call(what, there="mine", nonce="new")) == "left"
    assert closed.answer(call(what, nonce="theirs")) == "left"  # late: it does not know mine yet
    assert closed.answer(call(what, nonce="new")) is None
    assert closed.since("pairs") == 0


def test_a_group_in_which_a_joiner_met_nobody_is_known_by_when_it_was_made() -> None:
    closed: ClosedGroups[str] = ClosedGroups()
    closed.add("pairs", ["mine"], "left", 7)
    assert closed.since("pairs") == 7
    assert closed.since("others") == 0
    assert closed.answer(call(made=6)) == "left"
    assert closed.answer(call(made=7)) is None  # the next one of the name
    assert closed.answer(call(made=6, there="new")) is None  # it knows the segment of my next one
    closed.add("pairs", ["new"], "left again", 9)
    assert closed.answer(call(made=8)) == "left again"


@pytest.mark.parametrize("what", [LINK, P2P])
def test_no_other_connection_is_for_a_closed_group(what: str) -> None:
    closed: ClosedGroups[str] = ClosedGroups()
    closed.add("pairs", ["mine"], "left", 7)
    assert closed.answer(call(what, there="mine")) is None
    assert closed.answer(call(what)) is None


def test_the_oldest_segments_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_groups, "MAX_REMEMBERED", 2)
    closed: ClosedGroups[str] = ClosedGroups()
    closed.add("pairs", ["a", "b", "c"], "left", 0)
    assert closed.answer(call(there="a")) is None
    assert closed.answer(call(there="b")) == closed.answer(call(there="c")) == "left"
