"""`ftcomm bench wire`: that it runs, what comes of its timings, and that its sockets carry what they say."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ftcomm.bench.wire import Request, rows
from ftcomm.bench.wire_rank import Block, Pair, Task
from ftcomm.errors import SettingsError

DEADLINE = 120.0


def test_it_runs_and_writes_what_it_has_measured(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [
        str(Path(sys.executable).with_name("ftcomm")),
        "bench",
        "wire",
        "--smoke",
        "--algorithm",
        "ring",
        "--json",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["rows"]
    assert [row["library"] for row in found] == ["sockets", "ftcomm"]
    assert all(row["time_us"] > 0 for row in found)
    assert found[0]["of_sockets"] == 1


def test_shares_are_of_rounds_and_times_of_the_slowest_rank() -> None:
    task = Task(2, (1 << 20,), 1, 2, ("sockets", "ftcomm"), "")
    times = {
        ("sockets", 0): (1000, 2000),
        ("sockets", 1): (4000, 1000),
        ("ftcomm", 0): (4000, 1),
        ("ftcomm", 1): (1, 5000),
    }
    blocks = [
        Block(rank, 1 << 20, number, library, [took])
        for (library, number), both in times.items()
        for rank, took in enumerate(both)
    ]
    sockets, ours = rows(blocks, task, 1 << 20)
    assert sockets.round_us == [2, 4]
    assert ours.round_us == [4, 5]
    assert ours.of_sockets == pytest.approx((2 / 4 + 4 / 5) / 2)
    assert sockets.busbw_gbps == pytest.approx((1 << 20) / 3e-6 / 1e9)


def test_every_rank_receives_what_its_left_neighbour_has() -> None:
    ranks, nbytes = 3, 1_000_003
    gate, ports = threading.Barrier(ranks, timeout=DEADLINE), [0] * ranks
    given = [np.random.default_rng(rank).integers(0, 256, nbytes, np.uint8) for rank in range(ranks)]
    taken = [np.zeros(nbytes, np.uint8) for _ in range(ranks)]

    def body(rank: int) -> None:
        def tell(port: int) -> list[int]:
            ports[rank] = port
            gate.wait()
            return ports

        Pair(rank, ranks, tell).carry(given[rank].data, taken[rank].data, nbytes)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert all((taken[rank] == given[rank - 1]).all() for rank in range(ranks))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(sizes=(10,)), "multiples of 4"),
        (Request(ranks=(1,)), "expected 2 to 16"),
        (Request(iterations=0), "at least 1"),
        (Request(sizes=(1 << 42,)), "are free; lower"),
    ],
)
def test_what_cannot_be_measured_is_said(request_: Request, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        request_.check()
