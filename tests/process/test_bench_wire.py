"""`ftcomm bench wire`: that it runs, what comes of its timings, and that its sockets carry what they say."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcomm.bench.baseline import BaselineBlock, whole
from ftcomm.bench.wire import ListenAddress, Pair, Waited, Watched, WireRequest, idle, rows
from ftcomm.errors import SettingsError
from ftcomm.lab.netns.relay import Counts
from ftcomm.lab.netns.slow_network import SlowNetwork
from tests.rigs.deadlines import DEADLINE

from .conftest import Bench

pytestmark = pytest.mark.protocol


def test_it_runs_and_writes_what_it_has_measured(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("wire", "--smoke", "--algorithm", "ring", "--secure", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["rows"]
    assert [row["library"] for row in found] == ["sockets", "ftcomm", "mac", "aes-gcm"]
    assert all(row["time_us"] > 0 for row in found)
    assert found[0]["of_sockets"] == 1
    assert found[0]["of_link"] is None


def test_shares_are_of_rounds_and_times_of_the_slowest_rank() -> None:
    task = WireRequest((1 << 20,), iterations=1, rounds=2, gloo=False).task(2)
    times = {
        ("sockets", 0): (1000, 2000),
        ("sockets", 1): (4000, 1000),
        ("ftcomm", 0): (4000, 1),
        ("ftcomm", 1): (1, 5000),
    }
    blocks = [
        BaselineBlock(rank, 1 << 20, number, library, [took], cpu=took)
        for (library, number), both in times.items()
        for rank, took in enumerate(both)
    ]
    assert whole(blocks, task, 1 << 20)
    assert not whole(blocks[1:], task, 1 << 20)  # a rank is still at its last round
    sockets, ours = rows(blocks, task, 1 << 20)
    assert sockets.round_us == [2, 4]
    assert ours.round_us == [4, 5]
    assert ours.of_sockets == pytest.approx((2 / 4 + 4 / 5) / 2)
    assert sockets.cpu_us == pytest.approx(3)  # of both ranks, in the round in which that was least
    assert ours.cpu_us == pytest.approx(4.001)
    assert sockets.busbw_gbps == pytest.approx((1 << 20) / 3e-6 / 1e9)
    assert sockets.of_link is None
    link = 8 * (1 << 20) / 12e-6  # bits a second at which each rank sends and receives the array in 12 us
    assert [row.of_link for row in rows(blocks, task, 1 << 20, link)] == pytest.approx([12 / 3, 12 / 4.5])


def test_what_waiting_takes_is_that_of_the_worst_of_those_who_waited() -> None:
    one = idle([Waited(0, 5.0, 4.0), Waited(1, 5.0, 0.05), Waited(2, 4.0, 0.06)])
    assert (one.ranks, one.seconds) == (3, 4.0)
    assert one.cpu_pct == pytest.approx(1.5)


def test_the_busiest_second_of_a_network_is_kept() -> None:
    watched = Watched(4)
    for now, cpu, dropped in ((10.0, 1.0, 0), (10.5, 1.4, 0), (11.0, 1.5, 2), (13.0, 1.7, 3)):
        watched.saw(now, Counts(forwarded=int(now), crowded=dropped, cpu=cpu))
    assert watched.network is not None
    assert (watched.network.forwarded, watched.network.dropped) == (13, 3)
    assert watched.network.busy_pct == pytest.approx(50)


def between_hosts(bench: Bench, folder: Path, *arguments: str) -> Any:
    """The JSON of a short run between hosts of their own, where this machine can have them."""
    try:
        SlowNetwork(1).close()
    except SettingsError as error:
        pytest.skip(str(error))
    path = folder / "out.json"
    done = bench("wire", "--smoke", *arguments, f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def test_it_measures_on_a_link_of_its_own(bench: Bench, tmp_path: Path) -> None:
    found = between_hosts(bench, tmp_path, "--hosts=3", "--rate=200mbit", "--delay=2ms")
    # What the link needs is in the time: the bytes at its rate, but for what a token bucket lets through at once.
    assert all(row["ranks"] == 3 and 0 < row["of_link"] < 1.1 for row in found["rows"])
    least = 2 * 2 / 3 * (1 << 20)
    assert all(least < row["cable_bytes"] < 1.1 * least for row in found["rows"])
    assert found["networks"][0]["forwarded"] > 100
    assert found["idle"][0]["seconds"] >= 0.2


def test_by_two_levels_a_host_sends_less_than_its_ranks_do_directly(bench: Bench, tmp_path: Path) -> None:
    rows = between_hosts(bench, tmp_path, "--hosts=2", "--ranks-per-host=2")["rows"]
    found = {row["library"]: row for row in rows}
    assert {(row["hosts"], row["ranks"]) for row in found.values()} == {(2, 4)}
    # Two hosts: each sends the array once, however many ranks it has; directly, twice that. And headers.
    sent = {library: row["cable_bytes"] / (1 << 20) for library, row in found.items()}
    assert sent == pytest.approx({"sockets": 1, "two levels": 1, "direct": 2}, rel=0.25)


def test_every_rank_receives_what_its_left_neighbour_has() -> None:
    ranks, nbytes = 3, 1_000_003
    gate, places = threading.Barrier(ranks, timeout=DEADLINE), [("", 0)] * ranks
    given = [np.random.default_rng(rank).integers(0, 256, nbytes, np.uint8) for rank in range(ranks)]
    taken = [np.zeros(nbytes, np.uint8) for _ in range(ranks)]

    def body(rank: int) -> None:
        def tell(mine: ListenAddress) -> list[ListenAddress]:
            places[rank] = mine
            gate.wait()
            return places

        Pair(rank, ranks, "127.0.0.1", tell).transfer(given[rank].data, taken[rank].data, nbytes)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert all((taken[rank] == given[rank - 1]).all() for rank in range(ranks))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (WireRequest(sizes=(10,)), "multiples of 4"),
        (WireRequest(ranks=(1,)), "expected 2 to 1024"),
        (WireRequest(iterations=0), "at least 1"),
        (WireRequest(sizes=(1 << 42,)), "are free; lower"),
        (WireRequest(idle=0.0), "expected a positive time"),
        (WireRequest(rate=1e9), "say --hosts in place of --ranks"),
        (WireRequest(delay=0.005), "say --hosts in place of --ranks"),
        (WireRequest(hosts=(1,), ranks_per_host=2), "--hosts 1: expected at least 2"),
        (WireRequest(ranks_per_host=2), "say --hosts in place of --ranks"),
    ],
)
def test_what_cannot_be_measured_is_said(request_: WireRequest, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        request_.check()
