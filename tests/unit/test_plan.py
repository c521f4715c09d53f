from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.collective.plan import GroupView, slices, two_shot
from ftcomm.settings.tuning import BUILT_IN, EVER, Tuning, up_to

ITEMSIZES = st.sampled_from((1, 2, 4, 8))


def view(count: int, one_host: bool = True, alike: bool = False, tuning: Tuning = BUILT_IN) -> GroupView:
    members = tuple(range(count))
    return GroupView(1, 0, members, frozenset(members), one_host, alike=alike, tuning=tuning)


@given(st.integers(0, 1 << 22), ITEMSIZES, st.integers(1, 16))
def test_shards_cover_every_element_once(count: int, itemsize: int, parts: int) -> None:
    bounds = slices(count, itemsize, parts)
    assert len(bounds) == parts
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(a <= b for a, b in bounds)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))


@given(st.integers(0, 1 << 22), ITEMSIZES, st.integers(1, 16))
def test_shards_are_even_and_start_on_cache_lines(count: int, itemsize: int, parts: int) -> None:
    bounds = slices(count, itemsize, parts)
    assert all(start * itemsize % 64 == 0 for start, stop in bounds if start < stop)
    sizes = [(stop - start) * itemsize for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 2 * 64


def test_two_members_of_a_host_reduce_everything_themselves() -> None:
    assert not two_shot(1 << 30, view(2))
    limit = up_to(BUILT_IN.one_host, 3)
    assert not two_shot(limit, view(3))
    assert two_shot(limit + 1, view(3))


def test_between_hosts_small_ops_take_one_hop_where_all_compute_alike() -> None:
    tuning = Tuning(one_host=((16, EVER),), hosts=((2, 1000), (16, 100)))
    for count, limit in ((2, 1000), (3, 100), (16, 100)):
        assert not two_shot(limit, view(count, False, True, tuning))
        assert two_shot(limit + 1, view(count, False, True, tuning))
        for size in (0, 4, limit):
            assert two_shot(size, view(count, False, False, tuning))  # one member alone reduces each element
    assert not two_shot(1 << 40, view(5, True, False, tuning))


def test_contributors_are_in_the_order_of_the_sum() -> None:
    assert GroupView(7, 2, (0, 2, 5, 9), frozenset({9, 0, 2})).contributors == (0, 2, 9)


@pytest.mark.parametrize(
    ("epoch", "me", "members"), [(1, 0, (1, 2)), (1, 1, (2, 1)), (1, 1, (1, 1)), (0, 1, (1,)), (1 << 21, 1, (1,))]
)
def test_a_view_that_cannot_be_is_refused(epoch: int, me: int, members: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"members|epoch"):
        GroupView(epoch, me, members, frozenset(members))
