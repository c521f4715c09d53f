"""The handshake of two ranks before the first put, over the connection that the reader has dialled.

    reader                                            writer
    place and kind of its mirror, its agents   --->   takes them in
                                               <---   its own kind; or why it cannot
                                               <===   a put and a notification, by NIXL: the path works

If that does not come soon, or the connection ends, the reader asks itself whether it hears anything by NIXL (`hearing`)
and dials again, in `doubt`: then the writer asks itself, too. Who finds that it does not ends its connections and has
new agents from then on.

Members that cannot work together are told so here, on both sides, with the values of both.
"""

from __future__ import annotations

import select
import time
from typing import Annotated

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.dropped import printable
from ftcomm.control.framing import Framing
from ftcomm.control.liveness import unanswered
from ftcomm.control.sealed import Connection, pending
from ftcomm.errors import TransportError

VERSION = 5  # version of this exchange and of the frames
SOON = 1.0  # s for the first put; after them both sides ask themselves whether they hear
HANDSHAKE_TIMEOUT = 10.0  # seconds for all of it, from when the other side has begun to speak
HELD = 120.0  # s until it speaks, if its kernel answers: it may hold its interpreter, or be stopped
_LOOK = 0.5  # s between two checks that the kernel answers
_Blob = Annotated[bytes, Meta(max_length=1 << 16)]
_Word = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Int31 = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Compatibility(msgspec.Struct, frozen=True):
    """Says what both sides must have in common, and what only explains a difference."""

    version: _Int31
    slots: _Int31
    chunk: _Int31
    nixl: t.Name = ""  # for people: other versions of NIXL may understand each other
    devices: t.Name = ""


class ReaderRequest(msgspec.Struct, frozen=True, tag="wanted"):
    """The reader asks for puts into its mirror."""

    kind: Compatibility
    token: _Word  # names the mirror
    address: _Word
    nbytes: _Int31
    channel: _Word  # random; notifications with another channel do not count
    agents: Annotated[tuple[tuple[t.Name, _Blob], ...], Meta(min_length=1, max_length=16)]  # (name, metadata) of rails
    doubt: bool = False  # nothing came by the last connection


class WriterAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The writer answers. With `fresh` it may have puts under way into that mirror: come again with another one."""

    kind: Compatibility
    fresh: bool = False
    problem: Annotated[str, Meta(max_length=2000)] = ""


_FRAMES: Framing[ReaderRequest | WriterAnswer] = Framing(ReaderRequest | WriterAnswer, 1 << 20)


class NothingCame(ConnectionError):
    """The first put did not come soon, or the connection ended before: another connection may get through."""


def differ(here: Compatibility, there: Compatibility, who: str) -> str:
    """Returns why the two cannot work together; "" if they can."""
    names = {"version": "version of the NIXL transport", "slots": "slots (S)", "chunk": "bytes of a chunk (C)"}
    wrong = [
        f"{text} {getattr(there, name)} there, {getattr(here, name)} here"
        for name, text in names.items()
        if getattr(there, name) != getattr(here, name)
    ]
    if not wrong:
        return ""
    return f"{who} differs: {'; '.join(wrong)}; install one version of ftcomm everywhere"


def send(sock: Connection, message: ReaderRequest | WriterAnswer) -> None:
    """Send a message. Raises `OSError`."""
    sock.settimeout(HANDSHAKE_TIMEOUT)
    sock.sendall(_FRAMES.frame(message))


def receive(sock: Connection) -> ReaderRequest | WriterAnswer:
    """Receive a message. Raises `OSError`, also when it takes too long, and for anything else than a message."""
    _begun(sock)
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT

    def some(most: int) -> bytes:
        sock.settimeout(_left(deadline))
        return sock.recv(most)

    try:
        return _FRAMES.read(some)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"no message of the NIXL transport: {printable(str(error))}") from None


def ended(sock: Connection) -> bool:
    """Whether the other side, which says no more, has ended the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def refused(problem: str) -> TransportError:
    return TransportError(f"the other side says: {printable(problem, 2000)}")


def _begun(sock: Connection) -> None:
    """Wait until the other side speaks. Raises `TimeoutError`."""
    if pending(sock):
        return
    begun = time.monotonic()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not poll.poll(1e3 * min(_LOOK, HANDSHAKE_TIMEOUT)):
        silent = unanswered(sock)
        waited = time.monotonic() - begun
        if waited > (HELD if silent is not None and silent < HANDSHAKE_TIMEOUT else HANDSHAKE_TIMEOUT):
            raise TimeoutError(f"the other side has not answered within {waited:.0f} s")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the other side has not answered within {HANDSHAKE_TIMEOUT:g} s")
    return left
