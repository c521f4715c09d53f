"""The handshake that opens every connection of ftcomm, over blocking sockets and in asyncio.

    client                                            server
      ... TLS, if the job has certificates (ftcomm.control.tls) ...
      Opening(version, purpose, fields, nonce,  ---->
              job, to)
                                                <----   Challenge(version, nonce, refused)
      HMAC(token, both nonces, opening), filler ---->
                                                <----   Accepted(HMAC(token, both nonces), refused, filler)
      ... records with a MAC in both directions (ftcomm.control.sealed) ...

The filler is longer than a packet. On a way that loses long packets without a word (a tunnel, jumbo frames on one side)
everything would work until there are data to move; so the handshake fails there, and says why.

Both sides prove that they hold the job's token and neither sends it. Each contributes a nonce, so that a recorded
handshake proves nothing a second time; a nonce has exactly 16 bytes, so that no part of what is signed can be taken for
another. With TLS the hash of the server's certificate is signed as well, so that what is signed is of no use on another
connection. From the same parts both derive the key of what follows, and nothing of it goes over the connection.

The opening names the job, as two of them may have one token, and whom it wants: an address may be out of date, and
another process listen there by now. A refusal for one of these is signed as well, by a process that listens where the
client has dialled. Only one that has the very port of whom it wants, in the same network namespace of the same kernel,
proves that this one has ended. Who was led to another process, by somebody on the way or by an address that two hosts
have, has learned nothing of the one that it wants. All other refusals come without a proof: anybody on the way could
have said them.

A frame is a 4-byte big-endian length and that many bytes of msgpack. Nothing from an unauthenticated peer may be longer
than `MAX_HANDSHAKE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import secrets
import select
import socket
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ftcomm.control.decode import decode_with
from ftcomm.control.dropped import Kind, drop, printable
from ftcomm.control.fork import apart
from ftcomm.control.liveness import ports, unanswered
from ftcomm.control.sealed import Channel, Connection, Keys
from ftcomm.control.tls import NoTls, Session, Tls, is_hello
from ftcomm.control.views import Address
from ftcomm.control.wait_for import wait_for

VERSION = 6
MAX_HANDSHAKE = 4096  # bytes
MAX_MESSAGE = 16 << 20  # bytes of a frame of the control plane; a longer one is refused before it is read
MAX_UNSENT = 64 << 20  # bytes that wait for a peer that does not read, before it is given up
NONCE = 16  # bytes
FILLER = 3600  # bytes
KERNEL = 5.0  # s for a kernel to answer, and for a process that has begun to; see `connect`
_LOOK = 0.5  # s between two looks whether it still does

_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

Fields = dict[str, "str | int"]


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What a process of a job proves itself with, the same for all of them but for the certificate."""

    token: str = dataclasses.field(repr=False)
    job: str = ""  # its name; another one with the same token is another job
    tls: Tls | None = dataclasses.field(default=None, repr=False)


class HandshakeError(ConnectionError):
    """The other side refused, or is not what it should be; the message says which, and the mend.

    `kind` is what it counts as at a server that drops the connection for it.
    """

    def __init__(self, text: str, kind: Kind = "handshake") -> None:
        super().__init__(text)
        self.kind = kind


class Unspoken(HandshakeError):
    """The other side hung up before it had said anything, as who only looks whether somebody listens here does."""


class Refused(HandshakeError):
    """The server holds the token and says no: trying again is no use. Any other refusal may be forged, or be that of a
    process that will be replaced."""


class Elsewhere(HandshakeError):
    """A process that holds the token has the very port of the one that was wanted: that one has ended, as it would hold
    it."""


class BadFields(HandshakeError):
    """The fields of an opening are not those that its purpose needs."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "fields")


Nonce = Annotated[bytes, Meta(min_length=NONCE, max_length=NONCE)]
Mac = Annotated[bytes, Meta(max_length=32)]
Filler = Annotated[bytes, Meta(max_length=FILLER)]
Word = Annotated[str, Meta(max_length=256)]


class Spoken(msgspec.Struct, frozen=True):
    """What the first frame of either side has in every version, and is looked at before the rest."""

    version: int


class Opening(Spoken, frozen=True):
    purpose: Word
    fields: Annotated[dict[Word, Word | int], Meta(max_length=16)]
    nonce: Nonce
    job: Word = ""
    to: Word = ""  # the nonce in the address of whom it wants; "": whoever listens there
    ports: Word = ""  # `Address.ports` of whom it wants
    at: Word = ""  # where the connection leads, as the client knows it


class Challenge(Spoken, frozen=True):
    nonce: Nonce
    refused: str = ""


class Proof(msgspec.Struct, frozen=True):
    mac: Mac
    filler: Filler = b""


class Accepted(msgspec.Struct, frozen=True):
    mac: Mac
    refused: str = ""
    filler: Filler = b""
    elsewhere: bool = False  # refused, as it is another one that is wanted


def number(fields: Mapping[str, Any], name: str, least: int = 0, most: int = (1 << 31) - 1) -> int:
    """The field `name` of an opening, from `least` to `most`. Raises `BadFields`."""
    value = fields.get(name)
    if not isinstance(value, int) or not least <= value <= most:
        raise BadFields(f"its field {name!r} is {value!r}, expected a number from {least} to {most}")
    return value


def text(fields: Mapping[str, Any], name: str) -> str:
    """The field `name` of an opening. Raises `BadFields`."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise BadFields(f"its field {name!r} is {value!r}, expected a text")
    return value


# The handshake is a generator that yields what to send (bytes) or None to be sent the next frame it receives, or to be
# thrown a TimeoutError, with the longest packet in bytes, if there is none.
Steps = Generator["bytes | None", bytes, Any]
# And what that is on a connection: bytes to send, or how many to receive next.
Wired = Generator["bytes | int", bytes, Any]

_encode = msgspec.msgpack.encode
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in (Spoken, Opening, Challenge, Proof, Accepted)}


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return decode_with(_decoders[kind], data)
    except msgspec.DecodeError as error:
        raise HandshakeError(f"the other side does not speak ftcomm ({error}); is the port right?") from None


def _mac(token: str, use: bytes, *parts: bytes) -> bytes:
    """`use` is "client", "server", "session", "refused" or "elsewhere", none of which begins with another one."""
    return hmac.digest(token.encode(), use + b"".join(parts), "sha256")


_ELSEWHERE = "another process listens there now than the one of that address"
_LED_ASTRAY = "this is another process than the one of that address, which may live"
_BAD_TOKEN = "wrong token; give every process of the job the same FTCOMM_TOKEN as its coordinator"


def client_steps(
    credentials: Credentials,
    purpose: str,
    fields: dict[str, str | int],
    to: Address | None = None,
    binding: bytes = b"",
    at: str = "",
) -> Steps:
    """Returns the `Keys`. `binding` is what only the two ends of a connection within TLS have in common, `at` the
    address that the connection leads to (`place`)."""
    token = credentials.token
    whom = ("", "") if to is None else (to.nonce, to.ports)
    opening = _encode(Opening(VERSION, purpose, fields, secrets.token_bytes(NONCE), credentials.job, *whom, at))
    yield opening
    raw = yield None
    if (other := _decode(raw, Spoken).version) != VERSION:
        raise HandshakeError(_version_text(other), "version")
    challenge = _decode(raw, Challenge)
    if challenge.refused:
        raise HandshakeError(printable(challenge.refused))
    signed = challenge.nonce, binding, opening
    yield _encode(Proof(_mac(token, b"client", *signed), bytes(FILLER)))
    try:
        raw = yield None
    except TimeoutError as late:
        raise HandshakeError(
            f"it answers short messages, and not one of {FILLER} bytes in time. Unless that host is very busy, long "
            f"packets get lost on the way; those from here carry {late.args[0]} bytes. Set the MTU of all hosts to "
            "what the network carries, as in: ip link set eth0 mtu 1400"
        ) from None
    accepted = _decode(raw, Accepted)
    if accepted.refused:
        use, kind = (b"elsewhere", Elsewhere) if accepted.elsewhere else (b"refused", Refused)
        proved = hmac.compare_digest(accepted.mac, _mac(token, use, *signed, accepted.refused.encode()))
        raise (kind if proved else HandshakeError)(printable(accepted.refused))
    if not hmac.compare_digest(accepted.mac, _mac(token, b"server", *signed)):
        raise HandshakeError("the server does not hold this job's token; is the address that of another job?", "token")
    return Keys(_mac(token, b"session", *signed), client=True)


def server_steps(credentials: Credentials, name: str = "", binding: bytes = b"", at: str = "") -> Steps:
    """Returns the peer's `Opening` and the `Keys`. `name` is the nonce in the address of this process, `at` the address
    at which the connection has come in (`place`)."""
    token = credentials.token
    raw = yield None
    if (other := _decode(raw, Spoken).version) != VERSION:
        refused = _version_text(other)
        yield _encode(Challenge(VERSION, bytes(NONCE), refused))
        raise HandshakeError(refused, "version")
    opening = _decode(raw, Opening)
    nonce = secrets.token_bytes(NONCE)
    yield _encode(Challenge(VERSION, nonce))
    proof = _decode((yield None), Proof)
    signed = nonce, binding, raw
    if not hmac.compare_digest(proof.mac, _mac(token, b"client", *signed)):
        yield _encode(Accepted(b"", _BAD_TOKEN))
        raise HandshakeError(_BAD_TOKEN, "token")
    here = at != "" and opening.at == at  # what the client has dialled; else it was led here
    if opening.to not in ("", name):
        if here and opening.ports == ports():
            mac = _mac(token, b"elsewhere", *signed, _ELSEWHERE.encode())
            yield _encode(Accepted(mac, _ELSEWHERE, elsewhere=True))
            raise HandshakeError("it wants another process, which has listened here before", "target")
        yield _encode(Accepted(b"", _LED_ASTRAY))
        raise HandshakeError(f"it wants another process, and has dialled {opening.at}, which leads to {at}", "target")
    if opening.job != credentials.job:
        refused = (
            f"it is of the job {opening.job!r}, expected {credentials.job!r}; set FTCOMM_JOB to the same on all of a "
            "job, and let jobs have tokens of their own"
        )
        yield _encode(Accepted(_mac(token, b"refused", *signed, refused.encode()) if here else b"", refused))
        raise HandshakeError(refused, "job")
    yield _encode(Accepted(_mac(token, b"server", *signed), filler=bytes(FILLER)))
    return opening, Keys(_mac(token, b"session", *signed), client=False)


def place(address: Callable[[], Any]) -> str:
    """What a socket's `getpeername` or `getsockname` says, in one form at both ends of a connection; "" if nothing."""
    try:
        name, port = address()[:2]
        host = ipaddress.ip_address(name.partition("%")[0])
    except (OSError, ValueError):  # reset by now, or no connection of a network
        return ""
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return f"{mapped or host} {port}"


def client(
    credentials: Credentials, purpose: str, fields: dict[str, str | int], to: Address | None = None, at: str = ""
) -> Wired:
    """Returns the `Keys`, and the TLS of the connection, or None. `at` is the `place` that it leads to."""
    if credentials.tls is None:
        return (yield from _framed(client_steps(credentials, purpose, fields, to, at=at))), None
    session = credentials.tls.client()
    try:
        yield from session.handshake()
    except NoTls:
        raise HandshakeError(f"the other side does not speak TLS, this one does; {_BOTH}", "tls") from None
    except ssl.SSLCertVerificationError as error:
        raise HandshakeError(f"the server's certificate is not good: {error.verify_message}; {_VALID}", "tls") from None
    except ssl.SSLError as error:
        raise HandshakeError(f"TLS: {error.reason}", "tls") from None
    return (yield from _framed(client_steps(credentials, purpose, fields, to, session.binding, at), session)), session


def server(credentials: Credentials, name: str = "", at: str = "") -> Wired:
    """Returns the peer's `Opening`, the `Keys`, and the TLS of the connection, or None. `at` is the `place` at which it
    has come in."""
    first = yield _LENGTH
    if is_hello(first) and credentials.tls is None:
        yield int.from_bytes(first[3:] + (yield 1), "big")  # who hangs up on something unread takes back his answer
        yield _refusal("TLS is not spoken here")
        raise HandshakeError(f"it speaks TLS, and this process does not; {_BOTH}", "tls")
    if not is_hello(first) and credentials.tls is not None:
        yield _length(first, MAX_HANDSHAKE)
        yield _refusal("only TLS is spoken here")
        raise HandshakeError(f"it does not speak TLS, and this process does; {_BOTH}", "tls")
    if credentials.tls is None:
        return *(yield from _framed(server_steps(credentials, name, at=at), first=first)), None
    session = credentials.tls.server()
    try:
        yield from session.handshake(first)
    except NoTls:
        raise HandshakeError(f"it does not speak TLS; {_BOTH}", "tls") from None
    except ssl.SSLCertVerificationError as error:
        raise HandshakeError(f"its certificate is not good: {error.verify_message}; {_VALID}", "tls") from None
    except ssl.SSLError as error:
        raise HandshakeError(f"TLS: {error.reason}", "tls") from None
    return *(yield from _framed(server_steps(credentials, name, session.binding, at), session)), session


def _refusal(why: str) -> bytes:
    return _frame(_encode(Challenge(VERSION, bytes(NONCE), f"{why}; {_BOTH}")))


_BOTH = "set FTCOMM_TLS_CERT and FTCOMM_TLS_KEY on all processes of the job, or on none"
_VALID = "FTCOMM_TLS_CA on all processes has to name who has signed all certificates, which have to be valid now"
_LENGTH = 4  # bytes


def _framed(steps: Steps, session: Session | None = None, first: bytes = b"") -> Wired:
    """`steps` in frames, and these within TLS if there is a session. `first` of the connection was received already."""
    plain = first
    received: bytes | None = None
    while True:
        try:
            data = steps.send(received) if received is not None else next(steps)
        except StopIteration as stop:
            return stop.value
        received = None
        if data is not None:
            yield _frame(data) if session is None else session.encrypt(_frame(data))
            continue
        wanted = _LENGTH
        while received is None:
            while len(plain) < wanted:
                try:
                    plain += (yield wanted - len(plain)) if session is None else (yield from _decrypted(session))
                except TimeoutError as late:
                    steps.throw(late)  # it knows what to say
                    raise
            length = _length(plain[:_LENGTH], MAX_HANDSHAKE)
            wanted = _LENGTH + length
            if len(plain) >= wanted:
                received, plain = plain[_LENGTH:wanted], plain[wanted:]


def _decrypted(session: Session) -> Generator[int, bytes, bytes]:
    try:
        return (yield from session.decrypt())
    except ValueError as error:  # an alert: with TLS 1.3 a client hears late that its certificate is not good
        raise HandshakeError(f"the other side has ended it by {error}; {_VALID}", "tls") from None


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH, "big") + data


def _version_text(other: int) -> str:
    return f"protocol version {other}, expected {VERSION}; install the same ftcomm on every host of the job"


_THIN_LINEAR_TIMEOUTS, _RTO_MAX_MS = 16, 44  # <linux/tcp.h>
USER_TIMEOUT = 30_000  # ms


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a connection whose other end has vanished ends in seconds, not in a quarter of
    an hour.

    After an outage a heartbeat has to come through soon: TCP would wait twice as long before each further attempt, so
    a network that was away for half a heartbeat timeout would be away for all of it.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
    sock.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)
    with contextlib.suppress(OSError):  # Linux 6.15
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)


def for_bulk(sock: Connection, seconds: float = 0.0) -> None:
    """What is sent may lie there for so long (0: for ever) until the process at the other end reads it.

    The kernel ends a connection whose window is closed for as long as `tune` says, though the other one answers that it
    is: a few messages never fill it, but a stopped process that is sent gradients would be cut off. Who sends such data
    closes the connection when its peer is gone, which the control plane says.
    """
    with contextlib.suppress(OSError):  # not TCP
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * seconds))


def unreached(error: OSError) -> OSError:
    """Why there is no connection: `error`, in words if it says too little."""
    return ConnectionError(no_ports()) if error.errno == errno.EADDRNOTAVAIL else error


def no_ports() -> str:
    """Why the kernel has no port left, with the mend."""
    least, most = _PORTS.read_text().split()
    return (
        f"all ports that this host gives away by itself, {least} to {most}, are in use; end what holds them (ss -tan), "
        "or give more: sysctl -w net.ipv4.ip_local_port_range='10240 65535'"
    )


def late(steps: Wired, sock: socket.socket, timeout: float) -> HandshakeError:
    """Nothing more came on `sock`: how far the handshake had got tells why."""
    try:
        steps.throw(TimeoutError(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)))
    except HandshakeError as error:
        return error
    except (TimeoutError, StopIteration):
        pass
    return HandshakeError(f"no answer to the handshake within {timeout:g} s")


# -- blocking sockets --------------------------------------------------------------------------------------------


def connect(
    address: tuple[str, int],
    credentials: Credentials,
    purpose: str,
    fields: dict[str, str | int],
    timeout: float,
    to: Address | None = None,
) -> Channel:
    """An authenticated blocking connection, to the process at `to` if that is known. Raises `OSError` (`HandshakeError`
    if refused).

    `timeout` seconds are for the process at the other end, which may hold its interpreter or be stopped: call once and
    wait, since each call that is given up takes a place in its backlog until it goes on. Its kernel has `KERNEL` of
    them to answer, whatever the process does, and so has the process once it has begun to.
    """
    deadline = time.monotonic() + timeout
    patience = min(timeout, KERNEL)
    sock = _connected(address, patience)
    steps = client(credentials, purpose, fields, to, place(sock.getpeername))
    begun = False
    try:
        tune(sock)
        received: bytes | None = None
        while True:
            try:
                data = steps.send(received) if received is not None else next(steps)
            except StopIteration as stop:
                sock.settimeout(None)
                return Channel(sock, *stop.value)
            received = None
            if not isinstance(data, int):
                with contextlib.suppress(ConnectionError):  # what was sent before the end may say why it ended
                    sock.sendall(data)
                continue
            if not begun:
                _first_word(sock, deadline, patience)
                begun, deadline = True, time.monotonic() + patience
            received = _recv_exactly(sock, data, deadline)
    except TimeoutError:
        why = late(steps, sock, timeout)
        sock.close()
        raise why from None
    except BaseException:
        sock.close()
        raise


def _connected(address: tuple[str, int], timeout: float) -> socket.socket:
    """Before its handshake. Raises `OSError`. No child that is forked meanwhile has the connection."""
    failed: OSError | None = None
    for family, kind, _, _, there in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        try:
            sock = apart(socket.socket(family, kind))
        except OSError as error:  # a family that this kernel has not
            failed = unreached(error)
            continue
        try:
            sock.settimeout(timeout)
            sock.connect(there)
            return sock
        except OSError as error:
            sock.close()
            failed = unreached(error)
    assert failed is not None  # getaddrinfo returns one address or raises
    raise failed


def _first_word(sock: socket.socket, deadline: float, patience: float) -> None:
    """Wait for it. Raises `TimeoutError` at the deadline, or after `patience` seconds without an answer of the kernel
    there."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not poll.poll(1e3 * max(0.0, min(_LOOK, deadline - time.monotonic()))):
        if time.monotonic() >= deadline or (unanswered(sock) or 0.0) > patience:
            raise TimeoutError


def _recv_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """`deadline` is for all of it: a byte now and then is no progress."""
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        part = sock.recv(count - len(data))
        if not part:
            raise HandshakeError("the connection was closed during the handshake")
        data += part
    return data


def _length(header: bytes, limit: int) -> int:
    length = int.from_bytes(header, "big")
    if length > limit:
        raise HandshakeError(f"a frame of {length} bytes, at most {limit} are allowed here; is the port right?")
    return length


# -- asyncio -----------------------------------------------------------------------------------------------------


async def handshake(
    sock: socket.socket, steps: Wired, timeout: float, on_mute: Callable[[], None] | None = None
) -> Any:
    """Drive either side over a non-blocking socket; closes nothing. Raises `OSError` (incl. on timeout).

    With `on_mute` the process at the other end may take for its first word as long as its kernel answers, as in
    `connect`: this is called whenever another `timeout` seconds have passed so.
    """
    try:
        data = None if on_mute is None else await _answer(sock, steps, timeout, on_mute)
        return await wait_for(timeout, _drive(sock, steps, data))
    except (asyncio.TimeoutError, TimeoutError):
        raise late(steps, sock, timeout) from None


async def _answer(sock: socket.socket, steps: Wired, timeout: float, on_mute: Callable[[], None]) -> int:
    """Say what a client says first, and wait for the answer; returns how many bytes of it are wanted next."""
    loop = asyncio.get_running_loop()
    data = next(steps)
    while not isinstance(data, int):
        await loop.sock_sendall(sock, data)
        data = next(steps)
    spoken = asyncio.Event()
    loop.add_reader(sock, spoken.set)
    try:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_for(timeout, spoken.wait())
                return data
            if (unanswered(sock) or 0.0) > timeout:
                raise TimeoutError
            on_mute()
    finally:
        loop.remove_reader(sock)


async def _drive(sock: socket.socket, steps: Wired, data: bytes | int | None = None) -> Any:
    """`data` is what comes first, if the steps have been asked already."""
    loop = asyncio.get_running_loop()
    received: bytes | None = None
    closed: type[HandshakeError] = Unspoken
    while True:
        if data is None:
            try:
                data = steps.send(received) if received is not None else next(steps)
            except StopIteration as stop:
                return stop.value
        received = None
        if isinstance(data, int):
            received = await _receive(loop, sock, data, closed)
            closed = HandshakeError
        else:
            with contextlib.suppress(ConnectionError):  # what was sent before the end may say why it ended
                await loop.sock_sendall(sock, data)
        data = None


async def _receive(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int, closed: type[HandshakeError]
) -> bytes:
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise (HandshakeError if data else closed)("the connection was closed during the handshake")
        data += part
    return data


class Writer:
    """The sending side of a `Channel` in asyncio. For one event loop."""

    def __init__(self, channel: Channel, stream: asyncio.StreamWriter) -> None:
        self._channel, self._stream = channel, stream

    def write(self, data: bytes) -> None:
        """Does not block: what the other side does not read is kept, up to `MAX_UNSENT`, then the connection is given
        up. A message above `MAX_MESSAGE` would cost the connection at the other end, and is not sent."""
        if len(data) > MAX_MESSAGE:
            drop("unsent", f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are allowed")
        elif self._stream.transport.get_write_buffer_size() > MAX_UNSENT:
            drop("unsent", f"gave up a connection whose other side has left more than {MAX_UNSENT} bytes unread")
            self._stream.transport.abort()
        elif not self._stream.is_closing():  # else it would count a record that nobody gets
            self._stream.write(self._channel.record(data))

    def unanswered(self) -> float | None:
        """Seconds for which the kernel at the other end has not answered, as `ftcomm.control.liveness` has it."""
        return unanswered(self._stream.get_extra_info("socket"))

    def close(self) -> None:
        """Flush what can be flushed, and end."""
        self._stream.close()
