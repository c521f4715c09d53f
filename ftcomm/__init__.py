"""ftcomm: collectives that outlive their participants.

    import ftcomm

    ftcomm.init()                  # under `ftcomm run`: all from the environment
    for step in ftcomm.steps(100): # membership changes here and nowhere else
        ...
        ftcomm.allreduce(x)        # torch, NumPy, CuPy in place; JAX: a new array

Names are imported on first use, so that `import ftcomm` and the command line stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcomm.calls import Span, Work
    from ftcomm.errors import (
        ArgumentError,
        CollectiveTimeout,
        DivergenceError,
        ExpelledError,
        FtcommError,
        InitError,
        LostError,
        MismatchError,
        SettingsError,
        StateError,
        StepError,
        TransportError,
    )
    from ftcomm.group import Group, allreduce, default_group, init, report, shutdown, verify
    from ftcomm.hsdp.steps import steps

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("Span", "Work"), "ftcomm.calls"),
    **dict.fromkeys(("Group", "allreduce", "default_group", "init", "report", "shutdown", "verify"), "ftcomm.group"),
    **dict.fromkeys(("steps",), "ftcomm.hsdp.steps"),
    **dict.fromkeys(
        (
            "ArgumentError",
            "CollectiveTimeout",
            "DivergenceError",
            "ExpelledError",
            "FtcommError",
            "InitError",
            "LostError",
            "MismatchError",
            "SettingsError",
            "StateError",
            "StepError",
            "TransportError",
        ),
        "ftcomm.errors",
    ),
}

__all__ = [
    "ArgumentError",
    "CollectiveTimeout",
    "DivergenceError",
    "ExpelledError",
    "FtcommError",
    "Group",
    "InitError",
    "LostError",
    "MismatchError",
    "SettingsError",
    "Span",
    "StateError",
    "StepError",
    "TransportError",
    "Work",
    "allreduce",
    "default_group",
    "init",
    "report",
    "shutdown",
    "steps",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ftcomm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
