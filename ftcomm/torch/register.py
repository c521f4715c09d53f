"""Makes the name "ftcomm" known to torch.distributed, without an import by the user.

torch calls `autoload` at the end of its own import (entry-point group `torch.backends`), and torch >= 2.14 calls
`register` for a backend that it does not know (`torch.distributed.backends`). The first is needed on all versions:
torch meets its peers before it looks for the backend, and under `ftcomm run` ftcomm has to do that.

Every program that imports torch where ftcomm is installed runs this, so it imports nothing but torch itself.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

NAME = "ftcomm"


def autoload() -> None:
    """Register the backend at the end of `import torch`. Raises nothing, or torch could not be imported."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"ftcomm could not register its process group with this torch: {error!r}", stacklevel=2)


def register() -> None:
    """Make "ftcomm" known to torch.distributed, for cpu and cuda tensors; idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    # A function of torch.distributed has the name of the module.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    torchs = handlers["env"]

    def ours(url: str, **options: Any) -> Any:
        from ftcomm.torch.rendezvous import env_rendezvous

        return env_rendezvous(url, torchs, options)

    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    handlers["env"] = ours


def _create(options: Any, backend_options: Any) -> Any:
    from ftcomm.torch.create import create

    return create(options, backend_options)
