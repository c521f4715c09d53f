"""A member of a group as a process of its own, with a pipe to the test in place of the control plane."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import struct
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.control.messages import Progress
from ftcomm.control.views import Address
from ftcomm.transport.connect import connect
from ftcomm.transport.segment import Segment

_HANDSHAKE = struct.Struct("<II")  # replica, epoch
_PERIOD = 1009


def pattern(replica: int, count: int) -> np.ndarray:
    """Small integers, so that sums of them are exact, and different for every set of contributors and every chunk."""
    return np.resize(np.arange(_PERIOD, dtype=np.float32), count) * np.float32(1 << replica)


class Member:
    """Commands come through `pipe` as (name, arguments), reports go back as tuples."""

    def __init__(self, replica: int, mode: str, pipe: Connection) -> None:
        self.replica, self.mode, self.pipe = replica, mode, pipe
        self.segment = Segment()
        self.sending = threading.Lock()
        self.exchange = Exchange(
            replica,
            self.segment,
            deadline_floor=60,
            deadline_ceiling=60,
            give_up=120,
            on_stall=lambda stall: self.send("stall", stall),
        )
        self.server = socket.create_server(("127.0.0.1", 0))
        port = self.server.getsockname()[1]
        self.here = Address("127.0.0.1", port, "boot", os.getpid(), self.segment.fd, self.segment.nonce)
        threading.Thread(target=self.accept, daemon=True).start()
        self.send("hello", self.here)

    def send(self, *report: Any) -> None:
        with self.sending:
            self.pipe.send(report)

    def accept(self) -> None:
        while True:
            sock, _ = self.server.accept()
            replica, epoch = _HANDSHAKE.unpack(sock.recv(_HANDSHAKE.size, socket.MSG_WAITALL))
            self.exchange.attach(sock, replica, epoch)

    def dial(self, there: Address, purpose: str, fields: Mapping[str, int]) -> socket.socket:
        sock = socket.create_connection((there.host, there.port), timeout=10)
        sock.sendall(_HANDSHAKE.pack(fields["replica"], fields["epoch"]))
        return sock

    def freeze(self, epoch: int) -> None:
        quiesced = threading.Event()
        self.exchange.freeze(quiesced.set)
        while not quiesced.wait(0.001):
            self.exchange.nudge()
        self.send("progress", epoch, msgspec.msgpack.encode(self.exchange.progress()))

    def resume(self, epoch: int, members: dict[int, Address], progress: dict[int, bytes]) -> None:
        held = {m: msgspec.msgpack.decode(p, type=Progress) for m, p in progress.items()}
        peers = {}
        for m, there in members.items():
            if m != self.replica:
                try:
                    peers[m] = connect(
                        self.replica,
                        self.here,
                        m,
                        there,
                        epoch=epoch,
                        mode=self.mode,
                        dial=self.dial,
                        on_lost=lambda *args: self.send("lost", *args),
                    )
                except OSError:  # it was killed meanwhile; the next view is on its way
                    return
        view = GroupView(epoch, self.replica, tuple(members), frozenset(members), one_host=self.mode == "shm")
        self.exchange.resume(view, peers, held)

    def reduce(self, count: int, atomic: bool) -> None:
        """One op; reports the digest of its result, after comparing it with what its contributors must give."""
        array = pattern(self.replica, count)
        op = Operation(array, "float32", "sum", atomic=atomic)
        self.send("started")
        self.exchange.run(op)
        self.send("returned")
        if op.error is not None:
            raise op.error
        for start, stop, who in op.spans():
            # The pattern repeats, so a sum does too.
            want = np.resize(np.arange(_PERIOD, dtype=np.float32), stop)[start:] * np.float32(sum(1 << m for m in who))
            if not np.array_equal(array[start:stop], want):
                raise AssertionError(f"elements {start}..{stop} are not the sum of {who}")
        digest = hashlib.blake2b(array.view(np.uint8)).hexdigest()
        self.send("done", op.number, digest, op.spans())


def main(replica: int, mode: str, pipe: Connection) -> None:
    """Serve until told to end, or until the test is gone."""
    member = Member(replica, mode, pipe)
    calls: Any = itertools.count()
    try:
        while True:
            name, *args = pipe.recv()
            if name == "end":
                return
            if name == "reduce":  # in a thread, as a script beside its control plane
                threading.Thread(target=member.reduce, args=args, name=f"call-{next(calls)}", daemon=True).start()
            else:
                getattr(member, name)(*args)
    except EOFError:
        return
