"""Which peers of a communicator serve in which of its views, and who closes those that do not."""

from __future__ import annotations

import pytest

from ftcomm.transport.base import Peer
from ftcomm.transport.peer_cache import PeerCache


class Connection(Peer):
    def __init__(self, replica: int, life: str = "") -> None:
        super().__init__(replica)
        self.nonce, self.closed = f"{replica}{life}", 0

    def serves(self, epoch: int) -> bool:
        return not self.closed

    def close(self) -> None:
        self.closed += 1


class Mapped(Connection):
    shares_memory = True


def reach(cache: PeerCache, epoch: int, *members: str, kind: type[Connection] = Connection) -> list[Peer]:
    """Expect a view of members as "2'", replica 2 in its second life; returns those that were reached anew."""
    assert cache.expect(epoch, [int(member[0]) for member in members])
    new: list[Peer] = []
    for member in members:
        if cache.find(epoch, int(member[0]), member) is None:
            new.append(kind(int(member[0]), member[1:]))
            assert cache.add(epoch, int(member[0]), new[-1])
    return new


@pytest.fixture
def cache() -> PeerCache:
    """Runs in the view of epoch 1, with replicas 1 and 2."""
    cache = PeerCache()
    reach(cache, 1, "1", "2")
    assert cache.enter(1) == []
    return cache


def test_who_stays_serves_on(cache: PeerCache) -> None:
    before = dict(cache.peers)
    assert [peer.nonce for peer in reach(cache, 2, "1", "2'", "3")] == ["2'", "3"]
    assert [peer.nonce for peer in cache.enter(2)] == ["2"]
    assert cache.peers[1] is before[1]
    assert not before[2].closed  # type: ignore[attr-defined]  # the exchange has run with it, and closes it


@pytest.mark.parametrize("entered", [False, True])
def test_who_has_lost_its_connection_gets_a_new_one_also_in_a_later_view(cache: PeerCache, entered: bool) -> None:
    """It may not say it again: it holds the new one by then, which is too late for the view that it was made for."""
    half_open = cache.peers[1]
    assert cache.expect(2, [1, 2])
    cache.severed(2, 1)
    assert cache.find(2, 1, "1") is None
    late = Connection(1)
    if entered:
        assert cache.add(2, 1, late)
        assert cache.find(2, 2, "2") is cache.peers[2]
        cache.enter(2)
        assert reach(cache, 3, "1", "2") == []
    else:
        assert [peer.nonce for peer in reach(cache, 3, "1", "2")] == ["1"]
        assert cache.add(2, 1, late)
        cache.enter(3)
        assert late.closed
    assert cache.find(3, 1, "1") is not half_open
    assert (cache.find(3, 1, "1") is late) == entered


def test_who_was_made_anew_serves_when_its_view_is_tried_again(cache: PeerCache) -> None:
    for attempt in range(2):
        assert cache.expect(2, [1, 2])
        cache.severed(2, 1)
        assert (cache.find(2, 1, "1") is None) == (attempt == 0)
        cache.add(2, 1, Connection(1))
    assert cache.find(2, 1, "1") is not cache.peers[1]


def test_who_was_out_of_a_view_in_between_gets_a_new_connection_but_not_a_new_mapping(cache: PeerCache) -> None:
    reach(cache, 2, "1", "2", "3")
    reach(cache, 3, "1", "2")
    assert [peer.nonce for peer in reach(cache, 4, "1", "2", "3")] == ["3"]
    reach(cache, 5, "4", kind=Mapped)
    reach(cache, 6)
    assert reach(cache, 7, "4", kind=Mapped) == []


def test_before_the_first_view_no_connection_serves_twice() -> None:
    cache = PeerCache()
    first = reach(cache, 5, "1")
    assert len(reach(cache, 7, "1")) == 1
    cache.enter(7)
    assert first[0].closed == 1  # type: ignore[attr-defined]


def test_what_comes_after_its_view_is_not_needed(cache: PeerCache) -> None:
    reach(cache, 2, "1", "2")
    cache.enter(2)
    assert not cache.expect(2, [1])
    assert not cache.add(1, 3, Connection(3))
    assert not cache.needs("3")
    assert cache.needs("1")


def test_who_was_made_for_a_view_that_nobody_entered_is_closed_and_left(cache: PeerCache) -> None:
    (third,) = reach(cache, 2, "1", "2", "3")
    reach(cache, 3, "1")
    left = cache.enter(3)
    assert {peer.nonce for peer in left} == {"2", "3"}
    assert third.closed == 1  # type: ignore[attr-defined]
    assert not cache.peers[1].closed  # type: ignore[attr-defined]


def test_a_view_to_come_needs_what_it_shares_with_one_that_is_over(cache: PeerCache) -> None:
    (third,) = reach(cache, 2, "1", "2", "3", kind=Mapped)
    reach(cache, 3, "1", "3")
    assert [peer.nonce for peer in cache.enter(3)] == ["2"]
    assert cache.peers[3] is third
    assert [(member, epoch) for member, epoch, _ in cache.sharing()] == [(3, 3)]


def test_the_end_closes_all(cache: PeerCache) -> None:
    (third,) = reach(cache, 2, "1", "3")
    peers = [*cache.peers.values(), third]
    cache.close()
    assert all(peer.closed for peer in peers)  # type: ignore[attr-defined]
