"""`ftcomm bench`: what it costs, and what a failure costs. Each command is a file of its own in `commands/`.

Those files import what they measure with when their command runs, so that `ftcomm bench --help` stays quick.
"""

from __future__ import annotations

import click

from ftcomm.bench.commands.collective import COMMANDS
from ftcomm.bench.commands.convergence import accuracy, hsdp
from ftcomm.bench.commands.detection import detection
from ftcomm.bench.commands.fleet import fleet
from ftcomm.bench.commands.gpu_check import gpu_check
from ftcomm.bench.commands.kernels import kernels
from ftcomm.bench.commands.nixl import nixl
from ftcomm.bench.commands.overhead import overhead
from ftcomm.bench.commands.page import page
from ftcomm.bench.commands.profile import profile
from ftcomm.bench.commands.recovery import recovery
from ftcomm.bench.commands.rejoin import rejoin
from ftcomm.bench.commands.train import train
from ftcomm.bench.commands.tune import tune
from ftcomm.bench.commands.wire import wire


@click.group()
def bench() -> None:
    """Measure ftcomm on this machine, beside what else there is."""


for collective in COMMANDS:
    bench.add_command(collective)
bench.add_command(accuracy)
bench.add_command(detection)
bench.add_command(fleet)
bench.add_command(gpu_check)
bench.add_command(hsdp)
bench.add_command(kernels)
bench.add_command(overhead)
bench.add_command(page)
bench.add_command(recovery)
bench.add_command(rejoin)
bench.add_command(train)
bench.add_command(profile)
bench.add_command(tune)
bench.add_command(wire)
bench.add_command(nixl)
