"""One function a decoder: bytes in, nothing out. It raises only if the decoder does what it must not.

`seeds` of a target are inputs that are right, so that mutations of them get further than noise.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import queue
import socket
import struct
import tempfile
import time
import tracemalloc
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from ftcomm.collective.operation import Operation
from ftcomm.control import etcd, handshake, stored_views
from ftcomm.control import messages as m
from ftcomm.control.links import serve_messages
from ftcomm.control.sealed import Channel, Keys, Mac
from ftcomm.control.store import StoreError, ViewStore
from ftcomm.control.tls import Tls
from ftcomm.control.unstarted import NamedRank, Unstarted
from ftcomm.control.view_differences import CARRIERS, ViewDifferenceError, ViewsReceived, ViewsSent
from ftcomm.control.views import Addresses, Member, View
from ftcomm.errors import CollectiveTimeout, InitError, TransportError
from ftcomm.groups.static_pairs import FRAMES, Pairs
from ftcomm.groups.subgroup_internals import FRAMES as SUBGROUP_FRAMES
from ftcomm.kernels.epochs import COUNTER, EPOCHS
from ftcomm.lab.netns.relay import Change, LinkConditions, PortConditions, Relay
from ftcomm.launch.admin import protocol as admin
from ftcomm.launch.output import LineSplitter
from ftcomm.launch.policy import State
from ftcomm.launch.several_hosts import messages as launcher
from ftcomm.launch.several_hosts.messages import decode_launcher_message
from ftcomm.membership import derived
from ftcomm.membership.derived import Left
from ftcomm.membership.static import DataEnded, LastMessage, MemberFailed, MemberHello, MemberLeft
from ftcomm.p2p.matching import MAX_BYTES, MAX_UNEXPECTED
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.p2p.protocol import EAGER, RecvRequest, SendRequest
from ftcomm.recorder.layout import GroupKind, PhaseKind, Shape
from ftcomm.recorder.reader import RecordingError, parse
from ftcomm.recorder.recorder import Owner, Recorder
from ftcomm.training import catchup_protocol as protocol
from ftcomm.training.intra_replica import IntraReplicaExchange
from ftcomm.training.state import allocate, first_difference, flatten
from ftcomm.transport import secure
from ftcomm.transport.base import OnLost
from ftcomm.transport.nixl import frames as nixl_frames
from ftcomm.transport.nixl import handshake as nixl_hello
from ftcomm.transport.segment import CHUNK, HEADER, POSTED, REDUCED, SIZE, TAKEN, Memory
from ftcomm.transport.tcp.mirror import TcpMirror
from ftcomm.transport.tcp.writer import TcpMirrorWriter
from tests.fuzz.choices import ADDRESS, KINDS, Choices, fields, value
from tests.fuzz.machines import GIVEN, Coordinated, Ranked
from tests.rigs.certificates import Authority
from tests.rigs.sealed_pair import SECRET, ends, records

CREDENTIALS = handshake.Credentials("secret")
DEADLINE = 60.0  # s
SHORT = 0.05  # s, of one who waits for more than has been said: all there is lies in its socket when it begins
EPOCH = 3


@dataclasses.dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


# -- control plane -------------------------------------------------------------------------------------------------


def all_messages() -> list[m.AnyMessage]:
    """One of each kind at least, of those that are accepted."""
    made = []
    for kind in KINDS:
        for start in range(4):
            with contextlib.suppress(ValueError):
                made.append(m.decode(m.encode(value(Choices(bytes(range(start, 200))), kind, (1, 2), GIVEN))))
    member = Member(0, "a", Addresses.of((ADDRESS,)), True)
    view = View(2, 7, (member, msgspec.structs.replace(member, replica=3)), "join 3", 1 << 32)
    progress = m.Progress(3, (m.OpProgress(3, (m.Final((0, 2), b"\x05"),)),), (m.FailedOp(2, "why"),))
    return [*made, m.NewView(view), m.Boundary(0, 1, 5, view), m.MemberProgress(1, "abc", 7, progress)]


def messages(data: bytes) -> None:
    try:
        message = m.decode(data)
    except msgspec.DecodeError:
        return
    again = m.encode(message)
    assert m.encode(m.decode(again)) == again
    view = getattr(message, "view", None)
    if view is not None:
        assert list(view.replicas) == sorted(set(view.replicas))
    with contextlib.suppress(ViewDifferenceError):
        whole = ViewsReceived().complete(message)
        assert not isinstance(whole, m.Difference)
        told = whole.view if isinstance(whole, CARRIERS) else None
        assert told is None or all(member.ranks for member in told.members)


def differences(data: bytes) -> None:
    """Views on a connection whose two ends may differ about what was told: the receiver has the right one, or none."""
    choices = Choices(data)
    sent, received = ViewsSent(), ViewsReceived()
    while choices:
        members = {number % 4: value(choices, Member, (1, 2), {"replica": number % 4}) for number in choices.bytes()}
        ascending = tuple(msgspec.structs.replace(members[x], replica=x) for x in sorted(members))
        view = View(choices.number(), None, ascending)
        short = sent.shorten(m.NewView(view))
        assert isinstance(short, m.Difference)
        name = choices.pick(("", "", "gone", "changed", "epoch"))
        if name:
            other = value(choices, dict(fields(m.Difference))[name], (1, 2), {})
            short = msgspec.structs.replace(short, **{name: other})
        if choices.number() % 8 == 7:
            sent, received = choices.pick(((ViewsSent(), received), (sent, ViewsReceived())))
        with contextlib.suppress(ViewDifferenceError):
            got = received.complete(short)
            assert isinstance(got, m.NewView)
            assert got.view.bare() == view.bare()


def stored(data: bytes) -> None:
    """What etcd has of a view, and then shards of addresses, in the order of their keys."""
    value_, *parts = [*_parts(data)] or [b""]
    try:
        view = stored_views.decoded(value_)
    except msgspec.DecodeError:
        return
    with contextlib.suppress(stored_views.IncompleteTable):
        whole = stored_views.joined(view, "/job", dict(zip(view.keys("/job"), parts, strict=False)))
        assert [x.table for x in stored_views.divided(whole, 64, {})[0].members] == [x.table for x in view.members]


def stored_seeds() -> list[bytes]:
    member = Member(0, "a", Addresses.of((ADDRESS,) * 3), True)
    view = View(2, 7, (member, msgspec.structs.replace(member, replica=3)), "join 3", 1 << 32)
    seeds = []
    for size in (40, 1000):
        kept, tables = stored_views.divided(view, size, {})
        shards = [shard for x in kept.members for shard in stored_views.shards_of(tables[x.table], size)]
        seeds.append(framed(msgspec.json.encode(kept), *shards))
    return seeds


def framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def connection(data: bytes, raw: bool = False) -> None:
    """An authenticated peer says `data`, in records, or (`raw`) somebody on the way does: it is heard to its end or to
    the first record that is too long or not the peer's."""

    async def run() -> str:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far:
            far.sendall(data[:65536] if raw else b"".join(records(*_parts(data[:65536]))))
            far.shutdown(socket.SHUT_WR)
            near_end, _ = ends(near, far)
            return await asyncio.wait_for(serve_messages(near_end, heard, lambda writer: None), DEADLINE)

    def heard(message: m.AnyMessage) -> None:
        assert isinstance(message, m.Message)

    assert _loop().run_until_complete(run())


_loops: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """One for all runs; making one costs more than a run."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def channel(data: bytes) -> None:
    """Somebody on the way says `data` on a connection past its handshake, of each kind: nobody hears a byte of it, but
    what the other side said before."""
    keys = Keys(SECRET, client=False)
    kinds = [Mac(keys.of("mac", sending=False)), *(secure.seals(keys, mode)[1] for mode in ("mac", "aes-gcm"))]
    for seal in kinds:
        near, far = socket.socketpair()
        with far, Channel(near, keys, seals=(Mac(b"unused"), seal)) as heard:
            far.sendall(data[:65536])
            far.shutdown(socket.SHUT_WR)
            got = b""
            with contextlib.suppress(OSError):
                while part := heard.recv(1 << 16):
                    got += part
            assert b"".join(_payloads()).startswith(got) or not got


def _payloads() -> list[bytes]:
    return [b"first", b"again", bytes(1000)]


def channel_seeds() -> list[bytes]:
    return [b"".join(records(*_payloads())), b"".join(records(*_payloads()[:1]))]


def tls(data: bytes) -> None:
    """What is no TLS, or a part of it, in a handshake and behind it."""
    files = _certificate()
    for steps in (handshake.server(files), handshake.client(files, "member", {})):
        left = data[:65536]
        answer: bytes | None = None
        try:
            while True:
                said = steps.send(answer) if answer is not None else next(steps)
                answer = None
                if isinstance(said, int):
                    if len(left) < said:
                        break
                    answer, left = left[:said], left[said:]
        except StopIteration:
            raise AssertionError("let in") from None
        except handshake.HandshakeError:
            pass
        finally:
            steps.close()


@functools.cache
def _certificate() -> handshake.Credentials:
    with tempfile.TemporaryDirectory() as folder:
        return handshake.Credentials("secret", tls=Tls(Authority(Path(folder)).files()))


def tls_seeds() -> list[bytes]:
    """What each side says first to the other."""
    client, server = handshake.client(_certificate(), "member", {}), handshake.server(_certificate())
    hello = next(client)
    next(client)
    answer: bytes | int = next(server)
    at = 0
    while isinstance(answer, int):
        answer, at = server.send(hello[at : at + answer]), at + answer
    return [hello, answer, framed(b"plain")]


def _parts(data: bytes) -> Iterator[bytes]:
    """`data` as frames, whatever it is."""
    while data:
        length = int.from_bytes(data[:4], "big") % (handshake.MAX_HANDSHAKE + 1)
        yield data[4 : 4 + length]
        data = data[4 + length :]


def _talk(steps: handshake.Steps, data: bytes) -> bool:
    """Whether the other side of the handshake, which says `data`, was let in."""
    received = _parts(data)
    answer: bytes | None = None
    try:
        while True:
            said = next(steps) if answer is None else steps.send(answer)
            answer = next(received, None) if said is None else None
            if said is None and answer is None:
                return False
            assert said is None or len(said) <= handshake.MAX_HANDSHAKE
    except StopIteration:
        return True
    except handshake.HandshakeError:
        return False
    finally:
        steps.close()


def server(data: bytes) -> None:
    assert not _talk(handshake.server_steps(CREDENTIALS), data), "let in without the token"


def client(data: bytes) -> None:
    steps = handshake.client_steps(CREDENTIALS, "member", {"replica": 1})
    assert not _talk(steps, data), "took somebody for a server of the job"


def handshakes() -> list[bytes]:
    pack = msgspec.msgpack.encode
    opening = handshake.Opening(handshake.VERSION, "leader", {"replica": 2, "incarnation": "a"}, b"n" * 16)
    challenge, refusal = (
        handshake.Challenge(handshake.VERSION, b"n" * 16),
        handshake.Challenge(handshake.VERSION, bytes(16), "no"),
    )
    later = {"version": handshake.VERSION + 1, "tongue": "another"}
    return [
        framed(pack(opening), pack(handshake.Proof(b"m" * 32))),
        framed(pack(challenge), pack(handshake.Accepted(b"m" * 32))),
        framed(pack(challenge), pack(handshake.Accepted(b"", "wrong token"))),
        framed(pack(refusal)),
        framed(pack(later)),
    ]


def opening(data: bytes) -> None:
    """The fields of an authenticated peer, where they are used."""
    try:
        fields = msgspec.msgpack.decode(data, type=handshake.Opening).fields
    except (msgspec.DecodeError, ValueError, RecursionError):
        return
    with contextlib.suppress(handshake.BadFields):
        assert 0 <= handshake.number(fields, "replica") < 1 << 31
    with contextlib.suppress(handshake.BadFields):
        assert handshake.text(fields, "incarnation")


# -- data plane and state ------------------------------------------------------------------------------------------


def mirror(data: bytes) -> None:
    """A peer's frames into its mirror: what it writes stays in the mirror, and the connection's end is told once."""
    lost: queue.Queue[str] = queue.Queue()
    with tcp_peer(lambda replica, epoch, reason: lost.put(reason)) as (peer, far):
        with contextlib.suppress(OSError):  # it has hung up already
            far.sendall(data[:65536])
            far.shutdown(socket.SHUT_WR)
        assert lost.get(timeout=DEADLINE).startswith("connection for data")
        for word in (POSTED, REDUCED, TAKEN):
            assert EPOCH <= peer.words[word] >> COUNTER < EPOCHS
        assert lost.empty()


@contextlib.contextmanager
def tcp_peer(on_lost: OnLost) -> Iterator[tuple[TcpMirror, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as port:
        far = socket.create_connection(port.getsockname())
        near, _ = port.accept()
    with far:
        peer = TcpMirror(7, EPOCH, near, on_lost)
        peer.drive(False)
        yield peer, far
        peer.close()


def data_frames() -> list[bytes]:
    """As the writer itself makes them, of each kind."""
    made = []
    for word, payload in ((POSTED, b"x" * 64), (REDUCED, b"y" * 64), (TAKEN, b"")):
        near, far = _tcp_pair()
        with far:
            reader = TcpMirrorWriter(near, 7, EPOCH)
            reader.send(word, EPOCH << COUNTER | 1, 0, memoryview(payload), (5, 9, 0))
            reader.flush()
            made.append(far.recv(1 << 16))
        near.close()
    return [*made, b"".join(made)]


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as port:
        far = socket.create_connection(port.getsockname())
        near, _ = port.accept()
    return near, far


def state_frames(data: bytes) -> None:
    for limit in (protocol.MAX_REQUEST, protocol.MAX_FRAME):
        near, far = socket.socketpair()
        with near, far:
            far.sendall(data[:65536])
            far.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError, msgspec.DecodeError, protocol.BadFrame):
                while True:
                    assert isinstance(protocol.receive(near, limit), protocol.CatchUpFrame)


def state_seeds() -> list[bytes]:
    made = [
        protocol.Wait(),
        protocol.Offer(b"skeleton", 9, protocol.BLOCK),
        protocol.Refusal("why"),
        protocol.Want(3),
    ]
    return [
        framed(msgspec.msgpack.encode(frame)) for frame in [*made, protocol.BlockHeader(3, 9), protocol.CatchUpDone()]
    ]


class _Box:
    def state_dict(self) -> dict[str, object]:
        import torch

        return {"w": torch.zeros(3), "n": 1 << 70, "list": [1.0, (None, True)], "d": {1: "x"}}


def skeleton(data: bytes) -> None:
    """A source's account of its state, compared with ours; memory is only taken for one that fits."""
    from ftcomm.errors import StateError

    with contextlib.suppress(StateError):
        if first_difference(skeletons()[0], data) is None and len(data) < 1 << 16:
            for tensor in allocate(data).tensors:
                assert tensor.numel() >= 0


def skeletons() -> list[bytes]:
    return [flatten({"model": _Box()}).skeleton]  # type: ignore[dict-item]


def member(data: bytes) -> None:
    """What another member of a group says, over one of four connections, of which the first byte chooses one."""
    ways = (_pair, _sender, _receiver, _asked)
    near, far = socket.socketpair()
    with far:
        far.settimeout(DEADLINE)
        ways[data[0] % 4 if data else 0](near, far, data[1:65536])


def _pair(near: socket.socket, far: socket.socket, data: bytes) -> None:
    """It ends once, by its message or by its end."""
    heard: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()

    def broken(error: Exception) -> None:
        heard.put((1, error))

    hears = dict(on_said=lambda *said: heard.put(said), on_end=lambda *end: heard.put(end), on_broken=broken)
    pairs = Pairs("fuzz", settle=lambda looked: False, on_start=lambda: None, on_stop=lambda: None, **hears)  # type: ignore[arg-type]
    pairs.add({1: near})
    with contextlib.suppress(OSError):
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
    while True:
        rank, what = heard.get(timeout=DEADLINE)
        assert rank == 1
        assert not isinstance(what, Exception)
        if isinstance(what, LastMessage | str):
            break
    pairs.end(Left(0, 0))
    pairs.join()
    assert heard.empty()


def _sender(near: socket.socket, far: socket.socket, data: bytes) -> None:
    """Its messages are received, kept within bounds, or dropped with the connection; a receive from it always ends."""
    engine = ProgressEngine("rank 0", _nobody, str)
    until = time.monotonic() + DEADLINE
    memory = bytearray(8)
    waiting = [RecvRequest(1, tag, "uint8", memoryview(memory), until) for tag in (0, 0, 1, -1)]
    for receive in waiting[:2]:
        engine.receive(receive)
    engine.accept(near, 1)
    with contextlib.suppress(OSError):
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
    for receive in waiting[2:]:
        engine.receive(receive)
    for receive in waiting:
        assert receive.ended.wait(DEADLINE)
        assert not isinstance(receive.error, CollectiveTimeout)
    letters = engine._core.matching.arrivals(1)
    assert len(letters) <= MAX_UNEXPECTED
    assert sum(len(letter.data or b"") for letter in letters) <= MAX_BYTES
    engine.close(RuntimeError("the end"))


def _receiver(near: socket.socket, far: socket.socket, data: bytes) -> None:
    """The sends to it end."""
    engine = ProgressEngine("rank 0", lambda peer: near, str)
    until = time.monotonic() + DEADLINE
    sent = [SendRequest(1, 0, "uint8", memoryview(bytes(size)), until) for size in (8, EAGER + 1, 8)]
    for send in sent:
        engine.send(send)
    far.recv(16)
    with contextlib.suppress(OSError):
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        while far.recv(1 << 16):
            pass
    for send in sent:
        assert send.ended.wait(DEADLINE)
        assert not isinstance(send.error, CollectiveTimeout)
    engine.close(RuntimeError("the end"))


def _asked(near: socket.socket, far: socket.socket, data: bytes) -> None:
    """Where it stands, or an error of the connection."""
    far.sendall(data)
    far.shutdown(socket.SHUT_WR)
    with near, contextlib.suppress(OSError, msgspec.DecodeError):
        account = SUBGROUP_FRAMES.read(near.recv)
        frame = SUBGROUP_FRAMES.frame(account)
        assert msgspec.msgpack.decode(frame[4:], type=derived.SubgroupProgress) == account


def _nobody(peer: int) -> socket.socket:
    raise ConnectionRefusedError


def member_seeds() -> list[bytes]:
    head = struct.Struct("<IIQqQ16s").pack
    said = [MemberHello("0" * 32, ADDRESS), Left(7, 7), MemberFailed(1, "why"), DataEnded("why"), MemberLeft(1, 7)]
    letters = [head(0x66747032, 1, 0, 0, 8, b"uint8") + bytes(8), head(0x66747032, 2, 1, 0, 8, b"uint8")]
    letters += [head(0x66747032, 3, 1, 0, 8, b"uint8") + bytes(8), head(0x66747032, 4, 1, 0, 0, b"uint8")]
    answers = [struct.pack("<IIQ", 0x66747032, kind, number) for kind, number in ((1, 0), (1, 1), (2, 2))]
    return [
        *(b"\0" + FRAMES.frame(one) for one in said),
        b"\x01" + b"".join(letters),
        b"\x01" + b"".join(letters[1:3]),
        b"\x01" + letters[1] + letters[3] + letters[0],
        b"\x02" + b"".join(answers),
        b"\x03" + SUBGROUP_FRAMES.frame(derived.SubgroupProgress(7, ADDRESS, m.Progress(3, (m.OpProgress(3, ()),)))),
    ]


class _Replica:
    """What `IntraReplicaExchange` uses of the group of one of two ranks."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.replica, self.shard, self.shards, self.intra_replica_exchanges, self._sock = 0, rank, 2, 0, sock
        self.settings = types.SimpleNamespace(timeouts=types.SimpleNamespace(give_up=SHORT))
        self.router = types.SimpleNamespace(changes=0, away=0.0)
        self.view = View(1, 0, (Member(0, "a", Addresses.of((ADDRESS, ADDRESS)), True),))

    @property
    def internals(self) -> _Replica:
        return self

    def serve(self, purpose: str, handler: Callable[[socket.socket, dict[str, int]], None]) -> None:
        handler(self._sock, {"shard": 1, "which": 1})

    def dial_rank(self, replica: int, shard: int, purpose: str, fields: object, timeout: float) -> socket.socket:
        return self._sock


def rows(data: bytes) -> None:
    """Of the other rank of a replica, which the first byte chooses: as long as ours, or an error."""
    near, far = socket.socketpair()
    with far:
        far.sendall(data[1:65536])
        far.shutdown(socket.SHUT_WR)
        inside = IntraReplicaExchange(_Replica(data[0] & 1 if data else 0, near))  # type: ignore[arg-type]
        tracemalloc.start()
        try:
            with contextlib.suppress(TransportError):
                assert len(inside.exchange(b"four", max)) == 4
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
            inside.close()


def row_seeds() -> list[bytes]:
    def row(size: int) -> bytes:
        return struct.pack(">QI", 1, size) + bytes(size)

    return [b"\0" + row(4), b"\1\1" + row(8), b"\0" + row(0), b"\0" + struct.pack(">QI", 1, 0xFFFFFFFF)]


def rendezvous(data: bytes) -> None:
    """What somebody has put into torch's store, to which everybody may write."""
    from ftcomm.settings import MAX_LABEL
    from ftcomm.torch.rendezvous import told
    from ftcomm.torch.secret import read

    with contextlib.suppress(InitError):
        endpoint, place, job = told(data)
        assert 1 <= len(job) <= MAX_LABEL
        assert endpoint.rpartition(":")[2].isdecimal()
        read(place)
        raise AssertionError(f"{place} is read")


# -- files and pipes -----------------------------------------------------------------------------------------------


def views(data: bytes) -> None:
    """The files of an earlier coordinator."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        path = Path(folder) / "views"
        path.write_bytes(data)
        path.with_name("views.unstarted").write_bytes(data)
        store = ViewStore(path)
        try:
            store.open()
        except StoreError:
            return
        last = store.views[-1].epoch if store.views else 0
        store.append(View(last + 1, None, (), "next"))
        store.close()
        again = ViewStore(path)
        again.open()
        assert again.views[-1].epoch == last + 1
        again.close()


def view_files() -> list[bytes]:
    member = Member(0, "a", Addresses.of((ADDRESS,)), True)
    lines = [msgspec.json.encode(View(epoch, None, (member,), "why")) + b"\n" for epoch in (1, 2, 3)]
    with tempfile.TemporaryDirectory() as folder:
        store = ViewStore(Path(folder) / "views")
        store.keep((Unstarted(NamedRank(1, 1, "host:1"), "it has a wrong setting", True, 9.5),))
        kept = (Path(folder) / "views.unstarted").read_bytes()
    return [b"".join(lines), lines[0] + lines[1][:-9], kept]


def etcd_answers(data: bytes) -> None:
    """Of an etcd, or of anything else at its port."""
    with contextlib.suppress(etcd.EndpointFailed):
        raise etcd.said(data.decode(errors="replace"))
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(data)
        for kind in (etcd.Txn, etcd.Lease, etcd.Kept, etcd.Account):
            with contextlib.suppress(etcd.EndpointFailed):
                got = etcd.answered(kind, answer)
                assert not isinstance(got, etcd.Txn) or all(isinstance(x, etcd.Entry) for x in got.found().values())


def etcd_seeds() -> list[bytes]:
    kvs = [{"key": "L2pvYi90ZXJt", "create_revision": "7", "mod_revision": "9", "value": "aGVsbG8="}]
    txn = {"header": {"revision": "9"}, "succeeded": True, "responses": [{"response_range": {"kvs": kvs}}]}
    failed = {"error": "no leader", "message": "no leader", "code": 14}
    return [json.dumps(x).encode() for x in (txn, {"ID": "7", "TTL": "5"}, {"result": {"TTL": "5"}}, failed)]


def requests(data: bytes) -> None:
    """Lines of whoever may open the launcher's socket, and its answers to who asks it."""
    for line in data.split(b"\n"):
        for decode in (admin.decode_request, admin.decode_answer):
            with contextlib.suppress(msgspec.DecodeError):
                message = decode(line)
                assert decode(admin.encode(message)) == message
                assert not isinstance(message, admin.RestartCoordinator) or 0 <= message.away <= admin.MAX_AWAY


def messages_of_launchers(data: bytes) -> None:
    """What the launchers of one job tell each other."""
    with contextlib.suppress(msgspec.DecodeError):
        message = decode_launcher_message(data)
        # There is a NaN in an event; to itself it is equal, as the same object.
        differs = decode_launcher_message(data) != message
        assert differs or decode_launcher_message(m.encode(message)) == message


def launcher_message_seeds() -> list[bytes]:
    event = {
        "kind": "view",
        "epoch": 3,
        "why": "",
        "mono": 1.5,
        "members": [{"replica": 1, "contributing": True}],
        "step": None,
    }
    said = [
        launcher.BeginJob("127.0.0.1:1", "job"),
        launcher.ReplicaIs(1, State.WAITING, 2),
        launcher.WhatWasHeard(3, 1),
    ]
    told = [launcher.TurnedAway("why"), launcher.JobIsLost("why"), launcher.RankFailed(2, 3)]
    heard = launcher.Heard(3, 1, 2, True, True, False, True, False, "it stood still")
    suspect = {"kind": "suspect", "mono": 1.5, "replica": 1, "by": 1, "reason": "why", "error": "KeyError"}
    events = launcher.CoordinatorSaid(event), launcher.CoordinatorSaid(suspect)
    return [m.encode(message) for message in (*said, *told, heard, *events)]


def request_seeds() -> list[bytes]:
    replica = admin.ReplicaStatus(0, "running", 1, {"0": 7}, True, True, 5, "127.0.0.1")
    status = admin.Status("run", 1, "x.py", 1, False, "127.0.0.1:1", False, 1, "auto", 2.0, 24.0, [replica])
    asked = [
        admin.GetStatus(),
        admin.GetEvents(),
        admin.RestartCoordinator(1.0),
        admin.RestartReplica(2),
        admin.Drain(),
    ]
    said = [admin.Acknowledged(), admin.Rejected("why"), admin.Happened({"kind": "view", "mono": 1.5}), status]
    return [admin.encode(message) for message in (*asked, *said)]


def relay(data: bytes) -> None:
    """What the relay of packets is told to do with them: it does what can be, and ends at what cannot."""
    control, far = socket.socketpair()
    with control, far:
        made = Relay(control, {control.fileno(): "10.0.0.1", far.fileno(): "10.0.0.2"}, 1)
        far.sendall(data[:65536])
        far.shutdown(socket.SHUT_WR)
        with contextlib.suppress(msgspec.DecodeError):
            while made._obey():
                far.recv(4096)
        for link in (link for row in made._links for link in row):
            assert 0 <= link.delay <= 3600
            assert 0 <= link.loss <= 1
            assert link.longest >= 0
        assert all(port.rate >= 0 and 0 <= port.queue <= 3600 for port in made._ports)
        made._lines.close()


def relay_seeds() -> list[bytes]:
    change = Change([(0, 1, LinkConditions(0.1, 0.5, 1500, False))], [(1, PortConditions(1e6, 0.1))])
    return [msgspec.json.encode(one) + b"\n" for one in (change, Change(), Change(links=[(0, 2, LinkConditions())]))]


def lines(data: bytes) -> None:
    """What a rank writes, read in pieces of any size."""
    splitter, choices, at, got = LineSplitter(), Choices(data[:16]), 0, b""
    while at < len(data):
        size = 1 + choices.number()
        for line in splitter.feed(data[at : at + size], float(at)):
            assert b"\n" not in line
            got += line
        at += size
    assert len(got + b"".join(splitter.flush())) <= len(data)


# -- machines ------------------------------------------------------------------------------------------------------


def coordinator(data: bytes) -> None:
    told = Coordinated(Choices(data))
    for replica in range(3):
        told.joined(replica, replica)
    while told.choices:
        told.step()


def rank(data: bytes) -> None:
    told = Ranked(Choices(data))
    while told.choices:
        told.step()


def noise() -> list[bytes]:
    return [bytes(range(256)), b"\x08" * 40]


def notifications(data: bytes) -> None:
    """What an agent of NIXL may be told, one after the other: frames of one channel, in any order."""
    order = nixl_frames.InOrder()
    words = dict.fromkeys(Memory.published, EPOCH << COUNTER)
    for part in _parts(data):
        try:
            for frame in (ready for told in nixl_frames.unpack(part) for ready in order.arrive(told)):
                nixl_frames.check(frame, words, words.get(frame.word, 0), EPOCH)
                assert frame.value >> COUNTER == EPOCH
                place = Memory().place(frame.word, frame.start, frame.nbytes)
                assert HEADER <= place <= place + frame.nbytes <= SIZE
                assert len(frame.payload) in (0, frame.nbytes)
                words[frame.word] = frame.value
        except ValueError:
            return


def notification_seeds() -> list[bytes]:
    def frame(word: int, number: int, count: int, follows: int = 0, nbytes: int = 8) -> bytes:
        payload = b"x" * nbytes if follows else b""
        value = EPOCH << COUNTER | count
        return nixl_frames.pack(word, 7, number, 64, nbytes, follows, value, (1, 2, 3), payload)

    whole = [frame(POSTED, 0, 1, 1), frame(REDUCED, 1, 1), frame(TAKEN, 2, 1, 1, 0)]
    return [framed(*whole), framed(*whole[::-1]), framed(b"".join(whole)), framed(whole[0], whole[1] + whole[2])]


def nixl_hellos(data: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data[:65536])
        far.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while True:
                assert isinstance(nixl_hello.receive(near), nixl_hello.ReaderRequest | nixl_hello.WriterAnswer)


def nixl_hello_seeds() -> list[bytes]:
    kind = nixl_hello.Compatibility(1, 4, CHUNK, "1.5.1", "all")
    said = [
        nixl_hello.ReaderRequest(kind, 5, 4096, 1 << 20, 9, (("0.0.a.0", b"x"),)),
        nixl_hello.WriterAnswer(kind, True, "no"),
    ]
    return [framed(msgspec.msgpack.encode(message)) for message in said]


# -- recordings ------------------------------------------------------------------------------------------------------

_SHAPE = Shape(1, 4, 128)  # so that the bytes that say something are many


def recordings(data: bytes) -> None:
    """A file is read while somebody writes it: what is seen at the second look differs in its last bytes."""
    with contextlib.suppress(RecordingError):
        found = parse(data, data[:-64] + bytes(min(64, len(data))))
        said = [op.caller + op.group + op.algorithm + op.transports for op in found.ops]
        assert all(map(str.isprintable, (*said, *(phase.note for phase in found.phases), found.job, found.host)))


def recording_seeds() -> list[bytes]:
    recorder = Recorder(bytearray(_SHAPE.size), _SHAPE)
    recorder.describe(Owner(0, 0, 2, 1, "job", "host"))
    group = recorder.group("*", 0, GroupKind.JOB)
    group.entered(1, "0-1", "shm")
    op = Operation(np.zeros(4, np.float32), "float32", "sum")
    op.caller = recorder.text("train.py:1 main")
    group.called(op, 1.0)
    group.posted(op, "ring")
    group.waits(op, (1,), 1.0, 2.0)
    group.returned(op, 2.0)
    recorder.begin(PhaseKind.STEP, step=3, note="note")
    return [bytes(recorder.memory)]


TARGETS = {
    "messages": Target(messages, lambda: [m.encode(message) for message in all_messages()]),
    "connection": Target(connection, lambda: [framed(*[m.encode(message) for message in all_messages()[:4]])]),
    "channel": Target(channel, channel_seeds),
    "way": Target(lambda data: connection(data, raw=True), channel_seeds),
    "tls": Target(tls, tls_seeds),
    "server": Target(server, handshakes),
    "client": Target(client, handshakes),
    "opening": Target(opening, lambda: [next(_parts(seed)) for seed in handshakes()]),
    "mirror": Target(mirror, data_frames),
    "notifications": Target(notifications, notification_seeds),
    "nixl_hellos": Target(nixl_hellos, nixl_hello_seeds),
    "state_frames": Target(state_frames, state_seeds),
    "skeleton": Target(skeleton, skeletons),
    "member": Target(member, member_seeds),
    "rows": Target(rows, row_seeds),
    "rendezvous": Target(
        rendezvous, lambda: [b"127.0.0.1:4000 1/3/0123456789abcdef a%20job", b"[::1]:65535 x y", b"a:1"]
    ),
    "views": Target(views, view_files),
    "stored": Target(stored, stored_seeds),
    "differences": Target(differences, noise),
    "etcd_answers": Target(etcd_answers, etcd_seeds),
    "requests": Target(requests, request_seeds),
    "launcher_messages": Target(messages_of_launchers, launcher_message_seeds),
    "relay": Target(relay, relay_seeds),
    "lines": Target(lines, lambda: [b"a line\nan\rother\r\n", struct.pack("<Q", HEADER)]),
    "recordings": Target(recordings, recording_seeds),
    "coordinator": Target(coordinator, noise),
    "rank": Target(rank, noise),
}
