"""Finds where a rank stands in its job from what launchers say that know nothing of ftcomm: torchrun, mpirun, srun.

They number the ranks of what they start; ranks that follow each other are a replica, FTCOMM_RANKS_PER_REPLICA of them.
What FTCOMM_REPLICA, FTCOMM_REPLICAS and FTCOMM_SHARD say comes first: a launcher for each replica knows the rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ftcomm.errors import SettingsError


class RankVariables(NamedTuple):
    """The variables in which a launcher tells a process its number and how many there are."""

    launcher: str
    rank: str
    size: str


# The first whose variables are set counts: mpirun starts its daemons by srun, and torchrun may be started by any.
NUMBERINGS = (
    RankVariables("torchrun", "RANK", "WORLD_SIZE"),
    RankVariables("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    RankVariables("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    RankVariables("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    RankVariables("srun", "SLURM_PROCID", "SLURM_NTASKS"),
)


def numbered(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns (rank, size) as a launcher has numbered this process; None if none has. Raises `SettingsError`."""
    for launcher, rank, size in NUMBERINGS:
        if rank in env and size in env:
            number, count = env[rank], env[size]
            if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
                raise SettingsError(
                    f"{rank}={number!r} and {size}={count!r}, which {launcher} sets; expected a number from 0 to one "
                    "less than there are ranks. Unset both if they are left over from something else."
                )
            return int(number), int(count)
    return None


def completed(env: Mapping[str, str]) -> Mapping[str, str]:
    """Returns `env` with what it does not say of the place in the job, and a launcher does. Raises `SettingsError`."""
    text = env.get("FTCOMM_RANKS_PER_REPLICA", "1")
    ranks = int(text) if text.isdecimal() else 0  # if it is wrong, whoever reads it says so
    known = "FTCOMM_REPLICA" in env and ("FTCOMM_SHARD" in env or ranks == 1)
    if known or not ranks or (place := numbered(env)) is None:
        return env
    rank, size = place
    told = {"FTCOMM_SHARD": str(rank % ranks)}
    if "FTCOMM_REPLICA" not in env:
        if size % ranks:
            raise SettingsError(
                f"FTCOMM_RANKS_PER_REPLICA={ranks} among {size} ranks: a job is replicas x ranks of each. Start a "
                "multiple of it, or set it to what divides them."
            )
        told |= {"FTCOMM_REPLICA": str(rank // ranks), "FTCOMM_REPLICAS": str(size // ranks)}
    return {**told, **env}
