from __future__ import annotations

import pytest

from ftcomm.control.blame import CHANGE, LONGEST, Blame, Culprit, Removal


def culprit(blame: Blame, now: float, contributing: frozenset[int] = frozenset(range(8))) -> dict[int, Culprit]:
    return blame.culprit(now, contributing, frozenset(range(8)))


def test_the_one_with_more_complaints_goes() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    blame.complaint(0, 1, now=0.0)
    blame.complaint(1, 0, now=0.0)
    blame.complaint(2, 0, now=0.1)
    assert culprit(blame, 0.3) == {}
    assert list(culprit(blame, 0.6)) == [0]


def test_of_equals_the_higher_replica_goes() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    blame.complaint(0, 3, now=0.0)
    blame.complaint(3, 0, now=0.0)
    assert list(culprit(blame, 0.6)) == [3]


def test_what_each_says_of_the_other_is_told() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    blame.complaint(0, 1, now=0.0, why="refused at 10.0.0.2:5")
    why = "replicas 0 and 1 cannot reach each other (replica 0: refused at 10.0.0.2:5)"
    assert culprit(blame, 0.6) == {1: Culprit(Removal.UNREACHABLE, why)}
    blame.complaint(1, 0, now=0.0, why="x" * 1000)
    assert culprit(blame, 0.6)[1].why.endswith(f"(replica 0: refused at 10.0.0.2:5; replica 1: {'x' * LONGEST})")


def test_a_stall_is_followed_to_who_waits_for_nobody() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    for now in range(7):
        assert culprit(blame, now) == {}
        blame.stalled(0, 0, 7, (1,), True, now)
        blame.stalled(1, 0, 7, (2,), True, now)
        blame.stalled(3, 0, 7, (0, 1, 2), True, now)
    assert list(culprit(blame, 6.1)) == [2]


def test_a_stall_that_is_not_said_again_is_over() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    for now in range(4):
        blame.stalled(0, 0, 7, (1,), True, now)
    for now in (4.0, 5.1, 8.0):  # it has ended within the grace, though the report came long ago by then
        assert culprit(blame, now) == {}


def test_a_link_that_is_back_is_forgiven() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    blame.complaint(0, 1, now=0.0)
    blame.withdraw(0, 1)
    assert culprit(blame, 1.0) == {}


@pytest.mark.parametrize(("then", "goes"), [(5.0, 0), (40.0, 2)])
def test_the_one_whose_paths_fail_and_come_back_in_turn_goes(then: float, goes: int) -> None:
    """Of its complaints, which it withdraws again and again, only one may be old enough to count."""
    blame = Blame(8.0, 5.0, 20.0)
    for accused in (1, 3, 4):
        blame.complaint(0, accused, now=0.0)
        blame.withdraw(0, accused)
    blame.complaint(0, 2, now=then)
    assert list(culprit(blame, then + 1.0)) == []
    assert list(culprit(blame, then + 8.5)) == [goes]


def test_a_complaint_that_comes_again_is_news_again_and_does_not_flap() -> None:
    """Else nobody is told of the second cut of a network in one view."""
    blame = Blame(0.5, 5.0, 20.0)
    assert blame.complaint(0, 1, 0.0)
    assert not blame.complaint(0, 1, 60.0), "it has lasted"
    blame.withdraw(0, 1)
    assert blame.complaint(0, 1, 61.0)
    blame.withdraw(0, 1)
    assert not blame.complaint(0, 1, 62.0), "so soon"
    blame.withdraw(0, 1)
    assert blame.complaint(0, 1, 72.0)
    blame.clear()
    assert blame.complaint(0, 1, 73.0), "a new view"


def test_one_that_reaches_nobody_goes_itself() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    for accused in (0, 1, 2):
        blame.complaint(3, accused, now=0.0)
    assert list(culprit(blame, 1.0)) == [3]


def test_who_holds_the_state_stays() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    blame.complaint(0, 1, now=0.0)
    blame.complaint(1, 0, now=0.0)
    assert list(culprit(blame, 1.0, frozenset({1}))) == [0]


def test_a_circle_is_broken() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    for now in range(7):
        blame.stalled(0, 0, 7, (1,), True, now)
        blame.stalled(1, 0, 7, (0,), True, now)
    assert list(culprit(blame, 6.1)) == [1]


def test_a_new_view_forgives() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    blame.complaint(0, 3, now=0.0)
    blame.stalled(0, 0, 7, (1,), True, now=0.0)
    blame.clear()
    assert culprit(blame, 100.0) == {}


def test_a_stall_that_only_answers_a_question_removes_nobody() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    for now in range(9):
        blame.stalled(0, 0, 7, (1,), False, now)
        assert culprit(blame, now) == {}


def test_all_are_asked_once_in_a_while_as_long_as_somebody_is_stalled() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    assert [blame.stalled(by, 0, 7, (9,), True, now) for now in (0.0, 1.0) for by in range(3)] == 2 * [
        True,
        False,
        False,
    ]
    assert not blame.stalled(4, 0, 7, (9,), False, 2.0)


def test_who_does_not_wait_any_more_is_no_step_on_the_way() -> None:
    """1 waited for 2 for a while, but goes on: then it is 1 for which 0 waits."""
    blame = Blame(0.5, 5.0, 20.0)
    for now in range(7):
        blame.stalled(0, 0, 7, (1,), True, now)
        blame.stalled(1, 0, 7, (2,), False, now)
    blame.stalled(1, 0, 0, (), False, 6.1)
    assert list(culprit(blame, 6.2)) == [1]


def test_ranks_of_one_replica_report_apart() -> None:
    """Rank 0 and rank 1 of replica 0 are in different ops of their groups; replica 1 waits by its shard 1 alone."""
    blame = Blame(0.5, 5.0, 20.0)
    for now in range(7):
        blame.stalled(0, 0, 7, (1,), True, now)
        blame.stalled(0, 1, 9, (2,), True, now + 0.1)
        blame.stalled(1, 1, 9, (2,), True, now + 0.2)
    assert list(culprit(blame, 6.3)) == [2]


def test_in_a_circle_of_replicas_the_one_whose_rank_waits_for_nobody_goes() -> None:
    """In group 0 all wait for 1; in group 1 replica 1 waits for 0, which waits for nobody there, as 1 alone says."""
    blame = Blame(0.5, 5.0, 20.0)
    for now in range(7):
        for by in (0, 2, 3):
            blame.stalled(by, 0, 7, (1,), True, now)
        blame.stalled(1, 1, 9, (0,), True, now)
    assert list(culprit(blame, 6.1)) == [1]


def test_a_momentary_wait_in_another_group_accuses_nobody() -> None:
    """Rank 1 of replica 1 stands still; in the group of the ranks 0, which is merely busy, two wait when asked."""
    blame = Blame(0.5, 1.0, 20.0)
    for now in range(3):
        blame.stalled(0, 1, 32, (1,), True, now)
        blame.stalled(2, 1, 32, (1,), True, now)
        blame.stalled(0, 0, 40 + now, (2,), False, now)
        blame.stalled(1, 0, 40 + now, (2,), False, now)
    assert list(culprit(blame, 2.1)) == [1]


def test_a_complaint_about_one_that_is_not_present_counts_from_when_it_is() -> None:
    """0 is stopped and 1 complains: 1 is the higher, and the victim. When 0 goes on they have time to meet."""
    blame = Blame(0.5, 5.0, 20.0)
    blame.complaint(1, 0, now=0.0)
    both = frozenset({0, 1})
    assert blame.culprit(1.0, both, frozenset({1})) == {}
    assert blame.culprit(1.4, both, both) == {}
    assert list(blame.culprit(1.6, both, both)) == [1]
    blame.withdraw(1, 0)
    assert blame.culprit(1.7, both, both) == {}


def test_a_stall_that_one_causes_who_lives_and_does_not_speak_says_what_it_does() -> None:
    blame = Blame(0.5, 1.0, 20.0)
    for now in (0.0, 1.0, 2.0):
        blame.stalled(0, 0, 7, (1,), True, now, lasted=30.0 + now)
    mute = {1: "its process lives but has not spoken for 31 s", 2: "not of this one"}
    why = "op 7 waits for it (replica 0 reported the stall); its process lives but has not spoken for 31 s"
    found = blame.culprit(2.5, frozenset({0, 1, 2}), frozenset({0}), mute)
    assert found == {1: Culprit(Removal.STALL, why, lasted=32.5)}


def test_one_that_lives_and_does_not_speak_is_waited_for_for_as_long_as_an_op_may_take() -> None:
    blame = Blame(0.5, 5.0, 20.0)
    removed = {}
    for now in range(30):
        blame.stalled(0, 0, 7, (1,), True, now, lasted=now)
        for held in (frozenset[int](), frozenset({1})):
            if blame.culprit(now, frozenset({0, 1}), frozenset({0}), {}, held):
                removed.setdefault(held, now)
    assert removed == {frozenset(): 6, frozenset({1}): 21}


def test_what_waits_for_a_mute_one_tells_a_new_coordinator_how_long_it_has_waited() -> None:
    """A coordinator that was restarted would count from its own start, and the ops would give up before."""
    blame = Blame(0.5, 5.0, 20.0)
    removed = None
    for now in range(30):
        blame.stalled(0, 0, 7, (1,), True, now, lasted=18 + now)
        blame.stalled(0, 0, 7, (1,), False, now)  # asked for by the coordinator, and answered
        if removed is None and blame.culprit(now, frozenset({0, 1}), frozenset({0}), {}, frozenset({1})):
            removed = now
    assert removed == 6, "watched for the grace, so that others could report"


def test_who_waits_for_a_mute_one_may_be_mute_itself_for_a_while() -> None:
    """Its reports stop meanwhile; the stall is not a new one then."""
    blame = Blame(0.5, 5.0, 20.0)
    times = [*range(16), *range(20, 40)]
    removed = None
    for number, now in enumerate(times):
        blame.stalled(0, 0, 7, (1,), True, now, lasted=number)
        if removed is None and blame.culprit(now, frozenset({0, 1}), frozenset({0}), {}, frozenset({1})):
            removed = now
    assert removed == 26


def removed_after(blame: Blame, begin: int, lasted: float) -> int:
    """0 waits for 1, and has for `lasted` seconds; when 1 is removed."""
    for now in range(begin, begin + 50):
        blame.stalled(0, 0, 7, (1,), True, now, lasted=lasted + now - begin)
        if blame.culprit(now, frozenset({0, 1}), frozenset({0}), {}, frozenset({1})):
            return now - begin
    raise AssertionError("1 was not removed")


def test_what_has_lasted_longer_than_an_op_may_take_is_watched_for_less_in_a_new_view() -> None:
    """If views change every few seconds, it would never be watched for the grace."""
    assert [removed_after(Blame(0.5, 5.0, 20.0), 0, lasted) for lasted in (0.0, 18.0, 26.0)] == [21, 6, 3]


def test_who_waited_itself_when_the_view_changed_is_given_the_time_of_an_op() -> None:
    """Since it first moved, as far as is known: it was held up by another one."""
    blame = Blame(0.5, 5.0, 20.0)
    blame.stalled(1, 0, 3, (2,), False, 9.0)
    blame.clear()
    blame.clear()  # views may follow each other
    assert removed_after(blame, 10, 26.0) == 20
    blame.clear()
    blame.stalled(1, 1, 3, (2,), False, 60.0)
    blame.clear()
    assert removed_after(blame, 60, 26.0) == 3, "another rank of it waited"
    blame.clear()
    blame.stalled(1, 0, 3, (2,), False, 90.0)
    blame.clear()
    blame.forget(1)
    assert removed_after(blame, 90, 26.0) == 3, "another life of it waited"


def test_who_was_asked_just_in_a_change_of_view_was_held_up_by_none() -> None:
    """Where views follow each other, one that stands still would be given the time of an op again and again."""
    blame = Blame(0.5, 5.0, 20.0)
    blame.stalled(1, 0, CHANGE, (0,), False, 9.0)
    blame.clear()
    assert removed_after(blame, 10, 26.0) == 3
    blame.clear()
    for now in (60.0, 61.0):
        blame.stalled(1, 0, CHANGE, (2,), False, now)
    blame.clear()
    assert removed_after(blame, 62, 26.0) == 20, "it has waited in that change"
