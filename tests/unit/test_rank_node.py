"""One rank's part of the control plane: who is complained about, which waits are told, and what the end says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Watchdog
from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.blame import BOUNDARY, CHANGE
from ftcomm.control.failed_dials import Cause
from ftcomm.control.joined import Action, Joined
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Addresses, Member, View
from ftcomm.errors import CollectiveTimeout

TIMEOUTS = Timeouts.derive(120.0, 10.0)
NONCE = "0" * 32


def address(replica: int, rank: int) -> Address:
    return Address("h", 1 + rank, "b", 1 + replica, 3, NONCE)


def view(epoch: int, replicas: tuple[int, ...], ranks: int = 1, step: int | None = 0, proposal: int = 0) -> View:
    members = tuple(Member(r, f"life-{r}", Addresses.of(address(r, k) for k in range(ranks)), True) for r in replicas)
    return View(epoch, step, members, "", proposal)


class Process:
    """One process of replica 0: a rank, and rank 0 with the leader. It has all methods of the rank; what it sends
    upwards is an `Up`, whoever is there."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank = n.RankNode(0, rank, address(0, rank), TIMEOUTS)
        self.leader = LeaderNode(0, "life-0", ranks, TIMEOUTS)
        self.joined = Joined(self.rank, self.leader) if rank == 0 else None
        if self.joined is not None:
            self.joined.start()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.rank, name)
        return (lambda *args, **how: self._done(found(*args, **how))) if callable(found) else found

    def _done(self, result: Any) -> Any:
        if not isinstance(result, list):
            return result
        actions = result if self.joined is None else self.joined.carry(result)
        return [n.Up(action.message) if isinstance(action, ToCoordinator) else action for action in actions]

    def up_opened(self) -> list[Action]:
        return self._done(self.rank.up_opened() if self.joined is None else self.leader.opened())

    def up_lost(self, reason: str, **how: bool) -> list[Action]:
        return self._done(self.rank.up_lost(reason, **how) if self.joined is None else self.leader.lost())

    def from_up(self, message: m.Message) -> list[Action]:
        told = self.rank.from_up if self.joined is None else self.leader.from_coordinator
        return self._done(told(message))

    def tick(self, now: float) -> list[Action]:
        if self.joined is None:
            return [*self.rank.beat(now), *self.rank.tick(now)]
        return self._done(self.joined.tick(now))

    def from_rank(self, shard: int, message: m.Message, now: float) -> list[Action]:
        return self._done(self.leader.from_rank(shard, message, now))

    def rank_acknowledged(self, shard: int, at: float) -> list[Action]:
        return self._done(self.leader.rank_acknowledged(shard, at))

    def rank_refused(self, shard: int, reason: str) -> list[Action]:
        return self._done(self.leader.rank_refused(shard, reason))


def running(replicas: tuple[int, ...] = (0, 1, 2), ranks: int = 1, rank: int = 0) -> Process:
    """Replica 0, in force in epoch 1."""
    node = Process(rank, ranks)
    node.up_opened()
    if rank == 0:
        for other in range(1, ranks):
            node.from_rank(other, m.Hello(other, address(0, other)), 0.0)
    else:
        node.from_up(m.Welcome("life-0"))
    change(node, view(1, replicas, ranks))
    return node


def change(node: Process, to: View) -> list[Action]:
    """The view, told, installed and resumed."""
    actions = node.from_up(m.NewView(to))
    assert act.Freeze(to) in actions
    actions += node.quiesced(to.epoch, m.Progress(0, ()))
    for replica in to.replicas:
        if replica != 0:
            actions += node.from_peer(
                m.MemberProgress(replica, f"life-{replica}", to.epoch, m.Progress(0, (), fresh=to.epoch == 1)), 0.0
            )
    assert node.wants(to)
    return actions + node.resumed(to)


def said(actions: list[Action], kind: type) -> list[m.Message]:
    return [action.message for action in actions if isinstance(action, n.Up) and isinstance(action.message, kind)]


def ticks(node: Process, start: float, seconds: float, alive: tuple[int, ...]) -> list[Action]:
    """Time passes, with signs of life of `alive`."""
    actions = []
    for tick in range(int(seconds)):
        now = start + tick
        for replica in alive:
            actions += node.from_peer(m.Alive(replica, f"life-{replica}"), now)
        actions += node.tick(now)
    return actions


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


def test_a_change_of_view_that_hangs_is_a_stall_on_those_who_have_not_told() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1, 2), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    node.from_peer(m.MemberProgress(1, "life-1", 2, m.Progress(0, ())), 0.0)
    quiet = ticks(node, 0.0, TIMEOUTS.op_floor, (1, 2))
    assert not said(quiet, m.Stalled)
    stalls = said(ticks(node, TIMEOUTS.op_floor, 3, (1, 2)), m.Stalled)
    assert {(stall.op, stall.waiting_on, stall.due) for stall in stalls} == {(CHANGE, (2,), True)}
    first = round(TIMEOUTS.op_floor) + 1
    assert [round(stall.lasted) for stall in stalls] == list(range(first, first + len(stalls)))


def test_memory_that_cannot_be_reached_is_a_wait_for_its_owner() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    node.from_peer(m.MemberProgress(1, "life-1", 2, m.Progress(0, ())), 0.0)
    assert {x.replica for x in said(node.unreachable(2, 1, "no route", Cause.OTHER, 0.0), m.Suspect)} == {1}  # type: ignore[attr-defined]
    assert said(node.waits(0, ()), m.Stalled) == [m.Stalled(0, 2, CHANGE, (1,), False)]


def test_memory_that_is_reached_at_last_is_no_complaint_any_more() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    node.from_peer(m.MemberProgress(1, "life-1", 2, m.Progress(0, ())), 0.0)
    node.unreachable(2, 1, "no route", Cause.OTHER, 0.0)
    assert said(node.resumed(view(2, (0, 1), step=None)), m.Reachable) == [m.Reachable(1)]


def test_a_port_that_hangs_up_is_tried_for_as_long_as_an_op_may_take_before_there_is_a_complaint() -> None:
    """A kernel lives there, and somebody without the token may flood it: that is no silence either."""
    node, now = running(), 0.0
    while now < TIMEOUTS.op:
        assert not said(node.dial_failed(1, 1, "reset", Cause.HUNG_UP, now), m.Suspect)
        assert not said(ticks(node, now, 1, (2,)), m.Suspect)
        now += 1.0
    assert said(node.dial_failed(1, 1, "reset", Cause.HUNG_UP, now), m.Suspect) == [
        m.Suspect(1, "life-1", "reset", False)
    ]
    assert not said(node.dial_failed(2, 1, "reset", Cause.HUNG_UP, now), m.Suspect), "each has its own time"


@pytest.mark.parametrize("over", ["a connection", "a pause"])
def test_a_port_that_hangs_up_now_and_then_has_its_time_again(over: str) -> None:
    node = running()
    for now in range(int(TIMEOUTS.op) - 10):
        node.dial_failed(1, 1, "reset", Cause.HUNG_UP, now)
    if over == "a connection":
        node.peer_opened(1)
    else:
        now += 10
    for later in range(now, now + 100):
        assert not said(node.dial_failed(1, 1, "reset", Cause.HUNG_UP, later), m.Suspect)


def test_a_dial_that_no_kernel_answers_is_a_complaint_at_once() -> None:
    assert said(running().dial_failed(1, 1, "no route", Cause.OTHER, 0.0), m.Suspect)


def test_who_is_short_of_something_blames_no_other_and_in_the_end_itself() -> None:
    """It cannot reach them: it neither complains of their silence, nor says that it waits for them."""
    node, now = running(), 0.0
    node.from_up(m.NewView(view(2, (0, 1, 2), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    assert node.short("no descriptors", now) == []
    assert said(node.waits(3, (1,)), m.Stalled) == [m.Stalled(0, 2, CHANGE, (), False)]
    while now < TIMEOUTS.op:
        assert node.short("no descriptors", now) == []
        actions = ticks(node, now, 1, ())
        assert not said(actions, m.Suspect)
        assert not said(actions, m.Stalled)
        now += 1.0
    assert said(node.short("no descriptors", now), m.Suspect) == [
        m.Suspect(0, "life-0", "its rank 0 is lost: no descriptors", True)
    ]


def test_who_is_short_of_something_no_more_waits_for_others_again() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1, 2), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    node.short("no descriptors", 0.0)
    ticks(node, 0.0, 10, (1, 2))
    assert said(node.waits(0, ()), m.Stalled) == [m.Stalled(0, 2, CHANGE, (1, 2), False)]


def test_who_takes_long_to_answer_for_its_memory_is_waited_for_and_not_complained_about() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1, 2), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    for replica in (1, 2):
        node.from_peer(m.MemberProgress(replica, f"life-{replica}", 2, m.Progress(0, ())), 0.0)
    assert node.reaching((2,)) == []
    actions = ticks(node, 0.0, TIMEOUTS.op_floor + 3, (1, 2))
    assert not said(actions, m.Suspect)
    assert {stall.waiting_on for stall in said(actions, m.Stalled)} == {(2,)}


def test_a_boundary_that_somebody_never_comes_to_is_a_stall() -> None:
    node = running()
    node.from_up(m.Prepare(7, 1, 5))
    for _ in node.boundary(5):
        pass
    assert said(ticks(node, 0.0, TIMEOUTS.op, (1, 2)), m.Stalled) == []
    node.from_peer(m.Boundary(1, 1, 7, None), 120.0)
    stalls = said(ticks(node, TIMEOUTS.op + 1, 2, (1, 2)), m.Stalled)
    assert stalls
    assert {(stall.op, stall.waiting_on, stall.due) for stall in stalls} == {(BOUNDARY, (2,), True)}


def test_the_coordinator_hears_at_once_that_the_job_is_in_its_next_step_loop() -> None:
    """Who comes back in less than a beat would else be told of the one before."""
    node = running()
    assert [said(node.boundary(step, loop), m.Heartbeat) for step, loop in ((0, 1), (1, 1), (2, 2), (3, 2))] == [
        [m.Heartbeat(0, loop=1)], [], [m.Heartbeat(2, loop=2)], [],
    ]  # fmt: skip


@pytest.mark.parametrize(("loop", "later"), [(1, False), (2, True)])
def test_a_boundary_in_a_later_loop_than_that_of_the_joiners_is_not_theirs(loop: int, later: bool) -> None:
    node = running(ranks=2, rank=1)
    node.boundary(4, 1)
    node.from_up(m.Prepare(7, 1, 5, loop=1))
    assert said(node.boundary(5, loop), m.AtBoundary) == [m.AtBoundary(7, later=later)]


def test_who_is_asked_and_does_not_wait_says_so() -> None:
    node = running()
    assert node.from_up(m.WhoWaits()) == [n.LookAtWaits()]
    assert said(node.waits(0, ()), m.Stalled) == [m.Stalled(0, 1, 0, (), False)]
    assert said(node.waits(4, (2,)), m.Stalled) == [m.Stalled(0, 1, 4, (2,), False)]


def test_a_leader_that_fails_says_so_to_the_coordinator_and_to_its_other_ranks_first() -> None:
    node = running(ranks=2)
    actions = node.failed("out of memory")
    assert isinstance(actions[-1], act.Failed)
    assert [x.proof for x in said(actions, m.Suspect)] == [True]  # type: ignore[attr-defined]
    assert [(a.shard, type(a.message)) for a in actions if isinstance(a, ToRank)] == [(1, m.Removed)]
    assert node.failed("again") == []


def test_a_rank_without_its_leader_is_removed() -> None:
    node = running(ranks=2, rank=1)
    assert node.up_lost("the leader of the replica is lost: refused", refused=True, here=True) == [
        act.Failed("the leader of the replica is lost: refused")
    ]


def test_a_connection_to_the_leader_that_ends_is_made_again_and_all_is_said_again() -> None:
    """Whatever was under way in both directions may have been lost with it."""
    node = running(ranks=2, rank=1)
    node.tell(m.Leave())
    node.from_up(m.Prepare(7, 1, 5))
    node.boundary(5)
    assert node.up_lost("the leader of the replica is lost: reset by peer") == []
    again = [action.message for action in node.up_opened() if isinstance(action, n.Up)]
    assert again == [m.Hello(1, address(0, 1), "life-0"), m.Leave(), m.Installed(1), m.AtBoundary(7)]

    leader = running(ranks=2)
    leader.from_up(m.Prepare(7, 1, 5))
    told = [a.message for a in leader.from_rank(1, again[0], 0.0) if isinstance(a, ToRank)]
    assert told == [m.Welcome("life-0"), m.NewView(view(1, (0, 1, 2), 2)), m.Prepare(7, 1, 5)]
    leader.from_rank(1, m.Promise(7, True, 3), 0.0)
    told = [a.message for a in leader.from_rank(1, again[0], 0.0) if isinstance(a, ToRank)]
    assert told == [m.Welcome("life-0"), m.NewView(view(1, (0, 1, 2), 2))]
    leader.from_up(m.Cancel(7))
    given_up = leader.from_rank(1, m.AtBoundary(7), 0.0)
    assert given_up == [ToRank(1, m.Decision(7, None))]


def test_who_promises_another_change_at_a_boundary_does_not_pass_it_when_the_first_is_given_up() -> None:
    """It would else pass the boundary alone, and wait in its next op for members that stand there."""
    node, leader = running(ranks=2, rank=1), running(ranks=2)
    leader.from_up(m.Prepare(7, 1, 5))
    node.from_up(m.Prepare(7, 1, 5))
    node.boundary(5)
    node.up_lost("the leader of the replica is lost: reset by peer")
    leader.from_up(m.Cancel(7))
    leader.from_up(m.Prepare(8, 1, 5))
    again = [action.message for action in node.up_opened() if isinstance(action, n.Up)]
    told = [a.message for said in again for a in leader.from_rank(1, said, 0.0) if isinstance(a, ToRank)]
    assert told[-2:] == [m.Prepare(8, 1, 5), m.Decision(7, None)]
    actions = [action for message in told for action in node.from_up(message)]
    assert actions == [n.Up(m.Promise(8, True, -1)), n.Up(m.AtBoundary(8))]
    assert act.Passed(view(1, (0, 1, 2), 2), left=False) in node.from_up(m.Decision(8, None))


def test_a_rank_whose_leader_is_silent_waits_for_it_as_long_as_an_op_and_says_so() -> None:
    for answers in (True, False):
        node = running(ranks=2, rank=1)
        gone = None
        for now in range(300):
            if now < 20:
                node.from_up(m.Ping())
            if now < 20 or answers:
                node.up_acknowledged(float(now))
            actions = node.tick(float(now))
            silent = not answers and now > 19 + TIMEOUTS.unheard
            if any(isinstance(action, act.Failed) for action in actions):
                gone = now
                break
            assert bool(said(actions, m.Heartbeat)[0].divided) == silent  # type: ignore[attr-defined]
        assert gone == (None if answers else 20 + TIMEOUTS.give_up)


def test_a_rank_whose_leader_has_never_sent_a_message_says_so() -> None:
    """Else only those of other replicas do that are cut off from their leaders as well, and they alone are removed."""
    node = Process(1, 2)
    node.up_opened()
    for beat in range(30):
        now = beat * TIMEOUTS.beat
        divided = said(node.tick(now), m.Heartbeat)[0].divided  # type: ignore[attr-defined]
        assert bool(divided) == (now > TIMEOUTS.unheard)


def test_a_rank_without_a_leader_ends_when_a_member_says_that_the_job_goes_on_without_it() -> None:
    for silent in (True, False):
        member = running((0, 1), ranks=2, rank=1)
        node = running((0, 1), ranks=2, rank=1)
        for now in range(30):
            if now == 0 or not silent:
                node.from_up(m.Ping())
            node.tick(float(now))
        assert member.passed_by(m.Alive(0, "life-0")) is None  # it is in the view in which this one runs
        assert member.passed_by(m.Alive(1, "life-9")) == m.LeftOut(view(1, (0, 1), 2).bare())
        for same in (view(1, (1,), 2), view(2, (0, 1), 2)):
            assert node.peer_answered(m.LeftOut(same)) == []
        told = node.peer_answered(m.LeftOut(view(2, (1,), 2)))
        assert bool(told) == silent  # else its leader tells it what there is to be told
        assert all(isinstance(action, act.Failed) for action in told)


def test_waits_go_on_while_the_coordinator_is_not_heard_but_not_for_ever() -> None:
    """In rank 0, which is told nothing, and in another rank, which its leader tells of it."""
    leader, other = running(ranks=2), running(ranks=2, rank=1)
    went_on: list[float] = []
    other_went_on: list[float] = []
    heard = 20
    for second in range(heard + int(TIMEOUTS.absence) + 20):
        now = float(second)
        if second <= heard:
            leader.from_up(m.Ping())
        other.up_acknowledged(now)
        actions = leader.tick(now)
        for action in actions:
            if isinstance(action, ToRank) and isinstance(action.message, m.Ping):
                other.from_up(action.message)
        went_on += [action.seconds for action in actions if isinstance(action, n.WaitOn)]
        other_went_on += [action.seconds for action in other.tick(now) if isinstance(action, n.WaitOn)]
    assert went_on == [float(x) for x in range(int(TIMEOUTS.heartbeat) + 1, int(TIMEOUTS.absence) + 1)]
    assert all(action.excused == 1.0 for action in actions if isinstance(action, n.WaitOn))
    assert other_went_on == went_on[1:], "it counts the second since the leader told it"
    leader.from_up(m.Ping())
    assert not [action for action in leader.tick(now + 1) if isinstance(action, n.WaitOn)]


def test_a_coordinator_that_takes_connections_and_says_nothing_is_not_heard() -> None:
    """Its views are older than the job. It decides nothing, so the ranks wait for one that does."""
    leader = running(ranks=2)
    seconds = range(int(TIMEOUTS.absence))
    waits = []
    for second in seconds:
        leader.up_opened()
        waits += [second] * any(isinstance(action, n.WaitOn) for action in leader.tick(float(second)))
        leader.up_lost("its connection closed")
    assert waits == [*seconds[int(TIMEOUTS.heartbeat) + 1 :]]


def test_a_coordinator_that_is_heard_now_and_then_does_not_let_waits_go_on_for_ever() -> None:
    leader, half = running(), 0
    watch = Watchdog(TIMEOUTS.op_floor, TIMEOUTS.op, TIMEOUTS.give_up, lambda: half / 2)
    op = Operation(np.zeros(8, np.float32), "float32", "sum")
    every = int(TIMEOUTS.heartbeat) + 4  # of which it is not known to be silent for 4 s
    for half in range(int(4 * TIMEOUTS.give_up)):
        if half % (2 * every) == 0:
            leader.from_up(m.Ping())
        for action in leader.tick(half / 2) if half % 2 == 0 else ():
            if isinstance(action, n.WaitOn):
                watch.excuse(action.excused)
        try:
            watch.waits(1, op, (1,))
        except CollectiveTimeout:
            assert half / 2 > TIMEOUTS.give_up + every
            return
    pytest.fail("it waits on")


def test_a_rank_whose_leader_says_nothing_more_does_not_wait_on_for_ever() -> None:
    other = running(ranks=2, rank=1)
    other.tick(0.0)
    other.from_up(m.Ping(TIMEOUTS.heartbeat + 1))
    ticks = range(1, int(TIMEOUTS.absence) + 100)
    waits = [second for second in ticks if any(isinstance(action, n.WaitOn) for action in other.tick(float(second)))]
    assert waits == list(range(1, int(TIMEOUTS.absence - TIMEOUTS.heartbeat)))


def test_a_leader_that_does_not_hear_the_coordinator_is_told_by_a_member_that_the_job_goes_on_without_it() -> None:
    node = running((0, 1))
    later = m.LeftOut(view(2, (1,)).bare())
    for second in range(int(TIMEOUTS.heartbeat) + 2):
        assert node.peer_answered(later) == []
        node.tick(float(second))
    assert any(isinstance(action, act.Failed) for action in node.peer_answered(later))


def test_a_leader_says_whom_of_its_ranks_it_does_not_hear_and_who_does_not_hear_it() -> None:
    node = running((0,), ranks=3)
    deaf = m.Heartbeat(0, divided="does not hear its leader")
    words: list[str] = []
    for now, message in ((0.0, m.Heartbeat(0)), (1.0, deaf), (2.0, m.Heartbeat(0))):
        node.from_rank(1, m.Heartbeat(0), now)
        node.from_rank(2, message, now)
        words += [beat.divided for beat in said(node.tick(now), m.Heartbeat)]  # type: ignore[attr-defined]
    assert words == ["", "its rank 2 does not hear its leader", ""]
    actions = []
    for second in range(3, 250):
        node.from_rank(2, m.Heartbeat(0), float(second))
        actions += node.tick(float(second))
        ended = any(isinstance(action, act.Failed) for action in actions)
        assert ended == (second > TIMEOUTS.give_up + 2), second
    assert said(actions, m.Heartbeat)[10].divided.startswith("its rank 1 has been silent for")  # type: ignore[attr-defined]
    assert [message.proof for message in said(actions, m.Suspect)] == [True]  # type: ignore[attr-defined]


def test_a_rank_that_lives_and_does_not_speak_is_kept_and_told_of() -> None:
    node = running((0, 1), ranks=2)
    mute = ""
    for now in range(60):
        node.rank_acknowledged(1, float(now))
        node.peers_acknowledged({1: float(now)})
        actions = node.tick(float(now))
        assert not said(actions, m.Suspect)
        mute = said(actions, m.Heartbeat)[0].mute  # type: ignore[attr-defined]
        assert bool(mute) == (now > TIMEOUTS.unheard)
    assert mute.startswith("its rank 1: its process lives but has not spoken for 59 s: it holds the interpreter lock")
    node.from_rank(1, m.Heartbeat(3), 60.0)
    assert said(node.tick(60.0), m.Heartbeat) == [m.Heartbeat(3)]
    beats = [x for now in range(61, 80) for x in said(node.tick(float(now)), m.Heartbeat)]
    assert beats[-1].divided == "its rank 1 has been silent for 19.0 s"  # type: ignore[attr-defined]


def test_a_rank_that_fails_tells_its_leader_which_would_wait_for_it_as_long_as_it_lives() -> None:
    (said_last, _) = running(ranks=2, rank=1).failed("out of memory")
    assert isinstance(said_last, n.Up)
    leader = running(ranks=2)
    actions = leader.from_rank(1, said_last.message, 0.0)
    assert [x.reason for x in said(actions, m.Suspect)] == ["its rank 1 is lost: out of memory"]  # type: ignore[attr-defined]
    assert any(isinstance(action, act.Failed) for action in actions)


def test_a_leader_without_its_coordinator_trains_on() -> None:
    node = running()
    node.boundary(0)
    assert node.up_lost("gone") == []
    assert node.boundary(1) == [act.Passed(node.view, False)]  # type: ignore[arg-type]


def test_reports_while_the_coordinator_is_away_are_said_when_it_is_back() -> None:
    node = running()
    node.up_lost("gone")
    assert node.tell(m.Report("divergence", {"op": 3})) == []
    actions = node.up_opened()
    assert isinstance(said(actions, m.Join)[0], m.Join)
    assert actions[-1] == n.Up(m.Report("divergence", {"op": 3}))
    assert node.tell(m.Report("divergence", {"op": 4})) == [n.Up(m.Report("divergence", {"op": 4}))]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_reaches_a_member_again_while_nobody_hears_that_says_so_later(rank: int) -> None:
    """The complaint was heard, and would cost one of the two its place."""
    node = running(ranks=2, rank=rank)
    assert node.up_lost("reset") == node.peer_back(1) == []
    assert n.Up(m.Reachable(1)) in node.up_opened()


def registered(ranks: int, rank: int = 0) -> Process:
    """Replica 0 joins a running job, which knows it: its scripts prepare."""
    node = Process(rank, ranks)
    node.up_opened()
    if rank == 0:
        for other in range(1, ranks):
            node.from_rank(other, m.Hello(other, address(0, other)), 0.0)
    seen = view(5, (0, 1, 2), ranks)
    assert act.Known(seen) in node.from_up(m.Registered(seen))
    return node


def test_a_replica_is_ready_when_the_scripts_of_all_its_ranks_are_and_says_so_to_a_new_coordinator() -> None:
    node = registered(ranks=3)
    waits = [a.message for a in node.from_rank(2, m.Ready(), 0.0) if isinstance(a, ToRank) and a.shard == 2]
    assert isinstance(waits[0], m.Queued)
    assert waits[0].reason.endswith("missing: 0, 1")
    assert not said(node.tell(m.Ready()), m.Ready)
    assert not said(node.tell(m.Ready()), m.Ready)
    assert [join.ready for join in said(node.up_opened(), m.Join)] == [False]  # type: ignore[attr-defined]
    assert said(node.from_rank(1, m.Ready(), 0.0), m.Ready) == [m.Ready()]
    assert [join.ready for join in said(node.up_opened(), m.Join)] == [True]  # type: ignore[attr-defined]


def test_who_prepares_is_told_once_who_is_there() -> None:
    """All ranks of a replica have got the first message of it, and a new coordinator says another."""
    node = registered(ranks=1)
    assert node.from_up(m.Registered(view(6, (0, 1)))) == []
    assert node.machine.preview == view(5, (0, 1, 2))


def test_who_is_dismissed_has_left_and_does_not_join_again() -> None:
    node = registered(ranks=2)
    actions = node.from_up(m.Dismissed("the job is being drained"))
    assert act.Passed(view(5, (0, 1, 2), 2), left=True) in actions
    assert ToRank(1, m.Dismissed("the job is being drained")) in actions
    assert not said(node.up_opened(), m.Join)
    assert node.from_up(m.Removed("later")) == [ToRank(1, m.Removed("later"))]


def test_who_is_in_no_view_and_was_told_of_none_fails_when_it_is_dismissed() -> None:
    node = Process()
    assert node.from_up(m.Dismissed("the job is being drained")) == [act.Failed("the job is being drained")]


def test_a_rank_hears_for_what_it_waits_and_why_it_ends() -> None:
    node = Process()
    for stage in m.Stage:
        assert node.from_up(m.Queued("news", stage)) == [act.JoinPending("news", stage)]
    over = m.Removed("over", m.Ending.TOO_LATE)
    assert node.from_up(over) == [act.Failed("over", m.Ending.TOO_LATE)]


def test_a_rank_that_prepares_without_its_leader_is_removed() -> None:
    assert registered(ranks=2, rank=1).up_lost("gone", refused=True, here=True) == [act.Failed("gone")]


def test_the_first_boundary_is_told_to_the_coordinator_at_once() -> None:
    """Who joins waits for it; later ones go with the signs of life."""
    node = running()
    assert node.boundary(0) == [act.Passed(node.view, False), n.Up(m.Heartbeat(0))]  # type: ignore[arg-type]
    assert node.boundary(1) == [act.Passed(node.view, False)]  # type: ignore[arg-type]


def test_a_joiner_waits_for_everybody_to_come_to_its_boundary_and_accuses_nobody() -> None:
    """The others hear of it when their step is over, however long that takes; asked, it says that it waits."""
    node = Process()
    node.up_opened()
    node.from_up(m.NewView(view(5, (0, 1, 2), step=9, proposal=7)))
    node.quiesced(5, m.Progress(0, ()))
    actions = ticks(node, 0.0, 2 * TIMEOUTS.op, ())
    assert not said(actions, m.Suspect)
    assert not said(actions, m.Stalled)
    assert said(node.waits(0, ()), m.Stalled) == [m.Stalled(0, 5, CHANGE, (1, 2), False)]


def test_who_waits_at_a_boundary_for_a_change_waits_as_long_as_for_an_op() -> None:
    """Whoever comes there first enters the new view at once; the others are in the middle of a step."""
    for proposal, deadline in ((0, TIMEOUTS.op_floor), (7, TIMEOUTS.op)):
        node = running()
        if proposal:
            node.from_up(m.Prepare(proposal, 1, 3))
        node.from_up(m.NewView(view(2, (0, 1, 2), step=3, proposal=proposal)))
        if proposal:
            node.boundary(3)
        node.quiesced(2, m.Progress(0, ()))
        assert not said(ticks(node, 0.0, deadline - 1, (1, 2)), m.Stalled)
        stall = said(ticks(node, deadline, 5, (1, 2)), m.Stalled)[0]
        assert stall == m.Stalled(0, 2, CHANGE, (1, 2), True, stall.lasted)  # type: ignore[attr-defined]


def test_the_end_of_a_member_is_said_again_to_a_coordinator_that_was_away() -> None:
    node = running()
    node.up_lost("gone")
    node.peer_lost(2, 1, "its process died", proof=True)
    ended = m.Suspect(2, "life-2", "its process died", True)
    assert node.up_opened()[1:] == [n.Up(ended)]
    change(node, view(2, (0, 1), step=None))
    node.up_lost("gone again")
    assert node.up_opened()[1:] == []


def test_a_leader_that_another_host_refuses_may_live() -> None:
    node = running((0, 1), ranks=2, rank=1)
    assert node.up_lost("refused", refused=True) == []
    assert node.leader_ended  # for one that has nothing more to do
    assert node.peer_answered(m.LeftOut(view(2, (1,), 2)))  # until a member says that the job goes on without it
    leader = running((0, 1), ranks=2)
    assert [x.proof for x in said(leader.rank_refused(1, "refused"), m.Suspect)] == [False]  # type: ignore[attr-defined]


def test_a_rank_ends_when_its_leader_is_started_again() -> None:
    node = running(rank=1, ranks=2)
    node.up_lost("refused", refused=True)
    (hello,) = said(node.up_opened(), m.Hello)
    assert hello == m.Hello(1, address(0, 1), "life-0")
    ended = [action for action in node.from_up(m.Welcome("another life")) if isinstance(action, act.Failed)]
    assert [end.reason for end in ended] == ["the leader of replica 0 was started again, and this rank was not"]
    assert not any(isinstance(action, act.Freeze) for action in node.from_up(m.NewView(view(9, (0, 1), 2))))


def stalls(node: Process, begin: float, seconds: float) -> list[tuple[int, tuple[int, ...], int]]:
    told = said(ticks(node, begin, seconds, (1, 2)), m.Stalled)
    return [(x.epoch, x.waiting_on, round(x.lasted)) for x in told]  # type: ignore[attr-defined]


def test_a_wait_for_one_that_says_nothing_goes_on_in_the_next_view() -> None:
    """1 answers each view at once, or at the end; 2 is stopped, and was waited for in an op."""
    node = running()
    ticks(node, 0.0, 5, (1, 2))
    node.from_up(m.Prepare(7, 1, 9))
    node.from_up(m.NewView(view(2, (0, 1, 2), step=9, proposal=7)))
    node.boundary(9)
    node.quiesced(2, m.Progress(0, ()), {2: 50.0})
    node.from_peer(m.MemberProgress(1, "life-1", 2, m.Progress(0, ())), 0.0)
    assert not stalls(node, 5.0, TIMEOUTS.op - 51)
    node.from_up(m.NewView(view(3, (0, 1, 2), step=None)))
    ticks(node, TIMEOUTS.op - 46, 2, (1, 2))
    node.quiesced(3, m.Progress(0, ()), {2: 50.0})
    told = stalls(node, TIMEOUTS.op - 44, 3)
    assert {(epoch, waiting_on) for epoch, waiting_on, _ in told} == {(3, (2,))}, "1 was given no time yet"
    assert told[0][2] >= TIMEOUTS.op


def test_the_wait_for_another_life_begins_anew() -> None:
    node = running()
    node.from_up(m.NewView(view(2, (0, 1, 2), step=None)))
    node.quiesced(2, m.Progress(0, ()))
    ticks(node, 0.0, TIMEOUTS.op_floor - 1, (1, 2))
    me, *others = view(3, (0, 1, 2), step=None).members
    again = (msgspec.structs.replace(member, incarnation="next") for member in others)
    node.from_up(m.NewView(View(3, None, (me, *again))))
    node.quiesced(3, m.Progress(0, ()))
    assert not stalls(node, TIMEOUTS.op_floor - 1, TIMEOUTS.op_floor - 1)


@pytest.mark.parametrize("planned", [False, True])
def test_no_op_goes_on_with_the_wait_for_one_that_was_removed(planned: bool) -> None:
    """0 stands at the boundary of a change that 2 does not come to, and no `Cancel` arrives before 2 is removed: the
    change was decided, or the coordinator was started again."""
    node = running()
    node.from_up(m.Prepare(7, 1, 3))
    actions = node.boundary(3)
    actions += ticks(node, 0.0, 3, (1, 2))
    if planned:
        actions += node.from_up(m.NewView(view(2, (0, 1, 2), step=3, proposal=7)))
    actions += change(node, view(3, (0, 1), step=None))
    assert any(isinstance(action, act.Passed) for action in actions)
    handed = [set(action.seconds) for action in actions if isinstance(action, n.HandWaits)]
    assert all(waits <= {1} for waits in handed), handed


def test_what_a_boundary_has_waited_the_next_op_goes_on_with() -> None:
    """0 stands at the boundary of a change that is given up; 1 has come there, 2 has not."""
    node = running()
    node.from_up(m.Prepare(7, 1, 3))
    node.boundary(3)
    ticks(node, 0.0, 21, (1, 2))
    node.from_peer(m.Boundary(1, 1, 7, None), 20.0)
    actions = node.from_up(m.Cancel(7))
    assert [type(x) for x in actions if isinstance(x, n.HandWaits | act.Passed)] == [n.HandWaits, act.Passed]
    (waited,) = [x.seconds for x in actions if isinstance(x, n.HandWaits)]
    assert {replica: round(seconds) for replica, seconds in waited.items()} == {2: 20}
    assert not [x for x in node.boundary(4) if isinstance(x, n.HandWaits)]
