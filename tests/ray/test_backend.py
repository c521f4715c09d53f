"""What the backend for Ray Train does in the cases that a whole job meets by chance; no cluster is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.train")

import ray
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils

from ftcomm.integrations import ray as ours


class Workers:
    """Of one replica, that is started anew."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.environment: dict[str, str] = {}

    def execute(self, function: Any, environment: dict[str, str], process_group: bool) -> None:
        self.environment = environment
        if self.error is not None:
            raise self.error


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ours._ReplicaBackend]:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    made = ours._ReplicaBackend()
    made._replicas = 2
    yield made
    made._stop()


def test_a_worker_that_dies_while_it_joins_is_one_that_ray_starts_again(backend: ours._ReplicaBackend) -> None:
    with pytest.raises(WorkerGroupStartupFailedError, match="could not join"):
        backend.on_start(Workers(RayActorError()), ours.ReplicaConfig())


def test_workers_of_one_job_meet_and_after_its_end_the_next_begins_another(backend: ours._ReplicaBackend) -> None:
    workers = [Workers() for _ in range(3)]
    for each in workers[:2]:
        backend.on_start(each, ours.ReplicaConfig())
    assert backend._coordinator is not None
    backend._coordinator._server.ended = True
    backend.on_start(workers[2], ours.ReplicaConfig())
    places = [(each.environment["FTCOMM_COORDINATOR"], each.environment["FTCOMM_JOB"]) for each in workers]
    assert places[0] == places[1]
    assert places[1][1] != places[2][1]


def test_the_variables_of_the_driver_are_those_of_the_workers(
    backend: ours._ReplicaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCOMM_ALGORITHM", "ring")
    monkeypatch.setenv("FTCOMM_TOKEN", "of another job, which nobody here knows")
    config, workers = ours.ReplicaConfig(), Workers()
    assert "FTCOMM" not in repr(config), "a token may be among them"
    backend.on_start(workers, config)
    assert workers.environment["FTCOMM_ALGORITHM"] == "ring"
    assert workers.environment["FTCOMM_TOKEN"] != "of another job, which nobody here knows"
    assert workers.environment["FTCOMM_REPLICAS"] == "2"


def test_a_trainer_makes_workers_replicas_and_allows_deaths(tmp_path: Path) -> None:
    def made(**options: Any) -> tuple[Any, Any]:
        trainer = ours.TorchTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=2), **options)
        return trainer.backend_config, trainer.run_config

    config, run_config = made()
    assert type(config) is ours.ReplicaConfig
    assert run_config.failure_config.max_failures == -1
    mine, few = ours.ReplicaConfig(process_group=False), FailureConfig(max_failures=3)
    config, run_config = made(torch_config=mine, run_config=RunConfig(storage_path=str(tmp_path), failure_config=few))
    assert (config, run_config.failure_config, run_config.storage_path) == (mine, few, str(tmp_path))


@pytest.mark.parametrize(
    ("contributors", "there", "reports"),
    [((0, 1), (0, 1), 1), ((0,), (0, 1), 0), ((0, 1), (0,), 0)],
    ids=["all contribute", "one catches up", "one is lost since the step has begun"],
)
def test_a_report_waits_for_nobody_who_may_not_come(
    monkeypatch: pytest.MonkeyPatch, contributors: tuple[int, ...], there: tuple[int, ...], reports: int
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(DistributedTrainFnUtils, "report", lambda self, metrics: seen.append(metrics))
    group = SimpleNamespace(contributors=contributors, view=SimpleNamespace(contributing=frozenset(there)), replicas=2)
    monkeypatch.setattr(ours, "_group", lambda: group)
    ours._Functions().report({"loss": 1.0})
    assert len(seen) == reports
