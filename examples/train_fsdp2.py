"""FSDP2 in each replica, and replicas that may die: a small Llama-shaped model, sharded in two, two times over.

    ftcomm run --replicas 2 --ranks-per-replica 2 examples/train_fsdp2.py --steps 500

Kill any rank with `kill -9`: its replica goes with it, is started again and catches up, each rank from the same rank of
the other replica, while that trains on.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import ftcomm
from ftcomm.demo.data import library_text
from ftcomm.demo.llama import Llama
from ftcomm.torch import init_device_mesh
from ftcomm.training import Batches, Checkpoints, Loader, StepLoop

CONTEXT, BATCH = 64, 6  # bytes of a sample, samples of a rank's batch


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
    parser.add_argument("--checkpoints", default="shards", help="folder that all replicas can write to")
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
    loop = StepLoop(state, start=checkpoints.restore())
    for step in loop.steps(args.steps):
        checkpoints.before(step)
        optimizer.zero_grad()
        with loop.guard():  # after an error that may pass all replicas repeat the step
            loss = model(next(batches))
            loss.backward()
            optimizer.step()
            ftcomm.report(step=step, loss=loss.item())
    checkpoints.close(loop.step)
    digest = hashlib.blake2b(digest_size=8)
    for value in model.state_dict().values():
        digest.update(value.full_tensor().numpy().tobytes())
    print(f"trained {loop.step} steps, weights {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
