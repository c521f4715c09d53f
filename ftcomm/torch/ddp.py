"""Cuts DDP's buckets once, and alike in every process, whenever that has started.

DDP reduces all gradients in one piece in the first iteration of a process. Then it cuts buckets in the order in which
gradients came, and broadcasts the cuts from rank 0: a collective in the second iteration, and in no other. A replica
that joins a running job has its first and second iterations when the others have their hundredth: its pieces would have
other sizes, and its broadcast no receiver.

So for our groups the order of the parameters alone, from the last to the first, decides the buckets when DDP is made,
and DDP's later cuts are the same again, without a broadcast. Buckets overlap with backward from the first iteration on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

if TYPE_CHECKING:
    from ftcomm.torch.work import FtWork

_CUTS = "_compute_bucket_assignment_by_size"  # (tensors, limits, sparse[, indices]) -> (buckets, limit of each)
_making = threading.local()  # .module: the DDP that this thread makes, if it is on one of our groups
_lock = threading.Lock()
_layouts = "_ftcomm_buckets"  # an attribute of a DDP: the indices of the parameters in each bucket


def adapt(ours: type) -> None:
    """Let every DDP on a group of class `ours` keep its buckets from now on. Idempotent."""
    with _lock:
        original = DistributedDataParallel._ddp_init_helper
        if hasattr(original, "__wrapped__"):
            return

        @functools.wraps(original)
        def init_helper(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            _making.module = self if isinstance(self.process_group, ours) else None
            try:
                return original(self, *args, **kwargs)
            finally:
                _making.module = None

        DistributedDataParallel._ddp_init_helper = init_helper
        setattr(ddp_module.dist, _CUTS, functools.wraps(getattr(dist, _CUTS))(_cutter(getattr(dist, _CUTS))))


def _cutter(cut: Callable[..., Any]) -> Callable[..., Any]:
    def buckets(tensors: list[torch.Tensor], limits: list[int], *rest: Any, **more: Any) -> Any:
        module = getattr(_making, "module", None)
        if module is None or len(rest) > 1 or more:
            return cut(tensors, limits, *rest, **more)
        cap = int(module.bucket_bytes_cap)
        first = min(cap, dist._DEFAULT_FIRST_BUCKET_BYTES)
        backwards = list(reversed(range(len(tensors))))
        cuts, caps = cut([tensors[i] for i in backwards], [first, cap], *(rest or ([],)), backwards)
        setattr(module, _layouts, [list(indices) for indices in cuts])
        return list(reversed(cuts)), list(reversed(caps))  # DDP reverses them again

    return buckets


def kept_buckets(caller: FrameType, tensor: torch.Tensor) -> bool:
    """Whether DDP broadcasts here how it has cut its buckets anew; `broadcast` asks this. Then `tensor` gets our
    buckets.

    DDP broadcasts twice: the indices of all parameters, bucket by bucket, and the number of buckets; then their sizes.
    """
    if caller.f_code.co_name not in ("_pre_forward", "main_hook") or tensor.dtype != torch.int32:
        return False
    module = caller.f_locals["self"]
    buckets = getattr(getattr(module, "ddp", module), _layouts, None)
    if buckets is None:
        return False
    indices = [index for bucket in buckets for index in bucket]
    told = [*indices, len(buckets)] if tensor.numel() == len(indices) + 1 else [len(bucket) for bucket in buckets]
    tensor.copy_(torch.tensor(told, dtype=torch.int32))
    return True


def called_by_ddp() -> FrameType | None:
    """Returns the frame of DDP that has called the current method of a group, if it was DDP."""
    caller = sys._getframe(2)
    return caller if caller.f_globals.get("__name__") == "torch.nn.parallel.distributed" else None


def called_by_autograd() -> bool:
    """Whether DDP's reducer has made the current call of `allreduce`. It is C++, called by the autograd engine, so
    there is no other frame between ours and that of `backward()` (which the threads of devices do not have)."""
    try:
        caller = sys._getframe(2)
    except ValueError:
        return True
    return (caller.f_globals.get("__name__"), caller.f_code.co_name) == ("torch.autograd.graph", "_engine_run_backward")


def raised_by_backward(work: FtWork) -> None:
    """Let `backward` raise the error of an all-reduce of DDP's reducer as it is.

    The future on which the reducer waits could only raise a RuntimeError with its text. So the future gets a value in
    any case, the reducer ends its backward, and then the error is raised, in a callback at the end of backward. The
    reducer adds its own callback after this call; ours adds another one there, which so comes after it.
    """
    queue = Variable._execution_engine.queue_callback
    try:
        queue(lambda: queue(work.raise_error))
    except RuntimeError:  # outside of backward no callback can be added
        return
    work.raised_elsewhere = True
