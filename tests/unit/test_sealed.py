"""Somebody on the way: what he changes, repeats, leaves out, reorders, sends back or cuts off is noticed, in each kind
of connection, ends that one, and is counted."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.control import messages as m
from ftcomm.control import sealed, wire
from ftcomm.control.links import serve_messages
from ftcomm.control.sealed import RECORD, TAG, BadRecord, Channel, Keys, Mac
from ftcomm.groups.static_pairs import FRAMES, Pairs
from ftcomm.kernels.epochs import COUNTER
from ftcomm.membership.derived import Left
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.p2p.protocol import RecvRequest, SendRequest
from ftcomm.training import catchup_protocol
from ftcomm.transport import secure
from ftcomm.transport.segment import CHUNK, HEADER, POSTED
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.rigs.exchange import socket_pair
from tests.rigs.sealed_pair import SECRET, ends, records

DEADLINE = 60.0  # s

pytestmark = pytest.mark.protocol


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    near, far = socket_pair()
    near.settimeout(DEADLINE)
    far.settimeout(DEADLINE)
    with near, far:
        yield ends(near, far)


@pytest.mark.parametrize("length", [0, 6, 32, 64, 65, 200])
def test_the_tag_is_the_hmac_of_the_number_and_the_payload(length: int) -> None:
    key = bytes(range(1, 1 + length))
    mac = Mac(key)
    for number, payload in enumerate((b"", b"one", bytes(100_000))):
        tag = hmac.digest(key, number.to_bytes(8, "big") + payload, "sha256")[:TAG]
        assert mac.seal((payload,), len(payload)) == len(payload).to_bytes(4, "big") + payload + tag


Attack = Callable[[list[bytes]], list[bytes]]


# Of three records that the client has said, what comes to the server. The last one of each list is what is noticed; all
# before it are right.
def _flip(at: int) -> Attack:
    def attack(said: list[bytes]) -> list[bytes]:
        spoilt = bytearray(said[1])
        spoilt[at] ^= 1
        return [said[0], bytes(spoilt), said[2]]

    return attack


def _inject(said: list[bytes]) -> list[bytes]:
    return [said[0], records(b"an order")[0], *said[1:]]


def _of_another_connection(said: list[bytes]) -> list[bytes]:
    other = Mac(Keys(bytes(32), client=True).of("mac", sending=True))
    return [said[0], [other.seal((payload,), 5) for payload in (b"three", b"seven")][1], said[2]]


def _sent_back(said: list[bytes]) -> list[bytes]:
    """What the server itself has said first."""
    own = Mac(Keys(SECRET, client=False).of("mac", sending=True))
    own.seal((b"x",), 1)
    return [said[0], own.seal((b"three",), 5), said[2]]


ATTACKS: dict[str, Attack] = {
    "flips a bit of the payload": _flip(4),
    "flips a bit of the tag": _flip(-1),
    "makes one shorter": _flip(3),
    "repeats": lambda said: [said[0], said[0], said[1]],
    "leaves out": lambda said: [said[0], said[2]],
    "reorders": lambda said: [said[0], said[2], said[1]],
    "injects": _inject,
    "brings one of another connection": _of_another_connection,
    "sends one back": _sent_back,
}
attacks = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)


@attacks
def test_who_is_on_the_way_is_noticed(
    attack: Attack, pair: tuple[Channel, Channel], count: Callable[[str], int]
) -> None:
    near, far = pair
    for part in attack(records(b"first", b"again", b"other")):
        far.detach().sendall(part)
    assert near.recv(100) == b"first"
    with pytest.raises(BadRecord, match="something on the way"):
        near.recv(100)
    assert count("mac") == 1


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_messages_are_whole_however_their_bytes_are_cut(cut: int, pair: tuple[Channel, Channel]) -> None:
    payloads = [b"first", b"", bytes(70_000), b"last"]
    stream = b"".join(records(*payloads))
    parts = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    assert [message for part in parts for message in pair[0].arrived(part, 1 << 20)] == payloads


def test_who_hangs_up_and_reads_nothing_is_noticed() -> None:
    """What waits for it is never sent, so the end must not wait for that."""

    async def run() -> str:
        near, far = socket.socketpair()
        with far:
            near.setblocking(False)

            def ready(writer: wire.Writer) -> None:
                for _ in range(20):
                    writer.write(bytes(1 << 20))
                far.shutdown(socket.SHUT_WR)

            why = serve_messages(ends(near, far)[0], lambda message: None, ready)
            return await asyncio.wait_for(why, DEADLINE)

    assert asyncio.run(run()) == "its connection closed"


def test_messages_that_are_written_at_once_go_out_with_one_call_and_one_that_is_too_long_stays(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, count: Callable[[str], int]
) -> None:
    class Sent:
        unsent, is_closing, flushed, close = 0, False, None, None

        def __init__(self) -> None:
            self.writes: list[bytes] = []
            self.write = self.writes.append

    monkeypatch.setattr(wire, "MAX_MESSAGE", 6)
    near, far = pair
    stream = Sent()
    writer = wire.Writer(far, stream)  # type: ignore[arg-type]
    writer.write(b"first", b"too long", b"second", b"")
    writer.write(b"too long")
    assert len(stream.writes) == 1
    assert list(near.arrived(stream.writes[0], 6)) == [b"first", b"second", b""]
    stream.is_closing = True
    writer.write(b"late")
    assert len(stream.writes) == 1
    assert count("unsent") == 2


@attacks
def test_a_loop_of_the_control_plane_ends_its_connection(attack: Attack, count: Callable[[str], int]) -> None:
    heard: list[m.AnyMessage] = []
    first, *others = (m.Heartbeat(1), m.Heartbeat(2), m.Heartbeat(3))

    async def run() -> str:
        near, far = socket.socketpair()
        with far:
            near.setblocking(False)
            far.sendall(b"".join(attack(records(*map(m.encode, (first, *others))))))
            why = serve_messages(ends(near, far)[0], heard.append, lambda writer: None)
            return await asyncio.wait_for(why, DEADLINE)

    assert "something on the way" in asyncio.run(run())
    assert heard == [first]
    assert count("mac") == 1


def test_nothing_is_heard_after_a_record_of_somebody_else(pair: tuple[Channel, Channel]) -> None:
    """Else one could be left out by whoever spoils it, where a caller tries once more."""
    near, far = pair
    spoilt, right = records(b"left out", b"right")
    far.detach().sendall(spoilt[:-1] + bytes([spoilt[-1] ^ 1]) + right)
    for _ in range(3):
        with pytest.raises(BadRecord):
            near.recv(16)


def test_an_end_in_the_middle_of_a_record_is_no_end(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    (record,) = records(b"a word")
    far.detach().sendall(record[:-1])
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="in the middle"):
        near.recv(100)


@pytest.mark.parametrize("cut", [4, 5])
def test_an_end_after_the_length_of_a_record_is_no_end(cut: int, pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    far.detach().sendall(records(b"a word")[0][:cut])
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="in the middle"):
        near.recv(100)


def test_a_length_that_cannot_be_is_not_waited_for(pair: tuple[Channel, Channel], count: Callable[[str], int]) -> None:
    near, far = pair
    far.detach().sendall((RECORD + 1).to_bytes(4, "big"))
    with pytest.raises(BadRecord, match="at most"):
        near.recv(100)
    assert count("frame") == 1


# -- it carries bytes like a socket ----------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3 * RECORD), max_size=4), st.integers(5000, 2 * RECORD))
def test_bytes_come_as_they_were_sent(sizes: list[int], most: int) -> None:
    near, far = socket_pair()
    with near, far:
        near, far = ends(near, far)
        far.settimeout(DEADLINE)
        near.settimeout(DEADLINE)
        said = [bytes([at % 251]) * size for at, size in enumerate(sizes)]

        def say() -> None:
            for part in said:
                far.sendall(part)
            far.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        got = b""
        while part := near.recv(most):
            assert len(part) <= most
            got += part
        thread.join(DEADLINE)
    assert got == b"".join(said)


def test_what_a_socket_has_no_room_for_is_sent_later(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    near.setblocking(False)
    far.setblocking(False)
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            taken += far.send(bytes(RECORD))
    assert far.unsent
    assert not far.flush()
    got = bytearray(RECORD)
    received = 0
    while received < taken:
        with contextlib.suppress(BlockingIOError):
            while True:
                received += near.recv_into(got)
        far.flush()
    assert not far.unsent
    assert received == taken


def test_a_timeout_in_the_middle_of_a_record_loses_nothing(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    (record,) = records(b"a word")
    near.settimeout(0.01)
    for byte in record[:-1]:
        far.detach().send(bytes([byte]))
        with pytest.raises(TimeoutError):
            near.recv(100)
    far.detach().send(record[-1:])
    near.settimeout(DEADLINE)
    assert near.recv(2) == b"a "
    assert near.pending
    assert near.recv(100) == b"word"
    assert not near.pending


# -- each kind of connection -------------------------------------------------------------------------------------------


class Between:
    """Who is on the way: an attack makes what `far` gets of the first three records that `near` says."""

    def __init__(self, attack: Attack) -> None:
        ends_near, ends_far = socket_pair(), socket_pair()
        self.near, self.far = ends(ends_far[0], ends_near[0])[::-1]  # the client, the server
        up, down = ends_near[1], ends_far[1]
        for work in ((self._attack, up, down, attack), (self._carry, down, up)):
            threading.Thread(target=work[0], args=work[1:], daemon=True).start()

    def _attack(self, source: socket.socket, target: socket.socket, attack: Attack) -> None:
        source.settimeout(DEADLINE)
        with contextlib.suppress(OSError):
            for record in attack([self._record(source) for _ in range(3)]):
                target.sendall(record)
            self._carry(source, target)

    @staticmethod
    def _record(source: socket.socket) -> bytes:
        head = source.recv(4, socket.MSG_WAITALL)
        return head + source.recv(int.from_bytes(head, "big") + TAG, socket.MSG_WAITALL)

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        source.settimeout(DEADLINE)
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                target.sendall(part)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@attacks
def test_a_state_that_was_changed_on_the_way_is_refused(attack: Attack, count: Callable[[str], int]) -> None:
    """Also where who changes it knows how to make a checksum."""
    way = Between(attack)
    with way.near as source, way.far as joiner:
        for _ in range(2):
            catchup_protocol.send(source, catchup_protocol.BlockHeader(0, 8192))
            source.sendall(bytes(8192))
        assert isinstance(catchup_protocol.receive(joiner), catchup_protocol.BlockHeader)
        with pytest.raises(BadRecord):
            catchup_protocol.read_into(joiner, memoryview(bytearray(8192)))
    assert count("mac") == 1


@attacks
def test_a_message_that_was_changed_on_the_way_fails(attack: Attack, count: Callable[[str], int]) -> None:
    """And nothing of the one before it."""
    way = Between(attack)
    sender, receiver = (
        ProgressEngine("rank 0", lambda peer: way.near, str),
        ProgressEngine("rank 1", lambda peer: way.near, str),
    )
    receiver.accept(way.far, 0)
    until = time.monotonic() + DEADLINE
    receives = [RecvRequest(0, 0, "uint8", memoryview(bytearray(100)), until) for _ in range(3)]
    for number, receive in enumerate(receives):
        receiver.receive(receive)
        sender.send(SendRequest(1, 0, "uint8", memoryview(bytes([number]) * 100), until))
    assert all(receive.ended.wait(DEADLINE) for receive in receives)
    assert "something on the way" in str(receives[2].error)
    assert count("mac") == 1
    for engine in (sender, receiver):
        engine.close(RuntimeError("the end"))


@pytest.mark.parametrize(
    "attack", [lambda said: _flip(4)([b"", *said]), lambda said: said[1:]], ids=["changed", "of another time"]
)
def test_what_a_member_of_a_group_says_last_cannot_be_changed(attack: Attack, count: Callable[[str], int]) -> None:
    """Else somebody could make a loss a leave."""
    heard: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
    hears = dict(on_said=lambda *said: heard.put(said), on_end=lambda *end: heard.put(end), on_broken=heard.put)
    pairs = Pairs("g", settle=lambda looked: False, on_start=lambda: None, on_stop=lambda: None, **hears)  # type: ignore[arg-type]
    way = Between(attack)
    pairs.add({1: way.far})
    for ops in (5, 6, 7):
        way.near.sendall(FRAMES.frame(Left(ops, ops)))
    rank, what = heard.get(timeout=DEADLINE)
    assert rank == 1
    assert "something on the way" in str(what)
    assert count("mac") == 1
    pairs.end(Left(0, 0))
    pairs.join()


# -- data ------------------------------------------------------------------------------------------------------------

modes = pytest.mark.parametrize("mode", ["mac", "aes-gcm"])


@modes
def test_seals_of_data_open_what_they_have_sealed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure, "REKEY", 3)
    mine, theirs = Keys(SECRET, client=True), Keys(SECRET, client=False)
    seal, opens = secure.seals(mine, mode)[0], secure.seals(theirs, mode)[1]
    back = secure.seals(theirs, mode)[0]
    first = bytes(secure.seals(mine, mode)[0].seal([b"one"], 3))
    assert bytes(back.seal([b"one"], 3)) != first, "the same key and nonce in both directions give both away"
    seen = set()
    for _ in range(8):
        for payload in ([b"one"], [b"o", b"ne"], [bytes(RECORD)]):
            nbytes = sum(map(len, payload))
            record = bytes(seal.seal(payload, nbytes))
            assert int.from_bytes(record[:4], "big") == nbytes
            assert bytes(opens.open(memoryview(record)[4:])) == b"".join(payload)
            assert (b"one" in record) == (mode == "mac" and nbytes == 3)
            seen.add(record[-16:])
    assert len(seen) == 24
    record = bytearray(seal.seal([b"one"], 3))
    record[5] ^= 1
    with pytest.raises(ValueError, match="MAC"):
        opens.open(memoryview(record)[4:])


@modes
def test_a_mirror_is_filled_through_a_seal(mode: str) -> None:
    """With more frames than one record has, so that some are received before anybody polls for them."""
    client, server = ends_of_data(mode)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    peer = TcpMirror(7, 3, client, lambda replica, epoch, why: lost.put(why))
    reader = TcpMirrorWriter(server, 1, 3)
    payloads = [bytes([number]) * (CHUNK if number == 1 else 500) for number in range(1, 5)]
    for number, payload in enumerate(payloads, 1):
        reader.send(POSTED, 3 << COUNTER | number, (number - 1) * CHUNK, memoryview(payload), (number, 9, 0))
    peer.drive(False)
    end = threading.Event()
    deadline = threading.Timer(DEADLINE, end.set)
    deadline.start()
    while peer.words[POSTED] != 3 << COUNTER | 4:
        reader.flush()
        assert not end.is_set()
    deadline.cancel()
    assert reader.told(POSTED, 3 << COUNTER | 4)
    for number, payload in enumerate(payloads):
        at = HEADER + number * CHUNK
        assert bytes(peer.buffer[at : at + len(payload)]) == payload
    assert lost.empty()
    reader.close()
    peer.close()


@modes
def test_frames_that_have_come_in_one_record_need_no_second_poll(mode: str) -> None:
    """A driver looks at the socket, where nothing is left of them."""
    client, server = ends_of_data(mode)
    peer = TcpMirror(7, 3, client, lambda *lost: None)
    peer.drive()
    reader = TcpMirrorWriter(server, 1, 3)
    for number, nbytes in ((1, 500), (2, 20_000)):
        reader.send(POSTED, 3 << COUNTER | number, (number - 1) * CHUNK, memoryview(bytes(nbytes)), (number, 9, 0))
    assert reader.flush()
    poll = select.poll()
    poll.register(client, select.POLLIN)
    while peer.words[POSTED] != 3 << COUNTER | 2:
        assert poll.poll(1e3 * 20.0), "the rest of the record lies in the channel"
        peer.pump()
    reader.close()
    peer.close()


@modes
def test_what_the_socket_has_no_room_for_is_not_sent_yet(mode: str) -> None:
    """Though the writer's queue is empty."""
    client, server = ends_of_data(mode)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer = TcpMirror(7, 3, client, lambda *lost: None)
    peer.drive()
    reader = TcpMirrorWriter(server, 1, 3)
    reader.send(POSTED, 3 << COUNTER | 1, 0, memoryview(bytes(RECORD // 2)), (1, 9, 0))
    assert not reader._queue
    assert not reader.told(POSTED, 3 << COUNTER | 1)
    until = time.monotonic() + DEADLINE
    while not reader.flush():
        assert time.monotonic() < until
        peer.pump()
    assert reader.told(POSTED, 3 << COUNTER | 1)
    while peer.words[POSTED] != 3 << COUNTER | 1:
        assert time.monotonic() < until
        peer.pump()
    reader.close()
    peer.close()


@modes
@attacks
def test_data_that_were_changed_on_the_way_end_the_connection(
    attack: Attack, mode: str, count: Callable[[str], int]
) -> None:
    """No word is raised, and the loss of the connection is told."""
    way = Between(attack)
    writer, mirror = secure.plane(way.near, mode), secure.plane(way.far, mode)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    peer = TcpMirror(7, 3, mirror, lambda replica, epoch, why: lost.put(why))
    peer.drive(False)
    reader = TcpMirrorWriter(writer, 1, 3)
    for number in (1, 2, 3):
        reader.send(POSTED, 3 << COUNTER | number, 0, memoryview(bytes(4000)), (number, 9, 0))
        reader.flush()
    assert "something on the way" in lost.get(timeout=DEADLINE)
    assert peer.words[POSTED] == 3 << COUNTER | 1
    assert count("mac") == 1
    reader.close()
    peer.close()


def ends_of_data(mode: str) -> tuple[sealed.Connection, sealed.Connection]:
    near, far = socket_pair()
    server, client = ends(near, far)
    return secure.plane(client, mode), secure.plane(server, mode)
