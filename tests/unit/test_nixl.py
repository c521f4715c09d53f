"""What the transport by NIXL decides by itself: frames and their order, windows, registrations, mirrors, greetings."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import random
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcomm.bench.baseline import BaselineBlock, BaselineTask
from ftcomm.bench.nixl import LIBRARIES, NixlRequest, rows
from ftcomm.doctor import rdma
from ftcomm.doctor.check import Finding
from ftcomm.errors import SettingsError
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.nixl import frames as frames
from ftcomm.transport.nixl import handshake as hello
from ftcomm.transport.nixl import library as nixl_library
from ftcomm.transport.nixl import network
from ftcomm.transport.nixl.context import rails
from ftcomm.transport.nixl.frames import Frame, InOrder, pack, unpack
from ftcomm.transport.nixl.library import NixlLibrary, NixlMissing, UcxPaths, link_rate
from ftcomm.transport.nixl.memory import MirrorMemories, MirrorMemory, Region, Registrations, source_of
from ftcomm.transport.nixl.network import rdma_devices
from ftcomm.transport.nixl.window import ALIGN, LEAST, Window, cut, spread
from ftcomm.transport.segment import CHUNK, POSTED, TAKEN, published
from tests.rigs.static_ranks import together

EPOCH = 3
BEGUN = EPOCH << COUNTER


def frame(number: int = 0, **other: Any) -> Frame:
    return Frame(POSTED, 5, number, 64, 8, 0, BEGUN | (number + 1), (1, 2, 3))._replace(**other)


# -- frames ----------------------------------------------------------------------------------------------------------


def test_frames_come_out_as_they_went_in() -> None:
    inline = frame(follows=1, payload=b"12345678", belongs=(1 << 63, 0, 7))
    assert unpack(pack(*inline)) == [inline]
    assert unpack(pack(*frame(3)) + pack(*inline) + pack(*frame(4))) == [frame(3), inline, frame(4)]


MALFORMED = {
    "empty": b"",
    "short": pack(*frame())[:-1],
    "the second short": pack(*frame()) + pack(*frame())[:-1],
    "magic": b"x" + pack(*frame())[1:],
    "payload that should follow": pack(*frame(follows=1)),
    "payload that should not": pack(*frame()) + b"12345678",
    "payload of which there is more": pack(*frame(follows=1)) + bytes(9),
    "neither": pack(*frame(follows=2)),
}


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_frame(message: bytes) -> None:
    with pytest.raises(ValueError, match="notification"):
        unpack(message)


WRONG = {
    "word": dict(word=1),
    "greeting": dict(word=frames.GREETING),
    "other epoch": dict(value=(EPOCH + 1) << COUNTER | 1),
    "old epoch": dict(value=(EPOCH - 1) << COUNTER | 1),
    "no increase": dict(value=BEGUN),
    "payload of nothing": dict(word=TAKEN),
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_a_frame_that_cannot_be(fields: dict[str, int]) -> None:
    frames.check(frame(), published(16), BEGUN, EPOCH)
    with pytest.raises(ValueError, match=r"cannot be|payload"):
        frames.check(frame(**fields), published(16), BEGUN, EPOCH)


@pytest.mark.parametrize("seed", range(20))
def test_frames_count_in_their_order(seed: int) -> None:
    rng = random.Random(seed)
    # Whatever comes is at most EARLY frames ahead of what is awaited: sort by number plus a bounded delay.
    came = sorted(map(frame, range(40)), key=lambda one: one.number + rng.uniform(0, frames.EARLY / 2))
    order = InOrder()
    counted = [ready.number for one in came for ready in order.arrive(one)]
    assert counted == list(range(40)), f"seed {seed}"


@pytest.mark.parametrize("second", [frame(2), frame(frames.EARLY)], ids=["twice", "too early"])
def test_a_frame_that_cannot_come_now(second: Frame) -> None:
    order = InOrder()
    assert order.arrive(frame(2)) == []
    with pytest.raises(ValueError, match="frame"):
        order.arrive(second)


def test_a_frame_that_was_counted_does_not_come_again() -> None:
    order = InOrder()
    assert order.arrive(frame(0)) == [frame(0)]
    with pytest.raises(ValueError, match="while 1 is awaited"):
        order.arrive(frame(0))


# -- windows and rails -----------------------------------------------------------------------------------------------


def test_a_window_is_never_above_its_size() -> None:
    window = Window(100)
    window.open(60)
    assert window.fits(40)
    assert not window.fits(41)
    with pytest.raises(AssertionError, match="expected at most 100"):
        window.open(41)
    window.close(101)
    with pytest.raises(AssertionError, match="were on their way"):
        window.close(1)


@pytest.mark.parametrize("nbytes", [1, LEAST, 2 * LEAST - 1, 2 * LEAST, CHUNK - 4, CHUNK])
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_pieces_are_the_whole(nbytes: int, count: int) -> None:
    pieces = cut(nbytes, count)
    assert 1 <= len(pieces) <= count
    assert [offset for offset, _ in pieces] == [0, *itertools.accumulate(size for _, size in pieces[:-1])]
    assert sum(size for _, size in pieces) == nbytes
    assert all(offset % ALIGN == 0 and size > 0 for offset, size in pieces)
    assert len(pieces) == 1 or max(size for _, size in pieces) - min(size for _, size in pieces) <= 2 * ALIGN


def test_a_slow_rail_gets_less() -> None:
    windows = [Window(100), Window(100)]
    windows[0].open(70)  # which have not arrived yet
    assert spread([(0, 20), (20, 20)], windows) == [1, 1]
    assert spread([(0, 50), (50, 60)], windows) is None
    assert [window.bytes for window in windows] == [70, 0]
    assert rails("mlx5_0:1; mlx5_1:1") == ("mlx5_0:1", "mlx5_1:1")
    assert rails("") == ("",)


# -- memory ----------------------------------------------------------------------------------------------------------


class Card:
    """What registers, and refuses what a device would not forgive."""

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int, str, int]] = {}
        self.forgotten: list[Region] = []
        self._number = 0

    def register(self, address: int, nbytes: int, kind: str, device: int) -> list[Any]:
        self._number += 1
        self.registered[self._number] = address, nbytes, kind, device
        return [self._number]

    def deregister(self, handles: list[Any]) -> None:
        for handle in handles:
            del self.registered[handle]


@pytest.fixture
def card() -> Card:
    return Card()


def lease(cache: Registrations, memory: mmap.mmap) -> Region:
    source = source_of(memoryview(memory))
    return cache.lease(source.owner, source.base, source.extent)


def test_memory_is_registered_once_and_as_long_as_it_lives(card: Card) -> None:
    cache = Registrations(card.register, card.deregister, card.forgotten.append)
    memory = mmap.mmap(-1, 8192)
    first = lease(cache, memory)
    assert lease(cache, memory) is first
    assert len(card.registered) == 1
    cache.release(first)
    cache.release(first)
    assert card.registered, "it may be needed again"
    with pytest.raises(AssertionError, match="more often"):
        cache.release(first)
    first.leases = 0
    del memory
    gc.collect()
    other = mmap.mmap(-1, 8192)  # often at the same address
    assert lease(cache, other) is not first
    assert len(card.registered) == 1, "the memory that is gone is registered still"
    assert card.forgotten == [first]


def test_a_lease_outlives_the_owner(card: Card) -> None:
    cache = Registrations(card.register, card.deregister)
    memory = mmap.mmap(-1, 4096)
    region = lease(cache, memory)
    del memory
    gc.collect()
    cache.release(lease(cache, mmap.mmap(-1, 4096)))
    assert region.handles[0] in card.registered, "a put reads it"
    cache.release(region)
    assert not region.handles


def test_what_nobody_leases_makes_room(card: Card) -> None:
    cache = Registrations(card.register, card.deregister, kept=3 * 4096)
    memories = [mmap.mmap(-1, 4096) for _ in range(6)]
    held = lease(cache, memories[0])
    for memory in memories[1:]:
        cache.release(lease(cache, memory))
    assert cache.nbytes == 3 * 4096
    kept = {registered[0] for registered in card.registered.values()}
    assert held.address in kept, "leased"
    assert lease(cache, memories[-1]).address in kept, "the last that was used"


def test_an_array_of_a_caller_is_registered_as_long_as_it_lives(card: Card) -> None:
    """Each op sees it through views of its own, from place to place; the array is what stays."""
    cache = Registrations(card.register, card.deregister)
    array = np.zeros((4, 1 << 12), np.float32)
    at = array.ctypes.data

    def region_of(part: np.ndarray[Any, Any]) -> Region:
        memory = memoryview(part.reshape(-1).view(np.uint8))
        source = source_of(memory[64:128])
        assert (source.address, source.nbytes) == (part.ctypes.data + 64, 64)
        return cache.lease(source.owner, source.base, source.extent)

    whole = region_of(array)
    assert list(card.registered.values()) == [(at, array.nbytes, "DRAM", 1)]
    assert region_of(array) is whole
    row = region_of(array[2])
    assert (row.address, row.nbytes) == (array[2].ctypes.data, array[2].nbytes), "not more than is reduced"
    for region in (whole, whole, row):
        cache.release(region)
    gc.collect()
    assert len(card.registered) == 2, "the array lives"
    del array
    gc.collect()
    other = np.zeros(1 << 14, np.float32)
    region_of(other)
    assert [registered[0] for registered in card.registered.values()] == [other.ctypes.data]


class GpuArray:
    """What CuPy and torch tell of an array; it lies on no device."""

    nbytes = 1 << 20

    class device:
        id = 3

    def __init__(self, strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {"data": (0x7F0000000000, False), "strides": strides, "shape": (1 << 18,)}


def test_memory_of_a_gpu_is_registered_as_such(card: Card) -> None:
    cache = Registrations(card.register, card.deregister)
    array = GpuArray()
    source = source_of(array)
    assert (source.address, source.nbytes, source.kind, source.device) == (0x7F0000000000, 1 << 20, "VRAM", 3)
    region = cache.lease(source.owner, source.base, source.extent, source.kind, source.device)
    assert list(card.registered.values()) == [(0x7F0000000000, 1 << 20, "VRAM", 3)]
    assert cache.lease(array, 0x7F0000000000, 1 << 19, "VRAM", 3) is region
    with pytest.raises(ValueError, match="expected a contiguous one"):
        source_of(GpuArray(strides=(8,)))


def test_a_mirror_that_is_given_up_keeps_its_addresses(card: Card) -> None:
    mirrors = MirrorMemories(8192, card.register, card.deregister)
    taken = set()
    earlier: MirrorMemory | None = None
    for life in range(50):
        mirror = mirrors.use(f"life {life}")
        assert mirrors.use(f"life {life}") is mirror, "the next epoch of the same two"
        assert mirror.address not in taken, "a put of an earlier life may still write there"
        taken.add(mirror.address)
        mirror.memory[:4] = b"late"
        mirrors.leave(mirror)
        assert card.registered, "one of the epochs is left"
        mirrors.leave(mirror)
        assert not card.registered
        assert mirror.memory[:4] == bytes(4), "its pages are given back"
        if earlier is not None:
            assert earlier.memory[:4] == bytes(4), "and those that a late put has brought back"
        mirror.memory[:4] = b"late"  # does no harm
        earlier = mirror


def test_a_mirror_in_doubt_is_not_used_again(card: Card) -> None:
    mirrors = MirrorMemories(8192, card.register, card.deregister)
    doubtful = mirrors.use("a")
    mirrors.renew("a", doubtful)
    fresh = mirrors.use("a")
    assert fresh is not doubtful
    assert fresh.token != doubtful.token
    mirrors.leave(doubtful)
    assert mirrors.use("a") is fresh


# -- what the two say to each other, and what the library and the kernel say ---------------------------------------


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (dict(slots=8), "slots (S) 8 there, 4 here"),
        (dict(chunk=1 << 20), f"bytes of a chunk (C) {1 << 20} there, {CHUNK} here"),
        (dict(version=2), "version of the NIXL transport 2 there, 1 here"),
    ],
)
def test_members_that_differ_are_told_both_values(other: dict[str, int], said: str) -> None:
    fields: dict[str, Any] = dict(version=1, slots=4, chunk=CHUNK)
    here = hello.Compatibility(**fields)
    assert hello.differ(here, hello.Compatibility(**fields, nixl="9.9", devices="eth7"), "replica 3") == ""
    text = hello.differ(here, hello.Compatibility(**{**fields, **other}), "replica 3")
    assert text.startswith("replica 3 differs: ")
    assert said in text


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa5other", b"\xff" * 40])
def test_what_is_no_hello(data: bytes) -> None:
    for said in (len(data).to_bytes(4, "big") + data, b"\xff" * 4 + data):
        near, far = socket.socketpair()
        with near, far:
            far.sendall(said)
            with pytest.raises(ConnectionError, match="no message of the NIXL transport"):
                hello.receive(near)


SAID = """\
[1.2] [vm:7:0] ucp_worker.c:1997 UCX  INFO    0.0.ab.0 intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1.2] [vm:7:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:7:0]   | 0.0.ab.0 {where} cfg#1                                   |
[1.2] [vm:7:0]   | active message by ucp_am_send* from host memory          |
[1.2] [vm:7:0]   +--------+-------------+-----------------------------------+
[1.2] [vm:7:0]   | 0..inf | zero-copy   | wrong/device                      |
[1.2] [vm:7:0]   | 0.0.ab.0 {where} cfg#1                                   |
[1.2] [vm:7:0]   | remote memory write by ucp_put*{kind} from {memory} memory to host |
[1.2] [vm:7:0]   | Range  | Description |              Config               |
[1.2] [vm:7:0]   | 0..2K  | short       | wrong/device                      |
[1.2] [vm:7:0]   | 2049..inf | zero-copy   | {by} |"""


def said(**filled: str) -> list[str]:
    text = SAID.replace("intra-node", "{where}")
    ways = UcxPaths()
    return [str(way) for line in text.format(**filled).splitlines() if (way := ways.read(line))]


def test_what_ucx_says_of_its_way() -> None:
    """The lanes by themselves name TCP for puts, which go by CMA."""
    here = dict(where="intra-node", kind="(multi)", memory="host")
    assert said(**here, by="cma/memory") == ["puts by cma/memory, messages by tcp/lo"]
    there = dict(where="inter-node", kind="", memory="cuda/GPU0")
    both = "50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0"
    assert said(**there, by=both) == [f"puts of cuda/GPU0 memory by {both}, messages by tcp/lo"]


def test_a_library_that_cannot_be_loaded_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        if name == "nixl_cu12._api":
            raise ImportError("libcudart.so.12: cannot open shared object file")
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr("importlib.import_module", find)
    with pytest.raises(NixlMissing, match=r"cannot be loaded: nixl_cu12: libcudart.so.12.*pip install"):
        NixlLibrary()


@pytest.fixture
def sys_class(tmp_path: Path) -> Path:
    """A host with two RDMA devices, one of them up, and a slow interface."""
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
    for name, speed in (("eth0", "1000"), ("docker0", "-1")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "speed").write_text(speed)
    return tmp_path


def test_devices(sys_class: Path) -> None:
    assert rdma_devices(sys_class / "infiniband") == ["mlx5_0"]
    assert [link_rate(name, sys_class) for name in ("mlx5_0", "eth0", "docker0", "eth9")] == [
        "100 Gb/sec (4X EDR)",
        "1000 Mb/s",
        "",
        "",
    ]
    up, down = rdma.devices(sys_class / "infiniband")
    assert (up.verdict, down.verdict) == ("ok", "note")
    assert "mlx5_1" in down.said
    assert "DOWN" in down.said
    [none] = rdma.devices(sys_class / "nothing")
    assert none.verdict == "note"


def test_a_small_limit_of_locked_memory_is_wrong_where_there_is_rdma() -> None:
    [found] = rdma.locked_memory(8 << 20, rdma=True)
    assert (found.verdict, "8192 KB" in found.said, "ulimit -l unlimited" in found.mend) == ("wrong", True, True)
    assert [rdma.locked_memory(*case)[0].verdict for case in ((8 << 20, False), (1 << 30, True), (-1, True))] == [
        "note",
        "ok",
        "ok",
    ]


@pytest.mark.parametrize(
    ("env", "verdicts"),
    [
        ({}, []),
        ({"UCX_NET_DEVICES": "mlx5_0:1,eth0"}, ["ok", "ok"]),
        ({"UCX_NET_DEVICES": "mlx5_7:1"}, ["wrong"]),
        ({"UCX_NET_DEVICES": "docker0", "FTCOMM_HOST": "10.0.0.7"}, ["wrong"]),
        ({"UCX_NET_DEVICES": "docker0", "FTCOMM_HOST": "127.0.0.1"}, ["ok"]),
        ({"FTCOMM_NIXL_DEVICES": "mlx5_0:1;eth9"}, ["ok", "wrong"]),
    ],
)
def test_the_interfaces_that_are_named(sys_class: Path, env: dict[str, str], verdicts: list[str]) -> None:
    found = rdma.interface(env, sys_class)
    assert [one.verdict for one in found] == verdicts
    assert all(
        "eth0" in one.mend or one.verdict == "ok" or "interface" in one.mend or "these" in one.mend for one in found
    )


def test_another_thread_takes_our_variables_for_no_choice_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two agents of a process chose its network while the first was made: it then let UCX open ports."""
    for name in ("UCX_TLS", "FTCOMM_TRUSTED_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    alone = network.here()
    assert alone.ucx["UCX_TLS"]
    with nixl_library._log.capturing(alone.ucx):
        assert _getenv(b"UCX_TLS") == alone.ucx["UCX_TLS"].encode()  # what UCX reads
        assert network.here() == alone
    assert _getenv(b"UCX_TLS") is None


def _getenv(name: bytes) -> bytes | None:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return getenv(name)  # type: ignore[no-any-return]


def test_lines_of_the_log_are_read_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two endpoints of a process at a time: both knew how long it was before either had read it."""
    log, both, pread = nixl_library._Log(), threading.Barrier(2), os.pread
    log._fd, log._flush = os.memfd_create("log"), lambda: None
    os.write(log._fd, b"one\ntwo\n")

    def reads(*what: int) -> bytes:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return pread(*what)

    monkeypatch.setattr(os, "pread", reads)
    try:
        found = together(lambda _: log.lines(), 2)
        assert sorted(found, key=len) == [[], ["one", "two"]]
        os.write(log._fd, b"three\n")
        assert log.lines() == ["three"]
    finally:
        os.close(log._fd)


def test_what_is_wrong_has_a_mend() -> None:
    with pytest.raises(ValueError, match="how to mend"):
        Finding("x", "wrong", "broken")


def test_shares_are_of_puts_in_the_same_round() -> None:
    """A machine that is half as fast in the second round changes no share; the slowest rank counts."""
    task = BaselineTask(ranks=2, sizes=(1 << 20,), iterations=3, rounds=2, libraries=LIBRARIES)
    times = dict(zip(LIBRARIES, (100_000, 90_000, 80_000, 50_000, 110_000, 125_000), strict=True))
    blocks = [
        BaselineBlock(rank, 1 << 20, number, library, [time * (1 + number) - 10_000 * rank] * 3)
        for rank in range(2)
        for number in range(2)
        for library, time in times.items()
    ]
    puts, *_, one_way, _, reduced = rows(blocks, task, 1 << 20)
    assert [row.of_puts for row in (puts, one_way, reduced)] == pytest.approx([1.0, 2.0, 0.8])
    assert reduced.round_us == [125.0, 250.0]
    assert puts.rate_gbps == pytest.approx((1 << 20) / 150e-6 / 1e9)
    with pytest.raises(SettingsError, match="even number"):
        NixlRequest(ranks=3).check()
