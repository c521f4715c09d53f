"""The frames that a notification carries. Each tells a word; their numbers give the order in which they count.

A small payload travels in its frame: that is one message, where a put needs two. Notifications may come in any order,
so a frame that comes early waits for those before it. Every frame is checked; only its writer can have written the
mirror.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import NamedTuple

from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.segment import ENDS

# Magic, word, channel, number; of the payload: where in its region, bytes, whether it follows; value; what belongs to
# the word.
_HEAD = struct.Struct("<IIQQIIIQQQQ")
_MAGIC = 0x66746E32
GREETING = 0  # no word: the first frame of a channel shows that puts and notifications get through

INLINE = 4096  # bytes of a payload that travels in its frame
MOST = 2 * (INLINE + _HEAD.size)  # bytes of a notification
# Frames that may wait for an earlier one. A stream has at most 3 for each slot; with a tree 5, for half the slots.
EARLY = 64


class Frame(NamedTuple):
    word: int
    channel: int  # stands for an epoch and a connection
    number: int  # counts the frames of the channel
    start: int  # the payload's offset in its region
    nbytes: int
    follows: int  # 1: the payload is in the frame; 0: it has been put
    value: int
    belongs: tuple[int, int, int]
    payload: bytes = b""


def pack(
    word: int,
    channel: int,
    number: int,
    start: int,
    nbytes: int,
    follows: int,
    value: int,
    belongs: tuple[int, int, int],
    payload: bytes = b"",
) -> bytes:
    """Packs the fields of a `Frame`, without making one."""
    return _HEAD.pack(_MAGIC, word, channel, number, start, nbytes, follows, value, *belongs) + payload


def unpack(message: bytes) -> list[Frame]:
    """Unpacks the frames of a notification, at least one. Raises `ValueError` if there is none."""
    frames = []
    at = 0
    while at < len(message) or not at:
        if len(message) - at < _HEAD.size:
            raise ValueError(f"a notification of {len(message)} bytes with a frame at {at}, which takes {_HEAD.size}")
        magic, word, channel, number, start, nbytes, follows, value, *belongs = _HEAD.unpack_from(message, at)
        at += _HEAD.size
        payload = message[at : at + nbytes] if follows else b""
        if magic != _MAGIC:
            raise ValueError(f"a notification whose frame begins with {magic:#x}, expected {_MAGIC:#x}")
        if follows > 1 or len(payload) != follows * nbytes:
            raise ValueError(f"a notification with {len(payload)} bytes of a payload of {nbytes} (follows: {follows})")
        at += len(payload)
        first, second, third = belongs
        frames.append(Frame(word, channel, number, start, nbytes, follows, value, (first, second, third), payload))
    return frames


def check(frame: Frame, words: Container[int], seen: int, epoch: int) -> None:
    """Raise `ValueError` if this cannot be the next frame where one of `words`, its word, holds `seen`."""
    if frame.word not in words or not seen < frame.value < (epoch + 1) << COUNTER:
        raise ValueError(f"a frame that cannot be: word {frame.word}, value {frame.value:#x} after {seen:#x}")
    if frame.word in ENDS and frame.nbytes:
        raise ValueError(f"a payload of {frame.nbytes} bytes that tells of what is taken")


class InOrder:
    """Orders the frames of one channel by their numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._here: dict[int, Frame] = {}  # waiting frames, by number

    def arrive(self, frame: Frame) -> list[Frame]:
        """Returns the frames that count now, in order. Raises `ValueError` for one that came before or is too early."""
        if frame.number == self._next and not self._here:  # nearly all of them
            self._next += 1
            return [frame]
        if not 0 <= frame.number - self._next < EARLY or frame.number in self._here:
            raise ValueError(f"frame {frame.number} while {self._next} is awaited, and {EARLY} may come early, once")
        self._here[frame.number] = frame
        ready = []
        while (waiting := self._here.pop(self._next, None)) is not None:
            self._next += 1
            ready.append(waiting)
        return ready
