"""Tensors that are spread over the ranks of a replica: rank i takes the part of rank i, with another replica's bits.

The process group is torch's stand-in without peers: nothing here may communicate.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ftcomm.arrays import stage
from ftcomm.errors import StateError
from ftcomm.groups.compare import hashes
from ftcomm.training.replay import Replay
from ftcomm.training.snapshot import Snapshot
from ftcomm.training.spill import Limits
from ftcomm.training.state import allocate, digest, first_difference, flatten, load


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    """Of two ranks, this one the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


class Part(nn.Module):
    def __init__(self, mesh: dist.DeviceMesh, seed: int, shape: tuple[int, int] = (6, 4), dim: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randn(shape, generator=generator)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None))
        self.bias = nn.Parameter(torch.randn(4, generator=generator))


def training(mesh: dist.DeviceMesh, seed: int, **other: object) -> dict[str, object]:
    torch.manual_seed(seed)
    model = Part(mesh, seed, **other)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def step(state: dict[str, object], number: int) -> None:
    """With the gradients that everybody has."""
    generator = torch.Generator().manual_seed(number)
    model = state["model"]
    local = torch.randn(model.weight.to_local().shape, generator=generator)
    model.weight.grad = DTensor.from_local(local, model.weight.device_mesh, model.weight.placements, run_check=False)
    model.bias.grad = torch.randn(4, generator=generator)
    state["optimizer"].step()


def copied(state: dict[str, object]) -> object:
    flat = Snapshot(0, state).flat
    arrived = allocate(flat.skeleton)
    for to, of in zip(arrived.views(), flat.views(), strict=True):
        to[:] = of
    return arrived


@pytest.mark.parametrize("memory", [1 << 20, 0], ids=["memory", "disk"])
def test_a_joiner_ends_with_the_same_parts(mesh: dist.DeviceMesh, memory: int) -> None:
    healthy, joiner = training(mesh, 0), training(mesh, 1)
    step(healthy, 0)
    snapshot = copied(healthy)
    assert first_difference(flatten(joiner).skeleton, snapshot.skeleton) is None
    assert [tuple(tensor.shape) for tensor in snapshot.tensors][:2] == [(3, 4), (4,)], "the whole travels"
    replay = Replay(joiner, Limits(memory=memory, disk=1 << 20))
    for number in (1, 2):
        replay.begin()
        step(healthy, number)
        step(joiner, number)
    replay.load(snapshot)
    replay.apply(2, 0.0)
    replay.restore()
    assert digest(healthy) == digest(joiner)
    assert hashes(healthy) == hashes(joiner)
    moments = joiner["optimizer"].state[joiner["model"].weight]["exp_avg"]
    assert isinstance(moments, DTensor)
    assert moments.placements == joiner["model"].weight.placements
    step(healthy, 3)
    step(joiner, 3)
    assert digest(healthy) == digest(joiner)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"shape": (8, 4)},
            r"model.weight is float32\[3, 4\], a part of \[6, 4\] as .* and float32\[4, 4\], a part of",
        ),
        (
            {"dim": 1},
            r"model.weight is float32\[3, 4\], a part of \[6, 4\] as S\(0\).* and float32\[6, 2\].* as S\(1\)",
        ),
    ],
)
def test_another_shape_or_another_way_to_spread_is_refused(
    mesh: dist.DeviceMesh, other: dict[str, object], words: str
) -> None:
    found = first_difference(flatten(training(mesh, 0, **other)).skeleton, flatten(training(mesh, 0)).skeleton)
    assert found is not None
    import re

    assert re.search(words, found.replace("Shard(dim=0)", "S(0)").replace("Shard(dim=1)", "S(1)")), found


def test_a_plain_tensor_and_a_spread_one_are_different(mesh: dist.DeviceMesh) -> None:
    plain = {
        "model": nn.ParameterDict({"weight": nn.Parameter(torch.zeros(3, 4)), "bias": nn.Parameter(torch.zeros(4))})
    }
    spread = {"model": training(mesh, 0)["model"]}
    assert "and float32[3, 4] here" in str(first_difference(flatten(plain).skeleton, flatten(spread).skeleton))
    with pytest.raises(StateError, match="none here is"):
        load(copied(spread), plain)


def test_an_op_takes_its_part_alone(mesh: dist.DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(ValueError, match=r"to_local\(\)"):
        stage(x)
    assert stage(x.to_local()).flat.shape == (2,)
