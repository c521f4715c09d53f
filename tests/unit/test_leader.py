"""One leader by itself: what it says again when a link to another one breaks and comes back."""

from __future__ import annotations

import pytest

from ftcomm.control import messages as m
from ftcomm.control.leader import NAMED, Leader, LeaderAction, ToCoordinator, ToPeerLeader, ToRank
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.rank_node import RankNode
from ftcomm.control.script_end import ScriptEnd
from ftcomm.control.timeouts import Timeouts
from tests.rigs.rank_node import Process, address, change, view
from tests.rigs.rank_node import said as told

P = 7  # a proposal


def leader(replica: int) -> Leader:
    made = Leader(replica, f"life-{replica}", 1, Timeouts.derive(120.0, 10.0))
    made.from_rank(0, m.Hello(0, address(replica, 0)))
    made.from_coordinator(m.NewView(view(1, (0, 1))))
    made.from_rank(0, m.Installed(1))
    return made


def promise(made: Leader) -> None:
    made.from_coordinator(m.Prepare(P, 1, 3))
    made.from_rank(0, m.Promise(P, True, 2))


def test_a_leader_passes_on_how_the_script_of_a_rank_has_ended() -> None:
    script = ScriptEnd("KeyError")
    said = leader(0).from_rank(0, m.Finished(False, str(script), script))
    text = "its shard 0 is lost: its script failed with KeyError"
    assert said[0] == ToCoordinator(m.Suspect(0, "life-0", text, True, script=script))


@pytest.mark.parametrize("how", ["never heard of it", "cancelled"])
def test_who_waits_at_a_boundary_is_told_again_that_there_is_no_commit(how: str) -> None:
    """The first answer is lost with the link, and a coordinator that could cancel the proposal is not there."""
    waits, other = leader(0), leader(1)
    promise(waits)
    if how == "cancelled":
        promise(other)
    asked = [x.message for x in waits.from_rank(0, m.AtBoundary(P)) if isinstance(x, ToPeerLeader)]
    assert asked == [m.Boundary(0, 1, P, None)]
    lost = other.from_leader(asked[0])
    if how == "cancelled":
        lost = other.from_coordinator(m.Cancel(P))
    assert ToPeerLeader(0, m.Boundary(1, 1, P, None)) in lost
    assert waits.waiting() == (1,)

    for action in other.again(0):
        assert isinstance(action, ToPeerLeader)
        waits.from_leader(action.message)
    assert waits.waiting() == (), "it waits for a message that nobody sends again"


def test_a_commit_that_is_in_force_is_not_denied_when_a_link_comes_back() -> None:
    """Not of who has asked late, and not when another change is under way."""
    other = leader(1)
    promise(other)
    other.from_coordinator(m.NewView(commit := view(2, (0, 1), step=3, proposal=P)))
    other.from_rank(0, m.AtBoundary(P))
    assert other.from_leader(m.Boundary(0, 1, P, None)) == [ToPeerLeader(0, m.Boundary(1, 1, P, commit.bare()))]
    assert other.again(0) == [ToPeerLeader(0, m.Boundary(1, 1, P, commit.bare()))]
    other.from_coordinator(m.Prepare(P + 1, 2, 9))
    assert other.again(0) == []


def test_a_change_for_joiners_of_an_earlier_loop_is_withdrawn_by_all_together() -> None:
    """Though they hold its commit: the joiner would be a member on its way to their loop, and hold them up."""
    both = leader(0), leader(1)
    commit = view(2, (0, 1, 2), step=3, proposal=P)
    for made in both:
        made.from_coordinator(m.Prepare(P, 1, 3, loop=1))
        made.from_rank(0, m.Promise(P, True, 2))
        made.from_coordinator(m.NewView(commit))
    said = [x.message for made in both for x in made.from_rank(0, m.AtBoundary(P, later=True)) if hasattr(x, "replica")]
    assert said == [m.Boundary(0, 1, P, None), m.Boundary(1, 1, P, None)]
    for made, other in zip(both, reversed(said), strict=True):
        assert made.from_leader(other) == [ToRank(0, m.Decision(P, None)), ToCoordinator(m.Withdrawn(P))]


def test_a_commit_for_an_earlier_loop_that_comes_when_a_rank_stands_at_the_boundary_is_refused() -> None:
    made = of_two()
    made.from_coordinator(m.NewView(view(1, (0, 1), ranks=2)))
    made.from_coordinator(m.Prepare(P, 1, 3, loop=1))
    for rank in range(2):
        made.from_rank(rank, m.Promise(P, True, 2))
    made.from_rank(1, m.AtBoundary(P, later=True))
    made.from_coordinator(m.NewView(view(2, (0, 1, 2), step=3, proposal=P, ranks=2)))
    assert made.from_rank(0, m.AtBoundary(P, later=True)) == [ToPeerLeader(1, m.Boundary(0, 1, P, None))]


def test_a_commit_that_another_one_has_let_in_is_not_withdrawn() -> None:
    """Its script is in another loop at that boundary, which is an error of its own."""
    made = leader(0)
    commit = view(2, (0, 1, 2), step=3, proposal=P)
    made.from_coordinator(m.Prepare(P, 1, 3, loop=1, joins=(commit.members[2],)))
    made.from_rank(0, m.Promise(P, True, 2))
    made.from_rank(0, m.AtBoundary(P, later=True))
    assert ToRank(0, m.Decision(P, commit)) in made.from_leader(m.Boundary(1, 1, P, commit.bare()))


def test_a_commit_with_a_member_that_the_coordinator_has_not_proposed_is_not_taken() -> None:
    """Nobody could reach it."""
    made = leader(0)
    promise(made)
    made.from_rank(0, m.AtBoundary(P))
    assert made.from_leader(m.Boundary(1, 1, P, view(2, (0, 1, 2), step=3, proposal=P))) == []
    assert made.waiting() == (1,)


def test_who_stays_waits_at_the_boundary_for_those_who_leave() -> None:
    """Replica 1 may still be in the op before the boundary. In the new view nobody would tell it how that ends."""
    commit = view(2, (0,), step=3, proposal=P)
    made, other = leader(0), leader(1)
    for each in (made, other):
        promise(each)
        each.from_coordinator(m.NewView(commit))
    assert made.from_rank(0, m.AtBoundary(P)) == [ToPeerLeader(1, m.Boundary(0, 1, P, commit.bare()))]
    assert made.waiting() == (1,)
    assert made.again(1) == [ToPeerLeader(1, m.Boundary(0, 1, P, commit.bare()))]
    assert other.from_leader(m.Boundary(0, 1, P, commit.bare())) == [], "its rank is still under way"
    left = other.from_rank(0, m.AtBoundary(P))
    assert ToRank(0, m.Decision(P, commit)) in left, "who leaves waits for nobody"
    assert ToPeerLeader(0, m.Boundary(1, 1, P, commit.bare())) in left
    assert made.from_leader(m.Boundary(1, 1, P, commit.bare())) == [ToRank(0, m.Decision(P, commit))]


def test_a_leader_speaks_when_all_its_ranks_stand_at_the_boundary() -> None:
    made = of_two()
    made.from_coordinator(m.NewView(view(1, (0, 1), ranks=2)))
    made.from_coordinator(m.Prepare(P, 1, 3))
    for rank in range(2):
        made.from_rank(rank, m.Promise(P, True, 2))
    assert made.from_rank(0, m.AtBoundary(P)) == []
    assert made.from_rank(1, m.AtBoundary(P)) == [ToPeerLeader(1, m.Boundary(0, 1, P, None))]


def of_two() -> Leader:
    made = Leader(0, "life-0", 2, Timeouts.derive(120.0, 10.0))
    for rank in range(2):
        made.from_rank(rank, m.Hello(rank, address(0, rank)))
    return made


def test_a_complaint_of_one_rank_does_not_come_after_its_end() -> None:
    """The complaint of another rank has gone on before, so this one waits for the next beat."""
    made = of_two()
    made.from_coordinator(m.NewView(view(1, (0, 1), ranks=2)))
    for rank in range(2):
        made.from_rank(rank, m.Suspect(1, "life-1", "silent for 5.0 s", False, rank))
    for rank in range(2):
        assert made.from_rank(rank, m.Reachable(1)) == [ToCoordinator(m.Reachable(1))]
    said = [x.message for x in made.tick(1.0) if isinstance(x, ToCoordinator)]
    assert not any(isinstance(message, m.Suspect) for message in said)


def test_that_a_replica_leaves_is_heard_once_and_again_by_the_next_coordinator() -> None:
    made = of_two()
    assert made.from_rank(1, m.Leave()) == [ToCoordinator(m.Leave())]
    assert made.from_rank(0, m.Leave()) == []
    join = made.join()
    assert join is not None
    assert join.leaving


def test_a_rank_that_is_started_again_alone_ends_its_replica() -> None:
    made = of_two()
    assert made.join() is not None
    lost = [x.message for x in made.from_rank(1, m.Hello(1, address(5, 1))) if isinstance(x, ToCoordinator)]
    assert lost == [m.Suspect(0, "life-0", "its shard 1 is lost: it was started again, and its replica was not", True)]


def test_a_rank_of_an_earlier_life_counts_for_nothing_in_the_next() -> None:
    """Its connection is that of nobody, whatever comes over it."""
    made = LeaderNode(0, "life-2", 2, Timeouts.derive(120.0, 10.0))
    made.from_rank(0, m.Hello(0, address(0, 0)), 0.0)
    for said in (m.Hello(1, address(0, 1), "life-1"), m.Ready(), m.CaughtUp(3), m.Installed(4)):
        assert made.turned_away(said) == m.Welcome("life-2")
    assert made.leader.join() is None
    for life in ("life-2", ""):  # it connects again, or has never heard of a life
        assert made.turned_away(m.Hello(1, address(7, 1), life)) is None
    made.from_rank(1, m.Hello(1, address(7, 1)), 0.0)
    assert made.leader.join() is not None
    assert made.from_rank(0, m.CaughtUp(9), 0.0) == []
    assert made.from_rank(1, m.CaughtUp(9), 0.0) == [ToCoordinator(m.CaughtUp(9))]


def _queued(actions: list[LeaderAction]) -> dict[int, str]:
    """By rank, what it is told to wait for."""
    told = [action for action in actions if isinstance(action, ToRank) and isinstance(action.message, m.Queued)]
    return {action.shard: action.message.reason for action in told if isinstance(action.message, m.Queued)}


def test_a_joiner_names_the_ranks_that_it_waits_for_once_they_are_few() -> None:
    """To name them looks at all ranks: of thousands each would cost the leader a look at the others."""
    ranks = NAMED + 5
    made = Leader(0, "life", ranks, Timeouts.derive(120.0, 10.0))
    reasons = []
    for shard in range(ranks - 1):
        at_once = _queued(made.from_rank(shard, m.Ready()))
        assert bool(at_once) is (shard == 0), "the others are told with the next beat"
        reasons.append({**at_once, **_queued(made.tick(0.0))}.pop(shard))
    assert [reason.rpartition(": ")[2] for reason in reasons[:4]] == [f"{ranks - 1 - at} of {ranks}" for at in range(4)]
    assert reasons[4].endswith("missing: " + ", ".join(map(str, range(5, ranks))))
    assert reasons[-1].endswith(f"missing: {ranks - 1}")


def test_ranks_that_wait_for_less_than_a_beat_are_not_told_so() -> None:
    """Nor that they wait for others, nor what the coordinator says of it: of thousands each would get it in vain."""
    made = of_two()
    assert not _queued(made.from_rank(1, m.Ready()))
    assert made.from_rank(0, m.Ready()) == [ToCoordinator(m.Ready())]
    assert made.from_coordinator(m.Queued("at the next boundary")) == [ToRank(0, m.Queued("at the next boundary"))]
    made.from_coordinator(m.NewView(view(1, (0, 1), 2)))
    assert not _queued(made.tick(0.0))


def test_with_a_beat_ranks_are_told_the_newest_of_what_they_wait_for_once() -> None:
    made = of_two()
    made.from_coordinator(m.Queued("older"))
    made.from_coordinator(m.Queued("newer"))
    assert _queued(made.tick(0.0)) == {1: "newer"}
    made.from_rank(1, m.Ready())
    assert _queued(made.tick(0.0)) == {1: "joins when all ranks of this replica are ready for it; missing: 0"}
    assert not _queued(made.tick(0.0))


def test_what_a_rank_waits_for_is_told_though_something_else_was_said_before_the_beat() -> None:
    """Or its shards but 0 would take the coordinator that has come back for one that is still away."""
    made = of_two()
    made.from_coordinator(m.Queued("newer", m.Stage.JOINING))
    made.from_coordinator(m.Registered(view(1, (0, 1), 2)))
    assert _queued(made.tick(0.0)) == {1: "newer"}


def test_a_joiner_that_is_sent_on_is_ready_again_when_all_its_ranks_are() -> None:
    """What a rank repeats of the loop that is over, over a new link, does not count for the next one."""
    made = of_two()
    assert made.from_rank(0, m.Ready(1)) == [
        ToRank(0, m.Queued("joins when all ranks of this replica are ready for it; missing: 1", m.Stage.JOINING))
    ]
    assert made.from_rank(1, m.Ready(1)) == [ToCoordinator(m.Ready(1))]
    join = made.join()
    assert join is not None
    assert (join.ready, join.loop) == (True, 1)
    assert made.from_coordinator(m.Behind(2)) == [ToRank(0, m.Behind(2)), ToRank(1, m.Behind(2))]
    join = made.join()
    assert join is not None
    assert not join.ready
    made.from_rank(0, m.Ready(2))
    assert made.from_rank(1, m.Ready(1)) == []
    assert made.from_rank(1, m.Ready(2)) == [ToCoordinator(m.Ready(2))]


def test_a_rank_that_is_ahead_of_its_siblings_is_not_waited_for_when_they_are_sent_on() -> None:
    """A new coordinator told it of a later loop and it says nothing more when it hears of that."""
    made = of_two()
    made.from_rank(0, m.Ready(1))
    assert made.from_rank(1, m.Ready(2)) == [ToCoordinator(m.Ready(1))]
    made.from_coordinator(m.Behind(2))
    assert not made.ready
    assert made.from_rank(0, m.Ready(2)) == [ToCoordinator(m.Ready(2))]
    assert made.from_coordinator(m.Behind(2))[2:] == [ToCoordinator(m.Ready(2))]  # if it is told twice


def test_a_rank_that_comes_back_is_told_the_newest_last() -> None:
    """It would not go on to a loop of which it is told before the view without it, which ends a change."""
    made = of_two()
    made.from_coordinator(m.Behind(2))
    made.from_coordinator(m.NewView(view(3, (1, 2))))
    made.from_coordinator(m.Behind(3))
    again = [x.message for x in made.from_rank(1, m.Hello(1, address(0, 1))) if isinstance(x, ToRank)]
    assert again[-2:] == [m.NewView(view(3, (1, 2))), m.Behind(3)]


@pytest.mark.parametrize(("numbers", "said"), [((2, 2, 2), 2), ((2, 2, 5), 5), ((5, 2, 2), 2), ((0, 0, 0), 0)])
def test_one_rank_that_was_told_of_another_number_of_replicas_is_enough_to_be_refused(
    numbers: tuple[int, ...], said: int
) -> None:
    made = Leader(0, "life-0", 3, Timeouts.derive(120.0, 10.0))
    for shard, replicas in enumerate(numbers):
        made.from_rank(shard, m.Hello(shard, address(0, shard), replicas=replicas))
    join = made.join()
    assert join is not None
    assert join.replicas == said


# -- signs of life of many ranks ---------------------------------------------------------------------------------------

MANY_RANKS = 2048  # of which each gets a sign of life every second beat
USUAL = Timeouts.derive()


def of_many(ranks: int = MANY_RANKS) -> LeaderNode:
    made = LeaderNode(0, "life-0", ranks, USUAL)
    for rank in range(ranks):
        made.from_rank(rank, m.Hello(rank, address(0, rank)), 0.0)
    return made


def test_of_many_ranks_each_gets_a_sign_of_life_every_second_beat_and_rank_0_every_beat() -> None:
    """The coordinator, too."""
    made = of_many()
    for beat in range(4):
        actions = made.tick(beat * USUAL.beat)
        pinged = [x.shard for x in actions if isinstance(x, ToRank) and isinstance(x.message, m.Ping)]
        assert pinged == ([0] if beat % 2 else list(range(MANY_RANKS)))
        assert sum(isinstance(x, ToCoordinator) and isinstance(x.message, m.Heartbeat) for x in actions) == 1


def missed_by_its_leader(ranks: int) -> float:
    """When the leader says that a host is gone. It is gone right after the first sign of life, here as a rank that says
    nothing more. At the next look nothing has been sent to it since, so its kernel seems to answer. All others speak
    when they are asked."""
    made, beats = of_many(ranks), USUAL.beats(ranks)
    for beat in range(60):
        now = beat * USUAL.beat
        for shard in range(ranks) if made.leader.asks_all else ():
            if shard != 7 or beat == 0:
                made.from_rank(shard, m.Heartbeat(3), now)
            if shard != 7 or beat <= beats:
                made.rank_acknowledged(shard, now)
        heartbeats = [x.message for x in made.tick(now) if isinstance(x, ToCoordinator)]
        divided = [x.divided for x in heartbeats if isinstance(x, m.Heartbeat) and x.divided]
        if divided:
            assert divided[0].startswith("its shard 7 has been silent for ")
            return now
    pytest.fail("it is never missed")


@pytest.mark.parametrize("ranks", [1024, 2048, 3072, 4096])
def test_a_host_that_is_gone_is_missed_by_its_leader_before_the_complaint_of_another_replica_counts(ranks: int) -> None:
    """Else both replicas seemed well, and of two the one could go that is."""
    node = Process(7)
    node.rank = RankNode(0, 7, address(0, 7), USUAL, 2, ranks)
    node.up_opened()
    node.from_up(m.Welcome("life-0"))
    change(node, view(1, (0, 1), ranks=8))
    beat = 0
    while not told(node.tick(beat * USUAL.beat), m.Suspect):
        beat += 1
        assert beat < 60
    assert beat * USUAL.beat + USUAL.hold_down >= missed_by_its_leader(ranks) + USUAL.beat


def test_a_host_of_many_ranks_is_missed_in_the_time_that_the_limits_name() -> None:
    missed = missed_by_its_leader(MANY_RANKS)
    assert missed - 2 * USUAL.beat > 2 * USUAL.unheard
    assert missed + USUAL.hold_down + USUAL.beat / 2 <= (0.6 * 2 + 0.55) * USUAL.heartbeat


@pytest.mark.parametrize(("shard", "each"), [(0, 1), (1, 2)])
def test_a_rank_of_many_gives_its_leader_a_sign_of_life_every_second_beat(shard: int, each: int) -> None:
    """And misses the leader in twice the time."""
    node = RankNode(0, shard, address(0, shard), USUAL, 2, MANY_RANKS)
    node.up_opened()
    beat = 0
    while not any(isinstance(x.message, m.Heartbeat) and x.message.divided for x in node.beat(beat * USUAL.beat)):
        beat += 1
        assert beat < 40
    assert each * 5 <= beat <= each * 6 + 1
    again = RankNode(0, shard, address(0, shard), USUAL, 2, MANY_RANKS)
    given = [len(again.beat(beat * USUAL.beat)) for beat in range(6)]
    assert given == [1, 0, 1, 0, 1, 0] if each == 2 else given == 6 * [1]


def test_a_sign_of_life_costs_no_look_at_all_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica of thousands of ranks that wait to join would look at each for each."""
    made = Leader(0, "life-0", 3, Timeouts.derive(120.0, 10.0))
    for rank in range(3):
        made.from_rank(rank, m.Hello(rank, address(0, rank)))
        made.from_rank(rank, m.Ready(1))
    monkeypatch.setattr(Leader, "_ready_in", property(lambda self: pytest.fail("it looks at all")))
    assert [made.from_rank(rank, m.Heartbeat(-1)) for rank in range(3)] == [[], [], []]
