"""A loop of one's own with Accelerate that no replica's death stops: a language model on the text of Python's library.

    ftcomm run --replicas 4 examples/train_accelerate.py --steps 500 --output state

It differs from a script for `accelerate launch` in three lines: where Accelerator comes from, the loop over epochs, and
the number of steps, which a replica that comes back has not counted itself. Kill any replica with `kill -9`, at any
moment: the others finish the step and train on, and the killed one is started again, takes over weights, optimizer and
position, and ends with the same bits. When all are killed, the same command goes on from the last checkpoint. Needs
`pip install ftcomm[hf]`.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from ftcomm.demo.data import library_text
from ftcomm.demo.model import Transformer
from ftcomm.integrations.accelerate import Accelerator

CONTEXT = 64  # bytes of a sample


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
    parser.add_argument("--samples", type=int, default=20_000, help="to train on")
    parser.add_argument("--output", default="state", help="folder for checkpoints, which all replicas can write to")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    text = Text()
    model = Transformer(args.width, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
    loader = DataLoader(Subset(text, range(args.samples)), 8, shuffle=True)
    held_out = DataLoader(Subset(text, range(args.samples, args.samples + 64)), 8)
    model, optimizer, scheduler, loader, held_out = accelerator.prepare(model, optimizer, scheduler, loader, held_out)

    if Path(args.output).exists():
        accelerator.load_state(args.output)

    completed, steps_an_epoch = 0, -(-len(loader) // 2)
    for epoch in accelerator.epochs(-(-args.steps // steps_an_epoch)):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            completed = accelerator.completed_steps
            if accelerator.sync_gradients and completed % 10 == 0:
                accelerator.log({"loss": accelerator.gather(loss.detach()).mean().item()}, step=completed)
            if completed >= args.steps:
                break
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(batch)) for batch in held_out]
        accelerator.print(f"epoch {epoch}, step {completed}, validation loss {torch.stack(losses).mean():.3f}")
        accelerator.save_state(args.output)
    accelerator.end_training()

    digest = hashlib.blake2b(digest_size=8)
    for value in accelerator.unwrap_model(model).state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    print(f"trained {completed} steps, weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
