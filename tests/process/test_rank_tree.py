"""The vote of a replica whose ranks are more than a star has: no rank hears them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.training import rank_tree
from ftcomm.training.vote import StepDecision, Voter

from .job import Job, Notes
from .test_faults import _until as until

pytestmark = pytest.mark.protocol

RANKS = 4  # 0 has 1 and 2, and 2 has 3
SKIPPED = 5


def vote(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Rank 3 of replica 1 alone votes to skip a step."""
    rank_tree.DIGIT = 2
    voter = Voter(group)
    for step in ftcomm.steps(10_000):
        group.allreduce(np.ones(8, np.float32))
        skips = (group.replica, group.shard, step) == (1, RANKS - 1, SKIPPED)
        decision, voted, _ = voter.take(StepDecision.SKIP if skips else StepDecision.COMMIT)
        notes.write(kind="step", step=step, decision=decision, voted=sorted(voted))


def test_all_ranks_vote_alike_in_a_tree_and_the_loss_of_one_between_ends_its_replica_alone(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=2, ranks=RANKS, body=vote) as running:
        voted = lambda rank: [note for *at, note in running.notes() if at == [*rank] and note["kind"] == "step"]  # noqa: E731
        for _ in until(lambda: len(voted((1, 3))) > 2 * SKIPPED, "nobody votes"):
            pass
        running.processes[1, 2].kill()  # it alone: the others of its replica end by themselves
        assert all(running.join(1)), "a rank of a replica that has lost one has ended well"
        done = len(voted((0, 3)))
        for _ in until(lambda: len(voted((0, 3))) > done + SKIPPED, "the other replica does not go on"):
            pass
        running.drain()
        assert running.join(0) == [0] * RANKS, running.errors()
        alone = False
        for votes in zip(*(voted((0, rank)) for rank in range(RANKS)), strict=True):
            assert [vote == votes[0] for vote in votes] == [True] * RANKS, votes
            step, who = votes[0]["step"], votes[0]["voted"]
            assert votes[0]["decision"] == (StepDecision.SKIP if step == SKIPPED else StepDecision.COMMIT)
            alone = alone or who == [0]
            assert who == ([0] if alone else [0, 1])
        assert alone
