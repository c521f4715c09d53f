"""What the ranks of the tests run in which kernels run the collectives of the process group."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ftcomm
from ftcomm.errors import LostError
from ftcomm.kernels.call_codes import KINDS
from ftcomm.kernels.device.words import KIND

from ..process.job import Notes
from ..process.kernel_stops import before_announce
from .fsdp_bodies import batch, loss_of, network


def count_launches(group: ftcomm.Group) -> Counter[str]:
    """The ops that a kernel is launched for from now on, by what they are."""
    engine: Any = group._engine
    launch, counted = engine.device.launch, Counter[str]()

    def counting(launched: Any) -> None:
        counted[KINDS[launched.call >> KIND]] += 1
        launch(launched)

    engine.device.launch = counting
    return counted


def fsdp(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """`fully_shard` over the world, one rank a replica, so that its collectives are those of the group of the job."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    counted = count_launches(group)
    model = network()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(arguments["steps"]):
        optimizer.zero_grad()
        loss_of(model, batch(step, group.replica)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    weights = [p.full_tensor().flatten().tolist() for p in model.parameters()]
    notes.write(kind="final", weights=weights, launches=counted)
    dist.destroy_process_group()


def every_call(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """All that move data or reduce for some."""
    counted = count_launches(group)
    me, size = group.rank, group.world_size
    x = torch.arange(6.0) + 10 * me
    out = torch.empty(6 * size, dtype=torch.complex64)
    group.allgather(out, x.to(torch.complex64)[::1])
    assert torch.equal(out.real, torch.cat([torch.arange(6.0) + 10 * r for r in range(size)]))
    strided = torch.zeros(6, 2)
    strided[:, 1] = x
    group.broadcast(strided[:, 1], 1)
    assert torch.equal(strided[:, 1], torch.arange(6.0) + 10)
    assert not strided[:, 0].any()
    whole = torch.arange(4.0 * size) + me
    work = group.reduce_scatter(whole[4 * me : 4 * me + 4], whole, "avg", async_op=True)
    mean = (size - 1) / 2
    assert torch.equal(work.wait(), torch.arange(4.0) + 4 * me + mean)
    assert [(span.start, span.stop, span.replicas) for span in work.contributors] == [(0, 4, tuple(group.members))]
    y = torch.empty(2 * size, dtype=torch.int16)
    group.alltoall(y, (torch.arange(2 * size) + 100 * me).to(torch.int16))
    assert y.tolist() == [100 * r + 2 * me + i for r in range(size) for i in range(2)]
    z = torch.empty(2 * size, dtype=torch.int16)
    group.alltoall(z, y, [2] * size, [2] * size)
    group.barrier()
    for root in range(size):
        here = me == root
        strided = torch.zeros(6 * size, 2)
        group.gather(strided[:, 1] if here else None, x, root)
        assert not here or torch.equal(strided[:, 1], torch.cat([torch.arange(6.0) + 10 * r for r in range(size)]))
        part = torch.empty(4, dtype=torch.complex64)
        group.scatter(part, whole.to(torch.complex64) if here else None, root)
        assert torch.equal(part.real, torch.arange(4.0) + 4 * me + (mean if here else root)), (root, part)
        bits = torch.tensor([1 << me, 7], dtype=torch.int16)
        group.reduce(bits, root, "bxor")
        assert bits.tolist() == ([(1 << size) - 1, 7 * (size % 2)] if here else [1 << me, 7])
    uneven = [1] * (size - 1) + [2]
    z = torch.empty(uneven[me] * size, dtype=torch.int16)
    x = (torch.arange(size + 1) + 100 * me).to(torch.int16)
    work = group.alltoall(z, x, [uneven[me]] * size, uneven, async_op=True)
    assert work.wait().tolist() == [100 * r + me + i for r in range(size) for i in range(uneven[me])]
    spans = [(span.start, span.stop, span.replicas) for span in work.contributors]
    assert spans == [(uneven[me] * r, uneven[me] * (r + 1), (group.members[r],)) for r in range(size)]
    work = group.allreduce(torch.ones(3), async_op=True)
    assert work.wait().tolist() == [size] * 3
    notes.write(kind="done", launches=counted)


def gather_and_die(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Step after step one call of each kind, with roots that live and that die; replica 1 dies in one at `point`, for
    the time number `times`."""
    left = arguments["times"]

    def at(point: str) -> None:
        nonlocal left
        left -= point == arguments["point"]
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    if group.replica == 1:
        before_announce(at)
    count = arguments["count"]
    for step in ftcomm.steps(arguments["steps"]):
        me, size = group.rank, group.world_size
        said: dict[str, Any] = {}
        out = torch.empty(size * count)
        try:
            group.allgather(out, torch.full((count,), 1000.0 * step + group.replica))
            said["gathered"] = sorted({v - 1000.0 * step for v in out.tolist()})
        except LostError:
            said["gathered"] = "lost"
        part = torch.empty(count)
        whole = torch.cat([torch.full((count,), 2.0**group.replica + 16 * rank) for rank in range(size)])
        work = group.reduce_scatter(part, whole, async_op=True)
        work.wait()
        for span in work.contributors:
            wanted = sum(2.0**replica + 16 * me for replica in span.replicas)
            assert (part[span.start : span.stop] == wanted).all(), (step, span, part)
        piece = torch.cat([torch.full((count,), 100.0 * step + rank) for rank in range(size)])
        try:
            group.scatter(part, piece if me == size // 2 else None, size // 2)
            said["scattered"] = sorted({v - me for v in part.tolist()})
        except LostError:
            said["scattered"] = "lost"
        try:
            group.gather(out if me == 0 else None, torch.full((count,), 1000.0 * step + group.replica), 0)
            assert me or (out.view(size, count)[:, 0] - 1000.0 * step).tolist() == list(group.roster)
            said["collected"] = True
        except LostError:
            said["collected"] = "lost"
        counts = [[4000 * (1 + (i + j) % 2) for j in range(size)] for i in range(size)]
        came = [row[me] for row in counts]
        taken, own = torch.empty(sum(came)), torch.full((sum(counts[me]),), float(group.replica))
        try:
            group.alltoall(taken, own, came, counts[me])
            assert [sorted({*part.tolist()}) for part in taken.split(came)] == [[float(r)] for r in group.roster]
            said["exchanged"] = True
        except LostError:
            said["exchanged"] = "lost"
        for root in (0, size // 2):
            ones = torch.full((count,), 2.0**group.replica)
            work = group.reduce(ones, root, async_op=True)
            work.wait()
            for span in work.contributors if me == root else ():
                assert (ones[span.start : span.stop] == sum(2.0**replica for replica in span.replicas)).all()
            assert me == root or (ones == 2.0**group.replica).all()
        said["ones"] = float(group.allreduce(torch.ones(1))[0])
        notes.write(kind="step", step=step, **said)


def ddp(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    counted = count_launches(group)
    torch.manual_seed(group.replica)
    model = DistributedDataParallel(nn.Linear(8, 2))
    loss_of(model, batch(0, group.replica)).backward()
    grads = [p.grad.flatten().tolist() for p in model.parameters()]
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    notes.write(kind="final", weights=weights, grads=grads, launches=counted)
    dist.destroy_process_group()
