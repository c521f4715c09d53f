"""Alive is not the same as quick: processes that hold their interpreter, or are stopped, and live.

Nobody is removed for it before it is a stall, by the number that the user has set.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .bodies import reduce_forever
from .job import DEADLINE, Job
from .test_faults import _until as until
from .test_kills import ENDLESS, check

pytestmark = pytest.mark.protocol

HEARTBEAT = 1.0  # s
LONGER = 9.0  # s: several heartbeats, and longer than one may stand still that speaks
AT_ONCE = dict(op_floor=1.5)  # of which others report a stall, since ops took less before
STALL = dict(op_timeout=20.0, op_floor=4.0)


def job(folder: Path, **settings: Any) -> Job:
    given: dict[str, Any] = dict(replicas=3, elements=1000, heartbeat_timeout=HEARTBEAT, steps=ENDLESS)
    return Job(folder, body=reduce_forever, **{**given, **settings})


def begin(running: Job) -> None:
    running.wait_contributing(set(range(running.replicas)))
    go_on(running, range(running.replicas))


def go_on(running: Job, replicas: Iterable[int]) -> None:
    """Each makes some more steps."""
    done = {replica: len(kinds(running, replica, "step")) for replica in replicas}
    for replica, before in done.items():
        for _ in until(lambda: len(kinds(running, replica, "step")) > before + 20, f"{replica} makes no steps"):  # noqa: B023
            pass


def kinds(running: Job, replica: int, kind: str) -> list[dict[str, Any]]:
    return [note for r, _, note in running.notes() if r == replica and note["kind"] == kind]


def hold(running: Job, who: Iterable[tuple[int, int]], seconds: float) -> None:
    """Let ranks hold their interpreters, each in its next step."""
    for replica, rank in who:
        new = running.folder / f"new-{replica}-{rank}"
        new.write_text(str(seconds))
        new.rename(running.folder / f"hold-{replica}-{rank}")


def wait_held(running: Job, count: int) -> None:
    held = lambda: sum(len(kinds(running, replica, "held")) for replica in range(running.replicas))  # noqa: E731
    for _ in until(lambda: held() >= count, "nobody holds its interpreter"):
        pass


def nobody_was_removed(running: Job) -> None:
    """And all end well, with the right sums."""
    go_on(running, range(running.replicas))
    everybody = list(range(running.replicas))
    views = [event for event in running.events if event["kind"] == "view"]
    assert [[member["replica"] for member in view["members"]] for view in views] == [everybody], running.events
    running.drain()
    for replica in everybody:
        assert running.join(replica) == [0] * running.ranks, running.errors()
    assert not running.errors()
    check(running)


def wait_removed(running: Job, replica: int) -> str:
    """Returns why."""

    def found() -> list[str]:
        views = [event for event in running.events if event["kind"] == "view"]
        return [view["why"] for view in views if replica not in [member["replica"] for member in view["members"]]]

    running.wait_event(f"view without {replica}", lambda events: bool(found()), 2 * DEADLINE)
    return found()[0]


@pytest.mark.parametrize(("who", "transport"), [([1], "tcp"), ([0, 1, 2], "auto")], ids=["one", "all"])
def test_replicas_that_hold_their_interpreters_are_waited_for(tmp_path: Path, who: list[int], transport: str) -> None:
    """As all do in the same step when a model is compiled, or saved: then nobody is heard by anybody."""
    with job(tmp_path, transport=transport, **AT_ONCE) as running:
        begin(running)
        hold(running, [(replica, 0) for replica in who], LONGER)
        wait_held(running, len(who))
        nobody_was_removed(running)


@pytest.mark.parametrize(("rank", "transport"), [(0, "tcp"), (1, "auto")])
def test_a_rank_of_two_that_holds_its_interpreter_is_waited_for(tmp_path: Path, transport: str, rank: int) -> None:
    """Be it the leader, whose other rank goes on, or the other one, for which the leader speaks."""
    with job(tmp_path, replicas=2, ranks=2, transport=transport, **AT_ONCE) as running:
        begin(running)
        hold(running, [(1, rank)], LONGER)
        wait_held(running, 1)
        nobody_was_removed(running)


@pytest.mark.parametrize(
    ("how", "ranks", "rank"),
    [
        ("holds", 1, 0),
        ("stopped", 2, 0),
        pytest.param("holds", 2, 1, marks=pytest.mark.sweep),
        pytest.param("stopped", 2, 1, marks=pytest.mark.sweep),
    ],
)
def test_who_holds_its_interpreter_for_too_long_is_a_stall_that_says_so(
    tmp_path: Path, how: str, ranks: int, rank: int
) -> None:
    """Of two ranks it is the one for which the leader speaks, or the leader itself."""
    with job(tmp_path, replicas=2, ranks=ranks, **STALL) as running:
        begin(running)
        if how == "holds":
            hold(running, [(1, rank)], 2 * DEADLINE)
        else:
            pid = running.processes[1, rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        why = wait_removed(running, 1)
        assert "waits for it" in why
        assert "its process lives but has not spoken for" in why
        assert ("it is stopped (SIGSTOP" if how == "stopped" else "it holds the interpreter lock") in why
        go_on(running, [0])
        running.drain()
        assert running.join(0) == [0] * ranks
        check(running)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_is_lost_while_a_rank_of_another_one_holds_its_interpreter(tmp_path: Path, rank: int) -> None:
    """The change of view waits for it, and for the rank beside a leader that cannot pass the view on."""
    with job(tmp_path, replicas=3, ranks=2, **AT_ONCE) as running:
        begin(running)
        hold(running, [(1, rank)], LONGER)
        for _ in until(lambda: kinds(running, 1, "holds"), "nobody holds its interpreter"):
            pass
        running.kill(2)
        wait_held(running, 1)
        go_on(running, [0, 1])
        views = [event for event in running.events if event["kind"] == "view"]
        assert [[member["replica"] for member in view["members"]] for view in views] == [[0, 1, 2], [0, 1]], views
        running.drain()
        for replica in (0, 1):
            assert running.join(replica) == [0, 0], running.errors()
        check(running)
