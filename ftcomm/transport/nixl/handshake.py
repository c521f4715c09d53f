"""What two ranks tell each other before the first put, over the connection that the reader has dialled.

    reader                                             writer
    where and what its mirror is, its agents   --->    takes them in
                                               <---    what it is itself; or why it cannot
                                               <===    a put and a notification, by NIXL: the way there works

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

VERSION = 4  # of this exchange and of the frames
PATIENCE = 10.0  # seconds for all of it, from when the other side has begun to speak
HELD = 120.0  # seconds that may take, if its kernel answers: its process may hold its interpreter, or be stopped
_LOOK = 0.5  # seconds between two looks whether it does
_Blob = Annotated[bytes, Meta(max_length=1 << 16)]
_Word = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Kind(msgspec.Struct, frozen=True):
    """What both must have alike, and what only explains."""

    version: _Count
    slots: _Count
    chunk: _Count
    nixl: t.Name = ""  # for people: other versions of NIXL may understand each other
    devices: t.Name = ""


class Wanted(msgspec.Struct, frozen=True, tag="wanted"):
    """From the reader."""

    kind: Kind
    token: _Word  # of the mirror
    address: _Word
    nbytes: _Count
    channel: _Word  # chosen at random: notifications that do not name it are of something else
    agents: Annotated[tuple[tuple[t.Name, _Blob], ...], Meta(min_length=1, max_length=16)]  # (name, metadata) of rails


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """From the writer. With `fresh` it may have puts under way into that mirror: come again with another one."""

    kind: Kind
    fresh: bool = False
    problem: Annotated[str, Meta(max_length=2000)] = ""


_FRAMES: Framing[Wanted | Answer] = Framing(Wanted | Answer, 1 << 20)


def differ(here: Kind, there: Kind, who: str) -> str:
    """Why the two cannot work together, "" if they can."""
    names = {"version": "version of the NIXL transport", "slots": "slots (S)", "chunk": "bytes of a chunk (C)"}
    wrong = [
        f"{text} {getattr(there, name)} there, {getattr(here, name)} here"
        for name, text in names.items()
        if getattr(there, name) != getattr(here, name)
    ]
    if not wrong:
        return ""
    return f"{who} differs: {'; '.join(wrong)}; install one version of ftcomm everywhere"


def send(sock: Connection, message: Wanted | Answer) -> None:
    """Raises `OSError`."""
    sock.settimeout(PATIENCE)
    sock.sendall(_FRAMES.frame(message))


def receive(sock: Connection) -> Wanted | Answer:
    """Raises `OSError`, also when it takes too long, and for what is no message."""
    _begun(sock)
    deadline = time.monotonic() + PATIENCE

    def some(most: int) -> bytes:
        sock.settimeout(_left(deadline))
        return sock.recv(most)

    try:
        return _FRAMES.read(some)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"no message of the NIXL transport: {printable(str(error))}") from None


def refused(problem: str) -> TransportError:
    return TransportError(f"the other side says: {printable(problem, 2000)}")


def _begun(sock: Connection) -> None:
    """Wait until the other side speaks. Raises `TimeoutError`."""
    if pending(sock):
        return
    begun = time.monotonic()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not poll.poll(1e3 * min(_LOOK, PATIENCE)):
        silent = unanswered(sock)
        waited = time.monotonic() - begun
        if waited > (HELD if silent is not None and silent < PATIENCE else PATIENCE):
            raise TimeoutError(f"the other side has not answered within {waited:.0f} s")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the other side has not answered within {PATIENCE:g} s")
    return left
