"""The limits on the size of a job. This module imports nothing, since the options of commands need it."""

from __future__ import annotations

MEMBERS = 1024  # replicas of a job, and members of any other group
KERNEL_MEMBERS = 16  # those of a job whose kernels run whole ops (ftcomm.kernels.device.words)
RANKS = 1 << 16  # ranks of a replica
IN_FLIGHT = 1 << 16  # ops of a group that one message may describe
EPOCHS = 1 << 21  # all epochs are below, so that words hold them (ftcomm.kernels.epochs)


def beyond(replicas: int, ranks: int) -> str:
    """Returns why no job can have so many replicas, or ranks in each, and the mend; empty if one can."""
    if replicas > MEMBERS:
        return (
            f"{replicas} replicas; a job has at most {MEMBERS}. Make fewer of more ranks, each with a part of the model"
        )
    if ranks > RANKS:
        return f"{ranks} ranks a replica; at most {RANKS} can be told of. Make more replicas of fewer ranks"
    return ""
