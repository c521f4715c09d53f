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
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcomm.errors import (
        ArgumentError,
        CollectiveTimeout,
        DivergenceError,
        FtcommError,
        InitError,
        LostError,
        MismatchError,
        RemovedError,
        SettingsError,
        StateError,
        StepError,
        TooLateError,
        TransportError,
    )
    from ftcomm.groups.calls import Span, Work
    from ftcomm.groups.default_group import (
        allgather,
        allreduce,
        alltoall,
        barrier,
        broadcast,
        default_group,
        gather,
        init,
        recv,
        reduce,
        reduce_scatter,
        report,
        scatter,
        send,
        shutdown,
        verify,
    )
    from ftcomm.groups.group import Group
    from ftcomm.groups.static_endpoint import Endpoint
    from ftcomm.groups.static_group import StaticGroup
    from ftcomm.groups.subgroup import Subgroup
    from ftcomm.p2p.calls import MessageWork
    from ftcomm.settings import Settings
    from ftcomm.training.steps import steps

# One thread's stores become visible to another in their order because of the interpreter lock.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "ftcomm needs the interpreter lock, which this free-threaded Python runs without; set PYTHON_GIL=1, or use the "
        "usual build of Python"
    )

__version__ = "0.2.0"

_HOME = {
    **dict.fromkeys(("Span", "Work"), "ftcomm.groups.calls"),
    "Endpoint": "ftcomm.groups.static_endpoint",
    "Group": "ftcomm.groups.group",
    "MessageWork": "ftcomm.p2p.calls",
    "Settings": "ftcomm.settings",
    "StaticGroup": "ftcomm.groups.static_group",
    "Subgroup": "ftcomm.groups.subgroup",
    **dict.fromkeys(("default_group", "init", "report", "shutdown", "verify"), "ftcomm.groups.default_group"),
    **dict.fromkeys(
        ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "reduce", "gather", "scatter", "barrier"),
        "ftcomm.groups.default_group",
    ),
    **dict.fromkeys(("send", "recv"), "ftcomm.groups.default_group"),
    **dict.fromkeys(("steps",), "ftcomm.training.steps"),
    **dict.fromkeys(
        (
            "ArgumentError",
            "CollectiveTimeout",
            "DivergenceError",
            "FtcommError",
            "InitError",
            "LostError",
            "MismatchError",
            "RemovedError",
            "SettingsError",
            "StateError",
            "StepError",
            "TooLateError",
            "TransportError",
        ),
        "ftcomm.errors",
    ),
}

__all__ = [
    "ArgumentError",
    "CollectiveTimeout",
    "DivergenceError",
    "Endpoint",
    "FtcommError",
    "Group",
    "InitError",
    "LostError",
    "MessageWork",
    "MismatchError",
    "RemovedError",
    "Settings",
    "SettingsError",
    "Span",
    "StateError",
    "StaticGroup",
    "StepError",
    "Subgroup",
    "TooLateError",
    "TransportError",
    "Work",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "default_group",
    "gather",
    "init",
    "recv",
    "reduce",
    "reduce_scatter",
    "report",
    "scatter",
    "send",
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
