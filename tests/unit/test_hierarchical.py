"""The two levels, played through by themselves: who sums and hands on which slices, without words and streams."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.collective.algorithms.hierarchical import Hierarchical
from ftcomm.collective.compression import hands_on
from ftcomm.collective.operation import Operation
from ftcomm.collective.placement import group_view
from ftcomm.collective.plan import GroupView, by_route, flow_slices, rows, shared_hosts, slices, two_shot
from ftcomm.control.views import Address
from ftcomm.kernels.dtypes import HOST_DTYPES, OPS, unsupported_on_host
from ftcomm.kernels.host.reduce import Reducer, operand
from ftcomm.settings.tuning import BUILT_IN, Tuning, up_to
from ftcomm.simulation.memory import TinyMemory
from ftcomm.transport.segment import HOST, LEAST, POSTED, REDUCED, level, levels, sized
from tests.rigs.slot import slot_of

pytestmark = pytest.mark.protocol  # torch adds as in test_reduce.py; here it is the reference

CHUNK = 4096

SLICES = st.sampled_from((1, 2, 3, 5, BUILT_IN.slices))  # with few, few members count as many

Group = tuple[tuple[tuple[int, ...], ...], frozenset[int]]


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Two hosts or more, one of which has two members or more, and who contributes: two at least, as one alone is
    copied."""
    members = sorted(draw(st.lists(st.integers(0, 40), min_size=3, max_size=16, unique=True)))
    names = draw(st.lists(st.sampled_from("abcd"), min_size=len(members), max_size=len(members)))
    names[0], names[1], names[2] = draw(st.permutations("aab"))
    contributing = draw(st.lists(st.sampled_from(members), min_size=2, max_size=len(members), unique=True))
    return shared_hosts(dict(zip(members, names, strict=True))), frozenset(contributing)


class Mirrors(dict[int, TinyMemory]):
    """Of those that are looked at; full of NaNs."""

    def __init__(self, memory: TinyMemory, members: int) -> None:
        self.chunk, self.members = memory.chunk, members

    def __missing__(self, member: int) -> TinyMemory:
        mirror = self[member] = TinyMemory(member, self.chunk, members=self.members)
        mirror.buffer[:] = b"\xff" * len(mirror.buffer)
        return mirror


class Player:
    """A member that sees of others on its host all, if it shares memory with them, and else what they send it."""

    def __init__(
        self,
        group: Group,
        me: int,
        memory: TinyMemory,
        mates: dict[int, TinyMemory],
        most: int = BUILT_IN.slices,
    ) -> None:
        hosts, contributing = group
        members = tuple(sorted(m for host in hosts for m in host))
        self.me, self.memory = me, memory
        self.mirrors = Mirrors(memory, len(members))
        self.mirrors |= {**mates, me: memory}
        view = GroupView(1, me, members, contributing, False, hosts=hosts, tuning=Tuning(slices=most))
        self.route = Hierarchical(view, self.mirrors, Reducer())
        self.number = self.reached = 0  # steps done, and the word of the highest level made


def play(
    group: Group,
    dtype: str,
    op: str,
    inputs: dict[int, np.ndarray],
    shared: bool,
    seed: int,
    compression: str = "input",
    most: int = BUILT_IN.slices,
    chunk: int = CHUNK,
) -> dict[int, np.ndarray]:
    """What each member has in the end; whose step is next is drawn, among those that need not wait."""
    hosts, _ = group
    chance = random.Random(seed)
    memories = {m: TinyMemory(m, chunk, members=len(inputs)) for m in inputs}
    players = {
        m: Player(group, m, memories[m], {o: memories[o] for o in host if o != m} if shared else {}, most)
        for host in hosts
        for m in host
    }
    here = {m: array.copy() for m, array in inputs.items()}
    slots = {
        m: slot_of(players[m].route, Operation(array, dtype, op, compression=compression)) for m, array in here.items()
    }

    def tell(sender: int, readers: frozenset[int], word: int, region: int) -> None:
        """What each of them needs of it, and no byte more."""
        for reader in readers - {sender}:
            start, stop = players[sender].route.read_by(reader, word, slots[sender])
            if start == stop:
                continue
            mirror = players[reader].mirrors[sender]
            at = mirror.offset(region, 0)
            mirror.buffer[at + start : at + stop] = memories[sender].buffer[at + start : at + stop]

    for m in players:
        players[m].route.post(slots[m])
        tell(m, frozenset(players), POSTED, POSTED)
    waiting = list(players)
    while waiting:
        ready = []
        for m in waiting:
            step = players[m].route.steps[players[m].number]
            if all(players[other].reached >= step.word for other in step.members):
                assert all(m in players[other].route.readers[step.word] for other in step.members)
                ready.append(m)
        assert ready, "all wait for each other"
        m = chance.choice(ready)
        player = players[m]
        step = player.route.steps[player.number]
        if player.number < len(player.route.steps) - 1:  # the last one is what `finish` waits for
            slots[m].number = player.number
            player.route.step(slots[m])
        player.number += 1
        if step.makes:
            assert player.reached < step.makes <= level(levels(LEAST))
            player.reached = step.makes
            tell(m, player.route.readers[step.makes], step.makes, REDUCED)
        if player.number == len(player.route.steps):
            waiting.remove(m)
            assert here[m].tobytes() == inputs[m].tobytes()  # INPUT until it is taken
            player.route.finish(slots[m])
    return here


def drawn(group: Group, count: int, dtype: str) -> dict[int, np.ndarray]:
    members = [m for host in group[0] for m in host]
    carrier = HOST_DTYPES[dtype].carrier
    return {m: np.random.default_rng((m, count)).integers(0, 1 << 16, count).astype(carrier) for m in members}


@settings(max_examples=150, deadline=None)
@given(
    groups(),
    st.integers(1, CHUNK // 4),
    st.sampled_from([name for name in OPS if name != "product"]),
    st.booleans(),
    st.integers(0, 1000),
    SLICES,
)
def test_all_members_end_with_the_sum_of_those_who_contribute(
    group: Group, count: int, op: str, shared: bool, seed: int, most: int
) -> None:
    dtype = "int32"
    if unsupported_on_host(dtype, op) is not None or not hands_on(dtype, op, "input"):
        dtype = "float32"
    inputs = drawn(group, count, dtype)
    results = play(group, dtype, op, inputs, shared, seed, most=most)
    want = np.empty_like(next(iter(inputs.values())))
    Reducer().get(dtype, op)([operand(dtype, inputs[m]) for m in sorted(group[1])], operand(dtype, want))
    for result in results.values():
        assert result.tobytes() == want.tobytes()


def test_half_of_the_largest_task_of_many_members_is_the_slice_of_one() -> None:
    """A member alone on its host has one flow with another, and tasks are as large as for a slice a member."""
    members = tuple(range(33))
    group = (members[:1], members[1:]), frozenset(members)
    count = sized(HOST, len(members)).span * CHUNK // 4
    assert count > 2 * CHUNK // 4
    inputs = drawn(group, count, "int32")
    want = functools.reduce(np.add, inputs.values())
    for result in play(group, "int32", "sum", inputs, shared=True, seed=1).values():
        assert result.tobytes() == want.tobytes()


@settings(max_examples=100, deadline=None)
@given(groups(), st.integers(1, CHUNK // 4), st.booleans(), st.integers(0, 1000), SLICES)
def test_each_element_is_summed_host_by_host(group: Group, count: int, shared: bool, seed: int, most: int) -> None:
    """With numbers whose sum depends on the order: first those of a host, ascending, then the hosts in their order."""
    hosts, contributing = group
    inputs = {m: np.random.default_rng((m, count)).standard_normal(count, np.float32) for host in hosts for m in host}
    total: np.ndarray | None = None
    for host in hosts:
        given = [inputs[m] for m in host if m in contributing]
        if given:
            mine = given[0]
            for other in given[1:]:
                mine = mine + other
            total = mine if total is None else total + mine
    assert total is not None
    for result in play(group, "float32", "sum", inputs, shared, seed, most=most).values():
        assert result.tobytes() == total.tobytes()


@settings(max_examples=100, deadline=None)
@given(
    groups(),
    st.integers(1, CHUNK // 4),
    st.sampled_from(["float16", "bfloat16", "float8_e4m3fn"]),
    st.sampled_from(["sum", "avg", "max"]),
    st.booleans(),
    SLICES,
)
def test_halves_are_summed_in_float32_and_rounded_once(
    group: Group, count: int, dtype: str, op: str, shared: bool, most: int
) -> None:
    halves_are_right(group, count, dtype, op, shared, "fp32", most)


def halves_are_right(
    group: Group, count: int, dtype: str, op: str, shared: bool, compression: str, most: int, chunk: int = CHUNK
) -> None:
    hosts, contributing = group
    of = getattr(torch, dtype)
    halves = {
        m: torch.from_numpy(np.random.default_rng((m, count)).standard_normal(count)).to(of) for h in hosts for m in h
    }
    raw = torch.uint8 if of.itemsize == 1 else torch.uint16
    inputs = {m: half.view(raw).numpy().view(HOST_DTYPES[dtype].carrier) for m, half in halves.items()}
    step = torch.maximum if op == "max" else torch.add
    sums = [
        functools.reduce(step, [halves[m].float() for m in host if m in contributing])
        for host in hosts
        if contributing.intersection(host)
    ]
    total = functools.reduce(step, sums)
    want = (total / len(contributing) if op == "avg" else total).to(of)
    for result in play(group, dtype, op, inputs, shared, count, compression, most, chunk).values():
        assert result.tobytes() == want.view(raw).numpy().tobytes()


@given(groups(), st.integers(1, CHUNK // 4))
def test_between_hosts_goes_one_sum_and_one_result_of_each_shard(group: Group, count: int) -> None:
    """And only between those who carry one flow: what leaves a host does not depend on how many members it has."""
    hosts, contributing = group
    place = {m: (number, host.index(m)) for number, host in enumerate(hosts) for m in host}
    flows = min(map(len, hosts))
    left = dict.fromkeys(range(len(hosts)), 0)
    for me, (home, flow) in place.items():
        player = Player(group, me, TinyMemory(me, CHUNK), {})
        slot = slot_of(player.route, Operation(np.zeros(count, np.float32), "float32", "sum"))
        for reader, (host, other) in place.items():
            if host == home:
                continue
            for word in (POSTED, *(of for of, readers in player.route.readers.items() if reader in readers)):
                start, stop = player.route.read_by(reader, word, slot)
                left[home] += (stop - start) // 4
                assert start == stop or (flow == other < flows and word != POSTED)
    unit, parts = 16, flows * len(hosts)  # elements in a cache line
    bounds = slices(count, 4, parts)
    for number, host in enumerate(hosts):
        whole = sum(b - a for i, (a, b) in enumerate(bounds) if i % len(hosts) == number)
        sums = (count - whole) if contributing.intersection(host) else 0
        assert left[number] == sums + whole * (len(hosts) - 1)
        assert left[number] <= 2 * (len(hosts) - 1) * (count / len(hosts) + 2 * unit * flows)


def test_two_levels_are_for_large_ops_of_hosts_that_are_shared() -> None:
    members = (0, 1, 2)
    hosts = shared_hosts({0: "a", 1: "b", 2: "a"})
    assert hosts == ((0, 2), (1,))
    view = GroupView(1, 0, members, frozenset(members), False, hosts=hosts)
    for tuning, limit in ((view.tuning, up_to(view.tuning.two_levels, 3)), (Tuning(two_levels=((16, 1000),)), 1000)):
        view = GroupView(1, 0, members, frozenset(members), False, hosts=hosts, tuning=tuning)
        assert by_route(limit + 1, view)
        assert not by_route(limit, view)
        assert two_shot(limit, view)
    # What one-shot is quicker for goes that way first.
    tuning = Tuning(hosts=((16, 2000),), two_levels=((16, 1000),))
    view = GroupView(1, 0, members, frozenset(members), False, alike=True, hosts=hosts, tuning=tuning)
    assert [(two_shot(size, view), by_route(size, view)) for size in (2000, 2001)] == [(False, False), (True, True)]
    assert not by_route(1 << 50, GroupView(1, 0, members, frozenset(members), False, tuning=tuning))
    assert shared_hosts({0: "a", 1: "a"}) == ()  # nothing crosses a network
    assert shared_hosts({0: "a", 1: "b", 2: "c"}) == ()  # there is nothing to reduce among themselves
    assert shared_hosts({}) == ()
    for wrong in (((0, 2),), ((0, 1), (1, 2)), ((0, 1, 2), ())):
        with pytest.raises(ValueError, match="do not have the members"):
            GroupView(1, 0, members, frozenset(members), False, hosts=wrong)


# -- many members ------------------------------------------------------------------------------------------------------

TINY = 512  # bytes of a chunk, so that each of 64 slices of a task of many members is a cache line


def in_rows(count: int) -> Group:
    members = tuple(range(count))
    return rows(members), frozenset(members[1:])


@pytest.mark.parametrize("count", [4, 5, 7, 9, 16, 23, 33, 65, 100])
def test_rows_give_the_sum_of_a_task_that_fills_its_slot(count: int) -> None:
    group = in_rows(count)
    elements = sized(HOST, count).span * TINY // 4
    inputs = drawn(group, elements, "int32")
    want = functools.reduce(np.add, [inputs[m] for m in sorted(group[1])])
    for most in {2, BUILT_IN.slices}:
        for result in play(group, "int32", "sum", inputs, False, count, most=most, chunk=TINY).values():
            assert result.tobytes() == want.tobytes()


@pytest.mark.parametrize("count", [16, 33, 65, 90])
@pytest.mark.parametrize("compression", ["input", "fp32"])
def test_rows_sum_halves_in_float32_in_a_task_that_fills_its_slot(count: int, compression: str) -> None:
    room = 2 if compression == "input" else 4
    elements = sized(HOST, count).span * TINY // room
    halves_are_right(in_rows(count), elements, "bfloat16", "avg", False, compression, min(8, BUILT_IN.slices), TINY)


@pytest.mark.parametrize(
    ("of", "count"),
    [("hosts", 65), ("hosts", 96), ("rows", 65), ("rows", 127), ("rows", 256), ("rows", 500), ("rows", 1024)],
)
def test_what_is_sent_of_a_task_that_fills_its_slot_is_never_small(of: str, count: int) -> None:
    """A 64th of a slot, which has 4 MB: 64 KB, whatever the number of members; from rows, each member has data of 2
    sqrt(n) others or so. Every owner of a slice gets little more than a member of a small group. Of a very large group
    some members are looked at."""
    members = tuple(range(count))
    some = members if count < 256 else random.Random(count).sample(members, 24)
    hosts = rows(members) if of == "rows" else shared_hosts({m: str(m // 4) for m in members})
    group = hosts, frozenset(members)
    slot = sized(HOST, count).span * CHUNK
    assert slot >= BUILT_IN.slices * 64
    for dtype, compression in (("float32", "input"), ("bfloat16", "input"), ("bfloat16", "fp32")):
        if of == "hosts" and (dtype, compression) == ("bfloat16", "input") and count % 4:
            continue  # of a single flow, whose sums have no room
        room = 4 if compression == "fp32" else HOST_DTYPES[dtype].itemsize
        array = np.zeros(slot // room, HOST_DTYPES[dtype].carrier)
        got, readers = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
        for me in some:
            player = Player(group, me, TinyMemory(me, CHUNK, members=count), {})
            op = Operation(array, dtype, "sum", compression=compression)
            assert player.route.handles(op)
            slot_ = slot_of(player.route, op)
            reached = set()
            for reader in player.route.others:
                for word in (POSTED, *(w for w, who in player.route.readers.items() if reader in who)):
                    start, stop = player.route.read_by(reader, word, slot_)
                    if start != stop:
                        assert stop - start >= slot // BUILT_IN.slices
                        got[reader] += stop - start
                        reached.add(reader)
            readers[me] = len(reached)
        if of == "rows":
            assert max(readers.values()) <= len(hosts) + max(map(len, hosts)) - 2
            assert some is not members or dtype == "bfloat16" or max(got.values()) <= 1.25 * 2 * array.nbytes


@given(st.integers(0, 2000), st.integers(1, 12), st.integers(1, 12), st.integers(0, 12), st.integers(0, 7))
def test_the_slices_of_flows_cover_every_element_once_and_have_owners(
    count: int, flows: int, hosts: int, owners: int, turn: int
) -> None:
    owners = 1 + owners % hosts
    cut = flow_slices(count, 4, flows, hosts, owners, turn)
    assert len(cut) == flows * hosts
    assert cut[0][0] == 0
    assert cut[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    for flow in range(flows):
        assert sum(a < b for a, b in cut[flow * hosts : (flow + 1) * hosts]) <= owners
    if count >= 16 * flows * owners:
        owned = [sum(a < b for a, b in cut[host::hosts]) for host in range(hosts)]
        assert sum(owned) == flows * owners
        assert max(owned) - min(owned) <= 1  # each host as many as any


@given(st.integers(2, 1024))
def test_rows_have_about_as_many_members_as_there_are_rows(count: int) -> None:
    made = rows(tuple(range(count, 0, -1)))
    assert sorted(m for row in made for m in row) == list(range(1, count + 1))
    sizes = {len(row) for row in made}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) <= len(made) <= min(sizes) + 3


def test_many_members_on_hosts_of_their_own_go_by_rows() -> None:
    def hosts(count: int, each: int = 1, **more: bool) -> tuple[tuple[int, ...], ...]:
        there = {m: Address("host", 1, f"boot{m // each}", m, 0, "") for m in range(count)}
        return group_view(1, 0, there, set(there), tuning=BUILT_IN, **{"hierarchical": True, **more}).hosts

    most = BUILT_IN.slices
    assert hosts(most) == ()
    assert hosts(most + 1) != ()
    assert len(hosts(256)) == 16
    assert hosts(256, hierarchical=False) == ()
    assert hosts(256, hierarchical=False, ring=True) == ()
    assert hosts(256, 256) == ()  # nothing crosses a network
    assert hosts(256, 4) == tuple(tuple(range(m, m + 4)) for m in range(0, 256, 4))  # members share hosts
