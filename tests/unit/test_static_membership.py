"""The members of a static group, without threads: who is asked, who answers, who is lost, and who is not."""

from __future__ import annotations

import pytest

from ftcomm.control.views import Address
from ftcomm.errors import LostError
from ftcomm.membership.derived import Left
from ftcomm.membership.static import (
    DOUBT,
    DataEnded,
    End,
    FailOps,
    LoseMember,
    MemberFailed,
    MemberHello,
    MemberLeft,
    StaticAction,
    StaticMembership,
    TellMember,
)

pytestmark = pytest.mark.protocol


def member(me: int) -> StaticMembership:
    """Rank `me` of four, when all have come."""
    address = Address("host", 1, "boot", 1, 0, "0" * 32)
    made = StaticMembership("g", me, [f"rank {rank}" for rank in range(4)], MemberHello("0" * 32, address))
    for other in made.roster:
        if other != me:
            made.came(other, MemberHello("0" * 32, address))
    return made


def in_doubt(me: StaticMembership, other: int) -> list[StaticAction]:
    """The connection for data to `other` ends, and time passes."""
    me.severed(other, "connection for data: closed by the other side")
    assert me.waits
    assert me.look(0, 1.0) == me.look(0, 1.0 + DOUBT) == []
    return me.look(0, 1.01 + DOUBT)


ASKED = DataEnded("connection for data: closed by the other side")


def test_silence_is_no_loss() -> None:
    one = member(1)
    assert in_doubt(one, 2) == [TellMember(2, ASKED)]
    assert not one.waits
    assert one.look(0, 1e6) == []
    assert one.error is None
    lost = one.lost(2, "its connection was closed")  # the end of the link is a proof
    assert isinstance(lost[0], End)
    assert lost[0].last == MemberFailed(2, "its connection was closed")


def test_who_has_ended_its_ops_as_another_left_is_not_lost() -> None:
    """Of the four 0 leaves after 5 ops, which 1 and 3 have returned, and 2 has not. The message of 0 to 2 is late."""
    one, two = member(1), member(2)
    assert one.said(0, Left(4, 5)) == [LoseMember(0, "it has closed the group")]
    assert isinstance(one.look(5, 0.0)[0], FailOps)  # and its connections for data end
    assert in_doubt(two, 1) == [TellMember(1, ASKED)]
    assert one.said(2, ASKED) == [TellMember(2, MemberLeft(0, 5))]
    assert one.said(2, ASKED) == []  # it has answered
    assert not one.is_over
    assert two.said(1, MemberLeft(0, 5)) == [LoseMember(0, "it has closed the group")]
    assert two.look(4, 1e6) == []  # an op that the others have returned is waited for
    assert two.error is None
    assert isinstance(two.look(5, 1e6)[0], FailOps)
    assert two.said(0, Left(4, 5)) == []  # known
    assert two.lost(0, "its connection was closed") == []
    assert not two.is_over


def test_two_that_live_end_the_group_by_name() -> None:
    one, two = member(1), member(2)
    assert in_doubt(two, 1) == [TellMember(1, ASKED)]
    (end,) = one.said(2, ASKED)
    assert isinstance(end, End)
    assert isinstance(end.error, LostError)
    assert "closed by the other side (between rank 2 and rank 1)" in str(end.error)
    assert isinstance(end.last, MemberFailed)
    assert end.last.lost == -1
    (heard,) = two.said(1, end.last)
    assert isinstance(heard, End)
    assert "rank 1 has given up" in str(heard.error)
    assert "was lost" not in str(heard.error)


def test_who_leaves_answers_with_its_last_message() -> None:
    one = member(1)
    one.parts()
    assert one.said(2, ASKED) == []
    assert one.leaves(LostError("closed"), 3, 4)[0].last == Left(3, 4)  # type: ignore[union-attr]
    assert one.said(3, ASKED) == []


def test_who_says_that_nobody_has_left_is_heard_out() -> None:
    """Ranks that do not exist, or this one."""
    one = member(1)
    assert one.said(2, MemberLeft(9, 0)) == one.said(2, MemberLeft(1, 0)) == []
    assert one.look(100, 1.0) == []
    assert one.error is None
