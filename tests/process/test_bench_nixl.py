"""`ftcomm bench nixl`: that it runs, and that its yardstick puts what it says."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcomm.bench.nixl import LIBRARIES, STAGED, NixlRing
from tests.rigs.deadlines import DEADLINE
from tests.rigs.static_ranks import together

from .conftest import Bench

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")

pytestmark = pytest.mark.protocol


def test_it_runs_and_writes_what_it_has_measured(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = bench("nixl", "--smoke", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["rows"]
    assert [row["library"] for row in found] == list(LIBRARIES)
    assert all(row["time_us"] > 0 for row in found)
    assert found[0]["of_puts"] == 1


@pytest.mark.parametrize(("nbytes", "span"), [(STAGED + 999, 2 * STAGED), (2 * STAGED, STAGED), (4096, 4096)])
def test_every_rank_is_put_what_its_left_neighbour_has(nbytes: int, span: int) -> None:
    ranks = 2
    gate, cards = threading.Barrier(ranks, timeout=DEADLINE), [np.empty(0, np.uint8)] * ranks
    rings: list[Any] = [None] * ranks

    def body(rank: int) -> None:
        def gather(card: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            cards[rank] = card
            gate.wait()
            return np.stack(cards)

        rings[rank] = ring = NixlRing(rank, ranks, 2 * STAGED, gather)
        ring.given[:] = np.random.default_rng(rank).integers(0, 256, len(ring.given), np.uint8)
        gate.wait()
        ring.transfer(nbytes, span, True, True)
        gate.wait()

    together(body, ranks)
    there = min(nbytes, span)
    assert all((rings[rank].taken[:there] == rings[rank - 1].given[:there]).all() for rank in range(ranks))
