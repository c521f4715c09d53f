"""The launcher looks again at once while a verdict is not sure, or something was reported meanwhile. It tells no weaker
verdict after a stronger one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from ftcomm.diagnosis.causes import StallCause
from ftcomm.diagnosis.facts import JobFacts
from ftcomm.diagnosis.verdict import StallVerdict
from ftcomm.launch import diagnose
from ftcomm.launch.diagnose import Diagnosis, StallDiagnosis

STALLED = {"kind": "stalled"}


def found(cause: StallCause, **known: Any) -> Diagnosis:
    verdict = StallVerdict(cause.value, **{"culprits": ((2, 0),), "op": "op 5", "since": 0.0, **known})
    return Diagnosis(verdict, JobFacts(at=100.0))


def told(
    monkeypatch: pytest.MonkeyPatch, *looks: Diagnosis, reported: tuple[int, ...] = (), gap: float = 3600.0
) -> list[StallCause]:
    """Returns the causes that are told when the looks find these. While it looks for the time that is in `reported`,
    counted from 0, something is reported."""
    said, number = list[StallCause](), 0
    monkeypatch.setattr(diagnose, "GAP", gap)  # who waits for an hour hangs

    async def main() -> None:
        loop = asyncio.get_running_loop()
        diagnosis = StallDiagnosis(lambda: cast(Any, None), lambda each: said.append(StallCause(each.verdict.cause)))

        def look(seen: object, suspicions: object) -> Diagnosis:
            nonlocal number
            if number in reported:
                loop.call_soon_threadsafe(diagnosis.look, STALLED)
            number += 1
            return looks[number - 1]

        monkeypatch.setattr(diagnose, "diagnose", look)
        diagnosis.look(STALLED)
        while number < len(looks):
            await asyncio.sleep(0.001)
        await diagnosis.close()

    asyncio.run(main())
    return said


def test_what_is_clear_is_told_at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, found(StallCause.OWN_CODE)) == [StallCause.OWN_CODE]


def test_what_was_reported_meanwhile_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = found(StallCause.OWN_CODE), found(StallCause.MISMATCH)
    assert told(monkeypatch, *both, reported=(0,)) == [StallCause.OWN_CODE, StallCause.MISMATCH]


def test_another_look_may_find_a_cut_host_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, dead = found(StallCause.CUT, sure=False), found(StallCause.DEAD_HOST)
    assert told(monkeypatch, cut, dead) == [StallCause.DEAD_HOST]
    assert told(monkeypatch, cut, cut, cut) == [StallCause.CUT], "it is told at the last look"
    assert told(monkeypatch, cut, found(StallCause.NONE)) == [StallCause.CUT], "who was cut off is removed"
    later = found(StallCause.CUT, op="op 9", culprits=((1, 0), (2, 0)))
    assert told(monkeypatch, dead, later, reported=(0,)) == [StallCause.DEAD_HOST], "it comes back"
    other = found(StallCause.CUT, culprits=((0, 0), (1, 0)))
    assert told(monkeypatch, dead, other, reported=(0,)) == [StallCause.DEAD_HOST, StallCause.CUT]


def test_what_is_no_stall_yet_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    early, cut = found(StallCause.OWN_CODE, since=99.0), found(StallCause.CUT)
    assert told(monkeypatch, early, cut, gap=0.0) == [StallCause.CUT], "a segment was sent again meanwhile"
    assert told(monkeypatch, early, early, early, gap=0.0) == []


@pytest.mark.parametrize(
    ("event", "looks"),
    [
        ({"kind": "suspect", "replica": 2, "by": 0, "reason": "no answer", "silent": True}, True),
        ({"kind": "suspect", "replica": 2, "by": 0, "reason": "silent line"}, False),
        ({"kind": "suspect", "replica": 2, "by": 0, "reason": "its process died"}, False),
        (STALLED, True),
    ],
)
def test_a_silence_is_looked_at_whatever_its_reason_says(event: dict[str, Any], looks: bool) -> None:
    assert diagnose.stands_still(event) is looks
