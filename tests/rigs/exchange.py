"""Members of a group without a control plane: segments, exchanges and connections, and view changes on demand."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.inflight import Resumed
from ftcomm.collective.plan import GroupView, rows, shared_hosts
from ftcomm.collective.watchdog import Stall
from ftcomm.engines.base import Events
from ftcomm.engines.host_calls import HostCalls
from ftcomm.groups.communicator import Communicator, Terms
from ftcomm.groups.data_plane import LocalDataPlane
from ftcomm.p2p.calls import JobProgressEngine
from ftcomm.recorder.layout import ALL, GroupKind
from ftcomm.recorder.recorder import GroupRecorder
from ftcomm.settings.tuning import BUILT_IN, Tuning
from ftcomm.transport.base import Peer
from ftcomm.transport.router import ConnectionRouter
from ftcomm.transport.segment import HOST, Segment
from ftcomm.transport.shm import ShmPeer
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.writer import TcpMirrorWriter

DEADLINE = 60.0  # seconds; for everything that a test waits for
LAYOUT = HOST  # of all segments
ROWS = dataclasses.replace(BUILT_IN, slices=2)  # so that few members count as many


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection on this host, blocking."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=DEADLINE)
        far, _ = server.accept()
    near.settimeout(None)
    return near, far


def deadlines(seconds: float) -> dict[str, float]:
    """Of an exchange: the same for ops of all sizes, however long they have taken."""
    return {"deadline_floor": seconds, "deadline_ceiling": seconds, "give_up": 2 * seconds}


class Member:
    """One exchange in this process."""

    def __init__(self, replica: int, op_timeout: float = DEADLINE, verify: bool = False) -> None:
        self.replica = replica
        self.segment = Segment(LAYOUT, chunks=0)
        self.stalls: list[Stall] = []
        self.lost: list[tuple[int, int, str]] = []
        self.divergences: list[Divergence] = []
        self.exchange = Exchange(
            replica,
            self.segment,
            **deadlines(op_timeout),
            on_stall=self.stalls.append,
            on_lost=lambda *args: self.lost.append(args),
            on_divergence=self.divergences.append if verify else None,
            ranks_per_replica=8,  # all members share one interpreter lock: sleep early
        )


def pages(segment: Segment) -> tuple[int, int]:
    """How many pages a segment has, and how many of it are reserved, those of the words with them. More are there if
    somebody has touched others. Waits for a thread that reserves some."""
    with segment._reserving:
        reserved = segment._lacking.count(0) + segment.header // 4096
        return os.fstat(segment.fd).st_blocks * 512 // 4096, reserved


def mirrored(replica: int = 0, count: int = 2) -> tuple[Exchange, Segment]:
    """An exchange of `count` members, the others of which are its own mirror images: no op waits, and sums are
    multiplied."""
    segment = Segment(LAYOUT)
    exchange = Exchange(replica, segment, **deadlines(DEADLINE), on_stall=lambda stall: None)
    exchange.freeze(lambda: None)
    members = tuple(range(replica, replica + count))
    peers: dict[int, Peer] = {
        other: ShmPeer(other, os.getpid(), segment.fd, segment.nonce, LAYOUT) for other in members[1:]
    }
    told = exchange.progress()
    view = GroupView(1, replica, members, frozenset(members), True)
    exchange.enter(view, peers, dict.fromkeys(members, told))
    return exchange, segment


class NoExchange:
    """It is told of views, and does nothing."""

    def __init__(self) -> None:
        self.views: list[GroupView] = []

    def enter(self, view: GroupView, *rest: object) -> Resumed:
        self.views.append(view)
        return Resumed(0, 0, 0)


class NoEngine(HostCalls):
    """The engine of that exchange. Segments of a layout of their own are refused by nobody."""

    slots, arithmetic = None, ""

    def __init__(self, transport: str, on_reached: Callable[[Peer], None], on_left: Callable[[Peer], None]) -> None:
        self.transport, self.reach, self.leave = transport, on_reached, on_left
        self.segment = Segment()

    def exchange(self, events: Events, recorder: GroupRecorder) -> NoExchange:
        return NoExchange()


def data_plane(
    transport: str,
    *,
    on_reached: Callable[[Peer], None] = lambda peer: None,
    on_left: Callable[[Peer], None] = lambda peer: None,
    algorithm: str = "auto",
    tuning: Tuning = BUILT_IN,
) -> tuple[LocalDataPlane, Communicator]:
    """What the control thread drives of replica 0, with an exchange that does nothing."""

    def nothing(*told: object) -> Any:
        """Nobody is told."""

    engine: Any = NoEngine(transport, on_reached, on_left)
    p2p = JobProgressEngine(0, 0, nothing)
    terms = Terms(("127.0.0.1", 1), "none", algorithm, tuning)
    events = Events(nothing, nothing, nothing, nothing)
    communicator = Communicator(ALL, 0, engine, events, p2p, terms, GroupKind.JOB, on_died=nothing)
    made = LocalDataPlane(0, communicator, p2p, dial=nothing)
    communicator.open(ConnectionRouter(SimpleNamespace(serve=nothing)), made)
    return made, communicator


class Rig:
    """Members as threads of this process, reached through shared memory, TCP, or both in turn ("mixed"); or large
    all-reduces go around a "ring" of TCP, or a "mixed ring", or by two levels, with shared memory in "hosts" or without
    ("tcp hosts"), or in "rows" of TCP, as those of many members do. "loopback" is TCP between members of one host,
    "alike" TCP between hosts whose processors can the same."""

    def __init__(
        self, replicas: Iterable[int], how: str = "shm", op_timeout: float = DEADLINE, verify: bool = False
    ) -> None:
        self.how = how
        self.members = {m: Member(m, op_timeout, verify) for m in replicas}
        self.epoch = 0
        self.dials = 0  # connections that were made

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members.values():
            member.exchange.fail(RuntimeError("the test is over"))
        used = [(member.segment.layout.size, *pages(member.segment)) for member in self.members.values()]
        for member in self.members.values():
            member.segment.close()
        self.members.clear()
        gc.collect()  # an exchange is part of cycles, and holds a segment
        assert all(there <= reserved for _, there, reserved in used), f"bytes, touched, reserved: {used}"

    def view(self, replicas: Iterable[int], contributing: Iterable[int] | None = None) -> None:
        """Install a view at its members, as the control plane does. Those left out are told nothing."""
        members = tuple(sorted(replicas))
        counted = frozenset(members if contributing is None else contributing)
        self.epoch += 1
        for m in members:
            quiesced = threading.Event()
            exchange = self.members[m].exchange
            exchange.freeze(quiesced.set)
            while not quiesced.wait(0.001):
                exchange.wake()
        progress = {m: self.members[m].exchange.progress() for m in members}
        for m in members:
            one_host = self.how in ("shm", "loopback")
            ring, hosts = self.ring(m, members), self.hosts(m, members)
            more = {"tuning": ROWS} if self.how == "rows" else {}
            view = GroupView(self.epoch, m, members, counted, one_host, ring, self.how == "alike", hosts=hosts, **more)
            self.members[m].exchange.enter(view, self.peers(m, members), progress)

    def ring(self, me: int, members: tuple[int, ...]) -> tuple[int, ...]:
        """Not in the order of the numbers."""
        return tuple(sorted(members, key=lambda m: (m % 2, m))) if "ring" in self.how else ()

    def hosts(self, me: int, members: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        if self.how == "rows":
            return rows(members) if len(members) > 1 else ()
        return shared_hosts({m: str(m % 2) for m in members}) if "hosts" in self.how else ()

    def peers(self, me: int, members: tuple[int, ...]) -> dict[int, Peer]:
        peers = {m: self.connect(me, m) for m in members if m != me}
        ring = self.ring(me, members)
        beside = {ring[(ring.index(me) + step) % len(ring)] for step in (-1, 1)} if ring else set(members)
        for m, peer in peers.items():
            if isinstance(peer, TcpMirror) and (m in beside or self.how != "ring"):
                peer.open_now()
        return peers

    def connect(self, me: int, other: int) -> Peer:
        between = self.how in ("mixed", "mixed ring", "hosts") and (me + other) % 2
        tcp = self.how in ("tcp", "ring", "loopback", "alike", "tcp hosts", "rows") or between
        if not tcp:
            segment = self.members[other].segment
            return ShmPeer(other, os.getpid(), segment.fd, segment.nonce, LAYOUT)
        known = self.members[me].exchange.member.peers.get(other)
        if known is not None and known.serves(self.epoch):
            return known
        epoch = self.epoch

        def dial() -> socket.socket:
            near, far = socket_pair()
            self.dials += 1
            self.members[other].exchange.admit(TcpMirrorWriter(far, me, epoch, self.members[me].segment.nonce))
            return near

        sock = None if self.how == "ring" else dial()
        peer = TcpMirror(other, epoch, sock, lambda *args: self.members[me].lost.append(args), LAYOUT)
        peer.dial = dial
        peer.nonce = self.members[other].segment.nonce
        return peer


@dataclasses.dataclass
class Caller:
    """A thread that stands for the user's script of one member."""

    thread: threading.Thread
    errors: list[BaseException]

    @classmethod
    def start(cls, body: object, *args: object) -> Caller:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                body(*args)  # type: ignore[operator]
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return cls(thread, errors)

    def join(self) -> None:
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive(), "the caller hangs"
        if self.errors:
            raise self.errors[0]
