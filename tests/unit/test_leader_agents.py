"""A leader and the host agents of its replica, without sockets: what counts when connections break, and when an agent
is of another life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ftcomm.control import messages as m
from ftcomm.control.actions import ToLeader
from ftcomm.control.host_agent import HostAgent, HostAgentAction
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_agents import LeaderAgents
from ftcomm.control.leader_node import LeaderNode
from tests.rigs.rank_node import TIMEOUTS, address, view

SHARDS, RANKS = range(2, 5), 5
LIFE = "life-0"


class Above:
    """The leader's end of a connection to an agent."""

    def __init__(self, shards: range = SHARDS) -> None:
        self.shards = shards
        self.sent: list[m.Enclosed] = []
        self.closed = False

    def send(self, shards: Sequence[int], message: m.Message) -> None:
        self.sent.append(m.Enclosed(tuple(shards), message))  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed = True

    def told(self, kind: type[m.Message]) -> list[int]:
        """Returns the ranks that were told such a message, in order."""
        return [shard for said in self.sent if isinstance(said.message, kind) for shard in said.shards]


class Leading:
    """A leader that trains in a view (`joined`), with ranks 0 and 1 beside it and the others behind an agent."""

    def __init__(self, joined: bool = True) -> None:
        self.node = LeaderNode(0, LIFE, RANKS, TIMEOUTS)
        self.agents: LeaderAgents[Above] = LeaderAgents(self.node, self.do)
        self.up: list[m.Message] = []  # to the coordinator
        self.node.opened()
        for shard in (0, 1):
            self.do(self.node.from_rank, shard, m.Hello(shard, address(0, shard)), 0.0)
        self.agent = HostAgent(SHARDS, RANKS, TIMEOUTS, address(0, 9), "this host")
        self.above = self.connects()
        for shard in SHARDS:
            self.greet(shard)
        if joined:
            self.do(self.node.from_coordinator, m.NewView(view(1, (0, 1), RANKS)))
        self.up.clear()

    def do(self, event: Any, *args: Any) -> None:
        self.agents.carry_out(event(*args), self._one)

    def _one(self, action: ToCoordinator | ToRank) -> None:
        if isinstance(action, ToCoordinator):
            self.up.append(action.message)

    def connects(self) -> Above:
        """The agent has a new connection, over which the leader hears it."""
        self.above = Above()
        self.hear(self.agent.opened(0.0))
        for shard in SHARDS:
            self.agent.rank_closed(shard)
        return self.above

    def hear(self, actions: Sequence[HostAgentAction], above: Above | None = None) -> None:
        """Let the leader hear what the agent says, and the agent what it answers."""
        for action in actions:
            if isinstance(action, ToLeader):
                self.agents.received(above or self.above, action.message, 0.0)
        for said in (above or self.above).sent:
            self.agent.from_leader(said, 0.0)

    def greet(self, shard: int) -> None:
        self.hear(self.agent.from_rank(shard, m.Hello(shard, address(0, shard), self.agent.life)))

    def resets(self) -> None:
        self.agent.lost("reset")
        assert self.agents.closed(self.above) == self.agent.address

    def says(self, shards: Sequence[int], message: m.Message, above: Above | None = None) -> None:
        self.agents.received(above or self.above, m.Enclosed(tuple(shards), message), 0.0)  # type: ignore[arg-type]

    @property
    def suspects(self) -> list[tuple[str, bool]]:
        return [(said.reason, said.proof) for said in self.up if isinstance(said, m.Suspect)]


DEAD = [("its shard 3 is lost: it has ended", True)]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("when", ["away", "back", "greeted", "said before"])
def test_a_leader_hears_of_the_end_of_a_rank_whatever_becomes_of_the_connection(when: str, joined: bool) -> None:
    """The process ends while the agent has no connection, or has one again over which that rank has not said hello, or
    has; or what was said of it is lost with the connection. The rank says nothing any more, and nobody else sees it."""
    of = Leading(joined)
    if when == "said before":
        of.agent.rank_lost(3, "it has ended")
    of.resets()
    if when == "away":
        assert of.agent.rank_lost(3, "it has ended") == []
    of.connects()
    if when == "greeted":
        of.greet(3)
    if when in ("back", "greeted"):
        of.hear(of.agent.rank_lost(3, "it has ended"))
    assert of.suspects == DEAD
    of.resets()
    of.connects()
    assert of.suspects == DEAD, "once"


def test_the_end_of_a_rank_that_has_finished_is_no_loss() -> None:
    of = Leading()
    of.hear([*of.agent.from_rank(3, m.Finished(True)), *of.agent.rank_lost(3, "it has ended")])
    assert of.suspects == []


def test_a_rank_that_is_refused_before_it_is_back_is_named_without_a_proof() -> None:
    of = Leading()
    of.resets()
    of.connects()
    of.hear(of.agent.rank_refused(3, "reset"))
    assert of.suspects == [("its shard 3 is lost: reset", False)]


def test_an_end_of_another_process_or_of_a_rank_of_another_host_is_none() -> None:
    of = Leading()
    for shard, there in ((3, address(0, 4)), (1, address(0, 1))):
        of.agents.received(of.above, m.RankLost(shard, there, "it has ended", True), 0.0)
    assert of.suspects == []


def test_what_comes_late_over_a_connection_that_was_given_up_counts_no_more() -> None:
    """Neither does its end. What the leader says goes over the one that took its place."""
    of = Leading()
    late = of.above
    of.agent.lost("a record fails")
    now = of.connects()
    assert late.closed
    for shard in SHARDS:
        of.greet(shard)
    of.says([2], m.Heartbeat(7), late)
    of.says([2], m.Installed(1), late)
    assert of.agents.carried[2] is now
    assert of.node.leader.step < 7
    assert of.agents.closed(late) is None
    now.sent.clear()
    of.do(of.node.from_coordinator, m.WhoWaits())
    assert now.told(m.WhoWaits) == list(SHARDS)


def test_a_connection_that_was_given_up_before_the_leader_heard_of_it_takes_no_place() -> None:
    of = Leading()
    of.resets()
    late, of.above = Above(), Above()
    early = of.agent.opened(0.0)
    of.agent.lost("a record fails")
    of.hear(of.agent.opened(0.0))
    of.hear(early, late)
    assert of.agents.connections[SHARDS] is of.above
    assert not of.above.closed


def test_a_rank_that_is_turned_away_silences_no_other() -> None:
    """It has not said hello over this connection, and others have, with which it says the same."""
    of = Leading(joined=False)
    of.resets()
    of.connects()
    for shard in (3, 4):
        of.greet(shard)
    for shard in (0, 1):
        of.do(of.node.from_rank, shard, m.Ready(0), 0.0)
    of.above.sent.clear()
    of.says(SHARDS, m.Ready(0))
    assert of.above.sent == [m.Enclosed((2,), of.node.leader.welcome)]
    of.says([2], m.Hello(2, address(0, 2), LIFE))
    of.says([2], m.Ready(0))
    assert of.node.leader.ready


def test_an_agent_of_another_life_is_told_so_and_counts_for_nothing() -> None:
    of = Leading()
    old = Above()
    of.agents.received(old, m.AgentHello(address(0, 8), "an earlier life"), 0.0)
    assert old.sent == [m.Enclosed(tuple(SHARDS), of.node.leader.welcome)]
    assert of.agents.connections[SHARDS] is of.above
    of.says([3], m.Hello(3, address(0, 7), LIFE), old)
    of.agents.received(old, m.RankLost(3, address(0, 3), "it has ended", True), 0.0)
    assert of.node.leader.addresses[3] == address(0, 3)
    assert of.agents.closed(old) is None, "nobody seeks it, and its end is no loss"
    assert of.suspects == []


def test_an_agent_that_knows_no_life_takes_the_place_of_none_that_is_there() -> None:
    """It may be left from an earlier life. If that other one is gone, it is the right one."""
    of, new = Leading(), Above()
    of.agents.received(new, m.AgentHello(address(0, 8)), 0.0)
    assert new.closed
    assert of.agents.connections[SHARDS] is of.above
    assert of.agents.closed(new) is None
    of.resets()
    again = Above()
    of.agents.received(again, m.AgentHello(address(0, 8)), 0.0)
    assert of.agents.connections[SHARDS] is again
