"""The schedule of the ring, played through by itself: who does what with which slice, without words and streams."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.collective.algorithms.ring import Ring, turns
from ftcomm.collective.compression import hands_on
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView, by_route, slices
from ftcomm.control.limits import MEMBERS
from ftcomm.kernels.dtypes import HOST_DTYPES, OPS, unsupported_on_host
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.settings import Settings
from ftcomm.simulation.memory import TinyMemory
from ftcomm.transport.segment import HEADER, TREE, header, levels, published
from tests.rigs.slot import slot_of

pytestmark = pytest.mark.protocol  # torch adds as in test_reduce.py; here it is the reference

CHUNK = 4096
CARRIER = {1: torch.uint8, 2: torch.uint16}
STEPS = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}


@st.composite
def groups(draw: st.DrawFn) -> tuple[tuple[int, ...], frozenset[int]]:
    """A ring of some members in any order, and who of them contributes: two at least, as one alone is copied."""
    ring = tuple(draw(st.lists(st.integers(0, 40), min_size=2, max_size=16, unique=True)))
    return ring, frozenset(draw(st.lists(st.sampled_from(ring), min_size=2, max_size=len(ring), unique=True)))


def go_around(
    ring: tuple[int, ...],
    contributing: frozenset[int],
    dtype: str,
    op: str,
    inputs: dict[int, np.ndarray],
    compression: str = "input",
) -> list[np.ndarray]:
    """What each member has in the end; all take a step, then all the next."""
    memories = {m: TinyMemory(m, CHUNK) for m in ring}
    members = tuple(sorted(ring))
    rings = [Ring(GroupView(1, m, members, contributing, False, ring), memories, Reducer()) for m in ring]
    here = [inputs[m].copy() for m in ring]
    slots = [
        slot_of(one, Operation(array, dtype, op, compression=compression))
        for one, array in zip(rings, here, strict=True)
    ]
    for one, slot in zip(rings, slots, strict=True):
        one.post(slot)
    for number in range(len(rings[0].steps) - 1):
        for one, slot in zip(rings, slots, strict=True):
            slot.number = number
            one.step(slot)
    for one, array, slot in zip(rings, here, slots, strict=True):
        assert array.tobytes() == inputs[one.me].tobytes()  # INPUT until it is taken
        one.finish(slot)
    return here


@settings(max_examples=150, deadline=None)
@given(groups(), st.integers(1, CHUNK // 4), st.sampled_from([name for name in OPS if name != "product"]))
def test_all_members_end_with_the_sum_of_those_who_contribute(
    group: tuple[tuple[int, ...], frozenset[int]], count: int, op: str
) -> None:
    ring, contributing = group
    if unsupported_on_host("int32", op) is not None or not hands_on("int32", op, "input"):
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
    """With numbers whose sum depends on the order, all have the bits of the one chain that starts at the slice."""
    ring, contributing = group
    inputs = {m: np.random.default_rng((m, count)).standard_normal(count, np.float32) for m in ring}
    results = go_around(ring, contributing, "float32", "sum", inputs)
    want = np.empty(count, np.float32)
    for index, (start, stop) in enumerate(slices(count, 4, len(ring))):
        chain = [m for m in ring[index:] + ring[:index] if m in contributing]
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
        mine, lefts = turns(ring, contributing, place), turns(ring, contributing, (place - 1) % n)
        assert len(mine) == 2 * (n - 1) == levels(n)
        assert mine[0].slice == (place - 1) % n  # which the left has posted
        assert [step.slice for step in mine[1:]] == [step.slice for step in lefts[:-1]]
        assert sum(step.last for step in mine) == 1


@settings(max_examples=150, deadline=None)
@given(
    groups(),
    st.integers(1, CHUNK // 4),
    st.sampled_from(["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]),
    st.sampled_from(sorted(STEPS)),
)
def test_halves_are_summed_in_float32_all_the_way_around_and_rounded_once(
    group: tuple[tuple[int, ...], frozenset[int]], count: int, dtype: str, op: str
) -> None:
    ring, contributing = group
    halves = {
        m: torch.from_numpy(np.random.default_rng((m, count)).standard_normal(count)).to(getattr(torch, dtype))
        for m in ring
    }
    carriers = {
        m: half.view(CARRIER[half.itemsize]).numpy().view(HOST_DTYPES[dtype].carrier) for m, half in halves.items()
    }
    results = go_around(ring, contributing, dtype, op, carriers, "fp32")
    want = torch.empty(count, dtype=getattr(torch, dtype))
    for index, (start, stop) in enumerate(slices(count, want.itemsize, len(ring))):
        chain = [halves[m][start:stop].float() for m in ring[index:] + ring[:index] if m in contributing]
        total = functools.reduce(STEPS[op], chain)
        want[start:stop] = total / len(chain) if op == "avg" else total
    for result in results:
        assert result.tobytes() == want.view(CARRIER[want.itemsize]).numpy().tobytes()


def test_partial_sums_are_handed_on_where_that_rounds_nothing() -> None:
    assert hands_on("float32", "avg", "input")
    assert hands_on("int8", "sum", "input")
    assert not hands_on("bfloat16", "sum", "input")
    assert not hands_on("float16", "max", "input")
    assert not hands_on("int64", "avg", "input")
    assert hands_on("bfloat16", "sum", "fp32")


def test_only_large_ops_of_groups_that_have_a_ring_go_around() -> None:
    members = (0, 1, 2)
    with_ring = GroupView(1, 0, members, frozenset(members), False, (2, 0, 1))
    assert by_route(with_ring.direct + 1, with_ring)
    assert not by_route(with_ring.direct, with_ring)
    assert not by_route(1 << 30, GroupView(1, 0, members, frozenset(members), False))
    with pytest.raises(ValueError, match="does not consist of the members"):
        GroupView(1, 0, members, frozenset(members), False, (2, 0))


def test_a_ring_that_the_segment_has_no_words_for() -> None:
    members = tuple(range(17))
    view = GroupView(1, 0, members, frozenset(members), False, members)
    with pytest.raises(ValueError, match="a ring of 17 members; the segment of 0 has words for 16"):
        Ring(view, {0: TinyMemory(0)}, Reducer())


@pytest.mark.parametrize("members", [16, 17, 18, 64, MEMBERS])
def test_every_level_has_a_line_of_its_own_in_the_header(members: int) -> None:
    words = published(members) - set(TREE)
    assert len(words) == 3 + levels(members)
    assert len({word // 8 for word in words}) == len(words)
    assert not {word // 8 for word in words} & {word // 8 for word in TREE}
    assert max(words) < header(members) // 8
    assert header(17) == HEADER
    assert Settings.__dataclass_fields__["algorithm"].default == "auto"
