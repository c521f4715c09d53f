"""The machine that decides which views a subgroup enters, one event after the other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ftcomm.control.actions import EnterView, Freeze
from ftcomm.control.messages import Progress
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Address, Addresses, Member, View
from ftcomm.membership.derived import (
    AskMember,
    DerivedAction,
    DerivedMembership,
    FailGroup,
    Left,
    ReachMember,
    ReportStall,
    ReturnedElsewhere,
    SubgroupProgress,
    TellCaller,
)
from ftcomm.transport.group_connection import ASK, ENTERED, GroupConnection

pytestmark = pytest.mark.protocol

TIMEOUTS = Timeouts(heartbeat=1.0, op_floor=2.0, op=8.0)
HELD = Progress(3, ())


def at(replica: int) -> Address:
    """The segment of a member."""
    return Address("h", replica, "b", 2, 3, f"{replica:032x}")


def job(epoch: int, *replicas: int, lives: str = "first") -> View:
    members = (Member(replica, f"{lives}-{replica}", Addresses.of((at(replica),)), True) for replica in replicas)
    return View(epoch, None, tuple(members))


def account(epoch: int, replica: int) -> SubgroupProgress:
    return SubgroupProgress(epoch, at(replica), HELD)


def call(epoch: int, member: int, what: str = ASK, nonce: str = "", since: int = 0) -> GroupConnection:
    sock: Any = None
    return GroupConnection("g", what, member, f"first-{member}", sock, epoch, nonce or f"{member:032x}", since=since)


def asked(actions: list[DerivedAction]) -> list[int]:
    return [action.member.replica for action in actions if isinstance(action, AskMember)]


class Driven:
    """The machine of replica 0 in the group of 0, 1 and 3, at a time that goes on by hand."""

    def __init__(self) -> None:
        self.machine = DerivedMembership(0, (0, 1, 3), at(0), TIMEOUTS)
        self.now = 0.0

    def stop(self, view: View) -> list[DerivedAction]:
        (freeze,) = self.machine.job_entered(view)
        assert isinstance(freeze, Freeze)
        return self.machine.quiesced(view.epoch, HELD, self.now)

    def told(self, epoch: int, *replicas: int) -> list[DerivedAction]:
        return [a for r in replicas for a in self.machine.told(epoch, r, account(epoch, r), self.now)]

    def enter(self, view: View) -> EnterView:
        others = asked(self.stop(view))
        actions = self.told(view.epoch, *others)
        for replica in others:
            actions = self.machine.reached(view.epoch, replica, self.now)
        (enter,) = actions
        assert isinstance(enter, EnterView)
        self.machine.entered(view.epoch)
        return enter


def test_a_view_is_entered_with_those_of_the_group_when_all_have_told_and_are_reached() -> None:
    driven = Driven()
    assert asked(driven.stop(job(5, 0, 1, 2, 3))) == [1, 3]
    assert driven.told(5, 1) == []
    assert driven.machine.missing() == (3,)
    reach = driven.told(5, 3)
    assert [action.address for action in reach if isinstance(action, ReachMember)] == [at(1), at(3)]
    assert driven.machine.reached(5, 3, 0.0) == []
    assert driven.machine.missing() == (1,)
    (enter,) = driven.machine.reached(5, 1, 0.0)
    assert isinstance(enter, EnterView)
    assert enter.view.replicas == (0, 1, 3)
    assert enter.progress == {0: HELD, 1: HELD, 3: HELD}


def test_what_is_told_for_a_view_that_is_over_counts_for_nothing() -> None:
    driven = Driven()
    driven.stop(job(5, 0, 1, 3))
    driven.machine.job_entered(job(6, 0, 1, 3))
    assert driven.machine.job_entered(job(5, 0, 1, 3)) == []
    assert driven.machine.quiesced(5, HELD, 0.0) == []
    driven.machine.quiesced(6, HELD, 0.0)
    assert driven.told(5, 1, 3) == []
    assert driven.machine.missing() == (1, 3)


@pytest.mark.parametrize("wrong", ["silent", "of another epoch", "of another group"])
def test_who_does_not_answer_is_asked_again(wrong: str) -> None:
    driven = Driven()
    driven.stop(job(5, 0, 1))
    assert driven.machine.accepts(call(5, 1))  # so its segment in this group is known
    if wrong == "silent":
        driven.machine.unanswered(5, 1, 0.0)
    else:
        told = account(4, 1) if wrong == "of another epoch" else SubgroupProgress(5, at(9), HELD)
        assert driven.machine.told(5, 1, told, 0.0) == []
    assert asked(driven.machine.tick(driven.machine.due())) == [1]
    assert [type(action) for action in driven.told(5, 1)] == [ReachMember]


def test_who_cannot_be_reached_is_asked_again_as_it_may_have_left() -> None:
    driven = Driven()
    driven.stop(job(5, 0, 1, 3))
    driven.told(5, 1, 3)
    driven.machine.reached(5, 3, 0.0)
    assert driven.machine.unreachable(5, 1, 0.0) == []
    assert asked(driven.machine.tick(driven.machine.due())) == [1]
    elsewhere, enter = driven.machine.left(5, 1, Left(3, 3), 3, 3, 0.0)
    assert elsewhere == ReturnedElsewhere(3)
    assert isinstance(enter, EnterView)
    assert enter.view.replicas == (0, 3)
    assert driven.enter(job(6, 0, 1, 3)).view.replicas == (0, 3)
    assert driven.enter(job(7, 0, 1, 3, lives="second")).view.replicas == (0, 1, 3)


def test_who_is_ahead_is_answered_when_this_member_has_stopped_and_who_is_behind_is_not() -> None:
    driven = Driven()
    driven.enter(job(5, 0, 1, 3))
    ahead = call(6, 1)
    assert driven.machine.asked(ahead) == []
    assert driven.machine.asked(call(5, 3)) == [TellCaller(call(5, 3), account(5, 0))]
    answer, *asks = driven.stop(job(6, 0, 1, 3))
    assert answer == TellCaller(ahead, account(6, 0))
    assert asked(asks) == [1, 3]
    assert driven.machine.asked(call(5, 3)) == [TellCaller(call(5, 3), None)]
    assert driven.machine.asked(call(7, 3)) == []
    assert driven.machine.close() == [TellCaller(call(7, 3), None)]


def test_a_member_speaks_for_one_group_of_a_name() -> None:
    driven = Driven()
    assert driven.machine.accepts(call(5, 1))
    assert not driven.machine.accepts(call(5, 1, nonce="f" * 32))
    assert driven.machine.accepts(call(5, 1)._replace(instance="second-1", nonce="f" * 32))
    assert not driven.machine.accepts(call(5, 1)._replace(there="f" * 32))


def test_a_member_is_needed_until_the_others_have_entered_what_it_has() -> None:
    driven = Driven()
    assert not driven.machine.is_needed()
    driven.stop(job(4, 0))
    assert not driven.machine.is_needed(), "there is nobody else"
    driven.stop(job(5, 0, 1, 3))
    assert driven.machine.is_needed(), "they may be about to ask it for the first time"
    driven.told(5, 1, 3)
    for replica in (1, 3):
        driven.machine.reached(5, replica, 0.0)
    driven.machine.entered(5)
    assert driven.machine.is_needed()
    driven.machine.asked(call(5, 1, ENTERED))
    driven.machine.asked(call(4, 3, ENTERED))
    assert driven.machine.is_needed()
    driven.machine.left(5, 3, Left(3, 3), 3, 3, 0.0)
    assert not driven.machine.is_needed()


def test_a_joiner_is_needed_until_it_runs_in_a_view_though_the_others_do() -> None:
    """They wait, too, until they hear that from it."""
    driven = Driven()
    driven.stop(job(5, 0, 1))
    driven.machine.asked(call(5, 1, ENTERED))
    assert driven.machine.is_needed()
    driven.told(5, 1)
    driven.machine.reached(5, 1, 0.0)
    driven.machine.entered(5)
    assert not driven.machine.is_needed()


@pytest.mark.parametrize(
    ("said", "returned", "issued", "fails"),
    [
        (Left(2, 3), 3, 3, False),  # nothing more was called here
        (Left(2, 3), 3, 4, True),
        (Left(2, 3), 2, 4, False),  # one that it has taken is still to return, and then the next one is a stall
        (Left(3, 3), 2, 4, True),
        (Left(0, 0, fresh=True), 5, 5, False),
        (Left(0, 0, fresh=True), 5, 6, True),
    ],
)
def test_ops_that_a_member_has_not_taken_that_leaves_cannot_be_done(
    said: Left, returned: int, issued: int, fails: bool
) -> None:
    driven = Driven()
    driven.enter(job(5, 0, 1, 3))
    actions = driven.machine.left(5, 1, said, returned, issued, 0.0)
    last = returned if said.fresh else said.taken
    expected: list[DerivedAction] = [] if said.fresh else [ReturnedElsewhere(said.returned)]
    assert actions == [*expected, *([FailGroup(1, last)] if fails else [])]
    assert driven.machine.last == last
    driven.machine.left(5, 3, Left(9, 9), 9, 9, 0.0)
    assert driven.machine.last == last, "who leaves later, with more ops, gives none of them back"


def test_what_a_member_had_returned_that_has_left_is_told_after_the_next_view_too() -> None:
    driven = Driven()
    driven.enter(job(5, 0, 1, 3))
    driven.machine.job_entered(job(6, 0, 1, 3))
    assert driven.machine.left(5, 1, Left(2, 3), 2, 3, 0.0) == [ReturnedElsewhere(2)]
    assert driven.machine.view is not None
    assert driven.machine.view.replicas == (0, 1, 3), "it is asked again before that view"


def test_a_call_that_means_a_later_group_of_the_name_is_not_for_this_one() -> None:
    made = DerivedMembership(0, (0, 1, 3), at(0), TIMEOUTS, made=4)
    assert made.accepts(call(5, 1, since=4))
    assert not made.accepts(call(5, 3, since=5))
    joins = DerivedMembership(0, (0, 1, 3), at(0), TIMEOUTS)
    later = call(5, 1, since=5)
    assert joins.accepts(later)
    assert joins.asked(later) == [TellCaller(later, None)], "it cannot know yet, so the caller asks again"
    assert joins.asked(call(5, 3)) == []
    view = job(5, 0, 1, 3)
    joins.job_entered(msgspec.structs.replace(view, step=7))
    assert joins.made == 7
    assert joins.accepts(later)
    assert joins.asked(later) == []


def test_a_closed_group_tells_nobody_anything_and_enters_nothing() -> None:
    driven = Driven()
    driven.enter(job(5, 0, 1, 3))
    driven.machine.close()
    assert driven.machine.job_entered(job(6, 0, 1, 3)) == []
    assert driven.machine.asked(call(5, 1)) == [TellCaller(call(5, 1), None)]


def test_for_whom_an_op_waits_is_asked_and_not_again_before_the_answer() -> None:
    driven = Driven()
    assert driven.machine.ask((1,)) == []
    driven.enter(job(5, 0, 1, 3))
    assert driven.machine.ask((1,)) == [], "it is asked anyhow, as this one has entered the view"
    driven.told(5, 1, 3)
    assert asked(driven.machine.ask((1,))) == [1]
    assert asked(driven.machine.ask((1, 3))) == [3]
    driven.machine.unanswered(4, 1, 0.0)
    assert driven.machine.ask((1, 3)) == []
    driven.machine.unanswered(5, 1, 0.0)
    assert driven.machine.ask((1, 3)) == [], "it is asked again at its time"
    assert asked(driven.machine.tick(driven.machine.due())) == [1]
    driven.machine.left(5, 1, Left(3, 3), 3, 3, 0.0)
    driven.told(5, 3)
    assert asked(driven.machine.ask((1, 3))) == [3]
    driven.stop(job(6, 0, 1, 3))
    assert driven.machine.ask((3,)) == []


def test_a_stall_is_reported_of_who_does_not_make_a_group_that_others_make_in_a_step() -> None:
    driven = Driven()
    driven.machine = DerivedMembership(0, (0, 1, 3), at(0), TIMEOUTS, made=1)
    driven.stop(job(5, 0, 1, 3))
    driven.told(5, 1)
    assert driven.machine.due() == TIMEOUTS.op, "as long as an op may take"
    (report,) = (x for x in driven.machine.tick(TIMEOUTS.op) if isinstance(x, ReportStall))
    assert report == ReportStall(5, (3,), TIMEOUTS.op)


def test_a_stall_is_reported_of_who_holds_up_a_later_view_and_never_of_the_first() -> None:
    driven = Driven()
    driven.stop(job(5, 0, 1))
    assert driven.machine.due() == float("inf")
    driven.told(5, 1)
    driven.machine.reached(5, 1, 0.0)
    driven.machine.entered(5)
    driven.stop(job(6, 0, 1))
    assert driven.machine.due() == TIMEOUTS.op_floor
    assert driven.machine.tick(TIMEOUTS.op_floor) == [ReportStall(6, (1,), TIMEOUTS.op_floor)]
    assert driven.machine.due() == TIMEOUTS.op_floor + REPORT
