"""The promises over NIXL: kills in the middle of ops, joins, and a member that is stopped with puts under way, or with
notifications that it does not take."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from tests.rigs import nixl_queues

from . import torn_puts
from .bodies import PAUSE, reduce_forever, reduce_fresh
from .job import STALL, Job, Notes
from .test_fencing import VICTIM, disturbed, go_on, kinds, set_aside, wait_lost, wait_stopped, wake
from .test_kills import ENDLESS, SEED, check

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")
pytestmark = pytest.mark.protocol

ELEMENTS = 300_001  # three chunks, in puts; the last is cut where nothing divides
KILLS = 3


def test_kills_and_joins(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    everybody = set(range(3))
    settings: dict[str, Any] = dict(transport="nixl", elements=ELEMENTS, steps=ENDLESS, pause=0.0)
    with Job(tmp_path, replicas=3, body=reduce_forever, **settings) as job:
        job.wait_contributing(everybody)
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.0, 0.05))
            seen = len(job.events)
            victim = rng.randrange(3)
            job.kill(victim)
            lost = set(everybody - {victim})
            job.wait_event(f"view without {victim}", lambda events, seen=seen, left=lost: _has(events[seen:], left))  # type: ignore[misc]
            job.start(victim)
            job.wait_contributing(everybody, since=seen)
        job.drain()
        for replica in everybody:
            assert job.join(replica) == [0]
        assert not job.errors()
        assert len(check(job)) > KILLS


def test_who_was_not_killed_can_put_on(tmp_path: Path) -> None:
    """The survivors of several losses, with puts under way to the dead, in memory that is always another."""
    victim, survivors = 2, {0, 1}
    with Job(tmp_path, replicas=3, body=reduce_fresh, transport="nixl", elements=1_500_000, steps=ENDLESS) as job:
        job.wait_contributing({0, 1, 2})
        for _ in range(KILLS):
            seen = len(job.events)
            job.kill(victim)
            job.wait_event("loss", lambda events, seen=seen: _has(events[seen:], survivors))  # type: ignore[misc]
            job.start(victim)
            job.wait_contributing({0, 1, 2}, since=seen)
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0]
        lost = [event["why"] for event in job.events if event["kind"] == "view" and "lost" in (event["why"] or "")]
        assert len(lost) == KILLS, lost
        assert all(why.startswith(f"lost {victim}: ") for why in lost), lost
        assert not job.errors()
        results: dict[int, set[int]] = {}
        for *_, note in job.notes():
            if note["kind"] == "fresh":
                results.setdefault(note["step"], set()).add(note["crc"])
        assert len(results) > KILLS
        assert all(len(crcs) == 1 for crcs in results.values())


def reduce_and_die(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """At some step the victim dies while it tells each of the others something, in any of their queues."""
    array = np.empty(arguments["elements"], np.float32)
    for step in ftcomm.steps(arguments["steps"]):
        if group.replica == VICTIM and (Path(arguments["marks"]) / "die").exists():
            ours = nixl_queues.own()
            for inode, head in nixl_queues.queues().items():
                if inode not in ours:
                    nixl_queues.claim(head)
            os.kill(os.getpid(), signal.SIGKILL)
        array[:] = 2.0**group.replica
        time.sleep(PAUSE)
        group.allreduce(array)
        notes.write(kind="step", step=step, whole=True, crc=zlib.crc32(array.view(np.uint8).data), spans=[])


def test_killed_while_it_tells_the_others_something(tmp_path: Path) -> None:
    """By UCX they hear nothing any more, of anybody. Nobody but the dead is removed, and it comes back."""
    how: dict[str, Any] = dict(transport="nixl", elements=ELEMENTS, steps=ENDLESS)
    with Job(tmp_path, replicas=3, body=reduce_and_die, **how) as job:
        job.wait_contributing({0, 1, 2})
        go_on(job, 20, (0, 1, 2))
        for _ in range(2):
            seen = len(job.events)
            (tmp_path / "die").touch()
            job.wait_event("loss", lambda events, seen=seen: _has(events[seen:], {0, 2}))  # type: ignore[misc]
            (tmp_path / "die").unlink()
            go_on(job, 20)
            job.start(VICTIM)
            job.wait_contributing({0, 1, 2}, since=seen)
            go_on(job, 20, (0, 1, 2))
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0]
        lost = [event["why"] for event in job.events if event["kind"] == "view" and "lost" in (event["why"] or "")]
        assert len(lost) == 2, lost
        assert all(why.startswith(f"lost {VICTIM}: ") for why in lost), lost
        assert not job.errors()
        check(job)


def reduce_and_go_deaf(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """At some step somebody who is no member dies while it tells the victim something."""
    array = np.empty(arguments["elements"], np.float32)
    mark = Path(arguments["marks"]) / "deaf"
    for step in ftcomm.steps(arguments["steps"]):
        if group.replica == VICTIM and mark.exists():
            ours = nixl_queues.own()
            for inode, head in nixl_queues.queues().items():
                if inode in ours:
                    nixl_queues.claim(head)
            mark.unlink()
        array[:] = 2.0**group.replica
        time.sleep(PAUSE)
        group.allreduce(array)
        notes.write(kind="step", step=step, whole=True, crc=zlib.crc32(array.view(np.uint8).data), spans=[])


def test_somebody_else_is_killed_while_it_tells_a_member_something(tmp_path: Path) -> None:
    """The member hears nothing any more, though nobody makes a connection. All go on, and nobody is removed."""
    how: dict[str, Any] = dict(transport="nixl", elements=ELEMENTS, steps=ENDLESS)
    with Job(tmp_path, replicas=3, body=reduce_and_go_deaf, **how) as job:
        job.wait_contributing({0, 1, 2})
        go_on(job, 20, (0, 1, 2))
        for _ in range(2):
            (tmp_path / "deaf").touch()
            go_on(job, 20, (0, 1, 2))
            assert not (tmp_path / "deaf").exists()
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0]
        assert not [event["why"] for event in job.events if event["kind"] == "view" and "lost" in (event["why"] or "")]
        assert not job.errors()
        check(job)


def _has(events: list[dict[str, Any]], members: set[int]) -> bool:
    return any(e["kind"] == "view" and {x["replica"] for x in e["members"]} == members for e in events)


def reduce_and_count(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Many small ops at a time; notes the most frames that one member was told since it was heard last."""
    from ftcomm.transport.nixl import frames
    from ftcomm.transport.nixl.agent import NixlEndpoint

    tell, arrive = NixlEndpoint.tell, NixlEndpoint._arrive
    told: dict[str, int] = {}
    most = 0

    def counted(self: NixlEndpoint, remote: Any, message: bytes) -> None:
        nonlocal most
        name = remote.names[0]
        told[name] = told.get(name, 0) + len(frames.unpack(message))
        if told[name] > most:
            most = told[name]
            notes.write(kind="told", most=most)
        tell(self, remote, message)

    def heard(self: NixlEndpoint, name: str, *what: Any) -> None:
        told[name] = 0
        arrive(self, name, *what)

    NixlEndpoint.tell, NixlEndpoint._arrive = counted, heard  # type: ignore[method-assign]
    arrays = [np.empty(elements, np.float32) for elements in (100, 2_000, 9_000, ELEMENTS) * 50]
    for step in ftcomm.steps(arguments["steps"]):
        time.sleep(PAUSE)
        for array in arrays:
            array[:100] = 2.0**group.replica
        for work in [group.allreduce(array, async_op=True) for array in arrays]:
            work.wait()
        notes.write(kind="step", step=step)


@pytest.mark.sweep
def test_who_is_stopped_is_told_no_more_than_all_slots_hold(tmp_path: Path) -> None:
    """However many ops are called: of a peer that ends with a full queue UCX keeps what it had mapped."""
    from ftcomm.transport.nixl import frames

    with Job(tmp_path, replicas=3, body=reduce_and_count, transport="nixl", **STALL, steps=ENDLESS) as job:
        job.wait_contributing({0, 1, 2})
        go_on(job, 2, (0, 1, 2))
        seen = len(job.events)
        job.signal(VICTIM, signal.SIGSTOP)
        wait_lost(job, seen)
        job.kill(VICTIM)
        job.start(VICTIM)
        job.wait_contributing({0, 1, 2}, since=seen)
        go_on(job, 2, (0, 1, 2))
        most = max(note["most"] for *_, note in job.notes() if note["kind"] == "told")
        assert 1 < most <= frames.EARLY
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0]
        assert not job.errors()


def test_stopped_with_puts_under_way(tmp_path: Path) -> None:
    """It stops in the middle of a put, is removed, and wakes when its next life is in the view under its number.

    What it had under way goes to mirrors that nobody reads any more; what the others had under way to it is announced
    to it by nobody.
    """
    arguments: dict[str, Any] = dict(victim=(VICTIM, 0), place="put", times=40, steps=ENDLESS, elements=ELEMENTS)
    with Job(tmp_path, replicas=3, body=torn_puts.reduce_and_stop, transport="nixl", **STALL, **arguments) as job:
        wait_stopped(job)
        wait_lost(job)
        go_on(job)
        seen = len(job.events)
        set_aside(job, VICTIM, 100)
        job.start(VICTIM)
        job.wait_contributing({0, 1, 2}, since=seen)
        seen = len(job.events)
        job.signal(100, signal.SIGCONT)
        wake(job, 100)
        after = kinds(job)[kinds(job).index("woke") + 1 :]
        assert after[0] == "error", "it returned an op that the others had without it"
        go_on(job, replicas=(0, 1, 2))
        assert not disturbed(job, seen, {0, 1, 2})
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0]
        check(job)
