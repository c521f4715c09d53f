"""The variables that torchrun sets for each rank, as `ftcomm run` sets them: scripts and trainers that ask the
environment who they are, and whether there is a launcher, find the same here."""

from __future__ import annotations

from collections.abc import Mapping

from ftcomm.launch.options import RunOptions
from ftcomm.settings import split_endpoint

# Of a launcher around this one, which its ranks must not take for theirs. What is set below replaces the rest.
OUTER = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_RESTART_COUNT")


def of_job(options: RunOptions, job: str, store: str) -> dict[str, str]:
    """Returns the variables that all ranks have alike. `store`: host:port of torch's store."""
    host, port = split_endpoint(store, "FTCOMM_STORE")
    size, node = str(options.replicas * options.ranks_per_replica), options.node
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(len(options.started_here) * options.ranks_per_replica),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "GROUP_RANK": str(0 if node is None else node.rank),
        "GROUP_WORLD_SIZE": str(1 if node is None else node.count),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # so no other store is served at that address
    }


def of_rank(options: RunOptions, replica: int, rank: int, restarts: int) -> Mapping[str, str]:
    """Returns the variables of one rank alone. `restarts`: of its replica up to now."""
    place = replica * options.ranks_per_replica + rank
    return {
        "RANK": str(place),
        "LOCAL_RANK": str(place - options.started_here.start * options.ranks_per_replica),
        "ROLE_RANK": str(place),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }
