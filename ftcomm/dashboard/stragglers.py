"""Compares the ranks of one index in all replicas, by what each has recorded last, to name those that make the others
wait, and to tell what goes between them; one index after the other.

A comparison costs more than a look. So whoever asks for them rests `REST` times as long as one has computed: they take
half a per cent of a core, however many ranks there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ftcomm.dashboard.traffic import Traffic, merged, of_column
from ftcomm.diagnosis import slowdown
from ftcomm.diagnosis.facts import Rank
from ftcomm.diagnosis.slowdown import SlowdownOfGroup, SlowdownOfRank
from ftcomm.monitoring.rank_waits import paths
from ftcomm.recorder.reader import Recording, RecordingError, lives
from ftcomm.recorder.tail import RecordingTail

REST = 200  # times what a comparison has computed
MEMBERS = 256  # ranks of one index on this host, beyond which ranks are not compared
RECORDS = 4096  # that are read of all of them, of each 64 at least
SHOWN = 8


class Stragglers(msgspec.Struct, frozen=True):
    """The ranks of this host that cost the others most, and what goes between them. `compared` of its ranks have
    recorded steps, `compared_at` is when somebody was compared last, in seconds since 1970; 0 before."""

    slowest: tuple[SlowdownOfRank, ...] = ()
    compared: int = 0
    compared_at: float = 0.0
    traffic: Traffic = Traffic()


class RankComparison:
    """Compares the ranks whose recordings lie in a folder. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups: dict[int, tuple[SlowdownOfGroup, ...]] = {}  # by index
        self._traffic: dict[int, Traffic] = {}
        self._next = 0

    def go_on(self, now: float) -> Stragglers:
        """Compare the ranks of the next index at `now`, in seconds since 1970; returns what is known of all by then.
        Blocks while it computes."""
        columns: dict[int, dict[Rank, Path]] = {}
        for rank, path in paths(self._folder).items():
            columns.setdefault(rank[1], {})[rank] = path
        for known in (self._groups, self._traffic):
            for gone in known.keys() - columns.keys():
                del known[gone]
        if not columns:
            return Stragglers()
        index = min((index for index in columns if index >= self._next), default=min(columns))
        self._next = index + 1
        lives = newest(columns[index])
        self._groups[index], self._traffic[index] = slowdown.of_job(lives, {}), of_column(lives)
        groups = [group for found in self._groups.values() for group in found]
        compared = sum(len(group.ranks) for group in groups)
        return Stragglers(slowest(groups), compared, now, merged(self._traffic.values()))


def newest(recorded: Mapping[Rank, Path]) -> dict[Rank, Recording]:
    """Returns the newest records of ranks that live."""
    found = {}
    for rank, path in recorded.items() if len(recorded) <= MEMBERS else ():
        with contextlib.suppress(RecordingError, OSError), contextlib.closing(RecordingTail(path)) as tail:
            if lives(recording := tail.recording(max(64, min(256, RECORDS // len(recorded))))):
                found[rank] = recording
    return found


def slowest(groups: Iterable[SlowdownOfGroup]) -> tuple[SlowdownOfRank, ...]:
    """Returns the ranks that cost most: first those that are named, then by share of time."""
    ranks = [one for group in groups for one in group.ranks]
    return tuple(sorted(ranks, key=lambda one: (not one.named, -one.share - one.network, one.rank))[:SHOWN])
