"""A replica as a world of its own, for libraries that know a world of ranks and its collectives.

The world of torch, which a trainer sees, is this replica alone. So whatever the library gathers, broadcasts or waits
for stays within the replica, and cannot fail because another one is lost. Between replicas there are only the gradients
of DDP and the few values of `StepExchange`: reductions, which a loss does not end.

                      the library's world          between replicas
    rank, world size  0 of 1                       where the replica is in the roster, which changes at boundaries
    collectives       gloo or NCCL, of one rank    all-reduce of gradients, losses and decisions
    main process      -                            the lowest replica that contributes
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.constants import default_pg_timeout

from ftcomm.errors import InitError
from ftcomm.torch import replicas
from ftcomm.torch.own_world import own_world, usual_backend

if TYPE_CHECKING:
    from ftcomm.groups.group import Group
    from ftcomm.training import StepLoop

log = logging.getLogger("ftcomm")


def join(timeout: timedelta = default_pg_timeout, *, several: bool = False) -> Group:
    """Join the job as a replica of one rank, or of `several`, and make the world of torch that of this replica alone;
    idempotent.

    Works under `ftcomm run`, torchrun, and wherever `dist.init_process_group("ftcomm")` does; call it instead of that,
    before the library looks at the environment. Blocks like `ftcomm.init`. Raises `InitError` if the process has a
    process group already, or the replica more ranks than one.
    """
    group = own_world(usual_backend(), timeout)
    if group.shards > 1 and not several:
        raise InitError(
            f"replica {group.replica} has {group.shards} ranks; trainers of other libraries are replicas of one rank, "
            "but for ReplicaModelParallelStrategy of Lightning. Leave out --ranks-per-replica, or train with "
            "ftcomm.training (docs/training.md)."
        )
    return group


class StepExchange:
    """The values that replicas of a training tell each other besides gradients. Not thread-safe.

    Every replica of the job makes the same calls in the same order. Before its first step, and after its last, a
    replica is alone: a call returns what it has given.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.loop: StepLoop | None = None
        self._contributed: frozenset[int] = frozenset()  # in the step before this one
        self.newcomers: frozenset[int] = frozenset()  # those that contribute from this step on
        self.joined_late = group.internals.outside

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin(self, loop: StepLoop, total: int | None) -> int | None:
        """Begin the next step of `loop`: see `StepLoop.begin`."""
        self.loop = None
        step = loop.begin(total)
        if step is None:
            return None
        self.loop = loop
        now = frozenset(self.group.contributors)
        self.newcomers = now - self._contributed if self._contributed else frozenset()
        self._contributed = now
        return step

    @property
    def stepping(self) -> bool:
        """Whether a step is under way, in which the others answer."""
        return self.loop is not None

    @property
    def contributes(self) -> bool:
        return self.group.replica in self._contributed

    @property
    def place(self) -> int:
        """Says which number this replica has among those that contribute, and a higher one if it does not: 0 writes
        checkpoints and logs."""
        group = self.group
        contributors = self._contributed or frozenset(() if self.joined_late else group.contributors)
        if group.replica in contributors:
            return sorted(contributors).index(group.replica)
        return len(contributors) + 1 + group.replica

    @property
    def waits_for_state(self) -> bool:
        """Whether a replica catches up in this step; the same on all."""
        return len(self.group.roster) > len(self._contributed)

    # -- values ------------------------------------------------------------------------------------------------------

    def sums(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of each value over the replicas that contribute. Those that catch up get it, and give
        nothing."""
        return self._reduce(values, "sum")

    def means(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, "avg")

    def largest(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, "max")

    def _reduce(self, values: Sequence[float], op: str) -> list[float]:
        if not self.stepping or not values:
            return list(values)
        array = np.array(values, np.float64)
        self.group.allreduce(array, op)
        return [float(value) for value in array]

    def mean_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `metrics` with the mean of each number over the replicas that contribute; the same on all."""
        names = sorted(name for name, value in metrics.items() if isinstance(value, (int, float, np.number)))
        means = dict(zip(names, self.means([float(metrics[name]) for name in names]), strict=True))
        return {name: means.get(name, value) for name, value in metrics.items()}

    def told(self, fields: Mapping[str, Any], *, of_old: bool) -> dict[str, Any]:
        """Returns the plain `fields` of the lowest replica that contributes; with `of_old` of those that contributed
        before this step. If it is lost meanwhile, the next one's count."""
        group = self.group
        text = json.dumps(fields, default=float).encode()
        # Each says whether it is able: a replica in its first step does not know for which others this is the first.
        able = self.contributes and not (of_old and group.replica in self.newcomers)
        length, lowest = self.largest([len(text), float(able) * (group.replicas - group.replica)])
        buffer = torch.frombuffer(bytearray(text[: int(length)].ljust(int(length))), dtype=torch.uint8)
        first = group.replicas - int(lowest)
        root = group.roster.index(first if first in group.roster else min(group.contributors))
        replicas.Replicas(group, group.internals).broadcast_state(buffer, root)
        said: dict[str, Any] = json.loads(bytes(buffer.numpy()))
        return said
