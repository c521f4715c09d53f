"""The algorithms that move and reduce the chunks of an op, and the choice of one for each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from ftcomm.collective.algorithms.base import Algorithm
from ftcomm.collective.algorithms.batch import ScheduledBatches
from ftcomm.collective.algorithms.compressed import CompressedOneShot, CompressedTwoShot
from ftcomm.collective.algorithms.direct import Copy, OneShot, TwoShot
from ftcomm.collective.algorithms.hierarchical import Hierarchical
from ftcomm.collective.algorithms.ring import Ring
from ftcomm.collective.algorithms.tree import Tree
from ftcomm.collective.compression import FP8
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView, by_route, two_shot
from ftcomm.collective.resume import REDUCE, Task
from ftcomm.collective.schedule import Batch
from ftcomm.collective.tree import tree
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.settings.tuning import Tuning
from ftcomm.transport.segment import Memory


class Algorithms:
    """The algorithms of one member in one view, and the choice between them, which is the same on all members."""

    def __init__(
        self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer, *, confirms_arrival: bool = False
    ) -> None:
        """Make the algorithms of a view; `confirms_arrival` is as in `OneShot`."""
        self._view = view
        self.contributors = view.contributors
        self.one_shot = OneShot(view, memories, reducer, confirms_arrival=confirms_arrival)
        self.two_shot = TwoShot(view, memories, reducer)
        self.compressed_one_shot = CompressedOneShot(view, memories, reducer)
        self.compressed_two_shot = CompressedTwoShot(view, memories, reducer)
        self.copy = Copy(view, memories, reducer)
        self.batches = ScheduledBatches(view, memories, reducer)
        self.route: Ring | Hierarchical | None = None  # for large ops
        if len(view.ring) > 1:
            self.route = Ring(view, memories, reducer)
        elif view.hosts:
            self.route = Hierarchical(view, memories, reducer)
        self.tree: Tree | None = None  # for small ops
        if view.tree:
            self.tree = Tree(view, memories, reducer, tree(view.members, view.tuning.tree_fan)[view.me])
        # The input of a single contributor is the result, which all copy.
        self._sole = self.contributors[0] if len(self.contributors) == 1 else REDUCE

    def __iter__(self) -> Iterator[Algorithm]:
        """All of them, each once."""
        yield from (self.one_shot, self.two_shot, self.compressed_one_shot, self.compressed_two_shot)
        yield from (self.copy, self.batches)
        yield from (algorithm for algorithm in (self.route, self.tree) if algorithm is not None)

    @property
    def readers(self) -> Mapping[int, frozenset[int]]:
        """The members that wait for each of the words of levels that this member raises."""
        return {} if self.route is None else self.route.readers

    @property
    def served(self) -> frozenset[int]:
        """The members that read here what goes by a chained algorithm."""
        return frozenset() if self.route is None else self.route.served

    def tune(self, tuning: Tuning) -> None:
        """Use other switch points, while nothing is in flight."""
        self._view = dataclasses.replace(self._view, tuning=tuning)

    def of(self, op: Operation) -> Algorithm:
        """Returns the algorithm of the tasks of an op, but of those that bring a chunk which a member holds FINAL."""
        if op.schedule is not None:
            return self.batches
        nbytes, view = op.array.nbytes, self._view
        if op.compression == FP8:
            return self.compressed_two_shot if two_shot(nbytes, view) else self.compressed_one_shot
        if self._sole != REDUCE:
            return self.copy
        if self.tree is not None and nbytes <= view.tree and self.tree.handles(op):
            return self.tree
        if self.route is not None and by_route(nbytes, view) and self.route.handles(op):
            return self.route
        return self.two_shot if two_shot(nbytes, view) else self.one_shot

    def of_task(self, algorithm: Algorithm, task: Any) -> tuple[Algorithm, Task | Batch]:
        """Returns the algorithm of a task of an op that goes by `algorithm`, and the task in the form that it wants."""
        if algorithm is self.batches:
            return algorithm, task
        if task.holder != REDUCE:
            return self.copy, task
        return algorithm, (Task(task.chunk, self._sole, self.contributors) if algorithm is self.copy else task)
