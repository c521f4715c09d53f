"""The agent of a host, without sockets: what it hands on, what it merges, and what follows when a connection ends."""

from __future__ import annotations

import msgspec
import pytest

from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control.actions import Failed, ToLeader
from ftcomm.control.agent_ranks import agent_ranks
from ftcomm.control.host_agent import EndConnections, HostAgent, HostAgentAction, ToRanks
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_node import LeaderNode
from ftcomm.control.liveness import agent_described
from ftcomm.control.member import Phase
from ftcomm.errors import InitError
from ftcomm.groups.group import _host_agent
from ftcomm.settings import Settings
from tests.rigs.rank_node import TIMEOUTS, address, view

SHARDS = range(2, 5)  # of five ranks
HERE = address(0, 9)
ALL = tuple(SHARDS)


def fresh() -> HostAgent:
    return HostAgent(SHARDS, 5, TIMEOUTS, HERE, "this host")


def greeted(*shards: int) -> HostAgent:
    """These ranks have said hello, and the leader has answered."""
    agent = fresh()
    agent.opened(0.0)
    for shard in shards or ALL:
        agent.from_rank(shard, m.Hello(shard, address(0, shard)))
        agent.from_leader(m.Enclosed((shard,), m.Welcome("life-0", "another host")), 0.0)
    return agent


def up(*shards: int, says: m.Message) -> ToLeader:
    return ToLeader(m.Enclosed(shards, says))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shard", "host_ranks", "ranks", "there"),
    [
        (0, 4, 16, ()),  # the leader is there
        (3, 4, 16, ()),
        (4, 4, 16, (4, 5, 6, 7)),
        (7, 4, 16, (4, 5, 6, 7)),
        (9, 4, 10, (8, 9)),
        (8, 4, 9, ()),  # alone
        (5, 8, 8, ()),  # one host
        (0, 1, 1, ()),
        (5, 1, 8, ()),
        (5, 0, 8, ()),  # nobody has said how many
    ],
)
def test_which_ranks_share_an_agent(shard: int, host_ranks: int, ranks: int, there: tuple[int, ...]) -> None:
    assert tuple(agent_ranks(shard, host_ranks, ranks)) == there


def test_a_hello_goes_up_and_the_answer_names_the_processes_of_this_host() -> None:
    """A rank has a witness unless somebody sees its process: the agent does."""
    agent = fresh()
    assert agent.opened(0.0) == [ToLeader(m.AgentHello(HERE)), EndConnections()]
    hello = m.Hello(3, address(0, 3))
    assert agent.from_rank(3, hello) == [up(3, says=hello)]
    welcome = m.Welcome("life-0", "another host")
    assert agent.from_leader(m.Enclosed((3,), welcome), 0.0) == [ToRanks((3,), m.Welcome("life-0", "this host"))]


def test_what_the_leader_says_goes_to_those_that_it_has_welcomed() -> None:
    """To others it was said over a connection that they have no more; they hear it again after their hello."""
    agent = greeted(2, 3)
    seen = m.NewView(view(1, (0, 1), 5))
    assert agent.from_leader(m.Enclosed(ALL, seen), 0.0) == [ToRanks((2, 3), seen)]
    agent.rank_closed(3)
    assert agent.from_leader(m.Enclosed(ALL, seen), 0.0) == [ToRanks((2,), seen)]
    agent.from_rank(3, m.Hello(3, address(0, 3), "life-0"))
    assert agent.from_leader(m.Enclosed((3,), seen), 0.0) == []


def test_what_all_ranks_say_goes_up_once() -> None:
    agent = greeted()
    assert [agent.from_rank(shard, m.Installed(1)) for shard in ALL] == [[], [], [up(*ALL, says=m.Installed(1))]]
    assert not agent.holds
    agent.from_rank(4, m.Installed(2))
    assert agent.holds
    assert agent.flush() == [up(4, says=m.Installed(2))]


def test_signs_of_life_go_up_once_a_beat_of_those_that_gave_one() -> None:
    agent = greeted()
    first = m.Heartbeat(0)
    assert agent.from_rank(2, first) == [up(2, says=first)], "the first boundary is news"
    assert agent.from_rank(4, m.Heartbeat(6)) == []
    assert agent.from_rank(2, m.Heartbeat(5)) == []
    assert agent.tick(0.5) == [up(2, 4, says=m.Heartbeat(6))]
    assert agent.tick(1.0) == [up(says=m.Heartbeat(6))], "its own"
    other = m.Heartbeat(6, loop=1)
    assert agent.from_rank(3, other) == [up(3, says=other)], "another loop is news"
    deaf = m.Heartbeat(6, divided="does not hear its leader", loop=1)
    agent.from_rank(3, m.Heartbeat(6, loop=1))
    assert agent.from_rank(3, deaf) == [up(3, says=deaf)], "and with the next beat it is as deaf as before"
    assert agent.tick(1.5) == [up(says=m.Heartbeat(6, loop=1))]


def test_a_loss_that_all_ranks_see_goes_up_once_and_no_more_when_a_view_has_settled_it() -> None:
    agent = greeted()
    agent.from_leader(m.Enclosed(ALL, m.NewView(view(1, (0, 1, 2), 5))), 0.0)
    lost = [m.Suspect(1, "life-1", "reset", True, shard) for shard in ALL]
    assert agent.from_rank(2, lost[0]) == [up(2, says=lost[0])]
    assert [agent.from_rank(shard, lost[shard - 2]) for shard in (3, 4)] == [[], []]
    assert agent.tick(0.5)[:-1] == [up(3, says=lost[1]), up(4, says=lost[2])]
    assert [agent.from_rank(shard, lost[shard - 2]) for shard in ALL] == [[], [], []]
    agent.from_leader(m.Enclosed(ALL, m.NewView(view(2, (0, 2), 5))), 0.6)
    assert agent.tick(1.0)[:-1] == []


# -- connections -------------------------------------------------------------------------------------------------------


def test_ranks_are_told_once_that_the_leader_is_lost_and_begin_anew_with_the_next_connection() -> None:
    agent = greeted()
    agent.from_rank(2, m.Installed(1))
    lost = m.LeaderLost("reset")
    assert agent.lost("reset") == [ToRanks(ALL, lost)]
    assert agent.lost("reset") == []
    assert agent.from_rank(3, m.Installed(1)) == []
    assert agent.from_rank(3, m.Hello(3, address(0, 3), "life-0")) == [ToRanks((3,), lost)]
    assert agent.opened(5.0) == [ToLeader(m.AgentHello(HERE, "life-0", 2)), EndConnections()]
    assert agent.flush() == [], "it is said again"
    assert agent.from_rank(3, m.Installed(1)) == [], "its new connection begins with a hello"
    hello = m.Hello(3, address(0, 3), "life-0")
    assert agent.from_rank(3, hello) == [up(3, says=hello)]


def test_a_leader_of_which_nothing_is_heard_is_lost_until_its_kernel_answers() -> None:
    agent = greeted()
    now = 0.0
    told: list[HostAgentAction] = []
    while not told:
        now += TIMEOUTS.beat
        told = [action for action in agent.tick(now) if isinstance(action, ToRanks)]
    assert TIMEOUTS.unheard < now < TIMEOUTS.unheard + 2 * TIMEOUTS.beat
    (lost,) = told
    assert isinstance(lost, ToRanks)
    assert lost == ToRanks(ALL, m.LeaderLost(f"the leader of the replica is silent for {now:.1f} s"))
    agent.acknowledged(now)
    assert EndConnections() in agent.tick(now + TIMEOUTS.beat)
    assert agent.tick(now + 2 * TIMEOUTS.beat) == [up(says=m.Heartbeat(-1))]


def test_a_refusal_is_told_and_ends_ranks_that_have_not_come_to_the_leader() -> None:
    agent = fresh()
    hello = m.Hello(3, address(0, 3))
    assert agent.from_rank(3, hello) == [
        ToRanks((3,), m.LeaderLost("the leader of the replica has not been reached yet"))
    ]
    assert agent.lost("another job", final=True) == [ToRanks((3,), m.Removed("another job"))]
    agent = greeted()
    assert agent.lost("another job", final=True) == [ToRanks(ALL, m.LeaderLost("another job"))]


def test_the_end_of_a_process_goes_up_now_or_as_soon_as_that_can_be() -> None:
    agent = greeted()
    agent.from_rank(2, m.Installed(1))
    agent.rank_closed(3)
    dead = ToLeader(m.RankLost(3, address(0, 3), "it has ended", True))
    assert agent.rank_lost(3, "it has ended") == [up(2, says=m.Installed(1)), dead]
    agent.lost("reset")
    assert agent.rank_lost(4, "too") == []
    assert agent.opened(1.0) == [
        ToLeader(m.AgentHello(HERE, "life-0", 2)),
        dead,
        ToLeader(m.RankLost(4, address(0, 4), "too", True)),
        EndConnections(),
    ]
    assert fresh().rank_lost(3, "too") == [], "nobody knows of it"


def test_what_refuses_connections_to_a_rank_is_no_proof() -> None:
    agent = greeted()
    assert agent.rank_refused(3, "reset") == [ToLeader(m.RankLost(3, address(0, 3), "reset", False))]
    agent.lost("reset")
    assert agent.rank_refused(3, "reset") == []


def test_a_rank_of_another_life_takes_the_place_of_none() -> None:
    agent = greeted()
    welcome = m.Welcome("life-0", "this host")
    assert agent.turned_away(m.Hello(3, address(0, 3), "an earlier life")) == welcome
    assert agent.turned_away(m.Installed(1)) == welcome
    assert agent.turned_away(m.Hello(3, address(0, 3))) is None
    assert agent.turned_away(m.Hello(3, address(0, 3), "life-0")) is None
    assert fresh().turned_away(m.Hello(3, address(0, 3))) is None
    assert fresh().turned_away(m.Hello(3, address(0, 3), "any")) == m.Welcome("", "this host"), "none has one here"


def test_an_agent_of_an_earlier_life_takes_no_other_one_over_and_its_ranks_read_that() -> None:
    agent = greeted()
    other = m.Welcome("life-1", "another host")
    assert agent.from_leader(m.Enclosed(ALL, other), 0.0) == [ToRanks(ALL, other)]
    assert agent.life == "life-0"
    agent.rank_closed(3)
    assert agent.from_rank(3, m.Hello(3, address(0, 3), "life-0")) == [ToRanks((3,), other)]


def test_ranks_hear_that_the_kernel_of_a_leader_answers_that_takes_no_connection() -> None:
    """So it lives, and they wait, as over a connection of their own that it does not take."""
    agent, node, now = greeted(), cut_off(), 0.0
    agent.lost("reset")
    while now < 2 * TIMEOUTS.give_up:
        agent.acknowledged(now)
        now += TIMEOUTS.beat
        (told, _) = agent.tick(now)
        assert told == ToRanks(ALL, m.LeaderLost("reset", answers=True))
        node.from_up(m.LeaderLost("reset", answers=True))
        assert not any(isinstance(action, Failed) for action in node.beat(now))
        assert not node._leaderless
    assert not any(isinstance(action, ToRanks) for action in agent.tick(now)), "it has not answered since"
    agent.lost("refused", refused=True)
    agent.acknowledged(now)
    assert not any(isinstance(action, ToRanks) for action in agent.tick(now))


@pytest.mark.parametrize("shard", [2, 3])
def test_an_agent_at_an_address_of_another_host_is_refused_with_the_mend(shard: int) -> None:
    """A filter in between may refuse connections to it, and that would count as a proof that it has ended."""
    here = dict(shard=shard, ranks_per_replica=4, host_agent="192.0.2.1:29501", host_ranks=2)
    settings = Settings("127.0.0.1:1", "secret", 0, 1, **here)  # type: ignore[arg-type]
    with pytest.raises(InitError, match=f"shard {shard}: .*no address of its host.*set one such as 127.0.0.1:29501"):
        _host_agent(settings)


# -- the rank, and the leader ------------------------------------------------------------------------------------------


def cut_off() -> n.RankNode:
    node = n.RankNode(0, 3, address(0, 3), TIMEOUTS, ranks=5)
    node.up_opened()
    node.from_up(m.Welcome("life-0"))
    node.from_up(m.NewView(view(1, (0, 1), 5)))
    node.beat(0.0)
    assert node.from_up(m.LeaderLost("reset")) == []
    return node


def test_a_rank_whose_agent_does_not_reach_the_leader_takes_no_answer_of_the_agent_for_one_of_the_leader() -> None:
    node, now = cut_off(), 0.0
    while not node._leaderless:
        node.up_acknowledged(now)
        now += TIMEOUTS.beat
        node.beat(now)
        assert now < TIMEOUTS.heartbeat
    assert TIMEOUTS.unheard < now
    assert next(x.message for x in node.up_opened() if isinstance(x, ToLeader)) == m.Hello(3, address(0, 3), "life-0")
    node.beat(now + TIMEOUTS.beat)
    assert not node._leaderless


def test_what_is_not_said_again_waits_for_the_leader() -> None:
    """Said to an agent that does not reach it, it would be lost."""
    node = cut_off()
    back = m.Reachable(1)
    assert node.tell(back) == []
    assert ToLeader(back) in node.up_opened()


@pytest.mark.parametrize("here", [False, True])
def test_a_port_of_the_leader_that_refuses_proves_its_end_on_its_own_host_alone(here: bool) -> None:
    node = n.RankNode(0, 3, address(0, 3), TIMEOUTS, ranks=5)
    node.up_opened()
    node.from_up(m.Welcome("life-0"))
    node.from_up(m.NewView(view(1, (0, 1), 5)))
    node.view = view(1, (0, 1), 5)
    assert bool(node.from_up(m.LeaderLost("refused", True, here))) is here
    assert node.leader_ended


def test_a_rank_that_has_left_does_not_fail_with_its_agent() -> None:
    node = cut_off()
    node.machine.phase = Phase.LEFT
    assert node.host_agent_ended("refused") == []
    node = cut_off()
    assert any(isinstance(action, Failed) for action in node.host_agent_ended("refused"))


def test_a_leader_names_an_agent_that_lives_and_says_nothing() -> None:
    """Its kernel answers for all ranks there, and none of them is heard."""
    leader = LeaderNode(0, "life-0", 5, TIMEOUTS)
    for shard in range(5):
        leader.from_rank(shard, m.Hello(shard, address(0, shard)), 0.0)
    leader.opened()
    leader.from_coordinator(m.NewView(view(1, (0, 1), 5)))
    leader.agent_heard(SHARDS, 0.0)
    now, mute = 0.0, ""
    while not mute and now < TIMEOUTS.give_up:
        now += TIMEOUTS.beat
        for shard in (0, 1):
            leader.from_rank(shard, m.Heartbeat(1), now)
        leader.agent_acknowledged(SHARDS, now)
        (looks,) = [
            x.message for x in leader.tick(now) if isinstance(x, ToCoordinator) and isinstance(x.message, m.Heartbeat)
        ]
        assert not looks.divided
        mute = looks.mute
    assert mute == agent_described(SHARDS, now)
    assert mute.startswith("the host agent of its shards 2 to 4, a process beside shard 2, lives but has not spoken")


def test_a_leader_takes_the_end_of_a_process_from_its_agent_as_from_its_own_kernel() -> None:
    leader = LeaderNode(0, "life-0", 5, TIMEOUTS)
    leader.opened()
    for shard in range(5):
        leader.from_rank(shard, m.Hello(shard, address(0, shard)), 0.0)
    leader.from_coordinator(m.NewView(view(1, (0, 1), 5)))
    actions = leader.from_rank(3, m.Finished(False, "its process 7 has ended"), 1.0)
    text = "its shard 3 is lost: its process 7 has ended"
    assert ToCoordinator(m.Suspect(0, "life-0", text, True)) in actions
    assert ToRank(4, m.Removed(f"replica 0 cannot go on: {text}")) in actions


def test_an_enclosed_message_is_one_on_the_way_and_none_in_another() -> None:
    inner = m.NewView(view(1, (0, 1)))
    data = m.encode_enclosed((2, 3), m.encode(inner))
    assert m.decode(data) == m.Enclosed((2, 3), inner)
    with pytest.raises(msgspec.DecodeError):
        m.decode(m.encode_enclosed((2,), data))
