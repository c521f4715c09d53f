"""Gathers what all ranks of a replica say into one message, so that the coordinator hears of a change once from each
replica and not once from each rank. Pure.

    Installs       the view is in force at all ranks
    Losses         the ranks of another replica are gone: the first report goes on at once, the others with the beats,
                   and not at all once a view has settled it
    Resumptions    how long the ranks took to go on in a view: the slowest one speaks for all
"""

from __future__ import annotations

from collections.abc import Iterator

from ftcomm.control import messages as m
from ftcomm.control.views import View

RESUMED = "resumed"  # the kind of report that a rank makes when it goes on in a new view
PER_BEAT = 16  # reports of one kind about one life that go on with a beat; they are about different ranks of it


class Installs:
    """The newest view that each of `ranks` ranks has installed."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._epochs: dict[int, int] = {}  # by rank
        self._counts: dict[int, int] = {}  # of ranks, by epoch

    def by_all(self, shard: int, epoch: int) -> bool:
        """Note that a rank has installed the view of `epoch`. Returns whether all have."""
        before = self._epochs.get(shard)
        if before != epoch:
            self._epochs[shard] = epoch
            self._counts[epoch] = self._counts.get(epoch, 0) + 1
            if before is not None:
                self._counts[before] -= 1
                if not self._counts[before]:
                    del self._counts[before]
        return self._counts[epoch] == self._ranks


Loss = m.Suspect | m.Severed
_About = tuple[str, int, str, str]


class Losses:
    """Reports of ranks that other replicas' ranks are lost, or that connections to them are."""

    def __init__(self) -> None:
        # Since the last beat: what has gone on, and what waits, by what the reports say of which life, and by its rank.
        self._said: dict[_About, set[int]] = {}
        self._waiting: dict[_About, dict[int, Loss]] = {}

    def is_news(self, loss: Loss) -> bool:
        """Whether the report is to go on now. If not, it is kept for a later beat, unless one like it has gone on in
        this one."""
        about = _about(loss)
        said = self._said.setdefault(about, set())
        if not said:
            said.add(loss.shard)
            return True
        if loss.shard not in said:
            self._waiting.setdefault(about, {}).setdefault(loss.shard, loss)
        return False

    def reached(self, replica: int, shard: int) -> None:
        """Note that rank `shard` reaches a replica again: what it has said before must not be heard after that."""
        for (kind, accused, _, what), waiting in self._waiting.items():
            if (kind, accused, what) == (m.Suspect.__name__, replica, str(False)):
                waiting.pop(shard, None)

    def tick(self, view: View | None) -> Iterator[Loss]:
        """Begin the next beat; returns the reports that go on with it. `view` is the newest: a report about a life that
        is in it no more has done its work."""
        self._said.clear()
        for about, waiting in list(self._waiting.items()):
            told = list(waiting.items())[:PER_BEAT]
            counts = view is not None and view.has(about[1], about[2])
            for shard, loss in told if counts else ():
                del waiting[shard]
                self._said.setdefault(about, set()).add(shard)
                yield loss
            if not counts or not waiting:
                del self._waiting[about]


def _about(loss: Loss) -> _About:
    """Returns what `loss` says of which life. Two that say the same differ in the rank that they are about."""
    what = loss.proof if isinstance(loss, m.Suspect) else loss.epoch
    return type(loss).__name__, loss.replica, loss.incarnation, str(what)


class Resumptions:
    """The reports of `ranks` ranks that they go on in a view."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._epoch: object = None
        self._said: dict[int, m.Report] = {}  # of that epoch, by rank

    def by_all(self, shard: int, report: m.Report) -> m.Report | None:
        """Note the report of a rank, or of the slowest one of its host. Returns that of the slowest one of all when all
        have made theirs."""
        epoch = report.fields.get("epoch")
        if epoch != self._epoch:
            self._epoch, self._said = epoch, {}
        self._said[shard] = report
        if len(self._said) < self._ranks:
            return None
        said, self._said = self._said, {}
        return max(said.values(), key=took)


def took(report: m.Report) -> float:
    """Returns the milliseconds that a rank took to go on; 0 if the report does not say so."""
    took = report.fields.get("resume_ms")
    return took if isinstance(took, float) else 0.0
