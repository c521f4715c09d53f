"""Two endpoints of NIXL in one process, and what tests wait for between them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ftcomm.errors import TransportError
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.nixl.context import Nixl
from ftcomm.transport.nixl.mirror import NixlMirror
from ftcomm.transport.nixl.writer import NixlMirrorWriter
from ftcomm.transport.segment import (
    Segment,
)
from tests.rigs.exchange import DEADLINE, socket_pair

EPOCH = 3
BEGUN = EPOCH << COUNTER
NONCE = "ab" * 16  # of the writer's segment


class Link:
    """A writer and a reader, each with an endpoint of its own, and connections between them."""

    def __init__(self, rails: int) -> None:
        self.writer, self.reader = (Nixl(name, ("lo",) * rails) for name in ("writer", "reader"))
        self.segment = Segment()
        self.lost: list[tuple[int, int, str]] = []
        self.heard: list[tuple[int, int, str]] = []  # by the writer, of puts that have failed

    def connect(self, epoch: int = EPOCH, backwards: bool = False) -> tuple[NixlMirrorWriter, NixlMirror]:
        """`backwards`: who is the reader else is read."""
        lost, heard = self.lost, self.heard
        writer, reader = (self.reader, self.writer) if backwards else (self.writer, self.reader)
        accepted: list[Any] = []  # one for each time that the reader has dialled
        threads: list[threading.Thread] = []

        def accept(sock: socket.socket) -> None:
            try:
                accepted.append(writer.accept(1, epoch, sock, lambda *args: heard.append(args)))
            except (TransportError, OSError) as error:
                accepted.append(error)

        def dial() -> socket.socket:
            near, far = socket_pair()
            threads.append(threading.Thread(target=accept, args=(far,), daemon=True))
            threads[-1].start()
            return near

        read: Any
        try:
            read = reader.connect(0, epoch, NONCE, dial, lambda *args: lost.append(args))
        except (TransportError, OSError) as error:
            read = error
        for thread in threads:
            thread.join(DEADLINE)
        *earlier, last = accepted
        for end in earlier:
            if not isinstance(end, Exception):
                end.close()
        for end in (last, read):
            if isinstance(end, Exception):
                raise ExceptionPair(last, read)
        return last, read

    def staged(self, word: int, slot: int, start: int, data: bytes) -> memoryview:
        base = self.segment.offset(word, slot) + start
        self.segment.buffer[base : base + len(data)] = data
        return self.segment.buffer[base : base + len(data)]


class ExceptionPair(Exception):
    """What the writer and the reader have raised or returned."""


def until(reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def until_all_have_ended(link: Link, reader: NixlMirrorWriter) -> None:
    """The puts, and they are ready for others."""

    def ended() -> bool:
        with link.writer.endpoint().lock:
            return not any(window.bytes for window in reader._remote.windows)

    until(ended, "puts that do not end")


def wait(peer: NixlMirror, word: int, count: int) -> None:
    until(lambda: peer.words[word] == BEGUN | count, f"word {word} is {peer.words[word]:#x}, not {count}")
