"""Short scripts of what the coordinator is told and what it decides; the long random ones are in tests/simulation."""

from __future__ import annotations

import collections
import dataclasses

from ftcomm.control import messages as m
from ftcomm.control.coordinator import Action, Coordinator, Done, Persist, Send
from ftcomm.control.timeouts import Timeouts
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
        for replica in range(replicas):
            self.join(replica)
        self.install(*range(replicas))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Persist):
                self.views.append(action.view)
            elif isinstance(action, Send):
                self.sent[action.conn].append(action.message)
            elif isinstance(action, Done):
                self.done.append(action.failed)

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

    def lose(self, conn: int) -> None:
        self.do(self.coordinator.disconnected(conn, now=1.0))

    def rejoin(self, replica: int, others: list[int]) -> None:
        """A second life of a lost replica is taken in, catching up."""
        self.join_ready(10 + replica)
        self.promise(*others)
        self.install(*others, 10 + replica)

    @property
    def newest(self) -> tuple[tuple[int, ...], frozenset[int]]:
        return self.views[-1].replicas, self.views[-1].contributing


def test_a_loss_is_a_view_at_once() -> None:
    script = Script(3)
    script.lose(1)
    assert script.newest == ((0, 2), {0, 2})
    assert script.views[-1].proposal == 0
    assert [view.epoch for view in script.views] == [1, 2]


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
    script.lose(0)
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


def restarted(views: list[View]) -> Coordinator:
    return Coordinator(3, 1, TIMEOUTS, views=views, now=0.0, lifetime=2)


def test_a_restarted_one_loses_nobody_before_somebody_has_come() -> None:
    """It may be itself that is cut off. Whoever does not come in time after the first is lost."""
    script = Script(3)
    coordinator = restarted(script.views)
    beats = [TIMEOUTS.silence * n / 4 for n in range(1, 7)]
    assert not any(coordinator.tick(now) for now in (*beats, *(990.0 + beat for beat in beats)))
    address = script.views[-1].members[0].ranks[0]
    script.do(coordinator.receive(7, m.Join(0, "life-0", (address,), 1, 3, CHAIN), now=1000.0))
    assert [member.replica for member in coordinator.awaited()] == [1, 2]
    for beat in beats:
        assert script.newest == (((0, 1, 2), {0, 1, 2}) if beat <= beats[4] else ((0,), {0}))
        script.do(coordinator.receive(7, m.Heartbeat(3), now=1000.0 + beat))
        script.do(coordinator.tick(1000.0 + beat))
    assert script.newest == ((0,), {0})
    assert coordinator.awaited() == []


def test_nobody_is_sent_away_before_that_is_written_down() -> None:
    script = Script(3)
    suspect = m.Suspect(1, "life-1", "its process ended", True)
    actions = script.coordinator.receive(0, suspect, now=1.0)
    kinds = [type(action.message) if isinstance(action, Send) else type(action) for action in actions]
    assert kinds.index(Persist) < kinds.index(m.Expelled) < kinds.index(m.NewView)


def test_who_complains_of_a_stopped_one_stays_though_the_coordinator_itself_stood_still() -> None:
    """That it gives all of them time again is no sign of life of the stopped one."""
    script = Script(2)
    for beat in range(2, 30):
        now = float(beat)
        if 7 < beat < 13:  # the coordinator does not run, for more than half of the silence
            continue
        script.do(script.coordinator.receive(1, m.Heartbeat(0), now))
        if beat < 3:
            script.do(script.coordinator.receive(0, m.Heartbeat(0), now))
        if beat == 7:
            script.do(script.coordinator.receive(1, m.Suspect(0, "life-0", "silent for 5.0 s", False), now))
        script.do(script.coordinator.tick(now))
        assert 1 in script.newest[0]
    assert script.newest == ((1,), {1})
