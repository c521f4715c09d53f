"""Hugging Face's Trainer that no replica's death stops: a small GPT-2 on the text of Python's library.

    ftcomm run --replicas 4 examples/train_transformers.py --steps 500 --output gpt2

It differs from a script for one process, or for torchrun, in one line: where Trainer and TrainingArguments come from.
Kill any replica with `kill -9`, at any moment: the others finish the step and train on, and the killed one is started
again, takes over weights, optimizer and position, and ends with the same bits. Needs `pip install ftcomm[hf]`.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel

from ftcomm.demo.data import library_text
from ftcomm.integrations.transformers import Trainer, TrainingArguments

CONTEXT = 64  # bytes of a sample


class Text(Dataset[dict[str, torch.Tensor]]):
    """Adjacent pieces of a text."""

    def __init__(self) -> None:
        self.text, _ = library_text()

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = torch.from_numpy(self.text[index * CONTEXT : (index + 1) * CONTEXT].astype("int64"))
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--samples", type=int, default=20_000, help="to train on")
    parser.add_argument("--output", default="gpt2", help="folder for checkpoints, which all replicas can write to")
    args = parser.parse_args()

    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=args.width, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    text = Text()
    arguments = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Subset(text, range(args.samples)),
        eval_dataset=Subset(text, range(args.samples, args.samples + 64)),
    )
    trainer.train()
    digest = hashlib.blake2b(digest_size=8)
    for value in trainer.model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    print(f"trained {trainer.state.global_step} steps, weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
