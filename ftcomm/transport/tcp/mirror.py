"""A peer reached by TCP: what it publishes is pushed into a mirror of its segment.

    writer                                         reader
    its driver: store a word, then                 receive the header, the payload into the mirror, then raise the word
    send a frame to each attached reader   --->    in the mirror; another thread that has done so wakes the driver

A frame is a header and a payload. The payload is what this reader needs of the chunk that the word announces: its
slice, all of it, or nothing. The reader dials the writer's listening port; a pair has one connection for each
direction.

A connection and its mirror serve in epoch after epoch, as long as both processes live and are members. The order of
their bytes keeps an old epoch out of a new one:

    in the old epoch    frames are left in the writer's queue and in the sockets, and one of them is half sent
    the writer enters   it drops what it has not begun to send and completes the frame that it has begun, since the next
                        header could not be found otherwise; then it sends frames of the new epoch
    the reader enters   it raises the words of the mirror to the epoch; frames of an earlier one raise nothing any more

All bytes of the old epoch reach the mirror before any frame of the new one, and only such a frame makes a slot worth
reading. If the writer enters first, its first frame raises all words before any payload of it reaches a slot: the
reader has stopped for that epoch, or the writer would not have entered it, and a reader that was left behind sees that
the writer has gone on. A life that is removed has its connections closed; the next life of that number dials its own.

No flow control is needed. A writer reuses no slot before all members have taken it, so the mirror always has room, and
a receiver waits only for the network. A writer does not wait either: what a socket has no room for is left in a queue,
whose payloads stay where they are, in slots that were not taken yet.

If all peers are reached like this, the driver receives by itself (`ftcomm.transport.tcp.poller`), and the thread of the
process (`ftcomm.transport.epoll_thread`) sleeps until a connection ends. Two threads that hand the interpreter lock
to each other for every frame move 64 MB between two processes on two cores in 28 ms, one alone in 22.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ftcomm.control.dropped import drop
from ftcomm.control.failed_dials import start
from ftcomm.control.sealed import Connection, pending
from ftcomm.control.wire import for_bulk
from ftcomm.kernels.epochs import COUNTER, COUNTS, EPOCHS
from ftcomm.sync.futex import wake
from ftcomm.transport.base import Belongs, OnLost, Peer, raise_word
from ftcomm.transport.epoll_thread import ENDED, EPOLL_THREAD
from ftcomm.transport.segment import COUNTERS, ENDS, HEADER, HOST, POSTED, TAKEN, Layout
from ftcomm.transport.tcp import frames

_INBOX = 4096  # bytes received at once when no large payload is under way
_NOTHING = memoryview(b"")
_PAUSE = 0.2  # s between attempts to dial


def _nobody() -> Connection:
    raise ConnectionError("nobody to dial")


class TcpMirror(Peer):
    """The mirror of the segment of `replica` from `epoch` on, filled from `sock` (connected and past its handshake).

    Without `sock` nothing is dialled before `want` or `open`. From the beginning other members relay what this peer has
    posted and taken: `relayed` gets their frames, and `heard` keeps the words.

    `on_lost(replica, epoch, reason)` is called once, by the thread that receives, if the connection ends or brings what
    no segment can hold. Between `quiet` and `enter` the call is put off until `enter`; after `close` there is none.
    """

    transport = "tcp"

    def __init__(
        self, replica: int, epoch: int, sock: Connection | None, on_lost: OnLost, layout: Layout = HOST
    ) -> None:
        super().__init__(replica)
        self._lay_out(layout)
        self._epoch = epoch  # the epoch that this member is in, or about to enter
        self._newest = 0  # the epoch of the words; that of the writer, if it is ahead
        self._sock: Any = None
        self._on_lost = on_lost
        self._quiet = self._closed = False
        self._untold = ""  # why the connection has ended, if that was no news
        # The thread does not receive before `drive`: frames may tell of `others`, which are not there before.
        self._driven = True
        self.have_memory()
        self._levels: set[int] = set()  # words of levels that are in use; in a large group these are few of them
        self._relayed = memoryview(bytearray(HEADER)).cast("Q") if sock is None else None
        self._hearing = threading.Lock()  # guards it and what follows; never held during a wait
        self._heard_epoch = 0  # the epoch of `heard`
        self._others: Mapping[int, Peer] = {}  # the peers that get what this one relays
        self.dial: Callable[[], Connection] = _nobody  # for `want`
        self._dialling = False
        self._failed: tuple[int, OSError | RuntimeError | None] = 0, None  # attempts to dial, and why the last one did
        self._answered = threading.Event()
        self._begin_epoch(epoch)
        self._taking = threading.Lock()  # held to receive, never during a wait; guards what follows
        self.ended = False
        self._inbox = memoryview(bytearray(_INBOX))
        self._begin = self._end = 0  # the bytes of the inbox in use
        self._frame: tuple[int, ...] = ()  # the frame whose payload is under way
        self._missing = _NOTHING  # the rest of that payload in the mirror
        if sock is not None:
            self.open(sock)

    def have_memory(self) -> None:
        """Map memory, which takes some only where it is written."""
        self._map(mmap.mmap(-1, self.nbytes))

    @property
    def heard(self) -> memoryview:
        return self.words if self._relayed is None else self._relayed

    @property
    def is_open(self) -> bool:
        return self._sock is not None

    def open(self, sock: Connection) -> None:
        """Take the connection, and begin to receive, or to wait for its end. Any thread, once. The connection is closed
        if this raises, as it does where no thread or descriptor is left."""
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for_bulk(sock)
            with self._taking:
                closed = self._closed
                if not closed:
                    self.start(sock)
                    self._sock = sock
        except BaseException:
            sock.close()
            raise
        if closed:
            sock.close()
        else:
            self._answered.set()

    def start(self, sock: Connection) -> None:
        """Let the thread of this process receive, or wait for the end of the connection. It waits for the lock, which
        is held."""
        EPOLL_THREAD.enter(sock.fileno(), self, receives=not self._driven)

    def want(self, opened: Callable[[], None] = lambda: None) -> bool:
        """Dial in a thread until the peer answers or this one is closed, then call `opened`. Does not block; later
        calls do nothing. A peer that does not answer is no loss: the control plane dials the same port, and what takes
        too long is a stall. False: no thread can be had for it now."""
        if self._dialling or self.is_open:
            return True
        self._dialling = True

        def run() -> None:
            while not (self._closed or self.is_open):
                try:
                    self.open(self.dial())
                    opened()
                except (OSError, RuntimeError) as error:  # RuntimeError: no thread could be started
                    self._failed = self._failed[0] + 1, error.with_traceback(None)  # which would keep this frame
                    time.sleep(_PAUSE)

        lacks = start(threading.Thread(target=run, name=f"ftcomm-dial-{self.replica}", daemon=True))
        if lacks:
            self._dialling = False
            self._failed = self._failed[0] + 1, lacks
        return lacks is None

    def open_now(self) -> None:
        before, _ = self._failed
        self.want()
        while not self._answered.wait(_PAUSE):
            attempts, error = self._failed
            if error is not None and attempts > before:
                raise error
            if self._closed:
                raise ConnectionError("closed on this side")

    def relay_for(self, others: Mapping[int, Peer]) -> None:
        self._others = others

    def relayed(self, word: int, value: int, belongs: Belongs) -> None:
        heard = self._relayed
        if heard is None or word not in (POSTED, TAKEN):
            return
        with self._hearing:
            epoch = value >> COUNTER
            if epoch > self._heard_epoch:
                self._heard_epoch = epoch
                heard[POSTED] = heard[TAKEN] = epoch << COUNTER
            if value <= heard[word]:
                return
            raise_word(heard, word, value, belongs)

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
        self._others = {}  # this peer is among them: a reference cycle
        with self._taking:
            self._quiet = self._closed = True
        if self._sock is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket

    def drive(self, driven: bool = True) -> None:
        """Let the driver receive by `pump` from now on, while the thread waits for the end of the connection; or, not
        `driven`, let the thread receive."""
        with self._taking:
            if driven != self._driven:
                self._driven = driven
                EPOLL_THREAD.change(self.fileno(), self, receives=not driven)

    def fileno(self) -> int:
        return -1 if self.ended or self._sock is None else int(self._sock.fileno())

    def pump(self) -> bool:
        return self._taking.acquire(blocking=False) and self._pump()

    def ready(self, events: int) -> None:
        """Receive, unless a driver does and there is no end to be found. For the thread of the process."""
        self._taking.acquire()
        if self._driven and not events & ENDED:
            self._taking.release()
        else:
            self._pump()

    def _pump(self) -> bool:
        """Receive what is there. Called with the lock, which it releases."""
        try:
            return not self.ended and self._sock is not None and self._take_all_in()
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            EPOLL_THREAD.leave(self.fileno(), self)
            self.ended = True
            self._sock.close()
            why, senseless = str(error), isinstance(error, ValueError)  # not the error, which would keep this frame
            quiet, epoch = self._quiet, self._epoch
            self._untold = why if quiet else ""
        finally:
            self._taking.release()
        if senseless:
            drop("data", f"from replica {self.replica}: {why}; its connection is closed")
        if not quiet:
            self._on_lost(self.replica, epoch, f"connection for data: {why}")
        return True

    def _take_all_in(self) -> bool:
        """Does what `_take_in` does, but leaves nothing that was received already, of which no poll would tell."""
        raised = self._take_in()
        with contextlib.suppress(BlockingIOError):
            while pending(self._sock):
                raised |= self._take_in()
        return raised

    def _take_in(self) -> bool:
        """Receive once. Raises BlockingIOError when nothing more has come, OSError or ValueError when nothing more
        will."""
        raised = False
        while True:
            if self._missing and raised:
                return True
            if self._missing:  # the inbox is empty, so it has room for what follows
                received = self._received(self._sock.recvmsg_into([self._missing, self._inbox])[0])
                self._begin, self._end = 0, max(0, received - len(self._missing))
                self._missing = self._missing[received:]
                if not self._missing:
                    self._raise()
                    raised = True
            elif self._end - self._begin >= frames.HEAD.size:
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
        """Read one header. Every field is checked: a wrong one must not reach beyond the chunk that it names. A payload
        of an earlier epoch goes to its place, where no reader looks now, but raises no word."""
        self._frame = frame = frames.HEAD.unpack_from(self._inbox, self._begin)
        magic, word, value, start, nbytes, *_ = frame
        epoch, count = value >> COUNTER, value & (COUNTS - 1)
        if (
            word >> frames.MEMBER
            and magic == frames.MAGIC
            and word & frames.WORD in (POSTED, TAKEN)
            and not nbytes
            and epoch < EPOCHS
            and count
        ):
            self._begin += frames.HEAD.size
            of = self._others.get((word >> frames.MEMBER) - 1)
            if of is not None:
                of.relayed(word & frames.WORD, value, frame[5:])
            return
        again = epoch == self._newest and word in self.published and value <= self.words[word]
        if magic != frames.MAGIC or word not in self.published or not 0 < epoch < EPOCHS or not count or again:
            raise ValueError(f"a frame that cannot be: magic {magic:#x}, word {word}, value {value:#x}")
        if word in ENDS and nbytes:
            raise ValueError(f"a payload of {nbytes} bytes that tells of what is taken")
        base = self.place(word, start, nbytes)
        self._begin_epoch(epoch)
        self._begin += frames.HEAD.size
        if nbytes:
            there = self.buffer[base : base + nbytes]
            here = self._inbox[self._begin : min(self._end, self._begin + nbytes)]
            there[: len(here)] = here
            self._begin += len(here)
            self._missing = there[len(here) :]

    def _begin_epoch(self, epoch: int) -> None:
        """Raise all words that are in use to this epoch, before any payload of it reaches a slot. With the lock.

        A word of which no frame has come is below every epoch and opens no gate. Nor would it, raised to the beginning
        of one.
        """
        if self._relayed is not None and epoch > self._heard_epoch:
            with self._hearing:
                if epoch > self._heard_epoch:
                    self._heard_epoch = epoch
                    self._relayed[POSTED] = self._relayed[TAKEN] = epoch << COUNTER
        if epoch > self._newest:
            self._newest = epoch
            for word in itertools.chain(COUNTERS, self._levels):
                self.words[word] = epoch << COUNTER

    def _raise(self) -> None:
        """Raise the word of a payload that is complete."""
        _, word, value, _, _, number, call, detail = self._frame
        belongs = number, call, detail
        if value >> COUNTER < self._newest or word >> frames.MEMBER:
            return
        if self._relayed is not None:
            self.relayed(word, value, belongs)
        if word not in COUNTERS:
            self._levels.add(word)
        raise_word(self.words, word, value, belongs)
        if not self._driven:
            wake(self.address + 8 * word)
