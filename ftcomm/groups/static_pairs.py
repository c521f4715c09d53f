"""A connection between each two members of a static group: how they meet, and how they hear of each other's end.

    rank j                                rank i < j
      dial, MemberHello(who, where)  --->
                                     <--- MemberHello(who, where)   now both know where the other's segment is
      ...                                 ...                       nothing is said while all goes well
      Left(returned, taken)          --->                           I am done, after so many ops
      MemberFailed(lost, why)        --->                           I cannot go on
      DataEnded(why)                 --->                           the connection for data has ended
                                     <---     MemberLeft(who, taken)        since somebody has left, or MemberFailed
      (the connection ends)          --->                           I am dead

After `Left` or `MemberFailed` each hangs up. Who hangs up with something unread takes back what he has said, but only
from one who has ended too, or has waited for that message for longer than `DOUBT`.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ftcomm.collective.core import nothing
from ftcomm.control import handshake
from ftcomm.control.dropped import drop, printable
from ftcomm.control.framing import Framing, receive_while
from ftcomm.control.running_time import RunningTimer
from ftcomm.control.sealed import Connection, pending
from ftcomm.errors import TransportError
from ftcomm.groups.static_endpoint import DialPurpose
from ftcomm.membership.static import LastMessage, MemberFailed, MemberHello, Said, StaticMembership
from ftcomm.process.joining import join
from ftcomm.sync.sched import request_short_slice
from ftcomm.transport.group_connection import LINK, GroupConnection
from ftcomm.transport.router import PURPOSE

MAX_FRAME = 1 << 14  # bytes
_PAUSE = 0.02  # s before the second attempt to reach a member; doubled up to half a second
_LEAST = 0.001  # s that a dial may take
LOOK = 0.002  # s between two looks while `settle` has something to wait for

FRAMES: Framing[Said] = Framing(Said, MAX_FRAME)


class PeerInfo(NamedTuple):
    """A member as the others know it before they have met: what errors call it, and how it is reached."""

    name: str
    dial: DialPurpose


# -- meeting ---------------------------------------------------------------------------------------------------------


class MetMember(NamedTuple):
    member: int
    sock: Connection  # blocking
    hello: MemberHello


Arrivals = queue.SimpleQueue["GroupConnection | MetMember | Exception"]


def meet(
    membership: StaticMembership, group: str, infos: Sequence[PeerInfo], events: Arrivals, timer: RunningTimer
) -> dict[int, MetMember]:
    """Blocks until every member has come, or `timer` has run out; whoever owns incoming connections puts them into
    `events`.

    Raises `TransportError`, which names who did not come, and `ArgumentError` if members disagree on who they are.
    """
    me = membership.me
    meeting = _Meeting(group, me, infos, membership.hello, events, timer.left())
    for member in range(me):
        meeting.start(meeting.dial, member)
    met: dict[int, MetMember] = {}
    try:
        while membership.missing():
            part = timer.part()
            meeting.left = timer.left()
            try:
                event = events.get(timeout=part)
            except queue.Empty:
                if part:
                    continue
                raise TransportError(membership.absent(meeting.waited, meeting.news)) from None
            if isinstance(event, Exception):
                raise event
            if isinstance(event, GroupConnection):
                if me < event.member < len(infos):
                    meeting.start(meeting.greet, event.member, event.sock)
                else:
                    drop("fields", f"a connection to group {group!r} from a member {event.member}")
                    event.sock.close()
                continue
            if event.member in met:  # it has called again, and means the newer one
                met[event.member].sock.close()
            met[event.member] = event
            membership.came(event.member, event.hello)
    except BaseException as error:
        gone = FRAMES.frame(MemberFailed(-1, printable(str(error), 1000)))
        for there in met.values():
            with contextlib.suppress(OSError), there.sock:
                there.sock.sendall(gone, socket.MSG_DONTWAIT)
        raise
    finally:
        meeting.over.set()
    return met


def discard(events: Arrivals) -> None:
    """Close what has come too late."""
    with contextlib.suppress(queue.Empty):
        while True:
            event = events.get_nowait()
            if not isinstance(event, Exception):
                event.sock.close()


class _Meeting:
    """Attempts to meet, each in a thread that ends soon after `over`. `left`: s until then at most."""

    def __init__(
        self, group: str, me: int, infos: Sequence[PeerInfo], hello: MemberHello, events: Arrivals, left: float
    ) -> None:
        self._group, self._me, self._infos, self._hello = group, me, infos, hello
        self._events, self.left = events, left
        self._begun = time.monotonic()
        self.news: dict[int, str] = {}  # why the last attempt to meet a member has failed
        self.over = threading.Event()

    def start(self, work: Callable[..., object], member: int, *how: object) -> None:
        name = f"ftcomm-meet-{member}"
        threading.Thread(target=work, args=(member, *how), name=name, daemon=True).start()

    @property
    def waited(self) -> float:
        """The seconds since it has begun."""
        return time.monotonic() - self._begun

    def dial(self, member: int) -> None:
        info = self._infos[member]
        fields: handshake.Fields = {"group": self._group, "what": LINK, "member": self._me}
        pause = _PAUSE
        while not self.over.is_set():
            self.news.setdefault(member, "it has not answered")
            try:
                sock = info.dial(PURPOSE, fields, max(_LEAST, self.left))
            except handshake.Refused as error:
                self._events.put(TransportError(f"group {self._group!r}: {info.name} refuses: {error}"))
                return
            except OSError as error:
                self.news[member] = f"it cannot be reached: {error}"
            else:
                self.news[member] = "it listens, but has not made this group"
                if self.greet(member, sock):
                    return
            self.over.wait(pause)
            pause = min(2 * pause, 0.5)

    def greet(self, member: int, sock: Connection) -> bool:
        """Tell each other who we are; False if it came to nothing, and may be tried again."""
        try:
            sock.sendall(FRAMES.frame(self._hello))
            said = FRAMES.read(receive_while(sock, lambda: not self.over.is_set()))
            sock.settimeout(None)
            if not isinstance(said, MemberHello):
                raise ConnectionError(said.why if isinstance(said, MemberFailed) else "it has closed the group")
        except TimeoutError:  # the meeting is over, and what is known of the member stands
            sock.close()
            return False
        except (OSError, msgspec.DecodeError) as error:
            self.news[member] = f"its connection has failed: {error}"
            sock.close()
            return False
        self._events.put(MetMember(member, sock, said))
        return True


# -- staying in touch ------------------------------------------------------------------------------------------------


class Pairs:
    """A thread that hears what the other members say, and how they end.

    `on_said(member, said)` is called for what a member says until its last message, `on_end(member, why)` if a
    connection ends without one; both in this thread. While `settle(looked)` returns True it is called again, a few
    hundred times a second; what had come at the moment `looked` is heard by then.
    `on_start` is the first and `on_stop` the last thing that the thread does, which lives as long as the member does.
    `on_broken(error)` is called if it cannot go on.
    """

    def __init__(
        self,
        name: str,
        *,
        on_said: Callable[[int, Said], None],
        on_end: Callable[[int, str], None],
        settle: Callable[[float], bool],
        on_start: Callable[[], object],
        on_stop: Callable[[], object],
        on_broken: Callable[[Exception], object],
    ) -> None:
        self._name = name
        self._on_said, self._on_end, self._settle = on_said, on_end, settle
        self._on_start, self._on_stop, self._on_broken = on_start, on_stop, on_broken
        self._selector = selectors.PollSelector()  # poll(2) needs no descriptor of its own
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._selector.register(self._near, selectors.EVENT_READ)
        self._socks: dict[int, Connection] = {}
        self._heard: dict[int, bytearray] = {}  # the bytes of a frame that is not whole yet
        self._parted: set[int] = set()  # members that have said that they end
        self._lock = threading.Lock()  # guards what follows; never held across a wait
        self._new: dict[int, Connection] = {}
        self._asides: list[tuple[int, bytes]] = []  # what we say before
        self._died: list[tuple[int, str]] = []
        self._last: bytes | None = None  # what we say when we end
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ftcomm-pairs-{name}", daemon=True)
        self._thread.start()
        self._ready.wait()

    def add(self, socks: Mapping[int, Connection]) -> None:
        """The connections to all other members. Once."""
        with self._lock:
            self._new = dict(socks)
        self.wake()

    def tell(self, member: int, said: Said) -> None:
        """Say something to one, and go on. Does not block."""
        with self._lock:
            self._asides.append((member, FRAMES.frame(said)))
        self.wake()

    def died(self, member: int, why: str) -> None:
        """Let this thread call `on_end` for a member: the one that saw its death serves other groups, too. Does not
        block."""
        with self._lock:
            self._died.append((member, why))
        self.wake()

    def end(self, last: LastMessage) -> None:
        """Say `last` to all, and end; the first `last` counts. Does not block."""
        with self._lock:
            if self._last is None:
                self._last = FRAMES.frame(last)
        self.wake()

    def join(self) -> bool:
        """Block until it is said, and the thread has ended; False if it does not end. Called after `end`."""
        return threading.current_thread() is self._thread or join(self._thread, f"group {self._name!r}")

    def wake(self) -> None:
        """Wake the thread in `settle`, which may have something to wait for."""
        with contextlib.suppress(OSError):  # full, so it is awake, or closed, as the thread has ended
            self._far.send(b"\0", socket.MSG_DONTWAIT)

    def _run(self) -> None:
        request_short_slice()
        try:
            self._on_start()
            self._ready.set()
            self._hear_all()
        except Exception as error:
            drop("internal", f"the connections of a group: {error!r}", error=error)
            self._on_broken(error)
        finally:
            self._ready.set()
            for sock in (*self._socks.values(), *self._new.values(), self._near, self._far):
                sock.close()
            self._selector.close()
            self._on_stop()
            self._on_said = self._on_end = self._on_start = self._on_stop = self._on_broken = nothing
            self._settle = bool  # they know who made this one, which may know it

    def _hear_all(self) -> None:
        wait: float | None = 0.0
        while True:
            with self._lock:
                new, self._new = self._new, {}
                asides, self._asides = self._asides, []
                died, self._died = self._died, []
                last = self._last
            for member, sock in new.items():
                sock.setblocking(False)
                self._socks[member] = sock
                self._heard[member] = bytearray()
                self._selector.register(sock, selectors.EVENT_READ, member)
            for member, said in asides:
                with contextlib.suppress(OSError, KeyError):  # it has ended, which is heard, or does not listen
                    self._socks[member].sendall(said)
            if last is not None:
                for sock in self._socks.values():
                    with contextlib.suppress(OSError):
                        sock.sendall(last)
                return
            for member, why in died:
                self._on_end(member, why)
            looked = time.monotonic()
            for key, _ in self._selector.select(wait):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._near.recv(4096)
                else:
                    self._receive(key.data)
            wait = LOOK if self._settle(looked) else None

    def _receive(self, member: int) -> None:
        heard, sock = self._heard[member], self._socks[member]
        try:
            data = sock.recv(MAX_FRAME)
            heard += data
            while pending(sock):
                heard += sock.recv(MAX_FRAME)
            while (said := FRAMES.cut(heard)) is not None:
                if member not in self._parted:
                    if isinstance(said, LastMessage):
                        self._parted.add(member)
                    self._on_said(member, said)
        except BlockingIOError:
            return
        except msgspec.DecodeError as error:
            drop("message", f"from rank {member} of a group: {error}")
            self._close(member, "it has said what cannot be")
        except OSError as error:
            self._close(member, f"its connection has failed: {error}")
        else:
            if not data:
                self._close(member, "its connection was closed")

    def _close(self, member: int, why: str) -> None:
        sock = self._socks.pop(member)
        self._selector.unregister(sock)
        sock.close()
        if member not in self._parted:
            self._parted.add(member)
            self._on_end(member, why)
