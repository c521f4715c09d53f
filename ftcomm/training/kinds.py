"""Tells what kind an entry of the state is, without importing torch: who holds an object of torch has imported it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import LBFGS, Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel


def is_module(entry: Any) -> TypeGuard[nn.Module]:
    torch = _torch()
    return torch is not None and isinstance(entry, torch.nn.Module)


def is_optimizer(entry: Any) -> TypeGuard[Optimizer]:
    torch = _torch()
    return torch is not None and isinstance(entry, torch.optim.Optimizer)


def is_lbfgs(entry: Any) -> TypeGuard[LBFGS]:
    torch = _torch()
    return torch is not None and isinstance(entry, torch.optim.LBFGS)


def is_scheduler(entry: Any) -> TypeGuard[LRScheduler]:
    torch = _torch()
    return torch is not None and isinstance(entry, torch.optim.lr_scheduler.LRScheduler)


def is_average(entry: Any) -> TypeGuard[AveragedModel]:
    torch = _torch()
    return torch is not None and isinstance(entry, torch.optim.swa_utils.AveragedModel)


def is_scaler(entry: Any) -> TypeGuard[GradScaler]:
    torch = _torch()
    return torch is not None and isinstance(entry, torch.amp.GradScaler)


def _torch() -> Any:
    """Returns torch if it was imported completely: another thread may be at it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "optim") else None
