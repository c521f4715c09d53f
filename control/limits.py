"""A job may be as large as this. The module imports nothing, since the options of commands need it."""

from __future__ import annotations

MEMBERS = 16  # replicas of a job: what segments have words for
RANKS = 4096  # of a replica
IN_FLIGHT = 1 << 16  # ops of a group: what an account of a member may tell of
EPOCHS = 1 << 21  # epochs are below it: what words have room for, see ftcomm.kernels.epochs


def beyond(replicas: int, ranks: int) -> str:
    """Why no job can have so many replicas, or ranks in each, and the mend; empty if one can."""
    if replicas > MEMBERS:
        return (
            f"{replicas} replicas; a job has at most {MEMBERS}. Make fewer of more ranks, each with a part of the model"
        )
    if ranks > RANKS:
        return f"{ranks} ranks a replica; at most {RANKS} can be told of. Make more replicas of fewer ranks"
    return ""
