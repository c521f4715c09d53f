"""What the ranks of the tests of the process group run: every call of torch.distributed, against what it should give,
which each rank works out by itself, since it knows what the others put in."""

from __future__ import annotations

import _thread
import os
import queue
import re
import signal
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ftcomm
from ftcomm.errors import ArgumentError, FtcommError, LostError
from ftcomm.torch.mesh import init_device_mesh

from ..process.job import DEADLINE, Notes
from .bodies import steps_until_told

OPS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda x: x.sum(0),
    dist.ReduceOp.AVG: lambda x: x.sum(0) / len(x),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
    dist.ReduceOp.MAX: lambda x: x.amax(0),
    dist.ReduceOp.PRODUCT: lambda x: x.prod(0),
}
BITS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def given(rank: int, n: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(n,) of small whole numbers, which every dtype can hold, and their sums and products over a few ranks too."""
    return ((torch.arange(n) + rank) % 3 + 1).to(dtype)


def equal(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if got.dtype in FP8:
        got, wanted = got.view(torch.uint8), wanted.view(torch.uint8)
    assert torch.equal(got, wanted), f"{what}: {got} and not {wanted}"


def reductions(pg: dist.ProcessGroup | None) -> None:
    rank, size = dist.get_rank(pg), dist.get_world_size(pg)
    everything = torch.stack([given(r) for r in range(size)])
    for op, result in OPS.items():
        for async_op in (False, True):
            x = given(rank)
            work = dist.all_reduce(x, op, group=pg, async_op=async_op)
            if async_op:
                work.wait()
                assert work.is_completed()
                assert work.is_success()
            equal(x, result(everything), f"all_reduce {op}")
    x = given(rank).view(3, 4).t()  # strided
    dist.all_reduce(x, group=pg)
    equal(x.t().reshape(-1), everything.sum(0), "all_reduce of strided memory")
    future = dist.all_reduce(y := given(rank), group=pg, async_op=True).get_future()
    equal(future.then(lambda f: f.value()[0] * 2).wait(), everything.sum(0) * 2, "future")
    equal(y, everything.sum(0), "all_reduce with a future")
    if pg is None or dist.get_backend(pg) == "ftcomm":
        x = given(rank)
        dist.all_reduce(x, dist._make_nccl_premul_sum(2.0), group=pg)
        equal(x, 2 * everything.sum(0), "PREMUL_SUM")
    for op, bits in BITS.items():
        x = given(rank, dtype=torch.int32)
        wanted = given(0, dtype=torch.int32)
        for r in range(1, size):
            wanted = bits(wanted, given(r, dtype=torch.int32))
        dist.all_reduce(x, op, group=pg)
        equal(x, wanted, f"all_reduce {op}")
    for dtype in (torch.complex64, *FP8, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64):
        x = given(rank, dtype=dtype)
        dist.all_reduce(x, group=pg)
        equal(x, everything.sum(0).to(dtype), f"all_reduce of {dtype}")
    root = size - 1
    x = given(rank)
    dist.reduce(x, group_dst=root, group=pg)
    equal(x, everything.sum(0) if rank == root else given(rank), "reduce")
    wide = [given(r, 4 * size) for r in range(size)]
    own = torch.stack(wide).sum(0).view(size, -1)[rank]
    out = torch.empty(4)
    dist.reduce_scatter_tensor(out, wide[rank], group=pg)
    equal(out, own, "reduce_scatter_tensor")
    out = torch.empty(4)
    dist.reduce_scatter(out, list(wide[rank].view(size, -1).unbind()), op=dist.ReduceOp.AVG, group=pg)
    equal(out, own / size, "reduce_scatter")
    outs = [torch.empty(4), torch.empty(4)]
    with dist._coalescing_manager(group=pg):
        for out in outs:
            dist.reduce_scatter_tensor(out, wide[rank], group=pg)
    for out in outs:
        equal(out, own, "reduce_scatter_tensor, coalesced")
    xs = [given(rank), given(rank, 5)]
    with dist._coalescing_manager(group=pg, async_ops=True) as together:
        for x in xs:
            dist.all_reduce(x, group=pg)
    together.wait()
    for x in xs:
        equal(x, everything.sum(0)[: len(x)], "all_reduce, coalesced")


def moves(pg: dist.ProcessGroup | None) -> None:
    rank, size = dist.get_rank(pg), dist.get_world_size(pg)
    root = size - 1
    for dtype in (torch.float32, torch.complex128, torch.bool, torch.int16, *FP8):
        every = [given(r, dtype=dtype) for r in range(size)]
        x = given(rank, dtype=dtype)
        dist.broadcast(x, group_src=root, group=pg)
        equal(x, every[root], f"broadcast of {dtype}")
        outs = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(outs, every[rank], group=pg)
        for r, out in enumerate(outs):
            equal(out, every[r], f"all_gather of {dtype}")
    wanted = torch.cat([given(r) for r in range(size)])
    out = torch.empty(12 * size)
    dist.all_gather_into_tensor(out, given(rank), group=pg)
    equal(out, wanted, "all_gather_into_tensor")
    into = [torch.empty(12 * size) for _ in range(2)]
    with dist._coalescing_manager(group=pg):
        for out in into:
            dist.all_gather_into_tensor(out, given(rank), group=pg)
    for out in into:
        equal(out, wanted, "all_gather_into_tensor, coalesced")
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)), group=pg)
    for r, out in enumerate(uneven):
        equal(out, torch.full((r + 1,), float(r)), "all_gather of uneven parts")
    outs = [torch.empty(12) for _ in range(size)] if rank == root else None
    dist.gather(given(rank), outs, group_dst=root, group=pg)
    for r, out in enumerate(outs or []):
        equal(out, given(r), "gather")
    out = torch.empty(12)
    parts = [given(r) * 2 for r in range(size)] if rank == 0 else None
    dist.scatter(out, parts, group_src=0, group=pg)
    equal(out, given(rank) * 2, "scatter")
    x = torch.arange(size * 2.0) + 100 * rank
    out = torch.empty(size * 2)
    dist.all_to_all_single(out, x, group=pg)
    equal(out, torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(size)]), "all_to_all_single")
    sent = [j + 1 for j in range(size)]  # rows to each
    rows = torch.arange(float(sum(sent)))[:, None].expand(-1, 2).contiguous() + 100 * rank
    out = torch.empty((rank + 1) * size, 2)
    dist.all_to_all_single(out, rows, [rank + 1] * size, sent, group=pg)
    begin = sum(sent[:rank])
    wanted = torch.cat([torch.arange(begin, begin + rank + 1.0)[:, None].expand(-1, 2) + 100 * r for r in range(size)])
    equal(out, wanted, "all_to_all_single, uneven")
    outs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outs, [torch.full((j + 1,), 10.0 * rank) for j in range(size)], group=pg)
    for r, out in enumerate(outs):
        equal(out, torch.full((rank + 1,), 10.0 * r), "all_to_all")
    dist.barrier(group=pg)


def objects(pg: dist.ProcessGroup | None) -> None:
    rank, size = dist.get_rank(pg), dist.get_world_size(pg)
    said: list[Any] = [None] * size
    dist.all_gather_object(said, {"rank": rank, "text": "x" * rank}, group=pg)
    assert said == [{"rank": r, "text": "x" * r} for r in range(size)]
    sent: list[Any] = ["from", rank] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent, group_src=0, group=pg)
    assert sent == ["from", 0]


def messages(pg: dist.ProcessGroup | None) -> None:
    """Round a ring, and both ways at once."""
    rank, size = dist.get_rank(pg), dist.get_world_size(pg)
    after, before = (rank + 1) % size, (rank - 1) % size
    out = torch.empty(12)
    if rank == 0:
        dist.send(given(rank), group_dst=after, group=pg)
        dist.recv(out, group_src=before, group=pg)
    else:
        dist.recv(out, group_src=before, group=pg)
        dist.send(given(rank), group_dst=after, group=pg)
    equal(out, given(before), "send and recv")
    outs = [torch.empty(3), torch.empty(3)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((3,), 1.0 + rank), group=pg, group_peer=after, tag=1),
            dist.P2POp(dist.isend, torch.full((3,), 50.0 + rank), group=pg, group_peer=before, tag=2),
            dist.P2POp(dist.irecv, outs[0], group=pg, group_peer=before, tag=1),
            dist.P2POp(dist.irecv, outs[1], group=pg, group_peer=after, tag=2),
        ]
    )
    for work in works:
        work.wait()
    equal(outs[0], torch.full((3,), 1.0 + before), "batch_isend_irecv")
    equal(outs[1], torch.full((3,), 50.0 + after), "batch_isend_irecv")


def functional(pg: dist.ProcessGroup | None) -> None:
    """What DTensor is made of."""
    from torch.distributed import _functional_collectives as funcol

    group = dist.group.WORLD if pg is None else pg
    rank, size = dist.get_rank(pg), dist.get_world_size(pg)
    everything = torch.stack([given(r) for r in range(size)])
    equal(funcol.all_reduce(given(rank), "sum", group).clone(), everything.sum(0), "functional all_reduce")
    equal(funcol.all_gather_tensor(given(rank), 0, group).clone(), everything.view(-1), "functional all_gather")
    wide = torch.stack([given(r, 4 * size) for r in range(size)])
    scattered = funcol.reduce_scatter_tensor(wide[rank], "sum", 0, group)
    equal(scattered.clone(), wide.sum(0).view(size, -1)[rank], "functional reduce_scatter")


def everything(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """All calls on the world, on subgroups and on the dimensions of a mesh."""
    warnings.simplefilter("ignore", FutureWarning)  # the older names of calls have to work too
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (rank, size) == (group.replica * arguments["ranks_each"] + group.shard, arguments["world"])
    assert (group.rank, group.world_size) == (group.replica, arguments["world"] // arguments["ranks_each"])
    assert dist.get_backend() == "ftcomm"
    all_but_one = dist.new_group([r for r in range(size) if r != 1])
    pgs: dict[str, Any] = {"world": None, "all but one": all_but_one}
    if arguments["ranks_each"] > 1:
        mesh = init_device_mesh("cpu", {"replicate": size // 2, "alone": 1, "shard": 2})
        pgs["replicate"], pgs["shard"] = mesh.get_group("replicate"), mesh.get_group("shard")
        assert mesh.get_local_rank("shard") == group.shard
        assert mesh.get_local_rank("replicate") == group.replica
    for name, pg in pgs.items():
        if pg is dist.GroupMember.NON_GROUP_MEMBER:
            continue
        for calls in (reductions, moves, objects, functional):
            calls(pg)
        if not (name == "world" and arguments["ranks_each"] > 1):  # a ring goes from corner to corner of the grid
            messages(pg)
        notes.write(kind="done", group=name)
    mistakes()
    goes_on(Path(arguments["marks"]) / "went-on")
    dist.destroy_process_group(all_but_one)
    if all_but_one is not dist.GroupMember.NON_GROUP_MEMBER:
        try:
            all_but_one.allreduce([torch.ones(1)])
        except FtcommError as error:
            notes.write(kind="destroyed", text=str(error))
    dist.barrier()
    world = dist.group.WORLD
    assert world is not None
    before = world._get_sequence_number_for_group()
    dist.barrier()
    assert world._get_sequence_number_for_group() == before + 1
    dist.destroy_process_group()


def when_all_are_here(arguments: dict[str, Any], me: int, all_of_us: range) -> None:
    marks = Path(arguments["marks"])
    (marks / f"here-{me}").touch()
    while not all((marks / f"here-{each}").exists() for each in all_of_us):
        time.sleep(0.005)


def goes_on(mark: Path) -> None:
    """With `async_op` the caller does, whatever stands behind the group: the others come when it says so."""
    x = torch.ones(3)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        mark.touch()
    else:
        while not mark.exists():
            time.sleep(0.005)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    equal(x, torch.full((3,), float(dist.get_world_size())), "all_reduce, of which one went on")


def some_replicas(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Groups of two of three replicas, of which one is lost: in each step three all-reduces at once in each."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    world = dist.group.WORLD
    assert world is not None
    shards = group.shards
    pgs = {"world": world}
    for name, ranks in (("row", list(range(2 * shards))), ("column", list(range(group.shard, 2 * shards, shards)))):
        made = world.split_group(ranks) if arguments["split"] else dist.new_group(ranks)
        assert (made is None or made is dist.GroupMember.NON_GROUP_MEMBER) == (group.replica == 2)
        if group.replica != 2:
            pgs[name] = made
    for step in ftcomm.steps(arguments["steps"]):
        if step == 1 and group.replica == 1:  # when both ranks have done all of the step before
            when_all_are_here(arguments, group.shard, range(shards))
            os.kill(os.getpid(), signal.SIGKILL)
        xs = [torch.full((5,), 2.0 ** (shards * group.replica + group.shard)) for _ in range(3 * len(pgs))]
        opts = dist.AllreduceOptions()
        opts.asyncOp = True
        works = [pg.allreduce([x], opts) for x, pg in zip(xs, 3 * list(pgs.values()), strict=True)]
        for work in works:
            work.wait()
        said = {}
        for i, (name, pg) in enumerate(pgs.items()):
            values = {x[0].item() for x in xs[i :: len(pgs)]}
            assert len(values) == 1
            said[name] = [values.pop(), pg.rank(), pg.size()]
        notes.write(kind="did", step=step, said=said, contributed=group.contributed())
    with pytest.raises(FtcommError, match="cannot be merged with another"):
        world.merge_remote_group(dist.HashStore(), 2)
    dist.destroy_process_group()


def mistakes() -> None:
    """They are told before anything is exchanged, so the group goes on."""
    size, ones = dist.get_world_size(), torch.ones(4)

    short = [torch.empty(3)] * size  # of another dtype torch refuses them itself
    unlike: list[Callable[[], Any]] = [
        lambda: dist.reduce_scatter(torch.empty(4), short),
        lambda: dist.all_gather(short, ones),
        lambda: dist.all_gather([torch.empty(3 + 2 * (r != dist.get_rank())) for r in range(size)], ones),
    ]
    if dist.get_rank() == 0:  # the others are not asked
        unlike.append(lambda: dist.scatter(torch.empty(4), short))
        unlike.append(lambda: dist.gather(ones, short))
    for wrong, text in (
        (lambda: dist.all_gather([torch.empty(1)] * (size + 1), torch.ones(1)), f"in a group of {size}"),
        (lambda: dist.reduce_scatter(torch.empty(1), [torch.ones(1)] * (size + 1)), f"in a group of {size}"),
        (lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3), [3], [3]), "splits"),
        (lambda: dist.all_to_all_single(torch.empty(size + 1), torch.ones(size + 1)), f"expected a multiple of {size}"),
        *((call, "expected 4 x torch.float32") for call in unlike),
        (lambda: dist.all_gather_into_tensor(torch.empty(4 * size, dtype=torch.float64), ones), "torch.float32"),
        (lambda: dist.all_gather_into_tensor(torch.empty(4 * size - 1), ones), f"expected {4 * size} x torch.float32"),
        (lambda: dist.reduce_scatter_tensor(torch.empty(4, dtype=torch.int32), torch.ones(4 * size)), "torch.int32"),
        (lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(5 * size)), f"expected {4 * size} x"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(text)):
            wrong()
    of_another_shape()


def of_another_shape() -> None:
    """With as many elements: they keep their order."""
    size, sent = dist.get_world_size(), torch.arange(4.0) + 10 * dist.get_rank()
    rows = [torch.empty(2, 2) for _ in range(size)]
    expected = [10.0 * r + torch.tensor([[0.0, 1.0], [2.0, 3.0]]) for r in range(size)]
    dist.all_gather(rows, sent)
    assert all(map(torch.equal, rows, expected))
    dist.gather(sent, [row.zero_() for row in rows] if dist.get_rank() == 0 else None)
    assert dist.get_rank() or all(map(torch.equal, rows, expected))
    dist.scatter(sent, expected if dist.get_rank() == 0 else None)
    assert torch.equal(sent, expected[dist.get_rank()].view(-1))


def slow_peer(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A timeout of one call, and of a wait; the op goes on. One of the group that contradicts the job's is refused."""
    with pytest.raises(ftcomm.SettingsError, match="timeout=1 s of a process group whose job takes 10 s"):
        dist.init_process_group("ftcomm", timeout=timedelta(seconds=1))
    dist.init_process_group("ftcomm")
    if group.replica == 0:
        x = torch.ones(3)
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(seconds=0.05)
        work = dist.group.WORLD.allreduce([x], opts)
        for late in (None, timedelta(seconds=0.01)):
            try:
                work.wait(late)
            except ftcomm.CollectiveTimeout as error:
                notes.write(kind="late", text=str(error))
        pg = dist.group.WORLD
        pg.set_timeout(timedelta(seconds=0.05))  # of a call without a Work, too
        for call in (dist.barrier, lambda: dist.all_reduce(torch.ones(3))):
            with pytest.raises(ftcomm.CollectiveTimeout, match="timed out"):
                call()
        pg.set_timeout(timedelta(seconds=60))
        (Path(arguments["marks"]) / "go").touch()
        work.wait(timedelta(seconds=30))
        assert x.tolist() == [2.0] * 3
    else:
        while not (Path(arguments["marks"]) / "go").exists():
            time.sleep(0.005)
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        dist.all_reduce(torch.ones(3))
    dist.barrier()


def missing_ranks(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Monitored barriers to which ranks come late, or never since they die. The group is whole after each."""
    dist.init_process_group("ftcomm")
    pg, marks = dist.group.WORLD, Path(arguments["marks"])
    everybody = range(3)
    pg.monitored_barrier(timedelta(seconds=60), wait_all_ranks=True)
    for number, (late, wait_all) in enumerate((({1}, False), ({1, 2}, False), ({1, 2}, True))):
        there = {"marks": marks / str(number)}
        there["marks"].mkdir(exist_ok=True)
        if group.replica in late:
            when_all_are_here(there, group.replica, everybody)
            pg.monitored_barrier(timedelta(seconds=60))  # the others have called theirs, so it ends
        else:
            with pytest.raises(ftcomm.CollectiveTimeout) as raised:
                pg.monitored_barrier(timedelta(seconds=1), wait_all_ranks=wait_all)
            notes.write(kind="late", number=number, text=str(raised.value))
            when_all_are_here(there, group.replica, everybody)
    with pytest.raises(ftcomm.CollectiveTimeout, match=f"Rank {group.replica} timed out in monitoredBarrier"):
        pg.monitored_barrier(timedelta(0))
    dist.all_reduce(x := torch.ones(3))
    assert x.tolist() == [3.0] * 3
    if group.replica == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    pg.monitored_barrier(timedelta(seconds=60))
    notes.write(kind="passed")


def lost_root(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """The root of a broadcast is gone: all others get the same error, and go on, in the next step with other ranks."""
    dist.init_process_group("ftcomm")
    for step in ftcomm.steps(4):
        if step == 1:  # all have passed the boundary
            when_all_are_here(arguments, group.replica, range(3))
            if group.replica == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            x = torch.full((3,), float(group.replica))
            dist.broadcast(x, src=0)
            notes.write(kind="got", step=step, value=x[0].item(), rank=dist.get_rank(), size=dist.get_world_size())
        except LostError as error:
            notes.write(kind="lost", step=step, text=str(error), rank=dist.get_rank(), size=dist.get_world_size())
        dist.all_reduce(y := torch.ones(1))
        notes.write(kind="sum", step=step, value=y.item(), ranks=dist.get_process_group_ranks(dist.group.WORLD))


def told_another_rank(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    try:
        dist.init_process_group("ftcomm", rank=1, world_size=4)
    except ftcomm.InitError as error:
        notes.write(kind="told", text=str(error))


def by_autograd(call: Callable[[], object]) -> None:
    """`call` in a thread of autograd, while this one stands in its backward: as on a GPU, and here without one."""
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def hooked(hook: Callable[[], object]) -> torch.Tensor:
        y = torch.zeros(1, requires_grad=True) * 1
        y.register_hook(lambda gradient: hook() and None)
        return y

    def run() -> None:
        engine = torch.autograd.Variable._execution_engine
        try:
            engine.run_backward((hooked(call),), (torch.ones(1),), False, False, (), True, True)
        except BaseException as error:
            ended.put(error)
        ended.put(None)

    def stand() -> None:
        _thread.start_new_thread(run, ())
        error = ended.get(timeout=DEADLINE)
        if error is not None:
            raise error

    hooked(stand).backward()


WHO: dict[str, Callable[[Callable[[], object]], object]] = {
    "loop": lambda call: call(),
    "autograd": by_autograd,
}


def skip_once(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A branch that not all replicas take: one goes to the next step without the call of the `skip`-th."""
    dist.init_process_group("ftcomm")
    for step in ftcomm.steps(arguments["skip"] + 3):
        if step == arguments["skip"] and group.replica == 1:
            continue
        x = torch.full((4,), float(step))
        try:
            WHO[arguments["who"]](lambda x=x: dist.all_reduce(x))
        except ftcomm.MismatchError as error:
            notes.write(kind="call", step=step, text=str(error))
            return
        notes.write(kind="call", step=step, value=x[0].item() / dist.get_world_size())


def same_ranks(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Groups of the same ranks: what is called on them stands in no order, and a mistake on one is of that one."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    rank, everybody = dist.get_rank(), list(range(dist.get_world_size()))
    world = dist.group.WORLD
    assert world is not None
    pgs = [world, dist.new_group(everybody), dist.new_group(everybody)]
    pgs += [world.split_group(everybody), world.split_group(everybody)]
    column = everybody[group.shard :: arguments["ranks_each"]]
    pgs += [init_device_mesh("cpu").get_group("replicate") for _ in range(2)]
    expected = [len(everybody)] * 5 + [len(column)] * 2

    def in_another_order(values: list[Any], start: int) -> list[Any]:
        return values[start:] + values[:start]

    def sums() -> list[float]:
        xs = [torch.full((100,), 2.0**i) for i in range(len(pgs))]
        opts = dist.AllreduceOptions()
        opts.asyncOp = True
        works = [pg.allreduce([x], opts) for pg, x in in_another_order(list(zip(pgs, xs, strict=True)), rank)]
        for work in works:
            work.wait()
        return [x.unique().item() / 2.0**i for i, x in enumerate(xs)]

    notes.write(kind="sums", got=sums(), expected=expected)
    given = [torch.tensor([float(i)]) for i in range(len(pgs))]
    taken = [torch.tensor([-1.0]) for _ in pgs]
    there = column[1 - group.replica]  # from corner to corner of a grid no message goes
    others = [there] * 5 + [column.index(there)] * 2
    works = [pg.send([x], to) for x, to, pg in zip(given, others, pgs, strict=True)]
    works += [pg.recv([x], to) for x, to, pg in in_another_order(list(zip(taken, others, pgs, strict=True)), 3)]
    for work in works:
        work.wait()
    notes.write(kind="messages", got=[x.item() for x in taken])
    with pytest.raises(ftcomm.MismatchError):
        pgs[1].allreduce([torch.ones(10 + group.replica)]).wait()
    notes.write(kind="sums", got=sums(), expected=expected)

    def on_its_own(number: int) -> None:
        for step in range(50):
            x = torch.full((100,), float(step * 10 + number))
            dist.all_reduce(x, group=pgs[number])
            wrong = x.unique().tolist() != [(step * 10.0 + number) * expected[number]]
            assert not wrong, (number, step, x)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(on_its_own, in_another_order([0, 1, 6], rank % 3)))
    dist.destroy_process_group()


def compiled(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Compiled graphs of collectives, and a compiled module under DDP, with the bits of those that are not compiled. A
    replica is lost in step 2; a graph in which torch has put the size of the group is an error then, until it is made
    anew."""
    from torch.distributed import _functional_collectives as funcol
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")

    def body(x: torch.Tensor) -> torch.Tensor:
        everybody = dist.group.WORLD
        y = funcol.all_reduce((x * 2).sin(), "sum", everybody)
        z = funcol.all_gather_tensor(y, 0, everybody)
        return funcol.reduce_scatter_tensor(z.cos(), "avg", 0, everybody) + y

    def sums(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce((x * 2).sin(), "sum", dist.group.WORLD) + x

    graph, summed = (torch.compile(each, backend="aot_eager", fullgraph=True) for each in (body, sums))
    torch.manual_seed(0)
    alone, module = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    module.load_state_dict(alone.state_dict())
    ddp = [DistributedDataParallel(torch.compile(module, backend="aot_eager")), DistributedDataParallel(alone)]
    for step in ftcomm.steps(4):
        if step == 2 and group.replica == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.arange(6.0) + group.replica + step
        if step == 3:
            try:
                graph(x)
            except Exception as error:
                notes.write(kind="stale", text=f"{type(error).__name__}: {error}")
            torch._dynamo.reset()
        if step != 2:  # in which two calls may have other contributors
            equal(summed(x), sums(x), "a compiled all-reduce")
            equal(graph(x), body(x), "a compiled graph")
        gradients = []
        for each in ddp:
            each.zero_grad()
            each(torch.full((2, 4), group.replica + 1.0)).square().mean().backward()
            gradients.append(each.module.weight.grad.clone())
        if step != 2:
            equal(*gradients, "a compiled module under DDP")
        notes.write(kind="step", step=step, size=dist.get_world_size())
    dist.destroy_process_group()


def as_torch_expects(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """What its compiler, its profiler and its checkpoints ask of a process group and of a Work."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed import _functional_collectives as funcol
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    registered, mark = torch._C._distributed_c10d._get_work_registry_size, Path(arguments["marks"]) / "in-flight"
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        x, y = torch.ones(100_000), torch.ones(3)
        if dist.get_rank() == 0:
            dist.all_reduce(x, async_op=True)  # nobody holds its Work
            assert registered() == 1
            mark.touch()
        else:
            while not mark.exists():
                time.sleep(0.02)
            dist.all_reduce(x, async_op=True)
        torch.ops._c10d_functional.wait_tensor(x)
        equal(x, torch.full_like(x, 2), "wait_tensor of an op in flight")
        assert registered() == 0
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        assert registered() == 0, "who has waited has left its Work behind"
    assert dist.all_reduce(y, async_op=True)._get_sequence_number() > work._get_sequence_number()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(y)
        dist.broadcast(y, 0)
    assert {"ftcomm:all_reduce", "ftcomm:broadcast"} <= {event.name for event in profile.events()}
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    loss = ddp(torch.ones(1, 2)).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    assert "ftcomm:all_reduce" in {event.name for event in profile.events()}
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 1:
        model.weight.data.zero_()
    told = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_state_dict(model, optimizer, model_state_dict=full[0], optim_state_dict=full[1], options=told)
    own, path = dist.new_group(list(range(dist.get_world_size()))), f"{arguments['marks']}/checkpoint"
    saved = dcp.async_save({"w": model.weight.detach().clone()}, checkpoint_id=path, process_group=own)
    for _ in range(20):  # what the training does meanwhile
        dist.all_reduce(y)
    saved.result()
    into = {"w": torch.empty(4, 4)}
    dcp.load(into, checkpoint_id=path)
    equal(into["w"], model.weight.detach(), "what was saved")
    if arguments["splits"]:
        apart = dist.split_group(split_ranks=[[0], [1]])
        dist.all_reduce(z := torch.ones(1), group=apart)
        assert (z.item(), dist.get_world_size(apart)) == (1.0, 1)
    notes.write(kind="done")
    dist.destroy_process_group()


def ranks_across_replicas(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Groups of two of three replicas and of all, in every step of which torch's ranks have to be right."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    world = dist.group.WORLD
    shards, roster = group.shards, group.roster
    both = range(shards)
    wanted: dict[str, tuple[set[int], Any]] = {
        "rows": ({1, 2}, both), "column": ({1, 2}, [group.shard]), "all": ({0, 1, 2}, both), "static": ({1}, both)
    }  # fmt: skip
    pgs: dict[str, Any] = {"world": (world, {0, 1, 2}, both)}
    for name, (replicas, places) in wanted.items():
        ranks = [roster.index(r) * shards + place for r in sorted(replicas) for place in places]
        made = dist.new_group(ranks)
        if group.replica in replicas:
            pgs[name] = made, replicas, places
    for step in steps_until_told(group, arguments, {}):
        for name, (pg, replicas, places) in pgs.items():
            there = [r for r in group.roster if r in replicas]
            ranks = [group.roster.index(r) * shards + place for r in there for place in places]
            me = there.index(group.replica) * len(places) + list(places).index(group.shard)
            assert dist.get_process_group_ranks(pg) == ranks, (name, dist.get_process_group_ranks(pg), ranks)
            assert (dist.get_rank(pg), dist.get_world_size(pg)) == (me, len(ranks)), (name, dist.get_rank(pg), me)
            assert [dist.get_global_rank(pg, i) for i in range(len(ranks))] == ranks, name
            x = torch.tensor([float(group.replica)])
            dist.broadcast(x, src=ranks[-1], group=pg)
            assert x.item() == max(replicas), (name, x)
        notes.write(kind="step", step=step, roster=group.roster, digest="")
        time.sleep(0.01)
    notes.write(kind="final", digest="", contributes=group.contributes)
