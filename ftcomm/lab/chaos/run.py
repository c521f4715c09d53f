"""The loop of `ftcomm chaos`: hears the job's events, does what is due, and knows when the job hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ftcomm.control.rank_name import rank_name
from ftcomm.errors import FtcommError
from ftcomm.lab.chaos.leaks import Leaks
from ftcomm.lab.chaos.network_faults import cut, has_netem
from ftcomm.lab.chaos.plan import NETEM, NETWORK, TOLD, Fault, Plan
from ftcomm.lab.chaos.process_faults import (
    FORKS,
    HOLDS,
    ActiveFault,
    Paused,
    RolledBack,
    Slowed,
    Stopped,
    fork,
    hold,
    kill,
)
from ftcomm.lab.chaos.record import FaultLedger, FaultRecord
from ftcomm.launch.admin import protocol
from ftcomm.launch.admin.client import AdminClient, JobEnded
from ftcomm.launch.rundir import VIEWS

LOOK = 0.5  # s between looks at the job's status
SAMPLE = 2.0  # s between looks at the processes
STARTED = 120.0  # s that processes may take to come to the job: theirs is the time of imports, on a busy machine
TICK = 0.1  # s that we listen at most before something else is looked at
SETTLE = 60.0  # s that we wait for the job to be whole before the next fault all the same
OVER = 10.0  # s on top of what the timeouts allow before the job counts as hung


@dataclasses.dataclass(frozen=True)
class ChaosOptions:
    """Times are seconds."""

    every: float
    duration: float
    kinds: tuple[str, ...]
    seed: int
    overlap: float = 0.3  # of faults that may come before the job is whole again
    faults: int | None = None  # over after so many, if the time is not over before
    hang_after: float | None = None  # without a step; by default what the job's timeouts allow


@dataclasses.dataclass
class ChaosOutcome:
    """The outcome that is reported. `failures` is empty if all was well."""

    options: ChaosOptions
    status: protocol.Status
    ledger: FaultLedger
    leaks: Leaks
    seconds: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)
    ranks: list[str] = dataclasses.field(default_factory=list)  # where they stood, if the job hung
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Chaos:
    """`say(text)` gets a line for what happens, `show(outcome, seconds)` is called several times a second."""

    def __init__(
        self,
        path: Path,
        options: ChaosOptions,
        say: Callable[[str], None] = lambda text: None,
        show: Callable[[ChaosOutcome, float], None] = lambda outcome, seconds: None,
    ) -> None:
        self._path, self._options, self._say, self._show = path, options, say, show
        self._active: list[tuple[FaultRecord, ActiveFault, float | None]] = []  # and when it is due
        self._progress = (-1, 0.0)  # the last step, and when it was seen first
        self._chance = random.Random(options.seed)  # apart from the plan, which must not depend on how often we wait
        self._drawn: bool | None = None  # whether the next fault may overlap
        self._told: set[int] = set()  # faults whose end was told

    def run(self) -> ChaosOutcome:
        """Blocks until the time is over, or the job hangs or ends. Raises `FtcommError` if it cannot begin."""
        with (
            AdminClient(self._path) as self._remote,
            AdminClient(self._path) as events,
            contextlib.ExitStack() as stack,
        ):
            told = any(kind in TOLD for kind in self._options.kinds)
            status = when_formed(self._remote.status) if told else self._remote.status()
            kinds = possible(status, self._options.kinds, self._say)
            events.ask(protocol.GetEvents())
            self._outcome = ChaosOutcome(self._options, status, FaultLedger(len(status.replicas)), Leaks())
            self._ledger = self._outcome.ledger
            self._ledger.started(frozenset(x.replica for x in status.replicas if x.contributes))
            self._plan = Plan(kinds, status.ranks_per_replica, self._options.seed, bool(status.network))
            stack.callback(self._end_faults)
            started = time.monotonic()
            try:
                self._loop(events, started)
            except JobEnded as error:
                self._outcome.failures.append(str(error))
            self._outcome.seconds = time.monotonic() - started
        if self._ledger.divergences:
            self._outcome.failures.append(f"{len(self._ledger.divergences)} reports of divergence")
        self._outcome.failures += [
            f"removed though no fault forces it: replicas {view['innocent']} ({view['why']}), after {view['after']}"
            for view in self._ledger.innocent
        ]
        self._outcome.failures += [
            f"nobody has refused the {record.fault}"
            for record in self._ledger.records
            if record.fault.kind == "roll-back" and record.gave_up
        ]
        self._outcome.failures += [
            f"a forked child of {rank_name(event['replica'], event['shard'])} was not refused: {event['how']}"
            for event in self._ledger.trespasses
        ]
        self._outcome.failures += [f"a leak: {leak}" for leak in self._outcome.leaks.found()]
        return self._outcome

    def _loop(self, events: AdminClient, started: float) -> None:
        end = started + self._options.duration
        due, look, sample = started, started, started
        status = self._outcome.status
        self._progress = (-1, started)
        while True:
            for event in events.follow(time.monotonic() + self._until_due()):
                self._ledger.feed(event)
                if event["kind"] != "report":
                    self._outcome.events.append(event)
            now = time.monotonic()
            self._tend(now)
            if now >= look:
                status, look = self._remote.status(), now + LOOK
                if self._hangs(status, now):
                    return
            if now >= sample and self._ledger.whole:
                pids = [pid for replica in status.replicas for pid in replica.pids.values()]
                self._outcome.leaks.sample(status.pid, pids, now)
                sample = now + SAMPLE
            if self._options.faults is not None and len(self._ledger.records) >= self._options.faults:
                end = min(end, now)
            if now >= end and (self._ledger.whole or not self._wait_whole(now, end)):
                return
            if due <= now < end and self._may_hit(now, due):
                self._hit(now)
                due = now + self._options.every
            self._show(self._outcome, now - started)

    def _until_due(self) -> float:
        now = time.monotonic()
        return max(0.0, min([TICK, *(due - now for _, _, due in self._active if due is not None)]))

    # -- doing faults ------------------------------------------------------------------------------------------------

    def _may_hit(self, now: float, due: float) -> bool:
        if self._ledger.whole or now - due > SETTLE:
            self._drawn = None
            return True
        if not self._ledger.open:  # it has yet to become whole for the first time
            return False
        if self._drawn is None:  # one draw for each fault, however often we come by
            self._drawn = self._chance.random() < self._options.overlap
        return self._drawn

    def _hit(self, now: float) -> None:
        status = self._remote.status()
        contributing = {x.replica for x in status.replicas if x.contributes and x.pids} & self._ledger.contributing
        fault = self._plan.next(contributing - self._ledger.touched, status.away)
        self._drawn = None
        if fault is None:
            return
        pids = {x.replica: {int(rank): pid for rank, pid in x.pids.items()} for x in status.replicas}
        doing = self._do(fault, pids, status)
        record = self._ledger.add(fault, doing.since)
        overlapping = ", while another is not over" if record.overlapped else ""
        self._say(f"{fault.number}: {fault}{overlapping}")
        if doing.over:
            self._ledger.healed(record, doing.since)
        else:
            self._active.append((record, doing.active, doing.active.at(now)))

    def _do(self, fault: Fault, pids: dict[int, dict[int, int]], status: protocol.Status) -> _Doing:
        now = time.monotonic()
        if fault.kind == "coordinator":
            self._restart_coordinator(fault.seconds)
            return _Doing(now, ActiveFault())
        if fault.kind == "roll-back":
            store = self._path.parent / VIEWS
            return _Doing(now, RolledBack(store, fault.views, self._restart_coordinator, self._decided))
        if fault.cable or fault.kind in (*NETWORK, *NETEM):
            return _Doing(now, cut(fault, status))
        if fault.kind == "coordinator-stop":
            return _Doing(now, Paused([status.pid], fault.seconds * status.heartbeat_timeout))
        if fault.kind == "hold":
            hold(pid for replica in fault.replicas for pid in pids[replica].values())
            return _Doing(now, ActiveFault())
        hit = [pids[fault.replicas[0]][rank] for rank in fault.ranks if rank in pids[fault.replicas[0]]]
        if fault.kind in ("fork", "orphan"):
            fork(hit)
            now = time.monotonic()
        if fault.kind == "fork":
            return _Doing(now, ActiveFault())
        if fault.kind in ("kill", "orphan"):
            kill(hit)
            return _Doing(now, ActiveFault(), over=True)
        if fault.kind == "stop":
            return _Doing(now, Stopped(hit))
        return _Doing(now, Slowed(hit, status.heartbeat_timeout))

    def _restart_coordinator(self, away: float) -> None:
        self._remote.ask(protocol.RestartCoordinator(away))

    def _decided(self) -> None:
        self._outcome.failures.append("a coordinator has decided by a store that is older than the job")

    def _tend(self, now: float) -> None:
        """Go on with what is due, and take back what has lasted long enough."""
        left = []
        for record, active, due in self._active:
            if self._is_over(record, now):
                try:
                    active.close()
                except FileNotFoundError:
                    raise JobEnded("the job has ended, and its networks with it") from None
                if record.fault.kind != "coordinator":  # the launcher tells when that one is back
                    self._ledger.healed(record, time.monotonic())
            else:
                left.append((record, active, active.at(now) if due is not None and due <= now else due))
        self._active = left
        for record in self._ledger.records:
            if record.closed is not None and record.fault.number not in self._told:
                self._told.add(record.fault.number)
                self._say(f"{record.fault.number}: over; {_described(record)}")

    def _is_over(self, record: FaultRecord, now: float) -> bool:
        fault, lasted = record.fault, now - record.injected
        if fault.kind == "coordinator":
            return record.healed is not None
        if fault.kind == "stop":
            if not record.removed:
                record.gave_up = lasted > self._limit()
                return record.gave_up
            return now - (record.detected or now) >= fault.seconds
        if fault.kind == "roll-back" and not record.refused:
            record.gave_up = lasted > self._limit()
            return record.gave_up
        if fault.kind in ("hold", "fork", "coordinator-stop", "cut-off", "roll-back"):
            return lasted >= fault.seconds * self._outcome.status.heartbeat_timeout
        if fault.kind in NETWORK:
            since = max((record.removed_at or now) - record.injected, 0.0) if record.removed else self._unnoticed()
            return lasted >= since + fault.seconds
        return lasted >= fault.seconds

    def _unnoticed(self) -> float:
        """Returns for how long a cut may last without a removal: its ends may have another way, or nothing to say."""
        status = self._outcome.status
        # Between hosts an op stands still, and is a stall after its timeout at the latest; memory is not cut.
        return 3 * status.heartbeat_timeout + (status.op_timeout if status.transport in ("tcp", "nixl") else 0.0)

    def _end_faults(self) -> None:
        for _, active, _ in self._active:
            with contextlib.suppress(OSError):  # of a network: the job has ended, and took it along
                active.close()

    # -- is it alive? ------------------------------------------------------------------------------------------------

    def _limit(self) -> float:
        """Returns how long a job of these timeouts may go without a step: two ops that fail one after the other."""
        status = self._outcome.status
        if self._options.hang_after is not None:
            return self._options.hang_after
        return 2 * status.op_timeout + 2 * status.heartbeat_timeout + OVER

    def _hangs(self, status: protocol.Status, now: float) -> bool:
        step = max((replica.step for replica in status.replicas), default=-1)
        if step > self._progress[0]:
            self._progress = (step, now)
        elif now - self._progress[1] > self._limit():
            self._outcome.failures.append(f"no step for {now - self._progress[1]:.0f} s; the last was {step}")
            self._outcome.ranks = where_they_stand(status)
            return True
        stuck = self._ledger.stuck(now, self._limit() + SETTLE, STARTED)
        if stuck:
            self._outcome.failures.append(f"not over after {now - stuck[0].injected:.0f} s: {stuck[0].fault}")
            self._outcome.ranks = where_they_stand(status)
        return bool(stuck)

    def _wait_whole(self, now: float, end: float) -> bool:
        """Whether to wait on after the last fault for the job to become whole."""
        if now - end <= self._limit() + SETTLE:
            return True
        self._outcome.failures.append(f"the job was not whole again {now - end:.0f} s after the last fault")
        return False


@dataclasses.dataclass(frozen=True)
class _Doing:
    since: float
    active: ActiveFault
    over: bool = False


def _described(record: FaultRecord) -> str:
    parts = []
    if record.detection is not None:
        parts.append(f"noticed after {1e3 * record.detection:.0f} ms")
    if record.stall is not None:
        parts.append(f"stall {1e3 * record.stall:.0f} ms")
    parts.append(f"longest step of the others {1e3 * record.gap:.0f} ms")
    if record.closed is not None:
        parts.append(f"whole after {record.closed - record.injected:.1f} s")
    return ", ".join(parts)


def when_formed(look: Callable[[], protocol.Status]) -> protocol.Status:
    """Returns the status once the replicas have met: before, their ranks may not listen to what signals tell them."""
    status, end = look(), time.monotonic() + STARTED
    while not status.epoch:
        if time.monotonic() >= end:
            raise FtcommError(
                f"the replicas have not met within {STARTED:g} s; ask `ftcomm why` whom the job waits for"
            )
        time.sleep(TICK)
        status = look()
    return status


def possible(status: protocol.Status, kinds: Sequence[str], say: Callable[[str], None]) -> tuple[str, ...]:
    """Returns the `kinds` that this kernel can do. Raises `FtcommError` if they cannot be done to that job."""
    if len(status.replicas) < 2:
        raise FtcommError("the job has one replica, and none would be left; start it with --replicas 2 or more")
    if status.draining:
        raise FtcommError("the job is ending")
    if "coordinator-stop" in kinds and status.pid == os.getpid():
        raise FtcommError("--kinds coordinator-stop: the launcher is this process; start the job by `ftcomm run`")
    cut = [kind for kind in kinds if kind in (*NETWORK, *NETEM)]
    if cut and not status.network:
        raise FtcommError(
            f"--kinds {','.join(cut)}: the replicas share this host's network, which cannot be cut; start the job as "
            "root with: ftcomm run --hosts netns ... (and without --rate and --delay)"
        )
    if cut and status.transport in ("auto", "shm"):
        say(
            "the replicas share memory, so what they reduce goes on while a network is cut; to cut that as well, start "
            "the job with --transport tcp"
        )
    told = [kind for kind in kinds if kind in TOLD]
    # One that comes back may not have come to its own code yet.
    ranks = [pid for replica in status.replicas if replica.member for pid in replica.pids.values()]
    if told and not all(_handles(pid, number) for pid in ranks for number in (HOLDS, FORKS)):
        raise FtcommError(
            f"--kinds {','.join(told)}: the script does not listen to what it is told by signals; start the job with "
            "-m ftcomm.lab.chaos.train, or leave such kinds out"
        )
    netem = [kind for kind in kinds if kind in NETEM]
    if not netem or has_netem(status):
        return tuple(kinds)
    left = tuple(kind for kind in kinds if kind not in NETEM)
    text = f"this kernel has no netem (modprobe sch_netem), so there is no {' and no '.join(netem)}"
    if not left:
        raise FtcommError(f"--kinds {','.join(kinds)}: {text}; choose other kinds")
    say(text)
    return left


def where_they_stand(status: protocol.Status) -> list[str]:
    """Describe the threads of each rank, their states and what they wait for in the kernel, and ask for its stacks."""
    lines = []
    for replica in status.replicas:
        lines.append(
            f"replica {replica.replica}: {replica.state}, step {replica.step}, "
            f"{'contributes' if replica.contributes else 'member' if replica.member else 'no member'}"
        )
        for rank, pid in replica.pids.items():
            with contextlib.suppress(OSError):
                for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
                    name = (task / "comm").read_text().strip()
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    lines.append(f"  shard {rank} {name} {task.name}: {state} {(task / 'wchan').read_text()}")
                if _handles(pid, signal.SIGUSR1):  # a faulthandler, see train.py; it goes to the job's own output
                    os.kill(pid, signal.SIGUSR1)
    return lines


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether it would survive that signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
