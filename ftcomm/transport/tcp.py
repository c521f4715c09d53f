"""A peer that shares no memory: what it publishes is pushed into a mirror of its segment.

    writer                                    reader
    its driver: store a word, then            receive the header, the payload into the mirror, then raise the word
    send a frame to each attached reader ---> in the mirror, and wake the driver if another thread has done that

A frame is a header and a payload: the bytes that this reader needs of the chunk that the word announces (its shard, or
all of it, or none). The reader dials the writer's listening port, one connection for each direction of a pair.

A connection, and its mirror, serves as long as both live and are members, in epoch after epoch. What keeps the old out
of the new is the order of its bytes, in which a mirror is what the segment itself is to who maps it:

    in the old epoch    frames are left in the writer's queue, in the sockets, and one of them is half sent
    the writer enters   it drops what it has not begun to send, and ends the frame that it has begun, since what follows
                        could not be found else; then come frames of the new epoch
    the reader enters   it raises the words of the mirror to the epoch; frames of an earlier one raise nothing any more

Whatever of the old epoch comes late lies in the mirror before any frame of the new one does, and only such a frame
makes a slot worth reading. If the writer is first, its first frame raises all words before anything is put into a slot:
the reader has stopped for that epoch, or the writer would not have entered it, and who was left behind sees that one
has gone on. A life that was expelled has its connections closed; the next one of that number dials its own.

No flow control is needed: a writer does not reuse a slot before all members have taken it, so the mirror always has
room, and whoever receives never waits for anything but the network. Nor does a writer: what a socket has no room for is
left in a queue, whose payloads stay where they are, since their slots are not used again before they were taken.

Where all peers are reached like this the driver receives by itself (`ftcomm.transport.lines`), and the thread of a peer
sleeps until the connection ends: two threads that hand the interpreter lock to each other for every frame move 64 MB
between two processes on two cores in 28 ms, one alone in 22.

What it reaches depends on the cores. On two EPYC cores `ftcomm bench wire --sizes 64M` gives two ranks 89 to 147% of
plain sockets, but four ranks 67 to 81%, and `taskset -c 0 ftcomm bench wire --sizes 64M --ranks 2` 50 to 73%: where
ranks share a core, each finds its caches cold when its turn comes, and all that sockets do not do comes on top. Where
the processor time of each of four goes, by samples (a handler of SIGPROF): half into `sendmsg` and `recvmsg_into`,
which plain sockets take for the same bytes, too; a tenth into the copy of the sums to the caller's array, 6% into the
sums; a third into the interpreter, for 768 frames each way. Tried without gain: for four, shorter ways through this
file and the stream for each frame, tasks of 1 or 2 MB, more of them ahead, to sleep without a look before; for two, to
send from the array what both sum, which saves a copy and leaves the caches cold.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ftcomm.control.dropped import drop
from ftcomm.kernels.wait import Bell, wake
from ftcomm.transport.segment import (
    DETAIL,
    EPOCHS,
    FINGERPRINT,
    HEADER,
    POSTED,
    PUBLISHED,
    SIZE,
    SLOTS,
    STAGED,
    TAKEN,
    Peer,
    descriptor,
)

Lost = Callable[[int, int, str], None]  # (replica, epoch, reason)

# Magic, word, its value; of the payload: where in its region, bytes; what belongs to the word: to POSTED the number,
# the call and the detail of the op, to TAKEN the fingerprint of the result and two zeros.
_FRAME = struct.Struct("<IIQIIQQQ")
_MAGIC = 0x66746332
_WORDS = frozenset(PUBLISHED)
_INBOX = 4096  # bytes that are received at once where no large payload is under way: the frames of small ops
_GATHER = 16  # buffers that one call sends
_AT_ONCE = 32 << 10  # bytes of a payload that is not held back, to go with the next frames in one call
_NOTHING = memoryview(b"")
_OF = 16  # the bits of a word from here on: 1 + the member that it is of; 0: the writer itself
_WORD = (1 << _OF) - 1
_PAUSE = 0.2  # s between attempts to dial


def of_member(member: int, word: int) -> int:
    """What a frame says instead of `word` when it tells what another member has published."""
    return (member + 1) << _OF | word


def _nobody() -> socket.socket:
    raise ConnectionError("nobody to dial")


class TcpPeer(Peer):
    """The mirror of the segment of `replica` from `epoch` on, filled from `sock` (connected and past its handshake).

    Without one nobody is dialled before `want` or `open` is called. Until then, and from then on, others tell what this
    member has posted and taken: `relayed` is given their frames, of which `heard` keeps the words.

    `on_lost(replica, epoch, reason)` is called once, by whoever receives, if the connection ends, or brings what no
    segment can hold; between `quiet` and `enter` not before `enter`, and never after `close`.
    """

    def __init__(self, replica: int, epoch: int, sock: socket.socket | None, on_lost: Lost) -> None:
        super().__init__(replica, "tcp")
        self._epoch = epoch  # that this member is in, or about to enter
        self._newest = 0  # that the words are of; that of the writer, if it is ahead
        self._sock: Any = None
        self._on_lost = on_lost
        self._quiet = self._closed = False
        self._untold = ""  # why it has ended, if that was no news
        # Nobody receives before `drive` says who does: frames may tell of `others`, which are not there before.
        self._driven = True
        self._bell = Bell()  # wakes the thread
        self._map(mmap.mmap(-1, SIZE))
        self._hearsay = memoryview(bytearray(HEADER)).cast("Q") if sock is None else None
        self._hearing = threading.Lock()  # guards it and what follows; never held across a wait
        self._heard_epoch = 0  # that it is of
        self.others: Mapping[int, Peer] = {}  # to whom what this one relays is given
        self.dial: Callable[[], socket.socket] = _nobody  # for `want`
        self._dialling = False
        self._answered = threading.Event()
        self._begin_epoch(epoch)
        self._taking = threading.Lock()  # by who receives; never held across a wait. It guards what follows
        self.ended = False
        self._inbox = memoryview(bytearray(_INBOX))
        self._begin = self._end = 0  # of what lies in it
        self._frame: tuple[int, ...] = ()  # the one whose payload is under way
        self._missing = _NOTHING  # of that payload: where in the mirror
        if sock is not None:
            self.open(sock)

    @property
    def heard(self) -> memoryview:
        return self.words if self._hearsay is None else self._hearsay

    @property
    def is_open(self) -> bool:
        return self._sock is not None

    def open(self, sock: socket.socket) -> None:
        """The connection is there. Any thread, once."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._taking:
            closed = self._closed
            if not closed:
                self._sock = sock
        if closed:
            sock.close()
            return
        self._answered.set()
        threading.Thread(target=self._attend, name=f"ftcomm-from-{self.replica}", daemon=True).start()

    def want(self, opened: Callable[[], None] = lambda: None) -> None:
        """`dial` in a thread until somebody answers or this one is closed, then call `opened`. Each attempt that fails
        is told as a loss. Does not block; once is enough."""
        if self._dialling or self.is_open:
            return
        self._dialling = True

        def run() -> None:
            while not (self._closed or self.is_open):
                try:
                    self.open(self.dial())
                    opened()
                except OSError as error:
                    if not self._quiet:
                        self._on_lost(self.replica, self._epoch, f"its memory cannot be reached: {error}")
                    time.sleep(_PAUSE)

        threading.Thread(target=run, name=f"ftcomm-dial-{self.replica}", daemon=True).start()

    def reach(self, seconds: float) -> None:
        """Wait until the connection is there, `want` or not. Raises `OSError` after so many seconds."""
        self.want()
        if not self._answered.wait(seconds):
            raise ConnectionError(f"no connection within {seconds:g} s")

    def relayed(self, word: int, value: int, belongs: tuple[int, int, int]) -> None:
        """Somebody tells what this member has published."""
        heard = self._hearsay
        if heard is None or word not in (POSTED, TAKEN):
            return
        with self._hearing:
            epoch = value >> 32
            if epoch > self._heard_epoch:
                self._heard_epoch = epoch
                heard[POSTED] = heard[TAKEN] = epoch << 32
            if value <= heard[word]:
                return
            at = descriptor(((value & 0xFFFFFFFF) - 1) % SLOTS)
            if word == POSTED:
                heard[at], heard[at + 1], heard[at + DETAIL] = belongs
            else:
                heard[at + FINGERPRINT] = belongs[0]
            heard[word] = value

    def serves(self, epoch: int) -> bool:
        return not self.ended

    def enter(self, epoch: int) -> None:
        with self._taking:
            self._epoch, self._quiet = epoch, False
            self._begin_epoch(epoch)
            untold, self._untold = self._untold, ""
        if untold:
            self._on_lost(self.replica, epoch, f"connection for data: {untold}")

    def quiet(self) -> None:
        self._quiet = True

    def close(self) -> None:
        self.others = {}  # this one is among them, and would live for as long as nobody looks for such circles
        with self._taking:
            self._quiet = self._closed = True
        if self._sock is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket

    def drive(self, driven: bool = True) -> None:
        """If `driven`, somebody calls `pump` from now on, and the thread looks after the end of the connection alone;
        else the thread receives."""
        if driven != self._driven:
            self._driven = driven
            self._bell.ring()

    def fileno(self) -> int:
        return -1 if self.ended or self._sock is None else int(self._sock.fileno())

    def pump(self) -> bool:
        """Take in what has come, at most one large payload; True if a word was raised. Does not block. Any thread."""
        return self._taking.acquire(blocking=False) and self._pump()

    def _attend(self) -> None:
        """The thread: receive until somebody drives, then wait for the end of the connection, and find it."""
        while True:
            poll = select.poll()
            poll.register(self._bell, select.POLLIN)
            with self._taking:
                if self.ended:
                    return
                driven = self._driven
                poll.register(self._sock, select.POLLRDHUP if driven else select.POLLIN | select.POLLRDHUP)
            ready = [fd for fd, _ in poll.poll()]
            if self._bell.fileno() in ready:
                self._bell.silence()
            elif driven == self._driven:
                self._taking.acquire()
                self._pump()

    def _pump(self) -> bool:
        """With the lock, which it releases."""
        try:
            return not self.ended and self._sock is not None and self._take_in()
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            self.ended = True
            self._sock.close()
            self._bell.ring()  # a descriptor that is closed wakes nobody who sleeps on it
            broken, quiet, epoch = error, self._quiet, self._epoch
            self._untold = str(error) if quiet else ""
        finally:
            self._taking.release()
        if isinstance(broken, ValueError):
            drop("data", f"from replica {self.replica}: {broken}; its connection is closed")
        if not quiet:
            self._on_lost(self.replica, epoch, f"connection for data: {broken}")
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
        """One header. Every field is checked: a wrong one must not reach beyond the chunk that it names. What belongs
        to an epoch that is over is put where it would have been, as nobody reads there now, but raises no word."""
        self._frame = frame = _FRAME.unpack_from(self._inbox, self._begin)
        magic, word, value, start, nbytes, *_ = frame
        epoch, count = value >> 32, value & 0xFFFFFFFF
        if (
            word >> _OF
            and magic == _MAGIC
            and word & _WORD in (POSTED, TAKEN)
            and not nbytes
            and epoch < EPOCHS
            and count
        ):
            self._begin += _FRAME.size
            of = self.others.get((word >> _OF) - 1)
            if isinstance(of, TcpPeer):
                of.relayed(word & _WORD, value, frame[5:])
            return
        again = epoch == self._newest and word in _WORDS and value <= self.words[word]
        if magic != _MAGIC or word not in _WORDS or not 0 < epoch < EPOCHS or not count or again:
            raise ValueError(f"a frame that cannot be: magic {magic:#x}, word {word}, value {value:#x}")
        if word == TAKEN and nbytes:
            raise ValueError(f"a payload of {nbytes} bytes that tells of what is taken")
        base = self.place(word, start, nbytes)
        self._begin_epoch(epoch)
        self._begin += _FRAME.size
        if nbytes:
            there = self.buffer[base : base + nbytes]
            here = self._inbox[self._begin : min(self._end, self._begin + nbytes)]
            there[: len(here)] = here
            self._begin += len(here)
            self._missing = there[len(here) :]

    def _begin_epoch(self, epoch: int) -> None:
        """All words are of this epoch at least, before anything of it is put into a slot. With the lock."""
        if self._hearsay is not None and epoch > self._heard_epoch:
            with self._hearing:
                if epoch > self._heard_epoch:
                    self._heard_epoch = epoch
                    self._hearsay[POSTED] = self._hearsay[TAKEN] = epoch << 32
        if epoch > self._newest:
            self._newest = epoch
            for word in PUBLISHED:
                self.words[word] = epoch << 32

    def _raise(self) -> None:
        """The payload is there: raise the word that announces it."""
        _, word, value, _, _, number, call, detail = self._frame
        if value >> 32 < self._newest or word >> _OF:
            return
        if self._hearsay is not None:
            self.relayed(word, value, (number, call, detail))
        at = descriptor(((value & 0xFFFFFFFF) - 1) % SLOTS)
        if word == POSTED:
            self.words[at], self.words[at + 1], self.words[at + DETAIL] = number, call, detail
        elif word == TAKEN:
            self.words[at + FINGERPRINT] = number
        self.words[word] = value
        if not self._driven:
            wake(self.address + 8 * word)


class Reader:
    """A member that reads this one's segment through a connection that it has dialled, from `epoch` on. `life` is the
    nonce of that member's own segment.

    For the driving thread alone, or who has stopped it. No method blocks.
    """

    def __init__(self, sock: socket.socket, replica: int, epoch: int, life: str = "") -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.replica, self.life = replica, life
        self.epoch = epoch
        self._sock = sock
        # What is left to send, of which word and value it is, and whether it ends its frame.
        self._queue: deque[tuple[memoryview, int, int, bool]] = deque()
        self._begun = False  # to send the frame that the first of these is of
        # Bytes sent of what lies in each slot, by where they begin. A sum takes the place of what it was made of.
        self._staged: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        self._under_way = 0  # their sum

    def send(self, word: int, value: int, start: int, payload: memoryview, belongs: tuple[int, int, int]) -> None:
        """Send one frame, or leave it to `flush`. `payload` stays as it is until the reader has it.

        Raises OSError if the connection is lost.
        """
        nbytes = len(payload)
        header = memoryview(_FRAME.pack(_MAGIC, word, value, start, nbytes, *belongs))
        self._queue.append((header, word, value, not nbytes))
        if nbytes or word == POSTED:
            self._count(word, value, start, nbytes)
        if nbytes:
            self._queue.append((payload, word, value, True))
            if nbytes >= _AT_ONCE:
                self.flush()

    def flush(self) -> bool:
        """Send what has been left. True if nothing is left now. Raises OSError if the connection is lost."""
        queue = self._queue
        while queue:
            try:
                buffers = [entry[0] for entry in itertools.islice(queue, _GATHER)]
                sent = self._sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            while queue and sent >= len(queue[0][0]):
                buffer, _, _, ends = queue.popleft()
                sent -= len(buffer)
                self._begun = not ends
            if sent:
                buffer, *of = queue[0]
                queue[0] = buffer[sent:], *of
                self._begun = True
        return True

    def told(self, word: int, value: int) -> bool:
        """True if no frame for this value of the word, or a lower one, is left to be sent."""
        return not any(of & _WORD == word and said <= value for _, of, said, _ in self._queue)

    def serves(self, epoch: int) -> bool:
        """Whether it can be given what belongs to this epoch."""
        return epoch >= self.epoch

    def turn(self) -> bool:
        """The epoch is over; True as the connection goes on in the next one.

        A frame that has begun is ended, with what its payload is now: that may lie in an array which is the caller's
        again. No other one is sent. What the kernels still carry of the epoch is counted no more: nothing waits for it.
        """
        rest: list[tuple[memoryview, int, int, bool]] = []
        while self._begun and not (rest and rest[-1][3]):
            buffer, *of = self._queue.popleft()
            rest.append((memoryview(bytes(buffer)), *of))
        self._queue = deque(rest)
        self._staged = [{} for _ in range(SLOTS)]
        self._under_way = 0
        return True

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
        if nbytes:
            self._under_way += nbytes - slot.get(start, 0)
            slot[start] = nbytes
        if self._under_way > STAGED:
            raise AssertionError(f"{self._under_way} bytes on their way to replica {self.replica}: {self._staged}")
