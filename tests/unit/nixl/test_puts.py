"""What is put by NIXL, and from which memory: it is registered, held, and given back."""

from __future__ import annotations

import contextlib
import gc
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ftcomm.errors import TransportError
from ftcomm.transport.base import CannotSend
from ftcomm.transport.nixl import agent as nixl_agent
from ftcomm.transport.nixl import frames
from ftcomm.transport.nixl import puts as nixl_puts
from ftcomm.transport.nixl.mirror import NixlMirror
from ftcomm.transport.nixl.writer import NixlMirrorWriter
from ftcomm.transport.segment import (
    CHUNK,
    POSTED,
    SLOTS,
    TAKEN,
)
from tests.unit.nixl.rig import BEGUN, Link, until, until_all_have_ended, wait
from tests.unit.test_nixl import GpuArray

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")


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
