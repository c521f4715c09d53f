"""The place of this host among several that start one job together: torchrun's --nnodes, --node-rank and
--rdzv-endpoint."""

from __future__ import annotations

import dataclasses

from ftcomm.errors import SettingsError

PORT = 29400  # torchrun's, if the endpoint says none
NO_NAME = "none"  # torchrun's, of a job without --rdzv-id


@dataclasses.dataclass(frozen=True)
class NodePlace:
    """Host `rank` of `count`. The launcher of host 0 has the coordinator, at `host`:`port`. `job`: by which name
    the launchers know it."""

    rank: int
    count: int
    host: str
    port: int = PORT
    job: str = NO_NAME  # --rdzv-id

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def check(self, replicas: int) -> None:
        """Raise `SettingsError`, with the mend, if this cannot work for a job of so many replicas."""
        if not 0 <= self.rank < self.count:
            raise SettingsError(f"--node-rank {self.rank}: expected 0 to {self.count - 1}, with --nnodes {self.count}.")
        if replicas % self.count:
            raise SettingsError(
                f"--replicas {replicas} on --nnodes {self.count}: each host starts the same number of replicas, "
                "each with all of its ranks; make it a multiple, or say how many processes a host starts: "
                "--nproc-per-node."
            )
        if not 0 < self.port < 65536:
            raise SettingsError(f"--rdzv-endpoint {self.endpoint}: expected a port from 1 to 65535.")

    def started_here(self, replicas: int) -> range:
        """The replicas that this host starts."""
        each = replicas // self.count
        return range(self.rank * each, (self.rank + 1) * each)

    def node_of(self, replica: int, replicas: int) -> int:
        """The rank of the host that starts a replica."""
        return replica // (replicas // self.count)
