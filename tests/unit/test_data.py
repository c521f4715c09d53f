"""Which replica trains on which samples, over histories of losses, rejoins and steps that are thrown away."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftcomm.errors import ArgumentError, StateError
from ftcomm.training.data import Batches, Ledger
from ftcomm.training.loader import Loader
from ftcomm.training.vote import Outcome, StepDecision

REPLICAS = 5


@dataclasses.dataclass
class Member:
    """Of a group, as far as `Batches` looks at it."""

    replica: int
    shard: int = 0
    shards: int = 1
    catching_up: bool = False
    contributes: bool = True
    contributing: tuple[int, ...] = tuple(range(REPLICAS))

    @property
    def internals(self) -> Member:
        return self


def settled(*counted: int, decision: StepDecision = StepDecision.COMMIT) -> Outcome:
    return Outcome(0, decision, frozenset(counted))


def batches(member: Member, length: int = 23, size: int = 3, **options: Any) -> Batches:
    return Batches(length, size, group=member, **options)  # type: ignore[arg-type]


def test_undisturbed_the_replicas_take_turns() -> None:
    ledger = Ledger()
    for step in range(5):
        assert [ledger.batch(replica) for replica in range(4)] == [4 * step + i for i in range(4)]
        ledger = ledger.after(range(4))
    assert ledger == Ledger(20, (), (0, 1, 2, 3))


def test_a_lost_batch_goes_to_another_in_the_next_step() -> None:
    ledger = Ledger().after([0, 1, 2, 3]).after([0, 1, 3])
    assert [ledger.batch(replica) for replica in (0, 1, 3)] == [6, 8, 9]
    assert ledger.after([0, 1, 3]).late == ()


# A step: per replica what it is in it, and what becomes of it.
PART = st.sampled_from(["out", "behind", "lost", "in", "in", "in"])
VERDICT = st.sampled_from([StepDecision.COMMIT, StepDecision.COMMIT, StepDecision.SKIP, StepDecision.REPEAT])
STEP = st.tuples(st.lists(PART, min_size=REPLICAS, max_size=REPLICAS), VERDICT)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=40), st.integers(1, 7))
@example([(["in", "in", "in", "lost", "lost"], 1), (["out"] * 4 + ["in"], 1), (["in"] * 5, 1)], 3)
def test_every_sample_is_trained_once_over_any_history(history: list[tuple[list[str], int]], size: int) -> None:
    """With "lost" a replica takes its batch and is gone before its input is in; "behind" it takes part and does not
    count, and is told later what became of the steps since it came, as the step loop does."""
    length = 23
    trained: Counter[tuple[int, int]] = Counter()  # (epoch, sample)
    here: dict[int, Batches] = {}
    members: dict[int, Member] = {}
    snapshots: dict[int, dict[str, Any]] = {}  # of the others, when the replica came
    kept: dict[int, list[Outcome]] = {}  # what became of the steps since
    state = batches(Member(0), length, size).state_dict()

    def run(parts: list[str], decision: int) -> None:
        nonlocal state
        for replica, part in enumerate(parts):
            if part == "out" or (part == "behind" and replica in here and members[replica].contributes):
                here.pop(replica, None)
            if part != "out" and replica not in here:
                members[replica] = Member(replica, catching_up=bool(trained), contributes=False)
                here[replica], snapshots[replica], kept[replica] = batches(members[replica], length, size), state, []
            if part in ("in", "lost") and not members[replica].contributes:
                here[replica].load_state_dict(snapshots[replica])
                for outcome in kept[replica]:
                    here[replica].settled(outcome)
                members[replica].contributes = True
        counted = tuple(replica for replica, part in enumerate(parts) if part == "in")
        if not counted:
            return
        taken = {replica: here[replica].number for replica, part in enumerate(parts) if part in ("in", "lost")}
        assert len(set(taken.values())) == len(taken), "two replicas have one batch"
        for replica in counted if decision != StepDecision.REPEAT else ():
            first = taken[replica] * size
            epochs = [place // length for place in range(first, first + size)]
            trained.update(zip(epochs, here[replica].samples, strict=True))
        for replica in [replica for replica, part in enumerate(parts) if part == "lost"]:
            del here[replica]
        outcome = settled(*counted, decision=StepDecision(decision))
        for replica, one in here.items():
            if members[replica].contributes:
                one.settled(outcome)
            else:
                kept[replica].append(outcome)
        assert len({one.ledger for replica, one in here.items() if members[replica].contributes}) == 1
        state = here[counted[0]].state_dict()

    for parts, decision in history:
        run(parts, decision)
    for _ in range(2 * REPLICAS):  # so that nothing is left over
        run(["in"] * REPLICAS, StepDecision.COMMIT)
    assert not state["late"]
    whole = state["first"] * size // length
    assert set(trained.values()) == {1}
    assert {(epoch, sample) for epoch in range(whole) for sample in range(length)} <= set(trained)


def test_the_ranks_of_a_replica_share_out_each_epoch() -> None:
    parts = [batches(Member(0, shard=rank, shards=2), 10, 5) for rank in range(2)]
    first = [part.samples for part in parts]
    assert sorted(first[0] + first[1]) == list(range(10))
    assert [part.samples_of(1) for part in parts] != first, "the second epoch has the order of the first"
    plain = [batches(Member(0, shard=rank, shards=2), 10, 5, shuffle=False).samples for rank in range(2)]
    assert plain == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_a_batch_goes_on_in_the_next_epoch() -> None:
    one = batches(Member(0), 5, 3, shuffle=False)
    assert one.samples_of(1) == [3, 4, 0]
    assert one.epoch == 0


def test_a_replica_that_joined_must_be_told_what_is_trained() -> None:
    member = Member(1, catching_up=True, contributes=False)
    one = batches(member)
    one.settled(settled(0))  # it may take part without knowing
    member.contributes = True
    with pytest.raises(StateError, match=r"pass the Batches, or their Loader, in the `state`"):
        _ = one.samples


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 24}, "batches with length=24, here it is 23"),
        ({"parts": 2}, "batches with parts=2, here it is 1"),
        ({"late": ["x"]}, r"no state of Batches: .*late"),
        ({"first": None}, "no state of Batches"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    one = batches(Member(0))
    before = one.ledger
    with pytest.raises(StateError, match=said):
        one.load_state_dict({**one.state_dict(), **change})
    assert one.ledger == before


@pytest.mark.parametrize("size", [0, 24])
def test_a_batch_that_cannot_be_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match=rf"batches of {size} samples, of 23 .* expected 1 to 23"):
        batches(Member(0), size=size)


class Numbers:
    """A data set whose samples are their own indices."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_fetches_ahead_and_begins_again_when_it_was_wrong(workers: int) -> None:
    member = Member(1, contributing=(0, 1, 2))
    one = batches(member)
    loader = Loader(Numbers(), one, num_workers=workers, persistent_workers=bool(workers))  # type: ignore[arg-type]
    for contributed in [(0, 1, 2), (0, 1, 2), (1, 2), (1, 2), (0, 1, 2), (0, 1, 2)]:
        expected = one.samples
        assert next(loader).tolist() == expected
        assert next(loader).tolist() == expected, "a step that is repeated has other data"
        loader.settled(settled(*contributed))
    other = Loader(Numbers(), batches(member))  # type: ignore[arg-type]
    other.load_state_dict(loader.state_dict())
    assert next(other).tolist() == next(loader).tolist()
