"""How replicas come into a job, begin to contribute, and leave, as the coordinator decides it."""

from __future__ import annotations

import pytest

from ftcomm.control import messages as m
from ftcomm.control.blame import BOUNDARY
from ftcomm.control.coordinator import Coordinator
from ftcomm.control.coordinator_actions import Close, Log
from ftcomm.control.joiner_messages import ALONE, MUTE, WAITS
from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.removals import LINGER
from ftcomm.control.views import Address, Addresses
from tests.rigs.coordinator_script import (
    CHAIN,
    TIMEOUTS,
    Script,
    after_loss,
    catching_up,
    grown,
    joins,
    pass_time,
    search,
)


def test_a_joiner_is_told_that_those_it_waits_for_live_and_never_speak() -> None:
    """So it does not wait without end; and they stay."""
    script = Script(1)
    script.coordinator.known.expected = 3
    script.join_ready(1)

    def told() -> m.Message:
        return [message for message in script.sent[1] if isinstance(message, m.Queued)][-1]

    for _ in range(round((TIMEOUTS.op + TIMEOUTS.heartbeat) / TIMEOUTS.beat)):
        assert told() == (WAITS if script.now <= TIMEOUTS.op else told())
        script.coordinator.acknowledged(0, script.now)
        pass_time(script, 0.1, speak=[1])
    assert told() == MUTE
    assert MUTE.stage is m.Stage.WAITING
    script.join_ready(2)
    assert [message for message in script.sent[2] if isinstance(message, m.Queued)][-1] == MUTE
    assert (len(script.views), script.done) == (1, [])
    pass_time(script, 0.1, speak=[0, 1])
    assert told() == WAITS


def test_a_joiner_comes_in_catching_up_and_contributes_when_it_says_so() -> None:
    script = catching_up(2, 1)
    assert script.newest == ((0, 1), {0})
    script.tell(11, m.CaughtUp(5))
    script.promise(0, 11)
    assert script.newest == ((0, 1), {0, 1})


def test_a_joiner_is_in_no_view_before_its_script_is_ready() -> None:
    """It is told who is there once somebody has passed a boundary, and nobody is asked for anything on its behalf."""
    script = after_loss(3, 1)
    script.join(11)
    assert isinstance(script.sent[11][-1], m.Queued)
    script.tell(0, m.Heartbeat(0))
    (told,) = [message for message in script.sent[11] if isinstance(message, m.Registered)]
    assert (told.view.replicas, told.view.contributing) == ((0, 1, 2), {0, 2})
    script.tell(0, m.Heartbeat(7))
    script.lose(2)
    script.install(0)
    assert script.newest == ((0,), {0})
    assert not any(isinstance(message, m.Prepare | m.NewView) for message in script.sent[11])
    assert not any(isinstance(message, m.Prepare) for message in script.sent[0])
    script.tell(11, m.Ready())
    script.promise(0)
    assert script.newest == ((0, 1), {0})
    assert sum(isinstance(message, m.Registered) for message in script.sent[11]) == 1


def test_a_joiner_that_has_lost_a_rank_does_not_come_in() -> None:
    """Its leader says so, whose process may run for a while yet."""
    script = after_loss(3, 1)
    script.tell(0, m.Heartbeat(7))
    script.join_ready(11)
    assert is_asked(script)
    script.tell(11, m.Suspect(2, "another", "silent", True))
    assert is_asked(script)
    script.tell(11, m.Suspect(1, "life-11", "its shard 1 is lost: out of memory", True))
    assert not is_asked(script)
    script.join_ready(21)
    script.promise(0, 2)
    assert script.newest == ((0, 1, 2), {0, 2})


def test_a_job_does_not_begin_with_a_replica_that_has_lost_a_rank() -> None:
    script = Script(0)
    script.coordinator.known.expected = 2
    script.join_ready(0)
    script.tell(0, m.Suspect(0, "life-0", "its shard 1 is lost: out of memory", True))
    script.join_ready(1)
    assert not script.views
    script.join_ready(10)
    assert script.newest == ((0, 1), {0, 1})


def in_loop(loop: int) -> Script:
    """One of three has been lost and comes back, and the others are in that step loop."""
    script = after_loss(3, 1)
    script.tell(0, m.Heartbeat(7, loop=loop))
    script.join(11)
    assert script.sent[11][-1].loop == loop  # type: ignore[attr-defined]
    return script


def is_asked(script: Script) -> bool:
    """Whether member 0 has been asked for a promise that is not cancelled."""
    asked = [message for message in script.sent[0] if isinstance(message, m.Prepare | m.Cancel)]
    return bool(asked) and isinstance(asked[-1], m.Prepare)


def test_one_that_is_ready_in_a_loop_that_is_over_is_sent_on_and_no_member_waits_for_it() -> None:
    script = in_loop(1)
    script.tell(2, m.Heartbeat(9, loop=2))
    script.tell(11, m.Ready(1))
    assert script.sent[11][-1] == m.Behind(2)
    assert not is_asked(script)
    script.tell(11, m.Ready(2))
    script.promise(0, 2)
    assert script.newest == ((0, 1, 2), {0, 2})


def test_a_job_that_goes_on_to_its_next_loop_sends_on_who_waits_in_the_earlier_one() -> None:
    script = in_loop(1)
    script.tell(11, m.Ready(1))
    assert is_asked(script)
    script.tell(0, m.Heartbeat(9, loop=2))
    assert script.sent[11][-1] == m.Behind(2)
    assert not is_asked(script)
    script.tell(11, m.Ready(2))
    assert script.sent[0][-1].loop == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("restarted", [False, True])
def test_one_that_the_members_do_not_let_in_is_sent_on(restarted: bool) -> None:
    """The boundary of the change lies in the next loop, so they have withdrawn it."""
    script = in_loop(1)
    script.tell(11, m.Ready(1))
    script.promise(0, 2)
    if restarted:
        script.restart()
        script.join(0, epoch=1, loop=1)
        script.join(2, epoch=1, loop=1)
        script.join(11, ready=True, loop=1)
    for member in (0, 2):
        script.tell(member, m.Heartbeat(9, loop=2))
    for member in (0, 2):
        script.tell(member, m.Withdrawn(script.views[-1].proposal))
    assert script.newest == ((0, 2), {0, 2})
    script.install(0, 2)
    assert script.sent[11][-1] == m.Behind(2)


def test_one_that_waits_in_no_loop_is_let_in_in_any() -> None:
    """It has asked for the step, or runs boundaries of its own."""
    script = in_loop(2)
    script.tell(11, m.Ready())
    script.promise(0, 2)
    assert script.newest == ((0, 1, 2), {0, 2})


def test_one_that_leaves_before_it_was_in_is_sent_away_and_no_boundary_waits_for_it() -> None:
    for ready in (False, True):
        script = Script(3)
        script.lose(1)
        script.install(0, 2)
        script.tell(0, m.Heartbeat(3))
        script.join(11)
        if ready:
            script.tell(11, m.Ready())
        script.tell(11, m.Leave())
        assert isinstance(script.sent[11][-1], m.Dismissed)
        assert isinstance(script.sent[0][-1], m.Cancel) == ready
        script.tell(11, m.Ready())
        script.promise(*[0, 2] * ready)  # of the proposal that is given up
        assert script.newest == ((0, 2), {0, 2})
    script.cut(11)
    script.join(21, leaving=True, ready=True)  # as it says to a coordinator that has not heard it
    assert isinstance(script.sent[21][-1], m.Dismissed)


def test_a_drain_sends_away_who_prepares_and_refuses_who_comes_later() -> None:
    script = after_loss(2, 1)
    script.tell(0, m.Heartbeat(3))
    script.join(11)
    script.do(script.coordinator.drain())
    assert isinstance(script.sent[11][-1], m.Dismissed)
    script.tell(11, m.Ready())
    script.lose(11)
    script.join(21)
    assert isinstance(script.sent[21][-1], m.Removed)
    script.promise(0)
    assert script.newest == ((), frozenset())


def test_a_drain_sends_away_who_was_to_come_in_by_a_change_that_is_given_up() -> None:
    """Else it would hear at the end that it has come too late, as if something were wrong."""
    script = after_loss(2, 1)
    script.join_ready(11)
    script.promise(0)
    script.do(script.coordinator.drain())
    assert not any(isinstance(message, m.Dismissed) for message in script.sent[11]), "it may be in by now"
    script.tell(0, m.Withdrawn(script.views[-1].proposal))
    assert any(isinstance(message, m.Dismissed) for message in script.sent[11])
    script.install(0)
    script.promise(0)
    script.tell(0, m.Finished())
    assert script.done == [""]
    assert not any(isinstance(message, m.Removed) for message in script.sent[11])


def test_one_that_dies_or_falls_silent_while_it_prepares_is_forgotten() -> None:
    script = after_loss(3, 1)
    script.tell(0, m.Heartbeat(3))
    views = len(script.views)
    script.join(11)
    script.lose(11)
    script.join(21)
    assert script.coordinator.joiners.preparing[1].incarnation == "life-21"
    now = 1.0
    while now < 1.0 + TIMEOUTS.heartbeat:
        now += TIMEOUTS.beat
        for replica in (0, 2):
            script.do(script.coordinator.receive(replica, m.Heartbeat(4), now))
        script.do(script.coordinator.tick(now))
    assert not script.coordinator.joiners
    assert len(script.views) == views


def test_a_proposal_is_given_up_when_somebody_is_lost() -> None:
    script = after_loss(3, 2)
    script.join_ready(12)
    script.promise(0)
    script.lose(1)
    assert script.newest == ((0,), {0})
    script.promise(0)  # of the proposal that is given up: nothing comes of it
    assert script.newest == ((0,), {0})


def test_members_that_are_faster_than_the_commit_are_asked_for_a_boundary_ever_further_ahead() -> None:
    """They stand at it, all without the commit, before the view is written down and sent."""
    script = after_loss(2, 1)
    script.tell(0, m.Heartbeat(10))
    script.join_ready(11)
    ahead = []
    for _ in range(4):
        prepare = script.sent[0][-1]
        assert isinstance(prepare, m.Prepare)
        ahead.append(prepare.step - 10)
        script.promise(0)
        assert script.newest == ((0, 1), {0})
        script.tell(0, m.Withdrawn(prepare.proposal))
        assert script.newest == ((0,), {0})
        script.install(0)
    assert ahead == [1, 2, 4, 8]


def test_who_was_told_of_another_number_of_replicas_is_refused_and_who_waits_hears_of_it_at_once() -> None:
    script = Script(0)
    script.coordinator = Coordinator(3, 1, TIMEOUTS, views=[], now=0.0, lifetime=1)
    script.join(0)
    script.join(1, replicas=5)
    said = (
        "a rank of replica 1 was started with FTCOMM_REPLICAS=5, and the job has 3 replicas; set the same "
        "FTCOMM_REPLICAS at all of the job"
    )
    assert script.sent[1] == [m.Removed(said)]
    assert script.sent[0][-1] == m.Queued(f"1 of 3 replicas are here; missing: 1 (refused: {said}), 2")
    script.join(11, replicas=3)
    assert script.sent[0][-1] == m.Queued("2 of 3 replicas are here; missing: 2")
    script.join(2)
    assert script.newest == ((0, 1, 2), {0, 1, 2}), "who does not say a number is taken"


def test_a_number_that_the_job_does_not_have_is_refused_by_name() -> None:
    script = Script(2)
    script.join(2)
    refused = script.sent[2][-1]
    assert isinstance(refused, m.Removed)
    assert "there is no replica 2 in a job of 2, which are numbered from 0 to 1" in refused.reason
    assert script.newest == ((0, 1), {0, 1})


def test_other_timeouts_are_refused_with_both_chains() -> None:
    script = Script(2)
    script.tell(11, joins(11, timeouts=(5.0, 30.0, 120.0)))
    removed = script.sent[11][-1]
    assert isinstance(removed, m.Removed)
    assert "heartbeat 5 s, op 30 to 120 s" in removed.reason
    assert "heartbeat 10 s, op 30 to 120 s" in removed.reason
    assert script.newest == ((0, 1), {0, 1})


def test_a_refusal_is_logged_once_for_each_life_and_reason() -> None:
    """One that runs is not removed by a coordinator with other options; it tries again twice a second."""
    coordinator = Coordinator(2, 2, TIMEOUTS, views=[], now=0.0, lifetime=1)
    address = Address("h", 1, "b", 0, 3, "0" * 32)
    logged = []
    for conn, life in enumerate(["a", "a", "a", "b", "b"]):
        actions = coordinator.receive(conn, m.Join(0, life, Addresses.of((address,)), 3, 4, CHAIN), 1.0)
        assert Close(conn) in actions
        logged += [action for action in actions if isinstance(action, Log)]
    assert [action.kind for action in logged] == ["refused"] * 2


@pytest.mark.parametrize("again", [False, True])
def test_a_joiner_in_a_view_that_nobody_runs_in_is_told_that_nobody_is_heard(again: bool) -> None:
    """Who waits for that gives up after its init timeout; else it would wait for ever."""
    script = after_loss(2, 1)
    script.join_ready(11)
    script.promise(0)
    assert script.newest[0] == (0, 1)
    if again:  # both, the coordinator too
        script.restart()
        script.sent.clear()
        script.join(11)
    else:
        script.wait(11)
    assert [message for message in script.sent[11] if isinstance(message, m.Queued)][-1] == ALONE
    there = Address("h", 1, "b", 0, 3, "0" * 32)
    script.tell(0, m.Join(0, "life-0", Addresses.of((there,)), script.views[-2].epoch, 4, CHAIN))
    assert script.sent[11][-1] == WAITS


@pytest.mark.parametrize("change", ["join", "contribute"])
def test_a_change_in_which_one_member_runs_stands_though_another_dies(change: str) -> None:
    """Who says that it runs in it has heard from all others that they have stopped for it: they pass it, too."""
    script = grown(change)
    before = script.views[-1]
    script.install(2)
    script.lose(2)
    assert script.newest == ((0, 1), before.contributing - {2})
    assert script.views[-1].step == before.step  # where the joiner begins, if it has not run yet


def test_who_was_to_contribute_by_a_change_that_is_given_up_holds_the_state_all_the_same() -> None:
    """Two losses, one told after the other, before anybody runs in the view."""
    script = grown("contribute")
    script.lose(2)
    assert script.newest == ((0, 1), {1})
    script.lose(1)
    assert script.newest == ((0,), {0})
    assert not script.done


def test_who_leaves_by_a_change_hears_nothing_of_a_loss_after_it() -> None:
    """It may come to its boundary later than those who stay, and has left then."""
    script = Script(4)
    script.tell(3, m.Leave())
    script.promise(0, 1, 2, 3)
    script.install(0)
    script.lose(2)
    assert script.newest == ((0, 1), {0, 1})
    assert script.sent[3][-1].view.replicas == (0, 1, 2)
    views = len(script.views)
    script.lose(3)
    assert len(script.views) == views


@pytest.mark.parametrize("installed", [False, True])
def test_who_has_left_for_good_is_not_waited_for_at_the_boundary(installed: bool) -> None:
    """Its last word may be lost with a connection, and it does not say it again. Where one that stays has installed the
    change, all have heard it: then a silent one goes as ever."""
    script = Script(4)
    script.tell(3, m.Leave())
    script.promise(0, 1, 2, 3)
    if installed:
        script.install(0)
    script.tell(3, m.Finished(True))
    script.cut(3)
    pass_time(script, LINGER + 1.0, speak=[0, 1, 2])
    assert [view.replicas for view in script.views[1:]] == [(0, 1, 2)] * (1 if installed else 2)
    assert bool(script.views[-1].proposal) == installed  # else it is in force at once, wherever they stand
    script.outcomes["life-2"] = ProbeOutcome.UNREACHABLE
    pass_time(script, 3.0, speak=[0, 1], accuse=[(0, 2), (1, 2)])
    assert script.newest[0] == (0, 1)


def test_a_drain_waits_for_those_who_come_to_the_boundary_last() -> None:
    script = Script(3)
    script.do(script.coordinator.drain())
    script.promise(0, 1, 2)
    script.tell(2, m.Finished(True))
    script.cut(2)
    pass_time(script, 3 * LINGER, speak=[0, 1])
    assert script.newest == ((), set())
    assert len(script.views) == 2


def test_who_has_left_with_others_is_not_waited_for_by_one_that_missed_its_last_word() -> None:
    script = Script(3)
    script.do(script.coordinator.drain())
    script.promise(0, 1, 2)
    script.tell(2, m.Finished(True))
    script.cut(2)
    pass_time(script, 3 * LINGER, speak=[0, 1])
    assert isinstance(script.sent[0][-1], m.WhoWaits)
    script.tell(0, m.Stalled(0, 1, BOUNDARY, (2,), due=False))
    pass_time(script, 0.1, speak=[0, 1])
    assert script.newest[0] == (0, 1)
    assert script.views[-1].proposal == 0  # it is in force at once, wherever they stand


def test_nobody_is_looked_for_who_has_gone_before_it_was_in() -> None:
    script = Script(1)
    script.outcomes = {}
    for life in range(100):
        conn = 11 + 10 * life
        coordinator = script.coordinator
        coordinator.receive(conn, joins(conn), script.now)
        coordinator.disconnected(conn, script.now)
        coordinator.probed(search(1, f"life-{conn}"), ProbeOutcome.ANSWERED, script.now)
    assert {replica for replica, _ in coordinator.known.suspicions._searches} <= {0}


def test_who_comes_when_all_is_over_is_told_so_and_who_is_wrong_that_it_failed() -> None:
    script = Script(2)
    for conn in (0, 1):
        script.tell(conn, m.Finished())
    assert script.done == [""]
    script.join(11)
    assert [message.ending for message in script.sent[11] if isinstance(message, m.Removed)] == [m.Ending.TOO_LATE]
    address = Address("h", 1, "b", 2, 3, "0" * 32)
    script.tell(2, m.Join(0, "life-2", Addresses.of((address, address)), epoch=0, step=-1, timeouts=CHAIN))
    assert [message.ending for message in script.sent[2] if isinstance(message, m.Removed)] == [m.Ending.FAILED]
