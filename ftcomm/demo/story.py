"""Tells what happened in a run of the demo, put together from its events: curves, the state of each replica, the
recovery."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict

from ftcomm.control.messages import Event
from ftcomm.demo.kill import Kill
from ftcomm.launch.event_text import counted, replicas
from ftcomm.monitoring.interruptions import Interruption
from ftcomm.recorder.reader import Recording


@dataclasses.dataclass
class ReplicaState:
    """`state` is for people: starting, waiting to join, training, catching up, killed, dead, finished."""

    state: str = "starting"
    pid: int = 0
    step: int = -1
    loss: float = float("nan")
    life: int = 0  # starts so far


@dataclasses.dataclass
class Mark:
    """A moment worth a line in the picture. `at` in seconds since the first step."""

    at: float
    kind: str  # "killed", "resumed", "rejoined", "caught up"
    text: str


class Story:
    """Fed with every event in order; read at any time. One thread."""

    def __init__(self, replicas: int, steps: int) -> None:
        self.total = steps
        self.replicas = {number: ReplicaState() for number in range(replicas)}
        self.epoch = 0
        self.began: float | None = None  # time.monotonic() of the first step of anybody
        self.train: dict[int, list[float]] = defaultdict(list)  # step -> loss of each replica that counted
        self.validation: dict[int, float] = {}
        self.ended: dict[int, float] = {}  # step -> seconds at which the first replica had done it
        self.tokens: list[tuple[float, int]] = []  # (seconds, tokens that counted)
        self.reported: dict[tuple[int, int], set[int]] = defaultdict(set)  # (replica, life) -> steps
        self.hashes: dict[int, str] = {}
        self.log: list[tuple[float, str]] = []
        self.marks: list[Mark] = []
        self.victim: int | None = None
        self.kill: Kill | None = None
        self.detected: float | None = None  # time.monotonic()
        self.lost_in: int | None = None  # the epoch of the view without the victim
        self.resumed: dict[int, Event] = {}  # of each survivor, with "stall_ms" since the kill
        self.snapshots: list[Event] = []
        self.fetched: Event | None = None
        self.rejoined_at: int | None = None  # step
        self.contributes_again: int | None = None  # step
        self.victim_in = ""  # the op that the victim was in, as its recording says
        self.recorded: Interruption | None = None  # what the history keeps of the kill
        self._now = 0.0

    # -- what is fed in ----------------------------------------------------------------------------------------------

    def killed(self, replica: int, kill: Kill) -> None:
        self.victim, self.kill = replica, kill
        self.replicas[replica].state = "killed"
        text = (
            f"SIGKILL to replica {replica} (pid {kill.pid}) inside an all-reduce: "
            f"{counted(kill.posted, 'chunk')} posted, {kill.reduced} reduced, {kill.taken} taken in epoch {kill.epoch}"
        )
        self._mark(kill.at, "killed", f"replica {replica} killed", text)

    def recorded_op(self, recording: Recording) -> None:
        """Take the op that the victim was in from its recording, which outlives it."""
        op = next((op for op in recording.ops if op.returned is None), None)
        if op is not None:
            self.victim_in = f"{op.kind} {op.number} of {op.elements:,} {op.dtype}, at {op.caller}"

    def event(self, event: Event) -> None:
        """Take in an event; unknown kinds are ignored."""
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            self._now = event["mono"]
            handler(event)

    def say(self, at: float, text: str) -> None:
        self.log.append((self.seconds(at), text))

    # -- what can be asked -------------------------------------------------------------------------------------------

    def seconds(self, mono: float) -> float:
        """Seconds since the first step; negative before."""
        return mono - self.began if self.began is not None else 0.0

    @property
    def step(self) -> int:
        return max(self.ended, default=-1)

    @property
    def survivors(self) -> list[int]:
        return [number for number in self.replicas if number != self.victim]

    def losses(self) -> list[tuple[int, float]]:
        """Returns (step, mean training loss over the replicas that counted) of each step."""
        return [(step, statistics.fmean(values)) for step, values in sorted(self.train.items())]

    def rate(self, until: float, window: float = 3.0) -> float:
        """Tokens a second that counted, over the `window` seconds before `until` (seconds since the first step)."""
        window = min(window, max(until, 0.2))
        return sum(n for at, n in self.tokens if until - window < at <= until) / window

    def steps_lost(self) -> int:
        """The most steps that a survivor did not report."""
        every = set(range(self.total))
        return max(len(every - self.reported[number, self.replicas[number].life]) for number in self.survivors)

    def equal(self) -> bool:
        """Whether every replica has reported its final weights, and all are the same bits."""
        return len(self.hashes) == len(self.replicas) and len(set(self.hashes.values())) == 1

    def detect_ms(self) -> float | None:
        return None if self.detected is None or self.kill is None else (self.detected - self.kill.at) * 1000

    def stalls_ms(self) -> dict[int, float]:
        """Milliseconds of each survivor from the kill until the interrupted ops went on; its detection included."""
        return {number: event["stall_ms"] for number, event in sorted(self.resumed.items())}

    def resume_ms(self) -> float | None:
        """Milliseconds from the kill until the interrupted ops went on at the last survivor."""
        stalls = self.stalls_ms()
        return max(stalls.values()) if len(stalls) == len(self.survivors) else None

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_process_started(self, event: Event) -> None:
        replica = self.replicas[event["replica"]]
        replica.state, replica.pid, replica.life = "starting", event["pid"], replica.life + 1
        if replica.life > 1:
            self.say(self._now, f"replica {event['replica']} started again (pid {event['pid']})")

    def _on_process_exited(self, event: Event) -> None:
        replica = self.replicas[event["replica"]]
        if event.get("signal") or event.get("code"):
            how = event.get("signal") or f"exit code {event['code']}"
            replica.state = "dead"
            self.say(self._now, f"replica {event['replica']} died: {how}")
        else:
            replica.state = "finished"

    def _on_joined(self, event: Event) -> None:
        self.replicas[event["replica"]].state = "waiting to join"

    def _on_suspect(self, event: Event) -> None:
        if self._of_victim(event) and self.detected is None:
            self.detected = self._now
            self.say(self._now, f"replica {event['by']} reports the loss: {event['reason']}")

    def _on_view(self, event: Event) -> None:
        self.epoch = event["epoch"]
        members = {member["replica"]: member["contributing"] for member in event["members"]}
        for number, contributing in members.items():
            self.replicas[number].state = "training" if contributing else "catching up"
        training = [number for number, contributing in members.items() if contributing]
        text = f"view {self.epoch}: {replicas(training)} in training"
        behind = [number for number, contributing in members.items() if not contributing]
        self.say(self._now, text + (f", {replicas(behind)} catching up" if behind else ""))
        if self.kill is None or self.victim is None:
            return
        if self.victim not in members:
            self.detected = self.detected or self._now
            self.lost_in = self.lost_in or self.epoch
        elif self.rejoined_at is None:
            self.rejoined_at = event["step"]
            self._mark(self._now, "rejoined", f"replica {self.victim} rejoins")
        elif members[self.victim] and self.contributes_again is None:
            self.contributes_again = event["step"]
            self._mark(self._now, "caught up", f"replica {self.victim} contributes")

    def _on_resumed(self, event: Event) -> None:
        """A member's ops go on in a new epoch; here the one that came of the kill."""
        number = event["replica"]
        if event["epoch"] != self.lost_in or number in self.resumed:
            return
        self.resumed[number] = {**event, "stall_ms": (self._now - self.kill.at) * 1000} if self.kill else event
        self.say(
            self._now,
            f"replica {number} resumes {counted(event['ops'], 'op')} {event['resume_ms']:.1f} ms after it heard of the "
            f"loss: {counted(event['reduced'], 'chunk')} to reduce again, {event['copied']} to copy",
        )
        if set(self.resumed) == set(self.survivors):
            self._mark(self._now, "resumed", "all-reduce resumed", "all survivors are in that same all-reduce again")

    def _on_state_snapshot(self, event: Event) -> None:
        self.snapshots.append(event)

    def _on_state_fetched(self, event: Event) -> None:
        if self._of_victim(event):
            self.fetched = event
            self.say(
                self._now,
                f"replica {event['replica']} has the state of step {event['step']}: {event['bytes'] / 1e6:.1f} MB from "
                f"{named(event['sources'])} in {event['seconds']:.2f} s, "
                f"{counted(event['replayed'], 'step')} to replay",
            )

    def _on_report(self, event: Event) -> None:
        number = event["replica"]
        if "final_hash" in event:
            self.hashes[number] = event["final_hash"]
            return
        step = event["step"]
        if "validation" in event:
            self.validation[step] = event["validation"]
            return
        if self.began is None:
            self.began = self._now
        replica = self.replicas[number]
        replica.step, replica.loss = step, event["loss"]
        self.reported[number, replica.life].add(step)
        self.ended.setdefault(step, self.seconds(self._now))
        if event["counted"]:
            self.train[step].append(event["loss"])
            self.tokens.append((self.seconds(self._now), event["tokens"]))

    def _on_finished(self, event: Event) -> None:
        self.replicas[event["replica"]].state = "finished"

    def _on_failed(self, event: Event) -> None:
        self.say(self._now, f"failed: {event['reason']}")

    def _of_victim(self, event: Event) -> bool:
        return self.kill is not None and event["replica"] == self.victim

    def _mark(self, mono: float, kind: str, text: str, line: str | None = None) -> None:
        self.marks.append(Mark(self.seconds(mono), kind, text))
        self.say(mono, line or text)


def named(sources: str) -> str:
    """Returns `replicas 0, 2` for `0,2`."""
    return replicas(int(number) for number in sources.split(",") if number)
