"""The options of torchrun on the command line of `ftcomm run`, so that a command line for one works for the other."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ftcomm.errors import SettingsError
from ftcomm.launch.several_hosts.node_place import PORT, NodePlace
from ftcomm.settings.launchers import numbered

# Without effect: what `ftcomm run` does in any case, or has no choice of.
IGNORED = (
    "--rdzv-backend",
    "--rdzv-conf",
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


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """The meeting point of the hosts of a job, as torchrun's options of these names say it."""

    nnodes: int
    node_rank: int | None
    rdzv_endpoint: str | None
    rdzv_id: str
    master_addr: str | None
    master_port: int

    def place(self) -> NodePlace | None:
        """Returns where this host stands among several; None if it is the only one. Raises `SettingsError`."""
        count, rank, endpoint = self.nnodes, self.node_rank, self.rdzv_endpoint
        if count == 1:
            if rank:
                raise SettingsError(f"--node-rank {rank} without --nnodes: say how many hosts start the job.")
            return None
        said = f"--nnodes {count}"
        if rank is None and (found := numbered(os.environ)) is not None and found[1] == count:
            rank = found[0]
        if rank is None:
            raise SettingsError(f"{said}: say which of them this host is, --node-rank 0 to {count - 1}.")
        if not endpoint and not self.master_addr:
            raise SettingsError(
                f"{said}: say where host 0 listens, as in --rdzv-endpoint 10.0.0.1:{PORT}, on all of them."
            )
        if not endpoint:
            return NodePlace(rank, count, str(self.master_addr).strip("[]"), self.master_port, self.rdzv_id)
        host, _, port = endpoint.rpartition(":")
        if not host or endpoint.endswith("]"):
            host, port = endpoint, str(PORT)
        if not port.isdecimal():
            raise SettingsError(f"--rdzv-endpoint {endpoint}: expected HOST:PORT, as in 10.0.0.1:{PORT}.")
        return NodePlace(rank, count, host.strip("[]"), int(port), self.rdzv_id)


def torchrun_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` torchrun's options. Of these `processes`, `no_python` and, of those in it, a `rendezvous` reach
    it."""
    names = [field.name for field in dataclasses.fields(Rendezvous)]

    @functools.wraps(command)
    def with_rendezvous(**options: Any) -> Any:
        return command(rendezvous=Rendezvous(**{name: options.pop(name) for name in names}), **options)

    whole: Callable[..., Any] = with_rendezvous
    for option in (
        click.option(
            *spellings("--nproc-per-node"),
            "processes",
            metavar="N|auto|cpu|gpu",
            callback=lambda context, option, text: None if text is None else count(text),
            help="As torchrun has it: processes on this host, in place of --replicas. Each --ranks-per-replica of them "
            "are a replica. auto, gpu: as many as GPUs; cpu, or auto without a GPU: as many as cores.",
        ),
        click.option(*spellings("--no-python"), is_flag=True, help="SCRIPT is a program, and run without Python."),
        click.option("--standalone", is_flag=True, expose_value=False, hidden=True),
        click.option(
            *spellings("--nnodes"),
            metavar="N",
            callback=lambda context, option, text: 1 if text is None else _nodes(text),
            help="Hosts that start the job together: the same command on each, but for --node-rank, with the same "
            "secret in FTCOMM_TOKEN.",
        ),
        click.option(
            *spellings("--node-rank"),
            type=int,
            metavar="K",
            help="The number of this host among --nnodes, from 0.  [default: as srun or mpirun number the launchers]",
        ),
        click.option(
            *spellings("--rdzv-endpoint"),
            metavar="HOST[:PORT]",
            help="Where host 0 has the coordinator: an address of it that all others reach.  [default port: 29400]",
        ),
        click.option(*spellings("--rdzv-id"), default="none", hidden=True),
        click.option(*spellings("--master-addr"), hidden=True),
        click.option(*spellings("--master-port"), type=int, default=29500, hidden=True),
        *(click.option(*spellings(name), expose_value=False, hidden=True) for name in IGNORED),
    ):
        whole = option(whole)
    return whole


def whole_replicas(asked: int | None, processes: int | None, ranks_per_replica: int, nnodes: int = 1) -> int:
    """Returns how many replicas --replicas and --nproc-per-node, on each of the hosts, ask for. Raises `SettingsError`,
    `click.UsageError`."""
    if processes is None:
        if asked is None:
            raise click.UsageError("Missing option '--replicas' (or '--nproc-per-node', as torchrun has it).")
        return asked
    if (
        ranks_per_replica < 1
        or processes % ranks_per_replica
        or asked not in (None, nnodes * processes // ranks_per_replica)
    ):
        said = "" if asked is None else f"--replicas {asked} "
        raise SettingsError(
            f"--nproc-per-node {processes} with {said}--ranks-per-replica {ranks_per_replica}: expected replicas x "
            "ranks of each, all of them on one host. Leave --nproc-per-node away, and say --replicas, those of all "
            "hosts."
        )
    return nnodes * processes // ranks_per_replica


def count(text: str) -> int:
    """Returns how many processes --nproc-per-node `text` means on this host. Raises `SettingsError`."""
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


def _nodes(text: str) -> int:
    least, _, most = text.partition(":")
    if least.isdecimal() and int(least) >= 1 and most in ("", least):
        return int(least)
    raise SettingsError(
        f"--nnodes {text}: expected one number, with which the job begins; it goes on with as many hosts as are left, "
        "and one that comes back joins it."
    )
