"""Says which samples each replica trains on, so that every sample of an epoch is used exactly once in spite of losses.

The samples of all epochs, each shuffled anew, are one endless stream, cut into batches 0, 1, 2 ... A `Ledger` says
which of them are trained, and which one each replica is to have next. It is a pure function of who contributed to each
completed step: the replicas whose input is, on all of their ranks, in every chunk of every all-reduce of the step. All
members know these, and the step loop tells them to the batches, which are an entry of its `state`.

    step    replica 0   1   2   3    contributed
      0     batch   0   1   2   3    0 1 2 3
      1             4   5   6   7    0 1   3        replica 2 was killed in it, so 6 is left over
      2             6   8       9    0 1   3

A replica that is killed in the middle of a step may have some chunks of its gradient in the sums and others not. Its
batch counts as not trained; `allreduce(..., atomic=True)` keeps such halves out of an op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ftcomm.control.decode import learn
from ftcomm.errors import ArgumentError, StateError
from ftcomm.training.vote import Outcome, StepDecision

if TYPE_CHECKING:
    from ftcomm.groups.group import Group


class Ledger(msgspec.Struct, frozen=True):
    """The batches below `first` are trained, except those in `late`. `order` are the replicas that contributed last."""

    first: int = 0
    late: tuple[int, ...] = ()  # ascending
    order: tuple[int, ...] = ()  # ascending

    def batch(self, replica: int) -> int:
        """Returns the batch that `replica` is to train on next. No two replicas have the same, whatever their
        numbers."""
        # Other replicas come after these, each in its own place, so that they may begin to contribute at any boundary.
        place = self.order.index(replica) if replica in self.order else len(self.order) + replica
        return self.late[place] if place < len(self.late) else self.first + place - len(self.late)

    def after(self, contributed: Iterable[int]) -> Ledger:
        """Returns the ledger after a step that these replicas contributed to."""
        order = tuple(sorted(contributed))
        trained = {self.batch(replica) for replica in order}
        first = max(self.first, 1 + max(trained, default=-1))
        late = sorted({*self.late, *range(self.first, first)} - trained)
        return Ledger(first, tuple(late), order)


learn(Ledger)


class Batches:
    """The batches of this rank, one a step. They belong into the `state` of the step loop, which tells them what is
    trained.

        batches = Batches(len(dataset), 16)
        for step in ftcomm.steps(1000, {"model": model, "optimizer": optimizer, "batches": batches}):
            inputs = collate([dataset[i] for i in batches.samples])  # or next(Loader(dataset, batches))
            ...                                                      # backward, reduce, optimizer.step()

    length: samples in the data set; each rank of a replica has its own part of them, every n-th of an epoch's order.
    size: samples of a batch. A batch may begin in one epoch and end in the next, so all are full and none is left out.
    seed: the seed of the order, together with the epoch. All of these must be the same on all ranks. `shuffle=False`
        keeps the order.

    For ranks that share their batch (tensor parallel), pass `part=(0, 1)` and hand the batch of shard 0 to the others.
    `ftcomm.training.loader.Loader` fetches ahead, in workers. No method blocks. Not thread-safe. Raises
    `ArgumentError`.
    """

    def __init__(
        self,
        length: int,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        part: tuple[int, int] | None = None,
        group: Group | None = None,
    ) -> None:
        if group is None:
            from ftcomm.groups.default_group import default_group

            group = default_group()
        self._group = group
        self._part, self._parts = part or (group.shard, group.shards)
        self._length, self._size, self._seed, self._shuffle = length, size, seed, shuffle
        self._own = len(range(self._part, length, self._parts))  # own samples of an epoch
        if not 0 < size <= self._own:
            raise ArgumentError(
                f"batches of {size} samples, of {self._own} that this rank has of {length}: expected 1 to {self._own}; "
                "give a smaller batch or more data"
            )
        self._epochs: dict[int, np.ndarray[Any, Any]] = {}  # the orders of the last two epochs
        self._behind = group.internals.catching_up  # the ledger of the others is not loaded yet
        self.ledger = Ledger()

    @property
    def number(self) -> int:
        """The number of this rank's batch in the current step; a repeated step has the same.

        Raises `StateError` in a replica that contributes and has never learned what the others have trained.
        """
        if self._behind and self._group.contributes:
            raise StateError(
                f"replica {self._group.replica} joined a running job and does not know which samples are trained; pass "
                "the Batches, or their Loader, in the `state` of the step loop"
            )
        return self.ledger.batch(self._group.replica)

    @property
    def samples(self) -> list[int]:
        """The indices of the samples of that batch. A replica that catches up gets some, too, which do not count."""
        return self.samples_of(self.number)

    @property
    def epoch(self) -> int:
        """The epoch in which the current batch begins."""
        return self.number * self._size // self._own

    def samples_of(self, number: int) -> list[int]:
        """Returns the indices of the samples of any batch: a pure function of the arguments of this object."""
        places = range(number * self._size, (number + 1) * self._size)
        return [int(self._order(place // self._own)[place % self._own]) for place in places]

    def settled(self, outcome: Outcome) -> None:
        """Take the outcome of an attempt at a step, from the step loop. The batches of the replicas that count are
        trained, unless all are to repeat the step."""
        if outcome.decision is not StepDecision.REPEAT:
            self.ledger = self.ledger.after(outcome.counted)

    def ahead(self) -> Iterator[int]:
        """Yields the numbers of the next batches of this rank if membership stays as it is, so that they can be fetched
        ahead."""
        ledger, replica = self.ledger, self._group.replica
        contributing = ledger.order or tuple(sorted(self._group.contributing))
        while True:
            yield ledger.batch(replica)
            ledger = ledger.after(contributing)

    # -- a state like that of torchdata's StatefulDataLoader -------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**self._call(), **msgspec.to_builtins(self.ledger, builtin_types=(tuple,))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the ledger. Raises `StateError` if the batches are not the same there."""
        for name, here in self._call().items():
            if state.get(name) != here:
                raise StateError(
                    f"the state is of batches with {name}={state.get(name)}, here it is {here}; give Batches the same "
                    "arguments, and a job the same number of ranks a replica, as when the state was written"
                )
        try:
            ledger = msgspec.convert({name: state.get(name) for name in Ledger.__struct_fields__}, Ledger)
        except msgspec.ValidationError as error:
            raise StateError(f"this is no state of Batches: {error}") from None
        self._behind = False
        self.ledger = ledger

    def _call(self) -> dict[str, int | bool]:
        return {
            "length": self._length,
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "part": self._part,
            "parts": self._parts,
        }

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        """Returns the samples of this part in the order in which they are used."""
        order = self._epochs.get(epoch)
        if order is None:
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            if self._shuffle:
                everybody = np.random.default_rng([self._seed, epoch]).permutation(self._length)
            else:
                everybody = np.arange(self._length)
            order = self._epochs[epoch] = everybody[self._part :: self._parts].copy()
        return order
