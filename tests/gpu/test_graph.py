"""All-reduces inside CUDA graphs: their counters live in device memory, so every replay is an op of its own.

At the level of the device: a graph for each rank, replayed on a stream of its own, between ops that are launched. That
groups survive losses within replays is for `test_processes_gpu`, and without a GPU for tests/process/test_graphs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftcomm.errors import ArgumentError
from ftcomm.kernels.device import words as w
from tests.gpu.ranks import Ranks

from .rig import gpu, inputs, ranks_on_gpu, same_bits, total

pytestmark = [*gpu, pytest.mark.timeout(300)]

RANKS = 4
ELEMENTS = 300_001


class Captured:
    """`ops` all-reduces behind each other in the graph of each rank."""

    def __init__(self, ranks: Ranks, ops: int) -> None:
        self.ranks = ranks
        self.streams = [torch.cuda.Stream() for _ in range(RANKS)]
        self.arrays = [torch.zeros(ELEMENTS, device="cuda") for _ in range(RANKS)]
        for me, array in enumerate(self.arrays):
            ranks.launch(me, array, "float32")  # what is captured has been loaded
        ranks.settle()
        torch.cuda.synchronize()
        self.graphs = [self._capture(me, ops) for me in range(RANKS)]

    def _capture(self, me: int, ops: int) -> torch.cuda.CUDAGraph:
        graph, device = torch.cuda.CUDAGraph(), self.ranks.devices[me]
        with torch.cuda.graph(graph, stream=self.streams[me]):
            for _ in range(ops):
                self.ranks.launch(me, self.arrays[me], "float32")
                device.release(device.mark())
        return graph

    def replay(self, who: range = range(RANKS)) -> None:
        for me in who:
            with torch.cuda.stream(self.streams[me]):
                self.graphs[me].replay()

    def fill(self, sources: list[torch.Tensor]) -> None:
        for me, source in enumerate(sources):
            with torch.cuda.stream(self.streams[me]):
                self.arrays[me].copy_(source)

    def check(self, expected: torch.Tensor) -> None:
        torch.cuda.synchronize()
        assert all(same_bits(array.cpu(), expected) for array in self.arrays)


@pytest.mark.parametrize("ops", [1, 3])
def test_every_replay_is_an_op(ops: int) -> None:
    with ranks_on_gpu(RANKS) as ranks:
        captured = Captured(ranks, ops)
        before = int(ranks.devices[0].ctl[w.RETURNED])
        assert before == 1, "capturing has run something"
        for replay in range(50):
            sources = inputs(RANKS, ELEMENTS, torch.float32, replay)
            captured.fill(sources)
            captured.replay()
            for _ in range(ops):
                sources = [total(sources)] * RANKS
            captured.check(sources[0])
        assert [int(device.ctl[w.RETURNED]) for device in ranks.devices] == [before + 50 * ops] * RANKS


def test_replays_between_launches_and_epochs() -> None:
    with ranks_on_gpu(RANKS) as ranks:
        captured = Captured(ranks, 1)
        for turn in range(10):
            sources = inputs(RANKS, ELEMENTS, torch.float32, turn)
            captured.fill(sources)
            captured.replay()
            for me in range(RANKS):
                with torch.cuda.stream(captured.streams[me]):
                    ranks.launch(me, captured.arrays[me], "float32")
                    ranks.devices[me].release(ranks.devices[me].mark())
            captured.replay()
            for _ in range(3):
                sources = [total(sources)] * RANKS
            captured.check(sources[0])
            ranks.freeze()
            ranks.enter()  # the graph knows no epoch


def test_a_replay_can_be_told_to_stop() -> None:
    with ranks_on_gpu(RANKS) as ranks:
        captured = Captured(ranks, 1)
        sources = inputs(RANKS, ELEMENTS, torch.float32, 1)
        captured.fill(sources)
        torch.cuda.synchronize()
        captured.replay(range(RANKS - 1))
        ranks.begun(2, range(RANKS - 1))
        ranks.freeze()
        ranks.enter(2)  # as if it had returned: the replay ends
        torch.cuda.synchronize()
        assert all(same_bits(array.cpu(), source) for array, source in zip(captured.arrays, sources, strict=True))
        captured.replay()
        captured.check(total(sources))


def test_a_replay_follows_the_ops_that_were_called_before_it() -> None:
    """Though its stream waits for none of them."""
    with ranks_on_gpu(RANKS) as ranks:
        captured = Captured(ranks, 1)
        others = [torch.ones(1 << 20, device="cuda") for _ in range(RANKS)]
        sources = inputs(RANKS, ELEMENTS, torch.float32, 1)
        captured.fill(sources)
        torch.cuda.synchronize()
        for me in range(RANKS):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(50_000_000)
                ranks.launch(me, others[me], "float32")
        captured.replay()
        captured.check(total(sources))
        assert all((other == RANKS).all() for other in others)


def test_arrays_of_the_host_cannot_be_captured() -> None:
    with ranks_on_gpu(1) as ranks:
        array, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            array.add_(1)
            with pytest.raises(ArgumentError, match="cannot be reduced inside a CUDA graph"):
                ranks.devices[0].stage(np.ones(8, np.float32))
        graph.replay()
        torch.cuda.synchronize()
        assert (array == 2).all()
