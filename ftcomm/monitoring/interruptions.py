"""Makes interruptions of a job's events: who was out, from when until when, why, and at what price. Pure.

An interruption begins when a view is without a replica that was in the one before, and ends when that replica
contributes again. Its phases are those of `ftcomm.monitoring.gpu_time`: the survivors pay from the first sign of the
loss until their ops go on, the lost replica from then until it contributes. Two replicas that are lost in one view
share what the survivors pay. A view that only makes connections again is an interruption of the network, without
absence. A replica that finishes, or that leaves as the job is drained, is none.

A job of a year has many: the newest `KEPT` are kept, and of those before only sums. All are in the history.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from ftcomm.control.messages import Event
from ftcomm.control.script_end import ScriptEnd
from ftcomm.monitoring.causes import Evidence, InterruptionCause, classify, lost_connection
from ftcomm.monitoring.gpu_time import OVER, PRICED, GpuTime, Use
from ftcomm.monitoring.plain import plain

LINES = 12  # of the output of a rank that are kept
KEPT = 1000  # interruptions, and those that are not over or have changed


class Interruption(msgspec.Struct, frozen=True):
    """One interruption. `price` is in GPU-seconds by the value of `Use`; a rank counts as one GPU. `absent` are the
    seconds until the replica contributed again, or until now."""

    number: int  # from 0, in the job
    replica: int
    host: str
    at: float  # seconds since 1970
    epoch: int  # of the view that it caused
    step: int  # the last known one of the job, -1 if none
    cause: InterruptionCause
    price: dict[str, float]
    absent: float = 0.0
    over: bool = False  # the replica contributes again, or will not any more
    back: bool = False  # it contributes again
    deaths: int = 0  # of later lives before it was back
    lines: tuple[str, ...] = ()  # the last of its output

    @property
    def gpu_seconds(self) -> float:
        return sum(self.price.values())


@dataclasses.dataclass
class _Open:
    """An interruption as it is known so far."""

    number: int
    replica: int
    host: str
    at: float
    began: float  # monotonic
    epoch: int
    step: int
    evidence: Evidence
    cause: InterruptionCause | None = None  # fixed; None: as the evidence says
    survivors: tuple[int, ...] = ()
    shared: int = 1  # interruptions that came by the same view
    new_life: bool = False
    deaths: int = 0
    ended: float | None = None
    back: bool = False


@dataclasses.dataclass
class _Sign:
    """The first signs that a replica is lost, of no view yet. Monotonic times."""

    first: float | None = None
    noticed: float | None = None  # by the coordinator
    evidence: Evidence = dataclasses.field(default_factory=Evidence)

    def see(self, at: float, *, noticed: bool = False, **known: Any) -> None:
        self.first = at if self.first is None else min(self.first, at)
        if noticed:
            self.noticed = at if self.noticed is None else min(self.noticed, at)
        self.know(**known)

    def know(self, **known: Any) -> None:
        self.evidence = _with(self.evidence, **known)


def _with(evidence: Evidence, **known: Any) -> Evidence:
    """Adds what is known; what is first known of a thing stays."""
    new = {name: value for name, value in known.items() if value and getattr(evidence, name) in (None, "", (), False)}
    if "code" in known and evidence.code is None and known["code"] is not None:
        new["code"] = known["code"]
    return msgspec.structs.replace(evidence, **new)


def _nowhere(replica: int) -> str:
    return ""


class Interruptions:
    """The interruptions of one job. Fed with every event in order; one thread. `host_of` names a replica's host."""

    def __init__(self, ranks_per_replica: int, host_of: Callable[[int], str] = _nowhere) -> None:
        self.gpu_time = GpuTime(ranks_per_replica)
        self.changed: set[int] = set()  # numbers of those that differ from when somebody last cleared this
        self.began: float | None = None  # of the first view, monotonic
        self.now = 0.0  # of the newest event
        self._ranks, self._host_of = ranks_per_replica, host_of
        self._count = 0
        self._kept: dict[int, _Open] = {}  # by number, the oldest first
        self._past_causes: Counter[str] = Counter()  # of those that are not kept
        self._past_prices: dict[str, Counter[str]] = {}
        self._records: dict[int, Interruption] = {}  # of those that are over and have not changed since
        self._open: dict[int, _Open] = {}  # replica -> its interruption
        self._withdrawn: dict[int, _Open] = {}  # those that the newest view has withdrawn
        self._signs: dict[int, _Sign] = {}
        self._members: dict[int, bool] = {}  # of the newest view -> whether it contributes
        self._finished: set[int] = set()
        self._draining = False
        self._resuming: dict[int, list[_Open]] = {}  # epoch -> those that made it
        self._step = -1

    def __len__(self) -> int:
        """Returns how many there were."""
        return self._count

    @property
    def lasting(self) -> set[int]:
        """The numbers of those that are not over."""
        return {one.number for one in self._open.values()}

    def event(self, event: Event) -> None:
        """Take an event; unknown kinds and fields are ignored."""
        self.now = max(self.now, float(event["mono"]))
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(event)
        if isinstance(step := event.get("step"), int) and "replica" in event:
            self._step = max(self._step, step)
        self._sum_up()

    def listed(self, now: float, numbers: Iterable[int] | None = None) -> list[Interruption]:
        """Returns the interruptions that are kept, or those of `numbers` among them, as of `now`."""
        return [self._record(self._kept[number], now) for number in (self._kept if numbers is None else numbers)]

    def by_cause(self, now: float) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
        """Returns how many interruptions there were of each cause, and what each cause has cost by phase."""
        causes, prices = Counter(self._past_causes), {kind: Counter(each) for kind, each in self._past_prices.items()}
        for each in self.listed(now):
            _add(each, causes, prices)
        return dict(causes), {kind: dict(phases) for kind, phases in prices.items()}

    def close(self, now: float) -> None:
        """Note that the job is over: no replica comes back any more."""
        for replica in self._members:
            self.gpu_time.begin(replica, OVER, now)
        for replica in list(self._open):
            self.gpu_time.begin(replica, OVER, now)
            self._end(replica, now, back=False)

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_process_started(self, event: Event) -> None:
        replica = event["replica"]
        if self.began is None and self.gpu_time.use(replica) is None:
            self.gpu_time.begin(replica, Use.START, event["mono"])
        if replica in self._open:
            self._open[replica].new_life = True
            self._signs.pop(replica, None)

    def _on_process_exited(self, event: Event) -> None:
        replica, code, signal = event["replica"], event.get("code"), event.get("signal") or ""
        if code == 0 and (replica in self._finished or self._draining):
            return
        known: dict[str, Any] = {
            "code": code,
            "signal": signal,
            "lines": tuple(map(plain, tuple(event.get("lines", ()))[-LINES:])),
        }
        known["killed_by_kernel"] = bool(event.get("out_of_memory"))
        one = self._open.get(replica)
        if one is None:
            if code != 0 or self._members.get(replica) is not None:
                self._sign(replica).see(event["mono"], **known)
        elif one.new_life:
            one.deaths += code != 0
            one.new_life = False
            self._touch(one)
        elif one.evidence.code is None and not one.evidence.signal:
            self._know(one, **known)

    def _on_suspect(self, event: Event) -> None:
        replica = event.get("replica")
        if replica in self._members:
            reason, script = plain(str(event.get("reason", ""))), ScriptEnd.of_event(event)
            self._sign(replica).see(event["mono"], noticed=True, reason=reason, script=script)

    def _on_not_removed(self, event: Event) -> None:
        sign = self._signs.get(event["replica"])
        if sign is not None:  # it lives, whatever was suspected
            sign.first = sign.noticed = None

    def _on_removed(self, event: Event) -> None:
        replica, known = event["replica"], {"removal": event.get("removal", "")}
        one = self._open.get(replica)
        if one is None or one.new_life:
            self._sign(replica).see(event["mono"], noticed=True, **known, reason=plain(str(event.get("reason", ""))))
            return
        one.evidence = msgspec.structs.replace(one.evidence, reason=plain(str(event.get("reason", ""))))
        self._know(one, **known)
        self._charge(one, Use.DETECTION, float(event.get("lasted", 0.0)), event["mono"])

    def _on_restart_asked(self, event: Event) -> None:
        self._sign(event["replica"]).know(restart_asked=True)

    def _on_divergence(self, event: Event) -> None:
        for number in str(event.get("wrong", "")).split(","):
            if number.strip().isdigit():
                self._sign(int(number)).know(diverged=True)

    def _on_finished(self, event: Event) -> None:
        self._finished.add(event["replica"])
        self.gpu_time.begin(event["replica"], OVER, event["mono"])

    def _on_draining(self, event: Event) -> None:
        self._draining = True

    def _on_training_goes_on(self, event: Event) -> None:
        for replica, contributes in self._members.items():
            if contributes:
                amount = float(event.get("seconds", 0.0)) * self._ranks
                self.gpu_time.move(replica, Use.PAUSE, amount, None, event["mono"])

    def _on_resumed(self, event: Event) -> None:
        payers = self._resuming.get(event["epoch"], ())
        for one in payers:
            amount = event["resume_ms"] / 1e3 / len(payers)  # of one rank
            self.gpu_time.move(event["replica"], Use.RESUME, amount, one.number, event["mono"])
            self._touch(one)

    def _on_view(self, event: Event) -> None:
        now = event["mono"]
        before, self._members = self._members, {x["replica"]: x["contributing"] for x in event["members"]}
        if self.began is None:
            self.began = now
        lost = [replica for replica in before if replica not in self._members]
        withdrawn, self._withdrawn = self._withdrawn, {}
        if event.get("step") is None:  # others come at a boundary, so those that are here again had not left yet
            back = self._members.keys() - before.keys()
            self._withdrawn = {replica: one for replica, one in self._open.items() if replica in back}
            for replica in [replica for replica in lost if self._waits_again(replica, before, event)]:
                one = self._open.get(replica)
                self.gpu_time.begin(replica, Use.ABSENCE if one else Use.START, now, one.number if one else None)
                lost.remove(replica)
        else:
            for replica in withdrawn.keys() & set(lost):
                self._reopen(withdrawn[replica], now)
                lost.remove(replica)
        self._lose([replica for replica in lost if replica not in self._finished], before, event)
        if before == self._members and before and event.get("step") is None:
            self._reconnect(event)
        for replica, contributes in self._members.items():
            if contributes and not before.get(replica):
                self._end(replica, now, back=True)
                self._signs.pop(replica, None)
                self.gpu_time.begin(replica, Use.TRAINING, now)
            elif not contributes and before.get(replica) is not False:
                one = self._open.get(replica)
                self.gpu_time.begin(replica, Use.CATCH_UP, now, None if one is None else one.number)
            if replica in self._signs:
                self._forget_suspicion(replica)

    def _waits_again(self, replica: int, before: Mapping[int, bool], event: Event) -> bool:
        """Whether a replica that was catching up is not lost: the view that took it in was withdrawn."""
        return not before[replica] and replica not in event.get("lost", (replica,)) and replica not in self._signs

    def _forget_suspicion(self, replica: int) -> None:
        """A suspicion is of one view; what a process has said by its end, or an operator has asked for, stays."""
        seen = self._signs[replica].evidence
        if seen.code is None and not seen.signal:
            kept = Evidence(script=seen.script, restart_asked=seen.restart_asked, diverged=seen.diverged)
            self._signs[replica] = _Sign(evidence=kept)

    # -- what follows ------------------------------------------------------------------------------------------------

    def _lose(self, lost: list[int], before: Mapping[int, bool], event: Event) -> None:
        now, in_order = event["mono"], event.get("step") is not None
        survivors = tuple(replica for replica in self._members if before.get(replica))
        opened = []
        for replica in lost:
            if self._draining:
                self.gpu_time.begin(replica, OVER, now)
                continue
            self._end(replica, now, back=False)  # it was catching up, and is lost again
            sign = self._signs.pop(replica, _Sign())
            sign.know(left=in_order, reason=plain(str(event.get("why", ""))))
            first = now if sign.first is None or in_order else min(sign.first, now)
            one = _Open(
                self._count,
                replica,
                self._host_of(replica),
                event["time"] - (now - first),
                first,
                event["epoch"],
                self._step,
                sign.evidence,
                survivors=() if in_order else survivors,
            )
            self._keep(one)
            self._open[replica] = one
            self.gpu_time.move(replica, Use.ABSENCE, (now - first) * self._ranks, one.number, now)
            self.gpu_time.begin(replica, Use.ABSENCE, now, one.number)
            opened.append((one, now if sign.noticed is None else min(sign.noticed, now)))
        for one, noticed in opened:
            one.shared = len(opened)
            self._charge(one, Use.DETECTION, max(0.0, noticed - one.began), now)
            self._charge(one, Use.VIEW, now - max(noticed, one.began), now)
            self._touch(one)
        if opened and not in_order:
            self._resuming = {event["epoch"]: [one for one, _ in opened]}

    def _reconnect(self, event: Event) -> None:
        """Note that connections were made again, and no replica was lost."""
        now = event["mono"]
        signs = {x: sign for x, sign in self._signs.items() if sign.noticed is not None and x in self._members}
        replica = min(signs, key=lambda x: signs[x].noticed or now, default=-1)
        noticed = now if replica < 0 else min(signs[replica].noticed or now, now)
        why = signs[replica].evidence.reason if replica >= 0 else plain(str(event.get("why", "")))
        one = _Open(
            self._count,
            replica,
            self._host_of(replica) if replica >= 0 else "",
            event["time"] - (now - noticed),
            noticed,
            event["epoch"],
            self._step,
            Evidence(),
            lost_connection(why),
            survivors=tuple(self._members),
            ended=now,
            back=True,
        )
        self._keep(one)
        self._charge(one, Use.VIEW, now - noticed, now)
        self._resuming = {event["epoch"]: [one]}
        self._touch(one)

    def _keep(self, one: _Open) -> None:
        self._kept[one.number] = one
        self._count += 1

    def _sum_up(self) -> None:
        """Keep only sums of the oldest ones, if nothing of them can change and the history has them."""
        for number in tuple(islice(self._kept, max(0, len(self._kept) - KEPT))):
            one = self._kept[number]
            changes = one.ended is None or number in self.changed
            if changes or any(one is payer for payers in self._resuming.values() for payer in payers):
                continue
            _add(self._record(one, self.now), self._past_causes, self._past_prices)
            del self._kept[number]
            self._records.pop(number, None)
            self.gpu_time.forget(number)

    def _charge(self, one: _Open, use: Use, seconds: float, now: float) -> None:
        """Let the survivors pay for `seconds`."""
        self._touch(one)
        for replica in one.survivors:
            self.gpu_time.move(replica, use, seconds * self._ranks / one.shared, one.number, now)

    def _know(self, one: _Open, **known: Any) -> None:
        one.evidence = _with(one.evidence, **known)
        self._touch(one)

    def _sign(self, replica: int) -> _Sign:
        return self._signs.setdefault(replica, _Sign())

    def _end(self, replica: int, now: float, *, back: bool) -> None:
        one = self._open.pop(replica, None)
        if one is not None:
            one.ended, one.back = now, back
            self._touch(one)

    def _reopen(self, one: _Open, now: float) -> None:
        """A replica leaves for good, after a view that had let it go was withdrawn: that is one interruption."""
        self._open[one.replica] = one
        one.ended, one.back = None, False
        self.gpu_time.begin(one.replica, Use.ABSENCE, now, one.number)
        self._touch(one)

    def _touch(self, one: _Open) -> None:
        self.changed.add(one.number)
        self._records.pop(one.number, None)

    def _record(self, one: _Open, now: float) -> Interruption:
        if one.number in self._records:
            return self._records[one.number]
        record = self._made(one, now)
        if one.ended is not None:
            self._records[one.number] = record
        return record

    def _made(self, one: _Open, now: float) -> Interruption:
        price = self.gpu_time.price(one.number, now)
        return Interruption(
            one.number,
            one.replica,
            one.host,
            round(one.at, 3),
            one.epoch,
            one.step,
            classify(one.evidence) if one.cause is None else one.cause,
            {use.value: round(price[use], 4) for use in PRICED},
            round(max(0.0, (now if one.ended is None else one.ended) - one.began), 3),
            one.ended is not None,
            one.back,
            one.deaths,
            one.evidence.lines,
        )


def _add(one: Interruption, causes: Counter[str], prices: dict[str, Counter[str]]) -> None:
    causes[one.cause.kind.value] += 1
    prices.setdefault(one.cause.kind.value, Counter()).update(one.price)
