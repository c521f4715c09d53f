"""The batches of `Batches` through a torch `DataLoader`, fetched ahead by its workers.

The owner of each batch is known only when the step before is done, and a loader that fetches ahead cannot wait for
that. So it fetches what this replica will have if membership stays as it is, and begins again where that was wrong,
which is only at changes of membership.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset

from ftcomm.training.data import Batches
from ftcomm.training.vote import Outcome


class Loader:
    """A loader whose `next(loader)` is this replica's batch of the current step; a repeated step gets the same batch.

        loader = Loader(dataset, Batches(len(dataset), 16), num_workers=2, persistent_workers=True)
        for step in ftcomm.steps(1000, {"model": model, "optimizer": optimizer, "data": loader}):
            inputs, targets = next(loader)

    options: those of `torch.utils.data.DataLoader`, except batch_size, shuffle, sampler and drop_last, which `Batches`
        decides. The state of the loader is that of its batches. Not thread-safe.
    """

    def __init__(self, dataset: Dataset[Any], batches: Batches, **options: Any) -> None:
        self._batches = batches
        self._ahead: deque[int] = deque()  # numbers of the batches that the DataLoader has asked for
        self._loader = DataLoader(dataset, batch_sampler=_Feed(self), **options)
        self._rows: Iterator[Any] | None = None
        self._number = -1
        self._batch: Any = None

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        """Returns the batch of the current step; blocks until it is there."""
        number = self._batches.number
        if number != self._number:
            if self._rows is None or not self._ahead or self._ahead[0] != number:
                self._rows = iter(self._loader)
            self._batch, self._number = next(self._rows), number
            self._ahead.popleft()
        return self._batch

    def settled(self, outcome: Outcome) -> None:
        """Take the outcome of an attempt at a step, from the step loop."""
        self._batches.settled(outcome)

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state)


class _Feed:
    """A batch sampler for the DataLoader. Each of its iterators has its own record of what was asked for, so that one
    that is given up cannot write into the record of the next."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        ahead: deque[int] = deque()
        self._loader._ahead = ahead
        return self._follow(ahead)

    def _follow(self, ahead: deque[int]) -> Iterator[list[int]]:
        batches = self._loader._batches
        for number in batches.ahead():
            ahead.append(number)
            yield batches.samples_of(number)
