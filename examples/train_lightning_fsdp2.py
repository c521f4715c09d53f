"""Lightning's Trainer with FSDP2 in replicas of two ranks, that no replica's death stops: a small language model on the
text of Python's library.

    ftcomm run --replicas 2 --ranks-per-replica 2 examples/train_lightning_fsdp2.py --steps 500 --output model

It differs from a script for ModelParallelStrategy in three lines: the import of the strategy, the Trainer's, and the
mesh over which the model is sharded. Kill any rank with `kill -9`: its replica goes with it, is started again, each
rank takes over its shards from the same rank of another replica, and all end with the same bits. Needs
`pip install ftcomm[lightning]`.
"""

from __future__ import annotations

import argparse
import hashlib

import lightning
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset, Subset

from ftcomm.demo.data import library_text
from ftcomm.demo.model import Transformer
from ftcomm.integrations.lightning import ReplicaModelParallelStrategy

CONTEXT = 64  # bytes of a sample


class Text(Dataset[Tensor]):
    """Adjacent pieces of a text, CONTEXT + 1 bytes each."""

    def __init__(self) -> None:
        self.text, _ = library_text()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].astype("int64"))


class Module(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = Transformer(width, context=CONTEXT)

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):  # Lightning may call it again
            return
        mesh = self.device_mesh["replica", "data_parallel"]  # in place of ["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("validation loss", self.model(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--samples", type=int, default=20_000, help="to train on")
    parser.add_argument("--output", default="sharded", help="folder for checkpoints, which all replicas can write to")
    args = parser.parse_args()

    text = Text()
    module = Module(args.width)
    trainer = lightning.Trainer(
        strategy=ReplicaModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        devices=2,
        accelerator="auto",
        max_steps=args.steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        log_every_n_steps=10,
        default_root_dir=args.output,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(Subset(text, range(args.samples)), 8, shuffle=True),
        DataLoader(Subset(text, range(args.samples, args.samples + 64)), 8),
    )
    digest = hashlib.blake2b(digest_size=8)
    for value in module.state_dict().values():
        digest.update(value.full_tensor().cpu().numpy().tobytes())
    print(f"trained {trainer.global_step} steps, weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
