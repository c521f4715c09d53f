"""The state machines, told things of the right type that make no sense, by anybody, in any order.

They must never raise, never emit a malformed view and never remember more than the members and connections that there
are. `Choices` of random bytes say what happens.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from ftcomm.control import actions as act
from ftcomm.control import coordinator as c
from ftcomm.control import coordinator_actions as ca
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.member import Phase
from ftcomm.control.rank_with_leader import InProcessAction, RankWithLeader
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Addresses, Member, View
from tests.fuzz.choices import ADDRESS, WORDS, Choices, message

TIMEOUTS = Timeouts.derive(24.0)
GIVEN: dict[str, Any] = {"timeouts": (TIMEOUTS.heartbeat, TIMEOUTS.op_floor, TIMEOUTS.op)}
CONNS = 6


def entries(machine: object) -> int:
    """How many things a machine remembers, in all its containers."""
    count, todo, seen = 0, deque([machine]), set()
    while todo:
        thing = todo.popleft()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        count += 1
        if isinstance(thing, dict):
            todo.extend(thing.keys())
            todo.extend(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            todo.extend(thing)
        elif isinstance(thing, msgspec.Struct):
            todo.extend(getattr(thing, name) for name in thing.__struct_fields__)
        elif hasattr(thing, "__dict__"):
            todo.extend(vars(thing).values())
        else:
            assert sys.getsizeof(thing) < 1 << 21, f"a {type(thing).__name__} of {sys.getsizeof(thing)} bytes"
    return count


def sendable(sent: m.Message) -> None:
    """Raises if the other side would refuse it."""
    assert m.encode(m.decode(m.encode(sent))) == m.encode(sent)


class Coordinated:
    """A coordinator and the connections that it knows."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 0.0
        self.seen: deque[int] = deque([0, 1], maxlen=6)  # epochs and proposals, as the members would know them
        self.view: View | None = None
        self.machine = c.Coordinator(1 + choices.number() % 3, 1, TIMEOUTS, [], 0.0, 7)

    def step(self) -> None:
        what, choices = self.choices.number() % 32, self.choices
        conn = choices.number() % CONNS
        if what < 24:
            told = message(choices, tuple(self.seen), GIVEN)
            if told is not None:
                self.check(self.machine.receive(conn, told, self.now))
        elif what < 27:
            self.check(self.machine.disconnected(conn, self.now))
        elif what < 31:
            self.now += choices.pick((0.0, TIMEOUTS.beat, 1.1, TIMEOUTS.heartbeat / 3))
            self.check(self.machine.tick(self.now))
        elif choices.number() < 16:
            self.check(self.machine.drain())

    def joined(self, conn: int, replica: int) -> None:
        """An honest one, so that something is there to be upset."""
        told = m.Join(replica, WORDS[replica % 4], Addresses.of((ADDRESS,)), 0, -1, GIVEN["timeouts"])
        self.check(self.machine.receive(conn, told, self.now))

    def check(self, actions: list[ca.CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, ca.Persist):
                replicas = action.view.replicas
                assert action.view.epoch == (self.view.epoch if self.view else 0) + 1, "an epoch left out or used twice"
                assert list(replicas) == sorted(set(replicas)), replicas
                if self.view is not None and not self.view.proposal and not action.view.proposal:
                    assert action.view.members != self.view.members, "a view that changes nothing"
                self.view = action.view
                self.seen.append(action.view.epoch)
            elif isinstance(action, ca.Send):
                sendable(action.message)
                if isinstance(action.message, m.Prepare):
                    self.seen.append(action.message.proposal)
        assert len(self.machine.joiners) <= len(self.machine.links), "somebody waits who has no connection"


class Ranked:
    """Rank 0 or 1 of two of replica 0, and the leader: joined to rank 0, or alone beside rank 1."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 0.0
        self.seen: deque[int] = deque([0, 1, 2], maxlen=6)
        self.rank = choices.number() % 2
        self.node = n.RankNode(0, self.rank, ADDRESS, TIMEOUTS)
        self.leader = LeaderNode(0, "a0", 2, TIMEOUTS)
        self.with_leader = RankWithLeader(self.node, self.leader) if self.rank == 0 else None
        self.epoch = 0
        self.freeze: View | None = None
        self.entering: View | None = None
        self.check(self.with_leader.start() if self.with_leader is not None else [])

    def view(self) -> View:
        """An honest one, so that something is there to be upset."""
        self.epoch += 1
        self.seen.append(self.epoch)
        members = tuple(
            Member(r, WORDS[r], Addresses.of((ADDRESS,) * 2), True) for r in range(1 + self.choices.number() % 3)
        )
        return View(self.epoch, None, members, "")

    def step(self) -> None:
        node, leader, choices = self.node, self.leader, self.choices
        what = choices.number() % 16
        told = message(choices, tuple(self.seen), GIVEN) if what < 8 else None
        replica = choices.pick((0, 1, 2, 3))
        if what < 8 and told is None:
            return
        if what < 3:
            self.from_up(told)
        elif what < 6:
            self.check(node.from_peer(told, self.now))
        elif what < 8:
            self.check(leader.from_rank(choices.number() % 2, told, self.now))
        elif what == 8:
            self.check(node.from_up(m.Welcome("a0")))
            self.from_up(m.Registered(self.view()) if choices.number() % 4 == 0 else m.NewView(self.view()))
        elif what == 9:
            self.check(node.boundary(choices.pick(tuple(s for s in self.seen if s < 1 << 32))))
        elif what == 10 and self.freeze is not None:
            self.check(node.quiesced(self.freeze.epoch, m.Progress(choices.number(), ())))
        elif what == 11 and self.entering is not None and node.wants(self.entering):
            self.check(node.entered(self.entering))
        elif what == 12:
            self.now += choices.pick((0.0, TIMEOUTS.beat, 1.1, TIMEOUTS.heartbeat / 3))
            self.check(node.beat(self.now))
            self.check(leader.tick(self.now))
            self.check(node.tick(self.now))
        elif what == 13:
            opened = choices.pick((node.up_opened, leader.opened))
            self.check(opened() if choices.number() % 2 else node.peer_opened(replica))
        elif what == 14:
            epoch = choices.pick(tuple(self.seen))
            self.check(node.peer_lost(replica, epoch, "x", proof=choices.number() % 2 == 0))
            self.check(node.peer_back(replica))
        elif choices.number() < 32:
            self.check(choices.pick((node.up_lost, node.failed, lambda why: leader.lost()))("x"))
        elif choices.number() < 32:
            self.check(leader.rank_lost(1, "x"))

    def from_up(self, message: m.Message) -> None:
        """What the coordinator says to the leader, or the leader to rank 1."""
        self.check(self.node.from_up(message) if self.with_leader is None else self.leader.from_coordinator(message))
        if self.with_leader is None:
            self.check(self.leader.from_coordinator(message))

    def check(self, actions: Sequence[InProcessAction]) -> None:
        for action in actions if self.with_leader is None else self.with_leader.carry(actions):
            if isinstance(action, act.ToLeader | n.ToPeer | ToCoordinator | ToRank):
                sendable(action.message)
            elif isinstance(action, act.Freeze):
                assert self.freeze is None or action.view.epoch > self.freeze.epoch, "back to an older view"
                self.freeze = action.view
                self.seen.append(action.view.epoch)
            elif isinstance(action, act.Known):
                assert self.freeze is None or self.node.machine.phase is Phase.JOINING, "a member is told to prepare"
            elif isinstance(action, act.EnterView):
                assert set(action.progress) == set(action.view.replicas)
                self.entering = action.view
