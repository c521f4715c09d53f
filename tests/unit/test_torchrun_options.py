"""torchrun's command lines for `ftcomm run`: what they ask for, and what is refused."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from ftcomm import cli
from ftcomm.errors import SettingsError
from ftcomm.launch import RunOptions, run
from ftcomm.launch.several_hosts.node_place import NodePlace
from ftcomm.launch.torchrun.options import count

pytestmark = pytest.mark.protocol


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ftcomm run` with a command line -> the options of the job that it would start."""
    (tmp_path / "train.py").touch()
    (tmp_path / "program").touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    found: list[RunOptions] = []
    monkeypatch.setattr(run, "run", lambda options: found.append(options))

    def ask(line: str) -> RunOptions:
        with pytest.raises(SystemExit):
            cli.commands.main(["run", *shlex.split(line)], standalone_mode=False)
        return found.pop()

    return ask


@pytest.mark.parametrize(
    "line",
    [
        "--nproc-per-node 4 train.py --lr 1",
        "--nproc_per_node=4 --nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port=29500 train.py --lr 1",
        "--standalone --nnodes 1:1 --nproc-per-node 4 --rdzv-backend c10d --rdzv_endpoint localhost:0 train.py --lr 1",
        "--rdzv-id 7 --rdzv_conf a=b --role trainer --monitor-interval 1 --tee 3 --replicas 4 train.py --lr 1",
        "--replicas 4 --nproc-per-node 4 train.py --lr 1",
    ],
)
def test_the_same_four_replicas(asked: Any, line: str) -> None:
    assert asked(line) == RunOptions(replicas=4, script="train.py", args=("--lr", "1"))


def test_the_rest(asked: Any) -> None:
    options = asked("--nproc-per-node 8 --ranks-per-replica 2 --max_restarts 3 --log_dir logs train.py --nnodes 2")
    assert (options.replicas, options.max_restarts, options.log_dir) == (4, 3, Path("logs"))
    assert options.args == ("--nnodes", "2"), "what follows the script is the script's"
    program = asked("--nproc-per-node 1 --no_python ./program x")
    assert program.command() == ["./program", "x"]


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("--rdzv-endpoint h:5 --rdzv-id 7 --node-rank 1", NodePlace(1, 2, "h", 5, "7")),
        ("--rdzv_endpoint=[::1]:5 --node_rank=1", NodePlace(1, 2, "::1", 5)),
        ("--rdzv-endpoint h --node-rank 0", NodePlace(0, 2, "h", 29400)),
        ("--master-addr h --master-port 6 --node-rank 0", NodePlace(0, 2, "h", 6)),
        ("--master-addr h", NodePlace(1, 2, "h", 29500)),  # which host, from Slurm
    ],
)
def test_several_hosts(asked: Any, monkeypatch: pytest.MonkeyPatch, line: str, place: NodePlace) -> None:
    monkeypatch.setenv("FTCOMM_TOKEN", "0123456789abcdef")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    options = asked(f"--nnodes 2 --nproc-per-node 4 --ranks-per-replica 2 {line} train.py")
    assert options == RunOptions(replicas=4, ranks_per_replica=2, script="train.py", node=place)
    assert list(options.started_here) == ([0, 1] if place.rank == 0 else [2, 3])
    assert "0123456789abcdef" not in repr(options)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py", "Missing option '--replicas' (or '--nproc-per-node'"),
        (
            "--nproc-per-node 3 --ranks-per-replica 2 train.py",
            "--nproc-per-node 3 with --ranks-per-replica 2: expected",
        ),
        ("--nproc-per-node 4 --replicas 2 train.py", "--nproc-per-node 4 with --replicas 2 --ranks-per-replica 1"),
        ("--nproc-per-node 4 --ranks-per-replica 0 train.py", "--nproc-per-node 4 with --ranks-per-replica 0"),
        ("--nproc-per-node none train.py", "--nproc-per-node none: expected 1 or more, cpu, auto"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node 0: expected 1 or more"),
        ("--nnodes 2 --nproc-per-node 4 train.py", "--nnodes 2: say which of them this host is, --node-rank 0 to 1"),
        ("--nnodes 2 --node-rank 0 --nproc-per-node 4 train.py", "--rdzv-endpoint 10.0.0.1:29400, on all of them"),
        ("--nnodes 1:4 --nproc-per-node 4 train.py", "--nnodes 1:4: expected one number, with which the job begins"),
        ("--nnodes 2 --node-rank 2 --rdzv-endpoint h --nproc-per-node 4 train.py", "--node-rank 2: expected 0 to 1"),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint h --replicas 3 train.py", "--replicas 3 on --nnodes 2: each host"),
        (  # a replica on two hosts
            "--nnodes 2 --node-rank 0 --rdzv-endpoint h --nproc-per-node 2 --ranks-per-replica 4 train.py",
            "expected replicas x ranks of each, all of them on one host",
        ),
        (
            "--nnodes 2 --node-rank 0 --rdzv-endpoint h --replicas 1 --ranks-per-replica 4 train.py",
            "each with all of its ranks",
        ),
        (
            "--nnodes 2 --node-rank 0 --rdzv-endpoint h:x --replicas 2 train.py",
            "--rdzv-endpoint h:x: expected HOST:PORT",
        ),
        ("--nnodes 2 --node-rank 0 --rdzv-endpoint h --replicas 2 train.py", "--nnodes 2: FTCOMM_TOKEN is not set"),
        ("--node-rank 1 --nproc-per-node 4 train.py", "--node-rank 1 without --nnodes: say how many hosts"),
        ("--nproc-per-node 1 --no-python nowhere", "--no-python: there is no program nowhere"),
        ("--nproc-per-node 1 --no-python -m train", "-m with --no-python: a module is run by Python"),
    ],
)
def test_what_cannot_be(asked: Any, monkeypatch: pytest.MonkeyPatch, line: str, said: str) -> None:
    monkeypatch.delenv("FTCOMM_TOKEN", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")  # so it numbers something else than two hosts
    with pytest.raises((SettingsError, click.UsageError)) as raised:
        cli.commands.main(["run", *shlex.split(line)], standalone_mode=False)
    assert said in str(raised.value)


def test_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,GPU-8932f937")
    assert [count(text) for text in ("gpu", "auto", "cpu", "2")] == [3, 3, cores, 2]
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert count("auto") == cores
        with pytest.raises(SettingsError, match="gpu on a host with GPUs"):
            count("gpu")
