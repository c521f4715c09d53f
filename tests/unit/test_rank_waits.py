"""The waits of a rank in a change of view, at a boundary and in ops: how long they are, and who is told of them."""

from __future__ import annotations

import msgspec
import pytest

from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.blame import BOUNDARY, CHANGE
from ftcomm.control.leader import ToRank
from ftcomm.control.views import View
from tests.rigs.rank_node import TIMEOUTS, Process, change, running, said, ticks, view


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


def test_who_promises_another_change_at_a_boundary_does_not_pass_it_when_the_first_is_given_up() -> None:
    """It would else pass the boundary alone, and wait in its next op for members that stand there."""
    node, leader = running(ranks=2, rank=1), running(ranks=2)
    leader.from_up(m.Prepare(7, 1, 5))
    node.from_up(m.Prepare(7, 1, 5))
    node.boundary(5)
    node.up_lost("the leader of the replica is lost: reset by peer")
    leader.from_up(m.Cancel(7))
    leader.from_up(m.Prepare(8, 1, 5))
    again = [action.message for action in node.up_opened() if isinstance(action, act.ToLeader)]
    told = [a.message for said in again for a in leader.from_rank(1, said, 0.0) if isinstance(a, ToRank)]
    assert told[-2:] == [m.Prepare(8, 1, 5), m.Decision(7, None)]
    actions = [action for message in told for action in node.from_up(message)]
    assert actions == [act.ToLeader(m.Promise(8, True, -1)), act.ToLeader(m.AtBoundary(8))]
    assert act.Passed(view(1, (0, 1, 2), 2), left=False) in node.from_up(m.Decision(8, None))


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
