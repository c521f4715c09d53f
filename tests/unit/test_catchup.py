"""The transfer of a state from several sources to a joiner, over real sockets, with sources that die, lie or lag.

The control plane's part (an authenticated connection to a named replica) is played by socket pairs.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
import types

import msgspec
import pytest
import torch

from ftcomm.control import dropped
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Member, View
from ftcomm.errors import StateError, TransportError
from ftcomm.training import catchup, snapshot
from ftcomm.training.catchup import Fetch, StateSource, sources_of
from ftcomm.training.catchup_protocol import (
    MAX_FRAME,
    BlockHeader,
    BlockStream,
    CatchUpDone,
    Offer,
    Refusal,
    Wait,
    Want,
    receive,
    send,
)
from ftcomm.training.snapshot import Snapshot
from ftcomm.training.state import allocate, digest, flatten, load
from ftcomm.training.throttle import Throttle

from .test_state import Box

TIMEOUT = 60.0


class Network:
    """All replicas of one test: who serves what, and which connections are open."""

    def __init__(self):
        self.handlers = {}
        self.sockets = {}
        self.dead = set()

    def kill(self, replica):
        self.dead.add(replica)
        for sock in self.sockets.get(replica, []):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Settings:
    timeouts = Timeouts.derive()


class Node:
    """What `StateSource` and `Fetch` use of a Group."""

    settings = Settings()

    def __init__(self, network, replica, members=(0, 1, 2, 3)):
        self.network, self.replica, self.members, self.reports = network, replica, members, []
        self.shard = 0

    def dial(self, replica, purpose, fields):
        if replica in self.network.dead or replica not in self.network.handlers:
            raise TransportError(f"replica {replica} cannot be reached")
        here, there = socket.socketpair()
        self.network.sockets.setdefault(replica, []).append(there)
        threading.Thread(target=self.network.handlers[replica], args=(there, fields), daemon=True).start()
        return here

    @property
    def internals(self):
        return self

    def serve(self, purpose, handler):
        assert purpose == "state"
        self.network.handlers[self.replica] = handler

    def emit(self, kind, **fields):
        self.reports.append((kind, fields))


def view(contributing, joining=(), step=7, life="a"):
    members = [Member(r, f"{r}a", (), True) for r in contributing]
    members += [Member(r, f"{r}{life}", (), False) for r in joining]
    return View(epoch=3, step=step, members=tuple(sorted(members, key=lambda m: m.replica)))


def make_state(seed=0, megabytes=6):
    torch.manual_seed(seed)
    tensors = [torch.randn(3), torch.randn(()), torch.randn(megabytes << 18), torch.empty(0), torch.randn(5).bfloat16()]
    return {"model": Box({"tensors": tensors, "epoch": 4})}


def sources(network, state, contributing=(0, 1, 2), joining=(3,), step=7):
    """Healthy replicas that have passed the boundary at which `joining` came in."""
    made = {}
    for replica in contributing:
        made[replica] = StateSource(Node(network, replica), state)
        made[replica].at_boundary(step - 1, view(contributing))
        made[replica].at_boundary(step, view(contributing, joining, step))
    return made


def fetch(network, replica=3, contributing=(0, 1, 2), step=7, here=None, life="a"):
    here = make_state(seed=9) if here is None else here
    return Fetch(Node(network, replica), view(contributing, (replica,), step, life), step, flatten(here).skeleton)


def received(fetching):
    fetching.wait(TIMEOUT)
    box = Box(None)
    state = {"model": box}
    flat = fetching.take()
    fetching.close()
    load(flat, state)
    return digest(state)


def until(true):
    deadline = time.monotonic() + TIMEOUT
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@pytest.fixture
def network():
    made = Network()
    yield made
    for replica in list(made.sockets):
        made.kill(replica)


def test_the_state_arrives_striped_over_all_sources(network):
    state = make_state()
    sources(network, state)
    fetching = fetch(network)
    assert received(fetching) == digest(state)
    assert set(fetching.sources) <= {0, 1, 2}
    assert fetching.nbytes == flatten(state).nbytes


def test_a_snapshot_does_not_change_with_the_live_state(network):
    state = make_state()
    before = digest(state)
    sources(network, state)
    for tensor in state["model"].value["tensors"]:
        tensor.zero_()
    assert received(fetch(network)) == before


@pytest.fixture
def no_thread(monkeypatch):
    """Makes the next `count` starts of threads with names that begin so fail."""
    start = threading.Thread.start

    def refuse(name, count):
        left = [None] * count

        def starts(thread):
            if thread.name.startswith(name) and left:
                left.pop()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starts)
        return left

    return refuse


def test_a_fetch_waits_for_threads_that_cannot_be_had_now(network, no_thread):
    state = make_state()
    sources(network, state)
    left = no_thread("ftcomm-state", 2)
    assert received(fetch(network)) == digest(state)
    assert not left


def test_without_a_thread_a_snapshot_is_complete_at_once(no_thread):
    """The replica that holds the state goes on, though another one has to be served."""
    model = torch.nn.Linear(200, 200)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    left = no_thread("ftcomm-snapshot", 1)
    made = Snapshot(7, state, overlap=True)
    assert not left
    assert made.finish() == 0.0
    assert any(torch.equal(tensor, model.weight) for tensor in made.flat.tensors)


def test_a_state_without_tensors(network):
    state = {"model": Box({"tensors": [], "epoch": 5})}
    sources(network, state)
    assert received(fetch(network, here={"model": Box({"tensors": [], "epoch": 0})})) == digest(state)


def test_sources_are_the_same_four_for_everybody():
    assert sources_of(view((0, 1, 2, 3, 4, 6), (5,))) == (0, 1, 2, 3)
    assert sources_of(view((2,), (0, 1))) == (2,)


def test_a_source_that_has_not_reached_the_boundary_lets_the_joiner_wait(network):
    state = make_state()
    late = StateSource(Node(network, 0), state)
    late.at_boundary(6, view((0,)))
    fetching = fetch(network, contributing=(0,))
    assert not fetching.ready()
    late.at_boundary(7, view((0,), (3,)))
    assert received(fetching) == digest(state)


def test_a_source_whose_script_is_not_in_the_loop_yet_is_asked_again(network):
    """Nobody serves "state" there until then, so the connection is closed."""
    state, refused = make_state(), threading.Event()

    def nobody(sock, fields):
        sock.close()
        refused.set()

    network.handlers[0] = nobody
    fetching = fetch(network, contributing=(0,))
    assert refused.wait(TIMEOUT)
    sources(network, state, contributing=(0,))
    assert received(fetching) == digest(state)


def test_a_joiner_knows_soon_whether_the_state_fits(network):
    state = make_state()
    network.handlers[0] = serve_wrongly(state, lambda *_: threading.Event().wait(TIMEOUT))
    fetching = fetch(network, contributing=(0,))
    fetching.agree(TIMEOUT)
    assert not fetching.ready()
    fetching.close()
    other = fetch(network, contributing=(0,), here=make_state(megabytes=7))
    with pytest.raises(StateError, match="does not fit here"):
        other.agree(TIMEOUT)


def test_nobody_offers_in_time(network):
    network.handlers[0] = lambda sock, fields: network.sockets[0].append(sock)
    fetching = fetch(network, contributing=(0,))
    with pytest.raises(StateError, match="No replica offered the state of step 7"):
        fetching.agree(0.05)
    fetching.close()


def serve_wrongly(state, wrong):
    """A source that follows the protocol but for what `wrong(sock, want, stream)` does instead of answering."""
    flat = flatten(state).on_host()
    stream = BlockStream(flat)

    def handler(sock, fields):
        with contextlib.suppress(OSError), contextlib.closing(sock):
            send(sock, Wait())
            send(sock, Offer(flat.skeleton, stream.nbytes, stream.block))
            while isinstance(want := receive(sock), Want):
                wrong(sock, want, stream)

    return handler


def dies(sock, want, stream):
    sock.close()


def dies_within_a_block(sock, want, stream):
    send(sock, BlockHeader(want.number, min(stream.block, stream.nbytes)))
    sock.sendall(b"x" * 1000)
    sock.close()


def answers_another_block(sock, want, stream):
    send(sock, BlockHeader(want.number + 1, 8))


def answers_too_short(sock, want, stream):
    send(sock, BlockHeader(want.number, 8))


def talks_nonsense(sock, want, stream):
    sock.sendall(b"\xff" * 64)


WRONG = [dies, dies_within_a_block, answers_another_block, answers_too_short, talks_nonsense]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_blocks_of_a_bad_source_come_from_the_others(network, wrong):
    state = make_state()
    sources(network, state)
    network.handlers[1] = serve_wrongly(state, wrong)
    fetching = fetch(network)
    assert received(fetching) == digest(state)
    assert 1 not in fetching.sources


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_only_bad_sources_is_an_error_that_names_each(network, wrong):
    for replica in (0, 1):
        network.handlers[replica] = serve_wrongly(make_state(), wrong)
    fetching = fetch(network, contributing=(0, 1, 2))
    with pytest.raises(StateError, match=r"no source is left.*replica 0: .*replica 1: .*replica 2: .*joins at a later"):
        fetching.wait(TIMEOUT)


def offers(skeleton=None, block=1 << 20):
    """A source that offers what cannot be, and then waits."""

    def handler(sock, fields):
        with contextlib.suppress(OSError), contextlib.closing(sock):
            payload = msgspec.msgpack.encode(
                {"type": "Offer", "skeleton": skeleton or flatten(make_state()).skeleton, "nbytes": 9, "block": block}
            )
            sock.sendall(len(payload).to_bytes(4, "big") + payload)
            sock.recv(1)

    return handler


ENDLESS = {"model": Box({**make_state()["model"].value, "more": torch.empty(1).expand(1 << 60)})}
OFFERS = {
    "no block": (offers(block=0), "no source is left.*Expected"),
    "tiny blocks": (offers(block=1), "no source is left.*Expected"),
    "endless": (offers(flatten(ENDLESS).skeleton), "no memory"),
}


@pytest.mark.parametrize(("handler", "reason"), OFFERS.values(), ids=OFFERS)
def test_an_offer_that_cannot_be_ends_the_fetch_and_no_thread(network, handler, reason):
    network.handlers[0] = handler
    fetching = fetch(network, contributing=(0,))
    with pytest.raises(StateError, match=reason):
        fetching.wait(TIMEOUT)
    fetching.close()


def test_a_defect_of_the_fetch_is_an_error_and_no_endless_wait(network, monkeypatch):
    def fails(*args):
        raise KeyError("a defect")

    monkeypatch.setattr(Fetch, "_agree", fails)
    sources(network, make_state())
    fetching = fetch(network)
    with pytest.raises(StateError, match="a defect"):
        fetching.wait(TIMEOUT)


@pytest.mark.parametrize(
    "said", [b"\x00\x01\x00\x00", b"\x00\x00\x00\x05\x81\xa1\xff\x01\x01", None], ids=["long", "noise", "another"]
)
def test_a_source_hangs_up_on_a_joiner_that_talks_nonsense(network, monkeypatch, said):
    monkeypatch.setattr(dropped, "_tallies", {})
    state = make_state(megabytes=1)
    sources(network, state)
    fields = {"step": 7, "replica": 3, "incarnation": "3a"}
    with Node(network, 3).dial(0, "state", fields) as sock:
        while not isinstance(receive(sock), Offer):
            pass
        if said is None:
            send(sock, Want(1 << 40))
        else:
            sock.sendall(said)
        assert sock.recv(1) == b""
    assert dropped.counts() == {"state": 1}


def test_a_source_with_another_state_is_dropped(network):
    state = make_state()
    sources(network, state)
    sources(network, {"model": Box({**state["model"].value, "epoch": 5})}, contributing=(1,))
    fetching = fetch(network)
    fetching.wait(TIMEOUT)
    fetching.close()
    assert fetching.sources in ([1], [0], [2], [0, 2], [2, 0])  # whichever offered first rules, never a mixture


def test_a_silent_source_is_given_up_when_it_leaves_the_view(network):
    state = make_state()
    sources(network, state)
    asked = threading.Event()

    def silent(sock, fields):
        network.sockets[1].append(sock)
        asked.set()

    network.handlers[1] = silent
    fetching = fetch(network)
    assert asked.wait(TIMEOUT)
    fetching.keep((0, 2, 3))
    assert received(fetching) == digest(state)


def test_a_source_that_leaves_while_it_is_dialled_is_hung_up_on(network, monkeypatch):
    monkeypatch.setattr(catchup, "SILENCE", 3 * TIMEOUT)
    state, dialling, left, ended = make_state(megabytes=1), threading.Event(), threading.Event(), threading.Event()

    class Late(Node):
        def dial(self, replica, purpose, fields):
            if replica == 1:
                dialling.set()
                assert left.wait(TIMEOUT)
            return super().dial(replica, purpose, fields)

    def silent(sock, fields):
        with contextlib.suppress(OSError):
            sock.recv(1)
        ended.set()

    sources(network, state)
    network.handlers[1] = silent
    fetching = Fetch(Late(network, 3), view((0, 1, 2), (3,)), 7, flatten(make_state(megabytes=1)).skeleton)
    assert dialling.wait(TIMEOUT)
    fetching.keep((0, 2, 3))
    left.set()
    assert ended.wait(TIMEOUT)
    assert received(fetching) == digest(state)


@pytest.mark.parametrize("others", [True, False])
def test_a_source_that_stands_still_is_waited_for_if_it_is_the_last(network, monkeypatch, others):
    """It holds its interpreter in the middle of a block. If there are others they send its blocks."""
    monkeypatch.setattr(catchup, "SILENCE", 0.05)
    looks, go_on = [], threading.Event()

    def answers(sock):
        looks.append(sock)
        if len(looks) == 10:
            go_on.set()
        return 0.0  # as its kernel does

    monkeypatch.setattr(catchup, "unanswered", answers)
    state = make_state(megabytes=1)
    contributing = (0, 1) if others else (0,)
    sources(network, state, contributing)
    serve = network.handlers[0]

    def stands_still(sock, fields):
        near, far = socket.socketpair()
        threading.Thread(target=serve, args=(far, fields), daemon=True).start()
        threading.Thread(target=pipe, args=(sock, near), daemon=True).start()
        passed = 0
        with contextlib.suppress(OSError):  # it is given up
            while data := near.recv(1 << 12):
                sock.sendall(data)
                passed += len(data)
                if passed > 1 << 19:
                    assert go_on.wait(TIMEOUT)

    def pipe(one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 12):
                other.sendall(data)

    network.handlers[0] = stands_still
    fetching = fetch(network, contributing=contributing, here=make_state(seed=9, megabytes=1))
    assert received(fetching) == digest(state)
    assert go_on.is_set() != others
    go_on.set()


@pytest.mark.parametrize("dies", [None, 0, 1])
def test_sources_that_all_stand_still_at_once_are_waited_for(network, monkeypatch, dies):
    """They hold their interpreters, as in a compilation, in the middle of a block; one of them may die there."""
    monkeypatch.setattr(catchup, "SILENCE", 0.05)
    monkeypatch.setattr(catchup, "_LOOK", 0.01)
    looks, go_on = collections.Counter(), threading.Event()

    def answers(sock):
        looks[sock] += 1
        return 0.0 if sock.fileno() >= 0 else None

    monkeypatch.setattr(catchup, "unanswered", answers)
    state = make_state(megabytes=1)
    flat = flatten(state).on_host()
    stream = BlockStream(flat)

    class Held(Node):
        def dial(self, replica, purpose, fields):
            if replica in self.network.sockets and replica not in self.network.dead:
                assert go_on.wait(TIMEOUT)  # nobody takes a new connection, either
            return super().dial(replica, purpose, fields)

    def stands_still(sock, fields):
        with contextlib.suppress(OSError), contextlib.closing(sock):
            send(sock, Offer(flat.skeleton, stream.nbytes, stream.block))
            while isinstance(want := receive(sock), Want):
                pieces = stream.pieces(want.number)
                send(sock, BlockHeader(want.number, sum(piece.nbytes for piece in pieces)))
                sock.sendall(pieces[0][:4])
                assert go_on.wait(TIMEOUT)
                sock.sendall(pieces[0][4:])
                for piece in pieces[1:]:
                    sock.sendall(piece)

    network.handlers = {0: stands_still, 1: stands_still}
    here = flatten(make_state(seed=9, megabytes=1)).skeleton
    fetching = Fetch(Held(network, 3), view((0, 1), (3,)), 7, here)
    until(lambda: (looks.total() > 10 and fetching._mute == {0, 1}) or fetching._error is not None)
    waits = threading.Thread(target=fetching.wait, args=(0.05,))
    waits.start()
    seen = looks.total()
    until(lambda: looks.total() > seen + 20 or fetching._error is not None)
    assert fetching._scheduler.alive == (0, 1)
    assert waits.is_alive(), "its time has passed though all that are to answer are held"
    if dies is not None:
        network.kill(dies)
    go_on.set()
    waits.join(TIMEOUT)
    assert received(fetching) == digest(state)


def test_a_source_that_leaves_while_nobody_answers_the_dial_is_not_waited_for(network):
    held = threading.Event()

    class Held(Node):
        def dial(self, replica, purpose, fields):
            assert held.wait(TIMEOUT)
            return super().dial(replica, purpose, fields)

    fetching = Fetch(Held(network, 3), view((0,), (3,)), 7, flatten(make_state(megabytes=1)).skeleton)
    fetching.keep((3,))
    with pytest.raises(StateError, match="it left before it was asked"):
        fetching.ready()
    held.set()
    fetching.close()


def test_another_model_is_refused_before_its_bytes_move(network):
    sources(network, make_state())
    fetching = fetch(network, here=make_state(megabytes=7))
    with pytest.raises(StateError, match=r"does not fit here: model\.tensors\.2 is float32\[\d+\] there and"):
        fetching.wait(TIMEOUT)
    assert fetching.sources == []


def test_what_a_source_does_not_have_is_named(network):
    StateSource(Node(network, 0), {}).at_boundary(7, view((0,), (3,)))
    with pytest.raises(StateError, match="does not fit here"):
        fetch(network, contributing=(0,)).wait(TIMEOUT)


def test_nobody_contributes(network):
    with pytest.raises(StateError, match="nobody contributes"):
        fetch(network, contributing=()).ready()


def test_a_second_joiner_while_the_first_still_fetches(network):
    """Each joiner gets the state of the step at which it came in."""
    state = make_state()
    source = StateSource(Node(network, 0), state)
    source.at_boundary(7, view((0,), (2,)))
    first = digest(state)
    state["model"].value["tensors"][2].add_(1)
    source.at_boundary(8, view((0,), (2, 3), step=8))
    second = digest(state)
    state["model"].value["tensors"][2].add_(1)
    at_7 = Fetch(Node(network, 2), view((0,), (2,)), 7, flatten(state).skeleton)
    at_8 = Fetch(Node(network, 3), view((0,), (2, 3), step=8), 8, flatten(state).skeleton)
    assert received(at_8) == second
    assert received(at_7) == first


def test_a_predecessor_of_the_joiner_gets_nothing(network):
    sources(network, make_state(), contributing=(0,), joining=(3,))
    with pytest.raises(StateError, match="took no snapshot for this replica"):
        fetch(network, contributing=(0,), life="b").wait(TIMEOUT)


def test_snapshots_go_when_nobody_needs_them(network):
    made = sources(network, make_state())
    assert all(source._snapshots for source in made.values())
    received(fetch(network))
    for source in made.values():
        source.linger(TIMEOUT)  # returns because the joiner said that it has everything
        assert not source._snapshots
    again = sources(network, make_state())[0]
    again.at_boundary(8, view((0, 1, 2, 3), step=8))  # the joiner contributes
    assert not again._snapshots
    again = sources(network, make_state())[0]
    again.at_boundary(8, view((0, 1, 2), step=None))  # the joiner died
    assert not again._snapshots


def test_the_end_waits_for_a_joiner_only_while_it_is_a_member(network):
    source = sources(network, make_state())[0]
    source._group.members = (0, 1, 2)
    source.linger(TIMEOUT)
    assert not source._snapshots


@pytest.mark.parametrize("joiner", ["asks for nothing", "has gone away", "has a connection"])
def test_the_end_waits_for_a_joiner_that_has_a_connection_and_for_no_other(network, joiner):
    """Another one got its state in an earlier loop, say, and waits in the next one for this replica."""
    source = sources(network, make_state())[0]
    source._group.settings = types.SimpleNamespace(timeouts=Timeouts.derive(4.0, 0.2, 0.4))
    sock = None
    if joiner != "asks for nothing":
        sock = Node(network, 3).dial(0, "state", {"step": 7, "replica": 3, "incarnation": "3a"})
        assert isinstance(receive(sock), Offer)
        if joiner == "has gone away":
            sock.close()
    ending = threading.Thread(target=source.linger, args=(60 * TIMEOUT,), daemon=True)
    ending.start()
    if joiner == "has a connection":
        ending.join(1.0)  # several times what it waits for others
        assert ending.is_alive()
        send(sock, CatchUpDone())
    ending.join(TIMEOUT)
    assert not ending.is_alive()


def test_a_catching_up_member_is_no_source(network):
    joiner = StateSource(Node(network, 2), make_state())
    joiner.at_boundary(7, view((0,), (2, 3)))
    assert not joiner._snapshots
    joiner.at_boundary(9, view((0, 2), (3,), step=9))  # contributes now; 3 came in before and has its sources
    assert not joiner._snapshots


@pytest.mark.parametrize("block", [1, 7, 4096])
def test_blocks_cover_every_byte_once(block):
    flat = flatten({"s": Box([torch.arange(n, dtype=torch.int16) for n in (3, 0, 1, 500, 2)])}).on_host()
    stream = BlockStream(flat, block)
    joined = b"".join(bytes(piece) for n in range(stream.count) for piece in stream.pieces(n))
    assert joined == b"".join(bytes(v) for v in flat.views())
    assert max(sum(p.nbytes for p in stream.pieces(n)) for n in range(stream.count)) <= block


def test_frames_have_a_limit():
    here, there = socket.socketpair()
    with here, there:
        here.sendall((MAX_FRAME + 1).to_bytes(4, "big"))
        with pytest.raises(msgspec.DecodeError, match="a frame of"):
            receive(there)
        send(here, Refusal("no"))
        assert receive(there) == Refusal("no")


def test_allocate_then_stream_is_writable():
    flat = allocate(flatten(make_state()).skeleton)
    stream = BlockStream(flat)
    for number in range(stream.count):
        for piece in stream.pieces(number):
            piece[:] = b"\x01" * piece.nbytes
    assert flat.tensors[0].view(torch.uint8).tolist() == [1] * 12


def optimized(seed=0):
    """A state of which almost all may be copied while forward and backward run."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def slow_copies(monkeypatch):
    """Copies in the background begin when the test says so."""
    begin = threading.Event()
    copy = snapshot._copy_bytes

    def late(to, of):
        assert begin.wait(TIMEOUT)
        copy(to, of)

    monkeypatch.setattr(snapshot, "_copy_bytes", late)
    return begin


def overlapping(network, state):
    made = StateSource(Node(network, 0), state, overlap=True)
    made.at_boundary(6, view((0,)))
    made.at_boundary(7, view((0,), (3,)))
    return made


def test_a_copy_that_goes_on_in_the_step_is_of_the_boundary(network, slow_copies):
    """Forward changes a buffer at once; the optimizer waits for the rest."""
    state = optimized()
    before = digest(state)
    source = overlapping(network, state)
    fetching = fetch(network, contributing=(0,), here=optimized(seed=9))
    state["model"](torch.randn(4, 300)).square().sum().backward()
    assert digest({"model": state["model"]}) != digest({"model": optimized()["model"]}), "no buffer has changed"
    fetching.agree(TIMEOUT)  # before the copy is complete: until then the joiner keeps all others waiting
    assert not fetching.ready()
    slow_copies.set()
    source.settle()
    state["optimizer"].step()
    fetching.wait(TIMEOUT)
    arrived = optimized(seed=9)
    load(fetching.take(), arrived)
    fetching.close()
    assert digest(arrived) == before != digest(state)
    ((kind, fields),) = source._group.reports
    assert (kind, fields["step"], "spoiled" in fields) == ("state_snapshot", 7, False)


def test_a_state_that_changes_under_the_copy_is_served_to_nobody_and_the_next_is_copied_at_once(network, slow_copies):
    state = optimized()
    source = overlapping(network, state)
    with torch.no_grad():
        state["model"][0].weight.mul_(2.0)  # not by an optimizer
    slow_copies.set()
    source.settle()
    with pytest.raises(StateError, match=r"changed before optimizer\.step.*from now on they are copied before"):
        fetch(network, contributing=(0,), here=optimized(seed=9)).wait(TIMEOUT)
    slow_copies.clear()
    before = digest(state)
    source.at_boundary(8, view((0,), (2, 3), step=8))
    with torch.no_grad():
        state["model"][0].weight.mul_(2.0)
    fetching = fetch(network, replica=2, contributing=(0,), step=8, here=optimized(seed=9))
    fetching.wait(TIMEOUT)
    arrived = optimized(seed=9)
    load(fetching.take(), arrived)
    fetching.close()
    assert digest(arrived) == before
    assert [fields.get("spoiled", False) for _, fields in source._group.reports] == [True]
    source.settle()
    assert [fields.get("spoiled", False) for _, fields in source._group.reports] == [True, False]


def test_a_throttled_source_takes_leave_for_every_block(network):
    taken = []

    class Slow(Throttle):
        def take(self, nbytes):
            taken.append(nbytes)

    state = make_state()
    source = StateSource(Node(network, 0), state, throttle=Slow(None))
    source.at_boundary(7, view((0,), (3,)))
    fetching = fetch(network, contributing=(0,))
    assert received(fetching) == digest(state)
    assert sum(taken) == fetching.nbytes
