"""Keeps the monitor of a job going on the event loop: it hears every event, samples the steps each second, and hands
what has changed to the history."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from ftcomm.control.messages import Event
from ftcomm.control.rank_name import rank_name
from ftcomm.launch.event_text import describe
from ftcomm.monitoring.history import HistoryWriter
from ftcomm.monitoring.job import JobMonitor, Overview

log = logging.getLogger("ftcomm")

EVERY = 1.0  # s between two samples
KEEP = 30.0  # s after which the history of a job is written though nothing has changed
CLOSING = 5.0  # s for the last lines of the history


class MonitorLoop:
    """Drives a `JobMonitor`. Lives on one event loop; only `close` blocks."""

    def __init__(self, job: JobMonitor, steps: Callable[[], Mapping[int, int]], history: HistoryWriter) -> None:
        self.job = job
        self._steps, self._history = steps, history
        self._timer: asyncio.TimerHandle | None = None
        self._written = float("-inf")
        self._wrong: set[str] = set()  # kinds of events

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._sample)

    def event(self, event: Event) -> None:
        try:
            self.job.event(event, describe(event) or _own(event))
        except Exception:  # a look must not hold the job up
            if event["kind"] not in self._wrong:
                log.exception("cannot take the event %s into account", event["kind"])
            self._wrong.add(event["kind"])

    def overview(self) -> Overview:
        return self.job.overview(time.time(), time.monotonic())

    def close(self) -> None:
        """Write the last of the history; blocks for `CLOSING` seconds at most."""
        if self._timer is not None:
            self._timer.cancel()
        self.job.close(time.monotonic())
        self._write(time.time(), time.monotonic())
        self._history.close(CLOSING)

    def _sample(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._sample)
        now, mono = time.time(), time.monotonic()
        self.job.sample(mono, self._steps())
        if self.job.interruptions.changed or mono - self._written >= KEEP:
            self._write(now, mono)

    def _write(self, now: float, mono: float) -> None:
        interruptions = self.job.interruptions
        if interruptions.began is None:  # no job of ftcomm, or not yet
            return
        changed = sorted(interruptions.changed | interruptions.lasting)
        interruptions.changed.clear()
        self._history.put(self.job.record(now, mono), interruptions.listed(mono, changed))
        self._written = mono


def _own(event: Event) -> str | None:
    """Describes an event of the launcher; None for one that says nothing to people."""
    kind, replica = event["kind"], event.get("replica")
    if kind == "process_exited" and (event.get("signal") or event.get("code")):
        how = f"was killed by {event['signal']}" if event.get("signal") else f"exited with code {event['code']}"
        return f"{rank_name(replica, event.get('shard'))} {how}"
    if kind == "restarting":
        return f"replica {replica} is started again in {event.get('delay'):g} s"
    if kind == "restart_asked":
        return f"replica {replica} is asked to leave and started again"
    if kind == "leave_asked":
        return f"replica {replica} is asked to leave"
    if kind == "resumed" and event.get("shard") == 0 and event.get("ops"):
        return f"replica {replica} goes on in view {event.get('epoch')} after {event.get('resume_ms'):.0f} ms"
    if kind == "diagnosis":
        return f"why: {event['verdict']['who']}"
    if kind in ("coordinator_stopped", "coordinator_started"):
        return f"the coordinator has {kind.rpartition('_')[2]}"
    return "the job is being drained" if kind == "draining" else None
