"""The schedule of the ring, played through by itself: who does what with which shard, without words and streams."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import RING_BYTES, GroupView, around, ring_order, shards
from ftcomm.collective.ring import Ring, RingLane, may_ring, steps
from ftcomm.kernels.dtypes import HOST_DTYPES, HOST_OPS, unsupported_on_host
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.settings import Settings
from ftcomm.simulation.memory import TinyMemory
from ftcomm.transport.segment import LEVELS, POSTED, PUBLISHED

CHUNK = 4096


@st.composite
def groups(draw: st.DrawFn) -> tuple[tuple[int, ...], frozenset[int]]:
    """A ring of some members in any order, and who of them contributes: two at least, as one alone is copied."""
    ring = tuple(draw(st.lists(st.integers(0, 40), min_size=2, max_size=16, unique=True)))
    return ring, frozenset(draw(st.lists(st.sampled_from(ring), min_size=2, max_size=len(ring), unique=True)))


def go_around(
    ring: tuple[int, ...], contributing: frozenset[int], dtype: str, op: str, inputs: dict[int, np.ndarray]
) -> list[np.ndarray]:
    """What each member has in the end; all take a step, then all the next."""
    count = len(next(iter(inputs.values())))
    memories = {m: TinyMemory(m, CHUNK) for m in ring}
    members = tuple(sorted(ring))
    rings = [Ring(GroupView(1, m, members, contributing, False, ring), memories, Reducer()) for m in ring]
    lanes = [RingLane(one, dtype, count, 0) for one in rings]
    here = [inputs[m].copy() for m in ring]
    ops = [Operation(array, dtype, op) for array in here]
    for one, array in zip(rings, here, strict=True):
        if one.me in contributing:
            memories[one.me].carve(POSTED, 0, 0, count, array.dtype)[...] = array
    for reached in range(rings[0].levels):
        for one, its, array, lane in zip(rings, ops, here, lanes, strict=True):
            one.step(its, array, lane, reached)
    for one, array, lane in zip(rings, here, lanes, strict=True):
        assert array.tobytes() == inputs[one.me].tobytes()  # INPUT until it is taken
        one.finish(array, lane)
    return here


@settings(max_examples=150, deadline=None)
@given(groups(), st.integers(1, CHUNK // 4), st.sampled_from([name for name in HOST_OPS if name != "product"]))
def test_all_members_end_with_the_sum_of_those_who_contribute(
    group: tuple[tuple[int, ...], frozenset[int]], count: int, op: str
) -> None:
    ring, contributing = group
    if unsupported_on_host("int32", op) is not None or not may_ring("int32", op):
        dtype = "float32"
        if unsupported_on_host(dtype, op) is not None:
            return
    else:
        dtype = "int32"
    carrier = HOST_DTYPES[dtype].carrier
    inputs = {m: np.random.default_rng((m, count)).integers(0, 1 << 16, count).astype(carrier) for m in ring}
    results = go_around(ring, contributing, dtype, op, inputs)
    want = np.empty(count, carrier)
    sources = [operand(dtype, inputs[m]) for m in sorted(contributing)]
    Reducer().get(dtype, op)(sources, operand(dtype, want))
    for result in results:
        assert result.tobytes() == want.tobytes()


@settings(max_examples=60, deadline=None)
@given(groups(), st.integers(1, CHUNK // 4))
def test_each_element_is_summed_once_in_the_order_of_the_ring(
    group: tuple[tuple[int, ...], frozenset[int]], count: int
) -> None:
    """With numbers whose sum depends on the order, all have the bits of the one chain that starts at the shard."""
    ring, contributing = group
    inputs = {m: np.random.default_rng((m, count)).standard_normal(count, np.float32) for m in ring}
    results = go_around(ring, contributing, "float32", "sum", inputs)
    want = np.empty(count, np.float32)
    for shard, (start, stop) in enumerate(shards(count, 4, len(ring))):
        chain = [m for m in ring[shard:] + ring[:shard] if m in contributing]
        total = inputs[chain[0]][start:stop]
        for m in chain[1:]:
            total = total + inputs[m][start:stop]
        want[start:stop] = total
    for result in results:
        assert result.tobytes() == want.tobytes()


@given(groups())
def test_what_is_read_from_the_left_is_what_the_left_has_at_that_level(
    group: tuple[tuple[int, ...], frozenset[int]],
) -> None:
    ring, contributing = group
    n = len(ring)
    for place in range(n):
        mine, lefts = steps(ring, contributing, place), steps(ring, contributing, (place - 1) % n)
        assert len(mine) == 2 * (n - 1) <= LEVELS
        assert mine[0].shard == (place - 1) % n  # which the left has posted
        assert [step.shard for step in mine[1:]] == [step.shard for step in lefts[:-1]]
        assert sum(step.last for step in mine) == 1


def test_halves_and_averages_of_integers_do_not_go_around() -> None:
    assert may_ring("float32", "avg")
    assert may_ring("int8", "sum")
    assert not may_ring("bfloat16", "sum")
    assert not may_ring("float16", "max")
    assert not may_ring("int64", "avg")


def test_only_large_ops_of_groups_that_have_a_ring_go_around() -> None:
    members = (0, 1, 2)
    with_ring = GroupView(1, 0, members, frozenset(members), False, (2, 0, 1))
    assert around(RING_BYTES + 1, with_ring)
    assert not around(RING_BYTES, with_ring)
    assert not around(1 << 30, GroupView(1, 0, members, frozenset(members), False))
    with pytest.raises(ValueError, match="does not consist of the members"):
        GroupView(1, 0, members, frozenset(members), False, (2, 0))


@given(st.dictionaries(st.integers(0, 30), st.sampled_from("abc"), min_size=2), st.data())
def test_the_order_keeps_hosts_together_and_stays_when_a_member_goes(
    hosts: dict[int, str], data: st.DataObject
) -> None:
    order = ring_order(hosts)
    borders = sum(hosts[a] != hosts[b] for a, b in itertools.pairwise(order))
    assert borders == len(set(hosts.values())) - 1
    gone = data.draw(st.sampled_from(sorted(hosts)))
    left = {m: host for m, host in hosts.items() if m != gone}
    assert ring_order(left) == tuple(m for m in order if m != gone)


def test_every_level_has_a_line_of_its_own_in_the_header() -> None:
    lines = [word // 8 for word in PUBLISHED]
    assert len(set(lines)) == len(PUBLISHED)
    assert max(PUBLISHED) < 512
    assert Settings.__dataclass_fields__["algorithm"].default == "direct"
