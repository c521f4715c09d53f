"""A simulated network: hosts, and connections between processes that behave like TCP over packets.

Packets are delayed, lost, duplicated and reordered. Of all that a connection shows delay alone: what is lost comes with
the retransmission, what follows waits for it. Connections know nothing of each other, so messages of different ones
overtake each other. A blocked path (one way or both) keeps what is sent until it is free again, or until one end gives
the connection up, of which the other end then hears nothing as long as the path is blocked: half open. A host
that loses power says nothing at all.

A kernel answers for its processes, also for one that is stopped, or holds its interpreter: it acknowledges what comes
(`SimulatedConnection.unanswered`), and takes connections to its ports (`SimulatedNetwork.probe`). It does so for a
process that has ended, too, as long as a child that has inherited its connections lives.

`rough` takes the order and the uniqueness away that TCP gives, from the links between members, whose machines are
meant to stand it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ftcomm.control import messages as m
from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.view_differences import ViewsReceived, ViewsSent
from ftcomm.simulation.mirror import NoConnection, TinySocket
from ftcomm.simulation.world import Process, World

_FIN = object()
_MANY = 100  # acknowledgements that are kept before somebody looks at them


@dataclasses.dataclass(frozen=True)
class NetworkConditions:
    """Says how fast and how reliable the network is: seconds, and probabilities per message."""

    latency: float = 0.0002  # between hosts
    loss: float = 0.0
    retransmission: float = 0.05  # doubled for each loss of the same packet
    user_timeout: float = 6.0  # after which a silent connection is given up
    dial_timeout: float = 5.0
    probe_timeout: float = 1.0
    rough: float = 0.0  # of a message between members that comes twice, or late
    checked: float = 0.01  # of a message whose way over the wire is tried


class SimulatedConnection:
    """A connection between two processes. End 0 has dialled, end 1 has accepted."""

    __slots__ = (
        "_acked",
        "_due",
        "closed",
        "held",
        "last",
        "network",
        "number",
        "open",
        "processes",
        "receive",
        "rough",
        "sockets",
        "told",
        "views",
        "way",
    )

    def __init__(self, network: SimulatedNetwork, dialler: Process, acceptor: Process) -> None:
        self.network = network
        network.made += 1
        self.number = network.made
        self.processes = (dialler, acceptor)
        self.way = ((dialler.host, acceptor.host), (acceptor.host, dialler.host))
        self.open = [True, True]
        self.last = [0.0, 0.0]
        self.held: list[list[Any]] = [[], []]  # sent while the path was blocked
        self.receive: list[Callable[[Any], object]] = [_nobody, _nobody]
        self.closed: list[Callable[[NoConnection], object]] = [_nobody, _nobody]
        self.rough = False
        self.sockets: list[TinySocket | None] = [None, None]  # where bytes are carried
        self.told: ViewsSent | None = None  # of end 1, where that tells views
        self.views = ViewsReceived()  # of end 0
        now = network.world.now
        self._due: list[deque[float]] = [deque(), deque()]  # when what was sent is to be acknowledged
        self._acked = [now, now]  # when the last acknowledgement came
        dialler.connections[self] = 0
        acceptor.connections[self] = 1

    def send(self, end: int, message: Any) -> None:
        if self.open[end]:
            network = self.network
            if end and self.told is not None:
                message = self.told.shorten(message)
            if self.rough and network.random() < network.conditions.rough:
                network.astray(self, end, message)
            self._carry(end, message)

    def unanswered(self, end: int) -> float | None:
        """Does what `ftcomm.control.liveness.unanswered` does, for the socket at that end."""
        if not self.open[end]:
            return None
        until = min(self.network.world.now, self.network.since.get(self.way[1 - end], float("inf")))
        due = self._due[end]
        while due and due[0] <= until:
            self._acked[end] = max(self._acked[end], due.popleft())
        return self.network.world.now - self._acked[end] if due or self.held[end] else 0.0

    def close(self, end: int, reason: NoConnection | None = None) -> None:
        """Close it by that end. With a `reason` that was not its own wish, and it is told."""
        if self.open[end]:
            self.open[end] = False
            self.processes[end].connections.pop(self, None)
            self._carry(end, _FIN)
            if reason:
                self.closed[end](reason)

    def reset(self, ends: Iterable[int]) -> None:
        """Let something in between forget it: these ends are told, and an end that is not hears of it never."""
        for end in ends:
            if self.open[end]:
                self.open[end] = False
                self.processes[end].connections.pop(self, None)
                self.network.world.after(0.0, self.processes[end], self.closed[end], NoConnection.RESET)

    def vanish(self, end: int) -> None:
        """Take that end away without a message; the other finds out by silence."""
        self.open[end] = False
        other = 1 - end
        now = self.network.world.now
        self._due[other] = deque(due if due <= now else float("inf") for due in self._due[other])
        network = self.network
        seconds = network.conditions.user_timeout * (0.8 + 0.4 * network.random())
        network.world.after(seconds, self.processes[other], self.close, other, NoConnection.TIMED_OUT)

    def release(self) -> None:
        """The path may be free again."""
        for end in (0, 1):
            if self.held[end] and self.way[end] not in self.network.blocked:
                held, self.held[end] = self.held[end], []
                self.last[end] = max(
                    self.last[end],
                    self.network.world.now + self.network.conditions.retransmission * 4 * self.network.random(),
                )
                for what in held:
                    self._carry(end, what)

    def _carry(self, end: int, what: Any) -> None:
        network = self.network
        way = self.way[end]
        if self.held[end] or way in network.blocked:
            self.held[end].append(what)
            network.holding[self] = None
            return
        when = network.world.now + network.delay(way)
        if when < self.last[end]:
            when = self.last[end]
        else:
            self.last[end] = when
        if self.processes[1 - end] in network.dark:
            self._due[end].append(float("inf"))
        else:
            if len(self._due[end]) > _MANY:
                self.unanswered(end)
            self._due[end].append(when + network.conditions.latency)
        network.world.at(when, self.processes[1 - end], self._arrive, end, what)

    def _arrive(self, end: int, what: Any) -> None:
        other = 1 - end
        if not self.open[other]:
            return
        if what is _FIN:
            self.open[other] = False
            self.processes[other].connections.pop(self, None)
            self.closed[other](NoConnection.CLOSED)
        else:
            self._acked[other] = self.network.world.now  # what comes acknowledges, too
            self.receive[other](what if other else self.views.complete(what))


class SimulatedNetwork:
    def __init__(
        self, world: World, conditions: NetworkConditions, data: str = "none", *, attacked: bool = False
    ) -> None:
        """`data` as FTCOMM_DATA. `attacked`: somebody is on the paths."""
        self.world = world
        self.conditions = conditions
        self.data, self.attacked = data, attacked
        self.made = 0  # connections
        self.random = world.random.random
        self.blocked: dict[tuple[int, int], int] = {}  # (from, to) -> which partition did it
        self.since: dict[tuple[int, int], float] = {}  # when
        self.rejecting: dict[int, int] = {}  # hosts whose connections to others are reset and refused: how often
        self.holding: dict[SimulatedConnection, None] = {}
        self.listeners: dict[int, Process] = {}  # by port
        self.dark: dict[Process, None] = {}  # those that lost power, and answer nothing
        self._partitions = 0
        self._survived: dict[Process, None] = {}  # ended, and somebody takes the connections to their ports

    def delay(self, way: tuple[int, int]) -> float:
        chance = self.random()
        if way[0] == way[1]:
            return 0.00001 + 0.00005 * chance
        conditions = self.conditions
        seconds = conditions.latency * (0.5 + 10 * chance**8)  # now and then a queue somewhere
        if conditions.loss:
            again = conditions.retransmission
            while self.random() < conditions.loss:
                seconds += again
                again *= 2
        return seconds

    def dial(
        self,
        dialler: Process,
        port: int,
        accept: Callable[[Process, SimulatedConnection], bool],
        on_open: Callable[[SimulatedConnection], object],
        on_fail: Callable[[NoConnection], object],
        awaits_mute: bool = False,
        waited: float = 0.0,
    ) -> None:
        """`accept(process, connection)` is called at the other side, False turns the dialler away. One of `on_open`
        and `on_fail` is called later, as an event of the dialler. `awaits_mute`: the process at the other side
        may take as long as it likes, while its kernel answers."""
        target = self.listeners.get(port)
        way = None if target is None else (dialler.host, target.host)
        if way is not None and self._rejected(way):
            self.world.after(0.0001, dialler, on_fail, NoConnection.REFUSED)
            return
        if way is not None and (way in self.blocked or way[::-1] in self.blocked):
            if waited >= self.conditions.dial_timeout:
                self.world.after(0.0, dialler, on_fail, NoConnection.UNREACHABLE)
            else:
                pause = self.conditions.retransmission
                args = (dialler, port, accept, on_open, on_fail, awaits_mute, waited + pause)
                self.world.after(pause, dialler, self.dial, *args)
            return
        trip = 0.0001 if way is None else self.delay(way) + self.delay(way)
        self.world.after(trip, None, self._connect, dialler, port, accept, on_open, on_fail, awaits_mute)

    def _connect(self, dialler: Process, port: int, accept: Any, on_open: Any, on_fail: Any, awaits_mute: bool) -> None:
        target = self.listeners.get(port)
        if target is not None and target in self._survived:
            self.world.after(
                self.conditions.dial_timeout, dialler, self._too_late, dialler, target, [], on_fail, awaits_mute
            )
            return
        if target is not None and target in self.dark:
            self.world.after(self.conditions.dial_timeout, dialler, on_fail, NoConnection.UNREACHABLE)
            return
        if target is None or not target.alive:
            self.world.after(0.0001, dialler, on_fail, NoConnection.REFUSED)
            return
        if not dialler.alive:
            return
        if target.frozen:
            answered: list[bool] = []
            self.world.at(self.world.now, target, self._enter, dialler, target, accept, on_open, on_fail, answered)
            args = (dialler, target, answered, on_fail, awaits_mute)
            self.world.after(self.conditions.dial_timeout, dialler, self._too_late, *args)
        else:
            self._enter(dialler, target, accept, on_open, on_fail, [])

    def _enter(
        self, dialler: Process, target: Process, accept: Any, on_open: Any, on_fail: Any, answered: list[bool]
    ) -> None:
        if answered or not dialler.alive:
            return
        answered.append(True)
        connection = SimulatedConnection(self, dialler, target)
        opened = self.world.now + self.delay((target.host, dialler.host))
        connection.last[1] = opened  # what the other side says at once comes after the opening
        self.world.at(opened, dialler, self._opened, connection, on_open, on_fail)
        if not accept(target, connection):
            connection.open[:] = [False, False]
            dialler.connections.pop(connection, None)
            target.connections.pop(connection, None)

    def _opened(self, connection: SimulatedConnection, on_open: Any, on_fail: Any) -> None:
        if connection.open[0]:
            on_open(connection)
        else:
            on_fail(NoConnection.TURNED_AWAY)

    def _too_late(
        self, dialler: Process, target: Process, answered: list[bool], on_fail: Any, awaits_mute: bool
    ) -> None:
        if answered:
            return
        if awaits_mute and self.is_mute(dialler, target):
            args = (dialler, target, answered, on_fail, awaits_mute)
            self.world.after(self.conditions.dial_timeout, dialler, self._too_late, *args)
            return
        answered.append(True)
        on_fail(NoConnection.MUTE)

    def is_mute(self, dialler: Process, target: Process | None) -> bool:
        """Whether its kernel takes a connection, and its process does not."""
        if target is None or (dialler.host, target.host) in self.blocked or (target.host, dialler.host) in self.blocked:
            return False
        return (target.alive and target.frozen) or target in self._survived

    def probe(
        self, dialler: Process, port: int, tell: Callable[[ProbeOutcome], object], *, awaits_mute: bool = False
    ) -> None:
        """Does what `ftcomm.control.probe` does: `tell` what is found at that port. `awaits_mute`: its process has
        `probe_timeout` to answer."""
        told: list[ProbeOutcome] = []

        def found(outcome: ProbeOutcome) -> None:
            if not told:
                told.append(outcome)
                tell(outcome)

        target = self.listeners[port]
        way = (dialler.host, target.host)
        trip, late = 2 * self.conditions.latency, self.conditions.probe_timeout
        if self._rejected(way):
            self.world.after(trip, dialler, found, ProbeOutcome.REFUSED)
        elif way in self.blocked or way[::-1] in self.blocked or target in self.dark:
            self.world.after(late, dialler, found, ProbeOutcome.UNREACHABLE)
        elif not target.alive and way[0] == way[1]:  # its kernel knows the process, whoever has its port
            self.world.after(trip, dialler, found, ProbeOutcome.ENDED)
        elif target.alive or target in self._survived:
            self.world.after(late if awaits_mute else 2 * trip, dialler, found, ProbeOutcome.MUTE)
            if target.alive:
                answer = functools.partial(
                    self.world.after, self.conditions.latency, dialler, found, ProbeOutcome.ANSWERED
                )
                self.world.after(self.conditions.latency, target, answer)
        else:
            self.world.after(trip, dialler, found, ProbeOutcome.REFUSED)

    def astray(self, connection: SimulatedConnection, end: int, message: Any) -> None:
        """A copy of a message comes some time later, out of order."""
        seconds = self.delay(connection.way[end]) * 50 * self.random()
        self.world.after(seconds, connection.processes[1 - end], connection._arrive, end, message)

    def check(self, message: m.Message) -> None:
        """Check that the message means the same on the other side."""
        if self.random() < self.conditions.checked:
            there = m.decode(m.encode(message))
            if there != message:
                raise AssertionError(f"{message} arrives as {there}")

    # -- faults ----------------------------------------------------------------------------------------------------

    def partition(self, ways: list[tuple[int, int]], processes: list[Process]) -> int:
        """Block these paths; returns a number to heal them by."""
        self._partitions += 1
        for way in ways:
            self.blocked.setdefault(way, self._partitions)
            self.since.setdefault(way, self.world.now)
        for process in processes:
            for connection, end in process.connections.items():
                if end == 0 and (connection.way[0] in self.blocked or connection.way[1] in self.blocked):
                    for side in (0, 1):
                        seconds = self.conditions.user_timeout * (0.8 + 0.4 * self.random())
                        self.world.after(seconds, connection.processes[side], self._expire, connection, side)
        return self._partitions

    def _expire(self, connection: SimulatedConnection, end: int) -> None:
        if connection.way[0] in self.blocked or connection.way[1] in self.blocked:
            connection.close(end, NoConnection.TIMED_OUT)

    def _rejected(self, way: tuple[int, int]) -> bool:
        return way[0] != way[1] and not self.rejecting.keys().isdisjoint(way)

    def reject(self, hosts: list[int], processes: list[Process], seconds: float) -> None:
        """Restart the firewall in front of these hosts: it resets their connections to others, and refuses new ones."""
        for host in hosts:
            self.rejecting[host] = self.rejecting.get(host, 0) + 1
        for process in processes:
            for connection, end in list(process.connections.items()):
                if self._rejected(connection.way[0]) and end == 0:
                    for side in (0, 1):
                        when = 0.01 * self.random()
                        self.world.after(when, connection.processes[side], connection.close, side, NoConnection.RESET)

        def over() -> None:
            for host in hosts:
                self.rejecting[host] -= 1
                if not self.rejecting[host]:
                    del self.rejecting[host]

        self.world.after(seconds, None, over)

    def heal(self, partition: int | None = None) -> None:
        """Free the paths of one partition, or all of them."""
        self.blocked = {
            way: number for way, number in self.blocked.items() if partition is not None and number != partition
        }
        self.since = {way: since for way, since in self.since.items() if way in self.blocked}
        holding, self.holding = self.holding, {}
        for connection in holding:
            connection.release()
            if any(connection.held):
                self.holding[connection] = None

    def end(self, process: Process, *, power: bool = False, child: float = 0.0, port_taken: bool = False) -> None:
        """The process ends: the kernel closes its connections, unless the power went. `child`: seconds for which a
        child holds them open that was forked without Python's knowledge, so that nothing has closed them in it.
        `port_taken`: another program listens at its port from then on, takes connections, and says nothing."""
        process.alive = False
        process.backlog.clear()
        if child:
            self._survived[process] = None
            self.world.after(child, None, self._child_ends, process)
            return
        if power:
            self.dark[process] = None
        if port_taken:
            self._survived[process] = None
        self._close(process, power)

    def _child_ends(self, process: Process) -> None:
        del self._survived[process]
        self._close(process, False)

    def _close(self, process: Process, power: bool) -> None:
        connections, process.connections = process.connections, {}
        for connection, end in connections.items():
            if power:
                connection.vanish(end)
            else:
                connection.close(end)


class SimulatedLink:
    """An outgoing connection that is made again whenever it breaks, as by `ftcomm.control.links.Link`. `on_down` is
    told why there is no connection, and whether one has ended."""

    FIRST_PAUSE, LAST_PAUSE = 0.02, 0.5

    def __init__(
        self,
        network: SimulatedNetwork,
        owner: Process,
        port: int,
        accept: Callable[[Process, SimulatedConnection], bool],
        *,
        on_open: Callable[[], object],
        on_message: Callable[[Any], object],
        on_down: Callable[[NoConnection, bool], object],
        rough: bool = False,
    ) -> None:
        self._network, self._owner, self._port, self._accept = network, owner, port, accept
        self._on_open, self._on_message, self._on_down = on_open, on_message, on_down
        self._rough = rough
        self._connection: SimulatedConnection | None = None
        self._over = False
        self._pause = self.FIRST_PAUSE
        self._begun = 0.0
        self._dial()

    def send(self, message: m.Message) -> None:
        """Drops it: there is no connection."""
        if self._connection is not None:
            self._network.check(message)
            self._connection.send(0, message)

    def close(self) -> None:
        self._over = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(0)

    def break_(self) -> None:
        """A fault: the connection is reset."""
        if self._connection is not None:
            self._connection.close(0, NoConnection.RESET)

    def lose(self) -> None:
        """A fault: the connection is reset at both ends, with all that is under way."""
        if self._connection is not None:
            self._connection.reset((0, 1))

    def _dial(self) -> None:
        if not self._over:
            self._begun = self._network.world.now
            failed = functools.partial(self._down, ended=False)
            self._network.dial(self._owner, self._port, self._accept, self._opened, failed, awaits_mute=True)

    def _opened(self, connection: SimulatedConnection) -> None:
        if self._over:
            connection.close(0)
            return
        self._connection = connection
        connection.rough = self._rough
        connection.receive[0] = self._on_message
        connection.closed[0] = functools.partial(self._down, ended=True)
        self._on_open()

    @property
    def is_up(self) -> bool:
        return self._connection is not None

    def unanswered(self) -> float | None:
        """Does what `ftcomm.control.links.Link.unanswered` does: also for a connection that the process has not taken
        yet."""
        if self._connection is not None:
            return self._connection.unanswered(0)
        return 0.0 if self._network.is_mute(self._owner, self._network.listeners.get(self._port)) else None

    def _down(self, reason: NoConnection, ended: bool) -> None:
        self._connection = None
        if self._over:
            return
        if self._network.world.now - self._begun > 1.0:
            self._pause = self.FIRST_PAUSE
        self._on_down(reason, ended)
        self._owner.after(self._pause, self._dial)
        self._pause = min(2 * self._pause, self.LAST_PAUSE)


def _nobody(what: Any) -> None:
    """Drop what comes: no process listens."""
