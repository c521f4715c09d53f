"""A peer reached by NIXL: what it publishes is put into a mirror of its segment.

    writer                                              reader
    its driver: store a word, then                      whoever polls: at a notification raise the word in the mirror
    put what this reader needs of the chunk ===(RDMA)=> into the staging of the mirror;
    when that has ended a notification      ----------> with what a frame over TCP says

The words lie in memory of the reader's own, new in every epoch; no put goes there. Only the staging is written from
afar. It serves as long as the two processes know each other: what is put in an epoch is put after all have stopped to
read in the one before, and after what the writer had under way has ended (`Endpoint.settled`). If that cannot be known,
because a put has failed, the reader is asked for another mirror.

A reader dials the writer's listening port, one connection for each direction of a pair and epoch. Nothing but the
handshake goes through it (`handshake`): it is there to end. A process that dies tells nobody by NIXL.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import threading
import time

from ftcomm.control.sealed import Connection
from ftcomm.errors import TransportError
from ftcomm.kernels.epochs import COUNTER, COUNTS
from ftcomm.sync.futex import wake
from ftcomm.transport.base import Lost, Peer
from ftcomm.transport.nixl import frames, handshake
from ftcomm.transport.nixl.agent import Endpoint
from ftcomm.transport.nixl.memory import MirrorMemory
from ftcomm.transport.nixl.network import MEND
from ftcomm.transport.segment import CHUNK, DETAIL, FINGERPRINT, HEADER, POSTED, SLOTS, TAKEN, descriptor

_GLANCE = 200e-6  # seconds between looks for a greeting


def kind_of(endpoint: Endpoint | None) -> handshake.Kind:
    """What this process says of its NIXL; None before it is loaded."""
    if endpoint is None:
        return handshake.Kind(handshake.VERSION, SLOTS, CHUNK)
    devices = " ".join(filter(None, endpoint.devices)) or os.environ.get("UCX_NET_DEVICES", "all")
    said = f"{devices}, by {endpoint.network.name}"
    return handshake.Kind(handshake.VERSION, SLOTS, CHUNK, endpoint.library.version, said[:256])


class NixlMirror(Peer):
    """The mirror of the segment of `replica` in `epoch`. `on_lost` is called once if its process or the way to it ends
    before `quiet` or `close`."""

    transport = "nixl"

    def __init__(
        self, endpoint: Endpoint, mirror: MirrorMemory, replica: int, epoch: int, sock: Connection, on_lost: Lost
    ) -> None:
        super().__init__(replica)
        self.endpoint, self.mirror = endpoint, mirror
        self._epoch, self._sock, self._on_lost = epoch, sock, on_lost
        self._quiet = self._closed = self._met = self._driven = False
        self._order = frames.InOrder()
        self._map(mirror.memory)
        page = mmap.mmap(-1, HEADER)
        self.words = memoryview(page).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        for word in frames.WORDS:
            self.words[word] = epoch << COUNTER
        self.channel = endpoint.open_channel(self)

    def meet(self) -> bool:
        """Tell the writer what is here, and wait for its first put. False if it wants another mirror."""
        endpoint, sock, mirror = self.endpoint, self._sock, self.mirror
        here = kind_of(endpoint)
        wanted = handshake.Wanted(
            here, mirror.token, mirror.address, mirror.nbytes, self.channel, endpoint.metadata(mirror)
        )
        handshake.send(sock, wanted)
        answer = handshake.receive(sock)
        if not isinstance(answer, handshake.Answer):
            raise ConnectionError("what a reader says, expected an answer to it")
        if answer.problem:
            raise handshake.refused(answer.problem)
        problem = handshake.differ(here, answer.kind, f"replica {self.replica}")
        if problem:
            raise TransportError(problem)
        if answer.fresh:
            endpoint.close_channel(self.channel)
            return False
        deadline = time.monotonic() + handshake.PATIENCE
        while not self._met:
            if not endpoint.poll():
                time.sleep(_GLANCE)
            if time.monotonic() > deadline:
                there = answer.kind
                raise TransportError(
                    f"nothing that replica {self.replica} puts gets here within {handshake.PATIENCE:g} s, though it "
                    f"answers over TCP: it has NIXL {there.nixl} on devices {there.devices}, this rank has NIXL "
                    f"{here.nixl} on {here.devices}. Let UCX_NET_DEVICES on both sides name the network that they "
                    f"share, open its ports, and look at `ftcomm doctor`. {MEND}"
                )
        sock.settimeout(None)
        threading.Thread(target=self._watch, name=f"ftcomm-from-{self.replica}", daemon=True).start()
        return True

    def serves(self, epoch: int) -> bool:
        return False  # puts are not in order: what belongs to an epoch is told by its connection

    def quiet(self) -> None:
        self._quiet = True

    def close(self) -> None:
        self._quiet = True
        with self.endpoint.lock:
            closed, self._closed = self._closed, True
        if not closed:
            self.endpoint.close_channel(self.channel)
            self.endpoint.leave_mirror(self.mirror)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # ends the thread, which closes it

    def drive(self, driven: bool = True) -> None:
        """The driver polls from now on, and does not sleep on words."""
        self._driven = driven

    def arrive(self, frame: frames.Frame) -> None:
        for ready in self._order.arrive(frame):
            if ready.word == frames.GREETING and ready.number == 0:
                self._met = True
            else:
                self._apply(ready)

    def broken(self, reason: str) -> None:
        if not self._quiet:
            self._quiet = True
            self._on_lost(self.replica, self._epoch, f"connection for data: {reason}")

    def _apply(self, frame: frames.Frame) -> None:
        """Every field is checked: a wrong one must not reach beyond the chunk that it names."""
        word, value = frame.word, frame.value
        frames.check(frame, self.words[word] if word in frames.WORDS else 0, self._epoch)
        base = self.place(word, frame.start, frame.nbytes)
        if frame.payload:
            self.buffer[base : base + frame.nbytes] = frame.payload
        at = descriptor(((value & (COUNTS - 1)) - 1) % SLOTS)
        number, call, detail = frame.belongs
        if word == POSTED:
            self.words[at], self.words[at + 1], self.words[at + DETAIL] = number, call, detail
        elif word == TAKEN:
            self.words[at + FINGERPRINT] = number
        self.words[word] = value
        if not self._driven:
            wake(self.address + 8 * word)

    def _watch(self) -> None:
        """The thread: until the connection ends."""
        with self._sock:
            try:
                reason = "closed by the other side" if not self._sock.recv(1) else "bytes where none were expected"
            except OSError as error:
                reason = str(error)
        self.broken(reason)
