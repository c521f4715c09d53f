"""Memory between simulated hosts: the mirrors and writers of `ftcomm.transport.tcp`, on sockets of a simulated network.

A socket takes as many bytes as the kernels have room for, maybe a part of what it is given, and the reader has them
when it looks. So frames are sent by halves, left in queues, and left unread, as they are in the product. Where the
history protects data, they travel in the records of `ftcomm.transport.secure`, and an attacker may sit on the path.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ftcomm.control.sealed import Channel, Connection, Keys
from ftcomm.simulation.attacker import Attack, Attacker
from ftcomm.simulation.memory import SparseWords, offset, staging
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import MirrorWriter, OnLost, Poller
from ftcomm.transport.secure import plane
from ftcomm.transport.segment import Layout
from ftcomm.transport.tcp.mirror import TcpMirror

if TYPE_CHECKING:
    from ftcomm.simulation.network import SimulatedConnection

_ROOM = (150, 2000, 1 << 20)  # bytes of what a connection carries: less than a frame, those of one op, and of all
_HALF = 0.1  # of the calls that send, how many send a part


class NoConnection(enum.Enum):
    """The reason for which a connection has ended, or was not made."""

    CLOSED = "its connection closed"  # by the other end
    CLOSED_HERE = "closed on this side"
    RESET = "connection reset"
    TIMED_OUT = "timed out"
    REFUSED = "connection refused"
    UNREACHABLE = "no connection in time"
    TURNED_AWAY = "turned away"
    MUTE = "no answer to the handshake in time"

    def __str__(self) -> str:
        return self.value


class TinySocket:
    """One end of a connection, as a socket that never blocks. `on_room` is called when there is room again, `on_news`
    when there is something to receive, the end included."""

    def __init__(self, connection: SimulatedConnection, end: int) -> None:
        self._connection, self._end = connection, end
        self._random = connection.network.world.random
        self._inbox = bytearray()
        # An attacker holds whole records, for which a kernel has room.
        self._left = _ROOM[-1] if connection.network.attacked else self._random.choice(_ROOM)
        self._over: NoConnection | None = None
        self.stirs = False  # whether there is something to receive, the end included
        self.on_room: Callable[[], None] = lambda: None
        self.on_news: Callable[[], None] = lambda: None
        self.attacker = Attacker(self._random) if connection.network.attacked else None
        connection.sockets[end] = self
        connection.receive[end] = self._came
        connection.closed[end] = self._ended

    def protected(self) -> Connection:
        """This end, with the protection that the history gives to data. Both ends have the same secret."""
        keys = Keys(self._connection.number.to_bytes(32, "big"), client=self._end == 0)
        return plane(Channel(self, keys), self._connection.network.data)  # type: ignore[arg-type]

    # -- what the product calls ----------------------------------------------------------------------------------------

    def setblocking(self, flag: bool) -> None:
        """Do nothing: a simulated socket never blocks."""

    def setsockopt(self, *option: int) -> None:
        """Do nothing: a simulated socket has no options."""

    def getpeername(self) -> tuple[str, int]:
        return f"host{self._connection.processes[1 - self._end].host}", self._connection.number

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg((data,), (), flags)

    def sendmsg(self, buffers: Iterable[Any], ancillary: object = (), flags: int = 0) -> int:
        self._check()
        data = b"".join(buffers)[: self._left]
        if not data:
            raise BlockingIOError(errno.EAGAIN, "no room")
        if self._random.random() < _HALF:
            data = data[: self._random.randint(1, len(data))]
        self._left -= len(data)
        self._connection.send(self._end, data)
        return len(data)

    def recv_into(self, buffer: memoryview) -> int:
        return self.recvmsg_into([buffer])[0]

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int]:
        if not self._inbox:
            if self._over is NoConnection.CLOSED:
                return (0,)
            self._check()
            raise BlockingIOError(errno.EAGAIN, "nothing has come")
        received = 0
        for buffer in buffers:
            part = self._inbox[: len(buffer)]
            buffer[: len(part)] = part
            del self._inbox[: len(part)]
            received += len(part)
        self.stirs = bool(self._inbox) or self._over is not None
        other = self._connection.sockets[1 - self._end]
        if other is not None:
            network = self._connection.network
            network.world.after(network.delay(self._connection.way[self._end]), None, other.has_room, received)
        return (received,)

    def shutdown(self, how: int) -> None:
        self.close()

    def close(self) -> None:
        self._over, self.stirs = NoConnection.CLOSED_HERE, True
        self._connection.close(self._end)

    def reset(self, ends: Iterable[int]) -> None:
        """See `Mirror.reset`."""
        self._connection.reset(ends)

    @property
    def over(self) -> bool:
        return self._over is not None

    # -- what the network does -----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._over is not None:
            raise ConnectionError(str(self._over))

    def has_room(self, nbytes: int) -> None:
        full = self._left <= 0
        self._left += nbytes
        if full and self._connection.processes[self._end].alive:
            self.on_room()

    def _came(self, data: bytes) -> None:
        self._inbox += data if self.attacker is None else self.attacker.lets_pass(data)
        self.stirs = True
        self.on_news()

    def _ended(self, reason: NoConnection) -> None:
        self._over, self.stirs = reason, True
        self.on_news()


class Mirror(TcpMirror):
    """The mirror of the product, in plain memory. Who drives receives, and `attend` does what the thread does."""

    def __init__(self, replica: int, epoch: int, sock: TinySocket, on_lost: OnLost, layout: Layout) -> None:
        self.sock = sock
        super().__init__(replica, epoch, sock.protected(), on_lost, layout)

    def have_memory(self) -> None:
        self.address = 0  # no thread sleeps here, so none is woken
        self.words = SparseWords()  # type: ignore[assignment]
        self._bytes = staging(self.chunk)
        self.buffer = memoryview(self._bytes)  # type: ignore[arg-type]

    def offset(self, region: int, slot: int) -> int:
        return offset(region, slot, self.chunk)

    def start(self, sock: Connection) -> None:
        """Start nothing: there is no thread."""

    def fileno(self) -> int:
        """Returns what is no descriptor: there is nothing to sleep on."""
        return -1

    def reset(self, ends: Iterable[int]) -> None:
        """A fault: the connection is reset at these ends, and the others hear nothing of it."""
        self.sock.reset(ends)

    def attack(self, how: Attack) -> None:
        """A fault: something on the path does so with the next record."""
        assert self.sock.attacker is not None
        self.sock.attacker.next = how

    def attend(self) -> None:
        """The connection has ended: find its end, behind all that has come."""
        while not self.ended:
            self.pump()


class Pump(Poller):
    """Receives from all mirrors of a member, and never sleeps."""

    peers: Sequence[Mirror]

    def __init__(self, peers: Sequence[Mirror]) -> None:
        self.peers = peers

    def wait(self, clogged: Iterable[MirrorWriter], look: Callable[[], bool] | None = None) -> bool:
        came = [peer.pump() for peer in self.peers if peer.sock.stirs]
        return any(came) or (look is not None and look())


class Glance(Waiter):
    """Looks at a word, and never sleeps. `on_wake`: who would sleep here is to look again."""

    def __init__(self, own: memoryview, asleep: int, on_wake: Callable[[], object]) -> None:
        super().__init__(own, asleep, 0)
        self._on_wake = on_wake

    def until(self, words: memoryview, index: int, address: int, target: int, limit: int, token: int) -> bool:
        return target <= words[index] < limit

    def wake(self) -> None:
        self._on_wake()
