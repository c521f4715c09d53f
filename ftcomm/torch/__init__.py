"""ftcomm for torch: a process group for DDP, FSDP2 and HSDP, and gradient buckets without one.

    import torch.distributed as dist

    dist.init_process_group("ftcomm")   # under `ftcomm run`, torchrun or mp.spawn

torch finds the name by an entry point when it is imported. Where that is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0), this
import does the same. Names are imported on first use, since this module runs inside `import torch`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ftcomm.torch.register import autoload

if TYPE_CHECKING:
    from ftcomm.torch.buckets import GradientBuckets
    from ftcomm.torch.hooks import compression_hook
    from ftcomm.torch.mesh import init_device_mesh
    from ftcomm.torch.process_group import FtProcessGroup

_HOME = {
    "FtProcessGroup": "ftcomm.torch.process_group",
    "GradientBuckets": "ftcomm.torch.buckets",
    "init_device_mesh": "ftcomm.torch.mesh",
    "compression_hook": "ftcomm.torch.hooks",
}

__all__ = ["FtProcessGroup", "GradientBuckets", "compression_hook", "init_device_mesh"]

autoload()


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ftcomm.torch' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
