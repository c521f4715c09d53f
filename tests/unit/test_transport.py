"""What a TCP reader makes of frames, right ones and wrong ones, and which transport is chosen."""

from __future__ import annotations

import dataclasses
import os
import queue
import random
import select
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest

from ftcomm.control.limits import MEMBERS
from ftcomm.control.views import Address
from ftcomm.errors import TransportError
from ftcomm.kernels.epochs import COUNTER, EPOCHS
from ftcomm.transport.connect import connect, here_is
from ftcomm.transport.segment import (
    CHUNK,
    DETAIL,
    HOST,
    POSTED,
    REDUCED,
    SIZE,
    SLOTS,
    SPAN,
    STAGED,
    TAKEN,
    OtherEngine,
    Segment,
    descriptor,
    level,
    levels,
    putting,
    sized,
)
from ftcomm.transport.shm import ShmPeer
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.rigs.exchange import DEADLINE, socket_pair

EPOCH = 3
FRAME = struct.Struct("<IIQIIQQQ")


class Wire:
    """A mirror, and the writer's end of its connection."""

    def __init__(self) -> None:
        near, self.far = socket_pair()
        self.lost: queue.Queue[tuple[int, int, str]] = queue.Queue()
        self.peer = TcpMirror(7, EPOCH, near, lambda *args: self.lost.put(args))
        self.peer.drive(False)

    def wait(self, word: int, value: int) -> None:
        end = 0
        while self.peer.words[word] != value:
            with pytest.raises(queue.Empty):
                print(self.lost.get(timeout=0.01))
            end += 1
            assert end < DEADLINE * 100


def test_a_mirror_of_many_members_writes_the_words_that_are_in_use_alone() -> None:
    """There are 131 KB of them with 1,024 members, of which a member has as many mirrors; nearly all stay untouched."""
    here, there = socket_pair()
    mirror = TcpMirror(7, EPOCH, here, ignore, sized(HOST, MEMBERS))
    used, last = level(3), level(levels(MEMBERS))
    mirror.enter(EPOCH + 1)
    assert [mirror.words[word] for word in (TAKEN, used, last)] == [(EPOCH + 1) << COUNTER, 0, 0]
    writer = TcpMirrorWriter(there, 1, EPOCH + 1)
    value = (EPOCH + 1) << COUNTER | 1
    writer.send(used, value, 0, memoryview(b"sum"), (1, 2, 3))
    assert writer.flush()
    assert select.select([mirror], [], [], DEADLINE)[0]
    assert mirror.pump()
    assert [mirror.words[word] for word in (TAKEN, used, last)] == [(EPOCH + 1) << COUNTER, value, 0]
    mirror.enter(EPOCH + 2)  # what was in use must not look as if it were still raised
    assert [mirror.words[word] for word in (TAKEN, used, last)] == [(EPOCH + 2) << COUNTER] * 2 + [0]
    mirror.close()
    there.close()


def at(count: int) -> int:
    """Where in its region the payload of a task lies."""
    return (count - 1) % SLOTS * CHUNK


def test_a_frame_fills_the_mirror() -> None:
    wire = Wire()
    reader = TcpMirrorWriter(wire.far, 1, EPOCH)
    assert wire.peer.words[TAKEN] == EPOCH << COUNTER
    payload = np.arange(1000, dtype=np.uint16)
    reader.send(POSTED, EPOCH << COUNTER | 2, CHUNK + 64, memoryview(payload).cast("B"), (41, 99, 7))
    reader.send(TAKEN, EPOCH << COUNTER | 1, 0, memoryview(b""), (0, 0, 0))
    assert reader.flush()
    wire.wait(TAKEN, EPOCH << COUNTER | 1)
    assert wire.peer.words[POSTED] == EPOCH << COUNTER | 2
    said = [wire.peer.words[descriptor(1) + word] for word in (0, 1, DETAIL)]
    assert said == [41, 99, 7]
    assert (wire.peer.carve(POSTED, 1, 32, 1000, payload.dtype) == payload).all()
    wire.peer.close()
    reader.close()
    assert wire.lost.empty()


MAGIC = 0x66746332
WRONG = {
    "magic": (1, POSTED, EPOCH << COUNTER | 1, 0, 0),
    "word": (MAGIC, 1, EPOCH << COUNTER | 1, 0, 0),
    "no epoch": (MAGIC, POSTED, 1, 0, 0),
    "beyond all epochs": (MAGIC, POSTED, EPOCHS << COUNTER | 1, 0, 0),
    "no task": (MAGIC, POSTED, (EPOCH + 1) << COUNTER, 0, 0),
    "no increase": (MAGIC, POSTED, EPOCH << COUNTER, 0, 0),
    "beyond the slot": (MAGIC, REDUCED, EPOCH << COUNTER | 1, SPAN * CHUNK - 4, 8),
    "beyond the last slot": (MAGIC, REDUCED, EPOCH << COUNTER | 1, STAGED, 8),
    "payload of nothing": (MAGIC, TAKEN, EPOCH << COUNTER | 1, 0, 8),
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


class Sluice:
    """A socket that takes `left` bytes more, and then is full."""

    def __init__(self, sock: socket.socket, left: int) -> None:
        self.sock, self.left = sock, left

    def sendmsg(self, buffers: list[memoryview], *rest: object) -> int:
        if not self.left:
            raise BlockingIOError
        sent = self.sock.send(b"".join(buffers)[: self.left])
        self.left -= sent
        return sent

    def close(self) -> None:
        self.sock.close()


BEFORE, LATER = EPOCH << COUNTER, (EPOCH + 1) << COUNTER


@pytest.mark.parametrize("reader_is_first", [True, False])
def test_wherever_it_is_cut_a_connection_goes_on_in_the_next_epoch(reader_is_first: bool) -> None:
    """A frame that is half sent is ended, whatever the caller has made of its payload. Of others nothing is sent."""
    size = 40
    for cut in range(3 * (FRAME.size + size) + 1):
        wire = Wire()
        wire.peer.drive()
        reader = TcpMirrorWriter(wire.far, 1, EPOCH)
        reader._sock = sluice = Sluice(wire.far, cut)  # type: ignore[assignment]
        theirs = np.full(size, 1, np.uint8)
        for count, word in ((1, POSTED), (1, REDUCED), (2, POSTED)):
            reader.send(word, BEFORE | count, 0, memoryview(theirs), (7, 7, 7))
        assert reader.flush() == (cut == 3 * (FRAME.size + size))
        assert reader.end_epoch()
        assert sum(len(entry[0]) for entry in reader._queue) < FRAME.size + size
        assert all(entry[0].obj is not theirs for entry in reader._queue)
        theirs[:] = 2
        wire.peer.quiet()
        if reader_is_first:
            wire.peer.enter(EPOCH + 1)
        sluice.left = 1 << 30
        reader.send(TAKEN, LATER | 1, 0, memoryview(b""), (0, 0, 0))
        reader.send(POSTED, LATER | 1, 0, memoryview(bytes([3]) * size), (8, 8, 8))
        assert reader.flush()
        end = time.monotonic() + DEADLINE
        while wire.peer.words[POSTED] != LATER | 1 and time.monotonic() < end:
            wire.peer.pump()
        if not reader_is_first:
            wire.peer.enter(EPOCH + 1)
        assert [wire.peer.words[word] for word in (POSTED, REDUCED, TAKEN)] == [LATER | 1, LATER, LATER | 1], cut
        assert wire.peer.carve(POSTED, 0, 0, size, theirs.dtype).tolist() == [3] * size
        assert wire.peer.words[descriptor(0)] == 8
        assert wire.lost.empty()
        wire.peer.close()
        reader.close()


def test_all_words_leave_an_epoch_before_anything_of_the_next_one_is_put_into_a_slot() -> None:
    """Who was left behind may read the slots meanwhile, and finds it out when it looks at the words."""
    wire = Wire()
    wire.peer.drive()
    wire.far.sendall(FRAME.pack(MAGIC, TAKEN, BEFORE | 3, 0, 0, 0, 0, 0))
    wire.far.sendall(FRAME.pack(MAGIC, POSTED, LATER | 1, 0, 100, 1, 1, 1) + b"x" * 99)
    end = time.monotonic() + DEADLINE
    while wire.peer.carve(POSTED, 0, 0, 1, np.dtype(np.uint8))[0] == 0 and time.monotonic() < end:
        wire.peer.pump()
    assert [wire.peer.words[word] for word in (POSTED, REDUCED, TAKEN)] == [LATER] * 3
    wire.peer.close()
    wire.far.close()


def test_what_is_late_from_an_earlier_epoch_raises_nothing() -> None:
    wire = Wire()
    wire.peer.quiet()
    wire.peer.enter(EPOCH + 1)
    late = np.full(CHUNK, 5, np.uint8).tobytes()
    for count in range(SLOTS):
        wire.far.sendall(FRAME.pack(MAGIC, POSTED, BEFORE | count + 1, 0, CHUNK, 7, 7, 7) + late)
        wire.far.sendall(FRAME.pack(MAGIC, TAKEN, BEFORE | count + 1, 0, 0, 7, 7, 7))
    wire.far.sendall(FRAME.pack(MAGIC, TAKEN, LATER | 1, 0, 0, 0, 0, 0))
    wire.wait(TAKEN, LATER | 1)
    assert wire.peer.words[POSTED] == LATER
    assert wire.peer.words[descriptor(1)] == 0
    wire.peer.close()
    wire.far.close()


def test_the_counter_of_bytes_under_way_begins_anew_in_each_epoch() -> None:
    near, far = socket_pair()
    reader = TcpMirrorWriter(far, 5, EPOCH)
    chunk = memoryview(bytes(CHUNK))
    for epoch in range(EPOCH, EPOCH + 3):
        reader.send(
            REDUCED, epoch << COUNTER | 1, 64, chunk[:1], (0, 0, 0)
        )  # of a task of which this one gives nothing
        for count in range(1, SLOTS + 1):
            reader.send(POSTED, epoch << COUNTER | count, at(count), chunk, (0, 0, 0))
        assert reader.end_epoch()
    near.close()
    reader.close()


def test_a_connection_that_ends_while_the_view_changes_is_told_when_it_is_entered() -> None:
    wire = Wire()
    wire.peer.quiet()
    wire.far.close()
    end = time.monotonic() + DEADLINE
    while wire.peer.serves(EPOCH + 1) and time.monotonic() < end:
        time.sleep(0.001)
    assert not wire.peer.serves(EPOCH + 1)  # so another one is dialled, unless it is too late for that
    assert wire.lost.empty()
    wire.peer.enter(EPOCH + 1)
    assert wire.lost.get(timeout=DEADLINE) == (7, EPOCH + 1, "connection for data: closed by the other side")
    wire.peer.enter(EPOCH + 2)
    assert wire.lost.empty()


def test_who_receives_may_change_from_epoch_to_epoch() -> None:
    """The driver while all are reached by connections, else a thread."""
    wire = Wire()
    for count in range(1, 7):
        driven = bool(count % 2)
        wire.peer.drive(driven)
        wire.far.sendall(FRAME.pack(MAGIC, TAKEN, BEFORE | count, 0, 0, 0, 0, 0))
        if driven:
            end = time.monotonic() + DEADLINE
            while wire.peer.words[TAKEN] != BEFORE | count and time.monotonic() < end:
                wire.peer.pump()
        wire.wait(TAKEN, BEFORE | count)
    wire.peer.close()
    wire.far.close()


def no_thread(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The next `count` threads cannot be started."""
    start, left = threading.Thread.start, [None] * count

    def starts(thread: threading.Thread) -> None:
        if left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)


def test_a_mirror_without_a_thread_keeps_no_connection_and_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket_pair()
    mirror = TcpMirror(1, 1, None, ignore)
    no_thread(monkeypatch, 1)
    with pytest.raises(RuntimeError, match="new thread"):
        mirror.open(here)
    assert not mirror.is_open
    assert there.recv(1) == b""
    here, other = socket_pair()
    mirror.open(here)
    assert mirror.is_open
    mirror.close()
    there.close()
    other.close()


def test_who_can_start_no_thread_to_dial_dials_when_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket_pair()
    mirror = TcpMirror(1, 1, None, ignore)
    mirror.dial = lambda: here
    no_thread(monkeypatch, 2)
    assert not mirror.want()
    with pytest.raises(RuntimeError, match="new thread"):
        mirror.open_now()
    mirror.open_now()
    assert mirror.is_open
    mirror.close()
    there.close()


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
    reader = TcpMirrorWriter(wire.far, 5, EPOCH)
    wire.far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    payloads = [np.random.default_rng(number).bytes(CHUNK) for number in range(SLOTS)]
    for number, payload in enumerate(payloads):
        reader.send(POSTED, EPOCH << COUNTER | number + 1, at(number + 1), memoryview(payload), (number, 0, 0))
    reader.send(TAKEN, EPOCH << COUNTER | 1, 0, memoryview(b""), (0, 0, 0))
    assert not reader.flush()
    end = time.monotonic() + DEADLINE
    while wire.peer.words[TAKEN] != EPOCH << COUNTER | 1 and time.monotonic() < end:
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
            start = 0 if word == TAKEN else at(count) + 8
            frames += FRAME.pack(MAGIC, word, EPOCH << COUNTER | count, start, len(payload), count, 2, 3) + payload
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
    while wire.peer.words[TAKEN] != EPOCH << COUNTER | SLOTS and time.monotonic() < end:
        wire.peer.pump()
    assert wire.peer.words[TAKEN] == EPOCH << COUNTER | SLOTS
    for (word, slot), payload in content.items():
        if word != TAKEN:
            there = wire.peer.carve(word, slot, 8, len(payload), np.dtype(np.uint8))
            assert there.tobytes() == payload
            assert wire.peer.words[descriptor(slot)] == slot + 1
    wire.peer.close()
    wire.far.close()


@pytest.mark.parametrize("slots", [SLOTS, 4, 2])  # fewer are larger
def test_a_slot_is_used_again_though_its_next_task_posts_nothing_for_this_reader(slots: int) -> None:
    near, far = socket_pair()
    reader = TcpMirrorWriter(far, 5, EPOCH)
    reader.slots, room = slots, STAGED // slots
    half = memoryview(bytes(room // 2))
    for count in range(1, slots + 1):
        reader.send(POSTED, EPOCH << COUNTER | count, (count - 1) * room, half, (0, 0, 0))
        reader.send(REDUCED, EPOCH << COUNTER | count, (count - 1) * room + len(half), half, (0, 0, 0))
    reader.send(POSTED, EPOCH << COUNTER | slots + 1, 0, half[:0], (0, 0, 0))  # of a small op: no shard
    reader.send(REDUCED, EPOCH << COUNTER | slots + 1, 64, half[:56], (0, 0, 0))
    near.close()
    reader.close()


def test_more_than_the_slots_hold_is_never_on_its_way_to_a_reader() -> None:
    near, far = socket_pair()
    reader = TcpMirrorWriter(far, 5, EPOCH)
    full = memoryview(bytes(SPAN * CHUNK))
    for count in range(1, SLOTS + 1):
        reader.send(POSTED, EPOCH << COUNTER | count, (count - 1) * len(full), full, (0, 0, 0))
    with pytest.raises(AssertionError, match="on their way to replica 5"):
        reader.send(REDUCED, EPOCH << COUNTER | 1, 64, full[:1], (0, 0, 0))
    near.close()
    reader.close()


def here(segment: Segment, boot: str = "a") -> Address:
    return Address("127.0.0.1", 1, boot, os.getpid(), segment.fd, segment.nonce)


def ignore(*args: object) -> None:
    pass


def dial(what: str) -> socket.socket:
    assert what == "data"
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
    assert peer.transport == how
    assert isinstance(peer, ShmPeer if how == "shm" else TcpMirror)
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


def test_who_makes_tasks_of_other_sizes_is_refused() -> None:
    """One rank was told FTCOMM_TRANSPORT=nixl, the other was not: their streams would have other tasks."""
    segment, other = Segment(), Segment(putting(HOST))
    there = here_is("127.0.0.1", 1, other)
    with pytest.raises(OtherEngine, match=r"tasks of 2 chunks.*FTCOMM_TRANSPORT"):
        connect(0, here(segment), 1, there, epoch=EPOCH, mode="tcp", dial=ignore, on_lost=ignore)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mine", "other"), [("mac", "none"), ("none", "aes-gcm"), ("mac", "aes-gcm")])
def test_who_protects_data_in_another_way_is_refused(mine: str, other: str) -> None:
    """Before anything is dialled: one would send what the other takes for garbage, or what nobody protects."""
    segment = Segment()
    there = here_is("127.0.0.1", 1, Segment(), data=other)
    with pytest.raises(OtherEngine, match=r"FTCOMM_DATA=.*FTCOMM_DATA to the same"):
        connect(0, here(segment), 1, there, epoch=EPOCH, mode="tcp", dial=ignore, on_lost=ignore, data=mine)  # type: ignore[arg-type]


def test_shared_memory_that_is_demanded_and_cannot_be_had_is_an_error() -> None:
    segment = Segment()
    with pytest.raises(TransportError, match=r"replica 1 .*another host.*FTCOMM_TRANSPORT=auto"):
        connect(0, here(segment), 1, here(segment, "b"), epoch=EPOCH, mode="shm", dial=dial, on_lost=ignore)
