"""What the ranks of the tests of DDP run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ftcomm
import ftcomm.errors
import ftcomm.torch
from ftcomm.collective.publisher import Publisher
from ftcomm.training.state import digest
from ftcomm.transport.segment import POSTED

from ..process.job import DEADLINE, Notes

STEPS = 4


class Branches(nn.Module):
    """Every other step leaves one of two branches out."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.left, self.right = nn.Linear(8, 48), nn.Linear(48, 40), nn.Linear(48, 40)
        self.out = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.into(x).tanh()
        return self.out((self.left if step % 2 else self.right)(hidden).tanh())


# how -> (arguments of DDP, gradients are accumulated over two micro-batches, hook)
WAYS: dict[str, tuple[dict[str, Any], bool, Callable[..., Any] | None]] = {
    "plain": ({}, False, None),
    "no_sync": ({}, True, None),
    "static_graph": ({"static_graph": True}, False, None),
    "bucket_view": ({"gradient_as_bucket_view": True}, False, None),
    "unused": ({"find_unused_parameters": True}, False, None),
    "hook": ({}, False, default_hooks.allreduce_hook),
    "fp16_hook": ({"gradient_as_bucket_view": True}, True, default_hooks.fp16_compress_hook),
}


def train(way: str) -> str:
    """The digest of the weights and the last gradients."""
    arguments, accumulate, hook = WAYS[way]
    torch.manual_seed(dist.get_rank())  # DDP takes the weights of rank 0 everywhere
    model = Branches()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004, **arguments)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        which = step if way == "unused" else 0
        if accumulate:
            with ddp.no_sync():
                ddp(torch.randn(4, 8, generator=generator), which).square().mean().backward()
        out = ddp(torch.randn(4, 8, generator=generator), which)
        if way not in ("unused", "static_graph"):
            out = out + 0 * model.left(model.into(torch.zeros(1, 8))).sum()
        out.square().mean().backward()
        optimizer.step()
    parts = [p.detach().numpy().tobytes() for p in model.parameters()]
    parts += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def raises_in_backward() -> tuple[list[str], float]:
    """What a backward says that an error of the model breaks off, and the next two; and the gradient when the model is
    wrapped again."""
    model = Branches()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)

    def fail(*_: object) -> None:
        raise ValueError("of the model")

    said = []
    handle = model.into.register_full_backward_hook(fail)
    for _ in range(3):
        try:
            ddp(torch.ones(4, 8), 0).sum().backward()
        except (ValueError, RuntimeError) as error:
            said.append(str(error).split(".")[0])
        handle.remove()
    del ddp
    ddp = DistributedDataParallel(model)
    model.zero_grad()
    ddp(torch.ones(4, 8), 0)[:, 0].sum().backward()
    return said, float(model.out.bias.grad[0])


def beside_gloo(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """All ways of using DDP, by gloo and by us."""
    torch.set_num_threads(1)
    where = f"file://{arguments['marks']}/gloo"
    dist.init_process_group("gloo", init_method=where, rank=group.replica, world_size=len(group.members))
    for way in WAYS:
        notes.write(kind="digest", by="gloo", way=way, digest=train(way))
    notes.write(kind="raised", said=raises_in_backward())
    dist.destroy_process_group()
    dist.init_process_group("ftcomm")
    for way in WAYS:
        notes.write(kind="digest", by="ftcomm", way=way, digest=train(way))
    notes.write(kind="raised", said=raises_in_backward())
    dist.barrier()


def one_dies(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Replica r has the gradient 2**r everywhere, in one large bucket; one dies when it has posted a part of it."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    model = nn.Linear(arguments["elements"], 1, bias=False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1000)
    if arguments["wire"] is not None:
        ddp.register_comm_hook(None, ftcomm.torch.compression_hook(arguments["wire"]))
    posted = [0]
    publish = Publisher.publish

    def dying(self: Publisher, word: int, count: int, **more: bool) -> Any:
        posted[0] += word == POSTED
        if posted[0] > 3:
            while not self.taken_by_all.is_open(count - 3):  # else nobody need have taken anything of it
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(self, word, count, **more)

    for step in ftcomm.steps(arguments["steps"]):
        if step == 2 and group.replica == arguments["victim"]:
            Publisher.publish = dying
        model.weight.grad = None
        size = dist.get_world_size()
        (ddp(torch.ones(1, arguments["elements"])).sum() * 2.0**group.replica).backward()
        values = model.weight.grad.unique().tolist()
        notes.write(kind="step", step=step, size=size, rank=dist.get_rank(), values=values)


class Counting(nn.Module):
    """Its buffer, which DDP broadcasts from rank 0 in each forward, takes part in what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 400), nn.Linear(400, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.out(self.into(x * (1 + 1 / self.calls)).tanh())


def wait_for_go(notes: Notes, arguments: dict[str, Any]) -> None:
    """A joiner has come to the end of what it does before its loop."""
    notes.write(kind="wrapped")
    end = time.monotonic() + DEADLINE
    while not (Path(arguments["marks"]) / "go").exists() and time.monotonic() < end:
        time.sleep(0.01)


def train_with_ddp(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """A script as people write them: a replica that joins runs it from the top."""
    torch.set_num_threads(1)
    torch.manual_seed(
        100 * (not group.contributes) + group.replica
    )  # DDP takes the weights of rank 0, a joiner those of the others
    dist.init_process_group("ftcomm")
    model = Counting()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.005)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, "ready")
    assert said == ["ready"] * dist.get_world_size()
    dist.barrier()
    if not group.contributes:
        wait_for_go(notes, arguments)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    for step in ftcomm.steps(arguments["steps"], state):
        generator = torch.Generator().manual_seed(1000 * step + group.replica)
        optimizer.zero_grad()
        ddp(torch.randn(2, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        if group.contributes and model.calls != step + 1:
            notes.write(kind="stale", step=step, calls=model.calls.item())
        notes.write(kind="step", step=step, digest=digest(state) if group.contributes else "")
    sizes = ddp._get_ddp_logging_data()
    notes.write(kind="final", digest=digest(state), contributes=group.contributes)
    notes.write(kind="buckets", made=sizes["bucket_sizes"], again=sizes.get("rebuilt_bucket_sizes"))


def backward(ddp: nn.Module) -> float:
    """A gradient of DDP: that of the last input, 1 + the replica, over all who contribute."""
    ddp.zero_grad(set_to_none=True)
    ddp(torch.full((1, 1000), 1.0 + dist.get_rank())).sum().backward()
    return float(ddp.module.weight.grad.mean())


def fails(ddp: nn.Module, notes: Notes, what: str) -> None:
    try:
        notes.write(kind="returned", what=what, gradient=backward(ddp))
    except Exception as error:
        notes.write(kind="raised", what=what, type=type(error).__name__, text=str(error))


def failing_ops(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Gradients are sparse; replica 1 calls something else than DDP's all-reduce, and both go on; in the end it comes
    late."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    sparse = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    try:
        sparse(torch.tensor([group.replica, 3])).sum().backward()
    except ftcomm.ArgumentError as error:
        notes.write(kind="sparse", text=str(error))
    ddps = {"plain": DistributedDataParallel(nn.Linear(1000, 100)), "hook": DistributedDataParallel(nn.Linear(1000, 9))}
    ddps["hook"].register_comm_hook(None, default_hooks.allreduce_hook)
    for way, ddp in ddps.items():
        if group.replica == 0:
            fails(ddp, notes, f"{way}, other calls")
        else:
            with contextlib.suppress(ftcomm.MismatchError):
                dist.all_reduce(torch.ones(3))
        notes.write(kind="after", gradient=backward(ddp))
    way, late = arguments["late"], Path(arguments["marks"]) / "late"
    if group.replica == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=0.2))
        for what in ("late", "again"):
            fails(ddps[way], notes, f"{way}, {what}")
        late.touch()
    else:
        while not late.exists():
            time.sleep(0.005)
        backward(ddps[way])


def stopped_in_backward(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Replica 1 stops right before the all-reduce of a gradient."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    model = nn.Linear(1000, 100)
    ddp = DistributedDataParallel(model)
    for step in ftcomm.steps(10**9):
        if group.replica == 1 and step == 3:
            model.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGSTOP))
        backward(ddp)


def group_that_ends(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """The group ends with an error when the all-reduce of DDP has begun."""
    torch.set_num_threads(1)
    dist.init_process_group("ftcomm")
    ddp = DistributedDataParallel(nn.Linear(1000, 100))
    exchange = group.internals.exchange
    submit = exchange.submit

    def submit_and_fail(op: Any) -> None:
        submit(op)
        exchange.fail(getattr(ftcomm.errors, arguments["error"])("that is it"))

    if group.replica == 0:
        exchange.submit = submit_and_fail
        fails(ddp, notes, "the end")
        (Path(arguments["marks"]) / "seen").touch()
    while not (Path(arguments["marks"]) / "seen").exists():
        time.sleep(0.005)
