"""Carries records with a MAC on a connection after its handshake: over blocking and other sockets, and in asyncio.

    record    4 bytes: length of the payload | payload | tag of 16 bytes

The tag is a MAC over the payload and the number of the record in its direction. Its key belongs to this connection and
direction alone (`Keys`). So an attacker on the path can neither change a byte, nor repeat, leave out or reorder
records, nor send one back, nor take the connection over: a wrong tag ends it. That is counted, and proves nothing about
the other end. An end of the connection between two records looks like any other lost connection, and is never taken for
a message.

A `Channel` has the calls of a socket that its users need, so that their protocols need no second form. With a `Tunnel`
(`ftcomm.control.tls`) the records travel within TLS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import socket
from collections.abc import Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from ftcomm.control.dropped import DropKind, drop

TAG = 16  # bytes
RECORD = 128 << 10  # bytes of a payload, into which a longer run of bytes is cut
_LENGTH = 4  # bytes
_BLOCK = hashlib.sha256().block_size  # bytes
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))  # ipad and opad of RFC 2104

Buffer = bytes | bytearray | memoryview
# It yields how many bytes of the connection it needs next, and returns the payload of a record.
Incoming = Generator[int, Buffer, memoryview]


class Hmac:
    """HMAC-SHA256 with one key. It keeps its two hashes as they are after the key, and so takes less than half as long
    as the module `hmac`, which makes them anew, with short data."""

    def __init__(self, key: bytes) -> None:
        padded = (key if len(key) <= _BLOCK else hashlib.sha256(key).digest()).ljust(_BLOCK, b"\0")
        self.inner = hashlib.sha256(padded.translate(_INNER))
        self.outer = hashlib.sha256(padded.translate(_OUTER))

    def digest(self, *parts: Buffer) -> bytes:
        """Returns the HMAC of all parts together."""
        inner, outer = self.inner.copy(), self.outer.copy()
        for part in parts:
            inner.update(part)
        outer.update(inner.digest())
        return outer.digest()


class BadRecord(ConnectionError):
    """The other side did not send this record. It was counted, and the connection is of no more use."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """The secret that only the two ends of one connection share. `client`: this end has dialled."""

    secret: bytes = dataclasses.field(repr=False)
    client: bool

    def of(self, use: str, *, sending: bool) -> bytes:
        """Returns a key of 32 bytes for one use in one direction."""
        return self.both(use)[not sending]

    def both(self, use: str) -> tuple[bytes, bytes]:
        """Returns the keys of one use: for what this end sends, and for what it receives."""
        hmac_ = Hmac(self.secret)
        up, down = (hmac_.digest(f"{use}, {way}".encode()) for way in ("client to server", "server to client"))
        return (up, down) if self.client else (down, up)


class Seal(Protocol):
    """One direction of a connection, which counts its records. For one thread at a time."""

    def seal(self, payload: Sequence[Buffer], nbytes: int) -> Buffer:
        """Returns the next record, with `nbytes` of payload. It is valid until the next call."""
        ...

    def open(self, sealed: memoryview) -> memoryview:
        """Returns the payload of the next record. `sealed` is what follows its length. Raises `ValueError` on any other
        record."""
        ...


class Mac:
    """HMAC-SHA256, cut to 16 bytes. It is what the standard library has that is fast with long records: 1.7 GB/s on a
    core with the instructions for it, where keyed BLAKE2b has 0.7. A short record takes 2 us (docs/security.md says how
    that is measured)."""

    def __init__(self, key: bytes) -> None:
        keyed = Hmac(key)
        self._inner, self._outer = keyed.inner, keyed.outer
        self._count = 0  # of records

    def seal(self, payload: Sequence[Buffer], nbytes: int) -> bytes:
        return b"".join((nbytes.to_bytes(_LENGTH, "big"), *payload, self._tag(payload)))

    def open(self, sealed: memoryview) -> memoryview:
        payload = sealed[:-TAG]
        if not hmac.compare_digest(sealed[-TAG:], self._tag((payload,))):
            raise ValueError("a wrong MAC")
        return payload

    def _tag(self, payload: Iterable[Buffer]) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()  # as in `Hmac.digest`, without a call of it
        inner.update(self._count.to_bytes(8, "big"))
        self._count += 1
        for part in payload:
            inner.update(part)
        outer.update(inner.digest())
        return outer.digest()[:TAG]


class Tunnel(Protocol):
    """TLS without a socket, which turns bytes into bytes; see `ftcomm.control.tls`."""

    def encrypt(self, data: Buffer) -> bytes: ...

    def decrypt(self) -> Generator[int, Buffer, bytes]:
        """Yields how many bytes of the connection it needs; returns some plain bytes. Raises `ValueError` on bytes that
        the other side did not send."""
        ...


class Channel:
    """A connected socket past its handshake, which it owns. The calls do what they do on a socket, also with a timeout
    or without blocking, with one difference: bytes that `send` has taken may still be `unsent`, and bytes that have
    come may be `pending`. One thread at a time may send, and another one receive."""

    def __init__(
        self, sock: socket.socket, keys: Keys, tunnel: Tunnel | None = None, *, seals: tuple[Seal, Seal] | None = None
    ) -> None:
        """`seals` are one for sending and one for receiving; None: a MAC."""
        self._sock, self.keys, self._tunnel = sock, keys, tunnel
        self._detached = False
        if seals is None:
            mine, theirs = keys.both("mac")
            seals = Mac(mine), Mac(theirs)
        self._outgoing, self._incoming = seals
        self._plain = bytearray()  # has come through the tunnel, not yet part of a record
        self._unsent = memoryview(b"")
        self._rest = memoryview(b"")  # the rest of the newest payload
        self._record: Incoming | None = None  # the record on its way
        self._wanted = memoryview(b"")  # where the next bytes of it go
        self._got = 0  # how many of them have come
        self._begun = False  # whether a record has begun
        self._early = bytearray()  # by callbacks: what has come of the record on its way
        self._needed = 0  # the bytes of its next part

    # -- what a socket has -------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket. Does nothing once that is detached: another one owns it, who may have bytes to send."""
        if not self._detached:
            self._sock.close()

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self._sock.setsockopt(level, name, value)

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        return self._sock.getsockopt(level, name, size)

    def getpeername(self) -> tuple[str, int]:
        host, port = self._sock.getpeername()[:2]
        return host, port

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def send(self, data: Buffer, flags: int = 0) -> int:
        return self.sendmsg((data,), (), flags)

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[self.send(left, flags) :]
        if not self.flush(flags):
            raise BlockingIOError(errno.EAGAIN, "no room for the end of it")

    def sendmsg(self, buffers: Iterable[Buffer], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        """Returns how many bytes it has taken, a record at most. They may be overwritten, and go out now or by
        `flush`."""
        if not self.flush(flags):
            raise BlockingIOError(errno.EAGAIN, "no room")
        parts: list[Buffer] = []
        nbytes = 0
        for buffer in buffers:
            part = memoryview(buffer).cast("B")[: RECORD - nbytes]
            parts.append(part)
            nbytes += len(part)
            if nbytes == RECORD:
                break
        if not nbytes:
            return 0
        self._unsent = memoryview(self._sealed(parts, nbytes))
        self.flush(flags)
        return nbytes

    def recv(self, most: int) -> bytes:
        if not self._rest:
            self._receive()
        data = bytes(self._rest[:most])
        self._rest = self._rest[most:]
        return data

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        return self._fill(memoryview(buffer).cast("B"))

    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview]) -> tuple[int]:
        """Returns only the number of bytes, where a socket returns more."""
        received = 0
        for buffer in buffers:
            into = memoryview(buffer).cast("B")
            while into and (self._rest or not received):
                count = self._fill(into)
                if not count:
                    return (received,)
                received += count
                into = into[count:]
        return (received,)

    # -- what it has besides -----------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether received bytes are there to be taken. A wait for the socket would then miss them."""
        return bool(self._rest)

    @property
    def unsent(self) -> bool:
        """Whether bytes wait for room in the socket: wait for that, and `flush`."""
        return bool(self._unsent)

    def flush(self, flags: int = 0) -> bool:
        """Send what is `unsent`; False if some still is. Raises `OSError`."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent, flags | socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            return False
        return True

    def detach(self) -> socket.socket:
        """Returns the socket alone, for bytes that need no MAC; the caller owns it. To be called before anything
        else."""
        self._detached = True
        return self._sock

    def resealed(self, seals: tuple[Seal, Seal]) -> Channel:
        """Returns the same connection with other seals and without the tunnel. To be called before anything else."""
        return Channel(self._sock, self.keys, seals=seals)

    # -- by callbacks ------------------------------------------------------------------------------------------------

    def record(self, payload: bytes) -> bytes:
        """Returns the bytes to send for one message of any length, after all earlier ones."""
        return bytes(self._sealed((payload,), len(payload)))

    def arrived(self, data: bytes, longest: int) -> Iterator[bytes]:
        """Yields the messages that are whole with `data`, the bytes that have come next. Raises `BadRecord`. A caller
        that does not take all of them needs no more of the connection."""
        return self._plainly(data, longest) if self._tunnel is None else self._tunnelled(data, longest)

    def _plainly(self, data: bytes, longest: int) -> Iterator[bytes]:
        """Does what `arrived` does without the steps of `_next`: a leader takes in records of thousands of ranks."""
        come: bytes | bytearray = data
        if self._early:
            self._early += data
            come = self._early
        at, size = 0, len(come)
        while size - at >= _LENGTH:
            begin = at + _LENGTH
            length = int.from_bytes(come[at:begin], "big")
            if length > longest:
                raise self._too_long(length, longest)
            end = begin + length + TAG
            if end > size:
                break
            at = end
            yield bytes(self._opened(memoryview(bytes(come[begin:end]))))
        if come is not data:
            del self._early[:at]
        elif at < size:
            self._early += data[at:]

    def _tunnelled(self, data: bytes, longest: int) -> Iterator[bytes]:
        self._early += data
        at = 0
        while True:
            try:
                if self._record is None:
                    self._record = self._next(longest)
                    self._needed = next(self._record)
                while at + self._needed <= len(self._early):
                    at += self._needed
                    self._needed = self._record.send(self._early[at - self._needed : at])
                break
            except StopIteration as stop:
                self._record = None
                yield bytes(stop.value)
        del self._early[:at]

    # -- records -----------------------------------------------------------------------------------------------------

    def _sealed(self, parts: Sequence[Buffer], nbytes: int) -> Buffer:
        record = self._outgoing.seal(parts, nbytes)
        return record if self._tunnel is None else self._tunnel.encrypt(record)

    def _fill(self, into: memoryview) -> int:
        if not self._rest:
            self._receive()
        count = min(len(into), len(self._rest))
        into[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _receive(self) -> None:
        """Returns the payload of the next record; nothing at the end. A call that is interrupted, by a timeout or since
        no more has come, is continued by the next one."""
        while not self._rest:
            if self._record is None:
                self._record = self._next(RECORD)
                self._want(next(self._record))
            while self._got < len(self._wanted):
                count = self._sock.recv_into(self._wanted[self._got :])
                if not count and self._begun:
                    raise ConnectionError("closed by the other side in the middle of a record")
                if not count:
                    return
                self._got += count
                self._begun = True
            try:
                self._want(self._record.send(self._wanted))
            except StopIteration as stop:
                if stop.value is None:  # after a `BadRecord` nothing counts any more
                    raise BadRecord("the connection has ended with a record that was not the other side's") from None
                self._record, self._rest, self._begun = None, stop.value, False

    def _want(self, count: int) -> None:
        self._wanted, self._got = memoryview(bytearray(count)), 0

    def _next(self, longest: int) -> Incoming:
        length = int.from_bytes((yield from self._take(_LENGTH)), "big")
        if length > longest:
            raise self._too_long(length, longest)
        return self._opened(memoryview((yield from self._take(length + TAG))))

    def _opened(self, sealed: memoryview) -> memoryview:
        try:
            return self._incoming.open(sealed)
        except ValueError as error:
            text = f"a record with {error}: something on the way has changed, repeated or left out bytes"
            raise self._bad("mac", text) from None

    def _take(self, count: int) -> Generator[int, Buffer, Buffer]:
        """Takes `count` bytes from below the records."""
        if self._tunnel is None:
            return (yield count)
        while len(self._plain) < count:
            try:
                self._plain += yield from self._tunnel.decrypt()
            except ValueError as error:
                raise self._bad("mac", f"bytes that are not the other side's ({error})") from None
        taken = bytes(self._plain[:count])
        del self._plain[:count]
        return taken

    def _too_long(self, length: int, longest: int) -> BadRecord:
        return self._bad("frame", f"a record of {length} bytes, at most {longest} are allowed here")

    def _bad(self, kind: DropKind, text: str) -> BadRecord:
        with contextlib.suppress(OSError):
            text += f"; the connection with {self._sock.getpeername()} is closed"
        drop(kind, text)
        return BadRecord(text)


Connection = socket.socket | Channel  # a plain socket for data that need no MAC, or in a test


def pending(connection: Connection) -> bool:
    """See `Channel.pending`."""
    return isinstance(connection, Channel) and connection.pending


def unsent(connection: Connection) -> bool:
    """See `Channel.unsent`."""
    return isinstance(connection, Channel) and connection.unsent


def flush(connection: Connection) -> bool:
    """See `Channel.flush`."""
    return not isinstance(connection, Channel) or connection.flush()
