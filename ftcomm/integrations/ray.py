"""Ray Train on workers that may die and come back, each a replica.

    from ftcomm.integrations.ray import TorchTrainer, steps     # in place of that of ray.train.torch

    def train() -> None:
        ...
        for step in steps(1000, {"model": model, "optimizer": optimizer}):       # in place of range(1000)
            ...

    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=4)).fit()

    python train.py

Ray Train replaces a worker alone, in the place of the dead one, where its backend has replica groups, as this one says.

                         who                                    where
    coordinator          a thread of the backend                in the process of Ray Train's controller
    membership           the coordinator                        -
    a worker's process   Ray Train's controller starts it,      a node that Ray has chosen
                         and again when it is dead
    training             `dist.init_process_group("ftcomm")`    the worker, before its training function runs

If the controller dies, Ray ends its workers. It lives on when the driver dies, if a detached actor has called `fit`:
`examples/train_ray.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import os
import secrets
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import ray
import ray.train.torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayTaskError
from ray.train import RunConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils, set_train_fn_utils
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from ftcomm.control.server import CoordinatorServer, ServerError
from ftcomm.errors import FtcommError, InitError
from ftcomm.launch.event_text import describe
from ftcomm.launch.torchrun.store import TorchStore
from ftcomm.settings import split_endpoint, timeouts
from ftcomm.settings.credentials import from_env
from ftcomm.sync.sched import request_short_slice
from ftcomm.training.steps import steps

__all__ = ["ReplicaConfig", "TorchTrainer", "steps"]

log = logging.getLogger("ftcomm")

STARTING = 30.0  # s in which a coordinator listens
OVER = 30.0  # s that a worker has to tell Ray its error, after which it ends


@dataclasses.dataclass
class ReplicaConfig(TorchConfig):  # type: ignore[misc]
    """Makes each worker of a `TorchTrainer` a replica; `num_workers` is one number, as Ray replaces no worker of a
    group whose size may change.

    process_group: whether the world of torch is made before the training function runs. False if the function makes it,
    as one does that trains by `ftcomm.integrations.transformers`, `.accelerate` or `.lightning`.

    The variables FTCOMM_* of the driver are those of all workers and of the coordinator.
    """

    process_group: bool = True
    environment: dict[str, str] = dataclasses.field(
        default_factory=lambda: {name: value for name, value in os.environ.items() if name.startswith("FTCOMM_")},
        repr=False,
    )

    @property
    def backend_cls(self) -> type[_ReplicaBackend]:
        return _ReplicaBackend


class TorchTrainer(ray.train.torch.TorchTrainer):  # type: ignore[misc]
    """Makes each worker of Ray Train's trainer a replica. Any number of deaths is allowed, unless `run_config` has a
    number of its own in `failure_config`. `torch_config` may be a `ReplicaConfig`; the rest is as in Ray Train."""

    def __init__(
        self,
        *args: Any,
        torch_config: ReplicaConfig | None = None,
        run_config: RunConfig | None = None,
        **options: Any,
    ) -> None:
        run_config = RunConfig() if run_config is None else run_config
        failures = run_config.failure_config
        if failures.max_failures == 0:
            failures = dataclasses.replace(failures, max_failures=-1)
            run_config = dataclasses.replace(run_config, failure_config=failures)
        if torch_config is None:
            torch_config = ReplicaConfig()
        super().__init__(*args, torch_config=torch_config, run_config=run_config, **options)


class _ReplicaBackend(Backend):  # type: ignore[misc]
    """Does what the controller of Ray Train has to do when it has started workers: all of them, or one anew."""

    has_replica_groups = True

    def __init__(self) -> None:
        self._coordinator: _Coordinator | None = None
        self._replicas = 0

    def on_start(self, workers: Any, config: ReplicaConfig) -> None:
        """Let these workers join. A worker that dies meanwhile is started again, as Ray does for this error."""
        if isinstance(workers, WorkerGroup):
            self._stop()
            self._replicas = len(workers)
        if self._coordinator is not None and self._coordinator.over:
            self._stop()  # the workers that come next begin a new one, from the last checkpoint
        if self._coordinator is None:
            self._coordinator = _Coordinator(self._replicas, config.environment, ray.util.get_node_ip_address())
        try:
            workers.execute(_join, self._coordinator.environment, config.process_group)
        except (RayActorError, RayTaskError) as error:
            raise WorkerGroupStartupFailedError(f"a worker could not join the job of ftcomm: {error}") from error

    def on_shutdown(self, workers: Any, config: ReplicaConfig) -> None:
        """Let the job end with the last of its workers. One that is replaced is dead, or will be."""
        if isinstance(workers, WorkerGroup):
            try:
                workers.execute(_leave)
            finally:
                self._stop()

    def _stop(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.stop()


class _Coordinator:
    """The coordinator of one job and torch's store, on a thread of their own. Blocks until they listen; raises
    `InitError`, `SettingsError`."""

    def __init__(self, replicas: int, environment: dict[str, str], host: str) -> None:
        self.environment = {
            **environment,
            "FTCOMM_TOKEN": secrets.token_hex(16),
            "FTCOMM_JOB": secrets.token_hex(8),
            "FTCOMM_REPLICAS": str(replicas),
            "FTCOMM_RANKS_PER_REPLICA": "1",
            "WORLD_SIZE": str(replicas),
        }
        self._server = CoordinatorServer(
            replicas,
            1,
            from_env(self.environment["FTCOMM_TOKEN"], self.environment),
            host=host,
            timeouts=timeouts(environment),
            on_event=_tell,
        )
        self._store = TorchStore(host, lambda line: print(f"ftcomm: {line}", file=sys.stderr, flush=True))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ftcomm-coordinator", daemon=True)
        self._thread.start()
        try:
            self._do(self._start())
        except BaseException as error:
            self.stop()
            if isinstance(error, ServerError | concurrent.futures.TimeoutError):
                raise InitError(f"the coordinator cannot start on {host}: {error or 'it takes too long'}") from None
            raise
        address, port = split_endpoint(self._store.endpoint, "FTCOMM_STORE")
        self.environment |= {
            "FTCOMM_COORDINATOR": self._server.endpoint,
            "FTCOMM_STORE": self._store.endpoint,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # so no other store is served at that address
        }

    @property
    def over(self) -> bool:
        """Whether the job has ended, so that no worker can join it."""
        return self._server.ended

    def stop(self) -> None:
        """Stop both, and the thread."""
        try:
            self._do(self._end())
        except concurrent.futures.TimeoutError:
            log.warning("the coordinator of ftcomm does not stop")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STARTING)

    async def _start(self) -> None:
        request_short_slice()  # since it hears of deaths
        await self._server.start()
        await self._store.start()

    async def _end(self) -> None:
        await self._store.close()
        await self._server.stop()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(STARTING)


def _tell(event: dict[str, Any]) -> None:
    text = event.get("reason") if event["kind"] == "failed" else describe(event)
    if text:
        print(f"ftcomm: {text}", file=sys.stderr, flush=True)


class _Functions(DistributedTrainFnUtils):  # type: ignore[misc]
    """The functions of `ray.train` in a worker."""

    def report(self, *args: Any, **kwargs: Any) -> None:
        """Report as Ray Train does, which waits for all workers: in a step to which all contribute. In others, and if
        a worker is lost since the step has begun, return at once. A worker that comes back would be waited for by those
        on whose next step it waits."""
        group = _group()
        if group is None or set(group.contributors) == set(group.view.contributing) == set(range(group.replicas)):
            super().report(*args, **kwargs)


def _group() -> Any:
    from ftcomm.groups.default_group import existing_group

    return existing_group()


def _join(environment: dict[str, str], process_group: bool) -> None:
    """Join the job, in the process of a worker, which is the only one of its replica."""
    replica = str(ray.train.get_context().get_world_rank())
    own = {"FTCOMM_REPLICA": replica, "FTCOMM_SHARD": "0", "RANK": replica, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(environment | own)
    set_train_fn_utils(_Functions())
    if process_group:
        dist.init_process_group("ftcomm")
    else:
        from ftcomm.torch.rendezvous import joined

        joined()
    _group().internals.on_ended = _end_soon


def _end_soon(error: FtcommError) -> None:
    """End this worker in a while, even if its training function hangs: it is out of the job, and Ray replaces it when
    it has ended, or told its error."""
    log.error("this worker is out of the job: %s", error)
    timer = threading.Timer(OVER, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _leave() -> None:
    """Leave the job at its end."""
    import ftcomm

    if dist.is_initialized():
        dist.destroy_process_group()
    if _group() is not None:
        ftcomm.shutdown()
