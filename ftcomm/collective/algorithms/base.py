"""The interface of an algorithm, so that all of them look alike to a stream of tasks.

Between the moment at which all have posted a task and the one at which it is taken, the task goes through *steps*, in
order; each member has its own. A step waits until some members have raised a word to this task, moves or reduces what
these have announced by that, and may then raise a word of its own. The last step does nothing: `finish` waits for it.
An algorithm without steps finishes as soon as all have posted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ftcomm.collective.checksum import fingerprint
from ftcomm.collective.plan import GroupView
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.kernels.host.tensors import lasting
from ftcomm.transport.segment import SLOTS, SPAN, Memory

if TYPE_CHECKING:
    from ftcomm.collective.operation import Operation
    from ftcomm.collective.pipeline import Slot

Array = np.ndarray[Any, Any]

_KEPT = 64  # kinds of chunks whose views are kept, per slot


class AlgorithmStep(NamedTuple):
    word: int  # the word that all of `members` must have raised to the task
    members: tuple[int, ...]  # empty: it waits for none
    makes: int  # the word that this member raises then; 0: none


class Algorithm(ABC):
    """An algorithm at one member in one view. No method waits."""

    name: str  # for recordings
    chained = False  # its steps prove that all have posted; and `served` are all readers here
    served: frozenset[int] = frozenset()
    straight = False  # its input can be sent straight from the caller's array, until `finish`
    steps: tuple[AlgorithmStep, ...] = ()
    readers: Mapping[int, frozenset[int]] = {}  # level that this member raises -> the members that wait for it

    def __init__(self, view: GroupView, memories: Mapping[int, Memory], reducer: Reducer) -> None:
        self.me = view.me
        self.contributors = view.contributors
        self.contributes = view.me in view.contributing
        self.memories, self.reducer = memories, reducer
        self.others = frozenset(member for member in view.members if member != view.me)
        self.stages_input = self.contributes and bool(self.others)
        self._kept: list[dict[tuple[str, str, str, int], Any]] = [{} for _ in range(SLOTS * SPAN)]

    def views(self, op: Operation, count: int, chunk: int) -> Any:
        """Returns views of the staging of all members for a chunk of `count` elements, from the `chunk`-th chunk on.
        They are kept: to make one costs 0.3 us, and a training repeats its sizes."""
        kept = self._kept[chunk]
        key = op.dtype, op.op, op.compression, count
        found = kept.get(key)
        if found is None:
            if len(kept) >= _KEPT:
                kept.clear()
            with lasting():
                found = kept[key] = self.make_views(op.dtype, op.op, op.compression, count, chunk)
        return found

    def make_views(self, dtype: str, op: str, compression: str, count: int, chunk: int) -> Any:
        return None

    def reads(self, slot: Slot) -> Collection[int]:
        """The members whose POSTED staging this one reads without a step that waits for them."""
        return self.others

    @abstractmethod
    def post(self, slot: Slot) -> None:
        """Stage what others read of this member's input, or of its FINAL chunk."""

    def step(self, slot: Slot) -> None:  # noqa: B027 (who has no steps has nothing to do in them)
        """Take step `slot.number`, whose wait is over. `slot.here` is the chunk in the caller's buffer, still INPUT."""

    @abstractmethod
    def finish(self, slot: Slot) -> None:
        """Put the whole chunk into the caller's buffer, in one go."""

    def fingerprint(self, slot: Slot) -> tuple[int, int]:
        """Returns the chunk that is compared with the results of others, and its checksum; 0 if the op has failed."""
        return slot.task.chunk, fingerprint(slot.here) if slot.op.error is None else 0

    @abstractmethod
    def read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        """Returns the bytes (start, stop) of the slot that `reader` needs of what this member announces by `word`."""
