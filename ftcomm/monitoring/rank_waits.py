"""Reads from the recordings of the ranks of this host for how long each has waited so far in its op."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ftcomm.recorder.reader import SUFFIX, RecordingError
from ftcomm.recorder.tail import RecordingTail

NAME = re.compile(rf"replica-(\d+)\.shard-(\d+)\.pid-(\d+){re.escape(SUFFIX)}")


class RecordedWaits:
    """The waits of all ranks whose recordings lie in a folder. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[tuple[int, int], tuple[Path, RecordingTail]] = {}

    def now(self) -> dict[tuple[int, int], float]:
        """Returns (replica, rank) -> seconds for which it has waited so far in its op."""
        newest = paths(self._folder)
        for rank, (path, tail) in list(self._tails.items()):
            if newest.get(rank) != path:
                tail.close()
                del self._tails[rank]
        found = {}
        for rank, path in newest.items():
            with contextlib.suppress(RecordingError, OSError):
                if rank not in self._tails:
                    self._tails[rank] = path, RecordingTail(path)
                found[rank] = self._tails[rank][1].waits()
        return found


def paths(folder: Path) -> dict[tuple[int, int], Path]:
    """Returns (replica, rank) -> the recording of its newest life."""
    found: dict[tuple[int, int], tuple[int, Path]] = {}
    for path in folder.glob(f"*{SUFFIX}"):
        if (name := NAME.fullmatch(path.name)) is None:
            continue
        rank = int(name.group(1)), int(name.group(2))
        with contextlib.suppress(OSError):
            made = path.stat().st_ctime_ns
            if rank not in found or found[rank][0] < made:
                found[rank] = made, path
    return {rank: path for rank, (_, path) in found.items()}
