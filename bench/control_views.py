"""`ftcomm bench views`: what changes of view cost the coordinator and a leader of a large job, in bytes and seconds.

The production state machines of the coordinator and of all leaders run in this process, and every message between them
and to the ranks is encoded, shortened and decoded as on a connection. There is no socket, no clock and no store, and a
rank is only what it answers; so the CPU seconds are those of the protocol, at any load of the machine. What `ftcomm
bench control` has besides, the connections, is what such a machine has no room for at 98,304 ranks.

    start     all ranks say hello, and the first view is in force at all
    loss      rank 1 of replica 0 ends; its column says so, and a view without replica 0 is in force at all others
    return    replica 0 comes back: hello, a proposal, a promise of each rank, the boundary, the view that has it

Messages between ranks of a column are not here: each rank sends one to each other member.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from ftcomm.bench.harness import BenchReport, Column, Experiment, Table, option
from ftcomm.control import coordinator_actions as ca
from ftcomm.control import leader as lead
from ftcomm.control import messages as m
from ftcomm.control.coordinator import Coordinator
from ftcomm.control.limits import RANKS
from ftcomm.control.replica_reports import RESUMED
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.view_differences import EncodedOnce, ViewsReceived, ViewsSent
from ftcomm.control.views import Address
from ftcomm.errors import FtcommError, SettingsError

STEP = 10  # that all ranks are in


@dataclasses.dataclass(frozen=True)
class ViewsRequest:
    """Reckon what changes of view cost the control plane of a job of replicas x ranks, in messages, bytes and CPU
    seconds of the coordinator and of the busiest leader. All state machines run in one process, without a socket."""

    replicas: int = option(12, help="Replicas of the job.")
    ranks: int = option(8192, help="Ranks of each.")
    hosts: int = option(1024, help="Hosts that the ranks of each are on.")

    def smoke(self) -> ViewsRequest:
        return ViewsRequest(3, 16, 4)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        if self.replicas < 2 or not 2 <= self.ranks <= RANKS or not 1 <= self.hosts <= self.ranks:
            raise SettingsError(
                f"--replicas {self.replicas} --ranks {self.ranks} --hosts {self.hosts}: expected at least 2 "
                f"replicas, 2 to {RANKS} ranks, and a rank at least for each host"
            )


class ViewsCost(msgspec.Struct, frozen=True):
    what: str
    part: str  # the coordinator, the leader that has used most CPU, or all leaders
    cpu: float  # s
    received: int  # messages
    sent: int  # messages
    received_mb: float
    sent_mb: float


@dataclasses.dataclass
class _Meter:
    cpu: float = 0.0
    received: int = 0
    sent: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        begun = time.process_time()
        try:
            yield
        finally:
            self.cpu += time.process_time() - begun

    def cost(self, what: str, part: str) -> ViewsCost:
        return ViewsCost(
            what, part, self.cpu, self.received, self.sent, self.received_bytes / 1e6, self.sent_bytes / 1e6
        )

    def takes(self, data: bytes) -> m.AnyMessage:
        self.received += 1
        self.received_bytes += len(data)
        return m.decode(data)

    def sends(self, data: bytes) -> bytes:
        self.sent += 1
        self.sent_bytes += len(data)
        return data


class _Replica:
    """The leader of one replica, and the sending ends of its connections."""

    def __init__(self, number: int, life: int, job: ViewsJob) -> None:
        request = job.request
        self.number, self.conn = number, life * request.replicas + number
        self.leader = lead.Leader(number, f"{self.conn:032x}", request.ranks, job.timeouts)
        self.once, self.to_ranks = EncodedOnce(), [ViewsSent(shard) for shard in range(request.ranks)]
        self.to_leader, self.received = ViewsSent(), ViewsReceived()  # of the connection to the coordinator
        self.epoch = 0  # that the ranks run in
        self.promised = 0  # the proposal for whose boundary they stop


class ViewsJob:
    """The job. `deliver` carries messages until there are no more."""

    def __init__(self, request: ViewsRequest) -> None:
        self.request, self.timeouts = request, Timeouts.derive()
        self.coordinator = Coordinator(request.replicas, request.ranks, self.timeouts, [], 0.0, 1)
        self.once = EncodedOnce()
        self.replicas: dict[int, _Replica] = {}
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self.begin()

    def begin(self) -> None:
        """Measure from here on."""
        self.at_coordinator = _Meter()
        self.at_leaders: dict[int, _Meter] = collections.defaultdict(_Meter)

    def costs(self, what: str) -> list[ViewsCost]:
        leaders = self.at_leaders.values()
        fields = [field.name for field in dataclasses.fields(_Meter)]
        together = _Meter(*(sum(getattr(one, name) for one in leaders) for name in fields))
        return [
            self.at_coordinator.cost(what, "coordinator"),
            max(leaders, key=lambda one: one.cpu).cost(what, "busiest leader"),
            together.cost(what, "all leaders"),
        ]

    def deliver(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def _later(self, do: Callable[..., None], *args: object) -> None:
        self._waiting.append(lambda: do(*args))

    # -- what happens ------------------------------------------------------------------------------------------------

    def start(self, number: int, life: int) -> None:
        """All ranks of a life of a replica say hello."""
        replica = self.replicas[number] = _Replica(number, life, self)
        for shard in range(self.request.ranks):
            self._later(self._from_rank, replica, shard, m.encode(m.Hello(shard, self._address(replica, shard))))

    def lose(self) -> None:
        """Rank 1 of replica 0 has ended; its leader sees it, and its column."""
        lost = self.replicas[0]
        self._leader_does(lost, lambda: lost.leader.rank_lost(1, "its process has ended"))
        message = m.encode(m.Suspect(0, lost.leader.incarnation, "its process has ended", True, 1))
        for number in range(1, self.request.replicas):
            self._later(self._from_rank, self.replicas[number], 1, message)

    def ends(self, number: int) -> None:
        """The leader of a replica has ended, too."""
        self._coordinator_does(lambda: self.coordinator.disconnected(self.replicas.pop(number).conn, 0.0))

    def stand(self) -> None:
        """All ranks with a promise stand at the boundary, when the commit is there."""
        for replica in self.replicas.values():
            for shard in range(self.request.ranks if replica.promised else 0):
                self._later(self._from_rank, replica, shard, m.encode(m.AtBoundary(replica.promised)))

    def _address(self, replica: _Replica, shard: int) -> Address:
        host = replica.number * self.request.hosts + shard * self.request.hosts // self.request.ranks
        nonce = f"{replica.conn * self.request.ranks + shard:032x}"
        return Address(f"node-{host:05d}.example", 40000 + shard % 20000, f"{host:036d}", 1000 + shard, 3, nonce)

    # -- the wire ----------------------------------------------------------------------------------------------------

    def _coordinator_does(self, event: Callable[[], list[ca.CoordinatorAction]]) -> None:
        meter = self.at_coordinator
        with meter.at_work():
            sends = [action for action in event() if isinstance(action, ca.Send)]
            conns = {replica.conn: replica for replica in self.replicas.values()}
            told = [(conns[x.conn], self.once.encode(x.message, conns[x.conn].to_leader)) for x in sends]
        for replica, data in told:
            self._later(self._from_coordinator, replica, meter.sends(data))

    def _from_leader(self, replica: _Replica, data: bytes) -> None:
        with self.at_coordinator.at_work():
            message = self.at_coordinator.takes(data)
        self._coordinator_does(lambda: self.coordinator.receive(replica.conn, message, 0.0))

    def _from_coordinator(self, replica: _Replica, data: bytes) -> None:
        meter = self.at_leaders[replica.number]
        with meter.at_work():
            message = replica.received.complete(meter.takes(data))
        self._leader_does(replica, lambda: replica.leader.from_coordinator(message))

    def _from_rank(self, replica: _Replica, shard: int, data: bytes) -> None:
        meter = self.at_leaders[replica.number]
        with meter.at_work():
            message = meter.takes(data)
        self._leader_does(replica, lambda: replica.leader.from_rank(shard, message))

    def _from_peer(self, replica: _Replica, data: bytes) -> None:
        meter = self.at_leaders[replica.number]
        with meter.at_work():
            message = meter.takes(data)
        assert isinstance(message, m.Boundary)
        self._leader_does(replica, lambda: replica.leader.from_leader(message))

    def _leader_does(self, replica: _Replica, event: Callable[[], list[lead.LeaderAction]]) -> None:
        meter = self.at_leaders[replica.number]
        for action in self._done(meter, event):
            with meter.at_work():
                if isinstance(action, lead.ToRank):
                    data = replica.once.encode(action.message, replica.to_ranks[action.shard])
                else:
                    data = m.encode(action.message)
            if isinstance(action, lead.ToCoordinator):
                self._later(self._from_leader, replica, meter.sends(data))
            elif isinstance(action, lead.ToPeerLeader):
                self._later(self._from_peer, self.replicas[action.replica], meter.sends(data))
            else:
                if action.shard:  # rank 0 is in the same process
                    meter.sends(data)
                self._rank_hears(replica, action.shard, action.message)

    @staticmethod
    def _done(meter: _Meter, event: Callable[[], list[lead.LeaderAction]]) -> list[lead.LeaderAction]:
        with meter.at_work():
            return event()

    def _rank_hears(self, replica: _Replica, shard: int, message: m.Message) -> None:
        for answer in self._answers(replica, shard, message):
            self._later(self._from_rank, replica, shard, m.encode(answer))

    def _answers(self, replica: _Replica, shard: int, message: m.Message) -> Iterable[m.Message]:
        """Returns what a rank says at once."""
        if isinstance(message, m.Prepare):
            replica.promised = message.proposal
            return (m.Promise(message.proposal, True, STEP),)
        if isinstance(message, m.Registered):
            return (m.Ready(),)
        view = message.view if isinstance(message, m.NewView | m.Decision) else None
        if view is None or not view.has(replica.number, replica.leader.incarnation):
            return ()
        replica.epoch = view.epoch
        resumed = {"shard": shard, "epoch": view.epoch, "resume_ms": 1.0, "freeze_ms": 1.0, "progress_ms": 1.0}
        said = (m.Installed(view.epoch), m.Report(RESUMED, resumed))
        return said if shard else (m.Heartbeat(STEP), *said)


def measure(request: ViewsRequest, report: BenchReport) -> None:
    job = ViewsJob(request)
    numbers = range(request.replicas)

    def run(what: str, part: float, *happen: Callable[[], None]) -> None:
        report.progress(what, part)
        job.begin()
        for each in happen:
            each()
            job.deliver()
        view = job.coordinator.view
        there = {number: replica.epoch for number, replica in job.replicas.items()}
        if view is None or set(there.values()) != {view.epoch} or view.replicas != tuple(sorted(there)):
            raise FtcommError(f"{what}: the coordinator has {view and view.replicas}, the replicas are in {there}")
        for cost in job.costs(what):
            report.add(cost)

    run("start", 0.0, lambda: [job.start(number, 0) for number in numbers] and None)
    run("loss", 0.4, job.lose, lambda: job.ends(0))
    run("return", 0.5, lambda: job.start(0, 1), job.stand)


COSTS = Table(
    "costs",
    ViewsCost,
    (
        Column("what", "", -8, lambda cost: cost.what),
        Column("part", "", -15, lambda cost: cost.part),
        Column("cpu", "(s)", 9, lambda cost: f"{cost.cpu:.3f}"),
        Column("received", "", 9, lambda cost: f"{cost.received:,}"),
        Column("", "(MB)", 9, lambda cost: f"{cost.received_mb:.3f}"),
        Column("sent", "", 9, lambda cost: f"{cost.sent:,}"),
        Column("", "(MB)", 9, lambda cost: f"{cost.sent_mb:.3f}"),
    ),
)


def heading(request: ViewsRequest) -> list[str]:
    return [
        f"# {request.replicas} replicas of {request.ranks} ranks on {request.hosts} hosts each: the state machines "
        "of the coordinator and of all leaders, their messages encoded and decoded, in one process; no socket, no store"
    ]


EXPERIMENT = Experiment("views", ViewsRequest, measure, (COSTS,), csv="costs", heading=heading)
