"""Which message goes to which receive, held against the rule written down plainly."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.p2p import matching
from ftcomm.p2p.matching import MAX_BYTES, Matching, Unexpected

pytestmark = pytest.mark.protocol

SOURCES, TAGS = st.integers(0, 2), st.integers(0, 1)


@dataclasses.dataclass(eq=False)
class Want:
    source: int | None
    tag: int


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.none() | SOURCES, TAGS),
        st.tuples(st.just("arrive"), SOURCES, TAGS),
        st.tuples(st.just("cancel"), st.integers(0, 30), TAGS),
        st.tuples(st.just("discard"), st.integers(0, 30), TAGS),
        st.tuples(st.just("again"), st.integers(0, 30), TAGS),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_oldest_of_a_sender_and_tag_goes_to_the_oldest_receive_that_takes_it(steps: list[tuple]) -> None:
    box: Matching[Want] = Matching()
    arrivals: list[Unexpected] = []  # waiting, by the rule, the oldest first
    wants: list[Want] = []
    matched: list[tuple[Want, Unexpected]] = []

    def fits(want: Want, arrival: Unexpected) -> bool:
        return want.tag == arrival.tag and want.source in (None, arrival.source)

    def put(want: Want, first: bool) -> None:
        expected = next((arrival for arrival in arrivals if fits(want, arrival)), None)
        got = box.again(want) if first else box.want(want)
        assert got is expected
        if expected is None:
            wants.insert(0 if first else len(wants), want)
        else:
            arrivals.remove(expected)
            matched.append((want, expected))

    for number, (what, which, tag) in enumerate(steps):
        if what == "want":
            put(Want(which, tag), first=False)
        elif what == "arrive":
            arrival = Unexpected(which, number, tag, "uint8", 8, None if number % 2 else bytes(8))
            taker = next((want for want in wants if fits(want, arrival)), None)
            assert box.arrive(arrival) is taker
            if taker is None:
                arrivals.append(arrival)
            else:
                wants.remove(taker)
        elif what == "cancel" and wants:
            want = wants.pop(which % len(wants))
            assert box.cancel(want)
            assert not box.cancel(want)
        elif what == "discard" and arrivals:
            arrival = arrivals.pop(which % len(arrivals))
            assert box.discard(arrival)
            assert not box.discard(arrival)
        elif what == "again" and matched:
            want, _ = matched.pop()
            put(want, first=True)
    assert [want for want in box.wants() if want.tag == 0] == [want for want in wants if want.tag == 0]
    assert [want for want in box.wants() if want.tag == 1] == [want for want in wants if want.tag == 1]
    for source in range(3):
        mine = [arrival for arrival in arrivals if arrival.source == source]
        assert {arrival.number for arrival in box.arrivals(source)} == {arrival.number for arrival in mine}
        for arrival in mine:
            offered = box.offered(source, arrival.number)
            assert offered is (arrival if arrival.data is None else None)
        left = MAX_BYTES - 8 * sum(arrival.data is not None for arrival in mine)
        assert not box.full(source, left)
        assert box.full(source, left + 1)
    if not wants and not arrivals:
        assert not box._wants, "tags that were used once pile up"
        assert not box._unexpected


def test_a_sender_has_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MAX_UNEXPECTED", 10)
    box: Matching[Want] = Matching()
    for number in range(10):
        assert not box.full(0, 0)
        box.arrive(Unexpected(0, number, number, "uint8", 0, b""))
    assert box.full(0, 0)
    assert not box.full(1, MAX_BYTES)
