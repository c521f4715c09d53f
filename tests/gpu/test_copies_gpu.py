"""The copy-engine path on a real GPU, a thread a rank: GPU memory, pinned memory, and while kernels wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ftcomm.engines.gpu_kernel.copies import CHUNK
from ftcomm.kernels.device.words import ABORTED, OK
from tests.gpu.ranks import Ranks

from .rig import gpu, ranks_on_gpu

pytestmark = [*gpu, pytest.mark.timeout(300)]

RANKS = 4
LONG = 60.0


def together(ranks: Ranks, body: Callable[[int, Any], int], stop: Callable[[], bool] = lambda: False) -> list[int]:
    """`body(me, copies)` of all ranks at once; what they return, -1 for who is not back in time."""
    answers = [-1] * RANKS
    copies = [
        device.copy_engines(me, [ranks.reached[me][i] for i in range(RANKS)], ranks.epoch, stop)
        for me, device in enumerate(ranks.devices)
    ]

    def one(me: int) -> None:
        answers[me] = body(me, copies[me])

    threads = [threading.Thread(target=one, args=(me,), daemon=True) for me in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG)
    return answers


@pytest.mark.parametrize("where", ["gpu", "pinned"])
def test_allgather(where: str) -> None:
    sizes = [1, CHUNK, 3 * CHUNK + 5, 8 * CHUNK]
    with ranks_on_gpu(RANKS) as ranks:
        parts = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in sizes]
        pinned = where == "pinned"
        place: dict[str, Any] = {"pin_memory": True} if pinned else {"device": "cuda"}
        outs = [[torch.zeros(size, dtype=torch.uint8, **place) for size in sizes] for _ in range(RANKS)]
        torch.cuda.synchronize()

        def gather(me: int, copies: Any) -> int:
            answer: int = copies.allgather(parts[me].data_ptr(), [out.data_ptr() for out in outs[me]], sizes, LONG)
            return answer

        assert together(ranks, gather) == [OK] * RANKS
        for mine in outs:
            assert all(torch.equal(out.cpu(), part.cpu()) for out, part in zip(mine, parts, strict=True))


def test_point_to_point_while_a_kernel_waits() -> None:
    """Rank 0 has launched an all-reduce to which nobody else has come: its copies go on all the same."""
    with ranks_on_gpu(RANKS) as ranks:
        sent = [torch.full((5 * CHUNK + 1,), me + 1, dtype=torch.uint8, device="cuda") for me in range(RANKS)]
        heard = [torch.zeros_like(array) for array in sent]
        waiting = torch.ones(1000, device="cuda")
        ranks.launch(0, waiting, "float32")
        ranks.begun(1, [0])

        def pair(me: int, copies: Any) -> int:
            answer: int
            if me % 2 == 0:
                answer = copies.send(me + 1, sent[me].data_ptr(), sent[me].numel(), LONG)
            else:
                answer = copies.receive(me - 1, heard[me].data_ptr(), heard[me].numel(), LONG)
            return answer

        assert together(ranks, pair) == [OK] * RANKS
        for me in range(1, RANKS):
            others = torch.ones(1000, device="cuda")
            ranks.launch(me, others, "float32")
        ranks.settle()
        torch.cuda.synchronize()
        assert (waiting == RANKS).all()
        assert all((heard[me] == (me if me % 2 else 0)).all() for me in range(RANKS))


def test_a_wait_ends_when_told() -> None:
    with ranks_on_gpu(RANKS) as ranks:
        array = torch.zeros(CHUNK, dtype=torch.uint8, device="cuda")
        gone = threading.Event()

        def alone(me: int, copies: Any) -> int:
            if me:
                return OK
            threading.Timer(0.1, gone.set).start()
            answer: int = copies.receive(1, array.data_ptr(), CHUNK, LONG)
            return answer

        assert together(ranks, alone, gone.is_set) == [ABORTED, OK, OK, OK]
