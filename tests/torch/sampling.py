"""A training whose weights say which samples it was trained on, and how often."""

from __future__ import annotations

from typing import Any

import torch

import ftcomm
from ftcomm.training.data import Batches

from ..process.job import MOST, Notes
from .bodies import slow_network

SAMPLES, SIZE = 61, 4


def train(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Each sample adds one to a weight of its own, by way of a gradient that comes after others, in which a replica may
    die as well."""
    torch.set_num_threads(1)
    slow_network(arguments.get("slow", 0.0))
    seen = torch.nn.Parameter(torch.zeros(SAMPLES))
    optimizer = torch.optim.SGD([seen], lr=1.0)
    batches = Batches(SAMPLES, SIZE, seed=7)
    filler = torch.empty(min(400_000, MOST))  # several chunks
    for step in ftcomm.steps(arguments["steps"], {"optimizer": optimizer, "batches": batches, "seen": Weights(seen)}):
        gradient = -torch.bincount(torch.tensor(batches.samples), minlength=SAMPLES).float()  # one may be in it twice
        first = gradient.clone()
        for reduced in (first, filler.fill_(step), gradient):
            group.allreduce(reduced)
        seen.grad = gradient
        optimizer.step()
        notes.write(kind="step", step=step, digest="")
    notes.write(kind="final", seen=seen.tolist(), state=batches.state_dict(), contributes=group.contributes)


class Weights:
    def __init__(self, values: torch.nn.Parameter) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.data.copy_(state["values"])
