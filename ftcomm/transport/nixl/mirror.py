"""A peer reached by NIXL: what it publishes is put into a mirror of its segment.

    writer                                              reader
    its driver: store a word, then                      the thread that polls: at a notification raise the word
    put what this reader needs of the chunk ===(RDMA)=> into the staging of the mirror;
    when that has ended, a notification     ----------> with the content of a frame over TCP

The words lie in the reader's own memory, new in every epoch; no put goes there. Only the staging is written from afar.
It serves as long as the two processes know each other: all have stopped to read in an epoch, and what the writer had
under way has ended (`NixlEndpoint.settled`), before anything is put in the next. If that cannot be known, because a put
has failed, the reader is asked for another mirror.

A reader dials the writer's listening port, with one connection for each direction of a pair and epoch. Only the
handshake goes through it (`handshake`); after that it serves by its end, since NIXL does not tell that a process dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import time

from ftcomm.control.sealed import Connection
from ftcomm.errors import TransportError
from ftcomm.kernels.epochs import COUNTER
from ftcomm.sync.futex import wake
from ftcomm.transport.base import OnLost, Peer, raise_word
from ftcomm.transport.epoll_thread import EPOLL_THREAD
from ftcomm.transport.nixl import frames, handshake
from ftcomm.transport.nixl.agent import NixlEndpoint
from ftcomm.transport.nixl.memory import MirrorMemory
from ftcomm.transport.nixl.network import MEND
from ftcomm.transport.segment import CHUNK, HOST, SLOTS, Layout, header, published

_GLANCE = 200e-6  # seconds between looks for a greeting


def kind_of(endpoint: NixlEndpoint | None) -> handshake.Compatibility:
    """Returns what this process says of its NIXL; None before it is loaded."""
    if endpoint is None:
        return handshake.Compatibility(handshake.VERSION, SLOTS, CHUNK)
    devices = " ".join(filter(None, endpoint.devices)) or os.environ.get("UCX_NET_DEVICES", "all")
    said = f"{devices}, by {endpoint.network.name}"
    return handshake.Compatibility(handshake.VERSION, SLOTS, CHUNK, endpoint.library.version, said[:256])


class NixlMirror(Peer):
    """The mirror of the segment of `replica` in `epoch`. `on_lost` is called once if the process, or the path to it,
    ends before `quiet` or `close`."""

    transport = "nixl"

    def __init__(
        self,
        endpoint: NixlEndpoint,
        mirror: MirrorMemory,
        replica: int,
        epoch: int,
        sock: Connection,
        on_lost: OnLost,
        layout: Layout = HOST,
    ) -> None:
        super().__init__(replica)
        self.endpoint, self.mirror = endpoint, mirror
        self._epoch, self._sock, self._on_lost = epoch, sock, on_lost
        self._quiet = self._closed = self._met = self._driven = False
        self._order = frames.InOrder()
        self._map(mirror.memory)
        self.layout, self.published = layout, published(layout.members)
        page = mmap.mmap(-1, header(layout.members))  # the mirror has one of HEADER bytes, which is not used
        self.words = memoryview(page).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        for word in self.published:
            self.words[word] = epoch << COUNTER
        self.channel = endpoint.open_channel(self)

    def meet(self, doubt: bool) -> bool:
        """Tell the writer what is here, and wait for its first put. False if it wants another mirror.

        `doubt`: the writer shall ask itself whether it hears. Else `handshake.NothingCame` is raised soon.
        """
        endpoint, sock, mirror = self.endpoint, self._sock, self.mirror
        here = kind_of(endpoint)
        wanted = handshake.ReaderRequest(
            here, mirror.token, mirror.address, mirror.nbytes, self.channel, endpoint.metadata(mirror), doubt
        )
        handshake.send(sock, wanted)
        answer = handshake.receive(sock)
        if not isinstance(answer, handshake.WriterAnswer):
            raise ConnectionError("what a reader says, expected an answer to it")
        if answer.problem:
            raise handshake.refused(answer.problem)
        problem = handshake.differ(here, answer.kind, f"replica {self.replica}")
        if problem:
            raise TransportError(problem)
        if answer.fresh:
            endpoint.close_channel(self.channel)
            return False
        begun = time.monotonic()
        while True:
            moved = endpoint.poll()
            if endpoint.retired or handshake.ended(sock):
                raise handshake.NothingCame(endpoint.retired or "closed by the other side before it has put anything")
            if self._met:
                break
            waited = time.monotonic() - begun
            if waited > handshake.SOON and not doubt:
                raise handshake.NothingCame(f"nothing was put within {waited:.1f} s")
            if waited > handshake.HANDSHAKE_TIMEOUT:
                there = answer.kind
                raise TransportError(
                    f"nothing that replica {self.replica} puts gets here within {handshake.HANDSHAKE_TIMEOUT:g} s, "
                    f"though it answers over TCP: it has NIXL {there.nixl} on devices {there.devices}, this rank has "
                    f"NIXL {here.nixl} on {here.devices}. Let UCX_NET_DEVICES on both sides name the network that they "
                    f"share, open its ports, and look at `ftcomm doctor`. {MEND}"
                )
            if not moved:
                time.sleep(_GLANCE)
        sock.setblocking(False)
        EPOLL_THREAD.enter(sock.fileno(), self, receives=True)
        return True

    def serves(self, epoch: int) -> bool:
        return False  # puts have no order, so each epoch needs its own connection

    def quiet(self) -> None:
        self._quiet = True

    def close(self) -> None:
        self._quiet = True
        with self.endpoint.lock:
            closed, self._closed = self._closed, True
        if not closed:
            self.endpoint.close_channel(self.channel)
            self.endpoint.leave_mirror(self.mirror)
            self.end()  # and so the thread, which closes it

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def overdue(self, seconds: float) -> None:
        if seconds >= handshake.SOON:
            self.endpoint.doubt(seconds)

    def drive(self, driven: bool = True) -> None:
        """Let the driver poll from now on, without sleeping on words."""
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
        """Apply a frame. Every field is checked: a wrong one must not reach beyond the chunk that it names."""
        word, value = frame.word, frame.value
        frames.check(frame, self.published, self.words[word] if word in self.published else 0, self._epoch)
        base = self.place(word, frame.start, frame.nbytes)
        if frame.payload:
            self.buffer[base : base + frame.nbytes] = frame.payload
        raise_word(self.words, word, value, frame.belongs)
        if not self._driven:
            wake(self.address + 8 * word)

    def ready(self, events: int) -> None:
        """Find the end of the connection. For the thread of the process."""
        try:
            reason = "closed by the other side" if not self._sock.recv(1) else "bytes where none were expected"
        except BlockingIOError:
            return
        except OSError as error:
            reason = str(error)
        EPOLL_THREAD.leave(self._sock.fileno(), self)
        self._sock.close()
        self.broken(self.endpoint.retired or reason)
