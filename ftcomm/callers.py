"""Whose call it is that comes in a thread which the script has not started.

On a GPU autograd runs hooks, so what DDP, FSDP and buckets call, in threads of its own. The thread that has called
`backward()` stands there until they are done, so what they call is called by it.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

_BACKWARD = "torch.autograd.graph", "_engine_run_backward"


def foreign() -> bool:
    """Has Python not started this thread? Then it belongs to autograd, or to another library in C++."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def of_autograd() -> bool:
    """Is this thread one of autograd's own, and in a backward?"""
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1 and foreign()


def in_backward() -> set[int]:
    """The threads that stand in a `backward()` now. It looks at the stacks of all threads: tens of microseconds."""
    return {thread for thread, frame in sys._current_frames().items() if _stands(frame)}


def _stands(frame: FrameType | None) -> bool:
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != _BACKWARD:
        frame = frame.f_back
    return frame is not None
