"""The script of each replica of the demo: data-parallel training of a small language model.

    ftcomm run --replicas 4 -m ftcomm.demo.train --steps 200

Nothing here handles a failure. Kill any replica at any moment: the others finish the all-reduce they are in.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch

import ftcomm
from ftcomm.demo.data import batch, library_text, windows
from ftcomm.demo.model import Transformer
from ftcomm.torch.buckets import GradientBuckets
from ftcomm.training.state import digest

BATCH, CONTEXT = 12, 64  # sequences of a replica a step, bytes of a sequence
BUCKET = 512 << 10  # bytes
HELD_OUT = 48  # sequences for the validation loss, shared out over the replicas


def learning_rate(step: int, total: int, peak: float = 8e-3, warmup: int = 20) -> float:
    return peak * min((step + 1) / warmup, 1) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / total)))


@torch.no_grad()  # type: ignore[untyped-decorator]
def validation_loss(group: ftcomm.Group, model: Transformer, text: np.ndarray) -> float:
    """Each contributing replica takes its share of the same sequences; the all-reduce makes it one number for all."""
    starts = np.linspace(0, len(text) - CONTEXT - 1, HELD_OUT, dtype=np.int64)
    voters = sorted(group.contributing)
    mine = starts[voters.index(group.replica) :: len(voters)] if group.contributes else starts[:1]
    return float(ftcomm.allreduce(model(windows(text, mine, CONTEXT)), op="avg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate-every", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(args.seed)  # the same first weights everywhere
    training_text, held_out_text = library_text()
    model = Transformer(context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model(batch(training_text, args.seed, 0, 0, BATCH, CONTEXT)).backward()  # warm up before others wait for us

    group = ftcomm.init()
    buckets = GradientBuckets(model, bucket_bytes=BUCKET)
    state = {"model": model, "optimizer": optimizer}
    for step in ftcomm.steps(args.steps, state):
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate(step, args.steps)
        loss = model(batch(training_text, args.seed, step, group.replica, BATCH, CONTEXT))
        loss.backward()  # reduces each bucket of gradients as soon as it is full
        buckets.wait()
        optimizer.step()
        buckets.zero_grad()
        ftcomm.report(step=step, loss=loss.item(), tokens=BATCH * CONTEXT, counted=group.contributes)
        if step % args.validate_every == 0 or step == args.steps - 1:
            ftcomm.report(step=step, validation=validation_loss(group, model, held_out_text), counted=group.contributes)
    if not group.drained:
        ftcomm.report(final_hash=digest(state))


if __name__ == "__main__":
    main()
