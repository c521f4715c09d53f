"""A peer that shares no memory: what it publishes is pushed into a mirror of its segment.

    writer                                    reader
    its driver: store a word, then            receive the header, the payload into the mirror, then raise the word
    send a frame to each attached reader ---> in the mirror, and wake the driver if another thread has done that

A frame is a header and a payload: the bytes that this reader needs of the chunk that the word announces (its shard, or
all of it, or none). The reader dials the writer's listening port, one connection for each direction of a pair, and new
ones, with a new mirror, in every epoch: nothing sent in an old epoch can reach the memory of a new one.

No flow control is needed: a writer does not reuse a slot before all members have taken it, so the mirror always has
room, and whoever receives never waits for anything but the network. Nor does a writer: what a socket has no room for is
left in a queue, whose payloads stay where they are, since their slots are not used again before they were taken.

Where all peers are reached like this the driver receives by itself (`ftcomm.transport.lines`), and the thread of a peer
sleeps until the connection ends: two threads that hand the interpreter lock to each other for every frame move 64 MB
between two processes on two cores in 28 ms, one alone in 22.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

from ftcomm.control.dropped import drop
from ftcomm.kernels.wait import wake
from ftcomm.transport.segment import CHUNK, DETAIL, FINGERPRINT, POSTED, PUBLISHED, SIZE, SLOTS, TAKEN, Peer, descriptor

Lost = Callable[[int, int, str], None]  # (replica, epoch, reason)

# Magic, word, its value; of the payload: where in the chunk, bytes; what belongs to the word: to POSTED the number, the
# call and the detail of the op, to TAKEN the fingerprint of the result and two zeros.
_FRAME = struct.Struct("<IIQIIQQQ")
_MAGIC = 0x66746332
_WORDS = frozenset(PUBLISHED)
_INBOX = 4096  # bytes that are received at once where no large payload is under way: the frames of small ops
_GATHER = 16  # buffers that one call sends
_AT_ONCE = 32 << 10  # bytes of a payload that is not held back, to go with the next frames in one call
_NOTHING = memoryview(b"")


class TcpPeer(Peer):
    """The mirror of the segment of `replica` in `epoch`, filled from `sock` (connected and past its handshake).

    `on_lost(replica, epoch, reason)` is called once, by whoever receives, if the connection ends, or brings what no
    segment can hold, before `quiet` or `close`.
    """

    def __init__(self, replica: int, epoch: int, sock: socket.socket, on_lost: Lost) -> None:
        super().__init__(replica, "tcp")
        self._epoch = epoch
        self._sock = sock
        self._on_lost = on_lost
        self._quiet = False
        self._driven = False
        self._map(mmap.mmap(-1, SIZE))
        for word in PUBLISHED:
            self.words[word] = epoch << 32
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._taking = threading.Lock()  # by who receives; never held across a wait. It guards what follows
        self.ended = False
        self._inbox = memoryview(bytearray(_INBOX))
        self._begin = self._end = 0  # of what lies in it
        self._frame: tuple[int, ...] = ()  # the one whose payload is under way
        self._missing = _NOTHING  # of that payload: where in the mirror
        threading.Thread(target=self._attend, name=f"ftcomm-from-{replica}", daemon=True).start()

    def quiet(self) -> None:
        self._quiet = True

    def close(self) -> None:
        self._quiet = True
        with contextlib.suppress(OSError):  # it may be closed already
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket

    def drive(self) -> None:
        """From now on somebody calls `pump`, and the thread looks after the end of the connection alone."""
        self._driven = True

    def fileno(self) -> int:
        return -1 if self.ended else self._sock.fileno()

    def pump(self) -> bool:
        """Take in what has come, at most one large payload; True if a word was raised. Does not block. Any thread."""
        return self._taking.acquire(blocking=False) and self._pump()

    def _attend(self) -> None:
        """The thread: receive until somebody drives, then wait for the end of the connection, and find it."""
        while not self.ended:
            poll = select.poll()
            poll.register(self._sock, select.POLLRDHUP if self._driven else select.POLLIN | select.POLLRDHUP)
            ((_, events),) = poll.poll()
            if not self._driven or events != select.POLLIN:
                self._taking.acquire()
                self._pump()

    def _pump(self) -> bool:
        """With the lock, which it releases."""
        try:
            return not self.ended and self._take_in()
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            self.ended = True
            self._sock.close()
            broken = error
        finally:
            self._taking.release()
        if not self._quiet:
            if isinstance(broken, ValueError):
                drop("data", f"from replica {self.replica}: {broken}; its connection is closed")
            self._on_lost(self.replica, self._epoch, f"connection for data: {broken}")
        return True

    def _take_in(self) -> bool:
        """Raises BlockingIOError when nothing more has come, OSError or ValueError when nothing more will."""
        raised = False
        while True:
            if self._missing and raised:
                return True
            if self._missing:  # and all of the inbox is in its place, so there is room for what follows
                received = self._received(self._sock.recvmsg_into([self._missing, self._inbox])[0])
                self._begin, self._end = 0, max(0, received - len(self._missing))
                self._missing = self._missing[received:]
                if not self._missing:
                    self._raise()
                    raised = True
            elif self._end - self._begin >= _FRAME.size:
                self._open()
                if not self._missing:
                    self._raise()
                    raised = True
            elif raised:
                return True
            else:
                left = self._inbox[self._begin : self._end]
                self._inbox[: len(left)] = left
                self._begin, self._end = 0, len(left)
                self._end += self._received(self._sock.recv_into(self._inbox[self._end :]))

    @staticmethod
    def _received(nbytes: int) -> int:
        if not nbytes:
            raise ConnectionError("closed by the other side")
        return nbytes

    def _open(self) -> None:
        """One header. Every field is checked: a wrong one must not reach beyond the chunk that it names."""
        self._frame = frame = _FRAME.unpack_from(self._inbox, self._begin)
        magic, word, value, start, nbytes, *_ = frame
        if magic != _MAGIC or word not in _WORDS or not self.words[word] < value < (self._epoch + 1) << 32:
            raise ValueError(f"a frame that cannot be: magic {magic:#x}, word {word}, value {value:#x}")
        if start + nbytes > (0 if word == TAKEN else self.chunk):
            raise ValueError(f"a payload of {nbytes} bytes at {start} of a chunk of {self.chunk}")
        self._begin += _FRAME.size
        if nbytes:
            base = self.offset(word, ((value & 0xFFFFFFFF) - 1) % SLOTS) + start
            there = self.buffer[base : base + nbytes]
            here = self._inbox[self._begin : min(self._end, self._begin + nbytes)]
            there[: len(here)] = here
            self._begin += len(here)
            self._missing = there[len(here) :]

    def _raise(self) -> None:
        """The payload is there: raise the word that announces it."""
        _, word, value, _, _, number, call, detail = self._frame
        at = descriptor(((value & 0xFFFFFFFF) - 1) % SLOTS)
        if word == POSTED:
            self.words[at], self.words[at + 1], self.words[at + DETAIL] = number, call, detail
        elif word == TAKEN:
            self.words[at + FINGERPRINT] = number
        self.words[word] = value
        if not self._driven:
            wake(self.address + 8 * word)


class Reader:
    """A member that reads this one's segment through a connection that it has dialled, in `epoch`.

    For the driving thread alone. No method blocks.
    """

    def __init__(self, sock: socket.socket, replica: int, epoch: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replica = replica
        self.epoch = epoch
        self._sock = sock
        self._queue: deque[tuple[memoryview, int, int]] = deque()  # what is left to send, and of which word and value
        # Bytes sent of what lies in each slot, by where they begin. A sum takes the place of what it was made of.
        self._staged: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        self._under_way = 0  # their sum

    def send(self, word: int, value: int, start: int, payload: memoryview, belongs: tuple[int, int, int]) -> None:
        """Send one frame, or leave it to `flush`. `payload` stays as it is until the reader has it.

        Raises OSError if the connection is lost.
        """
        nbytes = len(payload)
        header = memoryview(_FRAME.pack(_MAGIC, word, value, start, nbytes, *belongs))
        self._queue.append((header, word, value))
        if nbytes:
            self._count(word, value, start, nbytes)
            self._queue.append((payload, word, value))
            if nbytes >= _AT_ONCE:
                self.flush()

    def flush(self) -> bool:
        """Send what has been left. True if nothing is left now. Raises OSError if the connection is lost."""
        queue = self._queue
        while queue:
            try:
                buffers = [buffer for buffer, _, _ in itertools.islice(queue, _GATHER)]
                sent = self._sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            while queue and sent >= len(queue[0][0]):
                sent -= len(queue.popleft()[0])
            if sent:
                buffer, word, value = queue[0]
                queue[0] = buffer[sent:], word, value
        return True

    def told(self, word: int, value: int) -> bool:
        """True if no frame for this value of the word, or a lower one, is left to be sent."""
        return not any(of == word and said <= value for _, of, said in self._queue)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._queue.clear()
        self._sock.close()

    def _count(self, word: int, value: int, start: int, nbytes: int) -> None:
        """What the reader may not have taken yet never exceeds the slots: a slot is not used again before that."""
        slot = self._staged[((value & 0xFFFFFFFF) - 1) % SLOTS]
        if word == POSTED and slot:
            self._under_way -= sum(slot.values())
            slot.clear()
        self._under_way += nbytes - slot.get(start, 0)
        slot[start] = nbytes
        if self._under_way > SLOTS * CHUNK:
            raise AssertionError(f"{self._under_way} bytes on their way to replica {self.replica}: {self._staged}")
