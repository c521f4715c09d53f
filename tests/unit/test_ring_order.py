"""The order of a ring: hosts and racks stay together, who comes or goes changes two neighbours, and links are fast."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.collective.placement import order
from ftcomm.collective.ring_order import ALIKE, fastest_ring, ring_order
from ftcomm.control.views import Address
from ftcomm.settings.tuning import BUILT_IN, Tuning
from ftcomm.settings.tuning_file import load

NAMES, RACKS = "abcde", ("", "x", "y")


@given(st.dictionaries(st.integers(0, 30), st.sampled_from(NAMES), min_size=2), st.data())
def test_hosts_and_racks_stay_together_and_the_rest_stays_when_a_member_goes(
    hosts: dict[int, str], data: st.DataObject
) -> None:
    stands = data.draw(st.fixed_dictionaries(dict.fromkeys(NAMES, st.sampled_from(RACKS))))
    racks = {m: stands[host] for m, host in hosts.items()}
    addresses = {m: host.upper() for m, host in hosts.items()}
    places = [data.draw(st.lists(st.sampled_from(known), unique=True)) for known in (RACKS, "ABCDE")]
    tuning = Tuning(ring_racks=tuple(places[0]), ring_hosts=tuple(places[1]))
    found = ring_order(hosts, racks, addresses, tuning)
    assert sorted(found) == sorted(hosts)
    for labels in (hosts, racks):
        borders = sum(labels[a] != labels[b] for a, b in itertools.pairwise(found))
        assert borders == len(set(labels.values())) - 1
    seen = list(dict.fromkeys(racks[m] for m in found))
    assert [rack for rack in seen if rack in places[0]] == [rack for rack in places[0] if rack in seen]
    for rack in seen:
        here = list(dict.fromkeys(addresses[m] for m in found if racks[m] == rack))
        listed = [name for name in places[1] if name in here]
        assert here[: len(listed)] == listed
    # Whoever tells of the members, in whatever order, all come to the same.
    turned = dict(data.draw(st.permutations(list(hosts.items()))))
    assert ring_order(turned, racks, addresses, tuning) == found
    gone = data.draw(st.sampled_from(sorted(hosts)))
    left = {m: host for m, host in hosts.items() if m != gone}
    assert ring_order(left, racks, addresses, tuning) == tuple(m for m in found if m != gone)


def test_a_host_of_which_only_some_members_tell_the_rack_stays_together() -> None:
    assert ring_order({0: "a", 1: "b", 2: "a", 3: "b"}, {0: "z", 1: "y", 3: "y"}) == (1, 3, 0, 2)
    assert ring_order({0: "b", 1: "a", 2: "b"}) == (1, 0, 2)


def slowest(ring: tuple[int, ...], rates: dict[tuple[int, int], float]) -> int:
    links = zip(ring, (*ring[1:], ring[0]), strict=True)
    return min(math.floor(math.log(rates[min(pair), max(pair)]) / math.log(ALIKE)) for pair in links)


def together(ring: tuple[int, ...], racks: list[str]) -> bool:
    return sum(racks[a] != racks[b] for a, b in itertools.pairwise(ring)) == len(set(racks)) - 1


@given(st.integers(4, 6).flatmap(lambda n: st.lists(st.sampled_from(RACKS), min_size=n, max_size=n)), st.data())
@settings(max_examples=100)
def test_no_order_has_a_faster_slowest_link(racks: list[str], data: st.DataObject) -> None:
    pairs = list(itertools.combinations(range(len(racks)), 2))
    rates = {pair: 1.5 ** data.draw(st.integers(0, 30)) for pair in pairs}
    ring = fastest_ring(racks, rates)
    assert sorted(ring) == list(range(len(racks)))
    assert together(ring, racks)
    every = (order for order in itertools.permutations(range(len(racks))) if together(order, racks))
    assert slowest(ring, rates) == max(slowest(order, rates) for order in every)


def test_differences_that_say_nothing_change_nothing() -> None:
    pairs = list(itertools.combinations(range(8), 2))
    assert fastest_ring([""] * 8, {pair: 100.0 + number / 10 for number, pair in enumerate(pairs)}) == tuple(range(8))
    slow = {pair: 10.0 if pair in ((0, 1), (2, 3)) else 100.0 for pair in pairs}
    ring = fastest_ring([""] * 8, slow)
    assert slowest(ring, slow) == slowest((0, 2, 1, 3), dict.fromkeys(pairs, 100.0))


def test_a_ring_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"version": 1, "ring_through_racks": ["y", "x"], "ring_through_hosts": ["h3", "h1"]}))
    tuning = load(str(path))
    assert tuning.digest != BUILT_IN.digest  # members with other files are told so
    stands = {0: "x", 1: "x", 2: "y", 3: "x", 4: "z"}
    members = {m: Address(f"h{m}", 1, f"boot {m}", 1, 1, "00", rack=rack) for m, rack in stands.items()}
    assert order(members, tuning) == (2, 3, 1, 0, 4)
    assert order(members, BUILT_IN) == (0, 1, 3, 2, 4)


@pytest.mark.parametrize("racks", [[""] * 16, [str(n % 4) for n in range(16)]])
def test_as_many_hosts_as_a_group_has_members_are_no_trouble(racks: list[str]) -> None:
    rates = {(a, b): 1.0 + (7 * a + 3 * b) % 11 for a, b in itertools.combinations(range(16), 2)}
    ring = fastest_ring(racks, rates)
    assert sorted(ring) == list(range(16))
    assert together(ring, racks)
