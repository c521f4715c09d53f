"""What a notification carries: the frame that a word is told with, and the order in which frames count.

A put and its notification are one frame, or a piece of one where several connections (rails) share the payload. Small
payloads travel in the notification itself: that is one message where a put is a put, its acknowledgement and a message.
Notifications of several puts come in any order, so frames are numbered, and one that comes early waits for those before
it. What comes must be a frame that can be; the mirror has been written by then, which nobody but its writer can.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ftcomm.transport.segment import PUBLISHED, SLOTS, TAKEN

# Magic, word, channel, number; piece, of how many (0: the payload follows); value; of the payload: where in the chunk,
# bytes; what belongs to the word.
_HEAD = struct.Struct("<IIQIHHQIIQQQ")
_MAGIC = 0x66746E31
WORDS = PUBLISHED
GREETING = 0  # no word: the first frame of a channel, which shows that puts and notifications get through

INLINE = 4096  # bytes of a payload that travels in its notification
EARLY = 64  # frames that may wait for one before them: a stream has at most 3 for each slot
PIECES = 16


class Frame(NamedTuple):
    word: int
    channel: int  # of which epoch and connection it is
    number: int  # of the frame in its channel
    piece: int
    pieces: int
    value: int
    start: int  # of the payload, in the chunk
    nbytes: int
    belongs: tuple[int, int, int]
    payload: bytes = b""


def pack(frame: Frame) -> bytes:
    word, channel, number, piece, pieces, value, start, nbytes, belongs, payload = frame
    return _HEAD.pack(_MAGIC, word, channel, number, piece, pieces, value, start, nbytes, *belongs) + payload


def unpack(message: bytes) -> Frame:
    """Raises `ValueError` for what is no frame."""
    if len(message) < _HEAD.size:
        raise ValueError(f"a notification of {len(message)} bytes, expected {_HEAD.size} or more")
    magic, word, channel, number, piece, pieces, value, start, nbytes, *belongs = _HEAD.unpack_from(message)
    payload = message[_HEAD.size :]
    if magic != _MAGIC:
        raise ValueError(f"a notification that begins with {magic:#x}, expected {_MAGIC:#x}")
    if len(payload) != (0 if pieces else nbytes):
        raise ValueError(f"a notification with {len(payload)} bytes of a payload of {nbytes} in {pieces} pieces")
    if pieces > PIECES or (piece >= pieces if pieces else piece):
        raise ValueError(f"piece {piece} of {pieces}, expected at most {PIECES}")
    first, second, third = belongs
    return Frame(word, channel, number, piece, pieces, value, start, nbytes, (first, second, third), payload)


def check(frame: Frame, seen: int, epoch: int, chunk: int) -> None:
    """Raise `ValueError` if this cannot be the next frame where the word holds `seen`."""
    if frame.word not in WORDS or not seen < frame.value < (epoch + 1) << 32:
        raise ValueError(f"a frame that cannot be: word {frame.word}, value {frame.value:#x} after {seen:#x}")
    if frame.start + frame.nbytes > (0 if frame.word == TAKEN else chunk):
        raise ValueError(f"a payload of {frame.nbytes} bytes at {frame.start} of a chunk of {chunk}")


def slot_of(value: int) -> int:
    return ((value & 0xFFFFFFFF) - 1) % SLOTS


class InOrder:
    """The frames of one channel: they come in any order, and count in that of their numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._here: dict[int, dict[int, Frame]] = {}  # number -> piece -> frame

    def arrive(self, frame: Frame) -> list[Frame]:
        """The frames that count now, in order; of one in pieces the last that came, which stands for all.

        Raises `ValueError` for one that came before or is too early.
        """
        if not 0 <= frame.number - self._next < EARLY:
            raise ValueError(f"frame {frame.number} while {self._next} is awaited, and {EARLY} may come early")
        pieces = self._here.setdefault(frame.number, {})
        if frame.piece in pieces or any(other[:2] + other[4:6] != frame[:2] + frame[4:6] for other in pieces.values()):
            raise ValueError(f"piece {frame.piece} of frame {frame.number} twice, or of another frame")
        pieces[frame.piece] = frame
        ready = []
        while (waiting := self._here.get(self._next)) and len(waiting) == max(1, next(iter(waiting.values())).pieces):
            del self._here[self._next]
            self._next += 1
            ready.append(frame if frame.number == self._next - 1 else next(iter(waiting.values())))
        return ready
