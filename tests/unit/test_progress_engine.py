"""Messages between the posts of several members, over real connections: order, bounds, wrong ones, ends."""

from __future__ import annotations

import heapq
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ftcomm.control.views import Address, Addresses, Member, View
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, LostError, MismatchError, RemovedError
from ftcomm.p2p import core, deadlines, matching, progress, protocol
from ftcomm.p2p.calls import JobProgressEngine, Messages, MessageWork
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.p2p.protocol import ReceiverKind, SenderKind
from ftcomm.transport.group_connection import GroupConnection
from tests.rigs.exchange import DEADLINE, Caller, socket_pair
from tests.rigs.static_ranks import Ranks, nothing_left, together

pytestmark = pytest.mark.protocol


EDGE = protocol.EAGER // 4  # float32 in the longest message that is sent unasked


class Rank(Messages):
    """Rank `me` of `posts`, which are connected with each other when somebody dials."""

    def __init__(self, me: int, members: list[Rank], size: int) -> None:
        super().__init__("", me, ProgressEngine(f"rank {me}", self._dial, lambda peer: f"rank {peer}"))
        self.roster, self.members = tuple(range(size)), members
        self.unreachable: set[int] = set()

    def _default_timeout(self) -> float:
        return DEADLINE

    def _dial(self, peer: int) -> socket.socket:
        if peer in self.unreachable:
            raise ConnectionRefusedError("nobody listens")
        near, far = socket_pair()
        self.members[peer]._p2p.accept(far, self._me)
        return near


@pytest.fixture
def members() -> Iterator[list[Rank]]:
    made: list[Rank] = []
    made += [Rank(me, made, 3) for me in range(3)]
    yield made
    for member in made:
        member._p2p.fail(RuntimeError("the test is over"))
    for member in made:
        member._p2p.close(RuntimeError("the test is over"))


def raw(members: list[Rank], sender: int, receiver: int) -> socket.socket:
    """A connection on which the test says what it likes in the name of `sender`."""
    near, far = socket_pair()
    members[receiver]._p2p.accept(far, sender)
    near.settimeout(DEADLINE)
    return near


def head(kind: int, number: int, nbytes: int, tag: int = 0, dtype: str = "uint8") -> bytes:
    return protocol.HEAD.pack(protocol.MAGIC, kind, number, tag, nbytes, dtype.encode())


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def expire(member: Messages, sending: MessageWork) -> None:
    """Its deadline passes now."""
    engine = member._p2p
    with engine._lock:
        heap = engine._deadlines.heap
        heap[:] = [(0.0 if each is sending._message else at, n, each) for at, n, each in heap]
        heapq.heapify(heap)
        engine._ring()


def until_letter(member: Messages, source: int) -> None:
    until(lambda: member._p2p._core.matching.arrivals(source))


@pytest.mark.parametrize("count", [0, 1, 1000, EDGE - 1, EDGE, EDGE + 1, 3_000_000])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_every_size_whoever_comes_first(members: list[Rank], count: int, first: str) -> None:
    x, out = np.arange(count, dtype=np.float32), np.full(count, -1, np.float32)
    calls = [
        lambda: members[0].send(x, 1, 5, async_op=True),
        lambda: members[1].recv(out, 0, 5, async_op=True),
    ]
    started = [call() for call in (calls if first == "send" else calls[::-1])]
    sent, received = started if first == "send" else started[::-1]
    assert received.wait() is out
    assert received.source == 0
    assert sent.wait() is None
    assert sent.done()
    np.testing.assert_array_equal(out, x)


def test_all_in_the_order_of_their_sender_and_tag() -> None:
    """Members send at random, small and big, and receive in another order, by tag, from one or from anybody."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")

    def body(groups: list[Any], me: int) -> None:
        rng = random.Random(seed + me)
        script = random.Random(seed)
        # (sender, receiver, tag, count): the same for all
        plan = [
            (*script.sample(range(3), 2), script.randrange(3), script.choice([0, 1, 500, 30_000, 200_000]))
            for _ in range(120)
        ]
        mine = [(i, dst, tag, count) for i, (src, dst, tag, count) in enumerate(plan) if src == me]
        started = [groups[me].send(np.full(count, i, np.int32), dst, tag, async_op=True) for i, dst, tag, count in mine]
        streams: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, (src, dst, tag, count) in enumerate(plan):
            if dst == me:
                streams.setdefault((src, tag), []).append((i, count))
        while streams:
            key = rng.choice(sorted(streams))
            wanted = [streams[key].pop(0) for _ in range(rng.randint(1, len(streams[key])))]
            if not streams[key]:
                del streams[key]
            outs = [np.full(count, -1, np.int32) for _, count in wanted]
            for receiving in [groups[me].recv(out, *key, async_op=True) for out in outs]:
                receiving.wait()
                assert receiving.source == key[0]
            for (i, count), out in zip(wanted, outs, strict=True):
                np.testing.assert_array_equal(out, np.full(count, i, np.int32), f"seed {seed}")
        for sent in started:
            sent.wait()
        groups[me].allreduce(np.zeros(1))  # nobody ends before all have received

    with Ranks(3) as ranks:
        groups = ranks.make("g")
        together(lambda me: body(groups, me), 3)


def test_from_anybody(members: list[Rank]) -> None:
    out = np.zeros(4)
    members[2].send(np.full(4, 2.0), 0, 9)
    assert members[0].recv(out, tag=9) is out
    assert (out == 2.0).all()
    receiving = members[0].recv(out, tag=9, async_op=True)
    members[1].send(np.full(4, 1.0), 0, 9)
    assert receiving.wait() is out
    assert receiving.source == 1
    assert (out == 1.0).all()


def test_what_nobody_has_asked_for_takes_bounded_memory(members: list[Rank]) -> None:
    """Thousands of messages, the last of them wanted first: the receiver keeps a megabyte, and offers of the rest."""
    count = 5_000
    sent = [members[0].send(np.full(100, i, np.int64), 1, i % 7, async_op=True) for i in range(count)]
    big = members[0].send(np.zeros(1_000_000), 1, 100, async_op=True)
    box = members[1]._p2p._core.matching
    until = time.monotonic() + DEADLINE
    while len(arrivals := box.arrivals(0)) < count + 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(arrivals) == count + 1
    assert sum(len(arrival.data or b"") for arrival in arrivals) <= matching.MAX_BYTES
    assert sent[1].done()
    assert not sent[-1].done()
    got = np.zeros(100, np.int64)
    for tag in reversed(range(7)):
        for i in range(tag, count, 7):
            members[1].recv(got, 0, tag)
            assert (got == i).all()
    assert not big.done()
    members[1].recv(np.zeros(1_000_000), 0, 100)
    for sending in (*sent, big):
        sending.wait()
    assert not box.arrivals(0)


def test_messages_that_have_ended_are_forgotten(members: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "MANY", 20)
    members[0]._p2p._deadlines._many = 20
    members[0].recv(np.zeros(1), 2, async_op=True, timeout=DEADLINE / 2)  # its deadline stands before theirs
    for _ in range(100):
        members[0].send(np.zeros(10), 1)
        members[1].recv(np.zeros(10), 0)
    assert len(members[0]._p2p._deadlines.heap) <= 21


def test_a_message_waits_while_its_process_runs(members: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """For an hour the process is stopped: then what came meanwhile is received, and nothing else has waited."""
    jump = [0.0]
    clock = time.monotonic
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock() + jump[0])
    engine, out = members[0]._p2p, np.zeros(1)
    receiving = members[0].recv(out, 1, async_op=True)
    jump[0] = 3600.0
    with engine._lock:
        engine._ring()
        looked = engine._deadlines.ran.seconds
    until(lambda: engine._deadlines.ran.seconds > looked)
    members[1].send(np.ones(1), 0)
    receiving.wait()
    assert out[0] == 1
    expire(members[0], late := members[0].recv(out, 1, async_op=True))
    with pytest.raises(CollectiveTimeout, match="nothing came from rank 1"):
        late.wait()


def test_a_sender_holds_back_what_the_receiver_has_no_room_for(
    members: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "MAX_UNEXPECTED", 10)
    monkeypatch.setattr(matching, "MAX_UNEXPECTED", 10)
    sent = [members[0].send(np.full(20_000 * (i % 2), i), 1, async_op=True) for i in range(100)]
    given_up = members[0].send(np.zeros(1), 1, async_op=True, timeout=0.01)
    with pytest.raises(CollectiveTimeout, match="rank 1 has not received the message with tag 0"):
        given_up.wait()
    members[0].send(np.zeros(1), 2)
    members[2].recv(np.zeros(1))  # another receiver does not wait for it
    assert len(members[1]._p2p._core.matching.arrivals(0)) <= 10
    for i in range(100):
        out = np.zeros(20_000 * (i % 2), int)
        members[1].recv(out, 0)
        assert (out == i).all()
    for sending in sent:
        sending.wait()


# -- wrong ones --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, 100_000])
def test_another_size_or_dtype_is_an_error(members: list[Rank], count: int) -> None:
    for x, out in (
        (np.zeros(count, np.float32), np.zeros(count + 1, np.float32)),
        (np.zeros(count, np.float32), np.zeros(count, np.int32)),
    ):
        sent = members[0].send(x, 1, async_op=True)
        with pytest.raises(MismatchError, match=f"rank 0 has sent {4 * count} bytes of float32 with tag 0"):
            members[1].recv(out, 0)
        assert not out.any()
        if x.nbytes > protocol.EAGER:
            with pytest.raises(MismatchError, match="rank 1 receives another number of elements"):
                sent.wait()
        else:
            sent.wait()
    members[0].send(np.ones(3), 1, async_op=True)  # they go on
    out = np.zeros(3)
    members[1].recv(out, 0)
    assert out.all()


def test_wrong_arguments(members: list[Rank]) -> None:
    x = np.zeros(3)
    for wrong in (-1, 3, 0, "1"):
        with pytest.raises(ArgumentError, match="expected one of 0 to 2, and not 0, which is this one"):
            members[0].send(x, wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected one of 0 to 2"):
        members[0].recv(x, 3)
    with pytest.raises(ArgumentError, match="a tag of"):
        members[0].send(x, 1, 1 << 63)
    with pytest.raises(ArgumentError, match="timeout=0"):
        members[0].send(x, 1, timeout=0)
    with pytest.raises(ArgumentError, match="it has to be an array"):
        members[0].send(3.0, 1)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere in the world\r\n\r\n",
        head(9, 0, 0),
        head(SenderKind.EAGER, 0, protocol.EAGER + 1),
        head(SenderKind.DATA, 0, 4) + b"1234",
        head(SenderKind.RTS, 0, 1 << 60),
        b"".join(head(SenderKind.EAGER, i, 1) + b"x" for i in range(101)),
        b"".join(head(SenderKind.RTS, i, 1 << 30) for i in range(101)),
        b"".join(head(SenderKind.EAGER, i, 60_000) + bytes(60_000) for i in range(matching.MAX_BYTES // 60_000 + 1)),
    ],
)
def test_a_sender_that_says_what_cannot_be_is_dropped(
    members: list[Rank], said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "MAX_UNEXPECTED", 100)
    with raw(members, 0, 1) as sock:
        waiting = members[1].recv(np.zeros(5), 0, 1, async_op=True)
        with pytest.raises((BrokenPipeError, ConnectionResetError, LostError)):  # noqa: PT012
            sock.sendall(said)
            while sock.recv(1 << 16):
                pass
            waiting.wait()
        with pytest.raises(LostError, match="rank 0 was lost"):
            waiting.wait()
    x = np.ones(5)
    members[2].send(x, 1)  # the others are served
    out = np.zeros(5)
    assert members[1].recv(out, 2) is out


def test_a_receiver_that_says_what_cannot_be_is_dropped(members: list[Rank]) -> None:
    near, far = socket_pair()
    members[0]._dial = lambda peer: near  # type: ignore[method-assign]
    members[0]._p2p._dial = members[0]._dial
    sent = members[0].send(np.zeros(100_000), 1, async_op=True)
    with far:
        far.sendall(struct.pack("<IIQ", 0, 1, 0))
        with pytest.raises(LostError, match="rank 1 was lost: an answer that cannot be"):
            sent.wait()


# -- ends --------------------------------------------------------------------------------------------------------------


def test_timeouts(members: list[Rank]) -> None:
    out = np.zeros(100_000)
    with pytest.raises(CollectiveTimeout, match=r"nothing came from rank 1 with tag 3\. Did it send"):
        members[0].recv(out, 1, 3, timeout=0.05)
    with pytest.raises(CollectiveTimeout, match="nothing came from anybody with tag 3"):
        members[0].recv(out, tag=3, timeout=0.05)
    with pytest.raises(CollectiveTimeout, match="rank 0 has not received the message with tag 3"):
        members[1].send(out, 0, 3, timeout=0.05)  # withdrawn
    receiving = members[0].recv(out, 1, 3, async_op=True)
    with pytest.raises(CollectiveTimeout, match=r"has not ended within 0\.05 s; it goes on"):
        receiving.wait(0.05)
    members[1].send(np.ones(100_000), 0, 3)
    receiving.wait()
    assert out.all()


def test_a_withdrawn_message_that_was_asked_for_makes_room_for_the_next(members: list[Rank]) -> None:
    with raw(members, 0, 1) as sock:
        out, other = np.zeros(10, np.uint8), np.zeros(10, np.uint8)
        receiving = [members[1].recv(a, 0, async_op=True) for a in (out, other)]
        sock.sendall(head(SenderKind.RTS, 0, 10))
        assert sock.recv(16, socket.MSG_WAITALL) == struct.pack("<IIQ", protocol.MAGIC, ReceiverKind.CTS, 0)
        sock.sendall(head(SenderKind.CANCEL, 0, 0) + head(SenderKind.EAGER, 1, 10) + bytes([7] * 10))
        receiving[0].wait()
        assert (out == 7).all()
        assert not receiving[1].done()
        sock.sendall(head(SenderKind.EAGER, 2, 10) + bytes([8] * 10))
        receiving[1].wait()
        assert (other == 8).all()


def test_a_sender_that_stops_in_the_middle_fails_the_receive(members: list[Rank]) -> None:
    with raw(members, 0, 1) as sock:
        out = np.zeros(100_000, np.uint8)
        receiving = members[1].recv(out, 0, async_op=True)
        sock.sendall(head(SenderKind.RTS, 0, 100_000))
        sock.recv(16, socket.MSG_WAITALL)
        sock.sendall(head(SenderKind.DATA, 0, 100_000) + bytes([1] * 1000))
        until(lambda: out[999])
        expire(members[1], receiving)
        with pytest.raises(CollectiveTimeout, match="rank 0 has stopped in the middle of a message"):
            receiving.wait()
        was = out.copy()
        time.sleep(0.01)  # the end of the connection follows, and does not change what it has failed with
        with pytest.raises(CollectiveTimeout):
            receiving.wait()
        with pytest.raises(OSError):  # noqa: PT011, PT012
            while True:
                sock.sendall(bytes([1] * 1000))
        np.testing.assert_array_equal(out, was)  # nothing is written after the end


def test_a_receiver_that_stops_reading_fails_the_send(members: list[Rank]) -> None:
    near, far = socket_pair()
    members[0]._p2p._dial = lambda peer: near
    sent = members[0].send(np.zeros(10_000_000), 1, async_op=True)
    other = members[0].send(np.zeros(10), 1, async_op=True)
    with far:
        far.settimeout(DEADLINE)
        assert far.recv(protocol.HEAD.size, socket.MSG_WAITALL)
        far.sendall(struct.pack("<IIQ", protocol.MAGIC, ReceiverKind.CTS, 0))
        engine = members[0]._p2p
        until(lambda: engine._wires[engine._core.senders[1]].queue)  # what the connection does not take
        other.wait()
        expire(members[0], sent)
        with pytest.raises(LostError, match="rank 1 was lost: it has stopped reading"):
            sent.wait()


def test_an_offer_ends_with_its_connection(members: list[Rank]) -> None:
    with raw(members, 0, 1) as sock:
        sock.sendall(head(SenderKind.RTS, 0, 10))
        until_letter(members[1], 0)
    end = time.monotonic() + DEADLINE
    while members[1]._p2p._core.receivers:
        assert time.monotonic() < end
    with pytest.raises(LostError, match="rank 0 was lost: its connection was closed"):
        members[1].recv(np.zeros(10, np.uint8), 0)


def test_what_is_sent_while_a_connection_ends_goes_into_the_next(members: list[Rank]) -> None:
    sent: list[MessageWork] = []

    class Closing(socket.socket):
        def close(self) -> None:
            if not sent:
                sent.append(members[0].send(np.full(3, 2.0), 1, 7, async_op=True))
            super().close()

    near, far = socket_pair()
    first = Closing(fileno=near.detach())
    members[0]._p2p._dial = lambda peer: first
    with far:
        members[0].send(np.ones(3), 1)
        members[0]._p2p._dial = members[0]._dial
    out = np.zeros(3)
    assert members[1].recv(out, 0, 7).tolist() == [2.0] * 3
    sent[0].wait()


def test_a_small_message_does_not_overtake_the_bytes_of_a_big_one(members: list[Rank]) -> None:
    near, far = socket_pair()
    members[0]._p2p._dial = lambda peer: near
    sent = [members[0].send(np.full(20_000_000, 7, np.uint8), 1, async_op=True)]
    with far:
        far.settimeout(DEADLINE)
        assert far.recv(protocol.HEAD.size, socket.MSG_WAITALL) == head(SenderKind.RTS, 0, 20_000_000)
        far.sendall(struct.pack("<IIQ", protocol.MAGIC, ReceiverKind.CTS, 0))
        assert far.recv(protocol.HEAD.size, socket.MSG_WAITALL) == head(SenderKind.DATA, 0, 20_000_000)
        sent.append(members[0].send(np.full(10, 8, np.uint8), 1, async_op=True))  # the big one fills the connection
        left = 20_000_000
        while left:
            part = far.recv(min(left, 1 << 20))
            assert part
            assert part == b"\7" * len(part)
            left -= len(part)
        assert far.recv(protocol.HEAD.size, socket.MSG_WAITALL) == head(SenderKind.EAGER, 1, 10)
        for sending in sent:
            sending.wait()


def test_a_lost_member(members: list[Rank]) -> None:
    x = np.zeros(100_000)
    members[1].send(np.ones(3), 0, 1)
    until_letter(members[0], 1)  # it has come before the end
    members[1].send(x, 2, 1, async_op=True)
    started = [
        members[0].recv(x, 1, 2, async_op=True),
        members[0].send(x, 1, 2, async_op=True),
        members[0].send(x, 1, 3, async_op=True),
    ]
    anybody = members[0].recv(x, tag=5, async_op=True)
    members[0]._p2p.lose(1, "it is no more")
    for message in started:
        with pytest.raises(LostError, match="rank 1 was lost: it is no more"):
            message.wait()
    for call in (lambda: members[0].recv(x, 1, 2), lambda: members[0].send(x, 1, 2)):
        with pytest.raises(LostError, match="rank 1 was lost: it is no more"):
            call()
    # A dial that was under way is over: it would replace the connection of a later one.
    until(lambda: not any(thread.name == "ftcomm-p2p-dial" for thread in threading.enumerate()))
    out = np.zeros(3)
    members[0].recv(out, 1, 1)
    assert not anybody.done()
    members[2].send(x, 0, 5)
    assert anybody.wait() is x
    assert anybody.source == 2
    until(lambda: 0 not in members[1]._p2p._core.senders)  # what it sent now would go where nobody reads any more
    members[1].send(np.ones(3), 0, 1)  # it is back
    until_letter(members[0], 1)
    assert members[0].recv(out, 1, 1).tolist() == [1.0] * 3
    members[0]._p2p.found(1)
    members[0].send(np.ones(3), 1, 1)
    assert members[1].recv(out, 0, 1) is out


def test_what_an_earlier_life_has_sent_is_gone_when_the_next_one_calls(members: list[Rank]) -> None:
    members[1].send(np.full(3, 1.0), 0, 1)
    out = np.zeros(3)
    until_letter(members[0], 1)
    with raw(members, 1, 0) as again:
        again.sendall(head(SenderKind.EAGER, 0, 24, tag=1, dtype="float64") + np.full(3, 2.0).tobytes())
        members[0].recv(out, 1, 1)
        assert (out == 2.0).all()


class InJob(Messages):
    """Replica `me` of two."""

    def __init__(self, me: int, dial: Callable[..., socket.socket]) -> None:
        super().__init__("", me, JobProgressEngine(me, 0, dial))
        self.roster = (0, 1)

    def _default_timeout(self) -> float:
        return DEADLINE


def view(epoch: int, **lives: str) -> View:
    here = Address("127.0.0.1", 1, "boot", 1, 3, "0" * 32)
    members = (Member(int(name[1:]), life, Addresses.of((here,)), True) for name, life in lives.items())
    return View(epoch, None, tuple(members))


def test_in_a_job_the_views_say_who_is_lost_and_who_has_come_back() -> None:
    dials: list[tuple[str, int]] = []

    def dial(replica: int, life: str, epoch: int) -> socket.socket:
        dials.append((life, epoch))
        near, far = socket_pair()
        replicas[replica]._p2p.incoming(GroupConnection("*", "p2p", 1 - replica, life, far, epoch))
        return near

    replicas = [InJob(0, dial), InJob(1, dial)]
    survivor, lost = replicas
    try:
        for replica in replicas:
            replica._p2p.enter(view(1, r0="a", r1="b"))
        lost.send(np.ones(3), 0)
        assert (survivor.recv(np.zeros(3), 1) == 1).all()
        waiting = survivor.recv(np.zeros(3), 1, async_op=True)
        survivor._p2p.enter(view(2, r0="a"))
        for call in (waiting.wait, lambda: survivor.send(np.ones(3), 1), lambda: survivor.recv(np.zeros(3), 1)):
            with pytest.raises(LostError, match="replica 1 was lost: it is not in the view of epoch 2"):
                call()
        near, far = socket_pair()
        life, epoch = dials[0]
        survivor._p2p.incoming(
            GroupConnection("*", "p2p", 1, life, far, epoch)
        )  # it does not know that yet, and calls again
        near.settimeout(DEADLINE)
        assert near.recv(1) == b""
        near.close()
        lost._p2p.close(FtcommError("it is dead"))
        back = replicas[1] = InJob(1, dial)
        back._p2p.enter(view(3, r0="a", r1="c"))
        back.send(np.ones(3), 0)  # it is ahead of us
        until_letter(survivor, 1)
        assert (survivor.recv(np.zeros(3), 1) == 1).all()
        survivor._p2p.enter(view(3, r0="a", r1="c"))
        survivor.send(np.ones(3), 1)
        back.recv(np.zeros(3), 0)
        survivor._p2p.enter(view(4, r0="a"))
        back._p2p.close(FtcommError("it is dead, too"))
        back = replicas[1] = InJob(1, dial)
        survivor._p2p.enter(view(5, r0="a", r1="d"))
        sent = survivor.send(np.ones(3), 1, async_op=True)  # it has not called yet
        back.recv(np.zeros(3), 0)
        sent.wait()
        back._p2p.fail(RemovedError("the job went on without it"))
        with pytest.raises(RemovedError):
            back.send(np.ones(3), 0)
    finally:
        for replica in replicas:
            replica._p2p.close(FtcommError("the test is over"))


def test_a_joiner_whose_change_was_given_up_is_heard_when_it_comes_in_again_in_the_same_life() -> None:
    def dial(replica: int, life: str, epoch: int) -> socket.socket:
        near, far = socket_pair()
        replicas[replica]._p2p.incoming(GroupConnection("*", "p2p", 1 - replica, life, far, epoch))
        return near

    replicas = member, joiner = [InJob(0, dial), InJob(1, dial)]
    try:
        for epoch, lives in ((1, {"r0": "a"}), (2, {"r0": "a", "r1": "b"}), (3, {"r0": "a"})):
            member._p2p.enter(view(epoch, **lives))  # in epoch 2 alone: the joiner heard of the next one first
        joiner._p2p.enter(view(4, r0="a", r1="b"))
        joiner.send(np.ones(3), 0)  # it is ahead of the member
        member._p2p.enter(view(4, r0="a", r1="b"))
        assert (member.recv(np.zeros(3), 1, timeout=DEADLINE) == 1).all()
    finally:
        for replica in replicas:
            replica._p2p.close(FtcommError("the test is over"))


def test_who_cannot_be_reached_is_lost(members: list[Rank]) -> None:
    members[0].unreachable = {1}
    with pytest.raises(LostError, match="rank 1 was lost: it cannot be reached: nobody listens"):
        members[0].send(np.zeros(3), 1)
    members[0].unreachable = set()
    members[0].send(np.zeros(3), 1)


@nothing_left
def test_close_delivers_what_was_sent() -> None:
    """Over and over: the sender closes at once, while answers to it may still be on their way."""
    for attempt in range(30):
        made: list[Rank] = []
        made += [Rank(me, made, 2) for me in range(2)]
        for i in range(20):
            made[0].send(np.full(1000, i, np.float64), 1)
        closing = Caller.start(made[0]._p2p.close, FtcommError("closed"))
        out = np.zeros(1000)
        for i in range(20):
            made[1].recv(out, 0)
            assert (out == i).all(), attempt
        with pytest.raises(LostError, match="rank 0 was lost: its connection was closed"):
            made[1].recv(out, 0)
        closing.join()
        with pytest.raises(FtcommError, match="closed"):
            made[0].send(out, 1)
        made[1]._p2p.close(FtcommError("closed"))


def test_a_failure_ends_everything_and_touches_nothing_afterwards(members: list[Rank]) -> None:
    x, out = np.ones(5_000_000), np.zeros(5_000_000)
    started = [
        members[0].recv(out, 1, 1, async_op=True),
        members[0].send(x, 1, 1, async_op=True),
        members[1].recv(out, 0, 1, async_op=True),
    ]
    members[0]._p2p.fail(LostError("the group is over"))
    for message in started[:2]:
        with pytest.raises(LostError, match="the group is over"):
            message.wait()
    with pytest.raises((LostError, CollectiveTimeout)):
        started[2].wait()
    was = out.copy()
    with pytest.raises(LostError, match="the group is over"):
        members[0].recv(out, 1, 1)
    for member in members:
        member._p2p.close(LostError("the group is over"))
    np.testing.assert_array_equal(out, was)


@pytest.mark.parametrize("count", [5, 50_000])
def test_arrays_of_any_kind_and_dtype(members: list[Rank], count: int) -> None:
    pairs = [
        (torch.arange(count).to(dtype), torch.zeros(count, dtype=dtype))
        for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int16)
    ]
    pairs.append((torch.arange(count).to(torch.float8_e4m3fn), torch.zeros(count, dtype=torch.float8_e4m3fn)))
    pairs.append((torch.arange(2 * count)[::2], torch.zeros(2 * count, dtype=torch.int64)[::2]))  # strided, both
    for i, (x, out) in enumerate(pairs):
        members[0].send(x, 1, i, async_op=True)
        receiving = members[1].recv(out, 0, i, async_op=True)
        assert receiving.wait() is out
        assert torch.equal(out.view(torch.uint8) if i == 4 else out, x.view(torch.uint8) if i == 4 else x)
    frozen = np.arange(count)
    frozen.flags.writeable = False
    members[0].send(frozen, 1, async_op=True)  # is only read
    with pytest.raises(ArgumentError, match="not writable"):
        members[1].recv(frozen, 0)


@nothing_left
def test_idle_posts_have_no_thread() -> None:
    before = set(threading.enumerate())
    made: list[Rank] = []
    made += [Rank(me, made, 2) for me in range(2)]
    assert set(threading.enumerate()) <= before
    for member in made:
        member._p2p.close(FtcommError("closed"))
