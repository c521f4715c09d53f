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
from ftcomm.launch import RunOptions, run, torchrun_options

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
        ("--nnodes 2 --nproc-per-node 4 train.py", "--nnodes 2: `ftcomm run` starts the replicas of this host"),
        ("--nnodes 1:4 --nproc-per-node 4 train.py", "start `ftcomm coordinator --replicas R --host ADDRESS`"),
        ("--node-rank 1 --nproc-per-node 4 train.py", "--node-rank 1: `ftcomm run` starts the replicas of this host"),
        ("--nproc-per-node 1 --no-python nowhere", "--no-python: there is no program nowhere"),
        ("--nproc-per-node 1 --no-python -m train", "-m with --no-python: a module is run by Python"),
    ],
)
def test_what_cannot_be(asked: Any, line: str, said: str) -> None:
    with pytest.raises((SettingsError, click.UsageError)) as raised:
        cli.commands.main(["run", *shlex.split(line)], standalone_mode=False)
    assert said in str(raised.value)


def test_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,GPU-8932f937")
    assert [torchrun_options.count(text) for text in ("gpu", "auto", "cpu", "2")] == [3, 3, cores, 2]
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert torchrun_options.count("auto") == cores
        with pytest.raises(SettingsError, match="gpu on a host with GPUs"):
            torchrun_options.count("gpu")
