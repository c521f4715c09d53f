"""The way of a large all-reduce by which no member hears from all others: what a stream has to know of it.

Between the moment at which all have posted a task and the one at which it is taken, the task goes over *hops*, in
order, at every member its own ones. A hop waits until some members have reached a level with this task, moves or
reduces what these have announced by that, and may then announce a level of its own. Words that count the tasks at a
level are looked at by the members that wait for them and by nobody else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ftcomm.collective.operation import Operation

Array = np.ndarray[Any, Any]


class Hop(NamedTuple):
    level: int  # that all of `of` must have reached; 0: they have posted
    of: tuple[int, ...]  # members; none: it waits for nobody
    makes: int  # the level that this member has reached then, from 1 on; 0: nobody waits for it


class Route(ABC):
    """Of one member in one view. No method waits. What `lane` returns is for the other methods alone: ready-made views
    of the staging of all members for chunks of one dtype, wire (`ftcomm.collective.wire`) and size in one slot."""

    chained = False  # who has been through the hops knows that all have posted; and `served` are all who read here
    served: frozenset[int] = frozenset()
    hops: tuple[Hop, ...]
    readers: Mapping[int, frozenset[int]]  # of each level that this member makes: who waits for it

    @abstractmethod
    def lane(self, dtype: str, wire: str, count: int, slot: int) -> Any: ...

    @abstractmethod
    def hop(self, op: Operation, here: Array, lane: Any, number: int) -> None:
        """What hop `number` waits for has been reached: do it. `here` is the chunk in the caller's buffer, INPUT."""

    @abstractmethod
    def finish(self, here: Array, lane: Any) -> None:
        """All hops are done: the whole chunk, into the caller's buffer."""

    @abstractmethod
    def read_by(self, reader: int, level: int, lane: Any) -> tuple[int, int]:
        """The bytes (start, stop) that `reader` needs of what this member has at `level`; 0: has posted."""
