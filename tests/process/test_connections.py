"""Who dials whom when the view of a real job changes, between members that share no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ftcomm
from ftcomm.transport import connector

from .bodies import reduce_forever
from .job import Job, Notes
from .test_faults import _members
from .test_fencing import go_on
from .test_kills import ENDLESS, check

pytestmark = pytest.mark.protocol


def reduce_and_count(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """`reduce_forever`; notes whom this rank dials for data from now on."""
    connect = connector.connect

    def noted(me: int, here: Any, replica: int, *rest: Any, **options: Any) -> Any:
        notes.write(kind="dial", whom=replica)
        return connect(me, here, replica, *rest, **options)

    connector.connect = noted
    reduce_forever(group, notes, arguments)


def dials(running: Job) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {replica: [] for replica in range(running.replicas)}
    for replica, _, note in running.notes():
        if note["kind"] == "dial":
            made[replica].append(note["whom"])
    return made


def test_a_loss_dials_nobody_and_growth_the_new_member_alone(tmp_path: Path) -> None:
    arguments: dict[str, Any] = dict(steps=ENDLESS, elements=300_001, transport="tcp")
    with Job(tmp_path, replicas=3, body=reduce_and_count, **arguments) as running:
        running.wait_contributing({0, 1, 2})
        go_on(running, 3, (0, 1, 2))
        for lost in (1, 0):
            others = tuple({0, 1, 2} - {lost})
            before, seen = dials(running), len(running.events)
            running.kill(lost)
            left = sorted(others)
            running.wait_event("the loss", lambda events, n=seen, who=left: any(_members(e) == who for e in events[n:]))  # type: ignore[misc]
            go_on(running, 3, others)
            assert dials(running) == before
            running.start(lost)
            running.wait_contributing({0, 1, 2}, since=seen)
            go_on(running, 3, others)
            after = dials(running)
            # Perhaps more than once: on a busy machine it may not answer in time.
            assert {m: set(after[m][len(before[m]) :]) for m in others} == {m: {lost} for m in others}
        running.drain()
        for replica in range(3):
            assert running.join(replica) == [0]
        check(running)
