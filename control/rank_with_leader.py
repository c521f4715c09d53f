"""A rank and the leader of its replica in one process: what they tell each other needs no connection. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ftcomm.control import rank_node as n
from ftcomm.control.actions import ToLeader
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_node import LeaderNode

InProcessAction = n.RankAction | ToCoordinator | ToRank


class RankWithLeader:
    """Carries what `rank` and `leader` say to each other, as their driver calls one or the other. Not thread-safe."""

    def __init__(self, rank: n.RankNode, leader: LeaderNode) -> None:
        self.rank, self.leader = rank, leader

    def start(self) -> list[InProcessAction]:
        """Begin. To be called once, before all else."""
        return self.carry(self.rank.up_opened())

    def tick(self, now: float) -> list[InProcessAction]:
        """Call `tick` of both. To be called every `Timeouts.beat`."""
        beat = self.carry(self.rank.beat(now))
        return [*beat, *self.carry(self.leader.tick(now)), *self.carry(self.rank.tick(now))]

    def carry(self, actions: Sequence[InProcessAction]) -> list[InProcessAction]:
        """Returns what one of them wants, with what it tells the other replaced by what comes of it."""
        result: list[InProcessAction] = []
        for action in actions:
            if isinstance(action, ToLeader):
                result += self.carry(self.leader.told(0, action.message))
            elif isinstance(action, ToRank) and action.shard == 0:
                result += self.carry(self.rank.from_up(action.message))
            else:
                result.append(action)
        return result
