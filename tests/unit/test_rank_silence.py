"""A rank and its members: who is silent, who is complained of, and when the complaint is taken back."""

from __future__ import annotations

import pytest

from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.actions import ToLeader
from tests.rigs.rank_node import TIMEOUTS, running, said, ticks


def test_a_peer_that_falls_silent_is_complained_about_within_the_heartbeat_timeout_and_forgiven() -> None:
    node = running()
    assert not said(ticks(node, 0.0, 20, (1, 2)), m.Suspect)
    actions = ticks(node, 20.0, TIMEOUTS.heartbeat, (2,))
    assert {(x.replica, x.proof, x.silent) for x in said(actions, m.Suspect)} == {(1, False, True)}  # type: ignore[attr-defined]
    assert said(ticks(node, 30.0, 1, (1, 2)), m.Reachable) == [m.Reachable(1)]
    assert not said(ticks(node, 31.0, 20, (1, 2)), m.Suspect)


def test_a_peer_whose_kernel_answers_is_not_complained_about() -> None:
    """It holds its interpreter, or is stopped: the network leads there."""
    node = running()
    actions = []
    for now in range(60):
        node.peers_acknowledged({1: float(now), 2: min(now, 20.0)})
        actions += node.tick(float(now))
    assert {x.replica for x in said(actions, m.Suspect)} == {2}  # type: ignore[attr-defined]
    assert said(node.peers_acknowledged({2: 60.0}), m.Reachable) == [m.Reachable(2)]
    assert not said(node.tick(61.0), m.Suspect)


def test_an_older_life_is_no_sign_of_life() -> None:
    node = running()
    actions = []
    for now in range(10):
        actions += node.from_peer(m.Alive(1, "life-before"), float(now))
        actions += node.from_peer(m.Alive(2, "life-2"), float(now))
        actions += node.tick(float(now))
    assert {x.replica for x in said(actions, m.Suspect)} == {1}  # type: ignore[attr-defined]


def test_a_late_message_of_an_older_life_makes_nobody_complain_of_the_new_one() -> None:
    node = running()
    assert node.from_peer(m.Alive(1, "life-before"), 0.0) == []
    assert not said(ticks(node, 0.0, 3 * TIMEOUTS.heartbeat, (1, 2)), m.Suspect)


def test_every_tick_is_a_sign_of_life_to_all_members() -> None:
    node = running()
    to = [action.replica for action in node.tick(1.0) if isinstance(action, n.ToPeer)]
    assert to == [1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_reaches_a_member_again_while_nobody_hears_that_says_so_later(rank: int) -> None:
    """The complaint was heard, and would cost one of the two its place."""
    node = running(ranks=2, rank=rank)
    assert node.up_lost("reset") == node.peer_back(1) == []
    assert ToLeader(m.Reachable(1)) in node.up_opened()
