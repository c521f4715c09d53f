"""The `ftcomm` command. Light on purpose: what a command needs is imported when that command runs."""

from __future__ import annotations

import errno
import importlib
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import click

from ftcomm.control.timeouts import INIT_TIMEOUT, Timeouts
from ftcomm.errors import FtcommError, InitError, SettingsError
from ftcomm.lab.netns.hosts import hosts_named, parse_delay, parse_rate
from ftcomm.launch.listen import Listen
from ftcomm.launch.torchrun.options import Rendezvous, spellings, torchrun_options, whole_replicas
from ftcomm.monitoring.history_path import VARIABLE, default_path
from ftcomm.settings import TRANSPORTS


class LazyGroup(click.Group):
    """A group whose heavier commands live elsewhere: name -> (where, its line in the list of commands)."""

    LAZY: ClassVar[dict[str, tuple[str, str]]] = {
        "bench": ("ftcomm.bench.cli:bench", "Measure collectives and recoveries on this machine."),
        "chaos": ("ftcomm.lab.chaos.cli:chaos", "Hit a running job with faults, and tell what came of it."),
        "dashboard": (
            "ftcomm.dashboard.commands:dashboard",
            "Serve the live view of a running job: a page, and metrics.",
        ),
        "check": ("ftcomm.simulation.check_cli:check", "Explore every interleaving of a small group and its faults."),
        "doctor": ("ftcomm.doctor.cli:doctor", "Check what ftcomm needs of this machine, and say what mends it."),
        "report": ("ftcomm.dashboard.report:report", "Tell what interrupted jobs, and what it cost."),
        "resize": ("ftcomm.launch.commands.job:resize", "Let fewer or more replicas train, without a stop."),
        "restart": ("ftcomm.launch.commands.job:restart", "Restart replicas one by one while the others train on."),
        "simulate": (
            "ftcomm.simulation.simulate_cli:simulate",
            "Run the protocol in virtual time, with all kinds of faults.",
        ),
        "stragglers": ("ftcomm.launch.commands.diagnosis:stragglers", "Show who makes the others wait, and for what."),
        "status": ("ftcomm.launch.commands.job:status", "Show a running job: who is in it, and at which step."),
        "top": ("ftcomm.dashboard.top:top", "Watch a running job in the terminal."),
        "dump": (
            "ftcomm.launch.commands.recordings:dump",
            "Write what all ranks of a job did, also of one that hangs.",
        ),
        "trace": ("ftcomm.launch.commands.recordings:trace", "Write a trace of all ranks on one clock, for Perfetto."),
        "why": ("ftcomm.launch.commands.diagnosis:why", "Say why a job stands still: who, and at which line."),
        "demo": ("ftcomm.demo.show:demo", "Train four replicas, kill one, watch the others go on."),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.LAZY:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.LAZY[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.commands.get(name)
            rows.append((name, self.LAZY[name][1] if command is None else command.get_short_help_str(80)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that the launcher and a coordinator on its own have in common."""
    for option in reversed(
        (
            click.option(
                "--ranks-per-replica",
                type=int,
                default=1,
                metavar="W",
                show_default=True,
                help="Processes of one replica.",
            ),
            click.option(
                "--heartbeat-timeout",
                type=float,
                envvar="FTCOMM_HEARTBEAT_TIMEOUT",
                metavar="S",
                help="Seconds of silence after which a host is lost; a process that dies is noticed at once.  "
                "[default: FTCOMM_HEARTBEAT_TIMEOUT, or a 24th of --op-timeout, 0.2 to 5]",
            ),
            click.option(
                "--op-timeout",
                type=float,
                default=Timeouts.derive().op,
                envvar="FTCOMM_OP_TIMEOUT",
                metavar="S",
                help="Seconds without progress after which the replica that holds an op up is removed, at the latest; "
                "after twice that the op raises an error. The other two follow from this one.  "
                f"[default: FTCOMM_OP_TIMEOUT, or {Timeouts.derive().op:g}]",
            ),
            click.option(
                "--op-timeout-floor",
                type=float,
                envvar="FTCOMM_OP_TIMEOUT_FLOOR",
                metavar="S",
                help="The same at the earliest, however quick ops of that size have been.  "
                "[default: FTCOMM_OP_TIMEOUT_FLOOR, or a quarter of --op-timeout]",
            ),
            click.option(
                "--history",
                metavar="FILE|off",
                callback=lambda context, option, text: default_path({**os.environ, VARIABLE: text} if text else None),
                help="Where interruptions are kept for `ftcomm report`.  "
                "[default: FTCOMM_HISTORY, or ~/.local/state/ftcomm/history.sqlite]",
            ),
            click.option(
                "--dashboard",
                metavar="[HOST:]PORT",
                callback=lambda context, option, text: None if text is None else Listen.parse(text),
                help="Serve the live view and metrics of the job there, as `ftcomm dashboard` does.",
            ),
        )
    ):
        command = option(command)
    return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ftcomm")
def commands() -> None:
    """Training that goes on when some of its processes die."""


@commands.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.option("--replicas", type=int, metavar="N", help="Replicas of the job.")
@cluster_options
@click.option(
    "--init-timeout",
    type=float,
    default=INIT_TIMEOUT,
    envvar="FTCOMM_INIT_TIMEOUT",
    metavar="S",
    help="Seconds in which a rank tries to join the job before it gives up, and with --nnodes those in which all hosts "
    f"have to come.  [default: FTCOMM_INIT_TIMEOUT, or {INIT_TIMEOUT:g}]",
)
@torchrun_options
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option(
    *spellings("--max-restarts"),
    type=int,
    default=10,
    metavar="K",
    show_default=True,
    help="Restarts of one replica within an hour. The wait before one is 0.5 s, doubled each time up to "
    "--backoff-limit, and 0.5 s again after a minute of health.",
)
@click.option(
    "--backoff-limit",
    type=float,
    default=30.0,
    metavar="S",
    show_default=True,
    help="The longest wait before a restart.",
)
@click.option(
    "--min-replicas",
    type=int,
    default=1,
    metavar="M",
    show_default=True,
    help="End the job when fewer than M replicas are left that have not failed for good.",
)
@click.option(
    "--grace",
    type=float,
    default=30.0,
    metavar="S",
    show_default=True,
    help="Seconds to leave in after the first signal; then SIGTERM, 5 s later SIGKILL.",
)
@click.option(
    *spellings("--log-dir"),
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write what the ranks write, as it is, to DIR/replica-R.shard-S.incarnation-I.log (a file a start).",
)
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what happens to FILE, a JSON object a line.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    envvar="FTCOMM_TRANSPORT",
    help="How ranks move bytes: shared memory where they can, or one way for all.  "
    "[default: FTCOMM_TRANSPORT, or auto]",
)
@click.option(
    "--host-ranks",
    type=int,
    default=0,
    metavar="K",
    help="Count K ranks of a replica that follow each other as those of a host: a host agent, a process of its own, "
    "speaks for them to the leader of the replica. For trying out what replicas on several hosts do.",
)
@click.option(
    "--hosts",
    type=click.Choice(("shared", "netns")),
    default="shared",
    show_default=True,
    help="The network of the replicas: this host's, or a namespace of its own for each, as if they were on several "
    "hosts without a way out; for ftcomm chaos. Needs root and pyroute2.",
)
@click.option(
    "--rate",
    metavar="RATE",
    callback=lambda context, option, text: None if text is None else parse_rate(text),
    help="With --hosts netns: what each host's network carries, as 1gbit or 200mbit.",
)
@click.option(
    "--delay",
    metavar="TIME",
    callback=lambda context, option, text: 0.0 if text is None else parse_delay(text),
    help="With --hosts netns: how long a packet is under way between two hosts, as 5ms; a round trip takes two.",
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str,
    args: tuple[str, ...],
    replicas: int | None,
    processes: int | None,
    hosts: str,
    rate: float | None,
    delay: float,
    rendezvous: Rendezvous,
    **options: Any,
) -> None:
    """Run SCRIPT in N replicas; restart one that dies.

    Only the dead replica is restarted; it catches up while the others train on.

    The command line of torchrun works, too: `ftcomm run --standalone --nproc-per-node 4 train.py` starts four replicas.
    With --nnodes each host starts its share: replicas 0 to 3 on host 0 and 4 to 7 on host 1, say. A host that comes
    back joins with the same command. A signal drains the job on host 0, on another one the replicas of that host.

    Options of ftcomm come before SCRIPT, all after it is for the script. Lines of the ranks get [replica] or
    [replica.shard] in front. Each rank gets OMP_NUM_THREADS, its share of the cores, unless you set it.

    Ctrl-C or SIGTERM drains the job: all replicas leave together at a coming step. A second ends them at once.

    SIGTERM to a rank lets its replica leave in order (ftcomm.steps sees to that). Somebody wants it away, so it is not
    restarted; `ftcomm restart --replica N` starts it again, `ftcomm status` shows the job.

    \b
    Exit codes:
        0  all replicas finished, but for those that were told to leave, or not back when the others had finished
        1  a replica failed for good, or the job was lost; without a step loop, also if one that was not back had
           ended with an error or a crash of its own
        2  the command cannot work as given
        3  drained by a signal, everybody left in order
      130  ended by a second signal
    """
    from ftcomm.launch.options import RunOptions

    node = rendezvous.place()
    replicas = whole_replicas(replicas, processes, options["ranks_per_replica"], rendezvous.nnodes)
    where = hosts_named(hosts, rate, delay)
    request = RunOptions(script=script, args=args, replicas=replicas, hosts=where, node=node, **options)
    request.check()
    from ftcomm.launch.run import run as run_job

    sys.exit(run_job(request))


@commands.command()
@click.option("--replicas", type=int, required=True, metavar="N", help="Replicas of the job.")
@cluster_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on, as the replicas reach it.")
@click.option("--port", type=int, default=29400, show_default=True, help="Port to listen on; 0 for any free one.")
@click.option(
    "--store",
    metavar="FILE|etcd://HOST:PORT[,HOST:PORT]/NAME",
    help="Where views are kept for a restart of the coordinator; removed when the job has ended.  "
    "[default: ./ftcomm-views-PORT.jsonl]",
)
@click.option(
    "--torch-store",
    type=int,
    metavar="PORT",
    help="Serve torch's store at this port, too, for groups of other backends than ftcomm and keys of the script; set "
    "FTCOMM_STORE=host:port on the ranks.",
)
@click.option(
    "--standby", is_flag=True, help="With etcd: wait while another coordinator has the job, then take its place."
)
def coordinator(**options: Any) -> None:
    """Run a coordinator on its own.

    For replicas that something else starts, on any machine.

    The secret that all of a job share is read from FTCOMM_TOKEN; make one with

    \b
        export FTCOMM_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')

    Ranks of another job with the same secret are refused by the job's name, FTCOMM_JOB. If it is not set, a name is
    made, and printed with what to export on the replicas.

    With --store etcd://, TLS and the account are read from FTCOMM_ETCD_CACERT, FTCOMM_ETCD_CERT, FTCOMM_ETCD_KEY,
    FTCOMM_ETCD_USER and FTCOMM_ETCD_PASSWORD, the limit of a request from FTCOMM_ETCD_MAX_REQUEST_BYTES.

    It ends when the job has: with 0 if all replicas finished, with 1 if the job failed, with 3 on Ctrl-C or SIGTERM.
    Training goes on without it; start it again with the same --port and --store.
    """
    from ftcomm.launch.coordinator.command import CoordinatorOptions
    from ftcomm.launch.coordinator.command import run as run_coordinator

    sys.exit(run_coordinator(CoordinatorOptions(token=os.environ.get("FTCOMM_TOKEN", ""), **options)))


def main(argv: list[str] | None = None) -> None:
    """Entry point. A mistake of the user is one line on stderr and exit code 2."""
    try:
        commands.main(argv, prog_name="ftcomm")
    except FtcommError as error:
        click.echo(f"ftcomm: {error}", err=True)
        sys.exit(2 if isinstance(error, SettingsError | InitError) else 1)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        click.echo(f"ftcomm: this process may have {most} open files, too few for this: ulimit -n 1024", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
