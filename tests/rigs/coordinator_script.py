"""A coordinator and what its leaders tell it, as a script that a test reads from top to bottom."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection
from typing import Any

from ftcomm.control import messages as m
from ftcomm.control.coordinator import Coordinator
from ftcomm.control.coordinator_actions import CoordinatorAction, Done, Log, Persist, Send, StoreFinishes, Unfit
from ftcomm.control.finishes import NO_FINISHES
from ftcomm.control.probe_schedule import Probe, ProbeOutcome, ProbeReason
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Address, Addresses, View

TIMEOUTS = Timeouts.derive(120.0, 10.0)
CHAIN = dataclasses.astuple(TIMEOUTS)


def joins(conn: int, life: str = "", epoch: int = 0, ranks: int = 1, **more: Any) -> m.Join:
    said: dict[str, Any] = {"step": 4 if epoch else -1, "timeouts": CHAIN, **more}
    addresses = Addresses.of([Address("h", 1, "b", conn, 3, "0" * 32)] * ranks)
    return m.Join(conn % 10, life or f"life-{conn}", addresses, epoch, **said)


class Script:
    """A coordinator and its leaders; connection r is replica r's, 10 + r that of its second life."""

    def __init__(self, replicas: int, ranks: int = 1) -> None:
        self.replicas, self.ranks, self.lifetime = replicas, ranks, 0
        self.views: list[View] = []
        self.finishes = NO_FINISHES
        self.restart()
        self.sent: dict[int, list[m.Message]] = collections.defaultdict(list)
        self.done: list[str] = []
        self.unfit: list[str] = []
        self.logs: list[Log] = []
        self.outcomes: dict[str, ProbeOutcome] = {}  # of a probe, by the life that it is to; else it is answered
        self.probed: list[Probe] = []
        self.answers: set[str] = set()  # lives that do when they are asked
        for replica in range(replicas):
            self.join(replica)
        self.install(*range(replicas))

    now = 1.0

    def restart(self) -> None:
        """A coordinator that knows what was stored."""
        self.lifetime += 1
        self.coordinator = Coordinator(
            *(self.replicas, self.ranks, TIMEOUTS, list(self.views), 0.0, self.lifetime), finishes=self.finishes
        )

    def do(self, actions: list[CoordinatorAction]) -> None:
        for action in actions:
            if isinstance(action, Persist):
                self.views.append(action.view)
            elif isinstance(action, StoreFinishes):
                self.finishes = action.finishes
            elif isinstance(action, Send):
                self.sent[action.conn].append(action.message)
            elif isinstance(action, Done):
                self.done.append(action.failed)
            elif isinstance(action, Unfit):
                self.unfit.append(action.reason)
            elif isinstance(action, Log):
                self.logs.append(action)
            elif isinstance(action, Probe):
                self.probed.append(action)
                life = action.life[1]
                if action.why in (ProbeReason.ACCUSED, ProbeReason.SEVERED):
                    outcome = ProbeOutcome.ANSWERED if life in self.answers else ProbeOutcome.UNREACHABLE
                else:
                    at = self.at(action.address) if action.why is ProbeReason.WITNESS else life
                    outcome = self.outcomes.get(at, ProbeOutcome.ANSWERED)
                self.do(self.coordinator.probed(action, outcome, self.now))

    @property
    def dialled(self) -> list[Probe]:
        return [probe for probe in self.probed if probe.why is ProbeReason.SEARCH]

    def at(self, address: Address) -> str:
        """Whose life has that address."""
        return next(x.incarnation for x in self.views[-1].members if address in x.ranks)

    def tell(self, conn: int, message: m.Message) -> None:
        self.do(self.coordinator.receive(conn, message, self.now))

    def tick(self) -> None:
        self.do(self.coordinator.tick(self.now))

    def cut(self, conn: int) -> None:
        self.do(self.coordinator.disconnected(conn, self.now))

    def join(self, conn: int, life: str = "", epoch: int = 0, **more: Any) -> None:
        """With an epoch it comes to another coordinator; its step is 4 then."""
        self.tell(conn, joins(conn, life, epoch, self.ranks, **more))

    def join_ready(self, conn: int) -> None:
        self.join(conn)
        self.tell(conn, m.Ready())

    def install(self, *conns: int) -> None:
        for conn in conns:
            self.tell(conn, m.Installed(self.views[-1].epoch))

    def promise(self, *conns: int) -> None:
        """All answer the newest proposal with yes."""
        for conn in conns:
            prepare = next(message for message in reversed(self.sent[conn]) if isinstance(message, m.Prepare))
            self.tell(conn, m.Promise(prepare.proposal, True, step=0))

    def lose(self, conn: int, outcome: ProbeOutcome = ProbeOutcome.REFUSED) -> None:
        """Its process ends: nobody listens there any more, as its host says, or (`ENDED`) our own kernel."""
        self.outcomes[f"life-{conn}"] = outcome
        self.do(self.coordinator.disconnected(conn, now=1.0))

    def wait(self, *conns: int) -> None:
        """Longer than a heartbeat timeout, in which they live."""
        for second in range(1, 3 + int(TIMEOUTS.heartbeat)):
            for conn in conns:
                self.do(self.coordinator.receive(conn, m.Heartbeat(4), float(second)))
            self.do(self.coordinator.tick(float(second)))

    def rejoin(self, replica: int, others: list[int]) -> None:
        """A second life of a lost replica is taken in, catching up."""
        self.join_ready(10 + replica)
        self.promise(*others)
        self.install(*others, 10 + replica)

    @property
    def epoch(self) -> int:
        return self.views[-1].epoch

    @property
    def newest(self) -> tuple[tuple[int, ...], frozenset[int]]:
        return self.views[-1].replicas, self.views[-1].contributing


def after_loss(replicas: int, lost: int) -> Script:
    """One has been lost, and the others run without it."""
    script = Script(replicas)
    script.lose(lost)
    script.install(*(replica for replica in range(replicas) if replica != lost))
    return script


def catching_up(replicas: int, which: int) -> Script:
    """One has come back, and catches up."""
    script = after_loss(replicas, which)
    script.rejoin(which, [replica for replica in range(replicas) if replica != which])
    return script


def two_that_catch_up() -> Script:
    """Of three one contributes."""
    script = Script(3)
    script.lose(1)
    script.lose(2)
    script.install(0)
    script.rejoin(1, [0])
    script.rejoin(2, [0, 11])
    return script


def unheard_by_a_new_coordinator() -> Script:
    """Of three one contributes. The coordinator knows what was stored, and can reach nobody."""
    script = two_that_catch_up()
    script.restart()
    script.outcomes = dict.fromkeys(("life-0", "life-11", "life-12"), ProbeOutcome.UNREACHABLE)
    return script


def search(replica: int, life: str) -> Probe:
    return Probe(ProbeReason.SEARCH, (replica, life), 0, Address("h", 1, "b", replica, 3, "0" * 32))


def pass_time(
    script: Script, heartbeats: float, speak: Collection[int] = (), accuse: Collection[tuple[int, int]] = ()
) -> None:
    """All `speak` at every beat, and say every second whom they miss: (by, whom)."""
    beats = round(10 * heartbeats)
    for beat in range(beats):
        script.now += TIMEOUTS.beat
        for conn in speak:
            script.tell(conn, m.Heartbeat(3))
        for by, accused in accuse if beat % max(1, round(REPORT / TIMEOUTS.beat)) == 0 else ():
            complaint = m.Suspect(accused, f"life-{accused}", "silent for 5.0 s", False)
            script.tell(by, complaint)
        script.tick()


def rejoin_all(script: Script, conns: Collection[int], epoch: int) -> None:
    for conn in conns:
        script.join(conn, f"life-{conn % 10}", epoch)


def grown(change: str) -> Script:
    """Replica 0 was lost and came back; `change` is the last view, which its members have not said to run in yet."""
    script = after_loss(3, 0)
    script.join_ready(10)
    script.promise(1, 2)
    if change == "contribute":
        script.install(1, 2, 10)
        script.tell(10, m.CaughtUp(5))
        script.promise(1, 2, 10)
    assert change in script.views[-1].why
    return script


def beats(script: Script, seconds: float, divided: dict[int, str], replicas: int = 2) -> None:
    """Time passes, in which the leaders of replicas that are divided say so."""
    for _ in range(int(4 * seconds)):
        script.now += 0.25
        for replica in range(replicas):
            beat = m.Heartbeat(4, divided=divided.get(replica, ""))
            script.tell(replica, beat)
        script.tick()
