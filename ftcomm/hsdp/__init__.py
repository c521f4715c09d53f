"""Fault-tolerant training: the step loop, catching up, and what goes with them. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcomm.hsdp.checkpoint import Checkpoints
    from ftcomm.hsdp.data import Batches
    from ftcomm.hsdp.loader import Loader
    from ftcomm.hsdp.metrics import Metrics
    from ftcomm.hsdp.rate import scaled
    from ftcomm.hsdp.replica import Replica
    from ftcomm.hsdp.rng import Rng
    from ftcomm.hsdp.steps import steps
    from ftcomm.hsdp.vote import Outcome, Verdict

_HOME = {
    "Batches": "ftcomm.hsdp.data",
    "Checkpoints": "ftcomm.hsdp.checkpoint",
    "Loader": "ftcomm.hsdp.loader",
    "Metrics": "ftcomm.hsdp.metrics",
    "Outcome": "ftcomm.hsdp.vote",
    "Replica": "ftcomm.hsdp.replica",
    "Rng": "ftcomm.hsdp.rng",
    "Verdict": "ftcomm.hsdp.vote",
    "scaled": "ftcomm.hsdp.rate",
    "steps": "ftcomm.hsdp.steps",
}

__all__ = ["Batches", "Checkpoints", "Loader", "Metrics", "Outcome", "Replica", "Rng", "Verdict", "scaled", "steps"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ftcomm.hsdp' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
