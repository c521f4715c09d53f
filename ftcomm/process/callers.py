"""Tells which thread of the script a call belongs to that comes in another thread.

On a GPU autograd runs hooks, so what DDP, FSDP and buckets call, in threads of its own. The thread that has called
`backward()` stands there until they are done, so what they call is called by it.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

# .value: this thread gives a future its value, and runs what the script has chained on that. Whether it is this thread
# or the script's own, which has found the future done, is a matter of time.
chained = threading.local()

_BACKWARD = "torch.autograd.graph", "_engine_run_backward"


def foreign() -> bool:
    """Whether Python has not started this thread. Then it belongs to autograd, or to another library in C++."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def in_backward_of(thread: int) -> bool | None:
    """Whether the thread that calls is one of autograd's own, in a backward of `thread`; None if it may be in that of
    another one. Looks at the stacks of all threads, which takes tens of microseconds, if it is one of autograd's."""
    core = sys.modules.get("torch._C")
    in_backward = getattr(core, "_current_graph_task_id", None)  # another thread may be about to import torch
    if in_backward is None or in_backward() == -1 or not foreign():
        return False
    standing = {ident for ident, frame in sys._current_frames().items() if _stands(frame)}
    return (True if len(standing) == 1 else None) if thread in standing else False


def _stands(frame: FrameType | None) -> bool:
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != _BACKWARD:
        frame = frame.f_back
    return frame is not None
