"""Records for whom a rank waits outside of ops: at a step boundary, for the other ranks of its replica, for a message.

A thread that waits looks every `AWAITED_EVERY` seconds, and says then who has not come. A wait of two looks is a phase
of the recording, with a record for each rank that is waited for, as ops have them. A shorter one leaves no trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from ftcomm.recorder import callers, layout
from ftcomm.recorder.files import process_recorder
from ftcomm.recorder.layout import PHASES, WAIT, PhaseKind
from ftcomm.recorder.recorder import Recorder
from ftcomm.recorder.wait_records import Awaited, WaitRecords


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
        self._waits = WaitRecords()

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
        head = WAIT | PHASES << 16 | recorder.epoch << 32
        for rank in ranks:
            since = self._waits.began(rank, self._since if first else now)
            self._waits.write(recorder, rank, mark, head, since, now, not_before=self._began)
