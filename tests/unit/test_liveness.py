"""Whether a kernel answers, with the kernel's own sockets and processes that are stopped and killed.

`tests/hosts` shows that acknowledgements end where the network does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import itertools
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest

from ftcomm.control import links, liveness, server, wire
from ftcomm.control import messages as m
from ftcomm.control.agent import Agent
from ftcomm.control.dropped import counts
from ftcomm.control.links import Link, listen
from ftcomm.control.liveness import Knock, unanswered
from ftcomm.control.peers import Peers
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.store import ViewStore
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Member, View
from ftcomm.control.wire import Credentials
from tests.idle_engine import IdleEngine

DEADLINE = 60.0
TIMEOUT = 5.0
CREDENTIALS = Credentials("secret")

# Listens, accepts one connection and reads all that comes; it says at which port, and "x" for each part that it reads.
BODY = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
taken, _ = listener.accept()
while taken.recv(4096):
    print("x", flush=True)
"""

# A member as the others see it: says for what each connection is, once it is past its handshake.
MEMBER = """
import asyncio
from ftcomm.control.links import Listener, listen, serve_messages
from ftcomm.control.wire import Credentials

async def main():
    async def come(conn, opening):
        print(opening.purpose, flush=True)
        await serve_messages(conn, lambda message: None, lambda writer: None)

    sock = listen("127.0.0.1", 0)
    listener = Listener(sock, Credentials("secret"), come, name="0" * 32)
    print(sock.getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Peer:
    def __init__(self, body: str = BODY) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: liveness.state(self.process.pid) == "T")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as made:
        yield made


@pytest.fixture
def member() -> Iterator[Peer]:
    with Peer(MEMBER) as made:
        yield made


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def test_the_kernel_of_a_stopped_process_answers_until_the_process_ends(peer: Peer) -> None:
    with socket.create_connection(peer.address) as sock:
        sock.sendall(b"ping")
        assert peer.says() == "x"
        peer.stop()
        for _ in range(20):
            sock.sendall(b"ping")
            until(lambda: unanswered(sock) == 0.0)
        peer.kill()
        until(lambda: unanswered(sock) is None)


def test_a_stopped_process_that_has_no_room_for_more_still_lives(peer: Peer) -> None:
    """Its window is closed, so nothing is sent any more; the kernel asks now and then, and is answered."""
    with socket.create_connection(peer.address) as sock:
        peer.stop()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 16))
        end = time.monotonic() + 3.0
        answered = 0.0
        while time.monotonic() < end:
            seconds = unanswered(sock)
            assert seconds is not None
            if seconds == 0.0:
                answered = time.monotonic()
            time.sleep(0.05)
        assert answered
        peer.kill()
        until(lambda: unanswered(sock) is None)


def test_a_socket_without_a_connection_has_no_answer() -> None:
    with socket.socket() as sock:
        assert unanswered(sock) is None


def test_a_knock_finds_a_stopped_process_and_not_one_that_has_ended(peer: Peer) -> None:
    async def knock() -> None:
        peer.stop()
        found = await Knock.at(peer.address, TIMEOUT)
        try:
            assert found.unanswered() == 0.0
            await asyncio.sleep(2.5)  # the kernel asks once a second
            assert found.unanswered() == 0.0
            peer.kill()
            while found.unanswered() is not None:
                await asyncio.sleep(0.01)
        finally:
            found.close()
        with pytest.raises(ConnectionRefusedError):
            await Knock.at(peer.address, TIMEOUT)

    asyncio.run(asyncio.wait_for(knock(), DEADLINE))


def test_where_no_kernel_answers_a_knock_has_an_end() -> None:
    """A backlog that is full answers no further connection, as a host that is gone does not."""

    async def knock(address: tuple[str, int]) -> None:
        with pytest.raises(ConnectionError, match=r"no answer from 127.0.0.1:\d+ within 0.3 s"):
            await Knock.at(address, 0.3)

    with socket.socket() as listener, contextlib.ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        held.enter_context(socket.create_connection(listener.getsockname()))
        asyncio.run(asyncio.wait_for(knock(listener.getsockname()), DEADLINE))


def test_the_word_says_what_the_process_does(peer: Peer) -> None:
    assert "holds the interpreter lock" in liveness.described(31.2)
    assert "FTCOMM_OP_TIMEOUT" in liveness.described(31.2)
    assert "has not spoken for 31 s" in liveness.described(31.2)
    assert "is stopped (SIGSTOP" not in liveness.described(31.2, liveness.state(os.getpid()))
    peer.stop()
    assert "is stopped (SIGSTOP" in liveness.described(31.2, liveness.state(peer.process.pid))
    peer.kill()
    assert liveness.state(peer.process.pid) == ""


# -- who waits for a process that is stopped -------------------------------------------------------------------------


def test_a_dial_waits_for_a_process_that_is_stopped_and_comes_once(
    member: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look(sock: socket.socket) -> float | None:
        nonlocal looks
        looks += 1
        return unanswered(sock)

    monkeypatch.setattr(wire, "KERNEL", 0.1)
    monkeypatch.setattr(wire, "_LOOK", 0.01)
    monkeypatch.setattr(wire, "unanswered", look)
    member.stop()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        dialled = pool.submit(wire.connect, member.address, CREDENTIALS, "data", {}, DEADLINE)
        until(lambda: looks > 50)  # half a second at least
        assert not dialled.done()
        member.go_on()
        dialled.result(DEADLINE).close()
    assert member.says() == "data"


def test_a_dial_does_not_wait_longer_than_told(member: Peer) -> None:
    member.stop()
    with pytest.raises(OSError, match=r"no answer to the handshake within 0\.3 s"):
        wire.connect(member.address, CREDENTIALS, "data", {}, 0.3)


def test_a_dial_ends_with_the_process_that_it_waits_for(member: Peer) -> None:
    member.stop()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        dialled = pool.submit(wire.connect, member.address, CREDENTIALS, "data", {}, DEADLINE)
        with socket.create_connection(member.address) as knock:  # behind the other one, or before it
            member.kill()
            until(lambda: unanswered(knock) is None)
        with pytest.raises(OSError, match=r"closed|reset|refused"):
            dialled.result(DEADLINE)


def test_a_link_waits_for_a_process_that_is_stopped_with_one_connection(
    member: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", 0.05)

    async def run() -> None:
        opened, mute = asyncio.Event(), 0
        down: list[Exception] = []

        def is_mute() -> None:
            nonlocal mute
            mute += 1
            monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", DEADLINE)  # what follows its first word may take its time

        member.stop()
        link = Link(member.address, CREDENTIALS, "member", {}, on_open=opened.set, on_down=down.append, on_mute=is_mute)
        while mute < 10:
            await asyncio.sleep(0.01)
            assert not opened.is_set()
        assert not down
        assert link.unanswered() == 0.0
        member.go_on()
        await opened.wait()
        link.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    assert member.says() == "member"


def test_members_complain_of_who_cannot_be_reached_and_not_of_who_is_stopped(member: Peer) -> None:
    async def run() -> None:
        lost: list[tuple[int, str, bool]] = []
        opened, back = asyncio.Event(), asyncio.Event()
        peers = Peers(
            0,
            0,
            CREDENTIALS,
            on_open=lambda replica: opened.set(),
            on_message=lambda message: None,
            on_lost=lambda view, replica, reason, proof: lost.append((replica, reason, proof)),
            on_back=lambda replica: back.set(),
        )
        there = Address(*member.address, "b", 1, 3, "0" * 32)
        peers.connect(View(1, None, (Member(0, "a", (there,), True), Member(1, "b", (there,), True))))
        await opened.wait()
        member.stop()
        for _ in range(20):
            peers.send(1, m.Alive(0, "a"))
            while peers.unanswered() != {1: 0.0}:
                await asyncio.sleep(0.01)
        assert not lost
        member.kill()
        while not lost:
            await asyncio.sleep(0.01)
        assert peers.unanswered() == {}
        assert lost[0][0] == 1
        assert "Connect call failed" in lost[0][1]
        assert not lost[0][2], "another network may lie in between"
        assert not back.is_set()
        peers.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def one_of_this_host(address: tuple[str, int]) -> Address:
    """The address of a process that is gone."""
    return Address(*address, liveness.boot(), 1, 3, "1" * 32, network=liveness.network())


def test_a_process_whose_port_another_one_of_the_job_has_by_now_has_ended(member: Peer) -> None:
    """The other one proves it by the token: its word, and not that something listens there."""

    async def links_of_a_member() -> None:
        lost: list[tuple[int, bool]] = []
        told = asyncio.Event()

        def on_lost(view: View, replica: int, reason: str, proof: bool) -> None:
            lost.append((replica, proof))
            told.set()

        ignore: Any = lambda told: None  # noqa: E731
        peers = Peers(0, 0, CREDENTIALS, on_open=ignore, on_message=ignore, on_lost=on_lost, on_back=ignore)
        before = one_of_this_host(member.address)
        peers.connect(View(1, None, (Member(0, "a", (before,), True), Member(1, "b", (before,), True))))
        await told.wait()
        assert lost[0] == (1, True)
        peers.close()

    async def coordinator() -> None:
        store = ViewStore(None)
        store.views = [View(1, None, (Member(0, "life", (one_of_this_host(member.address),), True),))]
        events: list[dict[str, object]] = []
        timeouts = Timeouts.derive(10.0)
        server = CoordinatorServer(1, 1, CREDENTIALS, store=store, timeouts=timeouts, on_event=events.append)
        await server.start()
        await server.wait_done()
        await server.stop()
        assert "lost 0: its process has ended" in server.failed

    for run in (links_of_a_member, coordinator):
        asyncio.run(asyncio.wait_for(run(), DEADLINE))


@pytest.mark.parametrize("how", ["on the way", "another kernel", "another network"])
def test_who_is_led_to_another_process_has_no_proof_that_the_one_it_wants_has_ended(
    how: str, member: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody on the way, or by an address that two hosts have, as those of containers: it may live."""
    relay = Relay(member.address)
    there = one_of_this_host(relay.address if how == "on the way" else member.address)
    if how == "another kernel":
        there = msgspec.structs.replace(there, boot="another")
    elif how == "another network":
        there = msgspec.structs.replace(there, network="4026531840")
    outcomes: list[str] = []
    call = CoordinatorServer._call

    async def called(self: CoordinatorServer, *args: Any) -> str:
        outcomes.append(await call(self, *args))
        return outcomes[-1]

    monkeypatch.setattr(CoordinatorServer, "_call", called)

    async def run() -> None:
        lost: list[bool] = []
        peers = Peers(
            0,
            0,
            CREDENTIALS,
            on_open=lambda replica: None,
            on_message=lambda message: None,
            on_lost=lambda view, replica, reason, proof: lost.append(proof),
            on_back=lambda replica: None,
        )
        view = View(1, None, (Member(0, "a", (there,), True), Member(1, "b", (there,), True)))
        peers.connect(view)
        store = ViewStore(None)
        store.views = [View(1, None, (Member(0, "life", (there,), True),))]
        server = CoordinatorServer(1, 1, CREDENTIALS, store=store, timeouts=Timeouts.derive(10.0))
        await server.start()
        while not (lost and outcomes):
            await asyncio.sleep(0.01)
        assert (lost[0], outcomes[0]) == (False, "unreachable")
        assert not server.ended
        await server.stop()
        peers.close()

    try:
        asyncio.run(asyncio.wait_for(run(), DEADLINE))
    finally:
        relay.close()


def test_a_signed_word_of_another_job_to_who_was_led_to_it_is_no_reason_to_give_up(member: Peer) -> None:
    relay, ours = Relay(member.address), Credentials("secret", "ours")
    with pytest.raises(wire.HandshakeError, match="of the job 'ours'") as refused:
        wire.connect(relay.address, ours, "member", {}, DEADLINE)
    assert type(refused.value) is wire.HandshakeError
    relay.close()
    with pytest.raises(wire.Refused, match="of the job 'ours'"):
        wire.connect(member.address, ours, "member", {}, DEADLINE)


# -- a connection that is reset between a rank and its leader ----------------------------------------------------------


class Relay:
    """Between a rank and its leader; `cut` resets all connections that there are."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.count = 0
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self.count += 1
                self._socks += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        socks, self._socks = self._socks, []
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)  # wakes who reads
            sock.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


class Job:
    """A coordinator, and agents that move nothing, in this process."""

    def __init__(self, replicas: int, ranks: int) -> None:
        self._ranks = ranks
        self._timeouts = Timeouts.derive(60.0, 10.0)
        self._events: list[dict[str, object]] = []
        self._agents: list[Agent] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.server = CoordinatorServer(
            replicas, ranks, CREDENTIALS, timeouts=self._timeouts, on_event=self._events.append
        )
        self.do(self.server.start())

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    def agent(
        self, replica: int, rank: int, leader: tuple[str, int] | None = None, leader_socket: socket.socket | None = None
    ) -> Agent:
        sock = listen("127.0.0.1", 0)
        nonce = f"{replica:016x}{rank:016x}"
        made = Agent(
            IdleEngine(),
            coordinator=("127.0.0.1", int(self.server.endpoint.rpartition(":")[2])),
            credentials=CREDENTIALS,
            replica=replica,
            rank=rank,
            ranks=self._ranks,
            leader=leader,
            leader_socket=leader_socket,
            sock=sock,
            address=Address(*sock.getsockname(), liveness.boot(), 1, 3, nonce, network=liveness.network()),
            timeouts=self._timeouts,
        )
        self._agents.append(made)
        made.start()
        return made

    def events_of(self, *kinds: str) -> list[dict[str, object]]:
        return [event for event in self._events if event["kind"] in kinds]

    def close(self) -> None:
        for agent in self._agents:
            agent.stop()
        self.do(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)


def test_a_member_that_answers_the_coordinator_is_removed_by_no_proof_of_another() -> None:
    job = Job(2, 1)
    try:
        agents = [job.agent(replica, 0) for replica in range(2)]
        for one in agents:
            one.register(DEADLINE)
        agents[0].suspect(1, 1, "its process has ended", proof=True)
        until(lambda: bool(job.events_of("spared")))
        assert [event["why"] for event in job.events_of("view")] == ["all replicas are here"]
        agents[1].stop()  # it has, now
        agents[0].suspect(1, 1, "its process has ended", proof=True)
        until(lambda: len(job.events_of("view")) == 2)
    finally:
        job.close()


def test_who_has_finished_waits_for_no_view_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the store: it is tried again until it is mended, and what it is follows then."""
    append, broken = ViewStore.append, threading.Event()

    def fails(store: ViewStore, view: View) -> None:
        if broken.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        append(store, view)

    monkeypatch.setattr(ViewStore, "append", fails)
    monkeypatch.setattr(server, "RETRY", 0.05)
    job = Job(2, 1)
    try:
        agents = [job.agent(replica, 0) for replica in range(2)]
        for one in agents:
            one.register(DEADLINE)
        broken.set()
        agents[1].stop()
        until(lambda: bool(job.events_of("store")))
        agents[0].finish(DEADLINE)
        assert agents[0]._acked.is_set()
        assert len(job.events_of("view")) == 1
        broken.clear()
        until(lambda: len(job.events_of("store")) == 2)
        texts = [str(event["text"]) for event in job.events_of("store")]
        assert "Input/output error; mend the file system" in texts[0]
        assert "are stored" in texts[1]
        until(lambda: len(job.events_of("view")) == 2)
    finally:
        job.close()


def test_a_rank_that_has_come_to_the_leader_of_another_replica_takes_the_place_of_nobody() -> None:
    leader_socket = listen("127.0.0.1", 0)
    job = Job(2, 2)
    try:
        leader = job.agent(0, 0, leader_socket.getsockname(), leader_socket)
        before = counts().get("fields", 0)
        job.agent(1, 1, leader_socket.getsockname())
        until(lambda: counts().get("fields", 0) > before)
        assert not leader._ranks
        assert 1 not in leader._node.leader.addresses
    finally:
        job.close()


def test_a_reset_between_a_rank_and_its_leader_costs_nothing() -> None:
    leader_socket = listen("127.0.0.1", 0)
    relay = Relay(leader_socket.getsockname())
    job = Job(1, 2)
    agents = [job.agent(0, 0, relay.address, leader_socket), job.agent(0, 1, relay.address)]
    try:
        for one in agents:
            one.register(DEADLINE)
        for times in range(1, 4):
            relay.cut()
            until(lambda times=times: relay.count > times and 1 in agents[0]._ranks)  # type: ignore[misc]
        job.do(_drained(job.server))
        training = [threading.Thread(target=_train, args=(one,), daemon=True) for one in agents]
        for thread in training:
            thread.start()
        for thread in training:
            thread.join(DEADLINE)
        assert all(one.left for one in agents), "what was said after a reset did not arrive"
        assert not job.events_of("suspect", "failed")
    finally:
        relay.close()
        job.close()


def _train(agent: Agent) -> None:
    """Until a drain is over."""
    for step in itertools.count():
        agent.boundary(step, DEADLINE)
        if agent.left:
            return
        time.sleep(0.001)  # a step


async def _drained(server: CoordinatorServer) -> None:
    server.drain()


def test_what_a_stopped_process_is_sent_may_lie_there(member: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end a connection whose other end has no room, though it answers, after the time of `tune`."""
    monkeypatch.setattr(wire, "USER_TIMEOUT", 300)
    for bulk in (False, True):
        with wire.connect(member.address, CREDENTIALS, "data", {}, DEADLINE) as sock:
            assert member.says() == "data"
            sock.setblocking(False)
            if bulk:
                wire.for_bulk(sock)
            member.stop()
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 16))
            poll = select.poll()
            poll.register(sock, 0)  # errors alone
            assert bool(poll.poll(3000.0 if bulk else 1e3 * DEADLINE)) != bulk
            member.go_on()


def test_a_link_on_its_way_to_who_calls_it_is_not_broken_off() -> None:
    """Each call comes before the answer to what the one before has begun: on a loaded host it would never be there."""

    async def run() -> None:
        opened = asyncio.Event()
        sock = links.listen("127.0.0.1", 0)
        sock.setblocking(False)
        link = Link(sock.getsockname()[:2], CREDENTIALS, "leader", {}, on_open=opened.set)
        came, _ = await asyncio.get_running_loop().sock_accept(sock)
        for _ in range(5):
            link.redirect(sock.getsockname()[:2])
            await asyncio.sleep(0)
        came.setblocking(False)
        await wire.handshake(came, wire.server(CREDENTIALS, ""), DEADLINE)
        await opened.wait()
        link.close()
        came.close()
        sock.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_process_that_ends_is_seen_by_its_kernel() -> None:
    """Its port may answer still: it was asked for 40 ms, for as long as its memory was being freed."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    here = liveness.boot()
    assert liveness.is_ending(Address("h", 1, here, child, 3, "0" * 32))
    assert not liveness.is_ending(Address("h", 1, "another kernel", child, 3, "0" * 32))
    os.waitpid(child, 0)
    assert not liveness.is_ending(Address("h", 1, here, child, 3, "0" * 32)), (
        "nobody is there: it may be another's number"
    )
    assert not liveness.is_ending(Address("h", 1, here, os.getpid(), 3, "0" * 32))
