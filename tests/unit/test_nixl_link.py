"""Two endpoints of NIXL in one process: real agents, real puts, and what each side makes of trouble."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import socket
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ftcomm.control.views import Address
from ftcomm.errors import TransportError
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport import connect
from ftcomm.transport.base import CannotSend
from ftcomm.transport.nixl import agent as nixl_agent
from ftcomm.transport.nixl import frames, mirror
from ftcomm.transport.nixl import handshake as hello
from ftcomm.transport.nixl import network as nixl_network
from ftcomm.transport.nixl import puts as nixl_puts
from ftcomm.transport.nixl.context import Nixl
from ftcomm.transport.nixl.hearing import HearingProbe
from ftcomm.transport.nixl.mirror import NixlMirror
from ftcomm.transport.nixl.writer import NixlMirrorWriter
from ftcomm.transport.segment import (
    CHUNK,
    DETAIL,
    FINGERPRINT,
    POSTED,
    REDUCED,
    SLOTS,
    STAGED,
    TAKEN,
    Segment,
    descriptor,
)
from tests import nixl_queues
from tests.exchange_rig import DEADLINE, socket_pair
from tests.unit.test_nixl import GpuArray

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")

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


@pytest.fixture(params=[1, 2], ids=["one rail", "two rails"], scope="module")
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    made = Link(request.param)
    for side in (made.writer, made.reader):
        side.endpoint()  # both in one environment, whichever test is the first
    yield made
    made.writer.close()
    made.reader.close()
    made.segment.close()


@pytest.fixture
def pair(link: Link) -> Iterator[tuple[NixlMirrorWriter, NixlMirror]]:
    link.lost, link.heard = [], []  # those of an earlier test may still be told
    reader, peer = link.connect()
    yield reader, peer
    reader.close()
    peer.close()


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


def test_frames_fill_the_mirror(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    reader, peer = pair
    assert [peer.words[word] for word in peer.published] == [BEGUN] * len(peer.published)
    rng = np.random.default_rng(7)
    large, odd, small = (rng.bytes(nbytes) for nbytes in (CHUNK, 200_001, 100))
    reader.send(POSTED, BEGUN | 1, 0, link.staged(POSTED, 0, 0, large), (41, 99, 7))
    callers = np.frombuffer(odd, np.uint8).copy()
    reader.send(POSTED, BEGUN | 2, CHUNK + 64, memoryview(callers), (42, 99, 7))
    reader.send(REDUCED, BEGUN | 1, 128, link.staged(REDUCED, 0, 128, small), (41, 99, 7))
    reader.send(TAKEN, BEGUN | 1, 0, memoryview(b""), (1 << 63, 0, 0))
    until(reader.flush, "no room")
    wait(peer, TAKEN, 1)  # the last that was sent
    assert (peer.words[POSTED], peer.words[REDUCED]) == (BEGUN | 2, BEGUN | 1)
    at = descriptor(1)
    assert [peer.words[at + word] for word in (0, 1, DETAIL)] == [42, 99, 7]
    assert peer.words[descriptor(0) + FINGERPRINT] == 1 << 63
    assert peer.carve(POSTED, 0, 0, CHUNK, np.dtype(np.uint8)).tobytes() == large
    assert peer.carve(POSTED, 1, 64, len(odd), np.dtype(np.uint8)).tobytes() == odd
    assert peer.carve(REDUCED, 0, 128, 100, np.dtype(np.uint8)).tobytes() == small
    assert not link.lost


def test_never_more_than_all_slots_under_way(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    """Nobody takes anything in: what does not fit is left, and goes when there is room."""
    reader, peer = pair
    remote = reader._remote
    total = 3 * SLOTS
    payload = memoryview(np.zeros(STAGED // SLOTS, np.uint8))
    for count in range(1, total + 1):
        reader.send(POSTED, BEGUN | count, (count - 1) % SLOTS * len(payload), payload, (count, 0, 0))
        assert sum(window.bytes for window in remote.windows) <= STAGED
    until(reader.flush, "no room")
    until(lambda: reader.told(POSTED, BEGUN | total), "puts that do not end")
    wait(peer, POSTED, total)
    until_all_have_ended(link, reader)


def test_puts_are_prepared_once(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    reader, peer = pair
    remote = reader._remote
    payload = link.staged(POSTED, 0, 0, bytes(100_000))
    made = []
    for count in range(1, 2 * SLOTS, SLOTS):  # the same slot
        reader.send(POSTED, BEGUN | count, 0, payload, (count, 0, 0))
        reader.flush()
        wait(peer, POSTED, count)
        until_all_have_ended(link, reader)
        made.append(sorted(id(put) for puts in remote.idle.values() for put in puts))
    assert made[0] == made[1] != []


def test_sizes_that_do_not_come_again_are_not_kept_ready(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_puts, "_PREPARED", 4)
    reader, peer = pair
    remote = reader._remote
    for count in range(1, 10):
        reader.send(POSTED, BEGUN | count, 0, link.staged(POSTED, 0, 0, bytes(60_000 + count)), (count, 0, 0))
        reader.flush()
        wait(peer, POSTED, count)
    until_all_have_ended(link, reader)
    assert len(remote.idle) == 4


def test_an_array_of_a_gpu_is_put_from_where_it_is(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed for what NIXL is told: kinds, addresses, devices. Whether it then moves them awaits one."""
    told: list[Any] = []

    class Handle:
        def release(self) -> None:
            told.append("released")

    def prepare(way: str, here: Any, there: Any, name: str, message: bytes) -> Handle:
        told.append((way, here, there))
        return Handle()

    endpoint, remote = link.writer.endpoint(), pair[0]._remote
    with endpoint.lock:
        endpoint.puts.registrations.forget_all()
    for agent in endpoint._agents:
        monkeypatch.setattr(agent, "register_memory", lambda *what: told.append(what))
        monkeypatch.setattr(agent, "deregister_memory", lambda handle: told.append("deregistered"))
        monkeypatch.setattr(agent, "get_xfer_descs", lambda *what: what)
        monkeypatch.setattr(agent, "initialize_xfer", prepare)
        monkeypatch.setattr(agent, "transfer", lambda handle: "DONE")
    array: Any = GpuArray()
    at, size = 0x7F0000000000, array.nbytes
    with endpoint.lock:
        endpoint.puts.post(remote, 0, array, 4096, pair[0])
        rails = len(endpoint._agents)
        assert told[:rails] == [([(at, size, 3, "")], "VRAM")] * rails
        assert told[rails:] == [("WRITE", ([(at, size, 3)], "VRAM"), ([(remote.address + 4096, size, 0)], "DRAM"))]
        del array, told[:]
        gc.collect()
        cache = endpoint.puts.registrations
        cache.forget_all()
    assert told[0] == "released"
    assert told.count("deregistered") == rails


def test_memory_that_cannot_be_locked_is_said_with_the_mend(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the reader before anything is put, and at the writer as the loss of that connection."""
    reader, _ = pair
    for way in (link.writer, link.reader):
        error = next(each for each in way.endpoint().library.errors if each.__name__ == "nixlBackendError")

        def refuse(*what: Any, error: Any = error) -> None:
            raise error("Cannot allocate memory")

        for agent in way.endpoint()._agents:
            monkeypatch.setattr(agent, "register_memory", refuse)
    words = r"NIXL cannot register \d+ bytes of DRAM: nixlBackendError.*locked memory \(ulimit -l\)"
    with pytest.raises(TransportError, match=words):
        link.reader.endpoint().use_mirror("another")
    with pytest.raises(CannotSend, match=words):
        reader.send(POSTED, BEGUN | 1, 0, memoryview(mmap.mmap(-1, 2 * CHUNK)), (1, 0, 0))
    assert not reader.told(POSTED, BEGUN | 1)
    assert not reader._remote.problem, "the reader is not to blame"


def arrays_at(*spans: tuple[int, int]) -> list[np.ndarray[Any, Any]]:
    """Arrays (start, end) of one piece of memory; each lives and dies by itself, as those of an allocator do."""
    memory = mmap.mmap(-1, max(end for _, end in spans))
    return [np.ndarray((end - start,), np.uint8, memory, start) for start, end in spans]


def put(reader: NixlMirrorWriter, peer: NixlMirror, number: int, payload: memoryview) -> None:
    """It gets there, whatever else is registered."""
    payload[:] = bytes([number]) * len(payload)
    reader.send(POSTED, BEGUN | number, 0, payload, (number, 0, 0))
    until(reader.flush, "no room")
    wait(peer, POSTED, number)
    assert peer.carve(POSTED, 0, 0, len(payload), np.dtype(np.uint8)).tobytes() == payload.tobytes()


def test_memory_that_overlaps_is_put_from(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], caplog: pytest.LogCaptureFixture
) -> None:
    """A part of an array that was reduced by itself, and then all of it, while both are known."""
    reader, peer = pair
    whole, part = arrays_at((0, 4 * CHUNK), (CHUNK, 2 * CHUNK))
    all_of_it = memoryview(whole)
    for number, payload in enumerate((all_of_it[:CHUNK], memoryview(part), all_of_it[2 * CHUNK : 3 * CHUNK]), 1):
        put(reader, peer, number, payload)
    until_all_have_ended(link, reader)
    assert "registering memory anew" not in caplog.text, "NIXL has not found what is registered"


@pytest.mark.parametrize("why", ["refused", "fails", "under way"])
def test_puts_to_a_peer_that_is_lost_leave_nothing_registered(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its addresses, which are soon those of another array, stay registered for ever."""
    reader, _ = pair
    endpoint = link.writer.endpoint()
    lost = reader._remote
    cut_off = next(each for each in endpoint.library.errors if each.__name__ == "nixlRemoteDisconnectError")
    (array,) = arrays_at((0, 2 * CHUNK))
    address = array.ctypes.data
    registered: list[int] = []  # addresses, once for each rail

    def spy(agent: Any, register: Callable[..., Any], deregister: Callable[..., None]) -> None:
        handles: dict[int, int] = {}

        def come(memory: Any, kind: str) -> Any:
            handle = register(memory, kind)
            handles[id(handle)] = memory[0][0]
            registered.append(memory[0][0])
            return handle

        def go(handle: Any) -> None:
            registered.remove(handles.pop(id(handle)))
            deregister(handle)

        monkeypatch.setattr(agent, "register_memory", come)
        monkeypatch.setattr(agent, "deregister_memory", go)

    with endpoint.lock:
        endpoint.puts.registrations.forget_all()
        for agent in endpoint._agents:
            spy(agent, agent.register_memory, agent.deregister_memory)

    def fail(handle: Any) -> str:
        raise cut_off

    with monkeypatch.context() as patch:
        for agent in endpoint._agents:
            if why == "refused":
                patch.setattr(agent, "transfer", fail)
            else:
                patch.setattr(agent, "transfer", lambda handle: "PROC")
                patch.setattr(agent, "check_xfer_state", fail if why == "fails" else lambda handle: "PROC")
        with contextlib.suppress(ConnectionError):
            reader.send(POSTED, BEGUN | 1, 0, memoryview(array), (1, 0, 0))
            until(lambda: bool(lost.problem) or why == "under way", "nobody looks")
        reader.close()
        assert registered == [address] * len(endpoint._agents)
        with endpoint.lock:
            endpoint._forget(lost)
    died = weakref.ref(array)
    del array
    gc.collect()
    with endpoint.lock:
        endpoint.puts.registrations.forget_all()
        assert (died() is not None, address in registered) == (why == "under way",) * 2, "its memory may still be read"


def test_who_cannot_prepare_a_put_registers_anew(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once that helps. If it does not, this process is in trouble, and not the reader."""
    reader, peer = pair
    endpoint = link.writer.endpoint()
    not_found = next(each for each in endpoint.library.errors if each.__name__ == "nixlNotFoundError")
    failures = 1

    def fail_first(prepare: Any) -> Any:
        def prepare_or_fail(*what: Any) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise not_found("NIXL_ERR_NOT_FOUND")
            return prepare(*what)

        return prepare_or_fail

    registered = list[int]()  # addresses, once for each rail

    def noted(register: Any) -> Any:
        return lambda memory, kind: registered.append(memory[0][0]) or register(memory, kind)

    for agent in endpoint._agents:
        monkeypatch.setattr(agent, "initialize_xfer", fail_first(agent.initialize_xfer))
        monkeypatch.setattr(agent, "register_memory", noted(agent.register_memory))
    array = np.zeros(CHUNK, np.uint8)
    put(reader, peer, 1, memoryview(array))
    assert registered == [array.ctypes.data] * 2 * len(endpoint._agents)
    failures = 2
    with pytest.raises(CannotSend, match="NOT_FOUND"):
        reader.send(POSTED, BEGUN | 2, 0, memoryview(np.zeros(2 * CHUNK, np.uint8)), (2, 0, 0))
    assert not reader._remote.problem, "the reader is not to blame"
    monkeypatch.setattr(endpoint._agents[0], "check_remote_metadata", lambda name: False)
    failures = 1
    with pytest.raises(ConnectionError, match="was cut off") as error:
        reader.send(POSTED, BEGUN | 3, 0, memoryview(np.zeros(2 * CHUNK, np.uint8)), (3, 0, 0))
    assert not isinstance(error.value, CannotSend), "NIXL has forgotten the reader"
    reader._remote.problem = ""


def test_what_could_not_be_put_is_never_announced(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when what was put before it ends, in the moment before the connection is closed."""
    reader, _ = pair
    endpoint, remote = link.writer.endpoint(), reader._remote
    cut_off = next(each for each in endpoint.library.errors if each.__name__ == "nixlRemoteDisconnectError")
    state = ["PROC"]
    told: list[bytes] = []
    monkeypatch.setattr(endpoint, "tell", lambda remote, message: told.append(message))
    for agent in endpoint._agents:
        monkeypatch.setattr(agent, "transfer", lambda handle: "PROC")
        monkeypatch.setattr(agent, "check_xfer_state", lambda handle: state[0])
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(2 * CHUNK, np.uint8)), (1, 0, 0))

    def fail(handle: Any) -> str:
        raise cut_off

    for agent in endpoint._agents:
        monkeypatch.setattr(agent, "transfer", fail)
    with pytest.raises(ConnectionError):
        reader.send(POSTED, BEGUN | 2, 0, memoryview(np.zeros(2 * CHUNK, np.uint8)), (2, 0, 0))
    state[0] = "DONE"
    until(lambda: bool(told), "nobody looks")
    with endpoint.lock:
        assert [frame.value for message in told for frame in frames.unpack(message)] == [BEGUN | 1]
    reader.close()
    with endpoint.lock:
        endpoint._forget(remote)


def test_the_mirror_stays_over_epochs(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    """What comes late of the epoch before raises no word of the next one."""
    reader, peer = pair
    later, next_peer = link.connect(EPOCH + 1)
    assert next_peer.mirror is peer.mirror
    assert later._remote is reader._remote
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    reader.flush()
    wait(peer, POSTED, 1)
    assert next_peer.words[POSTED] == (EPOCH + 1) << COUNTER
    later.send(POSTED, (EPOCH + 1) << COUNTER | 1, 0, memoryview(b"new"), (1, 0, 0))
    later.flush()
    until(lambda: next_peer.words[POSTED] == (EPOCH + 1) << COUNTER | 1, "no word")
    assert next_peer.carve(POSTED, 0, 0, 3, np.dtype(np.uint8)).tobytes() == b"new"
    later.close()
    next_peer.close()


def test_what_is_under_way_when_the_epoch_ends_is_not_announced(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence: its source is used again, so it may bring anything. The next epoch waits for its end."""
    reader, peer = pair
    later, next_peer = link.connect(EPOCH + 1)
    endpoint = link.writer.endpoint()
    state, looked, put = "PROC", 0, 0

    def look(handle: Any) -> str:
        nonlocal looked
        looked += 1
        return state

    def post(handle: Any) -> str:
        nonlocal put
        put += 1
        return state

    for agent in endpoint._agents:
        monkeypatch.setattr(agent, "transfer", post)
        monkeypatch.setattr(agent, "check_xfer_state", look)
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    reader.send(TAKEN, BEGUN | 1, 0, memoryview(b""), (0, 0, 0))
    assert reader.flush()
    assert put == len(endpoint._agents)
    assert not reader.told(POSTED, BEGUN | 1)
    assert not reader.told(TAKEN, BEGUN | 1), "it would be heard before what it follows"
    until(lambda: looked > 0, "nobody looks")
    reader.close()
    put = 0
    later.send(POSTED, (EPOCH + 1) << COUNTER | 1, 0, memoryview(b"small enough to go without a put"), (1, 0, 0))
    assert not later.flush()
    assert not later.told(POSTED, (EPOCH + 1) << COUNTER | 1), (
        "it was sent while a put of the epoch before was under way"
    )
    state = "DONE"
    until(later.flush, "it has ended")
    until(lambda: next_peer.words[POSTED] == (EPOCH + 1) << COUNTER | 1, "no word")
    assert not put
    assert [peer.words[word] for word in (POSTED, TAKEN)] == [BEGUN, BEGUN], "of the epoch that is over"
    later.close()
    next_peer.close()


def test_chunks_side_by_side_are_one_put(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many notifications as puts, or fewer, and each chunk where it belongs."""
    reader, peer = pair
    endpoint = link.writer.endpoint()
    told: list[bytes] = []
    tell = endpoint.tell

    def listen(remote: Any, message: bytes) -> None:
        told.append(message)
        tell(remote, message)

    monkeypatch.setattr(endpoint, "tell", listen)
    array = np.random.default_rng(3).integers(0, 256, 4 * CHUNK + 5000, np.uint8)
    memory = memoryview(array)
    sizes = [CHUNK, CHUNK, CHUNK, CHUNK, 5000]
    order = [0, 1, 3, 2, 4]  # of the array; the third and the fourth are not side by side
    for count, chunk in enumerate(order, 1):
        at = chunk * CHUNK
        reader.send(POSTED, BEGUN | count, (count - 1) * CHUNK, memory[at : at + sizes[chunk]], (count, 0, 0))
    for count in range(1, len(order) + 1):
        reader.send(TAKEN, BEGUN | count, 0, memoryview(b""), (count, 0, 0))
    until(reader.flush, "no room")
    wait(peer, TAKEN, len(order))
    for slot, chunk in enumerate(order):
        at = chunk * CHUNK
        there = peer.carve(POSTED, slot, 0, sizes[chunk], np.dtype(np.uint8))
        assert (there == array[at : at + sizes[chunk]]).all(), f"chunk {chunk}"
    assert reader.told(TAKEN, BEGUN | len(order))
    assert sum(len(frames.unpack(message)) for message in told) == 2 * len(order)
    assert len(told) < 2 * len(order)


def test_an_array_is_held_until_its_put_has_ended(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller may let go of it when the op has returned, and nobody knows when a put to who is stopped ends."""
    reader, _ = pair
    state = "PROC"
    for each in link.writer.endpoint()._agents:
        monkeypatch.setattr(each, "transfer", lambda handle: state)
        monkeypatch.setattr(each, "check_xfer_state", lambda handle: state)
    monkeypatch.setattr(nixl_agent, "_LINGER", 1e9)  # a peer that is forgotten meanwhile keeps what is under way
    array = np.zeros(2 * CHUNK, np.uint8)
    gone = weakref.ref(array)
    for count in (1, 2):  # one put
        at = (count - 1) * CHUNK
        reader.send(POSTED, BEGUN | count, at, memoryview(array)[at : at + CHUNK], (count, 0, 0))
    assert [reader.told(POSTED, BEGUN | count) for count in (1, 2)] == [False, False]
    del array
    reader.close()
    gc.collect()
    assert gone() is not None, "a put reads it"
    state = "DONE"
    until(lambda: gone() is None, "it is kept")


@pytest.mark.parametrize("long_ago", [False, True])
def test_a_put_that_fails_is_told_and_its_mirror_is_left(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch, long_ago: bool
) -> None:
    reader, peer = pair
    endpoint = link.writer.endpoint()
    error = next(each for each in endpoint.library.errors if each.__name__ == "nixlRemoteDisconnectError")

    def fails(handle: Any) -> str:
        raise error("gone")

    for each in endpoint._agents:
        monkeypatch.setattr(each, "transfer", lambda handle: "PROC")
        monkeypatch.setattr(each, "check_xfer_state", fails)
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    reader.flush()
    until(lambda: bool(link.heard), "nobody is told")
    assert link.heard[0][:2] == (1, EPOCH)
    assert "nixlRemoteDisconnectError" in link.heard[0][2]
    reader.send(POSTED, BEGUN | 2, 0, memoryview(b"more"), (2, 0, 0))
    with pytest.raises(ConnectionError, match="nixlRemoteDisconnectError"):
        reader.flush()
    monkeypatch.undo()
    reader.close()
    if long_ago:
        with endpoint.lock:
            endpoint._look_around(time.monotonic() + 60)
        assert not endpoint._remotes
    again, fresh = link.connect(EPOCH + 1)
    assert fresh.mirror is not peer.mirror, "a put of which nobody knows may still write there"
    again.send(POSTED, (EPOCH + 1) << COUNTER | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    again.flush()
    until(lambda: fresh.words[POSTED] == (EPOCH + 1) << COUNTER | 1, "no word")
    again.close()
    fresh.close()


def test_a_put_that_never_ends_has_a_deadline(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _ = pair
    endpoint = link.writer.endpoint()
    for each in endpoint._agents:
        monkeypatch.setattr(each, "transfer", lambda handle: "PROC")
        monkeypatch.setattr(each, "check_xfer_state", lambda handle: "PROC")
    monkeypatch.setattr(endpoint.puts, "patience", 0.01)
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    reader.flush()
    until(lambda: bool(link.heard), "nobody is told")
    assert "is at PROC after" in link.heard[0][2]


@pytest.mark.parametrize(
    "wrong", [dict(value=(EPOCH + 1) << COUNTER | 1), dict(number=frames.EARLY + 1), dict(word=TAKEN)]
)
def test_a_wrong_frame_changes_nothing_and_ends_the_connection(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], wrong: dict[str, int]
) -> None:
    reader, peer = pair
    before = peer.words.tobytes()
    shown = frames.Frame(POSTED, peer.channel, 1, 0, 4, 1, BEGUN | 1, (1, 1, 1), b"evil")._replace(**wrong)
    with link.writer.endpoint().lock:
        link.writer.endpoint().tell(reader._remote, frames.pack(*shown))
    until(lambda: bool(link.lost), "nobody is told")
    assert link.lost[0][:2] == (0, EPOCH)
    assert peer.words.tobytes() == before


def test_a_connection_that_ends_is_told_once_and_not_when_quiet(link: Link) -> None:
    link.lost = []
    reader, peer = link.connect()
    other, quiet = link.connect(EPOCH + 1)
    quiet.quiet()
    other.close()
    reader.close()
    until(lambda: bool(link.lost), "nobody is told")
    assert link.lost == [(0, EPOCH, "connection for data: closed by the other side")]
    peer.close()
    quiet.close()
    assert len(link.lost) == 1


def test_another_chunk_size_is_said_on_both_sides(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = mirror.kind_of
    monkeypatch.setattr(
        mirror,
        "kind_of",
        lambda endpoint: hello.Compatibility(hello.VERSION, 4, CHUNK if endpoint is link.writer._endpoint else 4096),
    )
    with pytest.raises(ExceptionPair) as caught:
        link.connect()
    monkeypatch.setattr(mirror, "kind_of", kind)
    there, here = caught.value.args
    assert f"replica 1 differs: bytes of a chunk (C) 4096 there, {CHUNK} here" in str(there)
    assert f"bytes of a chunk (C) 4096 there, {CHUNK} here" in str(here)


def test_nobody_gets_through(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way by NIXL is cut, as with interfaces of two networks: said within the time, with both sides' devices."""
    passed = [0.0]  # seconds, when all is said but what goes by NIXL
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr(mirror, "time", clock)
    monkeypatch.setattr(NixlMirrorWriter, "greet", lambda *args: passed.append(passed.pop() + hello.PATIENCE))
    with pytest.raises(ExceptionPair) as caught:
        link.connect()
    text = str(caught.value.args[1])
    assert "nothing that replica 0 puts gets here within 10 s" in text
    assert text.count("lo") >= 2
    assert "UCX_NET_DEVICES" in text


@pytest.fixture
def fresh_link() -> Iterator[tuple[Link, dict[Nixl, set[int]]]]:
    """One whose agents nobody else has met, and the queues of each side."""
    made = Link(1)
    of: dict[Nixl, set[int]] = {}
    for side in (made.writer, made.reader):
        before = set(nixl_queues.queues())
        side.endpoint()
        of[side] = set(nixl_queues.queues()) - before
    yield made, of
    made.writer.close()
    made.reader.close()
    made.segment.close()


@pytest.mark.parametrize("deaf", ["reader", "writer"])
def test_who_hears_nothing_any_more_starts_anew(fresh_link: tuple[Link, dict[Nixl, set[int]]], deaf: str) -> None:
    """As somebody was killed while it told it something: nobody is to blame, and all get through to each other."""
    link, of = fresh_link
    side = getattr(link, deaf)
    before = side.endpoint()
    (queue,) = of[side]
    nixl_queues.claim(nixl_queues.queues()[queue])
    reader, peer = link.connect()
    assert side.endpoint() is not before
    assert side.endpoint() in (peer.endpoint, reader._endpoint)
    reader.send(POSTED, BEGUN | 1, 0, link.staged(POSTED, 0, 0, bytes(100_000)), (41, 99, 7))
    reader.flush()
    wait(peer, POSTED, 1)
    reader.close()
    peer.close()
    until(lambda: not before._thread.is_alive(), "it goes on looking")


def test_connections_end_of_who_hears_nothing_any_more(fresh_link: tuple[Link, dict[Nixl, set[int]]]) -> None:
    """Those that it reads and those that it is read by: nothing that they have begun gets through. No others."""
    link, of = fresh_link
    reader, peer = link.connect(EPOCH)
    back, mirrored = link.connect(EPOCH + 1, backwards=True)
    link.lost = []
    (queue,) = of[link.reader]
    nixl_queues.claim(nixl_queues.queues()[queue])
    again, there = link.connect(EPOCH + 2)
    assert there.endpoint.retired == ""
    back.send(POSTED, (EPOCH + 1) << COUNTER | 1, 0, memoryview(b"more"), (1, 0, 0))
    with pytest.raises(ConnectionError, match="hears nothing by NIXL"):
        back.flush()
    for each in (reader, peer, back, mirrored, again, there):
        each.close()


def test_who_hears_nothing_in_an_op_starts_anew(fresh_link: tuple[Link, dict[Nixl, set[int]]]) -> None:
    """As who was killed while it told it something was no member, so that no connection is made."""
    link, of = fresh_link
    reader, peer = link.connect()
    before = link.reader.endpoint()
    (queue,) = of[link.reader]
    nixl_queues.claim(nixl_queues.queues()[queue])
    peer.overdue(hello.SOON)
    until(lambda: bool(link.lost), "it does not ask itself")
    ((replica, epoch, reason),) = link.lost
    assert (replica, epoch) == (0, EPOCH)
    assert "this process hears nothing by NIXL" in reason
    assert link.reader.endpoint() is not before
    later, next_peer = link.connect(EPOCH + 1)
    for each in (reader, peer, later, next_peer):
        each.close()


@pytest.mark.parametrize("shortage", [RuntimeError("can't start new thread"), OSError(errno.EMFILE, "too many files")])
def test_a_shortage_while_a_process_asks_itself_ends_no_thread(
    shortage: Exception, fresh_link: tuple[Link, dict[Nixl, set[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread moves the puts, and asks again later."""
    link, _ = fresh_link
    asked: list[object] = []

    def short(endpoint: object) -> None:
        asked.append(endpoint)
        raise shortage

    monkeypatch.setattr(link.reader, "_ask", short)
    endpoint = link.reader.endpoint()
    for times in (1, 2):
        endpoint._doubted = float("-inf")
        endpoint.doubt(hello.SOON)
        until(lambda n=times: len(asked) == n, "it does not ask itself")  # type: ignore[misc]


def test_an_endpoint_that_gets_no_thread_leaves_no_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Nixl("short", ("lo",))
    begin = threading.Thread.start

    def short(thread: threading.Thread) -> None:
        if thread.name == "ftcomm-nixl":
            raise RuntimeError("can't start new thread")
        begin(thread)

    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = []
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", short)
            for _ in range(3):
                with pytest.raises(RuntimeError, match=r"can't start new thread.*raise its limits"):
                    made.endpoint()
                before.append(held())
    finally:
        gc.enable()
    assert before == before[:1] * 3, "descriptors of UCX"
    made.endpoint()
    made.close()


def test_who_hears_waits_on(fresh_link: tuple[Link, dict[Nixl, set[int]]]) -> None:
    """However long: it asks itself whenever it has waited for twice as long, and nothing is mapped for that again."""
    link, _ = fresh_link
    reader, peer = link.connect()
    endpoint, asked = link.reader.endpoint(), list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        reaches = HearingProbe.reaches
        patch.setattr(HearingProbe, "reaches", lambda *args: asked.append(reaches(*args)) or asked[-1])
        mapped = 0
        for number in range(1, 6):
            peer.overdue(0.9 * hello.SOON)  # not yet
            endpoint._doubted = float("-inf")
            peer.overdue(2 * hello.SOON)
            peer.overdue(2 * hello.SOON)  # not again yet
            until(lambda number=number: len(asked) == number, "it does not ask itself")  # type: ignore[misc]
            mapped = mapped or len(nixl_queues.mapped())
        assert len(nixl_queues.mapped()) == mapped
    assert asked == [True] * 5
    assert link.reader.endpoint() is endpoint
    assert not link.lost
    reader.close()
    peer.close()


def test_who_hears_keeps_its_agents(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    """Whatever the other side does: it is dialled again, and its connections go on."""
    reader, peer = pair
    before = link.reader.endpoint(), link.writer.endpoint()
    greet, greeted = NixlMirrorWriter.greet, list[int]()

    def late(self: NixlMirrorWriter) -> None:
        greeted.append(self.epoch)
        if len(greeted) > 1:
            greet(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlMirrorWriter, "greet", late)
        later, next_peer = link.connect(EPOCH + 1)
    assert greeted == [EPOCH + 1] * 2
    assert (link.reader.endpoint(), link.writer.endpoint()) == before
    reader.send(POSTED, BEGUN | 1, 0, memoryview(b"more"), (1, 0, 0))
    reader.flush()
    wait(peer, POSTED, 1)
    assert not link.lost
    later.close()
    next_peer.close()


def test_who_says_nothing_is_not_waited_for(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "PATIENCE", 0.2)
    near, far = socket.socketpair()
    with pytest.raises((TimeoutError, OSError)):
        link.reader.connect(0, EPOCH, NONCE, lambda: near, lambda *args: None)
    far.close()


class Asked:
    """What `connect` dials and what becomes of it: the other side as `accept` makes it, or one that has no NIXL."""

    def __init__(self, link: Link, refuses: bool) -> None:
        self.link, self.refuses = link, refuses
        self.asked: list[str] = []

    def dial(self, what: str) -> socket.socket:
        near, far = socket_pair()
        self.asked.append(what)
        if what == connect.NIXL:
            accept = self.refuse if self.refuses else self.accept
            threading.Thread(target=accept, args=(far,), daemon=True).start()
        return near

    def accept(self, sock: socket.socket) -> None:
        self.link.writer.accept(1, EPOCH, sock, lambda *args: None)

    def refuse(self, sock: socket.socket) -> None:
        hello.receive(sock)
        kind = hello.Compatibility(hello.VERSION, SLOTS, CHUNK)
        hello.send(sock, hello.WriterAnswer(kind, problem="NIXL is not installed. Install it"))


@pytest.mark.parametrize(
    ("mode", "rdma", "refuses", "how"),
    [
        ("nixl", False, False, "nixl"),
        ("auto", True, False, "nixl"),
        ("auto", True, True, "tcp"),
        ("auto", False, False, "tcp"),
        ("tcp", True, False, "tcp"),
    ],
)
def test_which_way_is_taken(
    link: Link, monkeypatch: pytest.MonkeyPatch, mode: str, rdma: bool, refuses: bool, how: str
) -> None:
    monkeypatch.setattr(connect, "rdma_available", lambda: rdma)
    monkeypatch.setattr(connect, "own_nixl", lambda: link.reader)
    monkeypatch.setenv(nixl_network.TRUSTED, "1")  # between these two "hosts"
    asked = Asked(link, refuses)
    here, there = (Address("127.0.0.1", 1, boot, 1, 1, NONCE) for boot in ("a", "b"))
    peer = connect.connect(1, here, 0, there, epoch=EPOCH, mode=mode, dial=asked.dial, on_lost=lambda *args: None)
    assert peer.transport == how
    assert asked.asked == (["nixl"] if how == "nixl" else ["nixl", "data"] if refuses else ["data"])
    peer.close()


def test_who_wants_nixl_is_told_why_not(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "own_nixl", lambda: link.reader)
    monkeypatch.setenv(nixl_network.TRUSTED, "1")
    asked = Asked(link, refuses=True)
    here, there = (Address("127.0.0.1", 1, boot, 1, 1, NONCE) for boot in ("a", "b"))
    with pytest.raises(TransportError, match=r"replica 0 cannot be reached by NIXL: .* NIXL is not installed"):
        connect.connect(1, here, 0, there, epoch=EPOCH, mode="nixl", dial=asked.dial, on_lost=lambda *args: None)
