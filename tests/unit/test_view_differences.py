"""What is told of views on one connection: it is enough, nothing is told twice, and it is encoded once for many."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control import messages as m
from ftcomm.control.directory import Directory
from ftcomm.control.field_types import Replica
from ftcomm.control.handshake import Credentials
from ftcomm.control.view_differences import EncodedOnce, UntoldError, ViewsReceived, ViewsSent
from ftcomm.control.views import NO_ADDRESSES, Address, Addresses, Member, View

RANKS = 3

hosts = st.sampled_from(("one", "two"))
numbers = st.integers(0, (1 << 31) - 1)
addresses = st.builds(
    Address,
    hosts,
    st.integers(0, 65535),
    hosts,
    numbers,
    numbers,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    *[st.sampled_from(("", "a", "ü")) for _ in range(6)],
)


def where(replica: int, life: int) -> Addresses:
    ranks = (Address(f"h{replica}", rank, f"b{rank // 2}", life, 3, f"{replica:032x}") for rank in range(RANKS))
    return Addresses.of(ranks)


def view(epoch: int, lives: dict[Replica, int]) -> View:
    members = (Member(r, f"{r}.{life}", where(r, life), life % 2 == 0) for r, life in sorted(lives.items()))
    return View(epoch, None, tuple(members), "why")


views = st.lists(st.dictionaries(st.integers(0, 5), st.integers(1, 3), max_size=5), min_size=1, max_size=8).map(
    lambda told: [view(epoch, lives) for epoch, lives in enumerate(told, 1)]
)
carriers = st.sampled_from((m.NewView, m.Registered, lambda told: m.Decision(7, told)))


@given(st.lists(addresses, max_size=9), st.integers(0, 1000))
def test_a_table_has_the_addresses_that_it_was_made_of(ranks: list[Address], first: int) -> None:
    table = Addresses.of(ranks, first)
    assert list(table) == ranks == [table[first + i] for i in range(len(ranks))]
    assert len(table) == len(ranks)
    for coder in (msgspec.msgpack, msgspec.json):
        assert coder.decode(coder.encode(table), type=Addresses) == table
    for rank in (first - 1, first + len(ranks)):
        assert not table.has(rank)
        with pytest.raises(IndexError, match=f"rank {rank}, in a table of {len(ranks)} from rank {first} on"):
            table[rank]
    for i in range(len(ranks)):
        assert table.part(first + i, 1) == Addresses.of((ranks[i],), first + i)
        assert list(table.part(first + i, 4)) == ranks[i : i + 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nonces": b"x" * 33}, "columns"),
        ({"ports": b"x"}, "columns"),
        ({"sites": ((1, *[0] * 8),)}, "sites end at"),
        ({"sites": ((2, *[0] * 8), (2, *[0] * 8))}, "sites end at"),
        ({"sites": ((2, *[9] * 8),)}, "beyond the 2"),
        ({"pids": b"\xff" * 8}, "above 2,147,483,647"),
    ],
)
def test_a_table_that_is_none_is_refused(change: dict[str, object], said: str) -> None:
    good = Addresses.of((Address("h", 1, "", 2, 3, "0" * 32),) * 2)
    made = msgspec.msgpack.encode({**msgspec.structs.asdict(good), **change})
    with pytest.raises(msgspec.DecodeError, match=said):
        msgspec.msgpack.decode(made, type=Addresses)


def test_an_address_takes_few_bytes() -> None:
    """With eight ranks a host; as texts they would take 260 bytes each."""
    ranks = (
        Address(f"worker-{i // 8}.cluster", 40000, f"{i // 8:036}", i, 3, f"{i:032x}", "layout" * 8, "", "t" * 40)
        for i in range(8192)
    )
    table = msgspec.msgpack.encode(Addresses.of(ranks))
    assert len(table) < 50 * 8192, len(table) / 8192


@given(views, st.lists(carriers, min_size=8, max_size=8), st.sampled_from((None, 0, 1, 2)))
def test_a_receiver_has_all_that_concerns_it_and_is_told_nothing_twice(
    told: list[View], carry: list[type], shard: int | None
) -> None:
    sent, received = ViewsSent(shard), ViewsReceived()
    once = EncodedOnce()
    before: set[str] = set()
    for one, carrier in zip(told, carry, strict=False):
        bytes_ = once.encode(carrier(one), sent)
        short = m.decode(bytes_)
        got = received.complete(short)
        assert got.view.bare() == one.bare()
        for member, known in zip(got.view.members, one.members, strict=True):
            assert list(member.ranks) == (list(known.ranks) if shard is None else [known.ranks[shard]])
        news = {member.incarnation for member in short.view.members if member.ranks}
        assert news == {member.incarnation for member in one.members} - before
        before = {member.incarnation for member in one.members}


@given(views)
def test_what_is_alike_for_all_is_encoded_once(told: list[View]) -> None:
    """For ranks that were told the same before, if no member is new."""
    once, ends = EncodedOnce(), [ViewsSent(rank) for rank in range(RANKS)]
    known: set[str] = set()
    for one in told:
        message = m.NewView(one)
        made = [once.encode(message, end) for end in ends]
        lives = {member.incarnation for member in one.members}
        if lives <= known:
            assert all(data is made[0] for data in made)
        assert [m.decode(data).view.bare() for data in made] == [one.bare()] * RANKS  # type: ignore[union-attr]
        known = lives


def test_another_message_in_between_changes_nothing() -> None:
    once, first, second = EncodedOnce(), ViewsSent(0), ViewsSent(0)
    one, two = m.NewView(view(1, {0: 1})), m.NewView(view(2, {0: 1, 1: 1}))
    for end in (first, second):
        assert once.encode(m.Ping(), end) == m.encode(m.Ping())
        assert m.decode(once.encode(one, end)).view.members[0].ranks  # type: ignore[union-attr]
    for end in (first, second):
        assert not m.decode(once.encode(two, end)).view.members[0].ranks  # type: ignore[union-attr]
        assert m.decode(once.encode(one, end)).view.members[0].ranks == NO_ADDRESSES  # type: ignore[union-attr]


def test_who_was_told_another_view_before_is_told_what_it_lacks() -> None:
    once, first, late = EncodedOnce(), ViewsSent(), ViewsSent()
    once.encode(m.NewView(view(1, {0: 1})), first)
    two = m.NewView(view(2, {0: 1}))
    assert not m.decode(once.encode(two, first)).view.members[0].ranks  # type: ignore[union-attr]
    assert m.decode(once.encode(two, late)).view.members[0].ranks  # type: ignore[union-attr]


def test_what_is_not_known_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(("h", 1), Credentials("a token that is long enough"), None)  # type: ignore[arg-type]
    answers = iter((NO_ADDRESSES, where(0, 1)))
    monkeypatch.setattr(directory, "_ask", lambda member, first, timeout: next(answers))
    told = view(1, {0: 1})
    with pytest.raises(ConnectionError, match="knows no rank 2 of replica 0"):
        directory.address(told, told.members[0], 2, 1.0)
    for _ in range(2):  # the second time it is known
        assert directory.address(told, told.members[0], 2, 1.0) == where(0, 1)[2]


def test_a_view_with_lives_of_which_nothing_is_known_is_refused() -> None:
    received = ViewsReceived()
    with pytest.raises(UntoldError, match=r"a view of epoch 1 without the addresses of \[\(0, '0.1'\)\]"):
        received.complete(m.NewView(view(1, {0: 1}).bare()))
    received.complete(m.NewView(view(2, {0: 1})))
    assert received.complete(m.NewView(view(3, {0: 1}).bare())).view.members[0].ranks == where(0, 1)
    received.complete(m.NewView(view(4, {})))
    with pytest.raises(UntoldError, match="a view of epoch 5"):  # it was gone meanwhile
        received.complete(m.NewView(view(5, {0: 1}).bare()))
