"""Data-parallel training that no replica's death stops: a small language model on the text of Python's library.

    ftcomm run --replicas 4 examples/train_ddp.py --steps 500 --checkpoints checkpoints

Kill any of them with `kill -9`, at any moment: the others finish the step, with the same bits on all of them, and the
killed one is started again and catches up. No sample is lost or trained twice. When all are killed, the same command,
with as many replicas as you like, goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import ftcomm
from ftcomm.demo.data import library_text
from ftcomm.demo.model import Transformer
from ftcomm.training import Batches, Checkpoints, Loader, StepLoop

CONTEXT, BATCH = 64, 12  # bytes of a sample, samples of a replica's batch


class Text(Dataset[Tensor]):
    """Adjacent pieces of a text, CONTEXT + 1 bytes each."""

    def __init__(self) -> None:
        self.text, _ = library_text()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].astype("int64"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--checkpoints", default="checkpoints", help="folder that all replicas can write to")
    args = parser.parse_args()

    torch.manual_seed(0)  # the same first weights everywhere
    model = Transformer(args.width, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    dataset = Text()

    dist.init_process_group("ftcomm")  # all that it needs comes from `ftcomm run`
    parallel = DistributedDataParallel(model)
    batches = Loader(dataset, Batches(len(dataset), BATCH))
    # What a replica that comes back takes over from the others, and what a checkpoint holds.
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}

    checkpoints = Checkpoints(args.checkpoints, state, every=100)
    loop = StepLoop(state, start=checkpoints.restore())
    for step in loop.steps(args.steps):
        checkpoints.before(step)
        optimizer.zero_grad()
        with loop.guard():  # after an error that may pass all replicas repeat the step
            loss = parallel(next(batches))
            loss.backward()
            optimizer.step()
            scheduler.step()
            ftcomm.report(step=step, loss=loss.item())
    checkpoints.close(loop.step)
    digest = hashlib.blake2b(digest_size=8)
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(f"trained {loop.step} steps, weights {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
