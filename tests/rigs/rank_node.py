"""One process of a replica, without sockets: its rank node, and its leader node if it is rank 0."""

from __future__ import annotations

from typing import Any

from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.leader import ToCoordinator
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.rank_with_leader import InProcessAction, RankWithLeader
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Addresses, Member, View

TIMEOUTS = Timeouts.derive(120.0, 10.0)
NONCE = "0" * 32


def address(replica: int, rank: int) -> Address:
    return Address("h", 1 + rank, "b", 1 + replica, 3, NONCE)


def view(epoch: int, replicas: tuple[int, ...], ranks: int = 1, step: int | None = 0, proposal: int = 0) -> View:
    members = tuple(Member(r, f"life-{r}", Addresses.of(address(r, k) for k in range(ranks)), True) for r in replicas)
    return View(epoch, step, members, "", proposal)


class Process:
    """One process of replica 0: a rank, and rank 0 with the leader. It has all methods of the rank; what it sends
    upwards is a `ToLeader`, whoever is there."""

    def __init__(self, rank: int = 0, ranks: int = 1, timeouts: Timeouts = TIMEOUTS) -> None:
        self.rank = n.RankNode(0, rank, address(0, rank), timeouts)
        self.leader = LeaderNode(0, "life-0", ranks, timeouts)
        self.with_leader = RankWithLeader(self.rank, self.leader) if rank == 0 else None
        if self.with_leader is not None:
            self.with_leader.start()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.rank, name)
        return (lambda *args, **how: self._done(found(*args, **how))) if callable(found) else found

    def _done(self, result: Any) -> Any:
        if not isinstance(result, list):
            return result
        actions = result if self.with_leader is None else self.with_leader.carry(result)
        return [act.ToLeader(action.message) if isinstance(action, ToCoordinator) else action for action in actions]

    def up_opened(self) -> list[InProcessAction]:
        return self._done(self.rank.up_opened() if self.with_leader is None else self.leader.opened())

    def up_lost(self, reason: str, **how: bool) -> list[InProcessAction]:
        return self._done(self.rank.up_lost(reason, **how) if self.with_leader is None else self.leader.lost())

    def from_up(self, message: m.Message) -> list[InProcessAction]:
        told = self.rank.from_up if self.with_leader is None else self.leader.from_coordinator
        return self._done(told(message))

    def tick(self, now: float) -> list[InProcessAction]:
        if self.with_leader is None:
            return [*self.rank.beat(now), *self.rank.tick(now)]
        return self._done(self.with_leader.tick(now))

    def from_rank(self, shard: int, message: m.Message, now: float) -> list[InProcessAction]:
        return self._done(self.leader.from_rank(shard, message, now))

    def rank_acknowledged(self, shard: int, at: float) -> list[InProcessAction]:
        return self._done(self.leader.rank_acknowledged(shard, at))

    def rank_refused(self, shard: int, reason: str) -> list[InProcessAction]:
        return self._done(self.leader.rank_refused(shard, reason))


def running(
    replicas: tuple[int, ...] = (0, 1, 2), ranks: int = 1, rank: int = 0, timeouts: Timeouts = TIMEOUTS
) -> Process:
    """Replica 0, in force in epoch 1."""
    node = Process(rank, ranks, timeouts)
    node.up_opened()
    if rank == 0:
        for other in range(1, ranks):
            node.from_rank(other, m.Hello(other, address(0, other)), 0.0)
    else:
        node.from_up(m.Welcome("life-0"))
    change(node, view(1, replicas, ranks))
    return node


def change(node: Process, to: View) -> list[InProcessAction]:
    """The view, told, installed and entered."""
    actions = node.from_up(m.NewView(to))
    assert act.Freeze(to) in actions
    actions += node.quiesced(to.epoch, m.Progress(0, ()))
    for replica in to.replicas:
        if replica != 0:
            actions += node.from_peer(
                m.MemberProgress(replica, f"life-{replica}", to.epoch, m.Progress(0, (), fresh=to.epoch == 1)), 0.0
            )
    assert node.wants(to)
    return actions + node.entered(to)


def said(actions: list[InProcessAction], kind: type) -> list[m.Message]:
    told = (action.message for action in actions if isinstance(action, act.ToLeader))
    return [message for message in told if isinstance(message, kind)]


def ticks(node: Process, start: float, seconds: float, alive: tuple[int, ...]) -> list[InProcessAction]:
    """Time passes, with signs of life of `alive`."""
    actions = []
    for tick in range(int(seconds)):
        now = start + tick
        for replica in alive:
            actions += node.from_peer(m.Alive(replica, f"life-{replica}"), now)
        actions += node.tick(now)
    return actions
