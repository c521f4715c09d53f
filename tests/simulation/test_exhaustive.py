"""Every interleaving of small groups, and the proof that the check bites: without a rule it finds what goes wrong.

The numbers of members, ops and chunks are those that end within seconds; `ftcomm check` goes further.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ftcomm.control.coordinator import Coordinator
from ftcomm.control.messages import Heartbeat
from ftcomm.control.timeouts import Timeouts
from ftcomm.simulation.check_cli import check
from ftcomm.simulation.exhaustive import CheckReport, ExhaustiveCheck
from ftcomm.simulation.live import CheckedGroup
from ftcomm.simulation.local import Members, Transition
from ftcomm.simulation.mutations import MUTATIONS
from ftcomm.simulation.states import freeze, thaw

pytestmark = pytest.mark.protocol

LIMIT = 600.0  # s; a check that has not ended by then has not passed


def explored(group: CheckedGroup, faults: int, **options: Any) -> tuple[ExhaustiveCheck, CheckReport]:
    check = ExhaustiveCheck(group, faults, **options)
    report = check.run(LIMIT)
    assert not report.broken, "\n".join([*report.history, report.broken])
    assert report.complete
    return check, report


@pytest.mark.parametrize(
    ("group", "faults", "least"),
    [
        pytest.param(CheckedGroup(3, 1, 2), 2, 40_000, id="one-shot-of-two-chunks", marks=pytest.mark.sweep),
        pytest.param(CheckedGroup(3, 1, 1), 2, 15_000, id="one-shot"),
        pytest.param(CheckedGroup(3, 2, 1), 1, 20_000, id="two-ops", marks=pytest.mark.sweep),
        pytest.param(CheckedGroup(3, 1, 1, one_host=False), 1, 1_000, id="two-shot"),
        pytest.param(
            CheckedGroup(3, 1, 1, one_host=False), 2, 15_000, id="two-shot-and-two-faults", marks=pytest.mark.sweep
        ),
        pytest.param(CheckedGroup(3, 1, 2, atomic=True), 1, 3_000, id="atomic"),
        pytest.param(CheckedGroup(2, 1, 6), 1, 500, id="slots-used-again"),
        pytest.param(CheckedGroup(2, 1, 3, verify=True), 1, 1_000, id="no-false-alarm"),
        pytest.param(
            CheckedGroup(2, 1, 6, verify=True),
            1,
            3_000,
            id="no-false-alarm-in-slots-used-again",
            marks=pytest.mark.sweep,
        ),
        pytest.param(CheckedGroup(2, 3, 1), 1, 3_000, id="three-ops"),
        pytest.param(CheckedGroup(2, 3, 2), 1, 3_000, id="three-ops-of-two-chunks", marks=pytest.mark.sweep),
        pytest.param(CheckedGroup(3, 1, 1, tree=1), 1, 3_000, id="tree-of-three-levels"),
        pytest.param(CheckedGroup(3, 1, 1, tree=2), 1, 4_000, id="tree-with-two-leaves"),
    ],
)
def test_no_interleaving_breaks_a_promise(group: CheckedGroup, faults: int, least: int) -> None:
    _, report = explored(group, faults)
    print(report)
    assert report.states > least  # a check that explores nothing passes, too
    assert report.ends > 0


@pytest.mark.parametrize(
    ("group", "faults", "resets", "least"),
    [
        pytest.param(CheckedGroup(3, 1, 1), 0, 1, 1_000, id="none-is-lost"),
        pytest.param(CheckedGroup(2, 1, 2), 1, 1, 1_000, id="one-is-lost"),
        pytest.param(CheckedGroup(2, 1, 2, one_host=False), 1, 1, 1_000, id="two-shot", marks=pytest.mark.sweep),
    ],
)
def test_a_view_of_the_same_members_breaks_no_promise(
    group: CheckedGroup, faults: int, resets: int, least: int
) -> None:
    check, report = explored(group, faults, resets=resets)
    print(report)
    assert report.states > least
    if not faults:
        everybody = tuple(range(group.members))
        assert {(newest, *(who for _, who in outcomes)) for newest, *outcomes in check.endings} == {
            (everybody, ((0, group.chunks * group.elements, everybody),))
        }


def test_faults_while_the_first_view_is_installed() -> None:
    _, report = explored(CheckedGroup(3, 1, 1), 1, forming=True)
    assert report.states > 5_000


@pytest.mark.parametrize(
    "group",
    [
        CheckedGroup(3, 1, 1),
        CheckedGroup(2, 1, 1, one_host=False),
        CheckedGroup(2, 2, 1),
        CheckedGroup(2, 1, 1, atomic=True),
        CheckedGroup(2, 1, 5),  # one more than there are slots
        pytest.param(CheckedGroup(3, 1, 1, one_host=False), marks=pytest.mark.sweep),
        pytest.param(CheckedGroup(2, 1, 2, atomic=True), marks=pytest.mark.sweep),
        pytest.param(CheckedGroup(2, 1, 6), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_steps_that_are_not_explored_on_their_own_change_no_ending(group: CheckedGroup) -> None:
    reduced, few = explored(group, 1)
    unreduced, all_ = explored(group, 1, reduced=False)
    assert reduced.endings == unreduced.endings
    assert len(reduced.endings) > 1
    assert few.states < all_.states


TO_BE_FOUND = [
    # without, in which group, what is said in the end, and what has to have happened before
    ("stability", CheckedGroup(3, 1, 2), "was returned elsewhere, but is not FINAL here", "returns op 0"),
    ("quiesce", CheckedGroup(3, 1, 1), "ProtocolError: op 0 is FINAL in part", "tells what it holds"),
    ("fencing", CheckedGroup(3, 1, 1), "should be the sum of 0+1+2", "enters view 2"),
    ("late-words", CheckedGroup(3, 1, 1), "has not returned all its ops", "enters view 2"),
    ("hasty", CheckedGroup(3, 1, 2), "should be the sum of 0+1+2", "calls op 0"),
    ("hasty-slices", CheckedGroup(3, 1, 1, one_host=False), "should be the sum of 0+1+2", "reduces its slice"),
    ("ahead", CheckedGroup(2, 1, 6), "should be the sum of 0+1", "calls op 0"),
    ("all-again", CheckedGroup(3, 1, 2), "should be the sum of", "enters view 2"),
    ("any-holder", CheckedGroup(3, 1, 1), "should be the sum of 0+1+2", "copies chunk 0"),
    ("not-atomic", CheckedGroup(2, 1, 2, atomic=True), "is atomic, and returned", "enters view 2"),
]
TWO_SHOT = [
    ("quiesce", CheckedGroup(3, 1, 1, one_host=False), "ProtocolError: op 0 is FINAL in part", "tells what it holds"),
    ("fencing", CheckedGroup(3, 1, 1, one_host=False), "should be the sum of", "enters view 2"),
]


@pytest.mark.parametrize(
    ("rule", "group", "said", "before"),
    [*TO_BE_FOUND, *(pytest.param(*each, marks=pytest.mark.sweep) for each in TWO_SHOT)],
)
def test_without_a_rule_a_violation_is_found(rule: str, group: CheckedGroup, said: str, before: str) -> None:
    report = ExhaustiveCheck(group, 1, MUTATIONS[rule]).run(LIMIT)
    print("\n".join([MUTATIONS[rule].what, *report.history, report.broken]))
    assert said in report.broken
    assert any(before in line for line in report.history)
    assert len(report.history) <= 30  # one of the shortest: it can be read


def test_every_mutation_is_tried() -> None:
    assert {rule for rule, *_ in TO_BE_FOUND} == set(MUTATIONS)


def test_a_history_is_one_of_the_shortest() -> None:
    """Nothing is violated in any history that is shorter, and the same is found every time."""
    lengths = set()
    for _ in range(2):
        report = ExhaustiveCheck(CheckedGroup(3, 1, 1), 1, MUTATIONS["fencing"]).run(LIMIT)
        assert report.broken
        assert report.depth == len(report.history) - 1
        lengths.add(len(report.history))
    assert len(lengths) == 1


@pytest.mark.parametrize(
    "group",
    [
        CheckedGroup(3, 1, 1),
        CheckedGroup(3, 1, 1, one_host=False),
        pytest.param(CheckedGroup(3, 1, 2), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_what_is_remembered_is_what_the_product_says_again(
    group: CheckedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of a member are looked up by its state and the memories that it reads; here with all memories as they
    are, and after other calls."""
    rng = random.Random(7)
    remembered = Members.steps
    compared = 0

    def steps(members: Members, i: int, pair: int, memories: tuple[int, ...]) -> list[Transition]:
        nonlocal compared
        known = remembered(members, i, pair, memories)
        if rng.random() < 0.05:
            compared += 1
            assert members._find_steps(i, pair, memories) == known
        return known

    monkeypatch.setattr(Members, "steps", steps)
    explored(group, 1)
    assert compared > 100


def test_a_state_is_saved_and_made_live_again() -> None:
    value = {1: [2, deque([3])], 4: {5, 6}, 7: np.arange(3), 8: (9, Heartbeat(10)), 11: ValueError("twelve")}
    frozen = freeze(value)
    again = thaw(frozen)
    assert hash(frozen) == hash(freeze(again))
    assert freeze(again) == frozen
    again[1][1].append(4)
    assert freeze(again) != frozen
    assert thaw(frozen)[1][1] == deque([3])


def test_objects_that_know_one_and_the_same_object_do_so_again() -> None:
    """As the parts of the coordinator know what it knows of the job."""
    live = thaw(freeze(Coordinator(2, 1, Timeouts.derive(), [], 0.0, 1)))
    assert live._admissions._known is live._changes._known is live.known
    assert live._removals._suspects is live._suspects


def test_what_cannot_be_saved_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot save"):
        freeze([object()])


def test_command() -> None:
    done = CliRunner().invoke(check, ["--ops", "1", "--faults", "1"])
    assert done.exit_code == 0, done.output
    assert "nothing was violated" in done.output
    broken = CliRunner().invoke(check, ["--ops", "1", "--faults", "1", "--mutation", "fencing"])
    assert broken.exit_code == 0, broken.output
    assert "enters view 2 of" in broken.output
    missed = CliRunner().invoke(check, ["--ops", "1", "--faults", "0", "--mutation", "fencing"])
    assert missed.exit_code == 1, missed.output
    late = CliRunner().invoke(check, ["--ops", "2", "--chunks", "2", "--seconds", "0"])
    assert late.exit_code == 4, late.output
    wrong = CliRunner().invoke(check, ["--ops", "50", "--chunks", "2"])
    assert wrong.exit_code == 2
    assert "at most" in wrong.output
