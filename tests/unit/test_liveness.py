"""Whether a kernel answers, with the kernel's own sockets and processes that are stopped and killed.

`tests/hosts` shows that acknowledgements end where the network does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import itertools
import logging
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

from ftcomm.control import handshake, knock, links, liveness, server, wire
from ftcomm.control import messages as m
from ftcomm.control.agent import Agent
from ftcomm.control.dropped import counts
from ftcomm.control.handshake import Credentials, HandshakeError
from ftcomm.control.links import Link, listen
from ftcomm.control.liveness import unanswered
from ftcomm.control.peers import Peers
from ftcomm.control.rank_errors import Gone
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.store import ViewStore
from ftcomm.control.suspicion import Probe, Why
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Addresses, Member, View
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
from ftcomm.control.handshake import Credentials, HandshakeError

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


def at(peer: Peer, nonce: str = "0" * 32, boot: str = "another kernel") -> Address:
    """Its address as another host has it; `boot` of this one: as its own host has it."""
    here = {"network": liveness.network(), "pids": liveness.pids()} if boot == liveness.boot() else {}
    return Address(*peer.address, boot, peer.process.pid, 3, nonce, **here)


def found(there: Address, patience: float = DEADLINE) -> str:
    async def run() -> str:
        knocking = knock.Knock(there, CREDENTIALS, "asked", {})
        try:
            return await knocking.outcome(patience)
        finally:
            knocking.close()

    return asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_knock_finds_a_stopped_process_and_not_one_that_has_ended(member: Peer) -> None:
    async def run() -> None:
        member.stop()
        knocking = knock.Knock(at(member), CREDENTIALS, "asked", {})
        assert await knocking.outcome(2.5) == "mute"  # the kernel asks once a second
        assert await knocking.outcome(0.0) == "mute"
        assert not knocking.over
        member.go_on()
        assert await knocking.outcome(DEADLINE) == "answered"
        knocking.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    member.kill()
    assert found(at(member, boot=liveness.boot())) == "ended"
    refused = msgspec.structs.replace(at(member), host="localhost")
    assert found(refused) == "refused", "it may be what is in between"


@pytest.mark.parametrize("says", ["nothing", "something", "bye"])
def test_who_has_the_port_and_is_not_of_the_job_is_no_sign_of_life(says: str) -> None:
    """It says nothing, something else, or hangs up: a kernel has taken the connection each time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    held.append(sock)
                    if says == "something":
                        sock.sendall(b"220 mail.example.com ESMTP\r\n")
                    elif says == "bye":
                        sock.close()

        threading.Thread(target=serve, daemon=True).start()
        there = Address(*listener.getsockname(), "another kernel", 1, 3, "0" * 32)
        assert found(there, 0.2 if says == "nothing" else DEADLINE) == ("mute" if says == "nothing" else "unreachable")
        listener.shutdown(socket.SHUT_RDWR)
        for sock in held:
            sock.close()


def test_another_process_of_the_job_at_the_port_is_an_end_where_that_is_one_port(member: Peer) -> None:
    here = msgspec.structs.replace(at(member, "1" * 32), boot=liveness.boot(), network=liveness.network())
    assert found(at(member)) == "answered"
    assert found(here) == "ended"
    assert found(at(member, "1" * 32)) == "unreachable", "it may live elsewhere"


def test_its_own_kernel_knows_that_a_process_has_ended_whoever_has_its_port(peer: Peer) -> None:
    """Without a message from anybody, as soon as that is so: whoever knocks need not look again."""

    async def run() -> None:
        knocking = knock.Knock(at(peer, boot=liveness.boot()), CREDENTIALS, "asked", {})
        assert await knocking.outcome(0.1) == "mute"
        later = asyncio.ensure_future(knocking.outcome(DEADLINE))
        await asyncio.sleep(0)
        peer.process.kill()
        assert await later == "ended"
        knocking.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    port = peer.address[1]
    peer.kill()
    with socket.create_server(("127.0.0.1", port)):
        assert found(at(peer, boot=liveness.boot())) == "ended"


@pytest.mark.parametrize("why", list(Why))
def test_a_stopped_process_has_one_knock_in_its_backlog_however_often_it_is_asked(
    member: Peer, why: Why, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full backlog looks like a host that is gone."""
    probe = Probe(why, (1, "life"), 0, at(member))
    made: list[object] = []
    connected = knock.connected
    monkeypatch.setattr(knock, "connected", lambda *to: (made.append(to), connected(*to))[1])

    async def run() -> None:
        knocks = knock.Knocks(CREDENTIALS)
        member.stop()
        for call in (False, True) * 4:
            asked = dataclasses.replace(probe, call=call)
            assert await knocks.outcome(asked, "asked", {}, 0.05) == "mute"
        assert len(made) == 1
        member.go_on()
        assert await knocks.outcome(probe, "asked", {}, DEADLINE) == "answered"
        assert await knocks.outcome(probe, "asked", {}, DEADLINE) == "answered", "an answer of before is no news"
        assert len(made) == 2
        knocks.only(set())

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_where_no_kernel_answers_a_knock_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog that is full answers no further connection, as a host that is gone does not."""
    monkeypatch.setattr("ftcomm.control.knock.KERNEL", 0.3)
    with socket.socket() as listener, contextlib.ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        held.enter_context(socket.create_connection(listener.getsockname()))
        assert found(Address(*listener.getsockname(), "another kernel", 1, 3, "0" * 32)) == "unreachable"


def test_the_answer_says_what_the_process_does(peer: Peer) -> None:
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
        with socket.create_connection(member.address) as before:  # behind the other one, or before it
            member.kill()
            until(lambda: unanswered(before) is None)
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
            monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT", DEADLINE)  # what follows its first byte may take its time

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
        lost: list[tuple[int, str]] = []
        ended: list[str] = []
        opened, back = asyncio.Event(), asyncio.Event()
        peers = Peers(
            0,
            0,
            CREDENTIALS,
            on_open=lambda replica: opened.set(),
            on_message=lambda message: None,
            on_lost=lambda view, replica, reason: ended.append(reason),
            on_failed=lambda view, replica, reason, error: lost.append((replica, reason)),
            on_back=lambda replica: back.set(),
        )
        there = Address(*member.address, "b", 1, 3, "0" * 32)
        peers.connect(
            View(1, None, (Member(0, "a", Addresses.of((there,)), True), Member(1, "b", Addresses.of((there,)), True)))
        )
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
        assert not ended, "another network may lie in between"
        assert not back.is_set()
        peers.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def one_of_this_host(address: tuple[str, int]) -> Address:
    """The address of a process that is gone."""
    return Address(*address, liveness.boot(), 1, 3, "1" * 32, network=liveness.network())


def test_a_process_whose_port_another_one_of_the_job_has_by_now_has_ended(member: Peer) -> None:
    """The other one proves it by the token: its answer, and not that something listens there."""

    async def links_of_a_member() -> None:
        lost: list[int] = []
        told = asyncio.Event()

        def on_lost(view: View, replica: int, reason: str) -> None:
            lost.append(replica)
            told.set()

        ignore: Any = lambda *told: None  # noqa: E731
        hears = dict(on_open=ignore, on_message=ignore, on_lost=on_lost, on_failed=ignore, on_back=ignore)
        peers = Peers(0, 0, CREDENTIALS, **hears)
        before = one_of_this_host(member.address)
        peers.connect(
            View(
                1, None, (Member(0, "a", Addresses.of((before,)), True), Member(1, "b", Addresses.of((before,)), True))
            )
        )
        await told.wait()
        assert lost == [1]
        peers.close()

    async def coordinator() -> None:
        store = ViewStore(None)
        store.views = [View(1, None, (Member(0, "life", Addresses.of((one_of_this_host(member.address),)), True),))]
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
    outcome = knock.Knock.outcome

    async def asked(self: knock.Knock, patience: float) -> str:
        outcomes.append(await outcome(self, patience))
        return outcomes[-1]

    monkeypatch.setattr(knock.Knock, "outcome", asked)

    async def run() -> None:
        lost: list[str] = []
        ended: list[str] = []
        peers = Peers(
            0,
            0,
            CREDENTIALS,
            on_open=lambda replica: None,
            on_message=lambda message: None,
            on_lost=lambda view, replica, reason: ended.append(reason),
            on_failed=lambda view, replica, reason, error: lost.append(reason),
            on_back=lambda replica: None,
        )
        view = View(
            1, None, (Member(0, "a", Addresses.of((there,)), True), Member(1, "b", Addresses.of((there,)), True))
        )
        peers.connect(view)
        store = ViewStore(None)
        store.views = [View(1, None, (Member(0, "life", Addresses.of((there,)), True),))]
        server = CoordinatorServer(1, 1, CREDENTIALS, store=store, timeouts=Timeouts.derive(10.0))
        await server.start()
        while not (lost and "unreachable" in outcomes):
            await asyncio.sleep(0.01)
        assert not ended
        assert set(outcomes) <= {"mute", "unreachable"}
        assert not server.ended
        await server.stop()
        peers.close()

    try:
        asyncio.run(asyncio.wait_for(run(), DEADLINE))
    finally:
        relay.close()


def test_a_signed_answer_of_another_job_to_who_was_led_to_it_is_no_reason_to_give_up(member: Peer) -> None:
    relay, ours = Relay(member.address), Credentials("secret", "ours")
    with pytest.raises(handshake.HandshakeError, match="of the job 'ours'") as refused:
        wire.connect(relay.address, ours, "member", {}, DEADLINE)
    assert type(refused.value) is handshake.HandshakeError
    relay.close()
    with pytest.raises(handshake.Refused, match="of the job 'ours'"):
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

    def __init__(self, replicas: int, ranks: int, timeouts: Timeouts | None = None) -> None:
        self._ranks = ranks
        self._timeouts = timeouts or Timeouts.derive(60.0, 10.0)
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
            shard=rank,
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
        until(lambda: bool(job.events_of("not_removed")))
        assert [event["why"] for event in job.events_of("view")] == ["all replicas are here"]
        agents[1].stop()  # it has, now
        agents[0].suspect(1, 1, "its process has ended", proof=True)
        until(lambda: len(job.events_of("view")) == 2)
    finally:
        job.close()


@pytest.mark.parametrize("ends", [False, True])
def test_an_error_in_the_control_thread_fails_what_waits_for_it(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in its event loop may fail, and so may the loop itself."""

    def fails(*args: object) -> None:
        raise SystemExit("no more") if ends else ValueError("no more")

    job, failed, told = Job(2, 1), list[str](), threading.Event()
    try:
        agents = [job.agent(replica, 0) for replica in range(2)]
        for one in agents:
            assert one.register(DEADLINE)
        monkeypatch.setattr(agents[0].engine, "fail", lambda reason, ending: (failed.append(reason), told.set()))
        monkeypatch.setattr(agents[0]._node, "severed", fails)
        agents[0].severed(1, 1, "its connection was closed")
        assert told.wait(DEADLINE)
        assert "internal error in the control thread: " in failed[0]
        assert "no more" in failed[0]
        assert failed[0].startswith("replica 0 rank 0: ") is ends
        with pytest.raises(Gone, match="no more"):
            agents[0].boundary(1, DEADLINE)
        until(lambda: len(job.events_of("view")) == 2)
        assert "no more" in str(job.events_of("view")[1]["why"])
    finally:
        job.close()


def test_who_can_start_no_thread_waits_for_one_on_its_way_to_a_view_and_for_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says once of each which limit to raise, and what has connected meanwhile is served then."""
    start, left = threading.Thread.start, {"ftcomm-reach": 2, "ftcomm-data": 2}

    def starts(thread: threading.Thread) -> None:
        if left.get(thread.name, 0):
            left[thread.name] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    job, served = Job(1, 1), threading.Event()
    try:
        agent = job.agent(0, 0)
        assert agent.register(DEADLINE)
        assert not left["ftcomm-reach"]
        agent.serve("data", lambda channel, fields: served.set())
        with agent.dial(0, "data", {}):
            assert served.wait(DEADLINE)
        assert [record for record in caplog.records if "(ulimit -u" in record.getMessage()][2:] == []
    finally:
        job.close()
    assert "(ulimit -u" in caplog.text


@pytest.mark.parametrize("hangs_up", [True, False])
def test_who_can_serve_no_joiner_goes_on_itself(hangs_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no thread for that for as long as an op may take, and lets the connection go."""
    start, waiting = threading.Thread.start, []

    def starts(thread: threading.Thread) -> None:
        if thread.name == "ftcomm-state":
            waiting.append(thread._args[1])  # type: ignore[attr-defined]  # the connection
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    job = Job(1, 1, Timeouts.derive(60.0, 2.0) if hangs_up else Timeouts.derive(4.0))
    try:
        agent = job.agent(0, 0)
        assert agent.register(DEADLINE)
        agent.serve("state", lambda channel, fields: None)
        with agent.dial(0, "state", {}) as dialled:
            until(lambda: bool(waiting))
            if not hangs_up:
                dialled.settimeout(DEADLINE)
                assert dialled.recv(1) == b""
        until(lambda: waiting[0].fileno() == -1)
        assert not agent._node.is_short(time.monotonic())
        assert agent.boundary(0, DEADLINE).epoch == 1
    finally:
        job.close()


def test_who_waits_on_without_a_coordinator_says_once_in_the_time_of_an_op_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, told = Job(1, 1), list[float]()
    try:
        agent = job.agent(0, 0)
        agent.register(DEADLINE)
        monkeypatch.setattr(agent.engine, "wait_on", told.append)
        with caplog.at_level(logging.WARNING, "ftcomm.control"):
            agent._wait_on(19.0, 1.0)  # nothing waits
            monkeypatch.setattr(agent.engine, "stalls", lambda seconds: (7, (1, 3)))
            monkeypatch.setattr(agent._up, "refused", HandshakeError("it is of another job"))
            agent._wait_on(20.0, 1.0)
            agent._wait_on(21.0, 1.0)
        said = [text for text in (record.getMessage() for record in caplog.records) if "has not been heard" in text]
        assert len(said) == 1
        expected = (
            "waits for replicas 1, 3,",
            job.server.endpoint,
            "for 20 s",
            "kill -CONT PID",
            "waits for 1900 s more. Who is there refuses it: it is",
        )
        assert all(text in said[0] for text in expected)
        assert told == [1.0, 1.0, 1.0]
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
        assert leader._leading is not None
        assert not leader._leading.ranks
        assert 1 not in leader._leading.node.leader.addresses
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
            until(lambda times=times: relay.count > times and 1 in agents[0]._leading.ranks)  # type: ignore[misc]
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
        await wire.handshake(came, handshake.server(CREDENTIALS, ""), DEADLINE)
        await opened.wait()
        link.close()
        came.close()
        sock.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_process_that_ends_is_seen_by_its_kernel() -> None:
    """Its port may answer still: it was asked for 40 ms, for as long as its memory was being freed."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    there = Address("h", 1, liveness.boot(), child, 3, "0" * 32, pids=liveness.pids())
    elsewhere = [
        msgspec.structs.replace(there, boot="another kernel"),
        msgspec.structs.replace(there, pids="of a container"),
        msgspec.structs.replace(there, pids=""),
    ]
    assert not liveness.is_ending(there)
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    assert not liveness.is_ending(there)
    os.kill(child, signal.SIGKILL)
    assert liveness.is_ending(there), "it will not run again, whether it has got to its end or not"
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert liveness.is_ending(there)
    os.waitpid(child, 0)
    assert liveness.is_ending(there)
    assert not any(liveness.is_ending(one) for one in elsewhere)
    assert not liveness.is_ending(msgspec.structs.replace(there, pid=os.getpid()))
