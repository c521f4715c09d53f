"""Tells what became of each fault, by the events of the job, whose `mono` is this host's CLOCK_MONOTONIC.

injected     when we did it
detected     the first `suspect` or `view` that names or removes a replica that was hit
removed      the view without it
healed       when we took it back; a kill is over at once
returned     everybody who was hit contributes again: the fault is closed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ftcomm.lab.chaos.plan import REMOVES_NOBODY, Fault

MUST_REMOVE = ("kill", "orphan", "stop")  # others may be over before anybody has to go


@dataclasses.dataclass
class FaultRecord:
    """Times are CLOCK_MONOTONIC, durations seconds."""

    fault: Fault
    injected: float
    overlapped: bool = False  # injected while another was open
    healed: float | None = None
    detected: float | None = None
    removed_at: float | None = None
    closed: float | None = None
    removed: dict[int, int] = dataclasses.field(default_factory=dict)  # replica -> epoch of the first view without it
    resume: float = 0.0  # the longest view change of a survivor, from hearing of it to going on
    gap: float = 0.0  # the longest time between two steps of a replica that was not hit
    restarts: int = 0
    refused: bool = False  # an older store was
    gave_up: bool = False  # what had to come of it did not within the time that we waited

    @property
    def detection(self) -> float | None:
        return None if self.detected is None else self.detected - self.injected

    @property
    def stall(self) -> float | None:
        """Seconds from the injection until the last survivor goes on without the victim; None if no view removed it."""
        return None if self.removed_at is None else self.removed_at - self.injected + self.resume

    def as_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {**fields, "what": str(self.fault), "detection": self.detection, "stall": self.stall}


class FaultLedger:
    """All faults of a run, fed with the job's events in order."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.records: list[FaultRecord] = []
        self.contributing: frozenset[int] = frozenset()
        self.members: frozenset[int] = frozenset()
        self.divergences: list[dict[str, Any]] = []
        self.trespasses: list[dict[str, Any]] = []  # children that could speak for their rank
        self.innocent: list[dict[str, Any]] = []  # views that removed a replica that no fault had hit
        self.steps: dict[int, int] = {}
        self._stepped: dict[int, float] = {}

    def started(self, contributing: frozenset[int]) -> None:
        """Take over who contributes when we begin to listen."""
        self.contributing = self.members = contributing

    def add(self, fault: Fault, now: float) -> FaultRecord:
        record = FaultRecord(fault, now, overlapped=bool(self.open))
        self.records.append(record)
        return record

    @property
    def open(self) -> list[FaultRecord]:
        return [record for record in self.records if record.closed is None]

    def stuck(self, now: float, limit: float, start: float) -> list[FaultRecord]:
        """The faults that have been open for longer than `limit` seconds, and, of a replica that was removed, for
        as long as a `start` takes on top."""
        return [each for each in self.open if now - each.injected > limit + (start if each.removed else 0.0)]

    @property
    def touched(self) -> frozenset[int]:
        return frozenset(replica for record in self.open for replica in record.fault.replicas)

    @property
    def whole(self) -> bool:
        """Whether all replicas contribute and no fault is open."""
        return len(self.contributing) == self.replicas and not self.open

    def healed(self, record: FaultRecord, now: float) -> None:
        record.healed = now
        self._close(now)

    def feed(self, event: Mapping[str, Any]) -> None:
        kind, now, replica = event["kind"], float(event["mono"]), event.get("replica")
        if kind == "view":
            self._view(event, now)
        elif kind == "suspect":
            for record in self.open:
                if replica in record.fault.replicas and record.detected is None and record.injected <= now:
                    record.detected = now
        elif kind == "resumed":
            for record in self.records:
                if event.get("epoch") in record.removed.values() and replica not in record.removed:
                    record.resume = max(record.resume, float(event["resume_ms"]) / 1e3)
        elif kind == "restarting":
            for record in self.open:
                record.restarts += replica in record.fault.replicas
        elif kind == "divergence":
            self.divergences.append(dict(event))
        elif kind == "trespass":
            self.trespasses.append(dict(event))
        elif kind in ("outdated", "refused"):  # the second by a store with no view at all
            for record in self.open:
                record.refused |= record.fault.kind == "roll-back" and record.injected <= now
        elif kind == "coordinator_started":
            for record in self.open:
                if record.fault.kind == "coordinator":
                    record.healed = now
            self._close(now)
        if kind == "report" and isinstance(event.get("step"), int) and isinstance(replica, int):
            self._step(replica, event["step"], float(event.get("at", now)))  # a report may wait for a coordinator

    def _view(self, event: Mapping[str, Any], now: float) -> None:
        members = frozenset(member["replica"] for member in event["members"])
        lost = self.members - members
        self.members = members
        self.contributing = frozenset(member["replica"] for member in event["members"] if member["contributing"])
        innocent = set(lost)
        for record in self.open:
            if record.injected > now:
                continue
            for replica in lost & set(record.fault.replicas):
                if record.fault.kind not in REMOVES_NOBODY:
                    innocent.discard(replica)
                record.removed.setdefault(replica, event["epoch"])
                record.removed_at = record.removed_at or now
                if record.detected is None:
                    record.detected = now
        if innocent:
            # What a fault does may show when it is over, so the last one is named.
            last = f"{self.records[-1].fault.number}: {self.records[-1].fault}" if self.records else "no fault"
            self.innocent.append({**event, "innocent": sorted(innocent), "after": last})
        self._close(now)

    def _step(self, replica: int, step: int, now: float) -> None:
        last, self._stepped[replica] = self._stepped.get(replica), now
        steps, self.steps[replica] = step - self.steps.get(replica, step), step
        if last is None:
            return
        longest = (now - last) / max(1, steps)  # of several, where reports got lost: no step can be told apart
        meanwhile = [x for x in self.records if x.injected <= now and (x.closed is None or x.closed >= last)]
        if not any(replica in record.fault.replicas for record in meanwhile):
            for record in meanwhile:
                record.gap = max(record.gap, longest)

    def _close(self, now: float) -> None:
        for record in self.open:
            if record.healed is None or not set(record.fault.replicas) <= self.contributing:
                continue
            if record.fault.kind in MUST_REMOVE and not (record.removed or record.gave_up):
                continue
            record.closed = now
