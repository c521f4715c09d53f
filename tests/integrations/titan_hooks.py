"""A replica of torchtitan's fault-tolerance hooks on CPUs: its manager, optimizer, checkpoint manager and the hook that
it puts into FSDP2's modules, with torchft's lighthouse, around a loop as that of its trainer."""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

from ftcomm.integrations.torchtitan import FaultTolerance

AFTER = 12  # steps of both, after one has come back


class Progress:
    """What a trainer of torchtitan counts."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main(replica: int, returned: bool, folder: str) -> None:
    """Trains until who has come back has made `AFTER` steps with the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(replica)  # who begins with other weights takes those of the others
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh)
    hooks = FaultTolerance(enable=True, replica_id=replica, group_size=2, process_group_timeout_ms=60_000).build()
    hooks.maybe_set_all_reduce_hook([model])
    optimizers = TorchFTOptimizersContainer.Config(param_groups=default_adamw(lr=1e-2).param_groups).build(
        model_parts=[model], ft_manager=hooks
    )
    # A constant rate: the state of torchtitan's optimizer holds that of the beginning, with which who comes back would
    # make its first step, with a group of gloo too.
    schedule = LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0)
    schedulers = schedule.build(optimizers=optimizers, training_steps=1000)
    progress = Progress()
    TorchFTCheckpointManager(
        TorchFTCheckpointManager.Config(enable=True, folder=folder, enable_ft_dataloader_checkpoints=False),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        ft_manager=hooks,
    )
    together, over = 0, torch.zeros(1)
    while not over.item():
        optimizers.zero_grad()
        generator = torch.Generator().manual_seed(1000 * hooks.manager.current_step() + 10 * replica + dist.get_rank())
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizers.step()
        schedulers.step()
        progress.step += 1
        together += hooks.manager.num_participants() == 2
        over = torch.full((1,), float(returned and together >= AFTER))
        dist.all_reduce(over, group=hooks.loss_sync_pg)  # as the trainer reduces a loss that it logs
        print(f"step {hooks.manager.current_step()} of {hooks.manager.num_participants()}", flush=True)
        time.sleep(0.02)
    weights = b"".join(each.full_tensor().detach().numpy().tobytes() for each in model.parameters())
    print(f"weights {hashlib.blake2b(weights, digest_size=8).hexdigest()}", flush=True)
    hooks.manager.shutdown()
    os._exit(0)  # torchft's threads would be waited for


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "returned", sys.argv[3])
