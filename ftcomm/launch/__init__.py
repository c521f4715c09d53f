"""`ftcomm run`: the processes of a job on this machine, and its coordinator.

The package is light to import: `Launcher` and `RunOptions` are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcomm.launch.options import RunOptions
    from ftcomm.launch.run import Launcher

__all__ = ["Launcher", "RunOptions"]


def __getattr__(name: str) -> Any:
    if name == "Launcher":
        from ftcomm.launch.run import Launcher

        return Launcher
    if name == "RunOptions":
        from ftcomm.launch.options import RunOptions

        return RunOptions
    raise AttributeError(f"module 'ftcomm.launch' has no attribute {name!r}")
