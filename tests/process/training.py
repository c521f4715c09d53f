"""A small training whose every step tells who took part in it and what came of it."""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ftcomm
from ftcomm.training.state import digest

from ..torch.bodies import slow_network
from .job import Notes

ELEMENTS = 150_001  # of the op whose values tell who contributed; two chunks


def train(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Replica r contributes 2**r to one op of a step, and gradients of data of its own to the others."""
    torch.set_num_threads(1)
    slow_network(0.02)  # so that a joiner has something to replay
    torch.manual_seed(1 + group.replica if not group.contributes else 0)
    model = torch.nn.Linear(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    tally = np.empty(ELEMENTS, np.float32)
    leave = Path(arguments["marks"]) / f"leave-{group.replica}"
    for step in ftcomm.steps(arguments["steps"], state):
        if leave.exists():
            leave.unlink()
            group.leave()
            notes.write(kind="leaves", step=step)
        before = sorted(group.contributing)
        tally[:] = 2.0**group.replica
        work = group.allreduce(tally, async_op=True)
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1000 * step + group.replica))
        model(x).square().mean().backward()
        for weights in model.parameters():
            group.allreduce(weights.grad, "avg")
        work.wait()
        optimizer.step()
        optimizer.zero_grad()
        spans = work.contributors
        for start, stop, replicas in spans:
            expected = float(sum(2**replica for replica in replicas))
            if (tally[start:stop] != expected).any():
                notes.write(kind="wrong", step=step, got=tally[start:stop].tolist()[:20], expected=expected)
        notes.write(
            kind="step",
            step=step,
            crc=zlib.crc32(tally.view(np.uint8).data),
            spans=[list(span) for span in spans],
            whole=spans[0][0] == 0 and spans[-1][1] == ELEMENTS,
            before=before,
            after=sorted(group.contributing),
            epoch=group.epoch,
            digest=digest(state) if group.contributes else "",
        )
        time.sleep(arguments.get("pace", 0.0))
    notes.write(kind="final", digest=digest(state), contributes=group.contributes, drained=group.drained)
