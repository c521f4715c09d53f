"""torchtitan's fault-tolerant trainer (`torchtitan.experiments.torchft`), whose replicas reduce by ftcomm.

    from ftcomm.integrations.torchtitan import FaultTolerance   # in place of that of torchtitan

    FaultTolerantTrainer.Config(fault_tolerance=FaultTolerance(enable=True, replica_id=0, group_size=2), ...)

torchtitan drives torchft's Manager, which decides on membership and heals; its groups are of ftcomm by the reconfigure
contract of torch (2.14 and later). torchtitan itself makes a group of "gloo" or "nccl" and knows no other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torchft
from torchft.process_group import ManagedProcessGroup
from torchtitan.experiments.torchft import manager
from torchtitan.experiments.torchft.config import job_config

from ftcomm.torch.reconfigure import ReconfigurableGroup

__all__ = ["FaultTolerance", "TorchFTManager"]


class TorchFTManager(manager.TorchFTManager):  # type: ignore[misc]
    """The manager of torchtitan, with a group of ftcomm. `FaultTolerance.build` makes it."""

    @dataclass(kw_only=True, slots=True)
    class Config(job_config.FaultTolerance):  # type: ignore[misc]
        process_group: str = "ftcomm"

    def __init__(self, config: Config) -> None:
        ours = config.enable and config.process_group == "ftcomm"
        super().__init__(replace(config, enable=False) if ours else config)  # type: ignore[call-arg]
        if not ours:
            return
        seconds = config.process_group_timeout_ms / 1000
        self.use_async_quorum = config.semi_sync_method is None
        self._manager = torchft.Manager(
            pg=ReconfigurableGroup(0, 1, seconds, name=f"torchtitan {config.replica_id}"),
            min_replica_size=config.min_replica_size,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=self.use_async_quorum,
            replica_id=f"torchtitan_ft_{config.replica_id}",
        )
        self.group_size, self.replica_id = config.group_size, config.replica_id
        if self.use_async_quorum:
            self.replicate_pg = ManagedProcessGroup(self._manager)
            self.replicate_pg.register("dp_replicate")


FaultTolerance = TorchFTManager.Config
