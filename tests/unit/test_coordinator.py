"""Short scripts of what the coordinator is told and what it decides; the long random ones are in tests/simulation."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection

import pytest

from ftcomm.control import messages as m
from ftcomm.control.coordinator import (
    ALONE,
    EARLY,
    WAITS,
    Action,
    Ask,
    Close,
    Coordinator,
    Dial,
    Done,
    Log,
    Persist,
    Probe,
    Send,
    Unfit,
)
from ftcomm.control.dials import PAUSE, Outcome
from ftcomm.control.limits import EPOCHS
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Address, View

TIMEOUTS = Timeouts.derive(120.0, 10.0)
CHAIN = dataclasses.astuple(TIMEOUTS)


class Script:
    """A coordinator and its leaders; connection r is replica r's, 10 + r that of its second life."""

    def __init__(self, replicas: int) -> None:
        self.coordinator = Coordinator(replicas, 1, TIMEOUTS, views=[], now=0.0, lifetime=1)
        self.views: list[View] = []
        self.sent: dict[int, list[m.Message]] = collections.defaultdict(list)
        self.done: list[str] = []
        self.outcomes: dict[str, Outcome] = {}  # of a dial, by the life that it is to; else it is answered
        self.dialled: list[Dial] = []
        self.answers: set[str] = set()  # lives that do when they are asked
        for replica in range(replicas):
            self.join(replica)
        self.install(*range(replicas))

    now = 1.0

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Persist):
                self.views.append(action.view)
            elif isinstance(action, Send):
                self.sent[action.conn].append(action.message)
            elif isinstance(action, Done):
                self.done.append(action.failed)
            elif isinstance(action, Dial):
                self.dialled.append(action)
                outcome = self.outcomes.get(action.incarnation, "answered")
                self.do(self.coordinator.dialled(action.replica, action.incarnation, outcome, self.now))
            elif isinstance(action, Probe):
                life = action.incarnation if action.itself else self.at(action.address)
                outcome = self.outcomes.get(life, "answered")
                accused = action.replica, action.incarnation, action.rank
                self.do(self.coordinator.probed(*accused, action.itself, outcome))
            elif isinstance(action, Ask):
                here = action.incarnation in self.answers
                self.do(self.coordinator.asked(action.replica, action.incarnation, action.rank, here))

    def at(self, address: Address) -> str:
        """Whose life has that address."""
        return next(x.incarnation for x in self.views[-1].members if address in x.ranks)

    def tell(self, conn: int, message: m.Message) -> None:
        self.do(self.coordinator.receive(conn, message, now=1.0))

    def join(self, conn: int, **more: bool) -> None:
        address = Address("h", 1, "b", conn, 3, "n")
        self.tell(conn, m.Join(conn % 10, f"life-{conn}", (address,), epoch=0, step=-1, timeouts=CHAIN, **more))

    def join_ready(self, conn: int) -> None:
        self.join(conn)
        self.tell(conn, m.Ready())

    def install(self, *conns: int) -> None:
        for conn in conns:
            self.tell(conn, m.Installed(self.views[-1].epoch))

    def promise(self, *conns: int) -> None:
        """All answer the newest proposal with yes."""
        for conn in conns:
            prepare = next(message for message in reversed(self.sent[conn]) if isinstance(message, m.Prepare))
            self.tell(conn, m.Promise(prepare.proposal, True, step=0))

    def lose(self, conn: int, outcome: Outcome = "refused") -> None:
        """Its process ends: nobody listens there any more, as its host says, or ("ended") our own kernel."""
        self.outcomes[f"life-{conn}"] = outcome
        self.do(self.coordinator.disconnected(conn, now=1.0))

    def wait(self, *conns: int) -> None:
        """Longer than a heartbeat timeout, in which they live."""
        for second in range(1, 3 + int(TIMEOUTS.heartbeat)):
            for conn in conns:
                self.do(self.coordinator.receive(conn, m.Heartbeat(4), float(second)))
            self.do(self.coordinator.tick(float(second)))

    def rejoin(self, replica: int, others: list[int]) -> None:
        """A second life of a lost replica is taken in, catching up."""
        self.join_ready(10 + replica)
        self.promise(*others)
        self.install(*others, 10 + replica)

    @property
    def newest(self) -> tuple[tuple[int, ...], frozenset[int]]:
        return self.views[-1].replicas, self.views[-1].contributing


def test_a_restarted_one_ends_no_job_before_who_has_caught_up_since_can_say_so() -> None:
    """It comes after the next life of the only one that the store has as contributing."""
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.rejoin(1, [0])
    script.coordinator = Coordinator(2, 1, TIMEOUTS, views=script.views, now=0.0, lifetime=2)
    script.join(20)
    assert not script.done
    address = Address("h", 1, "b", 11, 3, "n")
    script.tell(11, m.Join(1, "life-11", (address,), script.views[-1].epoch, 4, CHAIN, caught_up=True))
    script.wait(11)
    script.join(20)
    assert script.newest == ((1,), {1})
    assert not script.done


def test_a_store_that_is_older_than_a_view_of_which_a_stranger_has_heard_is_refused() -> None:
    """The store ends before it came in, and the others have not heard of that yet."""
    script = Script(2)
    script.coordinator = Coordinator(2, 1, TIMEOUTS, views=script.views, now=0.0, lifetime=2)
    address = Address("h", 1, "b", 11, 3, "n")
    join = m.Join(1, "life-11", (address,), 0, -1, CHAIN, heard=2)
    done = script.coordinator.receive(11, join, script.now)
    assert ["it ends with epoch 1" in x.reason for x in done if isinstance(x, Unfit)] == [True]


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
    ask = next(action for action in actions if isinstance(action, Ask))
    assert not script.coordinator.receive(0, ended, now=1.0), "one dial at a time is enough"
    told = script.coordinator.asked(ask.replica, ask.incarnation, ask.rank, True)
    assert [action.kind for action in told if isinstance(action, Log)] == ["spared"]
    assert script.newest[0] == (0, 1, 2)
    script.wait(0, 1, 2)
    assert script.newest[0] == (0, 1, 2), "nor later, as nobody stalls"
    script.answers.clear()
    script.tell(0, ended)
    assert script.newest[0] == (0, 2), "who does not answer has ended, as was proved"


def test_it_is_the_rank_that_was_proved_to_have_ended_that_is_asked() -> None:
    coordinator = Coordinator(2, 2, TIMEOUTS, views=[], now=0.0, lifetime=1)
    for replica in range(2):
        ranks = tuple(Address("h", 1 + rank, "b", replica, 3, "n") for rank in range(2))
        actions = coordinator.receive(replica, m.Join(replica, f"life-{replica}", ranks, 0, -1, CHAIN), now=1.0)
    assert any(isinstance(action, Persist) for action in actions)
    actions = coordinator.receive(0, m.Suspect(1, "life-1", "its process has ended", True, 1), now=1.0)
    assert [action.address.port for action in actions if isinstance(action, Ask)] == [2]
    for rank in (0, 2):  # another one is another question; one that there is not is none
        actions = coordinator.receive(0, m.Suspect(1, "life-1", "its process has ended", True, rank), now=1.0)
        assert sum(isinstance(action, Ask) for action in actions) == (rank == 0)
    assert any(isinstance(action, Persist) for action in coordinator.asked(1, "life-1", 1, False))
    assert not coordinator.asked(1, "life-1", 0, False), "it has gone by now"


def test_a_joiner_comes_in_catching_up_and_contributes_when_it_says_so() -> None:
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.rejoin(1, [0])
    assert script.newest == ((0, 1), {0})
    script.tell(11, m.CaughtUp(5))
    script.promise(0, 11)
    assert script.newest == ((0, 1), {0, 1})


def test_a_joiner_is_in_no_view_before_its_script_is_ready() -> None:
    """It is told who is there once somebody has passed a boundary, and nobody is asked for anything on its behalf."""
    script = Script(3)
    script.lose(1)
    script.install(0, 2)
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


def test_one_that_prepares_says_to_a_new_coordinator_whether_it_is_ready() -> None:
    script = Script(3)
    script.lose(1)
    script.lose(2)
    for ready in (False, True):
        script.coordinator = Coordinator(3, 1, TIMEOUTS, views=script.views, now=0.0, lifetime=2 + ready)
        script.sent.clear()
        address = Address("h", 1, "b", 0, 3, "n")
        script.tell(0, m.Join(0, "life-0", (address,), script.views[-1].epoch, 4, CHAIN))
        script.join(11, ready=ready)
        assert any(isinstance(message, m.Prepare) for message in script.sent[0]) == ready
        assert any(isinstance(message, m.Registered) for message in script.sent[11]) != ready
    script.promise(0)
    assert script.newest == ((0, 1), {0})


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
    script.join(21, leaving=True, ready=True)  # as it says to a coordinator that has not heard it
    assert isinstance(script.sent[21][-1], m.Dismissed)


def test_a_drain_sends_away_who_prepares_and_refuses_who_comes_later() -> None:
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.tell(0, m.Heartbeat(3))
    script.join(11)
    script.do(script.coordinator.drain())
    assert isinstance(script.sent[11][-1], m.Dismissed)
    script.tell(11, m.Ready())
    script.lose(11)
    script.join(21)
    assert isinstance(script.sent[21][-1], m.Expelled)
    script.promise(0)
    assert script.newest == ((), frozenset())


def test_a_drain_sends_away_who_was_to_come_in_by_a_change_that_is_given_up() -> None:
    """Else it would hear at the end that it has come too late, as if something were wrong."""
    script = Script(2)
    script.lose(1)
    script.install(0)
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
    assert not any(isinstance(message, m.Expelled) for message in script.sent[11])


def test_one_that_dies_or_falls_silent_while_it_prepares_is_forgotten() -> None:
    script = Script(3)
    script.lose(1)
    script.install(0, 2)
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
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.rejoin(1, [0])
    script.lose(0, "ended")
    assert "no replica that holds the state" in script.done[0]


def test_an_older_life_of_a_replica_that_was_removed_is_told_so() -> None:
    script = Script(3)
    script.lose(1)
    address = Address("h", 1, "b", 1, 3, "n")
    script.tell(21, m.Join(1, "life-1", (address,), epoch=1, step=4, timeouts=CHAIN))
    assert isinstance(script.sent[21][-1], m.Expelled)


def test_an_older_life_does_not_displace_the_one_that_has_its_number_now() -> None:
    """A stopped process that is continued when its replica was started again."""
    script = Script(3)
    script.lose(1)
    script.install(0, 2)
    script.rejoin(1, [0, 2])
    views = len(script.views)
    address = Address("h", 1, "b", 1, 3, "n")
    for conn in (21, 31):
        script.tell(conn, m.Join(1, "life-1", (address,), epoch=1, step=4, timeouts=CHAIN))
        assert isinstance(script.sent[conn][-1], m.Expelled)
    script.tell(11, m.CaughtUp(5))
    script.promise(0, 2, 11)
    assert script.newest == ((0, 1, 2), {0, 1, 2})
    assert len(script.views) == views + 1


def test_a_proposal_is_given_up_when_somebody_is_lost() -> None:
    script = Script(3)
    script.lose(2)
    script.install(0, 1)
    script.join_ready(12)
    script.promise(0)
    script.lose(1)
    assert script.newest == ((0,), {0})
    script.promise(0)  # of the proposal that is given up: nothing comes of it
    assert script.newest == ((0,), {0})


def test_members_that_are_faster_than_the_commit_are_asked_for_a_boundary_ever_further_ahead() -> None:
    """They stand at it, all without the commit, before the view is written down and sent."""
    script = Script(2)
    script.lose(1)
    script.install(0)
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


def test_a_second_life_that_comes_before_the_end_of_the_first_is_seen_is_not_expelled() -> None:
    script = Script(2)
    script.join_ready(11)
    assert script.newest == ((0,), {0})
    assert not any(isinstance(message, m.Expelled) for message in script.sent[11])
    script.install(0)
    script.promise(0)
    assert script.newest == ((0, 1), {0})


def test_a_complete_job_has_not_failed_when_only_a_joiner_is_left() -> None:
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.rejoin(1, [0])
    script.tell(0, m.Finished())
    script.lose(0)
    script.do(script.coordinator.tick(now=4.0))
    assert script.done == [""]


def test_a_launcher_corrects_who_has_said_that_it_has_finished() -> None:
    """`raise SystemExit(3)`: the others do not wait until it would have gone by itself."""
    script = Script(3)
    script.tell(1, m.Finished(True))
    script.do(script.coordinator.disconnected(1, now=1.0))
    assert len(script.views) == 1
    script.do(script.coordinator.exited(1, "exited with code 3"))
    assert script.newest[0] == (0, 2)
    assert script.views[-1].why == "lost 1: exited with code 3"
    script.do(script.coordinator.exited(0, "exited with code 3"))  # it has said nothing: its connections tell
    assert len(script.views) == 2


def test_one_that_was_told_to_leave_says_so_again_to_a_new_coordinator() -> None:
    script = Script(3)
    script.coordinator = Coordinator(3, 1, TIMEOUTS, views=script.views, now=0.0, lifetime=2)
    script.sent.clear()
    for replica in range(3):
        address = Address("h", 1, "b", replica, 3, "n")
        script.tell(replica, m.Join(replica, f"life-{replica}", (address,), 1, 4, CHAIN, leaving=replica == 1))
    script.promise(0, 1, 2)
    assert script.newest == ((0, 2), {0, 2})


def test_other_timeouts_are_refused_with_both_chains() -> None:
    script = Script(2)
    address = Address("h", 1, "b", 1, 3, "n")
    script.tell(11, m.Join(1, "life-11", (address,), epoch=0, step=-1, timeouts=(5.0, 30.0, 120.0)))
    expelled = script.sent[11][-1]
    assert isinstance(expelled, m.Expelled)
    assert "heartbeat 5 s, op 30 to 120 s" in expelled.reason
    assert "heartbeat 10 s, op 30 to 120 s" in expelled.reason
    assert script.newest == ((0, 1), {0, 1})


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
    """Ranks 0 wait for replica 2, whose rank 0 waits for its rank 1; all ranks 1 wait for replica 1."""
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


def restarted(views: list[View]) -> Coordinator:
    return Coordinator(3, 1, TIMEOUTS, views=views, now=0.0, lifetime=2)


def pass_time(
    script: Script, heartbeats: float, speak: Collection[int] = (), accuse: Collection[tuple[int, int]] = ()
) -> None:
    """All `speak` at every beat, and say every second whom they miss: (by, whom)."""
    beats = round(10 * heartbeats)
    for beat in range(beats):
        script.now += TIMEOUTS.beat
        for conn in speak:
            script.do(script.coordinator.receive(conn, m.Heartbeat(3), script.now))
        for by, accused in accuse if beat % max(1, round(REPORT / TIMEOUTS.beat)) == 0 else ():
            complaint = m.Suspect(accused, f"life-{accused}", "silent for 5.0 s", False)
            script.do(script.coordinator.receive(by, complaint, script.now))
        script.do(script.coordinator.tick(script.now))


def rejoin_all(script: Script, conns: Collection[int], epoch: int) -> None:
    address = Address("h", 1, "b", 0, 3, "n")
    for conn in conns:
        join = m.Join(conn % 10, f"life-{conn % 10}", (address,), epoch, 4, CHAIN)
        script.do(script.coordinator.receive(conn, join, script.now))


def test_a_restarted_one_loses_nobody_before_somebody_has_come() -> None:
    """It may be itself that is cut off. Who does not come in time after the first, and is missed by that, is lost."""
    script = Script(3)
    script.coordinator = restarted(script.views)
    script.outcomes = dict.fromkeys(("life-0", "life-1", "life-2"), "unreachable")
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
    script.coordinator = restarted(script.views)
    pass_time(script, 0.2)
    script.now += 10 * TIMEOUTS.heartbeat
    rejoin_all(script, [20], 1)
    script.do(script.coordinator.receive(20, m.Suspect(1, "life-1", "its process has ended", True), script.now))
    script.do(script.coordinator.tick(script.now))
    assert len(script.views) == 1
    pass_time(script, 1.1, speak=[20])
    assert script.newest[0] == (0, 2)


def test_a_restarted_one_that_is_never_in_time_decides_all_the_same() -> None:
    """A starved host: each tick comes so late that nobody could have come before it, as far as it knows."""
    script = Script(3)
    script.coordinator = restarted(script.views)
    rejoin_all(script, [20, 22], 1)
    for late in range(EARLY + 2):
        script.now += TIMEOUTS.heartbeat
        assert (len(script.views) == 1) == (late <= EARLY)
        for conn in (20, 22):
            script.coordinator.acknowledged(conn, script.now)
            complaint = m.Suspect(1, "life-1", f"its process ended, seen for the {late}th time", True)
            script.do(script.coordinator.receive(conn, complaint, script.now))
        assert len(script.coordinator._held) <= 2, "what is said again is kept again"
        script.do(script.coordinator.tick(script.now))
    assert script.newest[0] == (0, 2)


def test_a_refusal_is_logged_once_for_each_life_and_reason() -> None:
    """One that runs is not expelled by a coordinator with other options; it tries again twice a second."""
    coordinator = Coordinator(2, 2, TIMEOUTS, views=[], now=0.0, lifetime=1)
    address = Address("h", 1, "b", 0, 3, "n")
    logged = []
    for conn, life in enumerate(["a", "a", "a", "b", "b"]):
        actions = coordinator.receive(conn, m.Join(0, life, (address,), 3, 4, CHAIN), 1.0)
        assert Close(conn) in actions
        logged += [action for action in actions if isinstance(action, Log)]
    assert [action.kind for action in logged] == ["refused"] * 2


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


@pytest.mark.parametrize("outcome", ["answered", "refused", "unreachable"])
def test_a_restarted_one_knows_no_port_so_that_a_refusal_proves_nothing(outcome: Outcome) -> None:
    script = Script(3)
    script.coordinator = restarted(script.views)
    script.outcomes = dict.fromkeys(("life-0", "life-1", "life-2"), outcome)
    pass_time(script, 3.0)
    rejoin_all(script, [20], 1)
    pass_time(script, 3.0, speak=[20])
    assert len(script.views) == 1
    assert not script.done
    pass_time(script, TIMEOUTS.op / TIMEOUTS.heartbeat, speak=[20])  # and as long as an op may take
    assert script.newest[0] == ((0,) if outcome == "refused" else (0, 1, 2))


def test_connections_that_end_all_at_once_cost_nothing() -> None:
    """A load balancer, a firewall, the network of the coordinator: who listens lives, and comes again."""
    script = Script(3)
    for conn in range(3):
        script.do(script.coordinator.disconnected(conn, now=script.now))
    script.do(script.coordinator.tick(script.now))
    assert sorted({dial.replica for dial in script.dialled}) == [0, 1, 2]
    rejoin_all(script, [20, 21, 22], 1)
    pass_time(script, 2.0, speak=[20, 21, 22])
    assert (len(script.views), script.done) == (1, [])
    assert script.sent[20] == script.sent[21] == script.sent[22] == []  # no Expelled, no NewView


def test_one_that_does_not_come_again_though_it_listens_stays_and_is_told_where_we_are() -> None:
    script = Script(2)
    script.do(script.coordinator.disconnected(1, now=script.now))
    assert not script.dialled[-1].call  # it comes by itself, in a moment
    pass_time(script, 3.0, speak=[0], accuse=[(0, 1)])
    assert script.dialled[-1].call
    assert (len(script.views), script.done) == (1, [])
    dials = len(script.dialled)
    pass_time(script, 3.0, speak=[0])
    assert len(script.dialled) - dials <= 3 * TIMEOUTS.heartbeat / PAUSE  # a stopped process has to take them all in
    script.outcomes["life-1"] = "refused"
    pass_time(script, 0.2, speak=[0])
    assert script.newest == ((0,), {0})


@pytest.mark.parametrize("connected", [True, False])
def test_who_hears_nobody_is_cut_off_itself(connected: bool) -> None:
    """For three heartbeats, then all are heard again: the view is what it was, and all have time to show up."""
    script = Script(3)
    logs: list[str] = []
    script.outcomes = dict.fromkeys(("life-0", "life-1", "life-2"), "unreachable")
    for conn in () if connected else range(3):
        script.do(script.coordinator.disconnected(conn, now=script.now))
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


@pytest.mark.parametrize("again", [False, True])
def test_a_joiner_in_a_view_that_nobody_runs_in_is_told_that_nobody_is_heard(again: bool) -> None:
    """Who waits for that gives up after its init timeout; else it would wait for ever."""
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.join_ready(11)
    script.promise(0)
    assert script.newest[0] == (0, 1)
    if again:  # both, the coordinator too
        script.coordinator = Coordinator(2, 1, TIMEOUTS, views=script.views, now=0.0, lifetime=2)
        script.sent.clear()
        script.join(11)
    else:
        script.wait(11)
    assert [message for message in script.sent[11] if isinstance(message, m.Queued)][-1] == ALONE
    there = Address("h", 1, "b", 0, 3, "n")
    script.tell(0, m.Join(0, "life-0", (there,), script.views[-2].epoch, 4, CHAIN))
    assert script.sent[11][-1] == WAITS


def test_one_that_is_silent_to_the_coordinator_alone_stays() -> None:
    script = Script(3)
    script.outcomes["life-2"] = "unreachable"
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
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.rejoin(1, [0])
    script.outcomes["life-0"] = "unreachable"
    views = len(script.views)
    pass_time(script, 3.0, speak=[11], accuse=[(11, 0)])
    assert (len(script.views), script.done) == (views, [])


def test_who_catches_up_is_no_witness_against_one_that_contributes() -> None:
    script = Script(3)
    script.lose(2)
    script.install(0, 1)
    script.rejoin(2, [0, 1])
    script.outcomes["life-1"] = "unreachable"
    views = len(script.views)
    pass_time(script, 3.0, speak=[0, 12], accuse=[(12, 1)])
    assert len(script.views) == views
    pass_time(script, 0.1, speak=[0, 12], accuse=[(0, 1)])
    assert script.newest == ((0, 2), {0})


def test_the_last_holder_of_the_state_is_no_stall_for_who_catches_up() -> None:
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.rejoin(1, [0])
    views = len(script.views)
    for _ in range(60):
        script.now += 1.0
        script.do(script.coordinator.receive(0, m.Heartbeat(3), script.now))
        script.do(script.coordinator.receive(11, m.Stalled(0, views, 7, (0,), True), script.now))
        script.do(script.coordinator.tick(script.now))
    assert (len(script.views), script.done) == (views, [])


def test_without_a_store_nobody_counts_who_was_told_of_a_view() -> None:
    """It may enter that at any moment: what we decided would have the same number."""
    coordinator = Coordinator(1, 1, TIMEOUTS, views=[], now=0.0, lifetime=2)
    address = Address("h", 1, "b", 2, 3, "n")
    actions = coordinator.receive(0, m.Join(0, "life-0", (address,), 0, -1, CHAIN, heard=1), 1.0)
    assert not any(isinstance(action, Persist) for action in actions)
    assert any(isinstance(action, Close) for action in actions)
    (log,) = [action for action in actions if isinstance(action, Log)]
    assert "was told of epoch 1 of a job that this coordinator has no file of views of" in str(log.fields["reason"])


def test_a_store_that_is_older_than_the_job_is_of_no_use() -> None:
    """What it would decide has the number of a view that there was."""
    script = Script(3)
    unfit: list[str] = []
    for known in (False, True):
        join = m.Join(1, "life-1" if known else "life-31", (Address("h", 1, "b", 0, 3, "n"),), 8, 4, CHAIN)
        script.sent.clear()
        unfit += [x.reason for x in script.coordinator.receive(31, join, script.now) if isinstance(x, Unfit)]
        assert script.sent[31] == []  # it trains on
        assert len(unfit) == known  # one that is not known may be of another job
    assert "the store is older than the job: it ends with epoch 1" in unfit[0]
    script.lose(0)
    pass_time(script, 3.0, speak=[2])
    assert len(script.views) == 1


def grown(change: str) -> Script:
    """Replica 0 was lost and came back; `change` is the last view, which its members have not said to run in yet."""
    script = Script(3)
    script.lose(0)
    script.install(1, 2)
    script.join_ready(10)
    script.promise(1, 2)
    if change == "contribute":
        script.install(1, 2, 10)
        script.tell(10, m.CaughtUp(5))
        script.promise(1, 2, 10)
    assert change in script.views[-1].why
    return script


@pytest.mark.parametrize("change", ["join", "contribute"])
def test_a_restarted_one_takes_back_no_change_in_which_a_member_runs(change: str) -> None:
    script = grown(change)
    before = script.views[-1]
    script.coordinator = restarted(script.views)
    address = Address("h", 1, "b", 0, 3, "n")
    for conn in (2, 10):  # replica 1 has died with the coordinator
        script.tell(conn, m.Join(conn % 10, f"life-{conn}", (address,), before.epoch, 4, CHAIN))
    script.tell(2, m.Suspect(1, "life-1", "its process ended", True))
    assert script.views[-1] == before, "who else may come, and know more than the store, has a heartbeat timeout to"
    script.wait(2, 10)
    assert script.newest == ((0, 2), before.contributing - {1})
    if change == "contribute":
        script.tell(10, m.Suspect(2, "life-2", "its process ended", True))
        assert script.newest == ((0,), {0})
        assert not script.done


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


def test_a_new_coordinator_hears_who_has_caught_up() -> None:
    script = grown("join")
    script.coordinator = restarted(script.views)
    address, epoch = Address("h", 1, "b", 0, 3, "n"), script.views[-1].epoch
    for conn in (1, 2):
        script.tell(conn, m.Join(conn, f"life-{conn}", (address,), epoch, 4, CHAIN))
    script.tell(10, m.Join(0, "life-10", (address,), epoch, 4, CHAIN, caught_up=True))
    script.promise(1, 2, 10)
    assert script.newest == ((0, 1, 2), {0, 1, 2})


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


def test_nobody_is_sent_away_before_that_is_written_down() -> None:
    script = Script(3)
    suspect = m.Suspect(1, "life-1", "its rank 0 is lost", True)
    actions = script.coordinator.receive(1, suspect, now=1.0)
    kinds = [type(action.message) if isinstance(action, Send) else type(action) for action in actions]
    assert kinds.index(Persist) < kinds.index(m.Expelled) < kinds.index(m.NewView)


def test_who_complains_of_a_stopped_one_stays_though_the_coordinator_itself_stood_still() -> None:
    """That it gives all of them time again is no sign of life of the stopped one."""
    script = Script(2)
    script.outcomes["life-0"] = "unreachable"
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


def test_when_all_epochs_are_used_up_the_job_ends_by_name() -> None:
    script = Script(3)
    script.coordinator._epoch = EPOCHS - 2
    script.do(script.coordinator._decide(script.views[-1].members, None, "the last"))
    assert script.views[-1].epoch == EPOCHS - 1
    script.do(script.coordinator._decide(script.views[-1].members, None, "one too many"))
    assert script.views[-1].epoch == EPOCHS - 1
    assert "epochs that a job can have are used up" in script.done[0]


def test_two_processes_of_one_number_are_told_after_the_second_time() -> None:
    """Each launcher starts its own again when the other's has taken its place, for ever."""
    script = Script(3)
    told: list[str] = []
    do = script.do

    def listen(actions: list[Action]) -> None:
        told.extend(action.fields["reason"] for action in actions if isinstance(action, Log) and action.kind == "twins")
        do(actions)

    script.do = listen  # type: ignore[method-assign]
    script.join(12)
    assert not told, "a restart, of which the end was not seen"
    script.join(22)
    assert len(told) == 1
    assert "two processes have FTCOMM_REPLICA=2. Give each replica a number of its own" in told[0]
    script.lose(22)
    script.join(32)
    assert len(told) == 1, "that one had gone"


def test_what_is_asked_of_one_whose_connection_is_lost_with_it_is_asked_again() -> None:
    """Nobody else could withdraw it, so no replica would ever come in again, and none leave."""
    script = Script(2)
    script.lose(1)
    script.install(0)
    script.join_ready(11)
    asked = sum(isinstance(message, m.Prepare) for message in script.sent[0])
    script.do(script.coordinator.disconnected(0, script.now))
    rejoin_all(script, [20], script.views[-1].epoch)
    said = [message for message in script.sent[20] if isinstance(message, m.Prepare | m.Cancel)]
    assert (asked, [type(message) for message in said]) == (1, [m.Cancel, m.Prepare])
    script.promise(20)
    assert script.newest == ((0, 1), {0})


def test_an_answer_that_has_come_is_not_asked_for_again() -> None:
    script = Script(3)
    script.lose(2)
    script.install(0, 1)
    script.join_ready(12)
    script.promise(0)
    script.do(script.coordinator.disconnected(0, script.now))
    rejoin_all(script, [20], script.views[-1].epoch)
    assert not [message for message in script.sent[20] if isinstance(message, m.Prepare | m.Cancel)]
    script.promise(1)
    assert script.newest == ((0, 1, 2), {0, 1})


def test_who_is_cut_off_with_the_coordinator_removes_nobody_by_a_stall() -> None:
    """It catches up, and waits for those that hold the state, who train on and cannot be heard."""
    script = Script(3)
    script.lose(2)
    script.install(0, 1)
    script.rejoin(2, [0, 1])
    script.outcomes = dict.fromkeys(("life-0", "life-1"), "unreachable")
    views = len(script.views)
    pass_time(script, 3.0, speak=[12])
    for _ in range(60):
        script.now += 1.0
        stall = m.Stalled(0, views, 7, (0, 1), True)
        script.do(script.coordinator.receive(12, stall, script.now))
        script.do(script.coordinator.tick(script.now))
    assert (len(script.views), script.done) == (views, [])


def test_another_life_does_not_end_the_job_of_the_last_that_holds_the_state_and_lives() -> None:
    """Somebody has started a second process of that number. A restart finds the connection of the first one closed."""
    script = Script(2)
    script.lose(1)
    script.install(0)
    views = len(script.views)
    pass_time(script, 2.0, speak=[0])
    address = Address("h", 1, "b", 0, 3, "n")
    join = m.Join(0, "life-10", (address,), 0, -1, CHAIN)
    for seconds in range(30):  # it holds its interpreter for longer than a heartbeat timeout
        now = script.now + seconds
        script.coordinator.acknowledged(0, now)
        script.do(script.coordinator.receive(10, join, now))
        script.do(script.coordinator.tick(now))
    assert (len(script.views), script.done) == (views, [])
    script.lose(0, "ended")
    assert script.done != []


def test_a_port_that_refuses_is_no_end_as_long_as_the_connection_stands() -> None:
    """A firewall that is made stricter lets what is connected already live. The process holds its interpreter."""
    script = Script(3)
    pass_time(script, 1.0, speak=[0, 1, 2])
    script.outcomes["life-2"] = "refused"
    for _ in range(round(30 / TIMEOUTS.beat)):
        script.coordinator.acknowledged(2, script.now)
        pass_time(script, 0.1, speak=[0, 1])
    assert len(script.views) == 1
    script.do(script.coordinator.disconnected(2, script.now))
    pass_time(script, 0.3, speak=[0, 1])
    assert script.newest == ((0, 1), {0, 1})


def test_a_store_that_is_older_than_all_lives_is_of_no_use_however_late_they_come() -> None:
    """The ends of those that it knows would be the end of a job that goes on."""
    script = Script(2)
    script.coordinator = Coordinator(2, 1, TIMEOUTS, views=script.views, now=0.0, lifetime=2)
    script.outcomes = dict.fromkeys(("life-0", "life-1"), "unreachable")
    pass_time(script, 3.0)
    address = Address("h", 1, "b", 11, 3, "n")
    join = m.Join(1, "life-11", (address,), 9, 70, CHAIN, heard=9)
    done = script.coordinator.receive(11, join, script.now)
    assert ["it ends with epoch 1" in x.reason for x in done if isinstance(x, Unfit)] == [True]


def test_nobody_is_looked_for_who_has_gone_before_it_was_in() -> None:
    script = Script(1)
    script.outcomes = {}
    for life in range(100):
        conn = 11 + 10 * life
        coordinator = script.coordinator
        address = Address("h", 1, "b", conn, 3, "n")
        coordinator.receive(conn, m.Join(1, f"life-{conn}", (address,), 0, -1, CHAIN), script.now)
        coordinator.disconnected(conn, script.now)
        coordinator.dialled(1, f"life-{conn}", "answered", script.now)
    assert {replica for replica, _ in coordinator.missed} <= {0}


@pytest.mark.parametrize("comes", [True, False])
def test_a_restarted_one_ends_no_job_before_it_has_heard_of_all_whether_they_have_caught_up(comes: bool) -> None:
    """However long nobody could reach it. The store has one that contributes, who has ended, and two that catch up."""
    script = Script(3)
    script.lose(1)
    script.lose(2)
    script.install(0)
    script.rejoin(1, [0])
    script.rejoin(2, [0, 11])
    epoch = script.views[-1].epoch
    script.coordinator = Coordinator(3, 1, TIMEOUTS, views=script.views, now=0.0, lifetime=2)
    script.outcomes = dict.fromkeys(("life-0", "life-11", "life-12"), "unreachable")
    pass_time(script, 3.0)
    address = Address("h", 1, "b", 0, 3, "n")
    script.do(script.coordinator.receive(12, m.Join(2, "life-12", (address,), epoch, 4, CHAIN), script.now))
    script.do(script.coordinator.receive(12, m.Suspect(0, "life-0", "its process ended", True), script.now))
    script.do(script.coordinator.receive(20, m.Join(0, "life-20", (address,), 0, -1, CHAIN), script.now))
    pass_time(script, 1.0, speak=[12])
    assert (script.views[-1].epoch, script.done) == (epoch, [])
    join = m.Join(1, "life-11", (address,), epoch, 4, CHAIN, caught_up=True)
    script.do(script.coordinator.receive(11, join, script.now) if comes else [])
    if comes:
        script.do(script.coordinator.tick(script.now))  # what was said before is not lost
        assert script.newest == ((1, 2), {1})
    else:
        script.do(script.coordinator.dialled(0, "life-0", "ended", script.now))
        assert not script.done
        script.do(script.coordinator.dialled(1, "life-11", "ended", script.now))
        script.do(script.coordinator.dialled(0, "life-0", "ended", script.now))
    assert bool(script.done) is not comes


def test_who_comes_when_all_is_over_is_told_so_and_who_is_wrong_that_it_failed() -> None:
    script = Script(1)
    script.tell(0, m.Finished())
    assert script.done == [""]
    script.join(1)
    assert [message.ending for message in script.sent[1] if isinstance(message, m.Expelled)] == [m.Ending.TOO_LATE]
    address = Address("h", 1, "b", 2, 3, "n")
    script.tell(2, m.Join(2, "life-2", (address, address), epoch=0, step=-1, timeouts=CHAIN))
    assert [message.ending for message in script.sent[2] if isinstance(message, m.Expelled)] == [m.Ending.FAILED]


def beats(script: Script, seconds: float, divided: dict[int, str], replicas: int = 2) -> None:
    """Time passes, in which the leaders of replicas that are divided say so."""
    for _ in range(int(4 * seconds)):
        script.now += 0.25
        for replica in range(replicas):
            beat = m.Heartbeat(4, divided=divided.get(replica, ""))
            script.do(script.coordinator.receive(replica, beat, script.now))
        script.do(script.coordinator.tick(script.now))


def test_a_leader_that_does_not_hear_its_rank_takes_its_replica_out_and_not_the_last_ones() -> None:
    script = Script(3)
    beats(script, 2 * TIMEOUTS.heartbeat, {0: "its rank 1 has been silent for 5.0 s"}, replicas=3)
    assert script.newest[0] == (1, 2)
    script.install(1, 2)
    lost = {replica: "its rank 1 has been silent for 5.0 s" for replica in (1, 2)}
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
    script.do(script.coordinator.receive(1, m.Suspect(0, "life-0", "silent for 3.0 s", False, 1), script.now))
    beats(script, 2 * TIMEOUTS.heartbeat, {0: "its rank 1 has been silent for 3.0 s"})
    assert script.newest[0] == (1,)


def test_who_holds_its_interpreter_has_as_long_as_the_user_says() -> None:
    """Though ops took less until then, so that the others report it at the floor. A word in between changes nothing."""
    for held in (True, False):
        script = Script(3)
        while len(script.views) == 1:
            script.now += 1.0
            words = "its rank 1: its process lives but has not spoken" if held and script.now % 9 else ""
            for replica in range(3):
                script.do(script.coordinator.receive(replica, m.Heartbeat(4, words * (replica == 2)), script.now))
                if replica < 2 and script.now > TIMEOUTS.op_floor:
                    stall = m.Stalled(0, 1, 7, (2,), True)
                    script.do(script.coordinator.receive(replica, stall, script.now))
            script.do(script.coordinator.tick(script.now))
        assert script.newest[0] == (0, 1)
        assert (script.now > TIMEOUTS.op) == held
        assert script.now < TIMEOUTS.give_up


def spread(replicas: int) -> Script:
    """All on hosts of their own."""
    script = Script(0)
    script.coordinator = Coordinator(replicas, 1, TIMEOUTS, views=[], now=0.0, lifetime=1)
    for replica in range(replicas):
        there = (Address(f"host{replica}", 1, f"boot{replica}", replica, 3, "n"),)
        script.tell(replica, m.Join(replica, f"life-{replica}", there, epoch=0, step=-1, timeouts=CHAIN))
    script.install(*range(replicas))
    return script


def test_who_is_refused_whomever_it_wants_takes_nobody_for_dead() -> None:
    """A firewall or a proxy that restarts resets all connections, and refuses new ones for a while."""
    script = spread(3)
    for replica in range(3):
        script.outcomes[f"life-{replica}"] = "refused"
    for replica in range(3):
        script.do(script.coordinator.disconnected(replica, script.now))
    for _ in range(4 * int(TIMEOUTS.op)):
        script.now += 0.5
        script.do(script.coordinator.tick(script.now))
    assert (len(script.views), script.done) == (1, [])
    script.outcomes["life-2"] = "answered"  # it is over, and the two others have really ended
    script.now += 1.0
    script.do(script.coordinator.tick(script.now))
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
            if not isinstance(action, Dial)  # it is carried out here
        ]
    )
    script.do(script.coordinator.dialled(1, "life-1", "refused", script.now))
    assert len(script.views) == 1


@pytest.mark.parametrize("refuses", ["one", "all"])
def test_a_rank_that_its_leader_finds_refused_is_lost_if_another_host_takes_a_connection(refuses: str) -> None:
    script = Script(0)
    script.coordinator = Coordinator(2, 2, TIMEOUTS, views=[], now=0.0, lifetime=1)
    for replica in range(2):
        there = tuple(Address(f"h{replica}.{rank}", 1, f"b{replica}.{rank}", 7, 3, "n") for rank in range(2))
        script.tell(replica, m.Join(replica, f"life-{replica}", there, epoch=0, step=-1, timeouts=CHAIN))
    script.install(0, 1)
    script.outcomes["life-1"] = "refused"
    if refuses == "all":
        script.outcomes["life-0"] = "refused"
        script.tell(0, m.Suspect(0, "life-0", "its rank 1 is lost: refused", False, 1))
    script.tell(1, m.Suspect(1, "life-1", "its rank 1 is lost: refused", False, 1))
    assert script.newest[0] == ((0, 1) if refuses == "all" else (0,))
    assert script.done == []
