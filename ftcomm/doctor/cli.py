"""`ftcomm doctor` as a command."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable

import click
import msgspec

from ftcomm.doctor.check import Check, Finding


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of findings as JSON.")
@click.option("--peer", multiple=True, metavar="HOST:PORT", help="Try the way to where --serve runs; repeatable.")
@click.option("--serve", is_flag=True, help="Check nothing; answer the --peer of other hosts until Ctrl-C.")
@click.option("--port", default=0, metavar="P", help="With --serve: where.  [default: any free one]")
def doctor(*, as_json: bool, peer: tuple[str, ...], serve: bool, port: int) -> None:
    """Check what ftcomm needs of this machine and of the network, and say what mends what is wrong.

    Run it in the environment of a rank: inside the container, the srun or the pod, with the same variables.

    \b
    Exit codes:
      0  all is well, though something may be better
      1  something is wrong
    """
    from ftcomm.doctor import network

    if serve:
        return network.serve(network.where(), port, click.echo)
    findings = examine([*checks(), *(functools.partial(network.peer, each) for each in peer)])
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        for finding in findings:
            click.echo(line(finding))
    sys.exit(any(finding.verdict == "wrong" for finding in findings))


def checks() -> list[Check]:
    from ftcomm.doctor import network, rdma, transports

    return [
        network.address,
        network.coordinator,
        network.ports,
        transports.chosen,
        rdma.devices,
        rdma.library,
        rdma.interface,
        rdma.locked_memory,
        rdma.gpu_direct,
    ]


def examine(checks: Iterable[Check]) -> list[Finding]:
    return [finding for check in checks for finding in check()]


def line(finding: Finding) -> str:
    mend = f"\n{'':25}-> {finding.mend}" if finding.mend else ""
    return f"{finding.verdict:<6} {finding.name:<17} {finding.said}{mend}"
