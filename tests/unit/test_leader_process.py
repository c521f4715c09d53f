"""The leader of a replica of several ranks and its shard 0, which are two processes: what they say again, and how one
ends with the other."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from ftcomm.control import actions as act
from ftcomm.control import messages as m
from ftcomm.control import rank_node as n
from ftcomm.control import wire
from ftcomm.control.companion import Companion
from ftcomm.control.control_thread import ControlThread
from ftcomm.control.leader import ToCoordinator, ToRank
from ftcomm.control.leader_node import NOT_ALL, LeaderNode
from ftcomm.control.links import listen
from tests.rigs.control_threads import CREDENTIALS, Job
from tests.rigs.leader import Led
from tests.rigs.rank_node import TIMEOUTS, address, view
from tests.rigs.stopped_processes import DEADLINE, until

P = 7  # a proposal


def hello(rank: int, life: str = "") -> m.Hello:
    return m.Hello(rank, address(0, rank), life)


def leader(*here: int) -> LeaderNode:
    made = LeaderNode(0, "life-0", 2, TIMEOUTS)
    for rank in here:
        made.from_rank(rank, hello(rank), 0.0)
    return made


def at_a_boundary() -> LeaderNode:
    """Its ranks stand there, and it waits for the leader of replica 1."""
    made = leader(0, 1)
    made.opened()
    made.from_coordinator(m.NewView(view(1, (0, 1), 2)))
    made.from_coordinator(m.Prepare(P, 1, 3))
    for rank in (0, 1):
        made.from_rank(rank, m.Promise(P, True, 2), 0.0)
    for rank in (0, 1):
        made.from_rank(rank, m.AtBoundary(P), 0.0)
    return made


# -- what is said again over a new connection --------------------------------------------------------------------------


def test_rank_0_is_told_again_for_whom_its_leader_waits_and_what_that_says_to_others() -> None:
    made = at_a_boundary()
    waits = ToRank(0, m.BoundaryWaits((1,)))
    assert waits in made.from_rank(0, hello(0, "life-0"), 1.0)
    assert waits not in made.from_rank(1, hello(1, "life-0"), 1.0)
    said = m.Boundary(0, 1, P, None)
    assert made.from_rank(0, m.Linked(1), 1.0) == [ToRank(0, m.ForLeader(1, said))]
    assert made.from_rank(1, m.Linked(1), 1.0) == []


def test_rank_0_is_told_again_that_all_have_finished() -> None:
    made = leader(0, 1)
    for rank in (0, 1):
        told = made.from_rank(rank, m.Finished(True), 0.0)
    assert ToRank(0, m.AllFinished()) in told
    assert ToRank(0, m.AllFinished()) in made.from_rank(0, hello(0, "life-0"), 1.0)


@pytest.mark.parametrize("shard", [0, 1])
def test_rank_0_says_again_what_other_leaders_have_said_and_where_it_has_links(shard: int) -> None:
    """Of an earlier view nothing: no leader is in that any more."""
    node = n.RankNode(0, shard, address(0, shard), TIMEOUTS)
    node.up_opened()
    node.from_up(m.Welcome("life-0"))
    node.from_up(m.NewView(view(1, (0, 1, 2), 2)))
    for replica in (1, 2):
        node.from_peer(m.Boundary(replica, 1, P, None), 0.0)
    again = [action.message for action in node.up_opened() if isinstance(action, act.ToLeader)]
    said = [*(m.Boundary(replica, 1, P, None) for replica in (1, 2)), m.Linked(1), m.Linked(2)]
    assert again[1:] == (said if shard == 0 else [])
    node.from_up(m.NewView(view(2, (0, 1), 2)))
    again = [action.message for action in node.up_opened() if isinstance(action, act.ToLeader)]
    assert again[1:] == ([m.Linked(1)] if shard == 0 else [])


def test_rank_0_takes_what_was_said_before_a_reset_for_nothing() -> None:
    """Its leader may wait for nobody by now, and has told it so over the connection that broke."""
    node = n.RankNode(0, 0, address(0, 0), TIMEOUTS)
    node.from_up(m.BoundaryWaits((1,), (1,)))
    assert node.not_come()
    node.up_opened()
    assert not node.not_come()


# -- news of the coordinator -------------------------------------------------------------------------------------------


def test_ranks_that_are_in_no_view_hear_why_there_is_no_coordinator() -> None:
    made, news = leader(0), m.Queued("nobody listens there")
    assert made.lost(news) == [ToRank(0, news), ToRank(1, news)]
    assert made.lost(news) == [], "it is said once"
    assert made.from_rank(1, hello(1), 0.0)[-1] == ToRank(1, news)
    made.opened()
    assert ToRank(1, news) not in made.from_rank(1, hello(1, "life-0"), 0.0)
    made.from_coordinator(m.NewView(view(1, (0, 1), 2)))
    assert made.lost(news) == [], "a replica that trains does without"


def test_rank_0_hears_that_others_have_not_started() -> None:
    made = leader()
    made.opened()
    assert made.from_rank(0, hello(0), 0.0)[-1] == ToRank(0, NOT_ALL)
    assert [action for action in made.from_rank(1, hello(1), 0.0) if isinstance(action, ToCoordinator)]
    assert made.from_rank(0, hello(0, "life-0"), 0.0)[-1] != ToRank(0, NOT_ALL)


def test_a_refusal_ends_ranks_that_wait_and_none_that_train() -> None:
    made = leader(0, 1)
    assert made.refused("another job") == [ToRank(rank, m.Removed("another job")) for rank in (0, 1)]
    made = leader(0, 1)
    made.from_coordinator(m.NewView(view(1, (0, 1), 2)))
    assert made.refused("another job") == []


def test_all_ranks_hear_that_the_coordinator_is_of_another_job() -> None:
    job = Job(1, 2)
    other = type(CREDENTIALS)(CREDENTIALS.token, "another job")
    made = Led(job.coordinator, other, TIMEOUTS)
    try:
        until(lambda: made.process.driver.up.refused is not None)
        assert "it is of the job 'another job'" in str(made.process.driver.up.refused)
        until(lambda: "Removed" in made.process.node.leader._given)
    finally:
        made.close()
        job.close()


# -- one begins and ends with the other --------------------------------------------------------------------------------


def test_a_process_beside_a_rank_finds_modules_where_that_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may have extended its path."""
    script = "from ftcomm.control.companion import become_companion, begin\nbegin(become_companion()[0])\n"
    (tmp_path / "beside.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    companion = Companion("beside", b"its config", (), os.environ)
    assert asyncio.run(companion.begun()) == ""
    companion.dismiss()


def two_control_threads(job: Job, led: Led) -> list[ControlThread]:
    controls = [job.control_thread(0, rank, led.address) for rank in range(2)]
    for one in controls:
        one.register(DEADLINE)
    return controls


@pytest.mark.parametrize("said", [False, True], ids=["", "and has said why"])
def test_a_leader_tells_all_that_rank_0_has_ended_after_what_that_has_said_last(said: bool) -> None:
    job = Job(1, 2)
    try:
        led = job.led()
        controls = two_control_threads(job, led)
        if said:
            controls[0].give_up("it has no data")
        ending = threading.Thread(target=controls[0].stop)
        ending.start()
        led.close(well=False)
        ending.join(DEADLINE)
        until(lambda: isinstance(controls[1]._control.failed, act.Failed))
        why = "it has no data" if said else f"its process {led.process._config.pid} has ended"
        assert controls[1]._control.failed is not None
        assert controls[1]._control.failed.reason == f"replica 0 cannot go on: its shard 0 is lost: {why}"
        until(lambda: bool(job.events_of("suspect")))
        assert job.events_of("suspect")[0]["reason"] == f"its shard 0 is lost: {why}"
    finally:
        job.close()


def test_a_rank_0_that_ends_as_it_should_is_no_loss() -> None:
    job = Job(1, 2)
    try:
        led = job.led()
        controls = two_control_threads(job, led)
        ends = [threading.Thread(target=one.finish, args=(DEADLINE,)) for one in controls]
        for end in ends:
            end.start()
        for end in ends:
            end.join(DEADLINE)
        controls[0].stop()
        led.close()
        assert not job.events_of("suspect", "failed")
    finally:
        job.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_of_a_new_coordinator_goes_through_a_rank(rank: int) -> None:
    """Whose address it knows. Rank 0 may be held."""
    job = Job(1, 2)
    nowhere = listen("127.0.0.1", 0)
    try:
        led = job.led()
        controls = two_control_threads(job, led)
        there = nowhere.getsockname()
        until(lambda: led.process.driver.up.link.is_up)  # type: ignore[union-attr]
        led.process.driver.up.link._opened_at -= 10.0  # type: ignore[union-attr]
        here = controls[rank].address
        wire.connect((here.host, here.port), CREDENTIALS, "coordinator", {"port": there[1]}, DEADLINE).close()
        until(lambda: led.process.driver.up.link.address == there)  # type: ignore[union-attr]
    finally:
        job.close()
        nowhere.close()
