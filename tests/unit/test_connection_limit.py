"""Who has to go when a port has too many connections: nobody that a flood from elsewhere could name."""

from __future__ import annotations

import collections
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.control.connection_limit import ConnectionLimit

MOST = 5

pytestmark = pytest.mark.protocol

Step = tuple[Literal["come", "spoke", "proved", "gone"], int]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(0, 2)),  # from one of three sources
        st.tuples(st.just("spoke"), st.integers(0, MOST)),  # one of those that are here
        st.tuples(st.sampled_from(("proved", "gone")), st.integers(0, 3 * MOST)),  # one of them, maybe
    ),
    max_size=60,
)


@given(steps)
def test_only_strangers_of_the_busiest_source_go_and_first_who_is_silent(steps: list[Step]) -> None:
    limit = ConnectionLimit[int](MOST)
    sources: dict[int, str] = {}  # of those that are here; the oldest first
    spoke: set[int] = set()
    proved: set[int] = set()
    for number, (what, which) in enumerate(steps):
        if what != "come":
            key = [*sources, *range(-1, -99, -1)][which]  # of a connection that is here, or of none
            getattr(limit, what)(key)
            if what == "gone":
                sources.pop(key, None)
            elif key in sources:
                {"spoke": spoke, "proved": proved}[what].add(key)
            continue
        sources[number] = f"10.0.0.{which}"
        excess = limit.come(number, sources[number])
        assert (excess is None) == (len(sources) <= MOST)
        if excess is None:
            continue
        strangers = [key for key in sources if key not in proved]
        theirs = [key for key in strangers if sources[key] == sources[excess.key]]
        assert excess.source == sources[excess.key]
        assert excess.key in strangers
        assert len(theirs) == max(collections.Counter(sources[key] for key in strangers).values())
        silent = [key for key in theirs if key not in spoke]
        assert excess.key == (silent[0] if silent else theirs[-1])
        del sources[excess.key]


@given(st.lists(st.sampled_from(("come", "spoke")), max_size=40))
def test_a_flood_from_one_source_names_nobody_of_another(flood: list[str]) -> None:
    limit = ConnectionLimit[int](MOST)
    assert limit.come(-1, "10.0.0.1") is None
    for number, what in enumerate(flood):
        if what == "come":
            excess = limit.come(number, "10.0.0.2")
            assert excess is None or excess.source == "10.0.0.2"
        else:
            limit.spoke(number - 1)


def test_who_comes_while_all_others_have_proved_to_hold_the_token_is_one_too_many() -> None:
    limit = ConnectionLimit[str](1)
    assert limit.come("a", "10.0.0.1") is None
    limit.proved("a")
    excess = limit.come("b", "10.0.0.2")
    assert excess is not None
    assert excess.key == "b"
    limit.gone("a")
    assert limit.come("c", "10.0.0.2") is None
