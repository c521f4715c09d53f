"""A communication hook that compresses DDP's gradients between replicas."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook as objects.

from collections.abc import Callable

import torch
import torch.distributed as dist

from ftcomm.errors import ArgumentError
from ftcomm.kernels.call_codes import COMPRESSIONS
from ftcomm.torch.process_group import FtProcessGroup


def compression_hook(
    compression: str,
) -> Callable[[dist.ProcessGroup | None, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """Makes a hook that averages gradients over the contributors, as DDP does without one, in the form `compression`.

        model.register_comm_hook(None, ftcomm.torch.compression_hook("fp8"))

    The state that is registered with it is the process group of the DDP, one of "ftcomm"; None: the default one. The
    forms are those of `ftcomm.Group.allreduce`, the same on all ranks. With several ranks to a replica it applies
    between replicas. Raises `ArgumentError` for another form, and in backward for another group.
    """
    if compression not in COMPRESSIONS:
        raise ArgumentError(f"compression={compression!r} is not known; use one of {', '.join(COMPRESSIONS)}.")

    def average(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        group = dist.group.WORLD if state is None else state
        if not isinstance(group, FtProcessGroup):
            raise ArgumentError(
                f"compression_hook of a process group of {group.name()!r}; register it with one of 'ftcomm' as its "
                "state, or make the default group one: dist.init_process_group('ftcomm')"
            )
        buffer = bucket.buffer()
        future = group.average(buffer, compression).get_future()
        made: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
        return made

    return average
