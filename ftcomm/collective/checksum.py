"""Finds results that differ between members, though the protocol says that they cannot: corrupted memory, a faulty
core, a script that writes to an array while it is reduced.

Each member leaves a fingerprint of every chunk that it takes, beside the words that announce it, and compares those of
all members before a slot is used again:

    word                  written by   when                    read by   when
    descriptor(slot) + 2  owner        before TAKEN announces  all       before they post the task that takes the slot
                                       the task                          next, or return the op

When I am about to post task q = p + SLOTS, all fingerprints of task p are there, and none is overwritten. They are
there: I post q only after I have taken q - AHEAD, for which all had posted q - AHEAD, so all had taken q - 2 * AHEAD =
p and published that before (in the order of their stores; over TCP, in the order of the frames of one connection).
Between hosts, where members go further ahead, I post q only after I have seen that all have taken p. None is
overwritten: a member that takes q has seen that all have posted q, and I have not. When an op is about to return, all
have taken all tasks up to its last, and the same holds for those that were not compared yet. All of that is within an
epoch. A member that was left behind in an earlier one may find fingerprints of a later, and may have taken chunks that
changed while it read them. But a member that enters an epoch first raises its words to it; so a difference counts only
if all words are still of my epoch when I look at them afterwards.

It does not see a wrong input; nor a wrong slice of a two-shot reduction, or a wrong chunk that is copied after a view
change, since all copy the same; nor chunks that were taken just before a view change, whose fingerprints are not
compared.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.transport.segment import FINGERPRINT, SLOTS, Memory, descriptor

_PRINTS = [descriptor(slot) + FINGERPRINT for slot in range(SLOTS)]  # the word of each slot
_SAID = 1 << 32  # set in every fingerprint; 0 is none (a failed op, a member that does not compare)

# Bytes of a chunk are folded into one row of this length (docs/transports.md, Measured choices).
_ROW = 4096


class Divergence(NamedTuple):
    """A chunk of an op whose result differs. `wrong` are the replicas that a strict majority, `right`, contradicts;
    without a majority `wrong` are all."""

    op: int
    chunk: int
    wrong: tuple[int, ...]
    right: tuple[int, ...]

    def __str__(self) -> str:
        who = f"op {self.op}, chunk {self.chunk}: the result of {named(self.wrong)} "
        who += f"differs from that of {named(self.right)}" if self.right else "differs, and none has a majority"
        return (
            f"{who}. Either memory, processor or network of a machine corrupts data, or a script writes to an array "
            "while it is reduced (before wait() has returned)"
        )


def fingerprint(chunk: np.ndarray[Any, Any]) -> int:
    """Returns a checksum of the bytes of a contiguous array: any one changed bit changes it. Tells where in a row of 4
    KB, not which row, so rows that have changed places look the same."""
    flat = chunk.view(np.uint8)
    whole = flat.size // _ROW * _ROW
    if whole <= 2 * _ROW:
        return _SAID | zlib.crc32(flat.data)
    row = np.bitwise_xor.reduce(flat[:whole].reshape(-1, _ROW), axis=0)
    return _SAID | zlib.crc32(flat[whole:].data, zlib.crc32(row.data))


def fingerprint_of(pieces: Iterable[np.ndarray[Any, Any]]) -> int:
    """Returns the checksum of several arrays."""
    said = 0
    for piece in pieces:
        said = zlib.crc32(fingerprint(piece).to_bytes(8, "little"), said)
    return _SAID | said


def judge(prints: Mapping[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the replicas that are (wrong, right) by the fingerprint of each; both are empty if all agree."""
    said = {replica: value for replica, value in prints.items() if value}
    if len(set(said.values())) < 2:
        return (), ()
    ((value, count),) = Counter(said.values()).most_common(1)
    if 2 * count <= len(said):
        return tuple(sorted(said)), ()
    right = tuple(sorted(replica for replica, other in said.items() if other == value))
    return tuple(sorted(said.keys() - set(right))), right


class Checksums:
    """The comparison of one stream. `on_divergence` is called for every chunk that differs, and may raise.

    `all_taken(count)` looks whether the words of all members say, in this epoch, that they have taken `count` tasks.
    """

    def __init__(
        self,
        view: GroupView,
        memories: Mapping[int, Memory],
        all_taken: Callable[[int], bool],
        on_divergence: Callable[[Divergence], None],
    ) -> None:
        self._own = memories[view.me].words
        self._words = {member: memories[member].heard for member in view.members}
        self._heard = tuple(self._words.values())
        self._all_taken = all_taken
        self._on_divergence = on_divergence
        self.tasks = [(0, 0)] * SLOTS  # (op, chunk) of the task that was taken last in each slot
        self.checked = 0  # tasks compared

    def taken(self, index: int, op: Operation, chunk: int, said: int) -> None:
        """Note that task `index` is taken here, before TAKEN says so. `said` is the fingerprint of its chunk of the
        result, or 0."""
        self.tasks[index % SLOTS] = op.number, chunk
        self._own[_PRINTS[index % SLOTS]] = said

    def compare(self, end: int) -> None:
        """Compare the tasks before `end` that were not compared yet, which all members have taken."""
        while self.checked < end:
            slot = self.checked % SLOTS
            self.checked += 1
            at = _PRINTS[slot]
            mine = self._own[at]
            for words in self._heard:
                if words[at] != mine:
                    wrong, right = judge({member: words[at] for member, words in self._words.items()})
                    if wrong and self._all_taken(self.checked):
                        self._on_divergence(Divergence(*self.tasks[slot], wrong, right))
                    break


def named(who: tuple[int, ...]) -> str:
    """Returns `replica 2`, or `replicas 0, 2`, for a sentence."""
    return f"{'replica' if len(who) == 1 else 'replicas'} {', '.join(map(str, who))}"
