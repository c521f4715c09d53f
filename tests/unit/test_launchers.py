"""What launchers that know nothing of ftcomm say of a rank's place, and what comes of it."""

from __future__ import annotations

import pytest

from ftcomm.errors import SettingsError
from ftcomm.settings import Settings
from ftcomm.settings.launchers import NUMBERINGS, completed, numbered

pytestmark = pytest.mark.protocol

JOB = {"FTCOMM_COORDINATOR": "127.0.0.1:29400", "FTCOMM_TOKEN": "0123456789abcdef", "FTCOMM_LEADER": "127.0.0.1:4000"}


def place(env: dict[str, str]) -> tuple[int, int, int]:
    settings = Settings.from_env(JOB | env)
    return settings.replica, settings.replicas, settings.shard


@pytest.mark.parametrize("launcher", NUMBERINGS, ids=lambda launcher: launcher.launcher)
def test_ranks_that_follow_each_other_are_a_replica(launcher: tuple[str, str, str]) -> None:
    _, rank, size = launcher
    assert place({rank: "2", size: "4"}) == (2, 4, 0)
    assert place({rank: "5", size: "6", "FTCOMM_RANKS_PER_REPLICA": "2"}) == (2, 3, 1)


def test_a_launcher_for_each_replica_knows_the_rank_alone() -> None:
    own = {"FTCOMM_REPLICA": "1", "FTCOMM_REPLICAS": "4", "FTCOMM_RANKS_PER_REPLICA": "8"}
    assert place(own | {"RANK": "3", "WORLD_SIZE": "8"}) == (1, 4, 3)
    assert place(own | {"RANK": "3", "WORLD_SIZE": "8", "FTCOMM_SHARD": "5"}) == (1, 4, 5)


def test_the_innermost_launcher_counts() -> None:
    """mpirun in an allocation of Slurm starts its daemons by srun, each of which has a number."""
    inner = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert numbered({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", **inner}) == (3, 4)
    assert numbered({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", **inner, "RANK": "7", "WORLD_SIZE": "8"}) == (7, 8)
    assert numbered({"RANK": "7", **inner}) == (3, 4), "half a numbering is none"
    assert numbered({"RANK": "7"}) is None


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK='4' and PMI_SIZE='4', which MPICH or Intel MPI sets; expected"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' and WORLD_SIZE='4', which torchrun sets; expected a number"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "FTCOMM_RANKS_PER_REPLICA": "2"},
            "FTCOMM_RANKS_PER_REPLICA=2 among 3 ranks: a job is replicas x ranks of each",
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "FTCOMM_RANKS_PER_REPLICA": "two"}, "='two'; expected an integer"),
        ({}, "FTCOMM_REPLICA is not set; `ftcomm run` sets it, and torchrun, mpirun and srun say it"),
    ],
)
def test_what_cannot_be(env: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Settings.from_env(JOB | env)
    assert said in str(raised.value)


def test_nobody_looks_at_what_is_left_over() -> None:
    env = {"FTCOMM_REPLICA": "1", "FTCOMM_REPLICAS": "2", "RANK": "of something else", "WORLD_SIZE": ""}
    assert completed(env) is env
