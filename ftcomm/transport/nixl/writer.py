"""The writer's side of a connection by NIXL: which frames go to one reader, in which puts, and when they are announced.

Frames wait in a queue until a put is worth its cost, or the driver has nothing else to do. Chunks that lie side by side
are one put, and frames that are announced together are one notification. Frames are announced in their order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import deque

from ftcomm.control.sealed import Connection
from ftcomm.transport.base import Belongs, MirrorWriter, OnLost
from ftcomm.transport.nixl import frames
from ftcomm.transport.nixl.agent import NixlEndpoint
from ftcomm.transport.nixl.memory import address_of
from ftcomm.transport.nixl.puts import Remote, Sender
from ftcomm.transport.nixl.window import cut, spread
from ftcomm.transport.segment import CHUNK, HEADER, POSTED, STAGED

_AT_ONCE = 2 * CHUNK  # bytes that are put at once; fewer wait for more, or for an idle driver

_QueuedFrame = tuple[int, int, int, memoryview, tuple[int, int, int]]  # word, value, start, payload, `Belongs`
_FULL = (1 << 64) - 2  # the value of an eventfd without room


class _Begun:
    """Frames whose puts are posted; `left` of the puts have not ended. They are announced after all earlier frames.
    `word` and `value` are those of the first."""

    __slots__ = ("left", "message", "value", "word")

    def __init__(self, word: int, value: int, message: bytes) -> None:
        self.word, self.value, self.message, self.left = word, value, message, 0


class NixlMirrorWriter(MirrorWriter, Sender):
    """Writes to one reader in one epoch. `on_lost` is called if a put fails after the send that began it. Raises
    `ConnectionError` if its endpoint is retired."""

    nonce = ""

    def __init__(
        self,
        endpoint: NixlEndpoint,
        remote: Remote,
        channel: int,
        sock: Connection,
        replica: int,
        epoch: int,
        on_lost: OnLost,
    ) -> None:
        self.replica, self.epoch = replica, epoch
        self._endpoint, self._remote, self._channel = endpoint, remote, channel
        self._sock, self._on_lost = sock, on_lost
        self._queue: deque[_QueuedFrame] = deque()  # frames not begun
        self._begun: deque[_Begun] = deque()  # frames not announced; guarded by the lock of the endpoint
        self._number = 0  # the number of the next frame
        self._held = 0  # bytes in the queue for puts
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        os.eventfd_write(self._fd, _FULL)
        try:
            endpoint.enter(remote, self)
        except ConnectionError:
            os.close(self._fd)
            raise

    def greet(self) -> None:
        """Send the first frame, which is announced when each rail has put something. Raises `ConnectionError`."""
        endpoint, remote = self._endpoint, self._remote
        with endpoint.lock:
            greeting = frames.pack(frames.GREETING, self._channel, self._number, 0, 0, 0, 0, (0, 0, 0))
            begun = self._begin(frames.GREETING, 0, greeting)
            self._number += 1
            for rail in range(len(remote.names)):
                self._put(begun, rail, memoryview(endpoint.greeting)[:8], 8 * rail)
            self._announce()
        endpoint.kick()

    def send(self, word: int, value: int, start: int, payload: memoryview, belongs: Belongs) -> None:
        """Send one frame, as in `MirrorWriter`. Small frames share a notification. `payload` must stay as it is until
        `told`, or until the reader has taken the task."""
        self._queue.append((word, value, start, payload, belongs))
        if len(payload) > frames.INLINE:
            self._held += len(payload)
            if self._held >= _AT_ONCE:
                self.flush()

    def relay(self, member: int, word: int, value: int, belongs: Belongs) -> None:
        """Do nothing, since readers by NIXL are connected to all members."""

    def flush(self) -> bool:
        endpoint, remote, queue = self._endpoint, self._remote, self._queue
        if self.closed or remote.problem:
            raise ConnectionError(remote.problem or "it is closed")
        if not queue:
            return True
        self._held = 0
        with endpoint.lock:
            if not endpoint.settled(remote):
                return False
            while queue and self._post(queue):
                pass
            self._announce()
        endpoint.kick()
        return not queue

    def told(self, word: int, value: int) -> bool:
        """Whether all frames for this value of the word, or a lower one, were announced: their payloads have
        arrived."""
        if not self._queue and not self._begun:
            return True
        with self._endpoint.lock:
            return not any(of == word and said <= value for of, said, *_ in self._queue) and not any(
                begun.word == word and begun.value <= value for begun in self._begun
            )

    def serves(self, epoch: int) -> bool:
        return epoch == self.epoch

    def end_epoch(self) -> bool:
        """End the epoch. False, since the connection ends with it."""
        return False

    def fileno(self) -> int:
        """Returns a descriptor that is never ready for writing, since NIXL does not tell when there is room."""
        return self._fd

    def ended(self, frame: _Begun) -> None:
        frame.left -= 1
        self._announce()

    def broken(self, reason: str) -> None:
        self._on_lost(self.replica, self.epoch, f"connection for data: {reason}")

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._queue.clear()
        if not self.closed:
            self._endpoint.leave(self._remote, self)
            self._sock.close()
            os.close(self._fd)

    def _post(self, queue: deque[_QueuedFrame]) -> bool:
        """Take the first frame off the queue, with those that the same put carries. With the lock. False if no rail has
        room."""
        word, value, start, payload, belongs = queue[0]
        channel, windows = self._channel, self._remote.windows
        nbytes = len(payload)
        if nbytes <= frames.INLINE:
            message = frames.pack(word, channel, self._number, start, nbytes, 1, value, belongs, bytes(payload))
            self._begin(word, value, message)
            self._number += 1
            queue.popleft()
            return True
        count = self._adjacent(queue)
        if count > 1:
            first = address_of(payload) - address_of(payload.obj)
            payload = memoryview(payload.obj)[first : first + sum(len(queue[i][3]) for i in range(count))]
        base = HEADER + (word != POSTED) * STAGED + start
        pieces = cut(len(payload), len(windows))
        rails = spread(pieces, windows) if len(windows) > 1 else [0] if windows[0].fits(len(payload)) else None
        if rails is None:
            return False
        message = b""
        for _ in range(count):
            _, said, begins, part, belongs = queue.popleft()
            message += frames.pack(word, channel, self._number, begins, len(part), 0, said, belongs)
            self._number += 1
        begun = self._begin(word, value, message)
        for (offset, size), rail in zip(pieces, rails, strict=True):
            self._put(begun, rail, payload[offset : offset + size], base + offset)
        return True

    def _adjacent(self, queue: deque[_QueuedFrame]) -> int:
        """Returns how many of the first frames lie side by side, here and in the mirror."""
        word, value, start, payload, _ = queue[0]
        count = 1
        for word_next, value_next, start_next, next_payload, _ in itertools.islice(queue, 1, None):
            if not (
                word_next == word
                and value_next == value + 1
                and start_next == start + len(payload)
                and next_payload.obj is payload.obj
                and len(next_payload) > frames.INLINE
                and address_of(next_payload) == address_of(payload) + len(payload)
            ):
                break
            value, start, payload = value_next, start_next, next_payload
            count += 1
        return count

    def _begin(self, word: int, value: int, message: bytes) -> _Begun:
        begun = _Begun(word, value, message)
        self._begun.append(begun)
        return begun

    def _put(self, begun: _Begun, rail: int, payload: memoryview, offset: int) -> None:
        begun.left += 1  # before the put: if that fails, the frame must never be announced
        if self._endpoint.puts.post(self._remote, rail, payload, offset, self, begun):
            begun.left -= 1

    def _announce(self) -> None:
        """Announce what has ended, in order, with as few notifications as possible. With the lock."""
        begun, message = self._begun, b""
        while begun and not begun[0].left:
            more = begun.popleft().message
            if len(message) + len(more) > frames.MOST:
                self._endpoint.tell(self._remote, message)
                message = b""
            message += more
        if message:
            self._endpoint.tell(self._remote, message)
