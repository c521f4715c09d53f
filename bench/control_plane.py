"""`ftcomm bench control`: the control plane of a large job on one machine, and what failures cost it.

The coordinator and the leaders are the production ones, each in a process of its own; all other ranks are light, many
in a process. With --agents the production host agents stand between them, many in a process, too.
`bench/control_parts.py` says what is real about them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import os
import random
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import click
import msgspec

from ftcomm.bench import control_etcd
from ftcomm.bench.control_parts import Setup
from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, figure_text, option
from ftcomm.bench.stats import percentile
from ftcomm.control.limits import RANKS
from ftcomm.control.links import MAX_HANDSHAKES
from ftcomm.control.timeouts import Timeouts
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.launch.commands.option_types import choices

FAULTS = ("rank", "host", "replica", "coordinator", "stall", "flap", "failover")
USUAL = FAULTS[:5]  # the others need several hosts, or etcd
UNREAD = Path("/proc/sys/net/core/netdev_max_backlog")  # packets on this host that may wait for the kernel to read them
MANY = 20_000  # ranks; with fewer, a kernel as it comes drops packets, too, but ends no connection
AT_ONCE = 32  # light ranks of a process that may be about to connect, if a leader takes so many of all processes
FLAPPING = 10  # hosts
CUTS = 3  # of them for less than the heartbeat timeout, one after the other, before one for more
SHORT = 0.6  # of that timeout
BASE_TIMEOUT = 300.0  # s for a start, or what follows from a fault
PER_RANK = 0.02  # s more for each rank
LOOK = 0.1  # s between two looks at it
LINES = 20  # of what a part has said, for the error when it ends
LOGGED = 2000  # bytes of its log, likewise


@dataclasses.dataclass(frozen=True)
class ControlRequest:
    """Run the control plane of a job of replicas x ranks, and time how it takes failures.

    Coordinator and leaders are those of a real job, over real sockets; the other ranks are light: they speak the real
    protocol to their leader over a connection each, move no data, and many share a process. A host is a label in the
    addresses of its ranks. With --agents each host of a replica but that of rank 0 has a host agent: those of a real
    job, over real sockets between its ranks and their leader, but many in a process. An agent ends with its host, and
    with the first rank there. A fault is one rank that is killed, all ranks of a host, or of a replica, the coordinator
    that is restarted while a rank dies, or dies with a rank while another one stands by ("failover": views are in a
    real etcd then, and the lease is as long as the heartbeat timeout), a rank that stands still, or hosts that flap: to
    ten of a replica, or as many as it has without that of rank 0, nothing comes through for less than the heartbeat
    timeout, three times, and then until the replica is lost; and all of that twice. Then the replica comes back. The
    seconds are from the fault, of hosts that flap from the last cut, until a rank runs in the view that follows, of all
    survivors; of the return, until the view with the replica. CPU and bytes are of all that happens meanwhile, signs of
    life included.
    """

    replicas: int = option(2, help="Replicas of the job.")
    ranks: int = option(64, help="Ranks of each.")
    hosts: int = option(8, help="Hosts that the ranks of each count as being on.")
    agents: bool = option(False, help="Let hosts have host agents, but those on which a rank 0 is.")
    processes: int = option(2, help="Processes for the light ranks, and as many for the agents.")
    faults: tuple[str, ...] = option(USUAL, kind=choices(*FAULTS), help="One after the other.")
    rest: float = option(10.0, help="Seconds at rest that are measured; 0: none.")
    pace: float = option(1.0, help="Seconds of a step.")
    op_timeout: float = option(120.0, help="Of the job: all other timeouts follow from it.")
    heartbeat: float | None = option(
        None,
        kind=click.FLOAT,
        help="Timeout of the job; a sign of life comes ten times in it. Those of 100,000 ranks each half second would "
        "take more than two cores.  [default: follows from --op-timeout]",
    )

    def smoke(self) -> ControlRequest:
        """Two replicas of four ranks on two hosts each, to see that it runs."""
        faults = ("rank", "host", "replica", "coordinator")
        return ControlRequest(2, 4, 2, self.agents, 1, faults, rest=1.0, pace=0.2)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if self.replicas < 2 or not 2 <= self.ranks <= RANKS:
            raise SettingsError(
                f"--replicas {self.replicas} --ranks {self.ranks}: expected at least 2 of each, and at most {RANKS} "
                "ranks"
            )
        if "flap" in self.faults and self.hosts < 2:
            raise SettingsError(f"--faults flap --hosts {self.hosts}: expected 2 at least, as that of rank 0 stays")
        if "failover" in self.faults:
            control_etcd.program()
        if not 1 <= self.hosts <= self.ranks:
            raise SettingsError(f"--hosts {self.hosts}: expected 1 to {self.ranks}, a rank at least for each")
        if self.agents and (self.hosts < 2 or self.ranks % self.hosts or self.ranks < 2 * self.hosts):
            raise SettingsError(
                f"--agents --ranks {self.ranks} --hosts {self.hosts}: expected 2 hosts at least, and as many ranks, 2 "
                "at least, on each: agents are for hosts without rank 0 that have several"
            )
        try:
            Timeouts.derive(self.op_timeout, self.heartbeat)
        except ValueError as error:
            raise SettingsError(f"--op-timeout and --heartbeat: {error}") from None
        if self.processes < 1 or self.rest < 0 or self.pace <= 0:
            raise SettingsError("expected at least one of --processes, --rest 0 or above, and --pace above 0")
        total = self.replicas * self.ranks
        if total > MANY and (unread := _unread(total)) < total:
            raise SettingsError(
                f"--replicas {self.replicas} --ranks {self.ranks}: the keepalives of {total} connections come at once, "
                f"and this kernel drops what goes beyond {unread} packets, so that it ends connections whose both ends "
                f"live. As root: sysctl -w net.core.netdev_max_backlog={total}"
            )
        ports = self.replicas * -(-self.ranks // self.hosts) * self.flapping
        agents = self.replicas * -(-self.hosts // self.processes) * (5 + self.ranks // self.hosts)
        needed = ports + 2 * max(self.ranks, self.replicas * self.ranks // self.processes) + 200
        needed = max(needed, 200 + agents if self.agents else 0)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY and needed > hard:
            raise SettingsError(
                f"a process of this needs up to {needed} open files, and may have {hard}; raise that (ulimit -Hn), or "
                "take more --processes"
            )

    @property
    def flapping(self) -> int:
        """The hosts of a replica that flap."""
        return min(FLAPPING, self.hosts - 1) if "flap" in self.faults else 0

    @property
    def rounds(self) -> list[str]:
        """The faults, each as often as it comes."""
        return [each for fault in self.faults for each in ([fault, "flap again"] if fault == "flap" else [fault])]


class ControlCost(msgspec.Struct, frozen=True):
    """The cost of one part: the coordinator, the busiest leader, all host agents or all light ranks together."""

    what: str  # the fault, or "start", or "rest"
    part: str
    cpu: float  # s
    sent: float  # MB
    received: float  # MB
    memory: float  # MB, of the largest process
    seconds: float
    messages: tuple[int, int] | None = None  # of a leader: to and from its host agents and light ranks


class ControlMessages(msgspec.Struct, frozen=True):
    """The messages of one kind between the light ranks of one replica and their leader, or the agents of their hosts,
    for each of the ranks."""

    what: str
    replica: int
    kind: str
    to_leader: float
    to_rank: float


class ControlAgentMessages(msgspec.Struct, frozen=True):
    """The messages of one kind between the host agents of one replica and their leader, for each of the agents."""

    what: str
    replica: int
    kind: str
    to_leader: float
    to_agent: float


class ControlLoss(msgspec.Struct, frozen=True):
    what: str
    survivors: int
    decided: float  # s until the view is decided, stored and sent
    p50: float  # s until a survivor is in it
    p99: float
    max: float


def _unread(least: int) -> int:
    """Returns how many packets may wait for the kernel of this host; `least` where a container hides that."""
    try:
        return int(UNREAD.read_text())
    except OSError:
        return least


def timeout_of(setup: Setup) -> float:
    return BASE_TIMEOUT + PER_RANK * setup.replicas * setup.ranks


class ControlPart:
    """A process of the emulation, which answers calls and tells what happens."""

    def __init__(self, role: str, setup: Setup, log: Path) -> None:
        self.role, self.setup, self._log = role, setup, log
        self.told: list[dict[str, Any]] = []
        self._last: collections.deque[str] = collections.deque(maxlen=LINES)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0

    async def start(self, sign: str = "port") -> int:
        """Start it; returns the port at which it listens, or whatever it says by another `sign` of having started."""
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "ftcomm.bench.control_parts", self.role, msgspec.json.encode(self.setup).decode()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 28,
            )
        self._reading = asyncio.ensure_future(self._read())
        return await self.said(sign)

    async def said(self, sign: str) -> int:
        event = await self.first(lambda event: sign in event)
        return int(event[sign])

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            said = msgspec.json.decode(line)
            waiting = self._answers.pop(said.get("answers", -1), None)
            if waiting is not None:
                waiting.set_result(said)
            else:
                self.told.append(said)
                self._last.append(line[:300].decode(errors="replace"))
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(FtcommError(f"the {self.role} has ended: {self.last}"))

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    @property
    def last(self) -> str:
        """The last that it has said and logged."""
        return "".join(self._last) + self._log.read_bytes()[-LOGGED:].decode(errors="replace")

    async def call(self, name: str, **fields: Any) -> dict[str, Any]:
        if self.has_ended:
            raise FtcommError(f"the {self.role} has ended: {self.last}")
        assert self.process.stdin is not None
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(msgspec.json.encode({"call": name, "number": self._count, **fields}) + b"\n")
        return await asyncio.wait_for(answer, timeout_of(self.setup))

    async def first(
        self, is_it: Callable[[dict[str, Any]], bool], check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Returns the first of what it has told for which `is_it` holds. While it waits, `check` may raise."""
        deadline = time.monotonic() + timeout_of(self.setup)
        while True:
            found = next((event for event in self.told if is_it(event)), None)
            if found is not None:
                return found
            if time.monotonic() > deadline or self.has_ended:
                raise FtcommError(f"the {self.role} did not say what was expected: {self.last}")
            check()
            await asyncio.sleep(LOOK / 2)

    async def kill(self) -> float:
        """Returns when."""
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reading
        return at


class Emulation:
    """The job, as the command drives it."""

    def __init__(self, request: ControlRequest, report: BenchReport, folder: Path) -> None:
        self.request, self._report, self._folder = request, report, folder
        self.etcd = control_etcd.OwnEtcd(folder) if "failover" in request.faults else None
        self._store = str(folder / "views") if self.etcd is None else self.etcd.url
        self._setup = Setup(
            request.replicas,
            request.ranks,
            request.hosts,
            secrets.token_hex(16),
            request.op_timeout,
            request.heartbeat,
            time.monotonic(),
            request.pace,
            store=self._store,
            flapping=request.flapping,
            has_agents=request.agents,
            at_once=max(1, min(AT_ONCE, MAX_HANDSHAKES // request.processes // 2)),
        )
        self._started = 0  # processes
        self.coordinator = self._part("coordinator")
        self.leaders: dict[int, ControlPart] = {}
        self.light: list[ControlPart] = []
        self.agents: list[ControlPart] = []
        self._gone: set[int] = set()
        self._faulty: set[int] = set()  # replicas that a fault hits
        self._since = 0.0  # when it has begun
        self._steps = 3 + len(request.rounds)  # of the progress bar
        self._done = 0

    @property
    def _parts(self) -> list[ControlPart]:
        return [self.coordinator, *self.leaders.values(), *self.agents, *self.light]

    def _part(self, role: str, **fields: Any) -> ControlPart:
        """Returns a process of the emulation, which is not started yet."""
        self._started += 1
        setup = msgspec.structs.replace(self._setup, **fields)
        return ControlPart(role, setup, self._folder / f"{role}-{self._started}.log")

    def _check(self) -> None:
        """Raise `FtcommError` if more has been lost than a fault has hit."""
        for part in self._parts:
            if part.has_ended and not (part.role == "leader" and part.setup.replica in self._faulty):
                raise FtcommError(f"the {part.role} has ended: {part.last}")
        for event in self.coordinator.told:
            lost = sorted(set(event.get("lost", ())) - self._faulty)
            if lost and event["at"] > self._since:
                said = "; ".join(text for each in self.coordinator.told if (text := each.get("said")))
                raise FtcommError(
                    f"view {event['view']} is without replica {lost[0]}, which no fault has hit; the coordinator said: "
                    f"{said or 'nothing'}"
                )

    def _progress(self, text: str) -> None:
        self._report.progress(text, self._done / self._steps)
        self._done += 1

    async def start(self) -> None:
        request = self.request
        self._progress("starting the processes")
        port = await self.coordinator.start()
        self._setup = msgspec.structs.replace(self._setup, coordinator=port)
        for process in range(request.processes):
            shards = 1 + (request.ranks - 1) * process // request.processes
            end = 1 + (request.ranks - 1) * (process + 1) // request.processes
            self.light.append(self._part("ranks", columns=(shards, end)))
            self.agents += [self._part("agents", columns=(shards, end))] if request.agents else []
        await asyncio.gather(*(part.start() for part in (*self.light, *self.agents)))
        before = await self._usage()
        begun = time.monotonic()
        self._progress("all replicas join")
        await asyncio.gather(*(self._begin(replica) for replica in range(request.replicas)))
        await self._entered(1, begun, "start", range(request.replicas))
        await self._cost("start", before, begun)

    async def _begin(self, replica: int) -> None:
        """Start a life of a replica."""
        leader = self.leaders[replica] = self._part("leader", replica=replica)
        port = await leader.start()
        self._gone.discard(replica)
        begins: dict[str, Any] = {"replica": replica, "leader": port}
        made = await asyncio.gather(*(part.call("start", **begins) for part in self.agents))
        begins["agents"] = [ports for one in made for ports in one["agents"]]
        await asyncio.gather(*(part.call("start", **begins) for part in self.light))

    async def close(self) -> None:
        for part in self._parts:
            with contextlib.suppress(AttributeError):  # not started
                await part.kill()
        if self.etcd is not None:
            self.etcd.close()

    # -- what is measured --------------------------------------------------------------------------------------------

    async def _usage(self) -> dict[ControlPart, dict[str, Any]]:
        here = [part for part in self._parts if not (part.role == "leader" and part.setup.replica in self._gone)]
        used = await asyncio.gather(*(part.call("usage") for part in here))
        return dict(zip(here, used, strict=True))

    async def _cost(self, what: str, before: dict[ControlPart, dict[str, Any]], since: float) -> None:
        """Note what was used since then, by those that are there now."""
        after, seconds = await self._usage(), time.monotonic() - since
        nothing: dict[str, Any] = {"cpu": 0.0, "carried": {}}

        def cpu(part: ControlPart) -> float:
            return float(after[part]["cpu"] - before.get(part, nothing)["cpu"])

        def megabytes(part: ControlPart, way: int) -> float:
            """Returns what went out (0) or came in (1) over the connections that are open now."""
            known = before.get(part, nothing)["carried"]
            new = (both[way] - known.get(name, (0, 0))[way] for name, both in after[part]["carried"].items())
            return sum(new) / 1e6

        def messages(replica: int) -> tuple[int, int]:
            """Returns how many a leader has sent, and received."""
            counts = [0, 0]
            for used, sign in ((before, -1), (after, 1)):
                told = (one["at_leader"].get(str(replica), (0, 0)) for one in used.values() if "at_leader" in one)
                for up, down in told:
                    counts = [counts[0] + sign * down, counts[1] + sign * up]
            return counts[0], counts[1]

        def add(name: str, parts: Collection[ControlPart], counted: tuple[int, int] | None = None) -> None:
            self._report.add(
                ControlCost(
                    what,
                    name,
                    sum(map(cpu, parts)),
                    sum(megabytes(part, 0) for part in parts),
                    sum(megabytes(part, 1) for part in parts),
                    max(float(after[part]["mb"]) for part in parts),
                    seconds,
                    counted,
                )
            )

        leaders = [part for part in after if part.role == "leader"]
        add("coordinator", [part for part in after if part.role == "coordinator"])
        busiest = max(leaders, key=cpu)
        add("busiest leader", [busiest], messages(busiest.setup.replica))
        if self.agents:
            add("host agents", self.agents)
        add("light ranks", [part for part in after if part.role == "ranks"])
        self._count(what, before, after)

    def _count(
        self, what: str, before: dict[ControlPart, dict[str, Any]], after: dict[ControlPart, dict[str, Any]]
    ) -> None:
        """Note which messages there were between the two."""
        found = (("ranks", self.request.ranks, ControlMessages), ("agents", self.request.hosts, ControlAgentMessages))
        for role, of_replica, record in found:
            counts: dict[tuple[str, str], list[int]] = {}  # by replica and kind
            for used, sign in ((before, -1), (after, 1)):
                told = (one["messages"].items() for part, one in used.items() if part.role == role)
                for replica, kinds in itertools.chain.from_iterable(told):
                    for kind, ways in kinds.items():
                        known = counts.setdefault((replica, kind), [0, 0])
                        known[:] = (each + sign * n for each, n in zip(known, ways, strict=True))
            for (replica, kind), (up, down) in sorted(counts.items()):
                if up or down:  # one rank of a replica is in the process of its leader, and one host has no agent
                    self._report.add(record(what, int(replica), kind, up / (of_replica - 1), down / (of_replica - 1)))

    async def _entered(self, epoch: int, since: float, what: str, replicas: Collection[int]) -> None:
        """Wait until all ranks of `replicas` run in the view of `epoch`, and note when they did."""
        expected = len(replicas) * (self.request.ranks - 1)
        deadline = time.monotonic() + timeout_of(self._setup)
        while True:
            said = await asyncio.gather(*(part.call("views", epoch=epoch) for part in self.light))
            there = sum(one["ranks"] for one in said)
            if there >= expected:
                break
            if time.monotonic() > deadline:
                raise FtcommError(f"{what}: {there} of {expected} light ranks are in epoch {epoch}")
            self._check()
            await asyncio.sleep(LOOK)
        said = await asyncio.gather(*(part.call("times", epoch=epoch) for part in self.light))
        times = [at for one in said for at in one["times"]]
        for replica in replicas:
            event = await self.leaders[replica].first(lambda event: event.get("entered") == epoch, self._check)
            times.append(event["at"])
        seconds = [at - since for at in times]
        decided = await self.coordinator.first(lambda event: event.get("view") == epoch, self._check)
        self._report.add(
            ControlLoss(
                what,
                len(seconds),
                decided["at"] - since,
                percentile(seconds, 50),
                percentile(seconds, 99),
                max(seconds),
            )
        )

    async def _decides(self, what: str, replica: int, since: float) -> int:
        """Returns the epoch of the first view after `since` that has the replica among its `lost`, or `contributing`
        (`what`)."""
        event = await self.coordinator.first(
            lambda event: replica in event.get(what, ()) and event["at"] > since, self._check
        )
        return int(event["view"])

    async def rest(self) -> None:
        self._progress("at rest")
        before, begun = await self._usage(), time.monotonic()
        await asyncio.sleep(self.request.rest)
        self._check()
        seconds = time.monotonic() - begun
        await self._cost("rest", before, begun)
        counted = (one.to_leader + one.to_rank for one in self._report["messages"] if one.what == "rest")
        messages = (self.request.ranks - 1) * sum(counted)
        self._report.more["messages_per_second"] = messages / seconds
        above = "host agents or leaders" if self.agents else "leaders"
        self._report.line(f"# at rest {messages / seconds:.0f} messages a second between light ranks and {above}")
        if self.agents:
            counted = (one.to_leader + one.to_agent for one in self._report["agent_messages"] if one.what == "rest")
            messages = (self.request.hosts - 1) * sum(counted)
            self._report.more["agent_messages_per_second"] = messages / seconds
            self._report.line(f"# at rest {messages / seconds:.0f} messages a second between host agents and leaders")

    # -- faults ------------------------------------------------------------------------------------------------------

    async def inject(self, fault: str, replica: int) -> None:
        """Hit a replica, follow what happens, and have it come back."""
        said = {
            "failover": "another coordinator takes over",
            "coordinator": "the coordinator is restarted",
            "flap": "hosts flap",
            "flap again": "hosts flap again",
        }
        self._progress(said.get(fault, f"a {fault} is lost"))
        before, begun = await self._usage(), time.monotonic()
        self._faulty, self._since = {replica}, begun
        survivors = sorted(self.leaders.keys() - self._gone - {replica})
        shard = random.randrange(1, self.request.ranks)
        if fault == "stall":
            part = next(part for part in self.light if part.setup.columns[0] <= shard < part.setup.columns[1])
            at = float((await part.call("stall", replica=replica, shard=shard))["at"])
        elif fault.startswith("flap"):
            at = await self._flap(replica)
        elif fault == "failover":
            at = await self._fail_over(replica, shard)
        else:
            if fault == "coordinator":
                await self.coordinator.kill()
                self.coordinator = self._part("coordinator")
                await self.coordinator.start()
            killed = await self._kill(replica, self._hit(fault, replica, shard))
            at = begun if fault == "coordinator" else killed
        epoch = await self._decides("lost", replica, at)
        await self._entered(epoch, at, fault, survivors)
        self._gone.add(replica)
        await self._cost(fault, before, begun)
        await self._kill(replica, range(self.request.ranks))  # what has not ended by itself
        await self._return(fault, replica)

    async def _fail_over(self, replica: int, shard: int) -> float:
        """Kill the coordinator, and a rank, while another coordinator stands by; returns when that began."""
        other = self._part("coordinator", coordinator=0, stands_by=True)
        await other.start("stands_by")
        begun = await self.coordinator.kill()
        self.coordinator = other
        await self._kill(replica, range(shard, shard + 1))
        self._setup = msgspec.structs.replace(self._setup, coordinator=await other.said("port"))
        return begun

    async def _flap(self, replica: int) -> float:
        """Cut hosts of the replica off for less than the heartbeat timeout, and once more; returns when that began."""
        begun, seconds = time.monotonic(), SHORT * self._setup.timeouts.heartbeat
        for _ in range(CUTS):
            await self._cut(replica, True)
            await asyncio.sleep(seconds)
            await self._cut(replica, False)
            await asyncio.sleep(seconds)
        if any(replica in event.get("lost", ()) and event["at"] > begun for event in self.coordinator.told):
            raise FtcommError(
                f"replica {replica} was lost, though its hosts were cut off for {seconds:.1f} s only: this machine is "
                "too busy for that heartbeat timeout. Raise --heartbeat"
            )
        return await self._cut(replica, True)

    async def _cut(self, replica: int, pulled: bool) -> float:
        """Pull the cables of the hosts that flap, or plug them in again; returns when that began."""
        cut = (*self.light, *self.agents)
        done = await asyncio.gather(*(part.call("cut", replica=replica, pulled=pulled) for part in cut))
        return min(float(one["at"]) for one in done)

    def _hit(self, fault: str, replica: int, shard: int) -> range:
        """The ranks of the replica that end with rank `shard`."""
        if fault == "replica":
            return range(self.request.ranks)
        host = self._setup.host(replica, shard)
        there = [x for x in range(self.request.ranks) if self._setup.host(replica, x) == host]
        return range(there[0], there[-1] + 1) if fault == "host" else range(shard, shard + 1)

    async def _kill(self, replica: int, ranks: range) -> float:
        """Kill these ranks of a replica; returns when that began."""
        leader = [await self.leaders[replica].kill()] if 0 in ranks else []
        hit = {"replica": replica, "least": ranks.start, "below": ranks.stop}
        killed = await asyncio.gather(*(part.call("kill", **hit) for part in self.light))
        return min([*leader, *(float(one["at"]) for one in killed)])

    async def _return(self, fault: str, replica: int) -> None:
        before, begun = await self._usage(), time.monotonic()
        await self._begin(replica)
        contributes = await self._decides("contributing", replica, begun)
        views = [event for event in self.coordinator.told if "view" in event]
        joins = [
            x["view"] for y, x in itertools.pairwise(views) if replica in x["behind"] and replica not in y["behind"]
        ]
        epoch = max(epoch for epoch in joins if epoch < contributes)  # one that came too late has been withdrawn
        await self._entered(epoch, begun, f"{fault}: return", sorted(self.leaders.keys() - self._gone))
        await self._cost(f"{fault}: return", before, begun)


@contextlib.asynccontextmanager
async def emulation(request: ControlRequest, report: BenchReport) -> AsyncIterator[Emulation]:
    with tempfile.TemporaryDirectory(prefix="ftcomm-control-") as folder:
        made = Emulation(request, report, Path(folder))
        try:
            yield made
        finally:
            await made.close()


async def measure(request: ControlRequest, report: BenchReport) -> None:
    async with emulation(request, report) as job:
        await job.start()
        if request.rest:
            await job.rest()
        for number, fault in enumerate(request.rounds):
            await job.inject(fault, (number + 1) % request.replicas)


LOSSES = Table(
    "losses",
    ControlLoss,
    (
        Column("what", "", -20, lambda loss: loss.what),
        Column("ranks", "", 7, lambda loss: str(loss.survivors)),
        Column("decided", "(s)", 9, lambda loss: figure_text(loss.decided)),
        Column("p50", "(s)", 9, lambda loss: figure_text(loss.p50)),
        Column("p99", "(s)", 9, lambda loss: figure_text(loss.p99)),
        Column("max", "(s)", 9, lambda loss: figure_text(loss.max)),
    ),
)
COSTS = Table(
    "costs",
    ControlCost,
    line=lambda cost: (
        f"#   {cost.what}, {cost.part}: {cost.cpu:.2f} s of CPU in {cost.seconds:.1f} s, {cost.sent:.2f} MB sent, "
        f"{cost.received:.2f} MB received, {cost.memory:.0f} MB of memory"
        + ("" if cost.messages is None else ", {} messages to and {} from agents and ranks".format(*cost.messages))
    ),
)
MESSAGES = Table(
    "messages",
    ControlMessages,
    line=lambda one: (
        f"#   {one.what}, replica {one.replica}, {one.kind}: {one.to_leader:.2f} from a rank, {one.to_rank:.2f} to it"
    ),
)
AGENT_MESSAGES = Table(
    "agent_messages",
    ControlAgentMessages,
    line=lambda one: (
        f"#   {one.what}, replica {one.replica}, {one.kind}: {one.to_leader:.2f} from an agent, "
        f"{one.to_agent:.2f} to it"
    ),
)


def heading(request: ControlRequest) -> list[str]:
    agents = f", {request.hosts - 1} host agents each, in as many processes" if request.agents else ""
    return [
        f"# {request.replicas} replicas of {request.ranks} ranks, on {request.hosts} hosts each in name: one "
        f"coordinator and {request.replicas} leaders in processes of their own, all other ranks light, in "
        f"{request.processes} processes{agents}, on {os.cpu_count()} CPUs",
    ]


EXPERIMENT = Experiment(
    "control", ControlRequest, measure, (LOSSES, COSTS, MESSAGES, AGENT_MESSAGES), csv="losses", heading=heading
)
