"""The newest end of a recording, without reading the whole file: for how long its rank waits, again and again, and its
newest records.

A reader keeps the place of the newest record that it has seen, and each time reads on from there. As in
`ftcomm.recorder.reader` nothing is mapped, and nothing that is read is trusted: whatever the file holds, the answer is
a number.
"""

from __future__ import annotations

import os
import struct

import numpy as np

from ftcomm.recorder import layout
from ftcomm.recorder.reader import Recording, RecordingError, parse

BLOCK = 256  # records of a read
LATEST = 64  # records among which an op in flight and its waits are looked for
MOST_WAIT = 1e7  # s


class RecordingTail:
    """The tail of one recording. Not thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it. Raises `RecordingError` if it is none of this version."""
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            raise RecordingError(f"{os.fspath(path)}: {error.strerror or error}") from None
        header = os.pread(self._fd, layout.SHAPE.size, 0).ljust(layout.SHAPE.size, b"\0")
        magic, version, record, records, _, groups, texts = layout.SHAPE.unpack(header)[:7]
        self._shape = layout.Shape(groups, records, texts)
        known = (magic, version, record) == (layout.MAGIC, layout.VERSION, layout.RECORD)
        if not known or records < 1 or self._shape.size > layout.MOST_BYTES:
            os.close(self._fd)
            raise RecordingError(f"{os.fspath(path)}: this is no recording that this ftcomm reads")
        self._path = os.fspath(path)
        self._newest = -1  # the number of a record in the ring

    def close(self) -> None:
        os.close(self._fd)

    def waits(self) -> float:
        """Returns the seconds for which the op in flight has waited for others so far; 0.0 if it does not. Raises
        `OSError`."""
        self._go_on()
        if self._newest < 0:
            return 0.0
        words = self._records(self._newest - LATEST + 1, LATEST)
        times = words.view(np.float64)
        kinds = words[:, 1] & 0xFF
        in_flight = words[(kinds == layout.OP) & (times[:, layout.RETURNED] == 0.0), 0]
        seconds = times[(kinds == layout.WAIT) & np.isin(words[:, 0], in_flight), layout.SECONDS]
        seconds = seconds[(seconds > 0.0) & (seconds < MOST_WAIT)]
        return float(seconds.max()) if len(seconds) else 0.0

    def recording(self, newest: int) -> Recording:
        """Returns the recording as if it had so many records, the newest ones. Reads those, and what they refer to, for
        a millisecond. Raises `OSError`, `RecordingError`."""
        self._go_on()
        head = bytearray(os.pread(self._fd, self._shape.ring, 0).ljust(self._shape.ring, b"\0"))
        (used,) = struct.unpack_from("<Q", head, layout.TEXTS_USED)
        few = layout.Shape(self._shape.groups, min(newest, self._shape.records), min(used, self._shape.texts))
        fields = layout.SHAPE.unpack_from(head)
        layout.SHAPE.pack_into(head, 0, *fields[:3], few.records, *fields[4:6], few.texts, *fields[7:9], few.text)
        first, again = (head + self._records(self._newest - newest + 1, newest).tobytes() for _ in range(2))
        return parse(bytes(first + os.pread(self._fd, few.texts, self._shape.text)), bytes(again), self._path)

    def _go_on(self) -> None:
        """Find the newest record: times grow along the ring up to it, and fall behind it."""
        size = self._shape.records
        if self._newest < 0:
            began = self._began(self._records(0, size))
            self._newest = int(began.argmax()) if began.max() > 0.0 else -1
            return
        for _ in range(-(-size // BLOCK)):
            began = self._began(self._records(self._newest, min(BLOCK, size)))
            steps = np.flatnonzero(np.diff(began) < -1.0)  # threads may be out of order by less
            ahead = int(steps[0]) if len(steps) else len(began) - 1
            self._newest = (self._newest + ahead) % size
            if ahead < len(began) - 1 or ahead == 0:
                return

    def _began(self, words: np.ndarray) -> np.ndarray:
        """Returns when each record began; 0.0 of what is none."""
        times = words.view(np.float64)[:, layout.WORDS - 1].copy()
        times[~((times > 0.0) & (times < MOST_WAIT * 1e3))] = 0.0
        return times

    def _records(self, first: int, count: int) -> np.ndarray:
        """Returns the words of `count` records from number `first` on, around the end of the ring."""
        size = self._shape.records
        first, count = first % size, min(count, size)
        before = min(count, size - first)
        data = self._read(first, before) + self._read(0, count - before)
        return np.frombuffer(data, "<u8").reshape(-1, layout.WORDS)

    def _read(self, first: int, count: int) -> bytes:
        length = count * layout.RECORD
        data = os.pread(self._fd, length, self._shape.ring + first * layout.RECORD) if count else b""
        return data.ljust(length, b"\0")
