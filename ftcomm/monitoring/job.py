"""The state of a job as people look at it: who is in it, at which step, how fast, what happened, what it cost. Pure.

Everything is made of the events of the coordinator and of the launcher, so it is the same under `ftcomm run` and beside
a coordinator of a cluster. What a look costs does not grow with the ranks: a replica with many ranks has `CELLS` cells,
each of several ranks.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ftcomm.control.messages import Event
from ftcomm.diagnosis.verdict import StallVerdict
from ftcomm.monitoring.history import JobRecord
from ftcomm.monitoring.interruptions import Interruption, Interruptions
from ftcomm.monitoring.plain import plain
from ftcomm.monitoring.statistics import effective

CELLS = 64  # of a replica, at most
ALL_CELLS = 4096  # of a job, about, so that a look at 1,024 replicas stays small
POINTS = 900  # of the curves, one a second
EVENTS = 80  # lines that are kept
SHOWN = 40  # interruptions, the newest
RATE = 15.0  # s over which steps a second are counted
LONGEST_LINE = 240  # characters of a line that are kept
CULPRITS = 8  # of a verdict, and lines of them, that are kept
LONGEST_SENTENCE = 1000  # characters of a sentence of it
GONE = -1  # in place of a cell's wait: a rank of it has no process


class RowView(msgspec.Struct, frozen=True):
    """A replica. `cells` are the ranks in order, or groups of as many: the longest wait of each in ms, or `GONE`."""

    replica: int
    state: str  # starting, training, catching up, away, finished
    host: str
    step: int  # -1 if not known
    since: float  # seconds since 1970
    starts: int
    effective: float | None
    reason: str  # of its absence
    cells: list[int]


class EventLine(msgspec.Struct, frozen=True):
    """A line of what happened."""

    number: int
    at: float  # seconds since 1970
    kind: str
    text: str
    replica: int = -1


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A second of the curves."""

    at: float  # seconds of the clock of `Overview.mono`, which is never set
    step: int
    contributing: int


class ToldVerdict(msgspec.Struct, frozen=True):
    """The verdict on why the job stands still, as the launcher has told it, or stood, if that is `over` for sure."""

    at: float  # seconds since 1970
    over: bool
    verdict: StallVerdict


class Overview(msgspec.Struct, frozen=True):
    """A job at one moment. Amounts are GPU-seconds."""

    run: str
    script: str
    replicas: int
    ranks_per_replica: int
    state: str  # forming, training, draining, over
    epoch: int
    began: float  # seconds since 1970 of the first view; 0 before
    now: float
    mono: float  # the same moment on the monotonic clock
    step: int
    rate: float  # steps a second
    contributing: int
    effective: float | None
    uses: dict[str, float]
    interruptions: int  # all of them
    causes: dict[str, int]
    prices: dict[str, dict[str, float]]  # cause -> phase -> amount
    events_of: dict[str, int]  # kind -> how many
    ranks_per_cell: int
    rows: list[RowView]
    newest: list[Interruption]  # the newest last
    events: list[EventLine]
    points: list[Point]
    told: ToldVerdict | None = None  # the newest; None: there was none


class JobMonitor:
    """Fed with every event in order, and a sample of all steps each second. One thread."""

    def __init__(
        self,
        run: str,
        script: str,
        replicas: int,
        ranks_per_replica: int,
        host_of: Callable[[int], str] = lambda replica: "",
    ) -> None:
        self.interruptions = Interruptions(ranks_per_replica, host_of)
        self._run, self._script, self._host_of = run, script, host_of
        self._replicas, self._ranks = replicas, ranks_per_replica
        self._epoch, self._began, self._draining, self._over = 0, 0.0, False, False
        self._contributes: dict[int, bool] = {}  # of the newest view
        self._steps: dict[int, int] = {}
        self._starts: Counter[int] = Counter()
        self._alive: dict[int, set[int]] = {}  # the ranks with a process, where processes are seen
        self._effective: dict[int, float] = {}
        self._reasons: dict[int, str] = {}
        self._finished: set[int] = set()
        self._places: dict[int, tuple[str, float]] = {}
        self._waits: dict[int, Sequence[float]] = {}  # seconds of each rank
        self._events: deque[EventLine] = deque(maxlen=EVENTS)
        self._counts: Counter[str] = Counter()
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._hosts: dict[str, float] = {}  # when each was seen first
        self._told: tuple[float, int, StallVerdict] | None = None  # when, at which step, and what

    @property
    def over(self) -> bool:
        return self._over

    def event(self, event: Event, text: str | None = None) -> None:
        """Take an event; with `text` it is a line that people read."""
        self.interruptions.event(event)
        kind, replica = event["kind"], event.get("replica")
        self._counts[kind] += 1
        if isinstance(replica, int) and isinstance(step := event.get("step"), int):
            self._steps[replica] = step
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(event)
        if text:
            of = replica if isinstance(replica, int) else -1
            self._events.append(EventLine(self._counts.total(), event["time"], kind, plain(text)[:LONGEST_LINE], of))
        self._note_places(event["time"])

    def sample(self, mono: float, steps: Mapping[int, int]) -> None:
        """Take the last step of each replica as of `mono`, on the clock of the events; once a second."""
        for replica, step in steps.items():
            self._steps[replica] = max(step, self._steps.get(replica, -1))
        for replica in self._contributes:
            self._hosts.setdefault(self._host_of(replica), mono)
        self._points.append(Point(round(mono, 2), self.step, self._contributing))

    def waits(self, replica: int, seconds: Sequence[float]) -> None:
        """Set for how long each rank of a replica has waited in its op by now."""
        self._waits[replica] = seconds

    def close(self, mono: float) -> None:
        """The job is over."""
        self._over = True
        self.interruptions.close(mono)

    @property
    def step(self) -> int:
        return max(self._steps.values(), default=-1)

    @property
    def _contributing(self) -> int:
        return sum(self._contributes.values())

    # -- looks -------------------------------------------------------------------------------------------------------

    def overview(self, now: float, mono: float) -> Overview:
        """Returns the job as of `now`; `mono` is the same moment on the clock of the events."""
        cells = -(-self._ranks // max(1, min(CELLS, ALL_CELLS // self._replicas)))
        uses = {use.value: round(amount, 3) for use, amount in self.interruptions.gpu_time.booked(mono).items()}
        causes, prices = self.interruptions.by_cause(mono)
        return Overview(
            run=self._run,
            script=self._script,
            replicas=self._replicas,
            ranks_per_replica=self._ranks,
            state=self._state(),
            epoch=self._epoch,
            began=self._began,
            now=now,
            mono=mono,
            step=self.step,
            rate=self._rate(),
            contributing=self._contributing,
            effective=effective(uses),
            uses=uses,
            interruptions=len(self.interruptions),
            causes=causes,
            prices=prices,
            events_of=dict(self._counts),
            ranks_per_cell=cells,
            rows=[self._row(replica, cells, now) for replica in range(self._replicas)],
            newest=self.interruptions.listed(mono)[-SHOWN:],
            events=list(self._events),
            points=list(self._points),
            told=self._verdict(),
        )

    def record(self, now: float, mono: float) -> JobRecord:
        """Returns the job for its history."""
        uses = {use.value: round(amount, 3) for use, amount in self.interruptions.gpu_time.booked(mono).items()}
        hosts = {host: round(mono - since, 3) for host, since in self._hosts.items() if host}
        return JobRecord(
            self._run,
            self._script,
            self._replicas,
            self._ranks,
            self._began,
            now,
            self._over,
            self.step + 1,
            hosts,
            uses,
        )

    def _state(self) -> str:
        if self._over:
            return "over"
        return "draining" if self._draining else "training" if self._epoch else "forming"

    def _verdict(self) -> ToldVerdict | None:
        if self._told is None:
            return None
        at, step, verdict = self._told
        moved = self._ranks == 1 and self.step > step  # of several ranks the others may go on
        gone = any(replica not in self._contributes for replica, _ in verdict.culprits if self._epoch)
        return ToldVerdict(at, self._over or moved or gone, verdict)

    def _rate(self) -> float:
        if len(self._points) < 2:
            return 0.0
        last = self._points[-1]
        first = next(point for point in self._points if last.at - point.at <= RATE)
        return round((last.step - first.step) / (last.at - first.at), 3) if last.at > first.at else 0.0

    def _row(self, replica: int, per_cell: int, now: float) -> RowView:
        state, since = self._places.get(replica, ("starting", now))
        return RowView(
            replica,
            state,
            self._host_of(replica),
            self._steps.get(replica, -1),
            since,
            self._starts[replica],
            self._effective.get(replica),
            "" if state == "training" else self._reasons.get(replica, ""),
            self._cells(replica, per_cell),
        )

    def _cells(self, replica: int, per_cell: int) -> list[int]:
        waits = self._waits.get(replica) or array("f", bytes(4 * self._ranks))
        cells = [round(1e3 * max(waits[start : start + per_cell])) for start in range(0, self._ranks, per_cell)]
        alive = self._alive.get(replica)
        if alive is not None and len(alive) < self._ranks:
            for start in range(len(cells)):
                if any(rank not in alive for rank in range(start * per_cell, min((start + 1) * per_cell, self._ranks))):
                    cells[start] = GONE
        return cells

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_process_started(self, event: Event) -> None:
        replica, shard = event["replica"], event["shard"]
        self._alive.setdefault(replica, set()).add(shard)
        self._starts[replica] += shard == 0

    def _on_process_exited(self, event: Event) -> None:
        self._alive.setdefault(event["replica"], set()).discard(event["shard"])
        if event.get("signal") or event.get("code"):
            how = event.get("signal") or f"exit code {event['code']}"
            self._reasons[event["replica"]] = str(how)

    def _on_removed(self, event: Event) -> None:
        self._reasons[event["replica"]] = plain(str(event.get("reason", "")))[:LONGEST_LINE]

    def _on_metrics(self, event: Event) -> None:
        self._effective[event["replica"]] = event["effective"]

    def _on_finished(self, event: Event) -> None:
        self._finished.add(event["replica"])

    def _on_joined(self, event: Event) -> None:
        self._finished.discard(event["replica"])

    def _on_diagnosis(self, event: Event) -> None:
        verdict = msgspec.convert(event["verdict"], StallVerdict)
        self._told = (
            event["time"],
            self.step,
            msgspec.structs.replace(
                verdict,
                culprits=verdict.culprits[:CULPRITS],
                lines=verdict.lines[:CULPRITS],
                who=plain(verdict.who)[:LONGEST_SENTENCE],
                others=plain(verdict.others)[:LONGEST_SENTENCE],
            ),
        )

    def _on_draining(self, event: Event) -> None:
        self._draining = True

    def _on_view(self, event: Event) -> None:
        self._epoch, self._began = event["epoch"], self._began or event["time"]
        self._contributes = {x["replica"]: x["contributing"] for x in event["members"]}
        for replica, contributes in self._contributes.items():
            if contributes:
                self._reasons.pop(replica, None)

    def _note_places(self, now: float) -> None:
        for replica in range(self._replicas):
            place = self._place(replica)
            if self._places.get(replica, ("", 0.0))[0] != place:
                self._places[replica] = place, now

    def _place(self, replica: int) -> str:
        if replica in self._finished:
            return "finished"
        if replica in self._contributes:
            return "training" if self._contributes[replica] else "catching up"
        return "starting" if self._alive.get(replica) or not self._epoch else "away"
