"""Records for whom a rank waits outside of ops: at a step boundary, for the other ranks of its replica, for a message.

Who waits looks every `LOOK` seconds anyway, and says then who has not come. A wait of two looks is a phase of the
recording, with a record for each rank that is waited for, as ops have them. A shorter one leaves no trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from ftcomm.recorder import callers, layout
from ftcomm.recorder.files import process_recorder
from ftcomm.recorder.layout import PHASES, WAIT, WAITED, PhaseKind
from ftcomm.recorder.recorder import Recorder

LOOK = 0.05  # s between two looks

# A rank that is waited for, as (replica, rank in it). Without the latter it is the rank with the same index as this
# one or, in a static group, the member with that number.
Awaited = tuple[int, int | None]


class PhaseWait:
    """One wait of one thread: `with PhaseWait(kind) as wait:`, and in it `wait.look(...)` as long as it lasts."""

    def __init__(
        self,
        kind: PhaseKind,
        *,
        number: int = 0,
        note: str = "",
        recorder: Callable[[], Recorder] = process_recorder,
    ) -> None:
        self._kind, self._number, self._note, self._recorder = kind, number, note, recorder
        self._since: float | None = None  # when this wait began
        self._began = 0.0  # as its record says
        self._begun: tuple[int, int] | None = None
        self._waits: dict[Awaited, tuple[int, float]] = {}  # their records, and when each wait began

    def __enter__(self) -> PhaseWait:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._begun is not None:
            self._recorder().finish(self._begun, failed=error is not None)

    def look(self, ranks: Iterable[Awaited], left: float) -> None:
        """Note that this thread waits for `ranks`, and gives up in `left` seconds."""
        recorder = self._recorder()
        now = recorder.clock()
        if self._since is None:
            self._since = self._began = now
            return
        first = self._begun is None
        if self._begun is None or not recorder.is_phase(self._begun):
            if not first:  # the ring has come around, and times grow along it
                self._began = now
            caller = callers.find(sys._getframe(1), recorder.text)
            self._begun = recorder.begin(
                self._kind, number=self._number, note=self._note, caller=caller, began=self._began
            )
        at, mark = self._begun
        recorder.times[(at >> 3) + layout.GIVES_UP] = now + left
        for rank in ranks:
            record, since = self._waits.get(rank, (0, self._since if first else now))
            if not record or recorder.words[record >> 3] != mark or recorder.memory[record + 8] != WAIT:
                record, (replica, index) = next(recorder.next), rank
                head, which = WAIT | PHASES << 16 | recorder.epoch << 32, 0 if index is None else index + 1
                WAITED.pack_into(recorder.memory, record, mark, head, replica, which, 0.0, max(since, self._began))
            self._waits[rank] = record, since
            recorder.times[(record >> 3) + layout.SECONDS] = now - since
