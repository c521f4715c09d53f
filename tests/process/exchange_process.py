"""A member of a group as a process of its own, with a pipe to the test in place of the control plane."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView, rows, shared_hosts
from ftcomm.control.messages import Progress
from ftcomm.control.views import Address
from ftcomm.engines.host_calls import HostCalls
from ftcomm.errors import LostError
from ftcomm.groups.calls import Calls
from ftcomm.settings.tuning import BUILT_IN, Tuning
from ftcomm.transport.base import Belongs, Peer
from ftcomm.transport.connect import connect
from ftcomm.transport.segment import Segment
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.rigs.fp8_results import coded
from tests.rigs.orphan_watch import end_with_pytest

_HANDSHAKE = struct.Struct("<II32s")  # replica, epoch, nonce of its segment
_PERIOD = 1009


def weight(replica: int) -> int:
    """So small that sums of all members are exact."""
    return 1 << replica if replica < 12 else 40 + replica


def pattern(replica: int, count: int) -> np.ndarray:
    """Small integers, so that sums of them are exact, and different for every set of contributors and every chunk."""
    return np.resize(np.arange(_PERIOD, dtype=np.float32), count) * np.float32(weight(replica))


class CountingWriter(TcpMirrorWriter):
    """One that counts the frames of this process."""

    sent = 0

    def send(self, word: int, value: int, start: int, payload: memoryview, belongs: Belongs) -> None:
        CountingWriter.sent += 1
        super().send(word, value, start, payload, belongs)


_TRANSPORTS = {"ring": "tcp", "loopback": "tcp", "hosts": "auto", "rows": "tcp"}  # of modes that are none


class Member:
    """Commands come through `pipe` as (name, arguments), reports go back as tuples."""

    def __init__(self, replica: int, mode: str, pipe: Connection, members: int) -> None:
        self.replica, self.mode, self.pipe = replica, mode, pipe
        self.segment = Segment(members=members)
        self.sending = threading.Lock()
        self.exchange = Exchange(
            replica,
            self.segment,
            deadline_floor=60,
            deadline_ceiling=60,
            give_up=120,
            on_stall=lambda stall: self.send("stall", stall),
        )
        self.peers: dict[int, Peer] = {}
        self.tuning = dataclasses.replace(BUILT_IN, slices=2) if mode == "rows" else BUILT_IN
        self.server = socket.create_server(("127.0.0.1", 0))
        port = self.server.getsockname()[1]
        boot = f"boot{replica % 2}" if mode == "hosts" else "boot"
        self.here = Address("127.0.0.1", port, boot, os.getpid(), self.segment.fd, self.segment.nonce)
        threading.Thread(target=self.accept, daemon=True).start()
        self.send("hello", self.here)

    def send(self, *report: Any) -> None:
        with self.sending:
            self.pipe.send(report)

    def accept(self) -> None:
        while True:
            sock, _ = self.server.accept()
            said = sock.recv(_HANDSHAKE.size, socket.MSG_WAITALL)
            if len(said) < _HANDSHAKE.size:  # it was killed meanwhile
                sock.close()
                continue
            replica, epoch, nonce = _HANDSHAKE.unpack(said)
            self.exchange.admit(CountingWriter(sock, replica, epoch, nonce.decode()))

    def dial(self, there: Address, epoch: int) -> socket.socket:
        sock = socket.create_connection((there.host, there.port), timeout=10)
        sock.sendall(_HANDSHAKE.pack(self.replica, epoch, self.segment.nonce.encode()))
        return sock

    def freeze(self, epoch: int) -> None:
        quiesced = threading.Event()
        self.exchange.freeze(quiesced.set)
        while not quiesced.wait(0.001):
            self.exchange.wake()
        self.send("progress", epoch, msgspec.msgpack.encode(self.exchange.progress()))

    def enter(self, epoch: int, members: dict[int, Address], progress: dict[int, bytes]) -> None:
        held = {m: msgspec.msgpack.decode(p, type=Progress) for m, p in progress.items()}
        peers = {m: peer for m, peer in self.peers.items() if m in members and peer.serves(epoch)}
        for m, there in members.items():
            if m != self.replica and m not in peers:
                try:
                    peers[m] = connect(
                        self.replica,
                        self.here,
                        m,
                        there,
                        epoch=epoch,
                        mode=_TRANSPORTS.get(self.mode, self.mode),
                        dial=lambda what, there=there: self.dial(there, epoch),  # type: ignore[misc]
                        on_lost=lambda *args: self.send("lost", *args),
                        layout=self.segment.layout,
                    )
                except OSError:  # it was killed meanwhile; the next view is on its way
                    return
        ring = tuple(reversed(members)) if self.mode == "ring" else ()
        hosts = shared_hosts({m: there.boot for m, there in members.items()})
        if self.mode == "rows":
            hosts = rows(tuple(members))
        view = GroupView(
            epoch,
            self.replica,
            tuple(members),
            frozenset(members),
            self.mode in ("shm", "loopback"),
            ring,
            hosts=hosts,
            tuning=self.tuning,
        )
        self.peers = peers
        self.exchange.enter(view, peers, held)

    def reduce(self, count: int, atomic: bool, wire: str) -> None:
        """One op; reports the digest of its result, after comparing it with what its contributors must give."""
        array = pattern(self.replica, count)
        op = Operation(array, "float32", "sum", atomic=atomic, compression=wire)
        self.send("started")
        self.exchange.run(op)
        self.send("returned")
        if op.error is not None:
            raise op.error
        for start, stop, who in op.spans():
            # The pattern repeats, so a sum does too.
            want = np.resize(np.arange(_PERIOD, dtype=np.float32), stop)[start:] * np.float32(sum(map(weight, who)))
            if wire == "fp8":
                want = coded([pattern(m, stop)[start:] for m in who], "float32", "sum")
            if not np.array_equal(array[start:stop], want):
                raise AssertionError(f"elements {start}..{stop} are not the sum of {who}")
        digest = hashlib.blake2b(array.view(np.uint8)).hexdigest()
        self.send("done", op.number, digest, op.spans())

    def tune(self, tuning: Tuning) -> None:
        """Use other switch points from the next view on."""
        self.tuning = tuning

    def many(self, count: int, times: int) -> None:
        """One op after the other; reports a digest of all results, after comparing each with what its contributors must
        give, and the contributors of the first and the last."""
        seen = hashlib.blake2b()
        everybody: list[tuple[int, ...]] = []
        for number in range(times):
            array = pattern(self.replica, count)
            op = Operation(array, "float32", "sum")
            if number == times // 4:
                self.send("started")
            self.exchange.run(op)
            if op.error is not None:
                raise op.error
            ((_, _, who),) = op.spans()
            everybody.append(who)
            if not np.array_equal(array, pattern(0, count) / weight(0) * np.float32(sum(map(weight, who)))):
                raise AssertionError(f"op {op.number} is not the sum of {who}")
            seen.update(array.tobytes())
        self.send("done", seen.hexdigest(), everybody[0], everybody[-1])

    def repeat(self, count: int, times: int) -> None:
        """One op after the other; reports how long each took, and for all of them the seconds of the processor, and
        the frames sent."""
        array = np.zeros(count, np.float32)
        took = []
        worked, frames = time.process_time(), CountingWriter.sent
        for _ in range(times):
            op = Operation(array, "float32", "sum")
            began = time.perf_counter()
            self.exchange.run(op)
            took.append(time.perf_counter() - began)
            if op.error is not None:
                raise op.error
        self.send("done", took, time.process_time() - worked, CountingWriter.sent - frames)

    def call(self, kind: str, count: int, roster: tuple[int, ...]) -> None:
        """One op of another kind; reports what it failed with, or nothing after a look at the result."""
        caller = Caller(self, roster)
        rank, n = roster.index(self.replica), len(roster)
        own = pattern(self.replica, count)
        self.send("started")
        try:
            work = {
                "broadcast": lambda: caller.broadcast(own, n - 1, async_op=True),
                "reduce": lambda: caller.reduce(own, n - 1, async_op=True),
                "allgather": lambda: caller.allgather(np.empty(n * count, np.float32), own, async_op=True),
                "gather": lambda: caller.gather(
                    np.empty(n * count, np.float32) if rank == 0 else None, own, 0, async_op=True
                ),
                "scatter": lambda: caller.scatter(
                    np.empty(count // n, np.float32), own[: count // n * n] if rank == 0 else None, 0, async_op=True
                ),
                "reduce_scatter": lambda: caller.reduce_scatter(
                    np.empty(count // n, np.float32), own[: count // n * n], async_op=True
                ),
                "alltoall": lambda: caller.alltoall(
                    np.empty(count // n * n, np.float32), own[: count // n * n], async_op=True
                ),
                "barrier": lambda: caller.barrier(async_op=True),
            }[kind]()
            result = work.wait()
        except LostError as error:
            self.send("done", str(error))
            return
        self.send("returned")
        # Of each run of elements: whose they are, and where they lay there.
        share, begin = count // n, rank * (count // n)
        runs: list[tuple[int, int, tuple[int, ...]]] = {
            "broadcast": [(0, 0, (roster[n - 1],))],
            "allgather": [(i * count, 0, (m,)) for i, m in enumerate(roster)],
            "gather": [(i * count, 0, (m,)) for i, m in enumerate(roster)] if rank == 0 else [],
            "scatter": [(0, begin, (roster[0],))],
            "alltoall": [(i * share, begin, (m,)) for i, m in enumerate(roster)],
            "reduce": [(a, a, who) for a, _, who in work.contributors] if rank == n - 1 else [(0, 0, (self.replica,))],
            "reduce_scatter": [(a, begin + a, who) for a, _, who in work.contributors],
            "barrier": [],
        }[kind]
        ends = [*[start for start, _, _ in runs[1:]], len(result)] if runs else []
        for (start, there, who), stop in zip(runs, ends, strict=True):
            want = np.resize(np.arange(_PERIOD, dtype=np.float32), there + stop - start)[there:]
            if not np.array_equal(result[start:stop], want * np.float32(sum(map(weight, who)))):
                raise AssertionError(f"{kind}: elements {start}..{stop} are not what {who} gave")
        self.send("done", "")


class Caller(Calls):
    """The calls of a group."""

    def __init__(self, member: Member, roster: tuple[int, ...]) -> None:
        engine = HostCalls(member.segment.layout.members)
        super().__init__("", member.replica, None, engine, member.exchange)
        self.roster = roster


def main(replica: int, mode: str, pipe: Connection, members: int) -> None:
    """Serve until told to end, or until the test is gone."""
    end_with_pytest()
    member = Member(replica, mode, pipe, members)
    calls: Any = itertools.count()
    try:
        while True:
            name, *args = pipe.recv()
            if name == "end":
                return
            if name in ("reduce", "many", "repeat", "call"):  # in a thread, as a script beside its control plane
                threading.Thread(
                    target=getattr(member, name), args=args, name=f"call-{next(calls)}", daemon=True
                ).start()
            else:
                getattr(member, name)(*args)
    except EOFError:
        return
