"""Probes of the port of a process: whether it lives, has ended, or another one is there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import msgspec
import pytest

from ftcomm.control import handshake, liveness, probe, wire
from ftcomm.control.handshake import Credentials
from ftcomm.control.peers import Peers
from ftcomm.control.probe_schedule import Probe, ProbeOutcome, ProbeReason
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.store import ViewStore
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, Addresses, Member, View
from tests.rigs.control_threads import Relay
from tests.rigs.stopped_processes import CREDENTIALS, DEADLINE, Peer, at


def found(there: Address, timeout: float = DEADLINE) -> ProbeOutcome:
    async def run() -> ProbeOutcome:
        asking = probe.ProbeConnection(there, CREDENTIALS, "asked", {})
        try:
            return await asking.outcome(timeout)
        finally:
            asking.close()

    return asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_probe_finds_a_stopped_process_and_not_one_that_has_ended(member: Peer) -> None:
    async def run() -> None:
        member.stop()
        asking = probe.ProbeConnection(at(member), CREDENTIALS, "asked", {})
        assert await asking.outcome(2.5) is ProbeOutcome.MUTE  # the kernel asks once a second
        assert await asking.outcome(0.0) is ProbeOutcome.MUTE
        assert not asking.over
        member.go_on()
        assert await asking.outcome(DEADLINE) is ProbeOutcome.ANSWERED
        asking.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    member.kill()
    assert found(at(member, boot=liveness.boot())) is ProbeOutcome.ENDED
    refused = msgspec.structs.replace(at(member), host="localhost")
    assert found(refused) is ProbeOutcome.REFUSED, "it may be what is in between"


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
        assert found(there, 0.2 if says == "nothing" else DEADLINE) == (
            ProbeOutcome.MUTE if says == "nothing" else ProbeOutcome.UNREACHABLE
        )
        listener.shutdown(socket.SHUT_RDWR)
        for sock in held:
            sock.close()


def test_another_process_of_the_job_at_the_port_is_an_end_where_that_is_one_port(member: Peer) -> None:
    here = msgspec.structs.replace(at(member, "1" * 32), boot=liveness.boot(), network=liveness.network())
    assert found(at(member)) is ProbeOutcome.ANSWERED
    assert found(here) is ProbeOutcome.ENDED
    assert found(at(member, "1" * 32)) is ProbeOutcome.UNREACHABLE, "it may live elsewhere"


def test_its_own_kernel_knows_that_a_process_has_ended_whoever_has_its_port(peer: Peer) -> None:
    """Without a message from anybody, as soon as that is so: whoever probes need not look again."""

    async def run() -> None:
        asking = probe.ProbeConnection(at(peer, boot=liveness.boot()), CREDENTIALS, "asked", {})
        assert await asking.outcome(0.1) is ProbeOutcome.MUTE
        later = asyncio.ensure_future(asking.outcome(DEADLINE))
        await asyncio.sleep(0)
        peer.process.kill()
        assert await later is ProbeOutcome.ENDED
        asking.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
    port = peer.address[1]
    peer.kill()
    with socket.create_server(("127.0.0.1", port)):
        assert found(at(peer, boot=liveness.boot())) is ProbeOutcome.ENDED


@pytest.mark.parametrize("why", list(ProbeReason))
def test_a_stopped_process_has_one_probe_in_its_backlog_however_often_it_is_asked(
    member: Peer, why: ProbeReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full backlog looks like a host that is gone."""
    question = Probe(why, (1, "life"), 0, at(member))
    made: list[object] = []
    connected = probe.connected
    monkeypatch.setattr(probe, "connected", lambda *to: (made.append(to), connected(*to))[1])

    async def run() -> None:
        prober = probe.Prober(CREDENTIALS)
        member.stop()
        for call in (False, True) * 4:
            asked = msgspec.structs.replace(question, call=call)
            assert await prober.outcome(asked, "asked", {}, 0.05) is ProbeOutcome.MUTE
        assert len(made) == 1
        member.go_on()
        assert await prober.outcome(question, "asked", {}, DEADLINE) is ProbeOutcome.ANSWERED
        assert await prober.outcome(question, "asked", {}, DEADLINE) is ProbeOutcome.ANSWERED, (
            "an answer of before is no news"
        )
        assert len(made) == 2
        prober.only(set())

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_where_no_kernel_answers_a_probe_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog that is full answers no further connection, as a host that is gone does not."""
    monkeypatch.setattr("ftcomm.control.probe.KERNEL", 0.3)
    with socket.socket() as listener, contextlib.ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        held.enter_context(socket.create_connection(listener.getsockname()))
        assert found(Address(*listener.getsockname(), "another kernel", 1, 3, "0" * 32)) is ProbeOutcome.UNREACHABLE


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
    outcomes: list[ProbeOutcome] = []
    outcome = probe.ProbeConnection.outcome

    async def asked(self: probe.ProbeConnection, timeout: float) -> ProbeOutcome:
        outcomes.append(await outcome(self, timeout))
        return outcomes[-1]

    monkeypatch.setattr(probe.ProbeConnection, "outcome", asked)

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
        while not (lost and ProbeOutcome.UNREACHABLE in outcomes):
            await asyncio.sleep(0.01)
        assert not ended
        assert set(outcomes) <= {ProbeOutcome.MUTE, ProbeOutcome.UNREACHABLE}
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
