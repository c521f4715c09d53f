"""What a coordinator decides that knows only what was stored, and two lives of one replica."""

from __future__ import annotations

import msgspec
import pytest

from ftcomm.control import messages as m
from ftcomm.control.coordinator import Coordinator
from ftcomm.control.coordinator_actions import Close, CoordinatorAction, Log, Persist, Unfit
from ftcomm.control.finishes import NO_FINISHES, Finishes
from ftcomm.control.known_job import EARLY
from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.views import Address, Addresses
from tests.rigs.coordinator_script import (
    CHAIN,
    TIMEOUTS,
    Script,
    catching_up,
    grown,
    joins,
    pass_time,
    rejoin_all,
    search,
    unheard_by_a_new_coordinator,
)


def test_a_restarted_one_ends_no_job_before_who_has_caught_up_since_can_say_so() -> None:
    """It comes after the next life of the only one that the store has as contributing."""
    script = catching_up(2, 1)
    script.restart()
    script.outcomes["life-0"] = ProbeOutcome.UNREACHABLE
    script.join(20)
    assert not script.done
    script.join(11, epoch=script.epoch, caught_up=True)
    script.wait(11)
    script.join(20)
    assert script.newest == ((1,), {1})
    assert not script.done


def test_a_store_that_is_older_than_a_view_of_which_a_stranger_has_heard_is_refused() -> None:
    """The store ends before it came in, and the others have not heard of that yet."""
    script = Script(2)
    script.restart()
    join = joins(11, heard=2)
    done = script.coordinator.receive(11, join, script.now)
    assert ["it ends with epoch 1" in x.reason for x in done if isinstance(x, Unfit)] == [True]


def test_one_that_prepares_says_to_a_new_coordinator_whether_it_is_ready() -> None:
    script = Script(3)
    script.lose(1)
    script.lose(2)
    for ready in (False, True):
        script.restart()
        script.sent.clear()
        script.join(0, epoch=script.epoch)
        script.join(11, ready=ready)
        assert any(isinstance(message, m.Prepare) for message in script.sent[0]) == ready
        assert any(isinstance(message, m.Registered) for message in script.sent[11]) != ready
    script.promise(0)
    assert script.newest == ((0, 1), {0})


@pytest.mark.parametrize("visited", [False, True])
def test_a_new_coordinator_that_nobody_came_to_does_not_know_how_the_job_ended(visited: bool) -> None:
    """All may have finished while none was there, whatever another life of one wants; not if one comes that had not."""
    script = Script(2)
    script.restart()
    script.outcomes = {"life-0": ProbeOutcome.ENDED, "life-1": ProbeOutcome.ENDED}
    script.join(11)
    if visited:
        script.join(0, epoch=1)
        script.cut(0)
    for second in range(1, 30):
        script.now = float(second)
        script.tick()
    assert bool(script.done) == visited
    assert bool(script.unfit) != visited
    assert all("whether they had finished is not known" in reason for reason in script.unfit)
    assert all("no replica that holds the state" in failed for failed in script.done)


@pytest.mark.parametrize("known", [True, False], ids=["", "by a version that stored no finish"])
@pytest.mark.parametrize("drained", [False, True], ids=["", "drained"])
@pytest.mark.parametrize("left", [0, 1])
def test_a_new_coordinator_that_nobody_came_to_knows_who_had_finished(left: int, drained: bool, known: bool) -> None:
    """Of three, all but so many. That one has ended meanwhile, and it is not known how."""
    script = Script(3)
    if drained:
        script.do(script.coordinator.drain())
        script.promise(0, 1, 2)
    for replica in range(3 - left):
        script.tell(replica, m.Finished())
        assert script.sent[replica][-1] == m.FinishAck()
        script.cut(replica)
    assert bool(script.done) == (not left)
    script.done.clear()
    script.finishes = script.finishes if known else NO_FINISHES
    script.restart()
    script.outcomes = {f"life-{replica}": ProbeOutcome.ENDED for replica in range(3)}
    for second in range(1, 30):
        script.now = float(second)
        script.tick()
    assert script.done == ([""] if known else [])
    assert bool(script.unfit) != known


@pytest.mark.parametrize("how", ["comes", ProbeOutcome.ENDED, ProbeOutcome.REFUSED, ProbeOutcome.UNREACHABLE])
def test_a_new_coordinator_calls_those_that_may_wait_for_the_acknowledgement_of_their_finish(how: object) -> None:
    """The last one ended before it had told them. They look for it at its place, and this one is elsewhere."""
    script = Script(2)
    for replica in range(2):
        script.tell(replica, m.Finished())
    script.done.clear()
    script.restart()
    script.now = 1.0
    script.outcomes["life-1"] = ProbeOutcome.ENDED
    if isinstance(how, ProbeOutcome):
        script.outcomes["life-0"] = how
    for _ in range(13):
        script.now += 0.2
        script.tick()
    if how == "comes":
        assert {probe.life for probe in script.dialled if probe.call} == {(0, "life-0")}, "it is told the place"
        assert not script.done
        script.sent.clear()
        script.join(0, epoch=1)
        assert not script.done
        script.tell(0, m.Finished())
        assert script.sent[0][-1] == m.FinishAck()
    assert script.done == ([] if how is ProbeOutcome.UNREACHABLE else [""])
    for _ in range(round(5 * TIMEOUTS.heartbeat)):
        script.now += 0.2
        script.tick()
    assert script.done == [""], "it waits for nobody for long"


def test_the_finish_of_an_earlier_life_is_none_of_the_next() -> None:
    """It was started again: whatever was written before, the new life has all its work to do."""
    script = Script(2)
    script.tell(1, m.Finished())
    stored = script.finishes
    assert stored == Finishes(1, ((1, "life-1"),), (1,))
    script.cut(1)
    script.join_ready(11)
    assert script.finishes == Finishes(1)
    script.install(0)
    script.promise(0)
    script.install(0, 11)
    for finishes in (script.finishes, stored):  # the second, if what came after it was not written any more
        script.finishes = finishes
        script.restart()
        assert {life for _, life in script.coordinator.lives} == {"life-0", "life-11"}
        assert not script.coordinator.known.job.completed, "nor is the training complete there"


def test_what_was_stored_after_the_views_is_not_believed_with_an_older_store() -> None:
    """Somebody has set the views back. Another life of one that has finished may be in those that are missing."""
    script = Script(2)
    script.tell(1, m.Finished())
    script.finishes = msgspec.structs.replace(script.finishes, epoch=script.finishes.epoch + 1)
    script.restart()
    assert [x.incarnation for x in script.coordinator.job.running] == ["life-0", "life-1"]
    script.finishes = msgspec.structs.replace(script.finishes, epoch=script.finishes.epoch - 1)
    script.restart()
    assert [x.incarnation for x in script.coordinator.job.running] == ["life-0"]


def test_an_older_life_of_a_replica_that_was_removed_is_told_so() -> None:
    script = Script(3)
    script.lose(1)
    script.join(21, "life-1", 1)
    assert isinstance(script.sent[21][-1], m.Removed)


def test_an_older_life_does_not_displace_the_one_that_has_its_number_now() -> None:
    """A stopped process that is continued when its replica was started again."""
    script = catching_up(3, 1)
    views = len(script.views)
    for conn in (21, 31):
        script.join(conn, "life-1", 1)
        assert isinstance(script.sent[conn][-1], m.Removed)
    script.tell(11, m.CaughtUp(5))
    script.promise(0, 2, 11)
    assert script.newest == ((0, 1, 2), {0, 1, 2})
    assert len(script.views) == views + 1


def test_a_second_process_of_one_number_has_to_wait_while_the_first_answers() -> None:
    """It may be a restart of which the end was not seen yet, or a mistake: neither is proof against one that speaks."""
    script = Script(2)
    said: list[str] = []
    do = script.do

    def listen(actions: list[CoordinatorAction]) -> None:
        said.extend(
            action.fields["reason"] for action in actions if isinstance(action, Log) and action.kind == "refused"
        )
        do(actions)

    script.do = listen  # type: ignore[method-assign]
    for _ in range(2):
        script.join_ready(11)
    assert script.newest == ((0, 1), {0, 1})
    assert said == ["another process is replica 1, and answers; give each replica a number of its own (FTCOMM_REPLICA)"]
    assert not any(isinstance(message, m.Removed) for conn in (1, 11) for message in script.sent[conn])
    assert script.sent[11][-1] == m.Queued(said[0]), "it knows what it waits for"
    for second in range(1, 3 + int(TIMEOUTS.heartbeat)):  # its host falls silent, whatever its connection says
        script.do(script.coordinator.receive(0, m.Heartbeat(4), float(second)))
    join = m.Join(
        1, "life-11", Addresses.of((Address("h", 1, "b", 11, 3, "0" * 32),)), epoch=0, step=-1, timeouts=CHAIN
    )
    script.do(script.coordinator.receive(11, join, float(second)))
    assert script.newest == ((0,), {0})


@pytest.mark.parametrize(
    "outcome", [ProbeOutcome.ANSWERED, ProbeOutcome.MUTE, ProbeOutcome.UNREACHABLE, ProbeOutcome.ENDED]
)
def test_the_number_of_a_replica_stays_after_a_restart_with_a_life_that_may_live(outcome: ProbeOutcome) -> None:
    """It has no connection to the new coordinator yet, and a second process of its number comes first."""
    script = Script(2)
    script.coordinator = Coordinator(2, 1, TIMEOUTS, views=script.views, now=0.0, lifetime=2)
    script.outcomes["life-1"] = outcome
    address = Address("h", 1, "b", 0, 3, "0" * 32)
    script.tell(0, m.Join(0, "life-0", Addresses.of((address,)), 1, 4, CHAIN))
    script.wait(0)  # the search finds what there is at its port
    join = m.Join(1, "life-11", Addresses.of((Address("h", 1, "b", 11, 3, "0" * 32),)), 0, -1, CHAIN)
    script.do(script.coordinator.receive(11, join, 3.0 + TIMEOUTS.heartbeat))
    lives = outcome in (ProbeOutcome.ANSWERED, ProbeOutcome.MUTE)
    assert (1 in script.newest[0]) is lives
    assert any("another process is replica 1" in x.reason for x in script.sent[11] if isinstance(x, m.Queued)) is lives


def test_of_two_processes_of_one_number_the_first_has_it_before_there_is_a_view() -> None:
    script = Script(1)
    script.coordinator = Coordinator(2, 1, TIMEOUTS, views=[], now=0.0, lifetime=2)
    script.join(1)
    script.join(11)
    script.join(0)
    assert [member.incarnation for member in script.views[-1].members] == ["life-0", "life-1"]


def test_one_that_was_told_to_leave_says_so_again_to_a_new_coordinator() -> None:
    script = Script(3)
    script.restart()
    script.sent.clear()
    for replica in range(3):
        script.join(replica, epoch=1, leaving=replica == 1)
    script.promise(0, 1, 2)
    assert script.newest == ((0, 2), {0, 2})


def test_a_restarted_one_loses_nobody_before_somebody_has_come() -> None:
    """It may be itself that is cut off. Who does not come in time after the first, and is missed by that, is lost."""
    script = Script(3)
    script.restart()
    script.outcomes = dict.fromkeys(("life-0", "life-1", "life-2"), ProbeOutcome.UNREACHABLE)
    pass_time(script, 100.0)
    assert len(script.views) == 1
    rejoin_all(script, [20], 1)
    pass_time(script, 0.7, speak=[20], accuse=[(20, 1), (20, 2)])
    assert len(script.views) == 1
    pass_time(script, 0.3, speak=[20], accuse=[(20, 1), (20, 2)])
    assert script.newest == ((0,), {0})


def test_a_restarted_one_that_was_stopped_gives_the_members_their_time_all_the_same() -> None:
    """A host that was busy, or a SIGSTOP, right after the start: nobody could come meanwhile."""
    script = Script(3)
    script.restart()
    pass_time(script, 0.2)
    script.now += 10 * TIMEOUTS.heartbeat
    rejoin_all(script, [20], 1)
    script.tell(20, m.Suspect(1, "life-1", "its process has ended", True))
    script.tick()
    assert len(script.views) == 1
    pass_time(script, 1.1, speak=[20])
    assert script.newest[0] == (0, 2)


def test_a_restarted_one_that_is_never_in_time_decides_all_the_same() -> None:
    """A starved host: each tick comes so late that nobody could have come before it, as far as it knows."""
    script = Script(3)
    script.restart()
    rejoin_all(script, [20, 22], 1)
    for late in range(EARLY + 2):
        script.now += TIMEOUTS.heartbeat
        assert (len(script.views) == 1) == (late <= EARLY)
        for conn in (20, 22):
            script.coordinator.acknowledged(conn, script.now)
            complaint = m.Suspect(1, "life-1", f"its process ended, seen for the {late}th time", True)
            script.tell(conn, complaint)
        assert len(script.coordinator.known.suspicions.accusations()) <= 1, "what is said again is kept again"
        script.tick()
    assert script.newest[0] == (0, 2)


@pytest.mark.parametrize("outcome", [ProbeOutcome.ANSWERED, ProbeOutcome.REFUSED, ProbeOutcome.UNREACHABLE])
def test_a_restarted_one_knows_no_port_so_that_a_refusal_proves_nothing(outcome: ProbeOutcome) -> None:
    script = Script(3)
    script.restart()
    script.outcomes = dict.fromkeys(("life-0", "life-1", "life-2"), outcome)
    pass_time(script, 3.0)
    rejoin_all(script, [20], 1)
    pass_time(script, 3.0, speak=[20])
    assert len(script.views) == 1
    assert not script.done
    pass_time(script, TIMEOUTS.op / TIMEOUTS.heartbeat, speak=[20])  # and as long as an op may take
    assert script.newest[0] == (0, 1, 2), "nobody misses them"
    pass_time(script, 0.2, speak=[20], accuse=[(20, 1), (20, 2)])
    assert script.newest[0] == ((0, 1, 2) if outcome is ProbeOutcome.ANSWERED else (0,))


def test_without_a_store_nobody_counts_who_was_told_of_a_view() -> None:
    """It may enter that at any moment: what we decided would have the same number."""
    coordinator = Coordinator(1, 1, TIMEOUTS, views=[], now=0.0, lifetime=2)
    actions = coordinator.receive(0, joins(0, heard=1), 1.0)
    assert not any(isinstance(action, Persist) for action in actions)
    assert any(isinstance(action, Close) for action in actions)
    (log,) = [action for action in actions if isinstance(action, Log)]
    assert "was told of epoch 1 of a job that this coordinator has no file of views of" in str(log.fields["reason"])


def test_a_store_that_is_older_than_the_job_is_of_no_use() -> None:
    """What it would decide has the number of a view that there was."""
    script = Script(3)
    unfit: list[str] = []
    for known in (False, True):
        join = m.Join(
            1, "life-1" if known else "life-31", Addresses.of((Address("h", 1, "b", 0, 3, "0" * 32),)), 8, 4, CHAIN
        )
        script.sent.clear()
        unfit += [x.reason for x in script.coordinator.receive(31, join, script.now) if isinstance(x, Unfit)]
        assert script.sent[31] == []  # it trains on
        assert len(unfit) == known  # one that is not known may be of another job
    assert "the store is older than the job: it ends with epoch 1" in unfit[0]
    script.lose(0)
    pass_time(script, 3.0, speak=[2])
    assert len(script.views) == 1


@pytest.mark.parametrize("change", ["join", "contribute"])
def test_a_restarted_one_takes_back_no_change_in_which_a_member_runs(change: str) -> None:
    script = grown(change)
    before = script.views[-1]
    script.restart()
    for conn in (2, 10):  # replica 1 has died with the coordinator
        script.join(conn, epoch=before.epoch)
    script.tell(2, m.Suspect(1, "life-1", "its process ended", True))
    assert script.views[-1] == before, "who else may come, and know more than the store, has a heartbeat timeout to"
    script.wait(2, 10)
    assert script.newest == ((0, 2), before.contributing - {1})
    if change == "contribute":
        script.tell(10, m.Suspect(2, "life-2", "its process ended", True))
        assert script.newest == ((0,), {0})
        assert not script.done


def test_a_new_coordinator_hears_who_has_caught_up() -> None:
    script = grown("join")
    script.restart()
    epoch = script.epoch
    for conn in (1, 2):
        script.join(conn, epoch=epoch)
    script.join(10, epoch=epoch, caught_up=True)
    script.promise(1, 2, 10)
    assert script.newest == ((0, 1, 2), {0, 1, 2})


def test_a_store_that_is_older_than_all_lives_is_of_no_use_however_late_they_come() -> None:
    """The ends of those that it knows would be the end of a job that goes on."""
    script = Script(2)
    script.restart()
    script.outcomes = dict.fromkeys(("life-0", "life-1"), ProbeOutcome.UNREACHABLE)
    pass_time(script, 3.0)
    join = joins(11, epoch=9, step=70, heard=9)
    done = script.coordinator.receive(11, join, script.now)
    assert ["it ends with epoch 1" in x.reason for x in done if isinstance(x, Unfit)] == [True]


@pytest.mark.parametrize("comes", [True, False])
def test_a_restarted_one_ends_no_job_before_it_has_heard_of_all_whether_they_have_caught_up(comes: bool) -> None:
    """However long nobody could reach it. The store has one that contributes, who has ended, and two that catch up."""
    script = unheard_by_a_new_coordinator()
    epoch = script.epoch
    pass_time(script, 3.0)
    script.join(12, epoch=epoch)
    script.tell(12, m.Suspect(0, "life-0", "its process ended", True))
    script.join(20)
    pass_time(script, 1.0, speak=[12])
    assert (script.epoch, script.done) == (epoch, [])
    join = joins(11, epoch=epoch, caught_up=True)
    script.do(script.coordinator.receive(11, join, script.now) if comes else [])
    if comes:
        script.tick()  # what was said before is not lost
        assert script.newest == ((1, 2), {1})
    else:
        script.do(script.coordinator.probed(search(0, "life-0"), ProbeOutcome.ENDED, script.now))
        assert not script.done
        script.do(script.coordinator.probed(search(1, "life-11"), ProbeOutcome.ENDED, script.now))
        script.do(script.coordinator.probed(search(0, "life-0"), ProbeOutcome.ENDED, script.now))
        assert not script.done
        pass_time(script, 0.2, speak=[12])
        script.do(script.coordinator.probed(search(0, "life-0"), ProbeOutcome.ENDED, script.now))
    assert bool(script.done) is not comes
