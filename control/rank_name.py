"""The words for a rank of a job in log lines, errors and events."""

from __future__ import annotations


def rank_name(replica: object, shard: object) -> str:
    """Names a rank. "rank" with a number stands for its place in a roster, as torchrun and Slurm count, and for nothing
    else."""
    return f"replica {replica} shard {shard}"
