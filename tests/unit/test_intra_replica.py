"""The ranks of one replica tell each other a few bytes, here over socket pairs."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ftcomm.control.links import hand_over
from ftcomm.control.views import Address, Addresses, Member, View
from ftcomm.errors import CollectiveTimeout, TransportError
from ftcomm.groups.group_internals import INTRA_REPLICA
from ftcomm.training import rank_tree
from ftcomm.training.intra_replica import IntraReplicaExchange

HERE = Address("here", 0, "", 0, 0, "0" * 32)


class Rank:
    """What `IntraReplicaExchange` uses of a group. `served` is set by who has children; before that a connection is
    closed, as a control thread does."""

    def __init__(self, ranks, rank, siblings, timeout=60.0):
        self.replica, self.shard, self.siblings, self.served = 2, rank, siblings, None
        self.intra_replica_exchanges = 0
        self.called = threading.Event()
        self.shards = ranks
        self.router = SimpleNamespace(changes=0, away=0.0)
        self.settings = type("Settings", (), {})
        self.settings.timeouts = type("Timeouts", (), {"give_up": timeout})
        self.view = View(1, 0, (Member(2, "2a", Addresses.of((HERE,) * ranks), True),))

    @property
    def internals(self):
        return self

    def serve(self, purpose, handler):
        assert purpose == INTRA_REPLICA
        self.served = handler

    def dial_rank(self, replica, shard, purpose, fields, timeout):
        assert (replica, purpose) == (2, INTRA_REPLICA)
        here, there = socket.socketpair()
        if self.siblings[shard].served is None:
            there.close()
        else:
            self.called.set()
            hand = (self.siblings[shard].served, there, fields)
            threading.Thread(target=hand_over, args=hand, daemon=True).start()
        return here


def joined(rows):
    """The rows, each with the ranks that it is of, follow each other in order and without a gap."""
    assert all(left[2] + 1 == right[1] for left, right in itertools.pairwise(rows))
    assert {row[0] for row in rows} == {rows[0][0]}
    return bytes([rows[0][0], rows[0][1], rows[-1][2]])


def first_of(rows):
    return rows[0]


def ranks_of(count, timeout=60.0):
    ranks = []
    ranks += (Rank(count, rank, ranks, timeout) for rank in range(count))
    return ranks


@pytest.mark.parametrize("count", [2, 4, 40])
def test_all_get_what_follows_from_the_rows_of_all_in_two_rows_for_each_connection(count, monkeypatch):
    """With more ranks than a star has they are in a tree, of which no rank sees all."""
    sent = [0] * count
    send = IntraReplicaExchange._send

    def counted(self, sock, data):
        sent[self._group.shard] += len(data)
        send(self, sock, data)

    monkeypatch.setattr(IntraReplicaExchange, "_send", counted)
    ranks = ranks_of(count)
    with ThreadPoolExecutor(count) as pool:
        exchanges = list(pool.map(IntraReplicaExchange, ranks))
        for number in range(5):
            rows = [bytes([number, rank, rank]) for rank in range(count)]
            answers = list(pool.map(lambda inside, row: inside.exchange(row, joined), exchanges, rows))
            assert answers == [bytes([number, 0, count - 1])] * count
    for inside in exchanges:
        inside.close()
    assert sum(sent) == 5 * 3 * 2 * (count - 1)
    assert sent[0] == 5 * 3 * (count - 1 if count <= rank_tree.DIGIT else 11)
    assert max(sent) == sent[0]


@pytest.mark.parametrize("ranks", [2, 3, 31, 32, 33, 64, 1000, 1024, 1025, 8192, 65536])
def test_each_rank_has_one_parent_and_all_below_it_follow_it(ranks):
    places = [rank_tree.place(rank, ranks) for rank in range(ranks)]
    below = [1] * ranks
    for rank in reversed(range(1, ranks)):
        parent = places[rank].parent
        assert rank in places[parent].children
        below[parent] += below[rank]
    assert places[0].parent is None
    assert below[0] == ranks == 1 + sum(len(at.children) for at in places)
    for rank, at in enumerate(places):
        ends = [rank + 1, *(child + below[child] for child in at.children)]
        assert list(at.children) == ends[:-1], "there is a gap"
        assert ends[-1] == rank + below[rank]
    depth = [0] * ranks
    for rank in range(1, ranks):
        depth[rank] = depth[places[rank].parent] + 1
    assert max(depth) == next(levels for levels in range(1, 5) if rank_tree.DIGIT**levels >= ranks)
    assert max(len(at.children) for at in places) <= 2 * rank_tree.DIGIT


@pytest.mark.parametrize("gone", [4, 6, 7], ids=["below rank 0", "between", "leaf"])
def test_the_loss_of_one_rank_ends_the_wait_of_all(gone, monkeypatch):
    """Above and below it, long before their own timeout ends."""
    monkeypatch.setattr(rank_tree, "DIGIT", 2)
    ranks = ranks_of(8, timeout=600.0)
    with ThreadPoolExecutor(8) as pool:
        exchanges = list(pool.map(IntraReplicaExchange, ranks))
        rows = [bytes([0, rank, rank]) for rank in range(8)]
        assert set(pool.map(lambda inside, row: inside.exchange(row, joined), exchanges, rows)) == {bytes([0, 0, 7])}
        others = [inside for rank, inside in enumerate(exchanges) if rank != gone]
        asked = [pool.submit(inside.exchange, b"row", first_of) for inside in others]
        exchanges[gone].close()
        for future in asked:
            with pytest.raises(TransportError, match="another rank of this replica is gone"):
                future.result(60)
    for inside in exchanges:
        inside.close()


def test_a_rank_that_is_no_child_is_turned_away(monkeypatch):
    monkeypatch.setattr(rank_tree, "DIGIT", 2)
    inside = IntraReplicaExchange(ranks_of(8)[0])
    here, there = socket.socketpair()
    with here:
        hand_over(inside._serve, there, {"shard": 3, "which": 1})
        assert here.recv(1) == b""
    assert not inside._sockets


def test_a_rank_comes_before_rank_0_serves():
    first, second = ranks_of(2)
    with ThreadPoolExecutor(2) as pool:
        early = IntraReplicaExchange(second)
        asked = pool.submit(early.exchange, b"second", min)
        late = IntraReplicaExchange(first)
        assert late.exchange(b"firsts", min) == b"firsts" == asked.result(60)


def test_a_rank_is_in_its_next_loop_while_rank_0_has_not_left_the_last_one():
    first, second = ranks_of(2)
    with ThreadPoolExecutor(2) as pool:
        inside, other = IntraReplicaExchange(first), IntraReplicaExchange(second)
        assert list(pool.map(lambda one: one.exchange(b"x", max), (inside, other))) == [b"x", b"x"]
        other.close()
        second.called.clear()
        asked = pool.submit(IntraReplicaExchange(second).exchange, b"second", min)
        assert second.called.wait(60)
        inside.close()
        assert IntraReplicaExchange(first).exchange(b"firsts", min) == b"firsts" == asked.result(60)


def test_a_rank_that_is_gone_is_an_error_and_so_is_one_that_does_not_come():
    first, second = ranks_of(2, timeout=0.3)
    inside, other = IntraReplicaExchange(first), IntraReplicaExchange(second)
    with pytest.raises(CollectiveTimeout, match=r"replica 2 shard 0: the other ranks .* did not come"):
        inside.exchange(b"alone", max)
    inside.close()
    other.close()
    first, second = ranks_of(2)
    with ThreadPoolExecutor(2) as pool:
        inside, other = IntraReplicaExchange(first), IntraReplicaExchange(second)
        assert list(pool.map(lambda one: one.exchange(b"x", max), (inside, other))) == [b"x", b"x"]
        other.close()
        with pytest.raises(TransportError, match="another rank of this replica is gone"):
            inside.exchange(b"y", max)


def test_seconds_in_which_nobody_runs_and_changes_of_view_are_no_wait(monkeypatch):
    """Each rank is stopped for an hour again and again while it waits for the other, and the job changes its view."""
    first, second = ranks_of(2, timeout=5.0)
    skew, now = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + skew[0])
    with ThreadPoolExecutor(2) as pool:
        inside, other = IntraReplicaExchange(first), IntraReplicaExchange(second)
        for early, late in ((inside, other), (other, inside)):
            came = threading.Event()
            wait = early._timer
            early._timer = lambda wait=wait, came=came: (wait(), came.set())[0]
            asked = pool.submit(early.exchange, b"x", max)
            assert came.wait(60)
            for _ in range(20):
                skew[0] += 3600.0
                for rank in (first, second):
                    rank.router.changes += 1
                time.sleep(0.06)  # the early one looks
                assert not asked.done()
            assert late.exchange(b"y", max)
            assert asked.result(60)
        inside.close()
        other.close()


def test_time_without_a_coordinator_does_not_count():
    first, _ = ranks_of(2, timeout=5.0)
    inside = IntraReplicaExchange(first)
    timer = inside._timer()
    first.router.away += 100.0
    assert 100.0 < timer.left() <= 105.0
    inside.close()


def test_a_row_of_another_length_is_refused_before_memory_is_taken_for_it():
    first, second = ranks_of(2)
    with ThreadPoolExecutor(2) as pool:
        inside, other = IntraReplicaExchange(first), IntraReplicaExchange(second)
        assert list(pool.map(lambda one: one.exchange(b"x", max), (inside, other))) == [b"x", b"x"]
        other._sockets[0].sendall(b"\xff\xff\xff\xff")
        with pytest.raises(TransportError, match=r"4294967295 bytes, at most 33 .*; all ranks must run the same"):
            inside.exchange(b"y", max)
        inside.close()
        other.close()


def test_ranks_at_different_exchanges_are_not_mixed_up():
    first, second = ranks_of(2)
    with ThreadPoolExecutor(2) as pool:
        inside, other = IntraReplicaExchange(first), IntraReplicaExchange(second)
        assert list(pool.map(lambda one: one.exchange(b"x", max), (inside, other))) == [b"x", b"x"]
        other._number += 1
        asked = pool.submit(other.exchange, b"ahead", max)
        with pytest.raises(TransportError, match="it is at exchange 3, this rank at 2"):
            inside.exchange(b"y", max)
        inside.close()
        with pytest.raises(TransportError):
            asked.result(60)
