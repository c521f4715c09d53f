"""The engines that FTCOMM_ENGINE may name, and what is known of each; `ftcomm.engines.registry` opens them."""

from __future__ import annotations

from typing import NamedTuple

AUTO = "host"  # what "auto" chooses


class EngineKind(NamedTuple):
    runs_ops: bool  # its kernels run ops whole; else this process drives, and at most the sums are theirs
    reducer: str = ""  # the engine with the same kernels that only reduces
    interpreted: bool = False  # by Triton, in place of gpu-..., for tests


KINDS = {
    "host": EngineKind(runs_ops=False),
    "gpu-reduce": EngineKind(runs_ops=False),
    "gpu-kernel": EngineKind(runs_ops=True, reducer="gpu-reduce"),
    "interpreter-reduce": EngineKind(runs_ops=False, interpreted=True),
    "interpreter-kernel": EngineKind(runs_ops=True, reducer="interpreter-reduce", interpreted=True),
}

ENGINES = ("auto", *(name for name, kind in KINDS.items() if not kind.interpreted))  # to be set by users


def engine_kind(name: str) -> EngineKind:
    """Returns the kind of the engine that FTCOMM_ENGINE=`name` chooses. Raises `KeyError` for another name."""
    return KINDS[AUTO if name == "auto" else name]
