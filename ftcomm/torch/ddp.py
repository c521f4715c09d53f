"""DDP's buckets, cut once and alike in every process, whenever it has started.

DDP reduces all gradients in one piece in the first iteration of a process. Then it cuts buckets in the order in which
gradients came, and broadcasts from rank 0 how: a collective in the second iteration, and in no other. A replica that
joins a running job has its first and second iterations when the others have their hundredth: its pieces would have
other sizes, and the broadcast nobody to answer.

So for our groups the buckets are cut by the parameters' order alone, from the last to the first, when DDP is made, and
what DDP cuts later is the same again, without a broadcast. Buckets overlap with backward from the first iteration on.
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
_layouts = "_ftcomm_buckets"  # attribute of a DDP: its buckets, lists of indices of parameters, in their order


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
    """Called by `broadcast`: does DDP tell how it has cut its buckets anew? Then `tensor` becomes what they are.

    It broadcasts twice: the indices of all parameters, bucket by bucket, and the number of buckets; then their sizes.
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
    """The frame of DDP that has called the method of a group in which this is asked, if it was DDP."""
    caller = sys._getframe(2)
    return caller if caller.f_globals.get("__name__") == "torch.nn.parallel.distributed" else None


def called_by_autograd() -> bool:
    """Is the call of `allreduce` in which this is asked one of DDP's reducer? It is C++, called by the autograd engine,
    so between our frame and that of `backward()` (which the threads of devices do not have) there is no other."""
    try:
        caller = sys._getframe(2)
    except ValueError:
        return True
    return (caller.f_globals.get("__name__"), caller.f_code.co_name) == ("torch.autograd.graph", "_engine_run_backward")


def raised_by_backward(work: FtWork) -> None:
    """Let `backward` raise the error of an all-reduce of DDP's reducer as it is.

    In the future on which the reducer waits it could only be a RuntimeError with its text. So the future has a value in
    any case, the reducer ends its backward, and the error is raised after that. It does so in a callback at the end of
    backward, which it adds after this call; ours adds another one, and so comes after it.
    """
    queue = Variable._execution_engine.queue_callback
    try:
        queue(lambda: queue(work.raise_error))
    except RuntimeError:  # this is no backward: a callback can be added in one alone
        return
    work.raised_elsewhere = True
