"""What a TCP reader makes of frames, right ones and wrong ones, and which transport is chosen."""

from __future__ import annotations

import dataclasses
import os
import queue
import random
import socket
import struct
import time
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from ftcomm.control.views import Address
from ftcomm.errors import TransportError
from ftcomm.transport.connect import connect, here_is
from ftcomm.transport.segment import (
    CHUNK,
    DETAIL,
    POSTED,
    REDUCED,
    SIZE,
    SLOTS,
    TAKEN,
    OtherEngine,
    Segment,
    descriptor,
)
from ftcomm.transport.shm import ShmPeer
from ftcomm.transport.tcp import Reader, TcpPeer
from tests.exchange_rig import DEADLINE, socket_pair

EPOCH = 3
FRAME = struct.Struct("<IIQIIQQQ")


class Wire:
    """A mirror, and the writer's end of its connection."""

    def __init__(self) -> None:
        near, self.far = socket_pair()
        self.lost: queue.Queue[tuple[int, int, str]] = queue.Queue()
        self.peer = TcpPeer(7, EPOCH, near, lambda *args: self.lost.put(args))

    def wait(self, word: int, value: int) -> None:
        end = 0
        while self.peer.words[word] != value:
            with pytest.raises(queue.Empty):
                print(self.lost.get(timeout=0.01))
            end += 1
            assert end < DEADLINE * 100


def test_a_frame_fills_the_mirror() -> None:
    wire = Wire()
    reader = Reader(wire.far, 1, EPOCH)
    assert wire.peer.words[TAKEN] == EPOCH << 32
    payload = np.arange(1000, dtype=np.uint16)
    reader.send(POSTED, EPOCH << 32 | 2, 64, memoryview(payload).cast("B"), (41, 99, 7))
    reader.send(TAKEN, EPOCH << 32 | 1, 0, memoryview(b""), (0, 0, 0))
    assert reader.flush()
    wire.wait(TAKEN, EPOCH << 32 | 1)
    assert wire.peer.words[POSTED] == EPOCH << 32 | 2
    said = [wire.peer.words[descriptor(1) + word] for word in (0, 1, DETAIL)]
    assert said == [41, 99, 7]
    assert (wire.peer.carve(POSTED, 1, 32, 1000, payload.dtype) == payload).all()
    wire.peer.close()
    reader.close()
    assert wire.lost.empty()


MAGIC = 0x66746332
WRONG = {
    "magic": (1, POSTED, EPOCH << 32 | 1, 0, 0),
    "word": (MAGIC, 1, EPOCH << 32 | 1, 0, 0),
    "other epoch": (MAGIC, POSTED, (EPOCH + 1) << 32 | 1, 0, 0),
    "old epoch": (MAGIC, POSTED, (EPOCH - 1) << 32 | 1, 0, 0),
    "no increase": (MAGIC, POSTED, EPOCH << 32, 0, 0),
    "beyond the chunk": (MAGIC, REDUCED, EPOCH << 32 | 1, CHUNK - 4, 8),
    "payload of nothing": (MAGIC, TAKEN, EPOCH << 32 | 1, 0, 8),
}


@pytest.mark.parametrize("frame", WRONG.values(), ids=WRONG)
def test_a_wrong_frame_changes_nothing_and_ends_the_connection(frame: tuple[int, ...]) -> None:
    wire = Wire()
    before = wire.peer.buffer.tobytes()
    wire.far.sendall(FRAME.pack(*frame, 1, 1, 1) + b"x" * 8)
    replica, epoch, reason = wire.lost.get(timeout=DEADLINE)
    assert (replica, epoch) == (7, EPOCH)
    assert "frame" in reason or "payload" in reason
    assert wire.peer.buffer.tobytes() == before
    assert len(before) == SIZE
    wire.far.close()


def test_a_connection_that_ends_is_reported_once_and_not_when_quiet() -> None:
    wire, quiet = Wire(), Wire()
    quiet.peer.quiet()
    quiet.far.close()
    wire.far.close()
    assert wire.lost.get(timeout=DEADLINE) == (7, EPOCH, "connection for data: closed by the other side")
    with pytest.raises(queue.Empty):
        quiet.lost.get(timeout=0.05)


def test_a_full_socket_leaves_the_rest_to_flush_and_nothing_is_torn() -> None:
    wire = Wire()
    wire.peer.drive()  # its thread does not receive
    reader = Reader(wire.far, 5, EPOCH)
    wire.far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    payloads = [np.random.default_rng(number).bytes(CHUNK) for number in range(SLOTS)]
    for number, payload in enumerate(payloads):
        reader.send(POSTED, EPOCH << 32 | number + 1, 0, memoryview(payload), (number, 0, 0))
    reader.send(TAKEN, EPOCH << 32 | 1, 0, memoryview(b""), (0, 0, 0))
    assert not reader.flush()
    end = time.monotonic() + DEADLINE
    while wire.peer.words[TAKEN] != EPOCH << 32 | 1 and time.monotonic() < end:
        reader.flush()
        wire.peer.pump()
    assert reader.flush()
    for number, payload in enumerate(payloads):
        assert wire.peer.carve(POSTED, number, 0, CHUNK, np.dtype(np.uint8)).tobytes() == payload
    wire.peer.close()
    reader.close()


def test_frames_that_come_in_pieces_of_any_size_are_put_together() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    frames, content = b"", {}
    for count in range(1, SLOTS + 1):
        for word in (POSTED, REDUCED, TAKEN):
            payload = chance.randbytes(0 if word == TAKEN else chance.choice((0, 1, 300, 3000, 4096, 9000, 70_000)))
            frames += (
                FRAME.pack(MAGIC, word, EPOCH << 32 | count, 0 if word == TAKEN else 8, len(payload), count, 2, 3)
                + payload
            )
            content[word, count - 1] = payload
    wire = Wire()
    wire.peer.drive()
    while frames:
        size = chance.choice((1, 20, 56, 100, 5000, 100_000))
        wire.far.sendall(frames[:size])
        frames = frames[size:]
        for _ in range(chance.choice((0, 1, 3))):
            wire.peer.pump()
    end = time.monotonic() + DEADLINE
    while wire.peer.words[TAKEN] != EPOCH << 32 | SLOTS and time.monotonic() < end:
        wire.peer.pump()
    assert wire.peer.words[TAKEN] == EPOCH << 32 | SLOTS
    for (word, slot), payload in content.items():
        if word != TAKEN:
            there = wire.peer.carve(word, slot, 8, len(payload), np.dtype(np.uint8))
            assert there.tobytes() == payload
            assert wire.peer.words[descriptor(slot)] == slot + 1
    wire.peer.close()
    wire.far.close()


def test_more_than_the_slots_hold_is_never_on_its_way_to_a_reader() -> None:
    near, far = socket_pair()
    reader = Reader(far, 5, EPOCH)
    chunk = memoryview(bytes(CHUNK))
    for count in range(1, SLOTS + 1):
        reader.send(POSTED, EPOCH << 32 | count, 0, chunk, (0, 0, 0))
    with pytest.raises(AssertionError, match="on their way to replica 5"):
        reader.send(REDUCED, EPOCH << 32 | 1, 64, chunk[:1], (0, 0, 0))
    near.close()
    reader.close()


def here(segment: Segment, boot: str = "a") -> Address:
    return Address("127.0.0.1", 1, boot, os.getpid(), segment.fd, segment.nonce)


def ignore(*args: object) -> None:
    pass


def dial(there: Address, purpose: str, fields: Mapping[str, int]) -> socket.socket:
    assert purpose == "data"
    assert dict(fields) == {"replica": 0, "epoch": EPOCH}
    return socket_pair()[0]


@pytest.mark.parametrize(
    ("mode", "boot", "nonce", "how"),
    [
        ("auto", "a", None, "shm"),
        ("shm", "a", None, "shm"),
        ("tcp", "a", None, "tcp"),
        ("auto", "b", None, "tcp"),
        ("auto", "a", "0" * 32, "tcp"),  # the same kernel, another container: the process number means another one
    ],
)
def test_the_transport_that_reaches_the_peer_is_chosen(mode: str, boot: str, nonce: str | None, how: str) -> None:
    segment = Segment()
    there = here(segment, boot)
    if nonce:
        there = Address(there.host, there.port, there.boot, there.pid, there.segment, nonce)
    peer = connect(0, here(segment), 1, there, epoch=EPOCH, mode=mode, dial=dial, on_lost=ignore)
    assert peer.how == how
    assert isinstance(peer, ShmPeer if how == "shm" else TcpPeer)
    peer.close()


@pytest.mark.parametrize("mode", ["shm", "tcp", "nixl"])
def test_staging_of_another_layout_is_refused_with_both(mode: str) -> None:
    """Before anything is dialled: through a socket its frames would land in other slots than were meant."""
    segment = Segment()
    other = dataclasses.replace(segment.layout, slots=SLOTS + 1, chunk=CHUNK // 2)
    there = here_is("127.0.0.1", 1, segment)
    assert there.layout == str(segment.layout)
    there = msgspec.structs.replace(there, layout=str(other))
    with pytest.raises(OtherEngine, match=f"{SLOTS + 1} slots of {CHUNK // 2} .* {SLOTS} slots of {CHUNK} "):
        connect(0, here(segment), 1, there, epoch=EPOCH, mode=mode, dial=ignore, on_lost=ignore)  # type: ignore[arg-type]


def test_shared_memory_that_is_demanded_and_cannot_be_had_is_an_error() -> None:
    segment = Segment()
    with pytest.raises(TransportError, match=r"replica 1 .*another host.*FTCOMM_TRANSPORT=auto"):
        connect(0, here(segment), 1, here(segment, "b"), epoch=EPOCH, mode="shm", dial=dial, on_lost=ignore)
