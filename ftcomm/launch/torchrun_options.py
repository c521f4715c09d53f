"""The options of torchrun on the command line of `ftcomm run`, so that a command line for one works for the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ftcomm.errors import SettingsError

ELSEWHERE = (
    "`ftcomm run` starts the replicas of this host. For several hosts start `ftcomm coordinator --replicas R --host "
    "ADDRESS` on one of them, and each replica by a torchrun of its own, as docs/cluster.md says"
)

# Without effect: what tells torchrun how its hosts find each other, and what `ftcomm run` does in any case.
IGNORED = (
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--monitor-interval",
    "--role",
    "--start-method",
    "--tee",
)


def spellings(name: str) -> tuple[str, ...]:
    """Returns both names that torchrun has for an option: --max-restarts and --max_restarts."""
    other = "--" + name[2:].replace("-", "_")
    return (name,) if other == name else (name, other)


def torchrun_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` torchrun's options. Of these alone `processes` and `no_python` reach it."""
    for option in (
        click.option(
            *spellings("--nproc-per-node"),
            "processes",
            metavar="N|auto|cpu|gpu",
            callback=lambda context, option, text: None if text is None else count(text),
            help="As torchrun has it: processes on this host, in place of --replicas; of each --ranks-per-replica are "
            "a replica. With auto and gpu as many as there are GPUs, with cpu, or auto without a GPU, cores.",
        ),
        click.option(*spellings("--no-python"), is_flag=True, help="SCRIPT is a program, and run without Python."),
        click.option("--standalone", is_flag=True, expose_value=False, hidden=True),
        click.option(*spellings("--nnodes"), expose_value=False, hidden=True, callback=_one_host),
        click.option(*spellings("--node-rank"), expose_value=False, hidden=True, callback=_first_host),
        *(click.option(*spellings(name), expose_value=False, hidden=True) for name in IGNORED),
    ):
        command = option(command)
    return command


def whole_replicas(asked: int | None, processes: int | None, ranks_per_replica: int) -> int:
    """How many replicas --replicas and --nproc-per-node ask for. Raises `SettingsError`, `click.UsageError`."""
    if processes is None:
        if asked is None:
            raise click.UsageError("Missing option '--replicas' (or '--nproc-per-node', as torchrun has it).")
        return asked
    if ranks_per_replica < 1 or processes % ranks_per_replica or asked not in (None, processes // ranks_per_replica):
        said = "" if asked is None else f"--replicas {asked} "
        raise SettingsError(
            f"--nproc-per-node {processes} with {said}--ranks-per-replica {ranks_per_replica}: expected replicas x "
            "ranks of each. Leave --nproc-per-node away, and say --replicas."
        )
    return processes // ranks_per_replica


def count(text: str) -> int:
    """How many processes --nproc-per-node `text` means on this host. Raises `SettingsError`."""
    gpus = _gpus() if text in ("auto", "gpu") else 0
    if text == "cpu" or (text == "auto" and not gpus):
        return len(os.sched_getaffinity(0))
    number = gpus if text in ("auto", "gpu") else int(text) if text.isdecimal() else 0
    if number < 1:
        raise SettingsError(f"--nproc-per-node {text}: expected 1 or more, cpu, auto, or gpu on a host with GPUs.")
    return number


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _one_host(context: click.Context, option: click.Parameter, text: str | None) -> None:
    if text not in (None, "1", "1:1"):
        raise SettingsError(f"--nnodes {text}: {ELSEWHERE}.")


def _first_host(context: click.Context, option: click.Parameter, text: str | None) -> None:
    if text not in (None, "0"):
        raise SettingsError(f"--node-rank {text}: {ELSEWHERE}.")
