"""TLS 1.3 by the standard library, from bytes to bytes: it has no socket, so it serves blocking ones and asyncio.

The job's token proves who is at the other end, not names in certificates: the hash of the server's certificate goes
into what both sides sign (see `handshake`). So an attacker on the path who presents another certificate gets past
neither side, a self-signed certificate will do, and addresses may change. With an authority (`ca`) both sides must also
present a certificate that it has signed and that is valid now.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import ssl
import threading
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from ftcomm.control.sealed import Buffer

log = logging.getLogger("ftcomm.control")

_HEAD = 5  # bytes in front of a record of TLS
_LONGEST = (1 << 14) + 256  # bytes of a record
_KINDS = range(20, 24)  # first bytes of a record
_HELLO = 22


class TlsError(ValueError):
    """The files cannot be used, or do not fit; the message names the file and the mend."""


class NoTls(ValueError):
    """The other side does not speak TLS."""


class Files(NamedTuple):
    """The paths of files in PEM; `ca` may be empty."""

    cert: str
    key: str
    ca: str = ""


class _Contexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext
    binding: bytes  # the hash of the own certificate


class Tls:
    """The certificate of this process, for connections in both directions. Thread-safe.

    Files that have changed are read again, so a certificate may be renewed while a job runs. Raises `TlsError` if they
    cannot be used now. Later the log says so, and the certificate that was read before remains in use.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._lock = threading.Lock()  # guards what follows
        self._changed = self._looked()
        self._contexts = _load(files)

    def client(self) -> Session:
        return Session(self._now().client, None)

    def server(self) -> Session:
        contexts = self._now()
        return Session(contexts.server, contexts.binding)

    def _now(self) -> _Contexts:
        with self._lock:
            changed = self._looked()
            if changed != self._changed:
                self._changed = changed
                try:
                    self._contexts = _load(self.files)
                except (TlsError, OSError) as error:  # OSError if a file goes while it is read
                    log.warning("%s; the certificate that was read before serves on", error)
            return self._contexts

    def _looked(self) -> list[int]:
        times = []
        for path in filter(None, self.files):
            with contextlib.suppress(OSError):
                times.append(os.stat(path).st_mtime_ns)
        return times


class Session:
    """TLS on one connection: first `handshake`, then `encrypt` and `decrypt`, each in one thread at a time."""

    def __init__(self, context: ssl.SSLContext, own: bytes | None) -> None:
        """Makes a server with the binding `own`, or a client if that is None."""
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=own is not None)
        self._lock = threading.Lock()  # encryption and decryption share a state
        self.binding = b"" if own is None else own  # a client has it after the handshake

    def handshake(self, first: bytes = b"") -> Generator[bytes | int, bytes, None]:
        """Yields bytes to send, or how many bytes to receive. `first` are bytes that were received already. Raises
        `NoTls` and `ssl.SSLError`, after it has yielded what the other side is to be told."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                if self._out.pending:
                    yield self._out.read()
                raise
            if self._out.pending:
                yield self._out.read()
            head = first + (yield _HEAD - len(first))
            first = b""
            self._in.write(head + (yield _length(head)))
        if self._out.pending:
            yield self._out.read()
        if not self.binding:
            self.binding = _hash(self._tls.getpeercert(binary_form=True) or b"")

    def encrypt(self, data: Buffer) -> bytes:
        left = memoryview(data)
        with self._lock:
            while left:
                left = left[self._tls.write(left) :]
            return self._out.read()

    def decrypt(self) -> Generator[int, Buffer, bytes]:
        """Returns the plain bytes of one TLS record, maybe none. Raises `ValueError` on a record of another
        connection."""
        head = bytes((yield _HEAD))
        record = head + bytes((yield _length(head)))
        with self._lock:
            self._in.write(record)
            plain = b""
            try:
                while part := self._tls.read(_LONGEST):
                    plain += part
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                raise ConnectionError("closed by the other side") from None
            except ssl.SSLError as error:
                raise ValueError(f"TLS: {_reason(error)}") from None
            return plain


def is_hello(first: bytes) -> bool:
    """Whether a connection that begins with these bytes, two or more, speaks TLS."""
    return first[0] == _HELLO and first[1] == 3


def _length(head: bytes) -> int:
    length = int.from_bytes(head[3:], "big")
    if head[0] not in _KINDS or head[1] != 3 or length > _LONGEST:
        raise NoTls("the other side does not speak TLS")
    return length


def _hash(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def _load(files: Files) -> _Contexts:
    for name, path in _named(files).items():
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise TlsError(f"{name}={path}: {error.strerror}; name a file in PEM that this user may read") from None
    server, client = _context(ssl.PROTOCOL_TLS_SERVER, files), _context(ssl.PROTOCOL_TLS_CLIENT, files)
    server.num_tickets = 0  # no resumption of sessions
    own = ssl.PEM_cert_to_DER_cert(_first_certificate(files.cert))
    judge = client
    if not files.ca:  # here it is its own authority, so that its dates are checked
        judge = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        judge.check_hostname = False
        judge.load_verify_locations(cadata=own)
        judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        _try(server, judge)
    except ssl.SSLCertVerificationError as error:
        against = f" by FTCOMM_TLS_CA={files.ca}" if files.ca else ""
        raise TlsError(
            f"FTCOMM_TLS_CERT={files.cert} is not good{against}: {error.verify_message}; every process needs a "
            "certificate that is valid now, and signed by that authority if there is one"
        ) from None
    return _Contexts(server, client, _hash(own))


def _context(protocol: int, files: Files) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the token proves the identity
    context.verify_mode = ssl.CERT_REQUIRED if files.ca else ssl.CERT_NONE
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: "")  # or OpenSSL would ask at the terminal
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(
            f"FTCOMM_TLS_CERT={files.cert} and FTCOMM_TLS_KEY={files.key} do not serve: {_reason(error)}; name a "
            "certificate and the key that belongs to it, both in PEM, the key without a password"
        ) from None
    try:
        if files.ca:
            context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise TlsError(f"FTCOMM_TLS_CA={files.ca} does not serve: {_reason(error)}; name certificates in PEM") from None
    return context


def _try(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Do a handshake with ourselves: only a side that verifies looks at the authority and at dates."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    while ends:
        for end in list(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)


def _first_certificate(path: str) -> str:
    """Returns the certificate of the process itself, the first in the file. Those of its signers may follow, and notes
    in any encoding may stand between them."""
    text = Path(path).read_text("ascii", "replace")
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    if begin not in text or end not in text:
        raise TlsError(f"FTCOMM_TLS_CERT={path} holds no certificate between {begin} and {end}; write it so, in PEM")
    return text[text.index(begin) : text.index(end) + len(end)]


def _named(files: Files) -> dict[str, str]:
    names = ("FTCOMM_TLS_CERT", "FTCOMM_TLS_KEY", "FTCOMM_TLS_CA")
    return {name: path for name, path in zip(names, files, strict=True) if path}


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
