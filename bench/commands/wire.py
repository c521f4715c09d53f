"""`ftcomm bench wire` as a command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ftcomm.bench.commands.options import SIZE, ListType, json_option, run, written
from ftcomm.bench.limits import check_at_least_one
from ftcomm.errors import SettingsError
from ftcomm.settings import ALGORITHMS


@click.command()
@click.option("--sizes", type=ListType(SIZE, "SIZE,..."), default="64M,256M", show_default=True, help="Arrays (fp32).")
@click.option("--ranks", type=ListType(click.INT, "N,..."), default="2,4", show_default=True, help="Processes.")
@click.option("--hosts", type=ListType(click.INT, "N,..."), help="Instead: processes on hosts of their own (root).")
@click.option("--ranks-per-host", type=int, default=1, show_default=True, help="So many processes on each of --hosts.")
@click.option("--rate", help="Of the network between them, as in 1gbit.")
@click.option("--delay", help="Of a packet, one way, as in 5ms.")
@click.option("--idle", default="5s", show_default=True, help="So long a group waits, to see what that costs.")
@click.option("-n", "--iters", type=int, default=5, show_default=True, help="Timed ops in a round.")
@click.option("--rounds", type=int, default=5, show_default=True, help="So many times sockets, ftcomm, gloo.")
@click.option(
    "--algorithm", type=click.Choice(ALGORITHMS), help="FTCOMM_ALGORITHM.  [default: direct; auto if hosts are shared]"
)
@json_option
@click.option("--smoke", is_flag=True, help="Two ranks and 1 MB, without gloo, to see that it runs.")
def wire(
    *,
    sizes: tuple[int, ...],
    ranks: tuple[int, ...],
    hosts: tuple[int, ...] | None,
    ranks_per_host: int,
    rate: str | None,
    delay: str | None,
    idle: str,
    iters: int,
    rounds: int,
    algorithm: str | None,
    json_file: Path | None,
    smoke: bool,
) -> None:
    """All-reduce over TCP beside plain sockets that carry the same bytes, and gloo; on loopback, or on a slow link.

    The sockets have the pattern of a ring: every rank sends 2 (n - 1) / n of the array to the next one out of an array,
    and receives as much into another. They add nothing and agree on nothing. Shares are of rounds, in which all ran one
    after the other. Of the link: what 2 (n - 1) / n of the array need at its rate, over the time; the headers of
    packets are in the time, and in what a host sent in an op.

    With --hosts 2 --ranks-per-host 2 hosts are shared: then two levels, by which each host sends as much as one rank
    would, are measured beside each rank with each; and n is the number of hosts, for the sockets and for the link.
    """
    from ftcomm.bench.header import header, header_lines
    from ftcomm.bench.progress import Watch
    from ftcomm.bench.wire import COLUMNS, Idle, Line, Request, Row, idle_line, measure, network_line
    from ftcomm.bench.yardstick import heading, line
    from ftcomm.launch.network import parse_delay, parse_rate

    check_at_least_one("--ranks-per-host", ranks_per_host)
    if hosts is None and ranks_per_host > 1:
        raise SettingsError("--ranks-per-host is of hosts of their own; say --hosts in place of --ranks.")
    request = Request(
        sizes,
        ranks if hosts is None else tuple(ranks_per_host * count for count in hosts),
        iters,
        rounds,
        algorithm or ("auto" if ranks_per_host > 1 else "direct"),
        idle=parse_delay(idle),
        ranks_per_host=0 if hosts is None else ranks_per_host,
        rate=None if rate is None else parse_rate(rate),
        delay=0.0 if delay is None else parse_delay(delay),
    )
    if smoke:
        few = (2,) if hosts is None else request.ranks
        request = replace(request, sizes=(1 << 20,), ranks=few, iterations=2, rounds=1, gloo=False, idle=0.2)
    request.check()
    fields = header()
    rows: list[Row] = []
    idles: list[Idle] = []
    networks: list[Line] = []
    result: dict[str, Any] = {
        "header": fields,
        "request": request,
        "rows": rows,
        "idle": idles,
        "networks": networks,
    }
    with written(json_file, result), Watch() as watch:
        for text in (*header_lines(fields), *heading(COLUMNS)):
            watch.line(text)

        def on_rows(measured: list[Row]) -> None:
            rows.extend(measured)
            for row in measured:
                watch.line(line(COLUMNS, row))

        def on_idle(one: Idle) -> None:
            idles.append(one)
            watch.line(idle_line(one))

        def on_line(one: Line) -> None:
            networks.append(one)
            watch.line(network_line(one))

        run(measure(request, on_rows, on_idle, on_line, watch.update))
