"""Fault-tolerant training: the step loop, catching up, and what goes with them. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcomm.training.checkpoint import Checkpoints
    from ftcomm.training.data import Batches
    from ftcomm.training.loader import Loader
    from ftcomm.training.lr_scaling import scaled
    from ftcomm.training.metrics import Metrics
    from ftcomm.training.rng import Rng
    from ftcomm.training.step_loop import StepLoop
    from ftcomm.training.vote import Outcome, StepDecision

_HOME = {
    "Batches": "ftcomm.training.data",
    "Checkpoints": "ftcomm.training.checkpoint",
    "Loader": "ftcomm.training.loader",
    "Metrics": "ftcomm.training.metrics",
    "Outcome": "ftcomm.training.vote",
    "StepLoop": "ftcomm.training.step_loop",
    "Rng": "ftcomm.training.rng",
    "StepDecision": "ftcomm.training.vote",
    "scaled": "ftcomm.training.lr_scaling",
}

__all__ = ["Batches", "Checkpoints", "Loader", "Metrics", "Outcome", "Rng", "StepDecision", "StepLoop", "scaled"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ftcomm.training' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
