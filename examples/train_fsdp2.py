"""FSDP2 in each replica, and replicas that may die: a small Llama-shaped model, sharded in two, two times over.

    ftcomm run --replicas 2 --ranks-per-replica 2 examples/train_fsdp2.py --steps 500

Kill any rank with `kill -9`: its replica goes with it, is started again and catches up, each rank from the same rank of
the other replica, while that trains on.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import ftcomm
from ftcomm.demo.data import library_text
from ftcomm.hsdp import Batches, Checkpoints, Loader, Replica
from ftcomm.torch import init_device_mesh

CONTEXT, BATCH = 64, 6  # bytes of a sample, samples of a rank's batch


class Block(nn.Module):
    """Pre-norm, rotary attention, SwiGLU."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor) -> Tensor:  # [batch, heads, time, size]
    time, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.outer(torch.arange(time), 10_000.0 ** (-torch.arange(half) / half))
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Llama(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:  # int64 [batch, time + 1] -> nats a byte
        x = self.byte(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


class Text(Dataset[Tensor]):
    def __init__(self) -> None:
        self.text, _ = library_text()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].astype("int64"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--checkpoints", default="checkpoints", help="folder that all replicas can write to")
    args = parser.parse_args()

    torch.manual_seed(0)  # the same first weights everywhere
    model = Llama(args.width, args.layers)
    dataset = Text()
    # The first dimension survives the loss of replicas, the second is the ranks of this one.
    mesh = init_device_mesh("cpu", mesh_dim_names=("replicate", "shard"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Loader(dataset, Batches(len(dataset), BATCH))  # every rank has a part of the samples of its own
    state = {"model": model, "optimizer": optimizer, "batches": batches}

    checkpoints = Checkpoints(args.checkpoints, state, every=100)
    replica = Replica(state, start=checkpoints.restore())
    for step in replica.steps(args.steps):
        checkpoints.before(step)
        optimizer.zero_grad()
        with replica.guard():  # after an error that may pass all replicas repeat the step
            loss = model(next(batches))
            loss.backward()
            optimizer.step()
            ftcomm.report(step=step, loss=loss.item())
    checkpoints.close(replica.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
