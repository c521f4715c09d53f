"""A peer that shares no memory and is reached by NIXL: what it publishes is put into a mirror of its segment.

    writer                                              reader
    its driver: store a word, then                      whoever polls: at a notification raise the word in the mirror
    put what this reader needs of the chunk ===(RDMA)=> into the staging of the mirror;
    when that has ended a notification      ----------> with what a frame over TCP says

The words lie in memory of the reader's own, new in every epoch; no put goes there. Only the staging is written from
afar. It serves as long as the two processes know each other: what is put in an epoch is put after all have stopped to
read in the one before, and after what the writer had under way has ended (`Endpoint.settled`). If that cannot be known,
because a put has failed, the reader is asked for another mirror.

A reader dials the writer's listening port, one connection for each direction of a pair and epoch. Nothing but the
handshake goes through it (`nixl_hello`): it is there to end. A process that dies tells nobody by NIXL.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ftcomm.errors import TransportError
from ftcomm.kernels.wait import wake
from ftcomm.transport import nixl_frames as frames
from ftcomm.transport import nixl_hello as hello
from ftcomm.transport.nixl_agent import Endpoint
from ftcomm.transport.nixl_memory import Mirror
from ftcomm.transport.nixl_reader import NixlReader
from ftcomm.transport.segment import CHUNK, DETAIL, FINGERPRINT, HEADER, POSTED, SLOTS, TAKEN, Peer, descriptor
from ftcomm.transport.tcp import Lost

log = logging.getLogger("ftcomm.transport")

_GLANCE = 200e-6  # seconds between looks for a greeting


class Nixl:
    """The way by NIXL of one process, for all its groups. Nothing is loaded and no memory is taken before it is needed.

    `name` begins the names of its agents, as in "replica.rank". `devices` are those of each rail, as UCX_NET_DEVICES.
    """

    def __init__(self, name: str = "", devices: Sequence[str] = ("",)) -> None:
        self._name, self._devices = name or f"process.{os.getpid()}", tuple(devices)
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None

    def endpoint(self) -> Endpoint:
        """Blocks for half a second the first time. Raises `TransportError`."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = Endpoint(self._name, self._devices)
            return self._endpoint

    def close(self) -> None:
        """Blocks for two seconds at most; idempotent."""
        with self._lock:
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def connect(self, replica: int, epoch: int, nonce: str, sock: socket.socket, on_lost: Lost) -> NixlPeer:
        """The reader's side of a connection, which it owns from here on. Blocks until a put has come through.

        `nonce` is that of the segment of `replica`, `on_lost` as at `TcpPeer`. Raises `TransportError` or `OSError`.
        """
        deadline = time.monotonic() + hello.PATIENCE
        try:
            endpoint = self.endpoint()
            while True:
                peer = NixlPeer(endpoint, endpoint.use_mirror(nonce), replica, epoch, sock, on_lost)
                try:
                    if peer.meet(deadline):
                        return peer
                    endpoint.renew_mirror(nonce, peer.mirror)
                except BaseException:
                    peer.close()
                    raise
        except BaseException:
            sock.close()
            raise

    def accept(self, replica: int, epoch: int, sock: socket.socket, on_lost: Lost) -> NixlReader:
        """The writer's side. Raises `TransportError` or `OSError`, and tells the other side as well."""
        deadline = time.monotonic() + hello.PATIENCE
        try:
            here = _kind(None)
            try:
                endpoint = self.endpoint()
                here = _kind(endpoint)
                while True:
                    wanted = hello.receive(sock, deadline)
                    if not isinstance(wanted, hello.Wanted):
                        raise ConnectionError("an answer, expected what the reader wants")
                    problem = hello.differ(here, wanted.kind, f"replica {replica}")
                    if problem:
                        raise TransportError(problem)
                    remote = endpoint.know(wanted.token, wanted.address, wanted.agents)
                    hello.send(sock, hello.Answer(here, fresh=remote is None), deadline)
                    if remote is not None:
                        break
            except TransportError as error:
                hello.send(sock, hello.Answer(here, problem=str(error)[:2000]), deadline)
                raise
            reader = NixlReader(endpoint, remote, wanted.channel, sock, replica, epoch, on_lost)
            reader.greet()
            return reader
        except BaseException:
            sock.close()
            raise


_ways = threading.Lock()
_way: Nixl | None = None


def way(name: str = "", devices: Sequence[str] | None = None) -> Nixl:
    """That of this process. Whoever calls first says what it is called and by which devices it goes."""
    global _way
    with _ways:
        if _way is None:
            _way = Nixl(name, rails(os.environ.get("FTCOMM_NIXL_DEVICES", "")) if devices is None else devices)
            # Before the job is left, if this is called before: the last words to the others still have to go.
            atexit.register(_way.close)
        return _way


def rails(text: str) -> tuple[str, ...]:
    """FTCOMM_NIXL_DEVICES: what UCX_NET_DEVICES is for each rail, as in "mlx5_0:1;mlx5_1:1"."""
    return tuple(part.strip() for part in text.split(";"))


def _kind(endpoint: Endpoint | None) -> hello.Kind:
    if endpoint is None:
        return hello.Kind(hello.VERSION, SLOTS, CHUNK)
    devices = " ".join(filter(None, endpoint.devices)) or os.environ.get("UCX_NET_DEVICES", "all")
    return hello.Kind(hello.VERSION, SLOTS, CHUNK, endpoint.library.version, devices[:256])


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Those that have a port which is up."""
    up = []
    for state in sorted(root.glob("*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text() and state.parts[-4] not in up:
                up.append(state.parts[-4])
    return up


def pays() -> bool:
    """With FTCOMM_TRANSPORT=auto NIXL is used where there is something that TCP has not: a device for RDMA."""
    return bool(rdma_devices()) and any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13"))


class NixlPeer(Peer):
    """The mirror of the segment of `replica` in `epoch`. `on_lost` is told once if its process or the way to it ends,
    before `quiet` or `close`."""

    def __init__(
        self, endpoint: Endpoint, mirror: Mirror, replica: int, epoch: int, sock: socket.socket, on_lost: Lost
    ) -> None:
        super().__init__(replica, "nixl")
        self.endpoint, self.mirror = endpoint, mirror
        self._epoch, self._sock, self._on_lost = epoch, sock, on_lost
        self._quiet = self._closed = self._met = self._driven = False
        self._order = frames.InOrder()
        self._map(mirror.memory)
        page = mmap.mmap(-1, HEADER)
        self.words = memoryview(page).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        for word in frames.WORDS:
            self.words[word] = epoch << 32
        self.channel = endpoint.open_channel(self)

    def meet(self, deadline: float) -> bool:
        """Tell the writer what is here, and wait for its first put. False if it wants another mirror."""
        endpoint, sock, mirror = self.endpoint, self._sock, self.mirror
        here = _kind(endpoint)
        wanted = hello.Wanted(
            here, mirror.token, mirror.address, mirror.nbytes, self.channel, endpoint.metadata(mirror)
        )
        hello.send(sock, wanted, deadline)
        answer = hello.receive(sock, deadline)
        if not isinstance(answer, hello.Answer):
            raise ConnectionError("what a reader says, expected an answer to it")
        if answer.problem:
            raise hello.refused(answer.problem)
        problem = hello.differ(here, answer.kind, f"replica {self.replica}")
        if problem:
            raise TransportError(problem)
        if answer.fresh:
            endpoint.close_channel(self.channel)
            return False
        while not self._met:
            if not endpoint.poll():
                time.sleep(_GLANCE)
            if time.monotonic() > deadline:
                there = answer.kind
                raise TransportError(
                    f"nothing that replica {self.replica} puts gets here within {hello.PATIENCE:g} s, though it "
                    f"answers over TCP: it has NIXL {there.nixl} on devices {there.devices}, this rank has NIXL "
                    f"{here.nixl} on {here.devices}. Let UCX_NET_DEVICES on both sides name the network that they "
                    "share, open its ports, and look at `ftcomm doctor`; or set FTCOMM_TRANSPORT=tcp"
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

    def drive(self) -> None:
        """From now on the driver polls, and does not sleep on words."""
        self._driven = True

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
        at = descriptor(((value & 0xFFFFFFFF) - 1) % SLOTS)
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
