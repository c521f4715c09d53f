"""The writer of a mirror over TCP pushes what this member publishes to one reader."""

from __future__ import annotations

import itertools
import socket
from collections import deque

from ftcomm.control.sealed import Connection, flush, unsent
from ftcomm.control.wire import for_bulk
from ftcomm.kernels.epochs import COUNTS
from ftcomm.transport.base import Belongs, MirrorWriter
from ftcomm.transport.segment import ANNOUNCED, GATHERED, POSTED, SLOTS, STAGED
from ftcomm.transport.tcp import frames

_GATHER = 16  # buffers that one call sends
_AT_ONCE = 32 << 10  # bytes of a payload that is sent at once, not gathered with the next frames
_FIRST = (POSTED, GATHERED, ANNOUNCED)  # the words whose payload is the first of its task that a reader gets
_NOTHING = memoryview(b"")

_FramePart = tuple[memoryview, int, int, bool]  # bytes to send, their word and value, whether they end their frame


class TcpMirrorWriter(MirrorWriter):
    """Writes to the member that has dialled `sock`, which is past its handshake."""

    def __init__(self, sock: Connection, replica: int, epoch: int, nonce: str = "") -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for_bulk(sock)
        self.replica, self.nonce = replica, nonce
        self.epoch = epoch
        self._sock = sock
        self._queue: deque[_FramePart] = deque()
        self._begun = False  # whether the first frame of `_left` has begun to go out
        self._taken: list[tuple[int, int]] = []  # of the frames that `sock` has taken last: they may still be unsent
        # Bytes sent of each slot, by their start. A sum takes the place of its inputs.
        self._staged: list[dict[int, int]] = [{} for _ in range(SLOTS)]
        self._under_way = 0  # their sum

    def send(self, word: int, value: int, start: int, payload: memoryview, belongs: Belongs) -> None:
        nbytes = len(payload)
        header = memoryview(frames.HEAD.pack(frames.MAGIC, word, value, start, nbytes, *belongs))
        self._queue.append((header, word, value, not nbytes))
        if nbytes or word == POSTED:
            self._count(word, value, start, nbytes)
        if nbytes:
            self._queue.append((payload, word, value, True))
            if nbytes >= _AT_ONCE:
                self.flush()

    def relay(self, member: int, word: int, value: int, belongs: Belongs) -> None:
        self.send(frames.of_member(member, word), value, 0, _NOTHING, belongs)

    def flush(self) -> bool:
        queue = self._queue
        while queue:
            try:
                buffers = [entry[0] for entry in itertools.islice(queue, _GATHER)]
                sent = self._sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._taken = []
            while queue and sent >= len(queue[0][0]):
                buffer, word, value, ends = queue.popleft()
                self._taken.append((word, value))
                sent -= len(buffer)
                self._begun = not ends
            if sent:
                buffer, word, value, ends = queue[0]
                queue[0] = buffer[sent:], word, value, ends
                self._begun = True
        return flush(self._sock)

    def told(self, word: int, value: int) -> bool:
        left = [(of, said) for _, of, said, _ in self._queue]
        if unsent(self._sock):
            left += self._taken
        return not any(of & frames.WORD == word and said <= value for of, said in left)

    def serves(self, epoch: int) -> bool:
        return epoch >= self.epoch

    def end_epoch(self) -> bool:
        """End the epoch. True, since the connection goes on in the next one.

        A frame that has begun is completed, with the bytes that its payload has now: they may lie in an array which is
        the caller's again. No other frame is sent. What the kernels still carry of the epoch no longer counts.
        """
        rest: list[_FramePart] = []
        while self._begun and not (rest and rest[-1][3]):
            buffer, word, value, ends = self._queue.popleft()
            rest.append((memoryview(bytes(buffer)), word, value, ends))
        self._queue = deque(rest)
        self._staged = [{} for _ in range(SLOTS)]
        self._under_way = 0
        return True

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._queue.clear()
        self._sock.close()

    def _count(self, word: int, value: int, start: int, nbytes: int) -> None:
        """Count bytes under way. They never exceed the slots, since a slot is not used again before it was taken."""
        slot = self._staged[((value & (COUNTS - 1)) - 1) % self.slots]
        if word in _FIRST and slot:
            self._under_way -= sum(slot.values())
            slot.clear()
        if nbytes:
            self._under_way += nbytes - slot.get(start, 0)
            slot[start] = nbytes
        if self._under_way > STAGED:
            raise AssertionError(f"{self._under_way} bytes on their way to replica {self.replica}: {self._staged}")
