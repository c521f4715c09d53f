"""A rank and the leader of its replica: what each does when the other is silent, fails or is started again."""

from __future__ import annotations

from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.leader import ToRank
from tests.rigs.rank_node import TIMEOUTS, Process, address, change, running, said, view


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
    again = [action.message for action in node.up_opened() if isinstance(action, act.ToLeader)]
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
        assert member.passed_by(m.Alive(1, "life-9")) == m.RemovedIn(view(1, (0, 1), 2).bare())
        for same in (view(1, (1,), 2), view(2, (0, 1), 2)):
            assert node.peer_answered(m.RemovedIn(same)) == []
        told = node.peer_answered(m.RemovedIn(view(2, (1,), 2)))
        assert bool(told) == silent  # else its leader tells it what there is to be told
        assert [type(action) for action in told if not isinstance(action, act.ToLeader)] == [act.Failed] * silent


def test_a_rank_whose_leader_says_nothing_more_does_not_wait_on_for_ever() -> None:
    other = running(ranks=2, rank=1)
    other.tick(0.0)
    other.from_up(m.Ping(TIMEOUTS.heartbeat + 1))
    ticks = range(1, int(TIMEOUTS.absence) + 100)
    waits = [second for second in ticks if any(isinstance(action, n.WaitOn) for action in other.tick(float(second)))]
    assert waits == list(range(1, int(TIMEOUTS.absence - TIMEOUTS.heartbeat)))


def test_a_leader_says_whom_of_its_ranks_it_does_not_hear_and_who_does_not_hear_it() -> None:
    node = running((0,), ranks=3)
    deaf = m.Heartbeat(0, divided="does not hear its leader")
    words: list[str] = []
    for now, message in ((0.0, m.Heartbeat(0)), (1.0, deaf), (2.0, m.Heartbeat(0))):
        node.from_rank(1, m.Heartbeat(0), now)
        node.from_rank(2, message, now)
        words += [beat.divided for beat in said(node.tick(now), m.Heartbeat)]  # type: ignore[attr-defined]
    assert words == ["", "its shard 2 does not hear its leader", ""]
    actions = []
    for second in range(3, 250):
        node.from_rank(2, m.Heartbeat(0), float(second))
        actions += node.tick(float(second))
        ended = any(isinstance(action, act.Failed) for action in actions)
        assert ended == (second > TIMEOUTS.give_up + 2), second
    assert said(actions, m.Heartbeat)[10].divided.startswith("its shard 1 has been silent for")  # type: ignore[attr-defined]
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
    assert mute.startswith("its shard 1: its process lives but has not spoken for 59 s: it holds the interpreter lock")
    node.from_rank(1, m.Heartbeat(3), 60.0)
    assert said(node.tick(60.0), m.Heartbeat) == [m.Heartbeat(3)]
    beats = [x for now in range(61, 80) for x in said(node.tick(float(now)), m.Heartbeat)]
    assert beats[-1].divided == "its shard 1 has been silent for 19.0 s"  # type: ignore[attr-defined]


def test_a_rank_that_fails_tells_its_leader_which_would_wait_for_it_as_long_as_it_lives() -> None:
    (said_last, _) = running(ranks=2, rank=1).failed("out of memory")
    assert isinstance(said_last, act.ToLeader)
    leader = running(ranks=2)
    actions = leader.from_rank(1, said_last.message, 0.0)
    assert [x.reason for x in said(actions, m.Suspect)] == ["its shard 1 is lost: out of memory"]  # type: ignore[attr-defined]
    assert any(isinstance(action, act.Failed) for action in actions)


def test_a_rank_that_ran_in_a_view_that_is_given_up_tells_its_leader_as_others_may_join_later() -> None:
    """The change by which the replica came in: ranks of it that have not run yet would come in with the next one."""
    without = m.NewView(view(3, (1,), 2))
    came_in, member = running((0, 1), ranks=2, rank=1), running((0, 1), ranks=2, rank=1)
    change(member, view(2, (0, 1), 2))
    (told,) = said(came_in.from_up(without), m.Finished)
    assert said(member.from_up(without), m.Finished) == []
    leader = Process(0, 2)
    leader.up_opened()
    (join,) = said(leader.from_rank(1, m.Hello(1, address(0, 1)), 0.0), m.Join)
    actions = leader.from_rank(1, told, 0.0)
    assert [x.proof for x in said(actions, m.Suspect)] == [True]  # type: ignore[attr-defined]
    assert leader.from_rank(1, told, 0.0) == []  # as each of thousands may say
    leader.up_lost("reset by peer")
    assert join not in said(leader.up_opened(), m.Join)  # or it would be taken in again


def test_a_rank_that_was_away_hears_that_another_one_is_lost() -> None:
    leader = running(ranks=3)
    leader.from_rank(1, m.Finished(False, "out of memory"), 0.0)
    actions = leader.from_rank(2, m.Hello(2, address(0, 2), "life-0"), 0.0)
    assert any(isinstance(action, ToRank) and isinstance(action.message, m.Removed) for action in actions)


def test_a_rank_that_comes_when_another_one_is_lost_already_hears_that() -> None:
    """It would wait for its replica for as long as it may take to come."""
    leader = Process(0, 3)
    leader.up_opened()
    leader.from_rank(1, m.Hello(1, address(0, 1)), 0.0)
    leader.from_rank(1, m.Finished(False, "out of memory"), 0.0)
    actions = leader.from_rank(2, m.Hello(2, address(0, 2)), 0.0)
    told = [a.message for a in actions if isinstance(a, ToRank) and a.shard == 2]
    assert [type(message) for message in told] == [m.Welcome, m.Removed]


def test_a_leader_that_another_host_refuses_may_live() -> None:
    node = running((0, 1), ranks=2, rank=1)
    assert node.up_lost("refused", refused=True) == []
    assert node.leader_ended  # for one that has nothing more to do
    assert node.peer_answered(m.RemovedIn(view(2, (1,), 2)))  # until a member says that the job goes on without it
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
