"""Growth under fire: replicas join, catch up and leave while others die and the coordinator comes and goes.

In the tests of all points a joiner (or a member) is stopped just before a named point of `points.py`, something happens
to it or to the others, and it goes on. Whatever it is, `finish` then holds the whole job against the promises.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import ftcomm
from ftcomm.control.server import ServerError
from ftcomm.control.timeouts import Timeouts

from .bodies import PAUSE
from .job import DEADLINE, SILENCE, Job, Notes, fewer
from .rank_points import CATCHING_UP, CHANGING, JOINING, Points, watch_points
from .test_faults import PATIENCE, _members, _until, go_on, steps_of
from .test_kills import ENDLESS, SEED, check
from .training import train

pytestmark = pytest.mark.protocol

ALL = {0, 1, 2}
JOINER = 2


def job(folder: Path, replicas: int = 3, **settings: Any) -> Job:
    arguments: dict[str, Any] = dict(body=train, steps=ENDLESS, pace=PAUSE, prepare=watch_points, transport="shm")
    return Job(folder, replicas=replicas, **{**arguments, **settings})


def begin(running: Job) -> None:
    """Until all have trained a little."""
    everybody = set(range(running.replicas))
    running.wait_contributing(everybody)
    go_on(running, everybody, 2)


# -- what must hold ----------------------------------------------------------------------------------------------------


Excused = Callable[[int, int, str], bool]  # (replica, rank, text) of an error that is none


def finish(running: Job, replicas: set[int], excused: Excused = lambda *error: False) -> None:
    """Wait until all of them contribute, drain, and hold what was written down against the promises."""
    running.wait_contributing(replicas)
    go_on(running, replicas)
    running.drain()
    for replica in replicas:
        assert running.join(replica) == [0] * running.ranks, running.errors()
    hold_to_promises(running, excused)
    for rank in range(running.ranks):
        last = {
            r: note for r, of, note in running.notes() if of == rank and note["kind"] == "final"
        }  # of its last life
        assert set(last) >= replicas
        states = {last[replica]["digest"] for replica in replicas}
        assert len(states) == 1, f"seed {SEED}: the states differ: {last}"


def hold_to_promises(running: Job, excused: Excused = lambda *error: False) -> None:
    hold_at_every_step(running, excused)
    epochs = stored_epochs(running)
    assert epochs == sorted(set(epochs)), f"seed {SEED}: an epoch was used twice: {epochs}"
    assert not [event for event in running.events if event["kind"] == "failed"]


def hold_at_every_step(running: Job, excused: Excused = lambda *error: False) -> None:
    unexpected = [error for error in running.errors() if not excused(*error)]
    assert not unexpected, f"seed {SEED}: {unexpected}"
    steps = check(running)
    for step, notes in steps.items():
        for rank in {key % 100 for key in notes}:
            here = [note for key, note in notes.items() if key % 100 == rank]
            earlier = [note for key, note in steps.get(step - 1, {}).items() if key % 100 == rank]
            may = {replica for note in here for replica in note["before"]}
            may |= {replica for note in earlier for replica in note["after"]}  # lost before anybody has looked
            now = {replica for note in here for replica in note["after"]}
            if not may & now:  # all who contributed are lost, so who has caught up does at once, and ends the op
                may |= now
            later = [note for key, note in steps.get(step + 1, {}).items() if key % 100 == rank]
            # In a change `after` may come late, or the op may be of who contributed before.
            changed = any(set(note["before"]) != set(note["after"]) for note in here)
            calm = later and not changed and len({note["epoch"] for note in here + later}) == 1
            must = set.intersection(*(set(note["after"]) for note in here)) if calm else set()
            for _, _, replicas in here[0]["spans"]:
                assert must <= set(replicas) <= may, f"seed {SEED}: step {step} is of {replicas}: {notes}"
            states = {note["digest"] for note in here if note["digest"]}
            assert len(states) <= 1, (
                f"seed {SEED}: after step {step} the states of those who contribute differ: {notes}"
            )


def stored_epochs(running: Job) -> list[int]:
    return [json.loads(line)["epoch"] for line in (running.folder / "views").read_bytes().splitlines()]


# -- what happens ------------------------------------------------------------------------------------------------------


def wait_there(running: Job, points: Points, replica: int, point: str) -> None:
    for _ in _until(lambda: points.there(replica), f"seed {SEED}: replica {replica} never came to {point!r}"):
        pass


def wait_without(running: Job, replica: int, seen: int) -> None:
    running.wait_event(
        f"view without {replica}",
        lambda events: any(e["kind"] == "view" and replica not in _members(e) for e in events[seen:]),
    )


def wait_back(
    running: Job, replicas: set[int], joiners: Iterable[int], since: int = 0, seconds: float = PATIENCE
) -> set[int]:
    """Wait until `replicas` contribute; returns which of `joiners` had to be started again. If a member is lost, or the
    coordinator is away, while ranks of a joiner run in its first view already, and no replica is known to run there as
    a whole, that view is given up. The joiner then ends, and is started again as a launcher would: it has no place in
    the next view, since the others may be steps ahead of its script."""
    anew = set[int]()

    def back() -> bool:
        for joiner in joiners:
            if not any(running.processes[joiner, rank].is_alive() for rank in range(running.ranks)):
                assert running.join(joiner) == [1] * running.ranks, running.errors()
                running.start(joiner)
                anew.add(joiner)
        return running.contribute(replicas, since)

    for _ in _until(back, f"seed {SEED}: not all of {replicas} contribute", seconds):
        pass
    return anew


def ran_too_early(joiner: int) -> Excused:
    """Errors of a joiner that ends in this way are none."""
    said = f"RemovedError: the job went on without replica {joiner} in epoch ", f"RemovedError: replica {joiner} cannot"
    return lambda replica, _, text: replica == joiner and text.startswith(said)


def lose(running: Job, replica: int, rank: int | None = None) -> None:
    """Kill it, and wait until the others know."""
    seen = len(running.events)
    running.kill(replica, rank)
    wait_without(running, replica, seen)


def wait_dead(running: Job, replica: int) -> None:
    running.processes[replica, 0].join(30)
    assert running.processes[replica, 0].exitcode == -signal.SIGKILL
    for rank in range(1, running.ranks):
        running.processes[replica, rank].kill()


def restart_coordinator(running: Job) -> None:
    running.stop_coordinator()
    running.start_coordinator()


def shuffled(points: tuple[str, ...]) -> list[str]:
    print(f"seed {SEED}")
    return random.Random(SEED).sample(points, len(points))


# -- what was in force stays in force ----------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", [(1,), (1, 2)], ids=["one other", "all others"])
def test_a_change_that_was_in_force_outlives_the_coordinator(tmp_path: Path, victims: tuple[int, ...]) -> None:
    """Replica 0 came back and contributes. Then the coordinator dies, and others with it: 0 is what it was."""
    with job(tmp_path, heartbeat_timeout=SILENCE) as running:
        begin(running)
        lose(running, 0)
        seen = len(running.events)
        running.start(0)
        running.wait_contributing(ALL, since=seen)
        go_on(running, ALL)
        running.stop_coordinator()
        for victim in victims:
            running.kill(victim)
        seen = len(running.events)
        running.start_coordinator()
        left = ALL - set(victims)
        running.wait_event("the loss", lambda events: any(_members(e) == sorted(left) for e in events[seen:]))
        views = [event for event in running.events[seen:] if event["kind"] == "view"]
        assert all(member["contributing"] for view in views for member in view["members"]), views
        finish(running, left)


# -- every point -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "ranks", "points_of_all"),
    [("shm", 1, None), pytest.param("tcp", 1, 7, marks=pytest.mark.sweep), ("shm", 2, 5)],
)
def test_a_joiner_that_dies_at_every_point_of_its_joining(
    tmp_path: Path, transport: str, ranks: int, points_of_all: int | None
) -> None:
    """Over TCP, and of two ranks each: at some points, as all take long."""
    points = Points(tmp_path)
    with job(tmp_path, transport=transport, ranks=ranks) as running:
        begin(running)
        lose(running, JOINER)
        for point in shuffled(JOINING + CATCHING_UP)[:points_of_all]:
            points.die(JOINER, point)
            running.start(JOINER)
            wait_there(running, points, JOINER, point)
            wait_dead(running, JOINER)
            go_on(running, {0, 1}, 2)
        running.start(JOINER)
        finish(running, ALL, lambda replica, rank, _: (replica, rank) == (JOINER, 1))  # it outlived its shard 0


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_coordinator_that_is_restarted_at_every_point_of_a_joining(tmp_path: Path, half: int) -> None:
    """A half of the points each, chosen at random; at every second one the joiner dies while it is away."""
    points = Points(tmp_path)
    with job(tmp_path) as running:
        begin(running)
        lose(running, JOINER)
        for number, point in enumerate(shuffled(JOINING + CATCHING_UP)[half::2]):
            seen = len(running.events)
            points.hold(JOINER, point)
            running.start(JOINER)
            wait_there(running, points, JOINER, point)
            running.stop_coordinator()
            if number % 2:
                running.kill(JOINER)
            running.start_coordinator()
            points.release(JOINER)
            if number % 2 == 0:
                running.wait_contributing(ALL, since=seen)
                go_on(running, ALL, 2)
                lose(running, JOINER)
        running.start(JOINER)
        finish(running, ALL)


def test_a_member_that_dies_at_every_point_of_a_change(tmp_path: Path) -> None:
    """Of two members, while a third joins: before its promise, between that and the commit, at the boundary, after."""
    points = Points(tmp_path)
    with job(tmp_path) as running:
        begin(running)
        lose(running, JOINER)
        for point in shuffled(CHANGING):
            seen = len(running.events)
            points.die(1, point)
            running.start(JOINER)
            wait_there(running, points, 1, point)
            wait_dead(running, 1)
            wait_without(running, 1, seen)
            running.start(1)
            wait_back(running, ALL, (JOINER,), seen)
            lose(running, JOINER)
        running.start(JOINER)
        finish(running, ALL, ran_too_early(JOINER))


@pytest.mark.parametrize(
    "leaves",
    [pytest.param(False, marks=pytest.mark.sweep), True],
    ids=["another dies", "another leaves and a third dies"],
)
def test_a_loss_at_every_point_of_a_change(tmp_path: Path, leaves: bool) -> None:
    """One member is held in the middle of the change, so that it goes no further, while another is killed."""
    points = Points(tmp_path)
    with job(tmp_path, replicas=4) as running:
        begin(running)
        if not leaves:
            lose(running, 3)
        for point in shuffled(CHANGING):
            seen = len(running.events)
            points.hold(0, point)
            if leaves:
                (tmp_path / "leave-3").touch()
            else:
                running.start(3)
            wait_there(running, points, 0, point)
            lose(running, 1)
            points.release(0)
            if leaves:  # the view without the dead one may come while it is still under way, and is without it, too
                assert running.join(3) in ([0], [1]), running.errors()
                wait_without(running, 3, seen)
                running.start(3)
            running.start(1)
            wait_back(running, {0, 1, 2, 3}, (3,), seen)
            if not leaves:
                lose(running, 3)
        if not leaves:
            running.start(3)
        finish(running, {0, 1, 2, 3}, ran_too_early(3))


# -- several at a time -------------------------------------------------------------------------------------------------


def test_two_joins_at_once(tmp_path: Path) -> None:
    """The second comes when the first has come to some point, and dies, or the first does."""
    points = Points(tmp_path)
    with job(tmp_path, replicas=4) as running:
        begin(running)
        for number, point in enumerate(shuffled(JOINING + CATCHING_UP)[:6]):
            running.kill(2)
            lose(running, 3)
            seen = len(running.events)
            points.hold(2, point)
            running.start(2)
            wait_there(running, points, 2, point)
            running.start(3)
            running.wait_event("second joiner", lambda events, seen=seen: _joined(events[seen:], 3))  # type: ignore[misc]
            if number % 3:
                victim = 2 if number % 3 == 1 else 3
                running.kill(victim)
                running.start(victim)
            points.release(2)
            running.wait_contributing({0, 1, 2, 3}, since=seen)
        finish(running, {0, 1, 2, 3})


def _joined(events: list[dict[str, Any]], replica: int) -> bool:
    return any(e["kind"] == "joined" and e["replica"] == replica for e in events)


def test_everything_at_random(tmp_path: Path) -> None:
    """Replicas die and come, the coordinator goes and comes, at moments that a seed chooses."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    away, dead = False, set[int]()
    with job(tmp_path, replicas=4, pace=0.005) as running:  # many of the moments fall into an op
        begin(running)
        for _ in range(fewer(40)):
            what = rng.choice(["coordinator", "replica", "replica", "rest", "rest"])
            if what == "coordinator":
                (running.start_coordinator if away else running.stop_coordinator)()
                away = not away
            elif what == "replica":
                replica = rng.choice([1, 2, 3])  # 0 keeps the state of the training
                if replica in dead:
                    running.start(replica)
                    dead.discard(replica)
                else:
                    running.kill(replica)
                    running.processes[replica, 0].join(30)
                    dead.add(replica)
            _pause(rng.uniform(0.0, 0.15))
        if away:
            running.start_coordinator()
        for replica in dead:
            running.start(replica)
        wait_back(running, {0, 1, 2, 3}, (1, 2, 3))
        finish(running, {0, 1, 2, 3}, lambda _, __, text: text.startswith("RemovedError"))


def _pause(seconds: float) -> None:
    time.sleep(seconds)  # no synchronisation: the moment is what is random


def test_a_join_waits_for_a_step_that_is_longer_than_the_heartbeat_timeout(tmp_path: Path) -> None:
    """The joiner is in the view, and knows it, while the others still compute and have not heard of it."""
    with job(tmp_path, pace=4.0, heartbeat_timeout=2.6, op_timeout=8.0) as running:
        running.wait_contributing(ALL)
        go_on(running, ALL, 1)
        lose(running, JOINER)
        seen = len(running.events)
        running.start(JOINER)
        running.wait_contributing(ALL, since=seen)
        assert not [e for e in running.events[seen:] if "lost" in e.get("why", "")]


# -- a script that takes its time ------------------------------------------------------------------------------------


def prepare_slowly(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """`train`, but a joiner builds its model for as long as `go` is not there; of two ranks one after the other."""
    if not group.contributes:
        notes.write(
            kind="builds", roster=list(group.roster), members=list(group.members), contributes=group.contributes
        )
        marks = Path(arguments["marks"])
        wait_for(marks / f"go-{group.shard}")
        if (marks / f"leave-{group.replica}").exists():
            (marks / f"leave-{group.replica}").unlink()
            group.leave()
    train(group, notes, arguments)


def wait_for(path: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


def builds(running: Job, replica: int) -> list[dict[str, Any]]:
    return [note for r, _, note in running.notes() if r == replica and note["kind"] == "builds"]


def start_building(running: Job) -> int:
    """A joiner whose ranks all build their models; returns how many events there were before."""
    seen = len(running.events)
    running.start(JOINER)
    for _ in _until(lambda: len(builds(running, JOINER)) == running.ranks, "the joiner does not come to its script"):
        pass
    return seen


def views_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == "view"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_nobody_waits_for_a_joiner_that_builds_its_model(tmp_path: Path, ranks: int) -> None:
    """From `init` to its first boundary it is in no view: the others train on as if it were not there, also through a
    loss and with a new coordinator. Of its ranks the slowest counts."""
    with job(tmp_path, body=prepare_slowly, ranks=ranks) as running:
        begin(running)
        lose(running, JOINER)
        seen = start_building(running)
        assert all(note["roster"] == note["members"] == [0, 1, 2] for note in builds(running, JOINER))
        assert not any(note["contributes"] for note in builds(running, JOINER))
        go_on(running, {0, 1}, fewer(40))
        lose(running, 1)
        since = len(running.events)
        restart_coordinator(running)
        running.wait_event("event that says who it is", lambda events: _joined(events[since:], JOINER))
        for rank in range(ranks):
            go_on(running, {0}, fewer(20))
            assert not [event for event in running.events[seen:] if event["kind"] == "ready"]
            (tmp_path / f"go-{rank}").touch()
        running.start(1)
        finish(running, ALL)
        kinds = [event["kind"] for event in running.events]
        early = views_of(running.events[seen : kinds.index("ready")])
        assert [_members(event) for event in early] == [[0]]


@pytest.mark.parametrize("how", ["dies", "leaves", "drain"])
def test_a_joiner_that_goes_while_it_builds_its_model(tmp_path: Path, how: str) -> None:
    """Nobody notices; and but for the first way it ends without an error, after a loop of no steps."""
    with job(tmp_path, body=prepare_slowly) as running:
        begin(running)
        lose(running, JOINER)
        seen = start_building(running)
        if how == "dies":
            running.kill(JOINER)
            assert running.join(JOINER) == [-signal.SIGKILL]
        elif how == "leaves":
            (tmp_path / f"leave-{JOINER}").touch()
            (tmp_path / "go-0").touch()
            assert running.join(JOINER) == [0], running.errors()
        else:
            running.drain()
            assert running.join(0) == running.join(1) == [0], running.errors()
            (tmp_path / "go-0").touch()
            assert running.join(JOINER) == [0], running.errors()
            assert [note["drained"] for r, _, note in running.notes() if note["kind"] == "final"] == [True] * 3
            return
        go_on(running, {0, 1}, fewer(20))
        assert not views_of(running.events[seen:])
        (tmp_path / "go-0").touch()
        running.start(JOINER)
        finish(running, ALL)


# -- leaving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["connected", "known", "queued", "viewed", "agreeing", "said"])
def test_a_drain_while_a_replica_joins(tmp_path: Path, point: str) -> None:
    """Who is not in the job yet is turned away; all others leave at one boundary, with no step lost."""
    points = Points(tmp_path)
    with job(tmp_path) as running:
        begin(running)
        lose(running, JOINER)
        points.hold(JOINER, point)
        running.start(JOINER)
        wait_there(running, points, JOINER, point)
        running.drain()
        running.wait_event("draining", lambda events: any(e["kind"] == "draining" for e in events))
        points.release(JOINER)
        assert running.join(0) == running.join(1) == [0], running.errors()
        codes = running.join(JOINER)
        turned_away = codes == [1]
        if turned_away:
            ((_, _, text),) = running.errors()
            assert "drained" in text
        # "known": it may come again while all leave, and is turned away then. "queued": it may be in a view by now.
        if point not in ("known", "queued"):
            assert turned_away == (point == "connected")
        ends = [note for r, _, note in running.notes() if r != JOINER and note["kind"] == "final"]
        assert len(ends) == 2
        assert all(note["drained"] for note in ends)
        assert len({note["digest"] for note in ends}) == 1
        assert steps_of(running, 0)[-1] == steps_of(running, 1)[-1]
        running.do(running.server.wait_done())
        assert not running.server.failed
        if not turned_away:
            hold_to_promises(running)


def test_who_is_told_to_leave_while_the_coordinator_is_away_leaves_when_it_is_back(tmp_path: Path) -> None:
    with job(tmp_path) as running:
        begin(running)
        running.stop_coordinator()
        (tmp_path / "leave-1").touch()
        for _ in _until(lambda: any(note["kind"] == "leaves" for _, _, note in running.notes()), "it was not told"):
            pass
        go_on(running, ALL, fewer(10))
        seen = len(running.events)
        running.start_coordinator()
        assert running.join(1) == [0], running.errors()
        wait_without(running, 1, seen)
        go_on(running, {0, 2})
        running.start(1)
        finish(running, ALL)


def test_all_are_replaced_one_after_the_other(tmp_path: Path) -> None:
    """A rolling restart: each leaves, and comes back, while the others train on. Nobody is lost."""
    with job(tmp_path) as running:
        begin(running)
        for replica in sorted(ALL):
            seen = len(running.events)
            (tmp_path / f"leave-{replica}").touch()
            assert running.join(replica) == [0], running.errors()
            wait_without(running, replica, seen)
            running.start(replica)
            running.wait_contributing(ALL, since=seen)
        finish(running, ALL)
        assert not [e for e in running.events if e["kind"] == "view" and "lost" in e["why"]], running.events


# -- the coordinator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (dict(timeouts=Timeouts.derive(50.0, 10.0)), "FTCOMM_OP_TIMEOUT"),
        (dict(ranks_per_replica=2, store=None), "FTCOMM_RANKS_PER_REPLICA"),
        (dict(store=None), "no file of views"),
    ],
    ids=["timeouts", "ranks", "file of views"],
)
def test_a_coordinator_that_comes_back_wrong_stops_nobody(tmp_path: Path, mistake: Any, reason: str) -> None:
    """It says what is wrong, and the members, which run in a job that it cannot lead, train on until it is mended."""
    with job(tmp_path) as running:
        begin(running)
        running.stop_coordinator()
        seen = len(running.events)
        running.start_coordinator(**mistake)
        running.wait_event("refusal of all", lambda events: {e["replica"] for e in _refusals(events[seen:])} == ALL)
        assert all(reason in e["reason"] for e in _refusals(running.events[seen:]))
        go_on(running, ALL, fewer(10))
        assert not running.errors()
        assert not [e for e in running.events[seen:] if e["kind"] == "view"]
        running.stop_coordinator()
        running.start_coordinator()
        seen = len(running.events)
        lose(running, 1)
        running.start(1)
        running.wait_contributing(ALL, since=seen)
        finish(running, ALL)


def _refusals(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == "refused"]


def test_a_second_coordinator_of_the_job_refuses(tmp_path: Path) -> None:
    """On the same file, or at the same port, or on the file of another job; the job does not notice."""
    with job(tmp_path) as running:
        begin(running)
        second = running._server(0)
        with pytest.raises(ServerError, match="in use by another coordinator; two of one job must not run"):
            running.do(second.start())
        port = int(running.server.endpoint.rpartition(":")[2])
        third = running._server(port, store=tmp_path / "other-views")
        with pytest.raises(ServerError, match="another coordinator may run there"):
            running.do(third.start())
        running.stop_coordinator()
        with pytest.raises(ServerError, match="is of a job with 1 ranks a replica, not 2"):
            running.start_coordinator(ranks_per_replica=2)
        running.start_coordinator()
        seen = len(running.events)
        lose(running, 1)
        running.start(1)
        running.wait_contributing(ALL, since=seen)
        finish(running, ALL)


def test_a_coordinator_of_its_own_is_killed_while_a_replica_joins(tmp_path: Path) -> None:
    """SIGKILL to `ftcomm coordinator`, which says goodbye to nobody, at some points of a joining."""
    points = Points(tmp_path)
    with job(tmp_path) as running:
        begin(running)
        with running.own_coordinator() as own:
            for life, point in enumerate(shuffled(JOINING + CATCHING_UP)[:3], start=2):
                running.kill(JOINER)
                running.processes[JOINER, 0].join(10)
                go_on(running, {0, 1})
                points.hold(JOINER, point)
                running.start(JOINER)
                wait_there(running, points, JOINER, point)
                own.kill()
                own.start()
                points.release(JOINER)
                for _ in _until(lambda n=life: counts(running, JOINER, n), f"seed {SEED}: it does not contribute"):
                    pass
        running.start_coordinator()
        go_on(running, ALL)
        running.drain()
        for replica in ALL:
            assert running.join(replica) == [0], running.errors()
        hold_to_promises(running)


def counts(running: Job, replica: int, life: int) -> bool:
    """Whether the replica contributes, in that life of it."""
    notes = [note for r, _, note in running.notes() if r == replica]
    return sum(note["kind"] == "joined" for note in notes) == life and bool(notes[-1].get("digest"))
