"""send and recv with copy_engine=True, between ranks in one process, with copies of host memory for copy engines."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from ftcomm.engines.gpu_kernel.layout import INTERPRETED as LAYOUT
from ftcomm.engines.gpu_kernel.slots import DeviceSlots
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, LostError
from ftcomm.kernels.device import INTERPRETED
from ftcomm.p2p import protocol
from ftcomm.p2p.calls import Messages
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.p2p.protocol import ReceiverKind, SenderKind
from ftcomm.transport.segment import Segment
from ftcomm.transport.shm import ShmPeer
from tests.rigs.exchange import DEADLINE, socket_pair
from tests.rigs.static_ranks import together
from tests.unit.test_progress_engine import expire

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

from ftcomm.engines.gpu_kernel.interpreted import InterpretDevice

pytestmark = pytest.mark.protocol

CHUNK = LAYOUT.chunk
SIZE = 5 * CHUNK + 3


class Watched(DeviceSlots):
    """Counts what it copies; `on_copy` is called before each copy, and may raise or wait."""

    def __init__(self, device: InterpretDevice, nonce: str) -> None:
        super().__init__(device, nonce)
        self.puts = self.takes = 0
        self.on_copy: Callable[[], None] = lambda: None

    def put(self, slot: int, source: int, nbytes: int) -> None:
        self.puts += 1
        super().put(slot, source, nbytes)

    def take(self, nonce: str, slot: int, to: int, nbytes: int) -> None:
        self.takes += 1
        super().take(nonce, slot, to, nbytes)

    def move(self, to: int, source: int, nbytes: int) -> None:
        self.on_copy()
        super().move(to, source, nbytes)


class Rank(Messages):
    def __init__(self, me: int, members: list[Rank], size: int) -> None:
        self.roster, self.members = tuple(range(size)), members
        self.segment = Segment(LAYOUT)
        self.device = InterpretDevice(self.segment)
        self.slots = Watched(self.device, self.segment.nonce)
        super().__init__("", me, ProgressEngine(f"rank {me}", self._dial, "rank {}".format, self.slots))

    def peer(self, of: Rank) -> ShmPeer:
        return ShmPeer(of._me, os.getpid(), of.segment.fd, of.segment.nonce, LAYOUT)

    def _default_timeout(self) -> float:
        return DEADLINE

    def _dial(self, peer: int) -> socket.socket:
        near, far = socket_pair()
        self.members[peer]._p2p.accept(far, self._me, self.slots.nonce)
        return near


@pytest.fixture
def members() -> Iterator[list[Rank]]:
    made: list[Rank] = []
    made += [Rank(me, made, 3) for me in range(3)]
    for member in made:
        for other in made:
            if other is not member:
                member.device.reach(member.peer(other))
    yield made
    for member in made:
        member.slots.on_copy = lambda: None
        member._p2p.fail(RuntimeError("the test is over"))
    for member in made:
        member._p2p.close(RuntimeError("the test is over"))
        member.segment.close()


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def raw(members: list[Rank], sender: int, receiver: int) -> socket.socket:
    """A connection on which the test says what it likes in the name of `sender`."""
    near, far = socket_pair()
    members[receiver]._p2p.accept(far, sender, members[sender].slots.nonce)
    near.settimeout(DEADLINE)
    return near


def frame(kind: int, number: int, tag: int, nbytes: int) -> bytes:
    return protocol.HEAD.pack(protocol.MAGIC, kind, number, tag, nbytes, b"uint8")


def answer(sock: socket.socket) -> tuple[int, int]:
    _, kind, number = protocol.ANSWER.unpack(sock.recv(protocol.ANSWER.size, socket.MSG_WAITALL))
    return kind, number


def passes(members: list[Rank], target: int, tag: int = 0, nbytes: int = SIZE) -> bool:
    """Whether rank 0 sends to `target` what that receives. It may have to hear first that a connection has ended."""
    x, out = noise(nbytes), np.zeros(nbytes, np.uint8)
    sent = members[0].send(x, target, tag, copy_engine=True, async_op=True)
    end = time.monotonic() + DEADLINE
    while not any(arrival.tag == tag for arrival in members[target]._p2p._core.matching.arrivals(0)):
        assert time.monotonic() < end
        time.sleep(0.001)
    members[target].recv(out, 0, tag, copy_engine=True)
    sent.wait()
    return bool((out == x).all())


@pytest.mark.parametrize("nbytes", [1, protocol.EAGER, protocol.EAGER + 1, 2 * CHUNK, 3 * CHUNK, SIZE])
@pytest.mark.parametrize("receiver", [True, False])
def test_every_size_whether_the_receiver_says_so_or_not(members: list[Rank], nbytes: int, receiver: bool) -> None:
    x, out = noise(nbytes), np.zeros(nbytes, np.uint8)
    sent = members[0].send(x, 1, 5, async_op=True, copy_engine=True)
    receiving = members[1].recv(out, 0, 5, async_op=True, copy_engine=receiver)
    assert receiving.wait() is out
    sent.wait()
    np.testing.assert_array_equal(out, x)
    pieces = -(-nbytes // CHUNK) if nbytes > protocol.EAGER else 0
    assert (members[0].slots.puts, members[1].slots.takes) == (pieces, pieces)


def test_what_slots_cannot_do_goes_as_ever(members: list[Rank]) -> None:
    """A sender that does not ask for it; memory that is not mapped, and a sender of which no slots are free."""
    x = noise(SIZE)
    for case in ("plain sender", "unmapped", "no slots"):
        if case == "unmapped":
            members[1].device.leave(members[1].peer(members[0]))
        elif case == "no slots":
            members[1].device.reach(members[1].peer(members[0]))
            members[0]._p2p._core.pairs.clear()
        out = torch.zeros(SIZE, dtype=torch.uint8)
        receiving = members[1].recv(out, 0, 5, async_op=True, copy_engine=True)
        members[0].send(x, 1, 5, copy_engine=case != "plain sender")
        assert receiving.wait() is out
        np.testing.assert_array_equal(out.numpy(), x, case)
    assert (members[0].slots.puts, members[1].slots.takes) == (0, 0)


def test_arrays_that_are_not_one_run_of_bytes_go_as_ever(members: list[Rank]) -> None:
    strided = torch.arange(60_000.0)[::2]
    conjugated = torch.complex(torch.arange(30_000.0), torch.ones(30_000)).conj()
    readonly = np.arange(30_000.0)
    readonly.flags.writeable = False
    for x in (strided, conjugated, readonly):
        out = torch.zeros(x.shape, dtype=torch.float64 if isinstance(x, np.ndarray) else x.dtype)
        sent = members[0].send(x, 1, copy_engine=True, async_op=True)
        members[1].recv(out, 0, copy_engine=True)
        sent.wait()
        assert torch.equal(out, torch.from_numpy(readonly.copy()) if isinstance(x, np.ndarray) else x)
    assert members[0].slots.puts == 0
    with pytest.raises(ArgumentError):
        members[0].send(np.array([object()] * 30_000), 1, copy_engine=True)


def test_the_same_dtype_by_either_way(members: list[Rank]) -> None:
    for name in ("float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"):
        x = torch.from_numpy(noise(8 * CHUNK)).remainder(2).view(getattr(torch, name))
        for ways in ((True, False), (False, True)):
            out = torch.zeros_like(x)
            sent = members[0].send(x, 1, copy_engine=ways[0], async_op=True)
            members[1].recv(out, 0, copy_engine=ways[1])
            sent.wait()
            assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))


def test_all_in_the_order_of_their_sender_and_tag(members: list[Rank]) -> None:
    """Members send at random, to all at once, by slots and without, and receive in another order of tags."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    script = random.Random(seed)
    # (sender, receiver, tag, bytes, by copy engines on both)
    plan = [
        (
            *script.sample(range(3), 2),
            script.randrange(3),
            script.choice([10, CHUNK + 1, SIZE]),
            script.choice([True, False]),
        )
        for _ in range(90)
    ]

    def body(me: int) -> None:
        rng = random.Random(seed + me)
        started = [
            members[me].send(noise(n, i), dst, tag, copy_engine=engine, async_op=True)
            for i, (src, dst, tag, n, engine) in enumerate(plan)
            if src == me
        ]
        streams: dict[tuple[int, int], list[int]] = {}
        for i, (src, dst, tag, *_) in enumerate(plan):
            if dst == me:
                streams.setdefault((src, tag), []).append(i)
        while streams:
            key = rng.choice(sorted(streams))
            i = streams[key].pop(0)
            if not streams[key]:
                del streams[key]
            out = np.zeros(plan[i][3], np.uint8)
            members[me].recv(out, *key, copy_engine=rng.choice([True, False]))
            np.testing.assert_array_equal(out, noise(plan[i][3], i), f"seed {seed}")
        for sent in started:
            sent.wait()

    together(body, 3)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_message_that_fails_ends_when_no_copy_touches_it(members: list[Rank], who: str) -> None:
    """Its deadline passes while a copy is under way; that copy is waited for, and none comes behind it."""
    copying, go = threading.Event(), threading.Event()
    slots = members[who == "receiver"].slots

    def stop() -> None:
        copying.set()
        assert go.wait(DEADLINE)

    slots.on_copy = stop
    x, out = noise(SIZE), np.zeros(SIZE, np.uint8)
    sent = members[0].send(x, 1, copy_engine=True, async_op=True)
    received = members[1].recv(out, 0, copy_engine=True, async_op=True)
    assert copying.wait(DEADLINE)
    mine, other = (sent, received) if who == "sender" else (received, sent)
    expire(members[who == "receiver"], mine)
    with pytest.raises((LostError, CollectiveTimeout)):
        other.wait()  # has heard that it is over
    assert not mine.done()
    go.set()
    with pytest.raises((LostError, CollectiveTimeout), match="has stopped"):
        mine.wait()
    done = slots.puts + slots.takes
    out[:] = 7
    slots.on_copy = lambda: None
    assert passes(members, 1, tag=1)
    assert (out == 7).all()
    assert slots.puts + slots.takes == done + 6


def test_a_copy_that_fails_is_the_loss_of_the_connection(members: list[Rank]) -> None:
    def fail() -> None:
        raise FtcommError("the device is on fire")

    for who in (0, 1):
        members[who].slots.on_copy = fail
        receiving = members[1].recv(np.zeros(SIZE, np.uint8), 0, who, copy_engine=True, async_op=True)
        sent = members[0].send(noise(SIZE), 1, who, copy_engine=True, async_op=True)
        for message, burnt in ((sent, who == 0), (receiving, who == 1)):
            with pytest.raises(LostError, match="the device is on fire" if burnt else "was lost"):
                message.wait()
        members[who].slots.on_copy = lambda: None
        assert passes(members, 1, tag=3)


def test_slots_come_back_from_who_is_lost(members: list[Rank]) -> None:
    sender = members[0]
    sender._p2p._core.pairs[:] = [4]  # for one receiver at a time
    for receiver in (1, 2, 1, 2):
        before = sender.slots.puts
        assert passes(members, receiver)
        assert sender.slots.puts == before + 6
        assert sender._p2p._core.pairs == []
        sender._p2p.lose(receiver, "it was unplugged")
        sender._p2p.found(receiver)
        end = time.monotonic() + DEADLINE
        while sender._p2p._core.pairs != [4]:
            assert time.monotonic() < end
            time.sleep(0.001)


def test_what_was_copied_counts_when_the_sender_says_so(members: list[Rank]) -> None:
    """A sender that has gone may have filled its slots again while they were read."""
    for ends_well in (False, True):
        with raw(members, 1, 0) as sock:
            receiving = members[0].recv(np.zeros(2 * CHUNK, np.uint8), 1, 9, copy_engine=True, async_op=True)
            sock.sendall(frame(SenderKind.SLOTS, 0, 9, 2 * CHUNK))
            assert answer(sock) == (ReceiverKind.CTS, 0)
            for slot in (6, 7):
                sock.sendall(frame(SenderKind.READY, 0, slot, CHUNK))
                assert answer(sock) == (ReceiverKind.FREE, 0)
            assert not receiving.done()
            if ends_well:
                sock.sendall(frame(SenderKind.DONE, 0, 9, 2 * CHUNK))
                receiving.wait()
                assert receiving.source == 1
        if not ends_well:
            with pytest.raises(LostError):
                receiving.wait()


@pytest.mark.parametrize(
    ("kind", "number", "tag", "nbytes"),
    [
        (SenderKind.READY, 1, 0, CHUNK),  # another message
        (SenderKind.READY, 0, Watched.count, CHUNK),  # no such slot
        (SenderKind.READY, 0, -1, CHUNK),
        (SenderKind.READY, 0, 0, CHUNK - 1),
        (SenderKind.READY, 0, 0, 0),
        (SenderKind.READY, 0, 0, 1 << 40),
        (SenderKind.DONE, 0, 9, 2 * CHUNK),  # before all has come
        (SenderKind.DATA, 0, 9, 2 * CHUNK),
        (SenderKind.CANCEL, 0, 9, 2 * CHUNK),
    ],
)
def test_senseless_frames_of_a_sender_end_its_connection(
    members: list[Rank], kind: SenderKind, number: int, tag: int, nbytes: int
) -> None:
    receiving = members[0].recv(np.zeros(2 * CHUNK, np.uint8), 1, 9, copy_engine=True, async_op=True)
    with raw(members, 1, 0) as sock:
        sock.sendall(frame(SenderKind.SLOTS, 0, 9, 2 * CHUNK))
        assert answer(sock) == (ReceiverKind.CTS, 0)
        sock.sendall(frame(SenderKind.READY, 0, 0, CHUNK))
        assert answer(sock) == (ReceiverKind.FREE, 0)
        sock.sendall(frame(kind, number, tag, nbytes))
        with pytest.raises(LostError):
            receiving.wait()


def test_a_piece_that_was_not_given_cannot_be_taken(members: list[Rank]) -> None:
    near, far = socket_pair()
    members[0]._p2p._dial = lambda peer: near
    far.settimeout(DEADLINE)
    stopped = threading.Event()
    members[0].slots.on_copy = lambda: stopped.wait(DEADLINE) and None
    sent = members[0].send(noise(SIZE), 1, copy_engine=True, async_op=True)
    with far:
        far.recv(protocol.HEAD.size, socket.MSG_WAITALL)
        far.sendall(
            protocol.ANSWER.pack(protocol.MAGIC, ReceiverKind.CTS, 0)
            + protocol.ANSWER.pack(protocol.MAGIC, ReceiverKind.FREE, 0)
        )
        assert far.recv(1) == b""
        stopped.set()
        with pytest.raises(LostError, match="a piece of message 0 that it was not given"):
            sent.wait()
