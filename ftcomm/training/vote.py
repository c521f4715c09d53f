"""The vote at the end of a step, on whether all ranks of all replicas have finished it without an error of their own.

    rank i of every replica     one small all-reduce, with a byte for each replica: its decision, or 0 if it is absent
    ranks of one replica        shard 0 hears what all know, and tells them what follows (intra_replica.py)

In this order all decide alike, whichever process dies meanwhile: the result of an all-reduce is the same on all members
of its group, so all replicas come to the second part with the same rows. The other order would not do.

A rank that fails in the middle of a step calls the vote at once, while the others are in another op. The members find
that they made different calls, that op ends with `MismatchError` on all, and the vote is called again until the others
have come to it, with the failed op as their reason to repeat.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ftcomm.control.rank_name import rank_name
from ftcomm.errors import ArgumentError, MismatchError
from ftcomm.training.intra_replica import IntraReplicaExchange

if TYPE_CHECKING:
    from ftcomm.groups.group import Group

SLOTS = 97  # replicas at least; an odd number that a user's array is unlikely to have


class StepDecision(enum.IntEnum):
    """The decision on a step; the highest one of any rank holds for all. 0 is no vote."""

    COMMIT = 1  # update, and go on
    SKIP = 2  # no update, and go on, since the same data would fail again
    REPEAT = 3  # the same step again; above SKIP, since a rank that failed has not done all of it
    RAISE = 4  # stop, on all alike


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one attempt at a training step, the same on every rank of every replica.

    `counted` are the replicas whose input is in every part of all that was reduced in the step before its vote, on all
    their ranks; if nothing was reduced, those that voted. A replica that was lost in the middle is not among them,
    though its gradients may be in some part of the update.
    """

    step: int
    decision: StepDecision
    counted: frozenset[int]


def row_of(votes: np.ndarray[Any, Any], contributed: Iterable[int] | None) -> bytes:
    """Returns what one rank knows: the decision, then a byte for each replica that voted, and one for each that
    contributed to the step on that rank. `votes` is the result of its all-reduce. Pure."""
    unknown = votes > StepDecision.RAISE  # which counts as a step not done
    said = np.where(unknown, StepDecision.REPEAT, votes)
    voted = (votes > 0).astype(np.uint8)
    marks = voted
    if contributed is not None:
        marks = np.zeros_like(voted)
        marks[list(contributed)] = 1
    return b"".join((bytes((max(int(said.max()), StepDecision.COMMIT),)), voted.tobytes(), marks.tobytes()))


def fold(rows: Sequence[bytes]) -> bytes:
    """Returns what the ranks of `rows` know together, as a row: the highest decision, and who voted, and contributed,
    on all of them. Pure."""
    known = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)
    return b"".join((bytes((int(known[:, 0].max()),)), known[:, 1:].min(axis=0).tobytes()))


def decide(row: bytes) -> tuple[StepDecision, frozenset[int], frozenset[int]]:
    """Returns the decision on the step, who voted, and who contributed on all ranks that `row` is of. Pure."""
    voted, contributed = np.split(np.frombuffer(row, np.uint8)[1:], 2)
    decision = StepDecision(row[0]) if row[0] in list(StepDecision) else StepDecision.REPEAT
    return decision, _marked(voted), _marked(contributed)


def _marked(marks: np.ndarray[Any, Any]) -> frozenset[int]:
    return frozenset(np.flatnonzero(marks).tolist())


class Voter:
    """Takes the votes of a loop. Every rank of the job makes the same votes in the same order. Not thread-safe."""

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
        self, decision: StepDecision, contributed: Iterable[int] | None = None
    ) -> tuple[StepDecision, frozenset[int], frozenset[int]]:
        """Give `decision`, and return what all decide: see `decide`. Blocks until all have come.

        `contributed` are those to all that was reduced on this rank in the step; None, as on all, if nothing was: then
        those who vote count. Raises what an all-reduce raises, except `MismatchError`: a rank that is still in the step
        will vote to repeat it, so this rank does. Raises `ArgumentError`, on this rank alone, on a wrong decision, and
        while another thread is in a collective of the group; the others then hear nothing of that vote.
        """
        if decision not in iter(StepDecision):
            raise ArgumentError(
                f"{self._who()}: a vote of {decision!r}; expected one of {', '.join(x.name for x in StepDecision)} "
                "(ftcomm.training.StepDecision)"
            )
        while True:
            ballot: np.ndarray[Any, Any] = np.zeros(self._slots, np.uint8)
            ballot[self._group.replica] = decision
            try:
                self._group.allreduce(ballot)
                break
            except MismatchError:
                decision = max(decision, StepDecision.REPEAT)
            except ArgumentError as error:
                raise ArgumentError(
                    f"{self._who()} cannot vote on its step, as the vote is a collective of the loop's group: {error}"
                ) from None
        return self._together(ballot, contributed)

    def agree(self, contributed: Iterable[int]) -> frozenset[int]:
        """Agree without a vote on who contributed to the step on all ranks of this replica, and so of every replica."""
        return self._together(np.ones(self._slots, np.uint8), contributed)[2]

    def _together(
        self, ballot: np.ndarray[Any, Any], contributed: Iterable[int] | None
    ) -> tuple[StepDecision, frozenset[int], frozenset[int]]:
        row = row_of(ballot, contributed)
        return decide(row if self._intra is None else self._intra.exchange(row, fold))

    def _who(self) -> str:
        return rank_name(self._group.replica, self._group.shard)

    def close(self) -> None:
        if self._intra is not None:
            self._intra.close()
