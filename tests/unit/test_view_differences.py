"""What is told of views on one connection: it is enough, nothing is told twice, and it is encoded once for many."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control import messages as m
from ftcomm.control.directory import Directory
from ftcomm.control.field_types import ReplicaNumber
from ftcomm.control.handshake import Credentials
from ftcomm.control.links import serve_messages
from ftcomm.control.view_differences import (
    CARRIERS,
    EncodedOnce,
    ViewDifferenceError,
    ViewsReceived,
    ViewsSent,
    difference,
)
from ftcomm.control.views import NO_ADDRESSES, Address, Addresses, Member, View
from tests.rigs.sealed_pair import ends, records

RANKS = 3
NOBODY = Member(9, "9.1", NO_ADDRESSES, True)

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


def view(epoch: int, lives: dict[ReplicaNumber, int]) -> View:
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
        with pytest.raises(IndexError, match=f"shard {rank}, in a table of {len(ranks)} from shard {first} on"):
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
    made = msgspec.msgpack.encode(list({**msgspec.structs.asdict(good), **change}.values()))
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


def told(message: m.Message) -> m.Difference:
    assert isinstance(message, m.Difference)
    return message


def view_of(message: m.Message) -> View:
    view = message.view if isinstance(message, CARRIERS) else None
    assert view is not None
    return view


@given(views, st.lists(carriers, min_size=8, max_size=8), st.sampled_from((None, 0, 1, 2)))
def test_a_receiver_has_all_that_concerns_it_and_is_told_nothing_twice(
    views: list[View], carry: list[type], shard: int | None
) -> None:
    sent, received = ViewsSent(shard), ViewsReceived()
    once = EncodedOnce()
    before: dict[int, Member] = {}
    for one, carrier in zip(views, carry, strict=False):
        message = carrier(one)
        short = told(m.decode(once.encode(message, sent)))
        got = received.complete(short)
        for member, known in zip(view_of(got).members, one.members, strict=True):
            assert list(member.ranks) == (list(known.ranks) if shard is None else [known.ranks[shard]])
        assert msgspec.structs.replace(got, view=one) == message, "all but the addresses"  # type: ignore[type-var]
        assert view_of(got).bare() == one.bare()
        now = {member.replica: member for member in one.members}
        assert set(short.gone) == before.keys() - now.keys()
        assert {x.replica for x in short.changed} == {x for x, member in now.items() if before.get(x) != member}
        lives = {member.incarnation for member in before.values()}
        assert {x.incarnation for x in short.changed if x.ranks} == {x.incarnation for x in now.values()} - lives
        before = now


@given(views)
def test_what_is_alike_for_all_is_encoded_once(views: list[View]) -> None:
    """For ranks that were told the same before, if no life is new."""
    once, ends = EncodedOnce(), [ViewsSent(rank) for rank in range(RANKS)]
    known: set[str] = set()
    for one in views:
        message = m.NewView(one)
        made = [once.encode(message, end) for end in ends]
        lives = {member.incarnation for member in one.members}
        if lives <= known:
            assert all(data is made[0] for data in made)
        assert [told(m.decode(data)).digest for data in made] == [one.digest()] * RANKS
        known = lives


def test_another_message_in_between_changes_nothing() -> None:
    once, first, second = EncodedOnce(), ViewsSent(0), ViewsSent(0)
    one, two = m.NewView(view(1, {0: 1})), m.NewView(view(2, {0: 1, 1: 1}))
    for end in (first, second):
        assert once.encode(m.Ping(), end) == m.encode(m.Ping())
        assert [x.replica for x in told(m.decode(once.encode(one, end))).changed] == [0]
    for end in (first, second):
        assert [x.replica for x in told(m.decode(once.encode(two, end))).changed] == [1]
        back = told(m.decode(once.encode(one, end)))
        assert (back.gone, back.changed) == ((1,), ())


def test_who_was_told_another_view_before_is_told_what_it_lacks() -> None:
    once, first, late = EncodedOnce(), ViewsSent(), ViewsSent()
    once.encode(m.NewView(view(1, {0: 1})), first)
    two = m.NewView(view(2, {0: 1}))
    assert not told(m.decode(once.encode(two, first))).changed
    assert told(m.decode(once.encode(two, late))).changed[0].ranks


def test_a_difference_from_a_view_that_the_receiver_does_not_hold_never_makes_a_wrong_one() -> None:
    """All views of two replicas with two lives each, of which one contributes or catches up: from each to each, told to
    a receiver that holds any third one."""
    states = (None, (1, True), (1, False), (2, True))

    def made(epoch: int, *at: tuple[int, bool] | None) -> View:
        there = ((replica, state) for replica, state in enumerate(at) if state is not None)
        members = (Member(r, f"{r}.{life}", where(r, life), contributes) for r, (life, contributes) in there)
        return View(epoch, None, tuple(members), "why")

    befores = [made(1, *at) for at in itertools.product(states, repeat=2)]
    afters = [made(2, *at) for at in itertools.product(states, repeat=2)]
    outcomes = collections.Counter[bool]()
    for before, after, held in itertools.product(befores, afters, befores):
        received = ViewsReceived()
        received.complete(ViewsSent().shorten(m.NewView(held)))
        try:
            got = received.complete(difference(m.NewView(after), after, before))
        except ViewDifferenceError:
            assert held != before
            outcomes[False] += 1
        else:
            assert got == m.NewView(after), (before, after, held)
            outcomes[True] += 1
    assert min(outcomes.values()) > 300, outcomes


@given(views, st.data())
def test_a_difference_that_was_changed_on_the_way_makes_the_same_view_or_none(views: list[View], data: Any) -> None:
    sent, received = ViewsSent(), ViewsReceived()
    for one in views[:-1]:
        received.complete(sent.shorten(m.NewView(one)))
    short = told(sent.shorten(m.NewView(views[-1])))
    numbers = st.integers(0, 6)
    other = data.draw(
        st.one_of(
            st.lists(numbers, max_size=3).map(lambda gone: {"gone": tuple(gone)}),
            st.lists(st.sampled_from(views[-1].members or (NOBODY,)), max_size=3).map(lambda x: {"changed": tuple(x)}),
            st.lists(st.sampled_from([x for one in views for x in one.bare().members] or [NOBODY]), max_size=3).map(
                lambda x: {"changed": tuple(x)}
            ),
            numbers.map(lambda epoch: {"epoch": epoch}),
            numbers.map(lambda number: {"proposal": number}),
            st.binary(min_size=16, max_size=16).map(lambda digest: {"digest": digest}),
        )
    )
    with contextlib.suppress(ViewDifferenceError):
        assert received.complete(msgspec.structs.replace(short, **other)) == m.NewView(views[-1])


def test_what_is_not_known_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(("h", 1), Credentials("a token that is long enough"), None)  # type: ignore[arg-type]
    answers = iter((NO_ADDRESSES, where(0, 1)))
    monkeypatch.setattr(directory, "_ask", lambda member, first, timeout: next(answers))
    known = view(1, {0: 1})
    with pytest.raises(ConnectionError, match="knows no replica 0 shard 2"):
        directory.address(known, known.members[0], 2, 1.0)
    for _ in range(2):  # the second time it is known
        assert directory.address(known, known.members[0], 2, 1.0) == where(0, 1)[2]


def test_a_view_that_does_not_follow_from_what_was_told_is_refused() -> None:
    received = ViewsReceived()
    one, two = m.NewView(view(1, {0: 1})), m.NewView(view(2, {0: 1, 1: 1}))
    late = told(difference(two, two.view, one.view))
    with pytest.raises(
        ViewDifferenceError, match=r"a view of epoch 2 that does not follow .* replicas \(1,\), whose digest"
    ):
        received.complete(late)
    received.complete(told(difference(one, one.view, None)))
    assert received.complete(late) == two
    unnamed = msgspec.structs.replace(told(difference(one, one.view, None)), changed=one.view.bare().members)
    with pytest.raises(ViewDifferenceError, match=r"a view of epoch 1 without the addresses of \[\(0, '0.1'\)\]"):
        ViewsReceived().complete(unnamed)
    with pytest.raises(ViewDifferenceError, match="NewView with a view of epoch 1 as it is"):
        received.complete(one)


def test_who_holds_another_view_connects_again_and_is_told_the_whole() -> None:
    """The first connection leaves the first view out, as no sender does."""
    one, two = m.NewView(view(1, {0: 1})), m.NewView(view(2, {0: 1, 1: 1}))
    heard: list[m.Message] = []

    async def run() -> str:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far:
            bad = m.encode(difference(two, two.view, one.view))
            far.sendall(b"".join(records(m.encode(m.Ping()), bad, m.encode(m.Ping()))))
            near_end, _ = ends(near, far)
            return await asyncio.wait_for(serve_messages(near_end, heard.append, lambda writer: None), 60)

    assert "does not follow from what was told before" in asyncio.run(run())
    assert heard == [m.Ping()], "and nothing of what came after it"
    assert ViewsReceived().complete(m.decode(EncodedOnce().encode(two, ViewsSent()))) == two
