"""send and recv with copy_engine=True on a real GPU, a thread a rank: GPU, pinned and host memory, waiting kernels."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ftcomm.engines.gpu_kernel.copies import CHUNK
from ftcomm.errors import ArgumentError
from ftcomm.p2p.calls import Messages
from ftcomm.p2p.progress import ProgressEngine
from tests.gpu.ranks import Ranks
from tests.rigs.exchange import socket_pair

from .rig import gpu, ranks_on_gpu

pytestmark = [*gpu, pytest.mark.timeout(300)]

SIZE = 9 * CHUNK + 20
PIECES = 10
LONG = 60.0


class Member(Messages):
    """Rank `me` of `ranks`, which dial each other."""

    def __init__(self, me: int, ranks: Ranks, members: list[Member]) -> None:
        from ftcomm.engines.gpu_kernel.slots import DeviceSlots

        self.roster, self.members = tuple(range(len(ranks.devices))), members
        self.slots = DeviceSlots(ranks.devices[me], ranks.segments[me].nonce)
        self.puts = 0
        put = self.slots.put

        def counted(slot: int, source: int, nbytes: int) -> None:
            self.puts += 1
            put(slot, source, nbytes)

        self.slots.put = counted  # type: ignore[method-assign]
        super().__init__("", me, ProgressEngine(f"rank {me}", self._dial, str, self.slots))

    def _default_timeout(self) -> float:
        return LONG

    def _dial(self, peer: int) -> socket.socket:
        near, far = socket_pair()
        self.members[peer]._p2p.accept(far, self._me, self.slots.nonce)
        return near


@contextlib.contextmanager
def members_on_gpu(count: int, staging: str = "device") -> Iterator[tuple[Ranks, list[Member]]]:
    with ranks_on_gpu(count, staging) as ranks:
        members: list[Member] = []
        members += [Member(me, ranks, members) for me in range(count)]
        try:
            yield ranks, members
        finally:
            for member in members:
                member._p2p.fail(RuntimeError("the test is over"))
            for member in members:
                member._p2p.close(RuntimeError("the test is over"))


def on_gpu() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8, device="cuda")


def pinned() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8, pin_memory=True)


def on_host() -> Any:
    return torch.zeros(SIZE, dtype=torch.uint8)


PLACES = [on_gpu, pinned, on_host]


@pytest.mark.parametrize("staging", ["device", "host"])
def test_from_every_place_to_every_place(staging: str) -> None:
    """What was queued before a send is in what arrives, and what is queued behind a receive sees it."""
    with members_on_gpu(2, staging) as (_, members):
        for i, source in enumerate(PLACES):
            for target in PLACES:
                x, out, before = source(), target(), members[0].puts
                expected = torch.from_numpy(np.random.default_rng(i).integers(0, 256, SIZE, np.uint8))
                x.copy_(expected, non_blocking=True)
                receiving = members[1].recv(out, 0, i, async_op=True, copy_engine=True)
                members[0].send(x, 1, i, copy_engine=True)
                receiving.wait()
                assert torch.equal(out.clone().cpu(), expected), (source, target)
                assert members[0].puts - before == (0 if source is on_host else PIECES)


def test_both_ways_while_a_kernel_waits() -> None:
    """Rank 0 has launched an all-reduce to which nobody else has come: its messages go on all the same."""
    with members_on_gpu(2) as (ranks, members):
        x = [torch.full((SIZE,), me + 1, dtype=torch.uint8, device="cuda") for me in range(2)]
        out = [torch.zeros_like(array) for array in x]
        waiting, late = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
        ranks.launch(0, waiting, "float32")
        ranks.begun(1, [0])
        calls: list[Callable[[], Any]] = []
        for me in range(2):
            calls += [
                members[me].send(x[me], 1 - me, async_op=True, copy_engine=True).wait,
                members[me].recv(out[me], 1 - me, async_op=True, copy_engine=True).wait,
            ]
        for wait in calls:
            wait()
        assert [member.puts for member in members] == [PIECES, PIECES]
        ranks.launch(1, late, "float32")
        ranks.settle()
        torch.cuda.synchronize()
        assert (waiting == 2).all()
        assert all((out[me] == 2 - me).all() for me in range(2))


def test_an_array_that_slots_do_not_reach_and_a_capture() -> None:
    with members_on_gpu(2) as (_, members):
        x = torch.arange(200_000.0, device="cuda")
        out = torch.zeros(100_000, device="cuda")
        sent = members[0].send(x[::2], 1, async_op=True, copy_engine=True)
        members[1].recv(out, 0, copy_engine=True)
        sent.wait()
        assert torch.equal(out, x[::2])
        assert members[0].puts == 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(ArgumentError, match="cannot be captured"):
            members[0].send(x, 1, copy_engine=True)
