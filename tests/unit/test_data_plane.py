"""The way to the peers' memory: whom a view change dials, which connections it keeps, and which it closes."""

from __future__ import annotations

import dataclasses
import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from ftcomm.control import views
from ftcomm.control.data_plane import Unreachable
from ftcomm.groups.data_plane import LocalDataPlane
from ftcomm.transport import connector
from ftcomm.transport.base import Peer
from tests.rigs.exchange import DEADLINE, Caller, data_plane


@dataclasses.dataclass
class Way:
    """A data plane of replica 0, whose connections are those that the test makes."""

    made: list[Peer] = dataclasses.field(default_factory=list)
    closed: list[Peer] = dataclasses.field(default_factory=list)
    dialling: threading.Event = dataclasses.field(default_factory=threading.Event)
    answered: threading.Event = dataclasses.field(default_factory=threading.Event)
    slow: int = -1  # the epoch whose connections come when they are `answered`

    def connect(
        self, me: int, here: object, replica: int, there: views.Address, *, epoch: int, **options: object
    ) -> Peer:
        if epoch == self.slow:
            self.dialling.set()
            assert self.answered.wait(DEADLINE)
        peer = Peer(replica)
        peer.transport, peer.nonce = "tcp", there.nonce
        peer.close = lambda: self.closed.append(peer)  # type: ignore[method-assign]
        peer.serves = lambda epoch: peer not in self.closed  # type: ignore[method-assign]
        self.made.append(peer)
        return peer


def local_data_plane(algorithm: str = "auto") -> LocalDataPlane:
    return data_plane("tcp", algorithm=algorithm)[0]


def a_view(epoch: int, members: str = "0 1") -> views.View:
    """Members as "2'": replica 2, in its second life."""
    lives = {int(life.strip("'")): life for life in members.split()}
    ranks = {m: (views.Address("host", 0, "boot", 0, 0, f"nonce {life}"),) for m, life in lives.items()}
    return views.View(epoch, None, tuple(views.Member(m, "", ranks[m], True) for m in lives))


def test_a_connection_that_comes_after_its_view_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way(slow=1)
    monkeypatch.setattr(connector, "connect", way.connect)
    subject = local_data_plane()
    late = Caller.start(subject.reach, a_view(1))
    assert way.dialling.wait(DEADLINE)
    subject.reach(a_view(2))
    subject.enter(a_view(2), {})
    way.answered.set()
    late.join()
    assert way.closed == way.made[1:]
    assert list(subject.reach(a_view(1))) == []
    assert len(way.made) == 2


HISTORY = [  # views, and whom replica 0 dials for each
    ("0 1 2 3", [1, 2, 3]),
    ("0 1 3", []),  # a loss
    ("0 1 2' 3", [2]),  # a new life joins
    ("0 1 2'", []),
    ("0 1' 2'", [1]),  # one goes and its next life comes, in one view
    ("0 1' 2' 3'", [3]),
]


def test_a_view_change_dials_those_alone_who_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way()
    monkeypatch.setattr(connector, "connect", way.connect)
    subject = local_data_plane()
    for epoch, (members, dialled) in enumerate(HISTORY, start=1):
        before = len(way.made)
        subject.reach(a_view(epoch, members))
        assert [peer.replica for peer in way.made[before:]] == dialled
        subject.enter(a_view(epoch, members), {})


def test_a_view_that_is_never_entered_costs_no_further_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way()
    monkeypatch.setattr(connector, "connect", way.connect)
    subject = local_data_plane()
    subject.reach(a_view(1, "0 1 2"))
    subject.enter(a_view(1, "0 1 2"), {})
    for epoch, members in ((2, "0 1 2 3"), (3, "0 1 3"), (4, "0 1 3")):
        subject.reach(a_view(epoch, members))
    subject.enter(a_view(4, "0 1 3"), {})
    assert [peer.replica for peer in way.made] == [1, 2, 3]
    assert [peer.replica for peer in way.closed] == [2]


def test_a_connection_that_has_ended_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way()
    monkeypatch.setattr(connector, "connect", way.connect)
    subject = local_data_plane()
    subject.reach(a_view(1))
    subject.enter(a_view(1), {})
    way.made[0].close()
    subject.reach(a_view(2))
    assert len(way.made) == 2


def test_who_was_out_of_the_job_before_it_ran_makes_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner is told of a view, which is given up, and of another: the others may have closed what they had."""
    way = Way()
    monkeypatch.setattr(connector, "connect", way.connect)
    subject = local_data_plane()
    subject.reach(a_view(5))
    subject.reach(a_view(7))
    subject.enter(a_view(7), {})
    assert len(way.made) == 2
    assert way.closed == way.made[:1]


def test_the_ring_follows_the_racks_that_addresses_tell() -> None:
    ranks = [(views.Address("host", 0, f"boot {m}", 0, 0, f"nonce {m}", rack="ba"[m % 2]),) for m in range(4)]
    view = views.View(1, None, tuple(views.Member(m, "", ranks[m], True) for m in range(4)))
    subject, communicator = data_plane("tcp", algorithm="ring")
    communicator.connector.expect(1, range(4))
    for m in range(1, 4):
        communicator.connector.cache.add(1, m, Peer(m))
    subject.enter(view, {})
    given: Any = communicator.exchange
    assert given.views[0].ring == (1, 3, 0, 2)


def test_who_has_been_out_in_between_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's joining was given up in the same way, and he comes with the same life."""
    way = Way()
    monkeypatch.setattr(connector, "connect", way.connect)
    subject = local_data_plane()
    subject.reach(a_view(1, "0 1"))
    subject.enter(a_view(1, "0 1"), {})
    for epoch, members in ((2, "0 1 2"), (3, "0 1"), (4, "0 1 2")):
        subject.reach(a_view(epoch, members))
    assert [peer.replica for peer in way.made] == [1, 2, 2]


def test_a_connection_that_the_other_end_has_lost_serves_in_no_later_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the view in which the other says so the new one comes too late. In the next one it says so no more, as it
    has accepted that."""
    way = Way(slow=2)
    monkeypatch.setattr(connector, "connect", way.connect)
    subject = local_data_plane()
    subject.reach(a_view(1))
    subject.enter(a_view(1), {})
    late = Caller.start(subject.reach, a_view(2), frozenset({1}))
    assert way.dialling.wait(DEADLINE)
    subject.reach(a_view(3))
    way.answered.set()
    late.join()
    subject.enter(a_view(3), {})
    assert subject._connector.cache.peers[1] is way.made[1]
    assert way.closed == [way.made[2]]


def test_a_peer_for_which_no_thread_can_be_started_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: object, **options: object) -> Peer:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(connector, "connect", connect)
    with pytest.raises(Unreachable, match="new thread") as raised:
        local_data_plane().reach(a_view(1))
    assert raised.value.replica == 1


def test_every_group_hears_when_the_job_begins_to_change_its_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any of its members can have come through: the ops of a subgroup must not give up meanwhile."""
    heard: list[str] = []
    subject, communicator = data_plane("tcp")
    exchange: Any = communicator.exchange
    monkeypatch.setattr(exchange, "freeze", lambda quiesced: heard.append("freeze"), raising=False)
    monkeypatch.setattr(exchange, "job_changes", lambda: heard.append("all"), raising=False)
    for name in ("some", "others"):
        hears = functools.partial(heard.append, name)
        away = functools.partial(lambda name, seconds: heard.append(f"{name} for {seconds:g} s"), name)
        communicator.router.open(name, SimpleNamespace(job_changes=hears, coordinator_away=away))  # type: ignore[arg-type]
    subject.freeze(lambda: None)
    assert heard == ["all", "some", "others", "freeze"]
    monkeypatch.setattr(
        exchange, "coordinator_away", lambda seconds: heard.append(f"all for {seconds:g} s"), raising=False
    )
    subject.wait_on(1.5)
    assert heard[4:] == ["all for 1.5 s", "some for 1.5 s", "others for 1.5 s"]
    assert communicator.router.away == 1.5
