"""TLS 1.3 by the standard library turns bytes into bytes: it has no socket, so it serves blocking ones and asyncio.

Who is at the other end is proved by the job's token, not by names in certificates: the hash of the server's goes into
what both sides sign (`ftcomm.control.wire`). So who presents another one on the way gets past neither side, a
certificate that its owner has signed himself will do, and addresses may change. With an authority (`ca`) both sides
must also present a certificate that it has signed and that is valid now.
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
_LONGEST = (1 << 14) + 256  # bytes of one
_KINDS = range(20, 24)  # the first byte of one
_HELLO = 22


class TlsError(ValueError):
    """Files that cannot be used, or do not fit; the message names the file and the mend."""


class NoTls(ValueError):
    """The other side does not speak TLS."""


class Files(NamedTuple):
    """Paths of files in PEM; `ca` may be empty."""

    cert: str
    key: str
    ca: str = ""


class _Contexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext
    binding: bytes  # of our own certificate


class Tls:
    """This process's certificate, for connections in both directions. Thread-safe.

    Files that have changed are read again, so a certificate may be renewed while a job runs. Raises `TlsError` if they
    cannot be used now; later that is said in the log, and what was read before serves on.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
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
                    self._contexts = _load(self._files)
                except (TlsError, OSError) as error:  # the second of a file that goes while it is read
                    log.warning("%s; the certificate that was read before serves on", error)
            return self._contexts

    def _looked(self) -> list[int]:
        times = []
        for path in filter(None, self._files):
            with contextlib.suppress(OSError):
                times.append(os.stat(path).st_mtime_ns)
        return times


class Session:
    """TLS on one connection: first `handshake`, then `encrypt` and `decrypt`, each in one thread at a time."""

    def __init__(self, context: ssl.SSLContext, own: bytes | None) -> None:
        """With `own` it is a server with this binding, else a client."""
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=own is not None)
        self._lock = threading.Lock()  # what encrypts and what decrypts share a state
        self.binding = b"" if own is None else own  # as a client: from the handshake on

    def handshake(self, first: bytes = b"") -> Generator[bytes | int, bytes, None]:
        """Yields what is to be sent, or how many bytes are to be received. `first` have been received already.
        Raises `NoTls` and `ssl.SSLError`, after what is to be told to the other side."""
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
        """The plain bytes of one record of TLS, maybe none. Raises `ValueError` on a record that is not of this
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
    """Whether a connection that begins with these bytes, two or more, is to be one of TLS."""
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
    server.num_tickets = 0  # no session is taken up again
    own = ssl.PEM_cert_to_DER_cert(_first_certificate(files.cert))
    judge = client
    if not files.ca:  # it can be its own authority for once, as its dates count
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
    context.check_hostname = False  # who it is, the token proves
    context.verify_mode = ssl.CERT_REQUIRED if files.ca else ssl.CERT_NONE
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: "")  # else OpenSSL would ask at the terminal
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
    """Do a handshake with ourselves: only who verifies looks at the authority and at dates."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    while ends:
        for end in list(ends):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                ends.remove(end)


def _first_certificate(path: str) -> str:
    """The certificate of the process itself, the first of the file; those of its signers may follow there, and notes in
    any encoding stand between them."""
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
