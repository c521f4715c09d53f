"""Gradient buckets: how they are cut and launched, and that the replicas together do what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ftcomm.errors import ArgumentError, FtcommError, MismatchError
from ftcomm.torch.buckets import GradientBuckets

from ..process.job import Job
from . import bodies


class Alone:
    """A group of one member that writes down what is called; `fail` ops raise."""

    def __init__(self, fail=()):
        self.launched, self.waited, self.fail = [], [], fail

    def allreduce(self, x, op, async_op, compression=None):
        assert async_op
        number = len(self.launched)
        self.launched.append((x.numel(), x.dtype, op))

        class Work:
            def wait(work):
                self.waited.append(number)
                if number in self.fail:
                    raise MismatchError(f"op {number}")
                return x

        return Work()


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def grads_of(module, x):
    module.zero_grad()
    module(x).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def test_buckets_are_cut_in_reverse_order_of_the_parameters():
    group = Alone()
    buckets = GradientBuckets(model(), group, bucket_bytes=64 * 4)
    # last layer: bias 2, weight 16, then 8 + 64 -> closed by the weight; first layer: bias 8, weight 32
    assert buckets.sizes == ((2 + 16 + 8 + 64) * 4, (8 + 32) * 4)


def test_gradients_are_those_of_plain_autograd_and_live_in_the_buckets():
    x, module = torch.randn(5, 4), model()
    expected = grads_of(model(), x)
    group = Alone()
    buckets = GradientBuckets(module, group, bucket_bytes=100)
    for _ in range(3):
        module(x).square().sum().backward()
        assert len(group.launched) == len(buckets.sizes), "each bucket is launched by backward, before wait()"
        buckets.wait()
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))
        group.launched.clear()
        buckets.zero_grad()
    flats = {p.grad.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(flats) == len(buckets.sizes)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_optimizers_own_zero_grad_works(set_to_none):
    x, module = torch.randn(5, 4), model()
    expected = grads_of(model(), x)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    buckets = GradientBuckets(module, Alone(), bucket_bytes=100)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        module(x).square().sum().backward()
        buckets.wait()
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), expected, strict=True))


class Branches(nn.Module):
    """Each call uses one of three layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, which):
        return self.layers[which](x)


@pytest.mark.parametrize("clear", ["buckets", "none", "zero"])
def test_parameters_without_a_gradient_contribute_zeros_in_order(clear):
    module, group = Branches(), Alone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    buckets = GradientBuckets(module, group, bucket_bytes=1)
    for which in (0, 2, 1, 0):
        group.launched.clear()
        module(torch.ones(2, 3), which).sum().backward()
        if which == 0:  # the last in backward's order: all before it wait for wait()
            assert group.launched == []
        buckets.wait()
        assert [numel for numel, _, _ in group.launched] == [3, 9] * 3
        for number, layer in enumerate(module.layers):
            assert layer.weight.grad.count_nonzero() == (9 if number == which else 0)
        buckets.zero_grad() if clear == "buckets" else optimizer.zero_grad(set_to_none=clear == "none")


def test_a_bucket_holds_one_dtype():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2), nn.Linear(2, 2))
    module[3].requires_grad_(False)
    group = Alone()
    GradientBuckets(module, group).wait()
    assert group.launched == [(12, torch.float32, "avg"), (6, torch.bfloat16, "avg")]


def test_an_error_is_raised_after_all_ops_have_ended():
    module, group = model(), Alone(fail=(1, 2))
    buckets = GradientBuckets(module, group, bucket_bytes=1)
    module(torch.randn(3, 4)).sum().backward()
    with pytest.raises(MismatchError, match="op 1"):
        buckets.wait()
    assert group.waited == list(range(6))
    group.fail = ()
    buckets.zero_grad()
    module(torch.randn(3, 4)).sum().backward()
    buckets.wait()


def test_two_backwards_without_wait_are_an_error():
    module = model()
    GradientBuckets(module, Alone())
    module(torch.randn(3, 4)).sum().backward()
    with pytest.raises(FtcommError, match=r"twice before GradientBuckets\.wait\(\)"):
        module(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("clear", ["buckets", "none", "zero"])
def test_micro_batches_are_added_up_and_reduced_once(clear):
    module, alone, group = Branches(), Branches(), Alone()
    alone.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    buckets = GradientBuckets(module, group, bucket_bytes=1)
    for micro in ([0, 2, 2], [1, 1], [2, 0, 0]):  # layers, some of them in no backward, or in none that reduces
        group.launched.clear()
        alone.zero_grad()
        for which in micro:
            alone(torch.ones(2, 3), which).sum().backward()
        with buckets.no_sync():
            for which in micro[:-1]:
                module(torch.ones(2, 3), which).sum().backward()
        assert group.launched == []
        module(torch.ones(2, 3), micro[-1]).sum().backward()
        buckets.wait()
        assert len(group.launched) == len(buckets.sizes)
        for param, expected in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.equal(param.grad, torch.zeros_like(param) if expected.grad is None else expected.grad)
        buckets.zero_grad() if clear == "buckets" else optimizer.zero_grad(set_to_none=clear == "none")


def test_a_size_that_makes_no_sense():
    with pytest.raises(ArgumentError, match="bucket_bytes=0"):
        GradientBuckets(model(), Alone(), bucket_bytes=0)


def test_replicas_together_do_what_one_process_does(tmp_path: Path) -> None:
    steps = 12
    with Job(tmp_path, replicas=3, body=bodies.data_parallel, steps=steps) as job:
        for replica in range(3):
            assert job.join(replica) == [0], job.errors()
        got = [note["weights"] for _, _, note in job.notes() if note["kind"] == "final"]
    assert len(got) == 3
    assert got[0] == got[1] == got[2]

    torch.manual_seed(0)
    alone = nn.ModuleDict({"in": nn.Linear(8, 32), "side": nn.Linear(8, 32), "out": nn.Linear(32, 1)}).double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(steps):
        batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        bodies.parallel_loss(alone, batch, step).backward()
        optimizer.step()
    for mine, theirs in zip(alone.parameters(), got[0], strict=True):
        torch.testing.assert_close(mine.flatten(), torch.tensor(theirs, dtype=torch.float64))
