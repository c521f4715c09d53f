"""The vote at the end of a step: whether all ranks of all replicas have finished it without an error of their own.

    rank i of every replica   one small all-reduce: a byte for each replica, in it what that replica says; 0: not in
    ranks of one replica      each tells the others what its all-reduce gave (inside.py)

In this order, and not the other way round, everybody decides alike whoever dies meanwhile: the result of an all-reduce
is the same on all members of its group, so all replicas come to the second part with the same rows.

A rank that fails in the middle of a step calls the vote at once. The others are in another op by then: the members
find that they made different calls, that op ends with `MismatchError` on all, and the vote is called again until the
others have come to it, with the op that failed there as their reason to repeat.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ftcomm.errors import ArgumentError, MismatchError
from ftcomm.training.intra_replica import IntraReplicaExchange

if TYPE_CHECKING:
    from ftcomm.group import Group

SLOTS = 97  # replicas, at least: an odd number, as no array of a user's is likely to have


class Verdict(enum.IntEnum):
    """What becomes of a step; the highest that anybody says holds for all. 0 is no vote."""

    COMMIT = 1  # update, and go on
    SKIP = 2  # no update, and go on: the same data would do the same again
    REPEAT = 3  # the same step again: an error that may pass. Above SKIP: who failed has not done all of the step
    RAISE = 4  # stop, on all alike


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One attempt at a training step, the same on every rank of every replica.

    `counted` are the replicas whose input is in every part of all that was reduced in the step before its vote, on all
    their ranks; if nothing was reduced, those that voted. One that was lost in the middle is not among them, though its
    gradients may be in some part of the update.
    """

    step: int
    verdict: Verdict
    counted: frozenset[int]


def decide(rows: Sequence[tuple[bytes, bytes]]) -> tuple[Verdict, frozenset[int], frozenset[int]]:
    """Decide what becomes of the step, who voted, and who contributed on all ranks; pure.

    A row has what a rank's all-reduce gave, and who contributed to the step on that rank."""
    votes, contributed = (
        np.frombuffer(b"".join(column), np.uint8).reshape(len(rows), -1) for column in zip(*rows, strict=True)
    )
    verdict = Verdict(max(int(votes.max()), Verdict.COMMIT))
    return verdict, _in_all(votes), _in_all(contributed)


def _in_all(marks: np.ndarray[Any, Any]) -> frozenset[int]:
    return frozenset(np.flatnonzero(marks.min(axis=0)).tolist())


class Poll:
    """Takes the votes of a loop. Every rank of the job makes the same polls in the same order. Not thread-safe."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._slots = max(SLOTS, group.replicas)
        if group.replica >= self._slots:
            raise ArgumentError(
                f"replica {group.replica} has no slot in a vote of {self._slots}; number replicas from 0 to "
                f"FTCOMM_REPLICAS - 1 = {group.replicas - 1}."
            )
        self._intra = IntraReplicaExchange(group) if group.shards > 1 else None

    def take(
        self, verdict: Verdict, contributed: Iterable[int] | None = None
    ) -> tuple[Verdict, frozenset[int], frozenset[int]]:
        """Say `verdict`, and hear what all decide: see `decide`. Blocks until all have come.

        `contributed`: to what was reduced on this rank in the step; None, as on all, if nothing was: then those who
        vote count. Raises what an all-reduce raises, but for `MismatchError`: whoever is still in the step will vote to
        repeat it, so this rank does.
        """
        while True:
            ballot: np.ndarray[Any, Any] = np.zeros(self._slots, np.uint8)
            ballot[self._group.replica] = verdict
            try:
                self._group.allreduce(ballot)
                break
            except MismatchError:
                verdict = max(verdict, Verdict.REPEAT)
        return self._together(ballot, contributed)

    def agree(self, contributed: Iterable[int]) -> frozenset[int]:
        """Agree without a vote on who contributed to the step on all ranks of this replica, and so of every replica."""
        return self._together(np.ones(self._slots, np.uint8), contributed)[2]

    def _together(
        self, ballot: np.ndarray[Any, Any], contributed: Iterable[int] | None
    ) -> tuple[Verdict, frozenset[int], frozenset[int]]:
        marks = ballot if contributed is None else np.zeros_like(ballot)
        if contributed is not None:
            marks[list(contributed)] = 1
        row = ballot.tobytes() + marks.tobytes()
        rows = [row] if self._intra is None else self._intra.exchange(row)
        return decide([(row[: self._slots], row[self._slots :]) for row in rows])

    def close(self) -> None:
        if self._intra is not None:
            self._intra.close()
