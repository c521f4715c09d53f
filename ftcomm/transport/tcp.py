"""A peer that shares no memory: what it publishes is pushed into a mirror of its segment.

    writer                                    reader
    its driver: store a word, then            a thread: receive the header, the payload into the mirror,
    send a frame to each attached reader ---> then raise the word in the mirror and wake the driver

A frame is a header and a payload: the bytes that this reader needs of the chunk that the word announces (its shard, or
all of it, or none). The reader dials the writer's listening port, one connection for each direction of a pair, and new
ones, with a new mirror, in every epoch: nothing sent in an old epoch can reach the memory of a new one.

No flow control is needed: a writer does not reuse a slot before all members have taken it, so the mirror always has
room, and the receiving thread never waits for anything but the network.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import struct
import threading
from collections.abc import Callable

from ftcomm.control.dropped import drop
from ftcomm.kernels.wait import wake
from ftcomm.transport.segment import DETAIL, FINGERPRINT, POSTED, REDUCED, SIZE, SLOTS, TAKEN, Peer, descriptor

Lost = Callable[[int, int, str], None]  # (replica, epoch, reason)

# Magic, word, its value; of the payload: where in the chunk, bytes; what belongs to the word: to POSTED the number, the
# call and the detail of the op, to TAKEN the fingerprint of the result and two zeros.
_FRAME = struct.Struct("<IIQIIQQQ")
_MAGIC = 0x66746332
_WORDS = (POSTED, REDUCED, TAKEN)
_PATIENCE = 2  # milliseconds of a full socket between two looks at whether to go on


class TcpPeer(Peer):
    """The mirror of the segment of `replica` in `epoch`, filled from `sock` (connected and past its handshake).

    `on_lost(replica, epoch, reason)` is called once, from the receiving thread, if the connection ends, or brings what
    no segment can hold, before `quiet` or `close`.
    """

    def __init__(self, replica: int, epoch: int, sock: socket.socket, on_lost: Lost) -> None:
        super().__init__(replica, "tcp")
        self._epoch = epoch
        self._sock = sock
        self._on_lost = on_lost
        self._quiet = False
        self._map(mmap.mmap(-1, SIZE))
        for word in _WORDS:
            self.words[word] = epoch << 32
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._receive, name=f"ftcomm-from-{replica}", daemon=True).start()

    def quiet(self) -> None:
        self._quiet = True

    def close(self) -> None:
        self._quiet = True
        with contextlib.suppress(OSError):  # it may be closed already
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the receiving thread, which closes the socket

    def _receive(self) -> None:
        header = memoryview(bytearray(_FRAME.size))
        try:
            with self._sock:
                while True:
                    self._fill(header)
                    self._apply(header)
        except (OSError, ValueError) as error:
            if not self._quiet:
                if isinstance(error, ValueError):
                    drop("data", f"from replica {self.replica}: {error}; its connection is closed")
                self._on_lost(self.replica, self._epoch, f"connection for data: {error}")

    def _apply(self, header: memoryview) -> None:
        """One frame. Every field is checked: a wrong one must not reach beyond the chunk that it names."""
        magic, word, value, start, nbytes, number, call, detail = _FRAME.unpack(header)
        if magic != _MAGIC or word not in _WORDS or not self.words[word] < value < (self._epoch + 1) << 32:
            raise ValueError(f"a frame that cannot be: magic {magic:#x}, word {word}, value {value:#x}")
        if start + nbytes > (0 if word == TAKEN else self.chunk):
            raise ValueError(f"a payload of {nbytes} bytes at {start} of a chunk of {self.chunk}")
        slot = ((value & 0xFFFFFFFF) - 1) % SLOTS
        if nbytes:
            base = self.offset(word, slot) + start
            self._fill(self.buffer[base : base + nbytes])
        at = descriptor(slot)
        if word == POSTED:
            self.words[at], self.words[at + 1], self.words[at + DETAIL] = number, call, detail
        elif word == TAKEN:
            self.words[at + FINGERPRINT] = number
        self.words[word] = value
        wake(self.address + 8 * word)

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            received = self._sock.recv_into(buffer)
            if not received:
                raise ConnectionError("closed by the other side")
            buffer = buffer[received:]


class Reader:
    """A member that reads this one's segment through a connection that it has dialled, in `epoch`.

    `send` is for the driving thread alone.
    """

    def __init__(self, sock: socket.socket, replica: int, epoch: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replica = replica
        self.epoch = epoch
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLOUT)

    def send(
        self,
        word: int,
        value: int,
        start: int,
        payload: memoryview,
        belongs: tuple[int, int, int],
        pause: Callable[[int], None],
    ) -> None:
        """Send one frame. `pause(replica)` is called while the socket is full, and may raise to give up.

        Then the frame is torn, and the reader must not be sent to any more. Raises OSError if the connection is lost.
        """
        header = _FRAME.pack(_MAGIC, word, value, start, len(payload), *belongs)
        buffers = [memoryview(header), payload]
        while buffers:
            try:
                sent = self._sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._poll.poll(_PATIENCE)
                pause(self.replica)
                continue
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]

    def close(self) -> None:
        self._sock.close()
