"""`ftcomm bench tune` without processes: which size follows from which times, and what becomes of the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from ftcomm.bench.bandwidth import FEWEST, Links, hosts
from ftcomm.bench.tune import (
    LEVELS,
    ONE,
    RING,
    TWO,
    WAYS,
    TuneRequest,
    TurnBlock,
    before,
    iterations,
    points,
    switch,
    to_file,
)
from ftcomm.collective.plan import GroupView, by_route, two_shot
from ftcomm.control.views import Address
from ftcomm.errors import SettingsError
from ftcomm.settings.tuning import EVER, up_to
from ftcomm.settings.tuning_file import File, load

REQUEST = TuneRequest(rounds=3, small=(1024, 2048, 4096), large=(1 << 20, 1 << 21))


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        ([1, 2, 3], [2, 3, 4], 3),
        ([2, 3, 4], [1, 2, 3], 0),
        ([1, 2, 9], [2, 3, 4], 2),
        ([1, 5, 2, 9], [2, 4, 4, 5], 3),  # disturbed once, at the second
        ([9, 1, 2], [4, 4, 4], 3),
    ],
)
def test_the_least_is_lost_over_all_sizes(first: Sequence[float], second: Sequence[float], taken: int) -> None:
    assert switch(first, second) == taken


def measured(times: dict[str, Sequence[float]], sizes: Sequence[int], members: int = 4, one_host: bool = True):
    """`times`: way -> at each size; the last of three rounds was disturbed, and one op of each turn."""
    first, second = times
    return [
        TurnBlock(members, one_host, first, second, way, size, number, [t, t, 50 * t if number < 2 else t, 99 * t][:3])
        for way in times
        for size, us in zip(sizes, times[way], strict=True)
        for number, t in enumerate((us, us, 30 * us))
    ]


def test_what_is_measured_becomes_a_point_and_a_sentence() -> None:
    blocks = measured({ONE: (10, 20, 60), TWO: (15, 30, 40)}, REQUEST.small)
    (point,) = points(blocks, REQUEST)
    assert (point.members, point.one_host, point.bytes) == (4, True, 2048)
    assert str(point) == (
        "one-shot up to 2KB with 4 members on one host: 20 us against 30 us at 2KB, 60 against 40 at 4KB"
    )
    ring = measured({TWO: (10, 20), RING: (5, 6)}, REQUEST.large, one_host=False)
    assert [str(point) for point in points(ring, REQUEST)] == [
        "ring at every size with 4 members between hosts: 10 us against 5 us at 1MB"
    ]
    assert points(blocks[:-1], REQUEST) == []  # stopped before the last turn


def test_the_file_keeps_what_was_not_measured_and_is_read_by_ranks(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert before(path) == File(1)
    blocks = [
        *measured({ONE: (10, 20, 60), TWO: (15, 30, 40)}, REQUEST.small),
        *measured({ONE: (1, 1, 1), TWO: (2, 2, 2)}, REQUEST.small, 2, False),
        *measured({TWO: (10, 20), RING: (5, 6)}, REQUEST.large, 3, False),
        *measured({TWO: (10, 20), LEVELS: (11, 6)}, REQUEST.large, 4, False),
    ]
    path.write_bytes(msgspec.json.encode(to_file(points(blocks, REQUEST), None, before(path), {"cpu": "a"})))
    again = measured({ONE: (10, 50, 60), TWO: (15, 30, 40)}, REQUEST.small)
    file = to_file(points(again, REQUEST), None, before(path), {"cpu": "b"})
    path.write_bytes(msgspec.json.encode(file))
    assert file.one_shot_on_one_host == {4: 1024}
    assert file.one_shot_between_hosts == {2: 4096}
    assert file.direct_before_ring == {3: 0}
    assert file.direct_before_two_levels == {4: 1 << 20}
    assert {name: said["header"]["cpu"] for name, said in file.measured.items()} == {
        "one-shot or two-shot, 4 members, one host": "b",
        "one-shot or two-shot, 2 members, hosts": "a",
        "two-shot or ring, 3 members, hosts": "a",
        "two-shot or two levels, 4 members, hosts": "a",
    }
    tuning = load(str(path))
    assert (up_to(tuning.one_host, 2), up_to(tuning.one_host, 4)) == (EVER, 1024)
    assert (up_to(tuning.hosts, 2), up_to(tuning.ring, 3), up_to(tuning.two_levels, 4)) == (4096, 0, 1 << 20)


def address(host: str, boot: str, rack: str = "") -> Address:
    return Address(host, 1, boot, 1, 1, "00", rack=rack)


def test_the_file_says_in_which_order_a_ring_goes_and_keeps_what_else_it_knows() -> None:
    members = {
        0: address("h0", "A"),
        1: address("h0", "A"),
        2: address("h1", "B"),
        3: address("h2", "C"),
        5: address("h3", "D"),
    }
    found = hosts(members)
    assert [(host.address, host.member) for host in found] == [("h0", 0), ("h1", 2), ("h2", 3), ("h3", 5)]
    links = Links(found, {(a, b): 1e7 if (a, b) == (0, 1) else 1e8 for a in range(4) for b in range(a + 1, 4)})
    old = File(1, direct_before_ring={3: 7}, ring_through_racks=["old"], ring_through_hosts=["h2", "h9"])
    file = to_file([], links, old, {"cpu": "a"})
    assert file.ring_through_hosts in (["h0", "h2", "h1", "h3", "h9"], ["h0", "h3", "h1", "h2", "h9"])
    assert (file.ring_through_racks, file.direct_before_ring) == (["", "old"], {3: 7})
    assert file.measured["bandwidth between hosts"]["MB/s"]["h0 h1"] == 10
    assert "its slowest link carries 100 MB/s, the slowest of all 10, the fastest 100" in str(links)
    assert to_file([], None, file, {}) == file


def test_hosts_that_cannot_be_told_apart_are_not_measured() -> None:
    assert len(hosts({m: address("127.0.0.1", str(m)) for m in range(6)})) < FEWEST


def test_large_ops_are_timed_less_often() -> None:
    assert [iterations(size, 20) for size in (1 << 12, 1 << 17, 1 << 18, 1 << 22)] == [20, 20, 10, 5]
    assert iterations(1 << 22, 3) == 3


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "precious.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(SettingsError, match=f"--file {path} is no tuning file .*choose another"):
        before(path)


@pytest.mark.parametrize("size", [4, 1 << 30])
def test_each_way_is_one_at_every_size(size: int) -> None:
    for one_host in (True, False):
        found = {}
        for way, tuning in WAYS.items():
            view = GroupView(1, 0, (0, 1, 2), frozenset((0, 1, 2)), one_host, (0, 1, 2), alike=True, tuning=tuning)
            found[way] = by_route(size, view), two_shot(size, view)
        del found[LEVELS]  # this view has a ring
        assert found == {ONE: (False, False), TWO: (False, True), RING: (True, True)}
    found = {}
    for way, tuning in WAYS.items():
        both = frozenset((0, 1, 2))
        view = GroupView(1, 0, (0, 1, 2), both, False, alike=True, tuning=tuning, hosts=((0, 2), (1,)))
        found[way] = by_route(size, view), two_shot(size, view)
    assert found == {ONE: (False, False), TWO: (False, True), RING: (False, True), LEVELS: (True, True)}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (TuneRequest(ranks=(1,)), "expected 2 to 1024"),
        (TuneRequest(rounds=0), "--rounds 0: expected at least 1"),
        (TuneRequest(iterations=0), "-n 0: expected at least 1"),
        (TuneRequest(large=(1 << 42,)), "are free; lower --ranks"),
        (TuneRequest(ranks_per_host=2), "--ranks-per-host 2: expected --hosts netns"),
        (TuneRequest(ranks=(2, 4), hosts=("netns",), ranks_per_host=2), "for two hosts or more"),
    ],
)
def test_what_cannot_be_measured_is_said(request_: TuneRequest, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        request_.check()
