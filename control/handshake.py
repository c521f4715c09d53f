"""The handshake that opens every connection of ftcomm, as steps that know no socket; `wire` carries them out.

    client                                         server
      ... TLS, if the job has certificates (ftcomm.control.tls) ...
      Opening(version, purpose, fields, nonce,  ---->
              job, to)
                                                <----   Challenge(version, nonce, refused)
      HMAC(token, both nonces, opening), filler ---->
                                                <----   Accepted(HMAC(token, both nonces), refused, filler)
      ... records with a MAC in both directions (ftcomm.control.sealed) ...

The filler is longer than a packet. A path that silently loses long packets (a tunnel, jumbo frames on one side) would
work until there are data to move; with the filler the handshake fails there, and says why.

Both sides prove that they hold the job's token, and neither sends it. Each contributes a nonce, so that a recorded
handshake proves nothing later. A nonce has exactly 16 bytes, so that no part of what is signed can be taken for another
one. With TLS the hash of the server's certificate is signed as well, so that the signature is of no use on another
connection. Both derive the key of the connection from the same parts, and never send it.

The opening names the job, since two jobs may have one token, and the process that the client wants, since an address
may be out of date and another process listen there. A refusal for one of these reasons is signed, by a process that
listens where the client has dialled. It proves that the wanted process has ended only if the sender has the very port
of that process, in the same network namespace of the same kernel. A client that was led to another process, by an
attacker or by an address that two hosts have, learns nothing about the wanted one. All other refusals come without a
proof, since an attacker on the path could send them.

All of it goes in the frames of `ftcomm.control.framing`. None from an unauthenticated peer may be longer than
`MAX_HANDSHAKE`.
"""

from __future__ import annotations

import dataclasses
import functools
import hmac
import ipaddress
import os
import shlex
import ssl
from collections.abc import Callable, Generator, Mapping, Set
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ftcomm.control.decode import decode_with
from ftcomm.control.dropped import DropKind, printable
from ftcomm.control.framing import LENGTH, cut, framed, missing
from ftcomm.control.liveness import ports
from ftcomm.control.sealed import Hmac, Keys
from ftcomm.control.tls import NoTls, Session, Tls, is_hello
from ftcomm.control.views import Address

VERSION = 17
MAX_HANDSHAKE = 4096  # bytes
AT_ONCE = LENGTH + MAX_HANDSHAKE  # bytes that a server may receive at once: the client goes on when it is answered
NONCE = 16  # bytes
FILLER = 3600  # bytes
MOST = (1 << 31) - 1  # of a number in an opening
LONGEST_FIELD = 700  # characters of a text in an opening; of four bytes each they leave room for the rest

Fields = dict[str, "str | int"]


@dataclasses.dataclass(frozen=True)
class Credentials:
    """The proof that a process belongs to a job. It is the same for all of them except the certificate."""

    token: str = dataclasses.field(repr=False)
    job: str = ""  # the name of the job; a token may serve several jobs
    tls: Tls | None = dataclasses.field(default=None, repr=False)
    called: Mapping[str, str] = dataclasses.field(
        default_factory=dict, hash=False
    )  # purpose -> its peers' name of the job

    def __post_init__(self) -> None:
        """Raises `ValueError` if the token is not text: bytes of the environment that are no UTF-8."""
        if any("\ud800" <= character <= "\udfff" for character in self.token):  # an error of `encode` would show it
            raise ValueError("the token (FTCOMM_TOKEN) is no text in UTF-8; make one with: openssl rand -hex 16")


class HandshakeError(ConnectionError):
    """The other side refused, or is not what it should be; the message says which, and the mend.

    `kind` is what a server counts it as when it drops the connection.
    """

    def __init__(self, text: str, kind: DropKind = "handshake") -> None:
        super().__init__(text)
        self.kind = kind


class HungUp(HandshakeError):
    """The other side has closed the connection during the handshake: its kernel lives, and more is not known."""


class SilentHangUp(HungUp):
    """The other side closed before it had said anything, as a client does that only tests whether a port is open."""


class Refused(HandshakeError):
    """A server that holds the token refuses, so that trying again is of no use. Any other refusal may be forged, or
    come from a process that will be replaced."""


class ProcessReplaced(HandshakeError):
    """A process that holds the token has the very port of the wanted one. So the wanted one has ended: it would still
    hold the port."""


class BadFields(HandshakeError):
    """The fields of an opening are not those that its purpose needs."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "fields")


Nonce = Annotated[bytes, Meta(min_length=NONCE, max_length=NONCE)]
MacField = Annotated[bytes, Meta(max_length=32)]
Filler = Annotated[bytes, Meta(max_length=FILLER)]
Short = Annotated[str, Meta(max_length=256)]


class FirstFrame(msgspec.Struct, frozen=True):
    """The common part of the first frame of either side, in every version. It is looked at before the rest."""

    version: int


class Opening(FirstFrame, frozen=True):
    purpose: Short
    fields: Annotated[dict[Short, Annotated[str, Meta(max_length=LONGEST_FIELD)] | int], Meta(max_length=16)]
    nonce: Nonce
    job: Short = ""
    to: Short = ""  # the nonce of the wanted process; "": any process that listens there
    ports: Short = ""  # `Address.ports` of the wanted process
    at: Short = ""  # the address that the client has dialled


class Challenge(FirstFrame, frozen=True):
    nonce: Nonce
    refused: str = ""


class Proof(msgspec.Struct, frozen=True):
    mac: MacField
    filler: Filler = b""


class Accepted(msgspec.Struct, frozen=True):
    mac: MacField
    refused: str = ""
    filler: Filler = b""
    elsewhere: bool = False  # refused, since another process is wanted


def number(fields: Mapping[str, Any], name: str, least: int = 0, most: int = MOST) -> int:
    """Returns the number in field `name` of an opening, from `least` to `most`. Raises `BadFields`."""
    value = fields.get(name)
    if not isinstance(value, int) or not least <= value <= most:
        raise BadFields(f"its field {name!r} is {value!r}, expected a number from {least} to {most}")
    return value


def text(fields: Mapping[str, Any], name: str) -> str:
    """Returns the text in field `name` of an opening. Raises `BadFields`."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise BadFields(f"its field {name!r} is {value!r}, expected a text")
    return value


# The handshake is a generator. It yields bytes to send, or None to be given the next frame; if none comes, a
# TimeoutError with the longest packet in bytes is thrown into it.
Steps = Generator["bytes | None", bytes, Any]
# The same on a connection: it yields bytes to send, or how many to receive next.
Wired = Generator["bytes | int", bytes, Any]

_FILLING = bytes(FILLER)
_encode = msgspec.msgpack.Encoder().encode
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in (FirstFrame, Opening, Challenge, Proof, Accepted)}


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return decode_with(_decoders[kind], data)
    except msgspec.DecodeError as error:
        raise HandshakeError(f"the other side does not speak ftcomm ({error}); is the port right?") from None


def _mac(token: str, use: bytes, *parts: bytes) -> bytes:
    """The MAC over `parts` for one `use`: "client", "server", "session", "refused" or "elsewhere". None of these begins
    with another one."""
    return _keyed(token).digest(use, *parts)


@functools.lru_cache(8)  # a process has one token, as a rule
def _keyed(token: str) -> Hmac:
    return Hmac(token.encode())


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
    """Returns the `Keys`. `binding` is what only the two ends of a connection within TLS share; `at` is the address
    that the connection leads to (`place`)."""
    token = credentials.token
    whom = ("", "") if to is None else (to.nonce, to.ports)
    opening = _encode(Opening(VERSION, purpose, fields, os.urandom(NONCE), credentials.job, *whom, at))
    yield opening
    raw = yield None
    if (other := _decode(raw, FirstFrame).version) != VERSION:
        raise HandshakeError(_version_text(other), "version")
    challenge = _decode(raw, Challenge)
    if challenge.refused:
        raise HandshakeError(printable(challenge.refused))
    signed = challenge.nonce, binding, opening
    yield _encode(Proof(_mac(token, b"client", *signed), _FILLING))
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
        use, kind = (b"elsewhere", ProcessReplaced) if accepted.elsewhere else (b"refused", Refused)
        proved = hmac.compare_digest(accepted.mac, _mac(token, use, *signed, accepted.refused.encode()))
        raise (kind if proved else HandshakeError)(printable(accepted.refused))
    if not hmac.compare_digest(accepted.mac, _mac(token, b"server", *signed)):
        raise HandshakeError("the server does not hold this job's token; is the address that of another job?", "token")
    return Keys(_mac(token, b"session", *signed), client=True)


def server_steps(credentials: Credentials, names: Set[str] = frozenset(), binding: bytes = b"", at: str = "") -> Steps:
    """Returns the peer's `Opening` and the `Keys`. `names` are the nonces in the addresses of who listens here, `at` is
    the address at which the connection has come in (`place`)."""
    token = credentials.token
    raw = yield None
    if (other := _decode(raw, FirstFrame).version) != VERSION:
        refused = _version_text(other)
        yield _encode(Challenge(VERSION, bytes(NONCE), refused))
        raise HandshakeError(refused, "version")
    opening = _decode(raw, Opening)
    nonce = os.urandom(NONCE)
    yield _encode(Challenge(VERSION, nonce))
    proof = _decode((yield None), Proof)
    signed = nonce, binding, raw
    if not hmac.compare_digest(proof.mac, _mac(token, b"client", *signed)):
        yield _encode(Accepted(b"", _BAD_TOKEN))
        raise HandshakeError(_BAD_TOKEN, "token")
    here = at != "" and opening.at == at  # otherwise the client has dialled another address
    if opening.to and opening.to not in names:
        if here and opening.ports == ports():
            mac = _mac(token, b"elsewhere", *signed, _ELSEWHERE.encode())
            yield _encode(Accepted(mac, _ELSEWHERE, elsewhere=True))
            raise HandshakeError("it wants another process, which has listened here before", "target")
        yield _encode(Accepted(b"", _LED_ASTRAY))
        raise HandshakeError(f"it wants another process, and has dialled {opening.at}, which leads to {at}", "target")
    job = credentials.called.get(opening.purpose, credentials.job)
    if opening.job != job:
        refused = _other_job(opening.job, job)
        yield _encode(Accepted(_mac(token, b"refused", *signed, refused.encode()) if here else b"", refused))
        raise HandshakeError(refused, "job")
    yield _encode(Accepted(_mac(token, b"server", *signed), filler=_FILLING))
    return opening, Keys(_mac(token, b"session", *signed), client=False)


def _other_job(its: str, ours: str) -> str:
    named = f"it is of the job {its!r}" if its else "it names no job"
    mend = f"export FTCOMM_JOB={shlex.quote(ours)}" if ours else "unset FTCOMM_JOB"
    return (
        f"{named}, expected {ours!r}. If it belongs to this job: {mend}. Otherwise it has the address of another job; "
        "let jobs have tokens of their own"
    )


def place(address: Callable[[], Any]) -> str:
    """Returns what `getpeername` or `getsockname` says, in the same form at both ends of a connection; "" if
    nothing."""
    try:
        name, port = address()[:2]
        return f"{_plain(name)} {port}"
    except (OSError, ValueError):  # reset by now, or not a network connection
        return ""


@functools.lru_cache(256)  # thousands of connections come in at one address
def _plain(name: str) -> str:
    host = ipaddress.ip_address(name.partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host)


def client(
    credentials: Credentials, purpose: str, fields: dict[str, str | int], to: Address | None = None, at: str = ""
) -> Wired:
    """Returns the `Keys`, and the TLS of the connection, or None. `at` is the `place` that it leads to."""
    if credentials.tls is None:
        return (yield from _framed(client_steps(credentials, purpose, fields, to, at=at))), None
    session = credentials.tls.client()
    yield from _begin(session, "the other side does not speak TLS, this one does", "the server's")
    return (yield from _framed(client_steps(credentials, purpose, fields, to, session.binding, at), session)), session


def server(credentials: Credentials, names: Set[str] = frozenset(), at: str = "") -> Wired:
    """Returns the peer's `Opening`, the `Keys`, and the TLS of the connection, or None. `at` is the `place` at which it
    has come in."""
    first = yield LENGTH
    if is_hello(first) and credentials.tls is None:
        # Closing with unread bytes would reset the connection, and take the answer back.
        yield int.from_bytes(first[3:] + (yield 1), "big")
        yield _refusal("TLS is not spoken here")
        raise HandshakeError(f"it speaks TLS, and this process does not; {_BOTH}", "tls")
    if not is_hello(first) and credentials.tls is not None:
        yield _missing(first)
        yield _refusal("only TLS is spoken here")
        raise HandshakeError(f"it does not speak TLS, and this process does; {_BOTH}", "tls")
    if credentials.tls is None:
        return *(yield from _framed(server_steps(credentials, names, at=at), first=first)), None
    session = credentials.tls.server()
    yield from _begin(session, "it does not speak TLS", "its", first)
    return *(yield from _framed(server_steps(credentials, names, session.binding, at), session)), session


def _begin(session: Session, unspoken: str, whose: str, first: bytes = b"") -> Generator[bytes | int, bytes, None]:
    """Begins TLS. What fails is said as a `HandshakeError`: `unspoken`, or that a certificate, `whose`, is not good."""
    try:
        yield from session.handshake(first)
    except NoTls:
        raise HandshakeError(f"{unspoken}; {_BOTH}", "tls") from None
    except ssl.SSLCertVerificationError as error:
        raise HandshakeError(f"{whose} certificate is not good: {error.verify_message}; {_VALID}", "tls") from None
    except ssl.SSLError as error:
        raise HandshakeError(f"TLS: {error.reason}", "tls") from None


def _refusal(why: str) -> bytes:
    return framed(_encode(Challenge(VERSION, bytes(NONCE), f"{why}; {_BOTH}")))


_BOTH = "set FTCOMM_TLS_CERT and FTCOMM_TLS_KEY on all processes of the job, or on none"
_VALID = "FTCOMM_TLS_CA on all processes has to name who has signed all certificates, which have to be valid now"


def _framed(steps: Steps, session: Session | None = None, first: bytes = b"") -> Wired:
    """Runs `steps` in frames, within TLS if there is a session. `first` are bytes that were received already."""
    if session is None:
        return (yield from _plainly_framed(steps, first))
    plain = bytearray(first)
    received: bytes | None = None
    while True:
        try:
            data = steps.send(received) if received is not None else next(steps)
        except StopIteration as stop:
            return stop.value
        received = None
        if data is not None:
            yield session.encrypt(framed(data))
            continue
        while _missing(plain):
            try:
                plain += yield from _decrypted(session)
            except TimeoutError as late:
                steps.throw(late)  # the steps know the error to raise
                raise
        received = bytes(cut(plain, MAX_HANDSHAKE) or b"")


def _plainly_framed(steps: Steps, head: bytes) -> Wired:
    """Does what `_framed` does without TLS. `head` is the first one, if it was received already."""
    data = next(steps)
    while True:
        try:
            while data is not None:
                yield framed(data)
                data = next(steps)
            try:
                head = head or (yield LENGTH)
                received = yield _missing(head)
            except TimeoutError as late:
                steps.throw(late)  # the steps know the error to raise
                raise
            head = b""
            data = steps.send(received)
        except StopIteration as stop:
            return stop.value


def _decrypted(session: Session) -> Generator[int, bytes, bytes]:
    try:
        return (yield from session.decrypt())
    except ValueError as error:  # an alert: a client of TLS 1.3 hears late of a bad certificate
        raise HandshakeError(f"the other side has ended it by {error}; {_VALID}", "tls") from None


def _version_text(other: int) -> str:
    return f"protocol version {other}, expected {VERSION}; install the same ftcomm on every host of the job"


def _missing(received: bytes | bytearray) -> int:
    """Returns how many bytes the first frame lacks. Raises `HandshakeError` if it is too long."""
    try:
        return missing(received, MAX_HANDSHAKE)
    except msgspec.DecodeError as error:
        raise HandshakeError(f"{error}; is the port right?") from None
