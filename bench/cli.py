"""`ftcomm bench`: measure ftcomm, and what a failure costs. Each command is the experiment of one file.

A file is imported when its command runs, so that `ftcomm bench --help` stays quick and a machine without an optional
library has all other commands.
"""

from __future__ import annotations

import importlib
from typing import ClassVar

import click

from ftcomm.bench.harness import Experiment
from ftcomm.cli import LazyGroup


class Experiments(LazyGroup):
    LAZY: ClassVar[dict[str, tuple[str, str]]] = {
        "accuracy": ("research.accuracy", "Compare what is learned with replicas away and with all there."),
        "allgather": ("collective:ALLGATHER", "All-gather: the parts of all on all."),
        "alltoall": ("collective:ALLTOALL", "All-to-all: from each rank a part to each."),
        "allreduce": ("collective:ALLREDUCE", "All-reduce: the sum of all on all."),
        "broadcast": ("collective:BROADCAST", "Broadcast: what rank 0 has to all."),
        "control": ("control_plane", "The control plane of a large job on one machine, and failures of it."),
        "dashboard": ("dashboard", "How much of a core the live view takes, up to 98,304 emulated ranks."),
        "first-use": ("first_use", "Time what a NumPy job takes from its import of ftcomm to its first all-reduce."),
        "fleet": ("research.fleet", "Compute the share of time that a large fleet trains."),
        "gather": ("collective:GATHER", "Gather: the parts of all on rank 0."),
        "gpu-check": ("gpu_check", "All that needs a GPU, in stages."),
        "hsdp": ("research.hsdp", "Kill ranks of an FSDP2 training, and compare what is learned."),
        "kernels": ("kernels", "Copy and reduce on one GPU."),
        "nixl": ("nixl", "All-reduce over NIXL beside NIXL alone."),
        "overhead": ("overhead", "Time all-reduces without fault tolerance, and with it."),
        "page": ("research.page:page", "Make docs/performance.md from the results that are kept."),
        "plug-ins": ("plugins", "Time what ftcomm adds to a step of other libraries' trainers."),
        "process-group": ("process_group", "Time what the process group of torch adds to a step of DDP."),
        "recovery": ("recovery", "Take a replica out of an all-reduce, and time what the others do."),
        "reduce": ("collective:REDUCE", "Reduce: the sum of all on rank 0."),
        "reduce-scatter": ("collective:REDUCE_SCATTER", "Reduce-scatter: on each rank one part of the sum of all."),
        "rejoin": ("rejoin", "Kill a training replica, and see what the others notice of its return."),
        "scatter": ("collective:SCATTER", "Scatter: from rank 0 a part to each."),
        "stragglers": ("stragglers", "Ask who is slow while all are alike, then make one slower."),
        "train": ("train", "Time steps of DDP, then kill replicas of a training."),
        "tune": ("tune", "Find the switch points of all-reduces on this machine."),
        "views": ("control_views", "What changes of view cost the control plane of 98,304 ranks, without sockets."),
        "wire": ("wire", "All-reduce over TCP beside plain sockets and gloo."),
    }

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.LAZY:
            return None
        module, _, name = self.LAZY[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(f"ftcomm.bench.{module}"), name or "EXPERIMENT")
        return found.command() if isinstance(found, Experiment) else found


@click.group(cls=Experiments)
def bench() -> None:
    """Measure ftcomm on this machine, beside what else there is."""
