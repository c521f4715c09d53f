"""The records of for whom an op or a phase waits, and for how long: one for each rank that is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcomm.recorder.layout import SECONDS, WAIT, WAITED

if TYPE_CHECKING:
    from ftcomm.recorder.recorder import Recorder

# A rank that is waited for, as (replica, rank in it). Without the latter it is the rank with the same index as this
# one or, in a static group, the member with that number.
Awaited = tuple[int, int | None]

_U32 = (1 << 32) - 1


class WaitRecords:
    """The waits of one op or phase. Where the ring has come around, a wait that lasts gets another record."""

    def __init__(self) -> None:
        # The record of each wait, when it began, and seconds for the same rank: of earlier waits, and of all.
        self._waits: dict[Awaited, tuple[int, float, float, float]] = {}

    def began(self, rank: Awaited, otherwise: float) -> float:
        """Returns when the newest wait for `rank` began."""
        return self._waits[rank][1] if rank in self._waits else otherwise

    def write(
        self,
        recorder: Recorder,
        rank: Awaited,
        mark: int,
        head: int,
        since: float,
        now: float,
        *,
        not_before: float = 0.0,
    ) -> None:
        """Write that the op or phase with `mark` has waited for `rank` from `since` to `now`. Another `since` is
        another wait, and adds up. `head` is the second word of a record, `not_before` the least of the time in it."""
        record, began, before, seconds = self._waits.get(rank, (0, since, 0.0, 0.0))
        if began != since:
            before = seconds
        if not record or recorder.words[record >> 3] != mark or recorder.memory[record + 8] != WAIT:
            record, (replica, index) = next(recorder.next), rank
            which, at = 0 if index is None else index + 1, max(since, not_before)
            WAITED.pack_into(recorder.memory, record, mark, head, replica & _U32, which, before, at)
        seconds = before + now - since
        recorder.times[(record >> 3) + SECONDS] = seconds
        self._waits[rank] = record, since, before, seconds
