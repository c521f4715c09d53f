"""Whom the coordinator removes, whom it spares, and when a job ends: short scripts of what it is told and what it
decides. The long random ones are in tests/simulation."""

from __future__ import annotations

import msgspec
import pytest

from ftcomm.control import messages as m
from ftcomm.control.coordinator import Coordinator
from ftcomm.control.coordinator_actions import Log, Persist, Send, StoreFinishes
from ftcomm.control.finishes import Finishes
from ftcomm.control.limits import EPOCHS
from ftcomm.control.probe_schedule import PAUSE, Probe, ProbeOutcome, ProbeReason, Suspicions
from ftcomm.control.script_end import ScriptEnd
from ftcomm.control.views import Address, Addresses, Member
from tests.rigs.coordinator_script import (
    CHAIN,
    TIMEOUTS,
    Script,
    after_loss,
    beats,
    catching_up,
    joins,
    pass_time,
    rejoin_all,
    search,
    two_that_catch_up,
    unheard_by_a_new_coordinator,
)


def test_a_loss_is_a_view_at_once() -> None:
    script = Script(3)
    script.lose(1)
    assert script.newest == ((0, 2), {0, 2})
    assert script.views[-1].proposal == 0
    assert [view.epoch for view in script.views] == [1, 2]


def test_a_proof_by_another_member_costs_nobody_who_answers() -> None:
    """What one has taken for a proof may be wrong; who answers the coordinator lives."""
    script = Script(3)
    ended = m.Suspect(1, "life-1", "its process has ended", True)
    script.answers.add("life-1")
    actions = script.coordinator.receive(0, ended, now=1.0)
    ask = next(action for action in actions if isinstance(action, Probe))
    assert not script.coordinator.receive(0, ended, now=1.0), "one dial at a time is enough"
    told = script.coordinator.probed(ask, ProbeOutcome.ANSWERED, 1.0)
    assert [action.kind for action in told if isinstance(action, Log)] == ["not_removed"]
    assert script.newest[0] == (0, 1, 2)
    script.wait(0, 1, 2)
    assert script.newest[0] == (0, 1, 2), "nor later, as nobody stalls"
    script.answers.clear()
    script.tell(0, ended)
    assert script.newest[0] == (0, 2), "who does not answer has ended, as was proved"


def test_it_is_the_rank_that_was_proved_to_have_ended_that_is_asked() -> None:
    coordinator = Coordinator(2, 2, TIMEOUTS, views=[], now=0.0, lifetime=1)
    for replica in range(2):
        ranks = Addresses.of(Address("h", 1 + rank, "b", replica, 3, "0" * 32) for rank in range(2))
        actions = coordinator.receive(replica, m.Join(replica, f"life-{replica}", ranks, 0, -1, CHAIN), now=1.0)
    assert any(isinstance(action, Persist) for action in actions)
    actions = coordinator.receive(0, m.Suspect(1, "life-1", "its process has ended", True, 1), now=1.0)
    (asked,) = [action for action in actions if isinstance(action, Probe)]
    assert asked.address.port == 2
    for rank in (0, 2):  # another one is another question; one that there is not is none
        actions = coordinator.receive(0, m.Suspect(1, "life-1", "its process has ended", True, rank), now=1.0)
        assert sum(isinstance(action, Probe) for action in actions) == (rank == 0)
    assert any(isinstance(action, Persist) for action in coordinator.probed(asked, ProbeOutcome.MUTE, 1.0))
    assert not coordinator.probed(msgspec.structs.replace(asked, shard=0), ProbeOutcome.MUTE, 1.0), "it has gone by now"


@pytest.mark.parametrize("giver", ["lives", "is gone", "has ended"])
def test_a_proof_outlives_who_gave_it(giver: str) -> None:
    """It is said once, and could not be decided on then: who catches up could not say yet whether it had caught up."""
    script = unheard_by_a_new_coordinator()
    epoch = script.epoch
    script.join(12, epoch=epoch)
    script.tell(12, m.Suspect(0, "life-0", "its process ended", True))
    if giver != "lives":
        script.cut(12)
    pass_time(script, 3.0, speak=[12] if giver == "lives" else [])
    assert script.epoch == epoch
    if giver == "has ended":
        script.join(22)
    script.join(11, epoch=epoch, caught_up=True)
    script.tick()
    assert 0 not in script.newest[0]
    assert script.newest[1] == {1}


@pytest.mark.parametrize("probe", ["comes back", "is lost"])
def test_the_reason_of_a_loss_is_the_proof_that_came_before_it_could_be_decided_on(probe: str) -> None:
    """A coordinator that has taken over waits for the accused to come. Once it is silent for too long, the proof is
    looked at first; and if that takes longer than an op, the silence is enough."""
    script = Script(2)
    script.restart()
    script.outcomes["life-1"] = ProbeOutcome.UNREACHABLE
    script.join(0, epoch=1)
    script.tell(0, m.Suspect(1, "life-1", "its process 7 ended", True))
    for second in range(1, int(TIMEOUTS.op + 3 * TIMEOUTS.heartbeat)):
        script.now = float(second)
        for said in (m.Heartbeat(4), m.Suspect(1, "life-1", "silent", False)):
            script.tell(0, said)
        actions = script.coordinator.tick(script.now)
        asks = [x for x in actions if isinstance(x, Probe) and x.why is ProbeReason.ACCUSED]
        script.do([x for x in actions if probe == "comes back" or x not in asks])
        if probe == "is lost" and second < TIMEOUTS.op:
            assert script.newest[0] == (0, 1)
    assert script.newest[0] == (0,)
    assert script.views[-1].why.startswith("lost 1: its process 7 ended" if probe == "comes back" else "lost 1: silent")


def test_what_a_launcher_has_seen_is_kept_until_it_can_be_decided_on() -> None:
    """Who is left only catches up, and does not hear one of its ranks, so it cannot say whether it has caught up."""
    script = catching_up(2, 1)
    script.tell(11, m.Heartbeat(4, divided="its shard 1 has been silent for 5.0 s"))
    script.tell(0, m.Finished(True))
    script.coordinator.job.finished[7] = 1.0  # it is not the training that is complete
    script.do(script.coordinator.exited(0, 3, script.now))
    assert script.newest[0] == (0, 1)
    script.tell(11, m.Heartbeat(4))
    script.tell(11, m.CaughtUp(4))
    script.tick()
    assert script.newest == ((1,), {1})


def test_who_has_a_port_and_says_nothing_is_a_sign_of_life_for_as_long_as_an_op_may_take() -> None:
    """It may hold its interpreter, or have ended, and another process listen there that is not of the job."""
    script = Script(3)
    script.outcomes["life-2"] = ProbeOutcome.MUTE
    script.cut(2)
    pass_time(script, TIMEOUTS.op / TIMEOUTS.heartbeat - 1, speak=[0, 1], accuse=[(0, 2)])
    assert len(script.views) == 1
    script.outcomes["life-2"] = ProbeOutcome.UNREACHABLE  # it hangs up now and then: that is no answer
    pass_time(script, 0.5, speak=[0, 1])
    script.outcomes["life-2"] = ProbeOutcome.MUTE
    pass_time(script, 2.5, speak=[0, 1], accuse=[(0, 2)])
    assert script.newest[0] == (0, 1)


def test_one_that_has_caught_up_carries_the_job_on_alone() -> None:
    """The last contributing member dies before the view that makes the other one contribute is installed."""
    for committed in (False, True):
        script = Script(2)
        script.lose(1)
        script.install(0)
        script.rejoin(1, [0])
        script.tell(11, m.CaughtUp(5))
        if committed:
            script.promise(0, 11)
        script.lose(0)
        assert script.newest == ((1,), {1})
        assert not script.done


def test_without_anybody_who_holds_the_state_the_job_has_failed() -> None:
    script = catching_up(2, 1)
    script.lose(0, ProbeOutcome.ENDED)
    assert not script.done  # the other one may have said that it holds it
    script.tell(11, m.Heartbeat(5))
    script.tick()
    assert "no replica that holds the state" in script.done[0]


@pytest.mark.parametrize("restarted", [True, False])
def test_what_is_on_the_way_from_one_that_has_caught_up_comes_before_the_end_of_the_job(restarted: bool) -> None:
    """The last one that is known to hold the state ends, by proof or by its next life."""
    script = catching_up(2, 1)
    if restarted:
        script.outcomes["life-0"] = ProbeOutcome.UNREACHABLE
        script.cut(0)
        pass_time(script, 3.0, speak=[11])
        script.join(20)
    else:
        script.lose(0, ProbeOutcome.ENDED)
    script.tell(11, m.CaughtUp(5))
    if restarted:
        script.join(20)  # as soon as its connection is closed
    else:
        script.tick()
    assert script.newest == ((1,), {1})
    assert not script.done


@pytest.mark.parametrize("how", ["refuted", "came back"])
def test_a_loss_that_was_none_is_no_reason_to_wait_less_for_the_next(how: str) -> None:
    script = catching_up(2, 1)
    script.answers.add("life-0")
    if how == "refuted":
        script.tell(11, m.Suspect(0, "life-0", "its process ended", True))
    else:
        script.outcomes["life-0"] = ProbeOutcome.UNREACHABLE
        script.cut(0)
        pass_time(script, 3.0, speak=[11])
        script.join(20)  # another process of that number, which is sent away
        script.join(0, "life-0", script.epoch)
    pass_time(script, 30.0, speak=[0, 11])
    script.answers.clear()
    script.lose(0, ProbeOutcome.ENDED)
    assert not script.done
    script.tell(11, m.CaughtUp(5))
    script.tick()
    assert script.newest == ((1,), {1})


def test_nobody_is_waited_for_when_the_training_is_complete() -> None:
    script = two_that_catch_up()
    script.do(script.coordinator.drain())
    script.promise(0, 11, 12)
    script.tell(0, m.Finished())
    script.outcomes.update({"life-11": ProbeOutcome.ENDED, "life-12": ProbeOutcome.ENDED})
    script.cut(11)
    script.cut(12)
    pass_time(script, 1.0, speak=[])
    assert script.done == [""]


def test_one_that_does_not_speak_is_waited_for_no_longer_than_an_op() -> None:
    script = catching_up(2, 1)
    script.lose(0, ProbeOutcome.ENDED)
    pass_time(script, TIMEOUTS.op / TIMEOUTS.heartbeat - 1, speak=[])
    assert not script.done
    said = [log.fields for log in script.logs if log.kind == "postponed"]
    assert said == [{"replica": 0, "reason": "its process has ended"}]
    pass_time(script, 2.0, speak=[])
    assert "no replica that holds the state" in script.done[0]


def test_one_that_ends_before_it_speaks_is_waited_for_no_more() -> None:
    script = catching_up(2, 1)
    script.lose(0, ProbeOutcome.ENDED)
    assert not script.done
    script.lose(11, ProbeOutcome.ENDED)
    script.tick()
    assert "no replica that holds the state" in script.done[0]


def test_a_complete_job_has_not_failed_when_only_a_joiner_is_left() -> None:
    script = catching_up(2, 1)
    script.tell(0, m.Finished())
    script.lose(0)
    script.do(script.coordinator.tick(now=4.0))
    assert script.done == [""]


def test_a_job_in_which_one_has_finished_has_not_failed_when_the_others_end_one_after_the_other() -> None:
    """Those that have finished are in no view any more by then: the others may wait for them."""
    script = Script(3)
    script.tell(0, m.Finished())
    script.cut(0)
    script.do(script.coordinator.tick(now=4.0))
    assert script.newest[0] == (1, 2)
    script.install(1, 2)
    for replica in (1, 2):
        script.lose(replica, ProbeOutcome.ENDED)
        script.do(script.coordinator.tick(now=5.0))
    assert script.done == [""]


def test_a_job_from_which_one_has_left_has_failed_when_the_others_end() -> None:
    """It was asked to, in the middle of the training."""
    script = Script(2)
    script.tell(0, m.Leave())
    script.promise(0, 1)
    script.install(1)
    script.tell(0, m.Finished())
    script.cut(0)
    script.lose(1, ProbeOutcome.ENDED)
    script.do(script.coordinator.tick(now=5.0))
    assert "no replica that holds the state" in script.done[0]
    assert not script.finishes.completed


def test_that_one_has_finished_is_logged_before_it_hears_so() -> None:
    """It may end then, and its launcher would take that for a death."""
    script = Script(2)
    stored, log, ack, *_ = script.coordinator.receive(1, m.Finished(True), now=1.0)
    assert stored == StoreFinishes(Finishes(1, ((1, "life-1"),), (1,))), "since this coordinator may end, too"
    assert (log, ack) == (Log("finished", {"replica": 1}), Send(1, m.FinishAck()))
    again = script.coordinator.receive(1, m.Finished(True), now=1.5)
    assert again == [log, ack], "it is written already"


def test_a_launcher_corrects_who_has_said_that_it_has_finished() -> None:
    """`raise SystemExit(3)`: the others do not wait until it would have gone by itself."""
    script = Script(3)
    script.tell(1, m.Finished(True))
    script.cut(1)
    assert len(script.views) == 1
    stored, log, *decided = script.coordinator.exited(1, 3, script.now)
    assert stored == StoreFinishes(Finishes(1))
    said = {"replica": 1, "reason": "its script exited with code 3", "by": 1, "code": 3}
    assert log == Log("suspect", said)
    script.do(decided)
    assert script.newest[0] == (0, 2)
    assert script.views[-1].why == "lost 1: its script exited with code 3"
    script.do(script.coordinator.exited(0, 3, script.now))  # it has said nothing: its connections tell
    assert len(script.views) == 2


def test_a_victim_whose_own_deadline_is_later_is_asked_before_anybody_is_removed() -> None:
    """0 waits for 1, which waits for 2, whose script stands still; only 0 has reached its deadline."""
    script = Script(3)
    now = 100.0
    for second in range(7):
        assert len(script.views) == 1
        for replica in range(3):
            script.do(script.coordinator.receive(replica, m.Heartbeat(3), now + second))
        script.sent.clear()
        script.do(script.coordinator.receive(0, m.Stalled(0, 1, 9, (1, 2), due=True), now + second))
        asked = {conn for conn, sent in script.sent.items() if m.WhoWaits() in sent}
        assert asked == {0, 1, 2}
        script.do(script.coordinator.receive(1, m.Stalled(0, 1, 9, (2,), due=False), now + second))
        script.do(script.coordinator.receive(2, m.Stalled(0, 1, 0, (), due=False), now + second))
        script.do(script.coordinator.tick(now + second))
    assert script.newest == ((0, 1), {0, 1})


def test_a_victim_of_which_one_rank_waits_for_the_other_is_not_removed() -> None:
    """Ranks 0 wait for replica 2, whose rank 0 waits for its shard 1; all ranks 1 wait for replica 1."""
    script = Script(3)
    now = 100.0
    for second in range(7):
        assert len(script.views) == 1
        for replica in range(3):
            script.do(script.coordinator.receive(replica, m.Heartbeat(3), now + second))
        for replica, rank, waits_for in ((0, 0, 2), (1, 0, 2), (0, 1, 1), (2, 1, 1)):
            stall = m.Stalled(rank, 1, 9, (waits_for,), due=True)
            script.do(script.coordinator.receive(replica, stall, now + second))
        script.do(script.coordinator.receive(2, m.Stalled(0, 1, 4, (2,), due=False), now + second))
        script.do(script.coordinator.receive(1, m.Stalled(1, 1, 0, (), due=False), now + second))
        script.do(script.coordinator.tick(now + second))
    assert script.newest == ((0, 2), {0, 2})


def test_a_complaint_is_logged_once_in_each_view() -> None:
    """As long as it lasts it is said again every second, and when it comes back."""
    script = Script(4)

    def logged() -> list[tuple[object, object]]:
        said: list[m.Message] = [m.Suspect(2, "life-2", "silent for 5.0 s", False)] * 3
        said += [m.Reachable(2), *said, m.Suspect(1, "life-1", "silent for 5.0 s", False)]
        actions = [action for message in said for action in script.coordinator.receive(0, message, 1.0)]
        actions += script.coordinator.receive(1, said[0], 1.0)
        return [(log.fields["by"], log.fields["replica"]) for log in actions if isinstance(log, Log)]

    assert logged() == [(0, 2), (0, 1), (1, 2)]
    assert logged() == []
    script.lose(3)
    assert logged() == [(0, 2), (0, 1), (1, 2)]


def test_the_event_of_a_complaint_says_whether_the_other_is_silent() -> None:
    """The launcher looks at what stands still by that, and not by the reason, which is a text."""
    script = Script(3)
    said = m.Suspect(1, "life-1", "no answer", False, silent=True), m.Suspect(2, "life-2", "silent", False)
    actions = [action for message in said for action in script.coordinator.receive(0, message, 1.0)]
    assert [log.fields.get("silent", False) for log in actions if isinstance(log, Log)] == [True, False]


@pytest.mark.parametrize("script", [ScriptEnd("KeyError"), ScriptEnd(code=3), None])
def test_the_event_of_a_proof_says_how_the_script_has_ended(script: ScriptEnd | None) -> None:
    """Dumps and causes of interruptions hang on it."""
    log, *_ = Script(3).coordinator.receive(1, m.Suspect(1, "life-1", "it is lost", True, script=script), 1.0)
    assert isinstance(log, Log)
    assert ScriptEnd.of_event(log.fields) == script
    assert log.fields.keys() - {"error", "code"} == {"replica", "reason", "by"}


def test_a_complaint_that_ended_while_its_sender_was_not_connected_costs_nobody() -> None:
    """It has withdrawn it, and nobody could hear that."""
    for lasts in (False, True):
        script = Script(3)
        complaint = m.Suspect(1, "life-1", "silent for 5.0 s", False)
        script.tell(0, complaint)
        script.cut(0)
        script.join(0, epoch=1)
        for second in range(2, 20):
            script.now = float(second)
            for conn in range(3):
                script.tell(conn, m.Heartbeat(4))
            if lasts:
                script.tell(0, complaint)
            script.tick()
        assert script.newest[0] == ((0, 2) if lasts else (0, 1, 2))


def test_connections_that_end_all_at_once_cost_nothing() -> None:
    """A load balancer, a firewall, the network of the coordinator: who listens lives, and comes again."""
    script = Script(3)
    for conn in range(3):
        script.cut(conn)
    script.tick()
    assert sorted({dial.life[0] for dial in script.dialled}) == [0, 1, 2]
    rejoin_all(script, [20, 21, 22], 1)
    pass_time(script, 2.0, speak=[20, 21, 22])
    assert (len(script.views), script.done) == (1, [])
    assert script.sent[20] == script.sent[21] == script.sent[22] == []  # no Removed, no NewView


def test_one_that_does_not_come_again_though_it_listens_stays_and_is_told_where_we_are() -> None:
    script = Script(2)
    script.cut(1)
    assert not script.dialled[-1].call  # it comes by itself, in a moment
    pass_time(script, 3.0, speak=[0], accuse=[(0, 1)])
    assert script.dialled[-1].call
    assert (len(script.views), script.done) == (1, [])
    dials = len(script.dialled)
    pass_time(script, 3.0, speak=[0])
    assert len(script.dialled) - dials <= 3 * TIMEOUTS.heartbeat / PAUSE  # a stopped process has to take them all in
    script.outcomes["life-1"] = ProbeOutcome.REFUSED
    pass_time(script, 0.2, speak=[0])
    assert script.newest == ((0,), {0})


@pytest.mark.parametrize("connected", [True, False])
def test_who_hears_nobody_is_cut_off_itself(connected: bool) -> None:
    """For three heartbeats, then all are heard again: the view is what it was, and all have time to show up."""
    script = Script(3)
    logs: list[str] = []
    script.outcomes = dict.fromkeys(("life-0", "life-1", "life-2"), ProbeOutcome.UNREACHABLE)
    for conn in () if connected else range(3):
        script.cut(conn)
    do = script.do
    script.do = lambda actions: (logs.extend(x.kind for x in actions if isinstance(x, Log)), do(actions))[1]  # type: ignore[method-assign]
    pass_time(script, 3.0)
    assert (len(script.views), script.done) == (1, [])
    assert logs.count("cut_off") == 1
    if not connected:
        rejoin_all(script, [20], 1)
    pass_time(script, 0.5, speak=[0 if connected else 20], accuse=[(0 if connected else 20, 1)])
    assert len(script.views) == 1
    if not connected:
        rejoin_all(script, [21, 22], 1)
    script.tell(0 if connected else 20, m.Reachable(1))
    pass_time(script, 2.0, speak=[0, 1, 2] if connected else [20, 21, 22])
    assert (len(script.views), script.done) == (1, [])


def test_one_that_is_silent_to_the_coordinator_alone_stays() -> None:
    script = Script(3)
    script.outcomes["life-2"] = ProbeOutcome.UNREACHABLE
    pass_time(script, 3.0, speak=[0, 1])
    assert len(script.views) == 1
    pass_time(script, 0.1, speak=[0, 1], accuse=[(1, 2)])
    assert script.newest == ((0, 1), {0, 1})


def test_one_that_others_miss_and_whose_kernel_answers_stays() -> None:
    """Its process holds its interpreter, or is stopped."""
    script = Script(3)
    pass_time(script, 3.0, speak=[0, 1], accuse=[(0, 2), (1, 2)])
    assert len(script.views) == 1


def test_all_that_hold_their_interpreters_at_once_stay() -> None:
    script = Script(3)
    pass_time(script, 20.0)
    assert (len(script.views), script.done) == (1, [])


def test_who_only_catches_up_removes_nobody_that_is_silent() -> None:
    """It is the network of those two that may be cut off from the others."""
    script = catching_up(2, 1)
    script.outcomes["life-0"] = ProbeOutcome.UNREACHABLE
    views = len(script.views)
    pass_time(script, 3.0, speak=[11], accuse=[(11, 0)])
    assert (len(script.views), script.done) == (views, [])


def test_who_catches_up_is_no_witness_against_one_that_contributes() -> None:
    script = catching_up(3, 2)
    script.outcomes["life-1"] = ProbeOutcome.UNREACHABLE
    views = len(script.views)
    pass_time(script, 3.0, speak=[0, 12], accuse=[(12, 1)])
    assert len(script.views) == views
    pass_time(script, 0.1, speak=[0, 12], accuse=[(0, 1)])
    assert script.newest == ((0, 2), {0})


def test_the_last_holder_of_the_state_is_no_stall_for_who_catches_up() -> None:
    script = catching_up(2, 1)
    views = len(script.views)
    for _ in range(60):
        script.now += 1.0
        script.tell(0, m.Heartbeat(3))
        script.tell(11, m.Stalled(0, views, 7, (0,), True))
        script.tick()
    assert (len(script.views), script.done) == (views, [])


def test_nobody_is_sent_away_before_that_is_written_down() -> None:
    script = Script(3)
    suspect = m.Suspect(1, "life-1", "its shard 0 is lost", True)
    actions = script.coordinator.receive(1, suspect, now=1.0)
    kinds = [type(action.message) if isinstance(action, Send) else type(action) for action in actions]
    assert kinds.index(Persist) < kinds.index(m.Removed) < kinds.index(m.NewView)


def test_who_complains_of_a_stopped_one_stays_though_the_coordinator_itself_stood_still() -> None:
    """That it gives all of them time again is no sign of life of the stopped one."""
    script = Script(2)
    script.outcomes["life-0"] = ProbeOutcome.UNREACHABLE
    for beat in range(2, 30):
        now = float(beat)
        if 7 < beat < 13:  # the coordinator does not run, for more than half of the silence
            continue
        script.do(script.coordinator.receive(1, m.Heartbeat(0), now))
        if beat < 3:
            script.do(script.coordinator.receive(0, m.Heartbeat(0), now))
        if beat >= 7:
            script.do(script.coordinator.receive(1, m.Suspect(0, "life-0", "silent for 5.0 s", False), now))
        script.do(script.coordinator.tick(now))
        assert 1 in script.newest[0]
    assert script.newest == ((1,), {1})


def suspended(script: Script, seconds: float, *conns: int) -> None:
    """Nobody runs for so many seconds; then the members are heard before the coordinator looks at its clock."""
    script.now += seconds
    for conn in conns:
        script.tell(conn, m.Heartbeat(3))
    script.tick()


def test_a_complaint_does_not_ripen_while_nobody_runs() -> None:
    """Two that lost each other for a moment would go on as soon as they run, and one would be removed before."""
    script = Script(3)
    pass_time(script, 1.0, speak=(0, 1, 2))
    script.tell(0, m.Suspect(2, "life-2", "the link to it is down", False))
    pass_time(script, 0.1, speak=(0, 1, 2))
    suspended(script, 300.0, 0, 1, 2)
    script.tell(0, m.Reachable(2))
    pass_time(script, 1.0, speak=(0, 1, 2))
    assert script.newest[0] == (0, 1, 2)
    script.tell(0, m.Suspect(2, "life-2", "the link to it is down", False))
    pass_time(script, 1.0, speak=(0, 1, 2))
    assert script.newest[0] == (0, 1), "without a stop it does"


def test_a_port_that_says_nothing_is_no_end_while_nobody_runs() -> None:
    """It leaves it possible that its process lives, for as long as an op may take."""
    script = Script(3)
    script.outcomes["life-2"] = ProbeOutcome.MUTE
    script.cut(2)
    pass_time(script, 2.0, speak=[0, 1], accuse=[(0, 2)])
    suspended(script, 2 * TIMEOUTS.op, 0, 1)
    pass_time(script, 2.0, speak=[0, 1], accuse=[(0, 2)])
    assert script.newest[0] == (0, 1, 2)
    pass_time(script, TIMEOUTS.op / TIMEOUTS.heartbeat, speak=[0, 1], accuse=[(0, 2)])
    assert script.newest[0] == (0, 1), "without a stop it is"


def test_an_accused_that_is_asked_has_time_to_answer_though_nobody_runs() -> None:
    """As long as an op may take; its silence is no reason to remove it meanwhile."""
    script = Script(3)
    script.outcomes["life-2"] = ProbeOutcome.UNREACHABLE
    pass_time(script, 1.0, speak=(0, 1, 2))
    proof = m.Suspect(2, "life-2", "its port is another one's", True)
    asked = [action for action in script.coordinator.receive(0, proof, script.now) if isinstance(action, Probe)]
    assert [probe.why for probe in asked] == [ProbeReason.ACCUSED]
    suspended(script, 2 * TIMEOUTS.op, 0, 1)
    pass_time(script, 3.0, speak=[0, 1], accuse=[(0, 2)])
    assert script.newest[0] == (0, 1, 2)
    pass_time(script, TIMEOUTS.op / TIMEOUTS.heartbeat, speak=[0, 1], accuse=[(0, 2)])
    assert script.newest[0] == (0, 1), "without a stop its time is over"


def test_a_refusal_holds_as_long_though_nobody_runs() -> None:
    """While it is fresh that a host refuses a rank, no complaint ripens between its replica and another one."""
    script = Script(0)
    script.coordinator = Coordinator(3, 2, TIMEOUTS, views=[], now=0.0, lifetime=1)
    for replica in range(3):
        there = Addresses.of(
            Address(f"h{replica}.{rank}", 1, f"b{replica}.{rank}", 7, 3, "0" * 32) for rank in range(2)
        )
        script.tell(replica, m.Join(replica, f"life-{replica}", there, epoch=0, step=-1, timeouts=CHAIN))
        script.outcomes[f"life-{replica}"] = ProbeOutcome.REFUSED
    script.install(0, 1, 2)
    pass_time(script, 1.0, speak=(0, 1, 2))
    for by, other in ((0, 1), (1, 0)):
        script.tell(by, m.Suspect(other, f"life-{other}", "the link to it is down", False))
    pass_time(script, 0.3, speak=(0, 1, 2))
    script.tell(0, m.Suspect(0, "life-0", "its shard 1 is lost: refused", False, 1))
    suspended(script, 300.0, 0, 1, 2)
    pass_time(script, 0.3, speak=(0, 1, 2))
    assert script.newest[0] == (0, 1, 2)
    pass_time(script, 0.5, speak=(0, 1, 2))
    assert script.newest[0] == (0, 2), "it is no longer fresh"


def test_a_replica_whose_addresses_begin_with_another_rank_is_refused() -> None:
    """Whoever looks for its shard 0 would find none."""
    coordinator = Coordinator(2, 1, TIMEOUTS, views=[], now=0.0, lifetime=1)
    there = Addresses.of((Address("h", 1, "b", 7, 3, "0" * 32),), first=5)
    said = coordinator.receive(1, m.Join(1, "life", there, epoch=0, step=-1, timeouts=CHAIN), now=1.0)
    (word,) = [action.message for action in said if isinstance(action, Send)]
    assert isinstance(word, m.Removed)
    assert "begin with shard 5" in word.reason
    assert not coordinator.joiners.waiting


def test_when_all_epochs_are_used_up_the_job_ends_by_name() -> None:
    script = Script(3)
    script.coordinator.job.epoch = EPOCHS - 2
    script.do(script.coordinator._decisions.decide(script.views[-1].members, None, "the last"))
    assert script.epoch == EPOCHS - 1
    script.do(script.coordinator._decisions.decide(script.views[-1].members, None, "one too many"))
    assert script.epoch == EPOCHS - 1
    assert "epochs that a job can have are used up" in script.done[0]


def test_what_is_asked_of_one_whose_connection_is_lost_with_it_is_asked_again() -> None:
    """Nobody else could withdraw it, so no replica would ever come in again, and none leave."""
    script = after_loss(2, 1)
    script.join_ready(11)
    asked = sum(isinstance(message, m.Prepare) for message in script.sent[0])
    script.cut(0)
    rejoin_all(script, [20], script.epoch)
    said = [message for message in script.sent[20] if isinstance(message, m.Prepare | m.Cancel)]
    assert (asked, [type(message) for message in said]) == (1, [m.Cancel, m.Prepare])
    script.promise(20)
    assert script.newest == ((0, 1), {0})


def test_an_answer_that_has_come_is_not_asked_for_again() -> None:
    script = after_loss(3, 2)
    script.join_ready(12)
    script.promise(0)
    script.cut(0)
    rejoin_all(script, [20], script.epoch)
    assert not [message for message in script.sent[20] if isinstance(message, m.Prepare | m.Cancel)]
    script.promise(1)
    assert script.newest == ((0, 1, 2), {0, 1})


def test_who_is_cut_off_with_the_coordinator_removes_nobody_by_a_stall() -> None:
    """It catches up, and waits for those that hold the state, who train on and cannot be heard."""
    script = catching_up(3, 2)
    script.outcomes = dict.fromkeys(("life-0", "life-1"), ProbeOutcome.UNREACHABLE)
    views = len(script.views)
    pass_time(script, 3.0, speak=[12])
    for _ in range(60):
        script.now += 1.0
        stall = m.Stalled(0, views, 7, (0, 1), True)
        script.tell(12, stall)
        script.tick()
    assert (len(script.views), script.done) == (views, [])


def test_another_life_does_not_end_the_job_of_the_last_that_holds_the_state_and_lives() -> None:
    """Somebody has started a second process of that number. A restart finds the connection of the first one closed."""
    script = after_loss(2, 1)
    views = len(script.views)
    pass_time(script, 2.0, speak=[0])
    join = joins(10)
    for seconds in range(30):  # it holds its interpreter for longer than a heartbeat timeout
        now = script.now + seconds
        script.coordinator.acknowledged(0, now)
        script.do(script.coordinator.receive(10, join, now))
        script.do(script.coordinator.tick(now))
    assert (len(script.views), script.done) == (views, [])
    script.lose(0, ProbeOutcome.ENDED)
    assert script.done != []


def test_a_port_that_refuses_is_no_end_as_long_as_the_connection_stands() -> None:
    """A firewall that is made stricter lets what is connected already live. The process holds its interpreter."""
    script = Script(3)
    pass_time(script, 1.0, speak=[0, 1, 2])
    script.outcomes["life-2"] = ProbeOutcome.REFUSED
    for _ in range(round(30 / TIMEOUTS.beat)):
        script.coordinator.acknowledged(2, script.now)
        pass_time(script, 0.1, speak=[0, 1])
    assert len(script.views) == 1
    script.cut(2)
    pass_time(script, 0.3, speak=[0, 1])
    assert script.newest == ((0, 1), {0, 1})


def test_a_leader_that_does_not_hear_its_rank_takes_its_replica_out_and_not_the_last_ones() -> None:
    script = Script(3)
    beats(script, 2 * TIMEOUTS.heartbeat, {0: "its shard 1 has been silent for 5.0 s"}, replicas=3)
    assert script.newest[0] == (1, 2)
    script.install(1, 2)
    lost = {replica: "its shard 1 has been silent for 5.0 s" for replica in (1, 2)}
    beats(script, 3 * TIMEOUTS.heartbeat, lost, replicas=3)
    assert script.newest[0] == (1, 2)
    assert not script.done
    del lost[1]  # the cut ends: it is not over for everybody at once
    beats(script, TIMEOUTS.heartbeat / 2, lost, replicas=3)
    beats(script, 3 * TIMEOUTS.heartbeat, {}, replicas=3)
    assert script.newest[0] == (1, 2)


def test_of_two_the_one_goes_whose_rank_nobody_hears() -> None:
    """A rank of the other replica misses it as well, and may say so before its leader does."""
    script = Script(2)
    script.tell(1, m.Suspect(0, "life-0", "silent for 3.0 s", False, 1))
    beats(script, 2 * TIMEOUTS.heartbeat, {0: "its shard 1 has been silent for 3.0 s"})
    assert script.newest[0] == (1,)


def test_who_holds_its_interpreter_has_as_long_as_the_user_says() -> None:
    """Though ops took less until then, so that the others report it at the floor. A word in between changes nothing."""
    for held in (True, False):
        script = Script(3)
        while len(script.views) == 1:
            script.now += 1.0
            words = "its shard 1: its process lives but has not spoken" if held and script.now % 9 else ""
            for replica in range(3):
                script.tell(replica, m.Heartbeat(4, words * (replica == 2)))
                if replica < 2 and script.now > TIMEOUTS.op_floor:
                    stall = m.Stalled(0, 1, 7, (2,), True, script.now)
                    script.tell(replica, stall)
            script.tick()
        assert script.newest[0] == (0, 1)
        assert (script.now > TIMEOUTS.op) == held
        assert script.now < TIMEOUTS.give_up


def test_a_coordinator_that_stood_still_takes_no_time_from_who_holds_its_interpreter() -> None:
    """Afterwards it does not know yet that this one does not speak, and the others complain."""
    script = Script(3)
    while len(script.views) == 1:
        script.now += 1.0
        if 40 < script.now < 45 + TIMEOUTS.op_floor:
            continue
        for replica in range(2):
            script.tell(replica, m.Heartbeat(4))
            if script.now > TIMEOUTS.op_floor:
                script.tell(replica, m.Stalled(0, 1, 7, (2,), True, script.now - TIMEOUTS.op_floor))
        script.coordinator.acknowledged(2, script.now)
        script.tick()
    assert script.newest[0] == (0, 1)
    assert script.now > TIMEOUTS.op


def test_a_stall_says_what_its_cause_does_though_the_coordinator_stood_still_just_then() -> None:
    """Afterwards it does not know yet again that this one does not speak, and knew it before."""
    script = Script(3)
    while len(script.views) == 1:
        script.now += 1.0
        if TIMEOUTS.op - 5.0 < script.now < TIMEOUTS.op + 10.0:
            continue
        for replica in range(2):
            script.tell(replica, m.Heartbeat(4))
            if script.now > TIMEOUTS.op_floor:
                script.tell(replica, m.Stalled(0, 1, 7, (2,), True, script.now))
        script.coordinator.acknowledged(2, script.now)
        script.tick()
    [why] = script.views[-1].why.split("; lost ")
    assert script.now < TIMEOUTS.op + 10.0 + TIMEOUTS.silence
    assert f"; its process lives but has not spoken for {script.now - 1.0:.0f} s" in why


def test_a_stall_of_a_replica_whose_leader_is_stopped_says_so_and_judges_no_rank() -> None:
    """Of several ranks the leader is a process of its own."""
    script = Script(0)
    script.coordinator = Coordinator(2, 2, TIMEOUTS, views=[], now=0.0, lifetime=1, state=lambda there: "T")
    for replica in range(2):
        ranks = (Address("h", 1 + rank, "b", 2 * replica + rank, 3, f"{replica}{rank}" * 16) for rank in range(2))
        join = m.Join(replica, f"life-{replica}", Addresses.of(ranks), epoch=0, step=-1, timeouts=CHAIN)
        script.tell(replica, join)
    script.install(0, 1)
    while len(script.views) == 1:
        script.now += 1.0
        script.tell(0, m.Heartbeat(4))
        if script.now > TIMEOUTS.op_floor:
            script.tell(0, m.Stalled(0, 1, -1, (1,), True, script.now))
        script.coordinator.acknowledged(1, script.now)
        script.tick()
    assert script.newest[0] == (0,)
    assert "; its leader, a process beside its shard 0, lives but has not spoken for" in script.views[-1].why
    assert "SIGSTOP" not in script.views[-1].why


def test_a_coordinator_that_takes_over_calls_a_second_rank_for_the_case_that_the_first_one_is_held() -> None:
    for ranks in (1, 2):
        there = Addresses.of(Address("h", 1 + rank, "b", rank, 3, f"{rank:032x}") for rank in range(ranks))
        member = Member(0, "life-0", there, True)
        suspicions = Suspicions(TIMEOUTS.op, 1.0)
        (first,) = suspicions.search(member, True, 0.0)
        suspicions.probed(first, ProbeOutcome.MUTE, 0.1)
        (second,) = suspicions.search(member, True, 2.0)
        assert (first.call, first.also) == (False, None)
        assert (second.call, second.also) == (True, there[1] if ranks == 2 else None)


def spread(replicas: int) -> Script:
    """All on hosts of their own."""
    script = Script(0)
    script.coordinator = Coordinator(replicas, 1, TIMEOUTS, views=[], now=0.0, lifetime=1)
    for replica in range(replicas):
        there = Addresses.of((Address(f"host{replica}", 1, f"boot{replica}", replica, 3, "0" * 32),))
        script.tell(replica, m.Join(replica, f"life-{replica}", there, epoch=0, step=-1, timeouts=CHAIN))
    script.install(*range(replicas))
    return script


def test_who_is_refused_whomever_it_wants_takes_nobody_for_dead() -> None:
    """A firewall or a proxy that restarts resets all connections, and refuses new ones for a while."""
    script = spread(3)
    for replica in range(3):
        script.outcomes[f"life-{replica}"] = ProbeOutcome.REFUSED
    for replica in range(3):
        script.cut(replica)
    for _ in range(4 * int(TIMEOUTS.op)):
        script.now += 0.5
        script.tick()
    assert (len(script.views), script.done) == (1, [])
    script.outcomes["life-2"] = ProbeOutcome.ANSWERED  # it is over, and the two others have really ended
    script.now += 1.0
    script.tick()
    script.do(script.coordinator.tick(script.now + 0.1))
    assert script.newest[0] == (2,)
    script.lose(2)
    assert script.done == []


def test_who_is_refused_by_one_host_and_taken_by_another_knows_at_once() -> None:
    script = spread(3)
    script.lose(1)
    assert script.newest[0] == (0, 2)


def test_a_refusal_that_ended_with_the_cause_of_all_costs_nobody() -> None:
    """The first dial is refused; when another host is dialled, whatever refused has started again."""
    script = spread(2)
    script.do(
        [
            action
            for action in script.coordinator.disconnected(1, script.now)
            if not isinstance(action, Probe)  # it is carried out here
        ]
    )
    script.do(script.coordinator.probed(search(1, "life-1"), ProbeOutcome.REFUSED, script.now))
    assert len(script.views) == 1


@pytest.mark.parametrize("refuses", ["one", "all"])
def test_a_rank_that_its_leader_finds_refused_is_lost_if_another_host_takes_a_connection(refuses: str) -> None:
    script = Script(0)
    script.coordinator = Coordinator(2, 2, TIMEOUTS, views=[], now=0.0, lifetime=1)
    for replica in range(2):
        there = Addresses.of(
            Address(f"h{replica}.{rank}", 1, f"b{replica}.{rank}", 7, 3, "0" * 32) for rank in range(2)
        )
        script.tell(replica, m.Join(replica, f"life-{replica}", there, epoch=0, step=-1, timeouts=CHAIN))
    script.install(0, 1)
    script.outcomes["life-1"] = ProbeOutcome.REFUSED
    if refuses == "all":
        script.outcomes["life-0"] = ProbeOutcome.REFUSED
        script.tell(0, m.Suspect(0, "life-0", "its shard 1 is lost: refused", False, 1))
    script.tell(1, m.Suspect(1, "life-1", "its shard 1 is lost: refused", False, 1))
    assert script.newest[0] == ((0, 1) if refuses == "all" else (0,))
    assert script.done == []
