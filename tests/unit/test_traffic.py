"""What goes between replicas, as their recordings have it: around a ring, or from each to each."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ftcomm.dashboard.traffic import Traffic, TrafficFlow, TrafficLink, merged, of_column
from ftcomm.diagnosis.facts import Rank
from ftcomm.recorder.layout import PROCESS_SHAPE, GroupKind
from ftcomm.recorder.reader import Recording, parse
from ftcomm.recorder.recorder import Owner, Recorder, listed

RING = (0, 2, 1, 3)
SECOND = 1000  # ops are called so often, each takes a millisecond, and the first comes after one second
CALL = 1000 << 16 | 2 << 8  # an all-reduce of 1000 x float32
BROADCAST = 1


class Call:
    def __init__(self, number: int, detail: int = 0) -> None:
        self.place, self.call, self.detail, self.caller, self.record = number, CALL, detail, 0, 0


def recordings(algorithm: str, *, ops: int = 1000, late: int | None = None, detail: int = 0) -> dict[Rank, Recording]:
    """Recordings of four replicas, each an op a millisecond. Replica `late` makes its right neighbour wait for its data
    in one op of ten, for 10 ms of its clock."""
    found: dict[Rank, Recording] = {}
    for place, replica in enumerate(RING):
        now = [1.0]
        recorder = Recorder(shape=PROCESS_SHAPE, clock=lambda now=now: now[0])  # type: ignore[misc]
        recorder.describe(Owner(replica, 0, 4, 1, "job", "here"))
        group = recorder.group("job", 0, GroupKind.JOB)
        group.entered(1, *listed(dict.fromkeys(RING, "tcp")))
        for number in range(1, ops + 1):
            now[0] = 1.0 + number / SECOND
            group.called(op := Call(number, detail), now[0])
            if algorithm:
                group.posted(op, algorithm)
                group.arrived(op)
            if number % 10 == 5:
                group.waits(op, (RING[place - 1],), 1.0, now[0])  # until all had called: no matter of the network
            if RING[place - 1] == late and number % 10 == 0:
                group.waits(op, (RING[place - 1],), now[0], now[0] + 0.01)
            group.returned(op, now[0] + 0.5 / SECOND)
        data = bytes(recorder.memory)
        found[replica, 0] = parse(data, data, "a recording")
    return found


def rates(traffic: Traffic) -> Mapping[tuple[int, int], float]:
    return {(link.source, link.target): link.rate for link in traffic.links}


def test_a_ring_carries_its_share_from_each_to_the_next_in_its_order() -> None:
    found = of_column(recordings("ring"))
    assert (found.order, found.ring) == (RING, True)
    around = {(0, 2), (2, 1), (1, 3), (3, 0)}
    assert rates(found) == pytest.approx(dict.fromkeys(around, 4000 * 2 * 3 / 4 * SECOND), rel=0.01)
    [flow] = found.flows
    assert (flow.dtype, flow.each, flow.algorithm, flow.transports) == ("float32", 4000, "ring", "tcp")
    assert flow.a_second == pytest.approx(SECOND, rel=0.01)
    assert flow.speed == pytest.approx(4000 * 2 * 3 / 4 / (0.5 / SECOND), rel=0.01)


@pytest.mark.parametrize(("algorithm", "share"), [("", 1.0), ("one-shot", 1.0), ("two-shot", 2 / 4)])
def test_without_a_ring_each_carries_to_each(algorithm: str, share: float) -> None:
    found = of_column(recordings(algorithm))
    each = {(source, target) for source in RING for target in RING if source != target}
    assert not found.ring
    assert rates(found) == pytest.approx(dict.fromkeys(each, 4000 * share * SECOND), rel=0.01)


def test_a_slow_way_is_told_by_who_waited_for_its_data() -> None:
    found = of_column(recordings("ring", late=2))
    held = {(link.source, link.target): link.waited for link in found.links}
    assert held.pop((2, 1)) == pytest.approx(1.0, rel=0.02)  # 100 waits of 10 ms in a second
    assert set(held.values()) == {0.0}


def test_what_is_not_known_to_cross_is_not_counted() -> None:
    assert not of_column(recordings("hierarchical")).links
    assert not of_column(recordings("ring", detail=BROADCAST)).links
    assert of_column({}) == Traffic()


def test_the_ranks_of_all_indices_add_up() -> None:
    one = Traffic((0, 1), True, (TrafficLink(0, 1, 5.0, 0.1),), (TrafficFlow("float32", 8, "ring", "tcp", 2.0, 30.0),))
    two = Traffic((0, 1), True, (TrafficLink(0, 1, 7.0, 0.4),), (TrafficFlow("float32", 8, "ring", "tcp", 3.0, 50.0),))
    flow = TrafficFlow("float32", 8, "ring", "tcp", 5.0, 40.0)
    assert merged([one, two, Traffic()]) == Traffic((0, 1), True, (TrafficLink(0, 1, 12.0, 0.4),), (flow,))
    assert merged([]) == Traffic()
