"""`ftcomm bench wire`: how much of what plain sockets carry an all-reduce over TCP carries, in the same run.

On loopback, or on a slow link between hosts of their own; and what it costs to wait. The baseline has the pattern of a
ring and nothing else: each rank sends to its right neighbour what an all-reduce has to send, 2 (n - 1) / n of the
array, out of its array, and receives as much from its left into another one. One thread, two sockets that do not block,
`poll` when neither can go on. No sum, no agreement, no frames. Where several ranks share a host, the first one of each
host does so, for n hosts.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

import ftcomm
from ftcomm.bench import baseline
from ftcomm.bench.baseline import DEADLINE, BaselineBlock, check, reporter, rounds_us, share
from ftcomm.bench.checks import check_at_least_one
from ftcomm.bench.harness import INTS, SIZES, BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import Job, OnProgress, Records, part, run_ranks
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import busbw_factor, median
from ftcomm.errors import SettingsError
from ftcomm.groups.static_group import StaticGroup
from ftcomm.lab.netns.hosts import NamespaceHosts, parse_delay, parse_rate
from ftcomm.lab.netns.network import CABLE
from ftcomm.lab.netns.relay import Counts
from ftcomm.lab.netns.slow_network import SlowNetwork, settle
from ftcomm.launch.commands.option_types import Parsed
from ftcomm.settings import ALGORITHMS, check_data
from ftcomm.settings.tuning import BUILT_IN, EVER, MEMBERS

DIRECT, TWO_LEVELS = "direct", "two levels"
PROTECTED = ("mac", "aes-gcm")  # what FTCOMM_DATA says besides "none"
TUNINGS = {
    DIRECT: dataclasses.replace(BUILT_IN, two_levels=((MEMBERS, EVER),)),
    TWO_LEVELS: dataclasses.replace(BUILT_IN, two_levels=((MEMBERS, 0),)),
}
RATE = Parsed("RATE", parse_rate)
TIME = Parsed("TIME", parse_delay, lambda seconds: f"{seconds:g}s")


@dataclasses.dataclass(frozen=True)
class WireRequest:
    """All-reduce over TCP beside plain sockets that carry the same bytes, and gloo; on loopback, or on a slow link.

    The sockets have the pattern of a ring: every rank sends 2 (n - 1) / n of the array to the next one out of an array,
    and receives as much into another. They add nothing and agree on nothing. With --secure the same op is run with
    protected data as well: "mac" and "aes-gcm" (docs/security.md). Shares are of rounds, in which all ran one
    after the other. "processor": what an op takes of it, all ranks together and the kernel's work for them included, in
    the round in which that was least; other work on the machine adds less to it than to the time. Of the link: what
    2 (n - 1) / n of the array need at its rate, over the time; the headers of packets are in the time, and in what a
    host sent in an op.

    With --hosts 2 --ranks-per-host 2 hosts are shared: then two levels, by which each host sends as much as one rank
    would, are measured beside each rank with each; and n is the number of hosts, for the sockets and for the link.
    """

    sizes: Sequence[int] = option((64 << 20, 256 << 20), kind=SIZES, help="Arrays (fp32).")
    ranks: Sequence[int] = option((2, 4), kind=INTS, help="Processes.")
    hosts: Sequence[int] = option((), kind=INTS, help="Instead: processes on hosts of their own (root).")
    ranks_per_host: int = option(1, help="So many processes on each of --hosts.")
    rate: float | None = option(None, kind=RATE, help="Of the network between them, as in 1gbit.")
    delay: float = option(0.0, kind=TIME, help="Of a packet, one way, as in 5ms.")
    idle: float = option(5.0, kind=TIME, help="So long a group waits, to see what that costs.")
    iterations: int = option(5, "-n", "--iters", help="Timed ops in a round.")
    rounds: int = option(5, help="So many times sockets, ftcomm, gloo.")
    algorithm: str | None = option(
        None, kind=click.Choice(ALGORITHMS), help="FTCOMM_ALGORITHM.  [default: direct; auto if hosts are shared]"
    )
    secure: bool = option(False, help="Also with a MAC and with AES-GCM, as FTCOMM_DATA says.")
    gloo: bool = True

    def smoke(self) -> WireRequest:
        """Two ranks and 1 MB, without gloo, to see that it runs."""
        return dataclasses.replace(self, sizes=(1 << 20,), ranks=(2,), iterations=2, rounds=1, gloo=False, idle=0.2)

    @property
    def jobs(self) -> Sequence[int]:
        """The ranks of each."""
        return tuple(self.ranks_per_host * count for count in self.hosts) or self.ranks

    @property
    def libraries(self) -> tuple[str, ...]:
        ours = (TWO_LEVELS, DIRECT) if self.chosen == "auto" and self.ranks_per_host > 1 else ("ftcomm",)
        ours += PROTECTED if self.secure else ()
        return ("sockets", *ours, "gloo") if self.gloo else ("sockets", *ours)

    @property
    def chosen(self) -> str:
        """FTCOMM_ALGORITHM."""
        return self.algorithm or ("auto" if self.ranks_per_host > 1 else "direct")

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check_at_least_one("--ranks-per-host", self.ranks_per_host)
        if self.ranks_per_host > 1 and not self.hosts:
            raise SettingsError("--ranks-per-host is of hosts of their own; say --hosts in place of --ranks.")
        check(self.sizes, self.jobs, self.iterations, self.rounds, arrays=2)
        if self.secure:
            check_data("mac")
        if self.idle <= 0:
            raise SettingsError(f"--idle {self.idle:g}s: expected a positive time.")
        if not self.hosts and (self.rate is not None or self.delay):
            raise SettingsError("--rate and --delay are of a network between hosts; say --hosts in place of --ranks.")
        if self.hosts and min(self.hosts) < 2:
            raise SettingsError(f"--hosts {min(self.hosts)}: expected at least 2 hosts.")

    def task(self, ranks: int) -> WireTask:
        return WireTask(
            ranks=ranks,
            sizes=tuple(self.sizes),
            iterations=self.iterations,
            rounds=self.rounds,
            libraries=self.libraries,
            ranks_per_host=self.ranks_per_host if self.hosts else 0,
            idle=self.idle,
        )


class WireTask(baseline.BaselineTask, frozen=True, kw_only=True):
    ranks_per_host: int  # that many are on each host, in the order of their numbers; 0: all are on this one
    idle: float  # seconds that all ranks but the first wait for that one in the end

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host if self.ranks_per_host else 0


class Waited(msgspec.Struct, frozen=True, tag=True):
    """Says what a rank did while it waited for another one in an op."""

    rank: int
    seconds: float
    cpu: float  # seconds of processor time, of all its threads


class WireRow(msgspec.Struct, frozen=True):
    """One library at one size. The time of an op is that of the slowest rank; medians over rounds of medians."""

    library: str
    ranks: int
    hosts: int  # 0: all on one, and by loopback
    bytes: int
    time_us: float
    busbw_gbps: float  # what each rank has to send and receive over the time
    of_sockets: float  # the share of what the sockets carried in the same round, median over rounds
    of_link: float | None  # the share of what the link could carry at its rate, if it has one
    cable_bytes: int | None  # what left the host that sent most in an op, headers of packets included
    round_us: list[float]
    cpu_us: float = 0.0  # of the processor, of all ranks together, in the round with the least; 0: not measured


class Idle(msgspec.Struct, frozen=True):
    """A group of which one member comes late to an op."""

    ranks: int
    seconds: float
    cpu_pct: float  # of a core, of the member that took most of those that waited


class Network(msgspec.Struct, frozen=True):
    """Says what the process that stands for the network did, which must not be the limit."""

    ranks: int
    forwarded: int  # packets
    dropped: int  # at a full queue
    busy_pct: float  # of a core, in its busiest second


async def measure(request: WireRequest, report: BenchReport) -> None:
    """Report the rows of each size as soon as so many ranks have measured all. Raises `FtcommError` if one fails."""
    for number, ranks in enumerate(request.jobs):
        await _measure_job(request, ranks, report, part(report.progress, number, len(request.jobs)))


async def _measure_job(request: WireRequest, ranks: int, report: BenchReport, progress: OnProgress) -> None:
    task, watched = request.task(ranks), Watched(ranks)
    see = reporter(task, lambda blocks, size: rows(blocks, task, size, request.rate), report.add)

    def look(job: Job, records: list[Any]) -> None:
        if isinstance(job.launcher.network, SlowNetwork):
            watched.saw(time.monotonic(), job.launcher.network.counts())
        see(records)

    records = await run_ranks(
        rank,
        task,
        ranks,
        BaselineBlock | Waited,
        ranks * (len(task.sizes) * task.rounds * len(task.libraries) + 1),
        progress,
        look,
        env={"GLOO_SOCKET_IFNAME": CABLE if task.hosts else "lo", "FTCOMM_ALGORITHM": request.chosen},
        transport="auto" if request.ranks_per_host > 1 else "tcp",
        hosts=NamespaceHosts(request.ranks_per_host, request.rate, request.delay) if task.hosts else None,
    )
    report.add(idle([record for record in records if isinstance(record, Waited)]))
    if watched.network is not None:
        report.add(watched.network)


class Watched:
    """Says what has been seen of a relay, by now."""

    def __init__(self, ranks: int) -> None:
        self.network: Network | None = None
        self._ranks = ranks
        self._since, self._cpu = 0.0, 0.0

    def saw(self, now: float, counts: Counts) -> None:
        """`now` is in seconds."""
        busiest = 0.0 if self.network is None else self.network.busy_pct
        if now - self._since >= 1:
            if self._since:
                busiest = max(busiest, 100 * (counts.cpu - self._cpu) / (now - self._since))
            self._since, self._cpu = now, counts.cpu
        self.network = Network(self._ranks, counts.forwarded, counts.crowded, busiest)


def idle(waited: Sequence[Waited]) -> Idle:
    """Returns how idle all ranks were; all but the first have waited for that one."""
    took = max((one for one in waited if one.rank), key=lambda one: one.cpu / one.seconds)
    return Idle(len(waited), took.seconds, 100 * took.cpu / took.seconds)


def rows(blocks: Iterable[BaselineBlock], task: WireTask, size: int, rate: float | None = None) -> list[WireRow]:
    """All ranks' blocks of one size -> a row for each library, sockets first. `rate`: bits a second of the link.

    The link of a host has to carry 2 (hosts - 1) / hosts of the array, however many ranks it has."""
    mine = [block for block in blocks if block.bytes == size]
    found = rounds_us(mine, task, size)
    busbw = size * busbw_factor(task.ranks) / 1e3  # GB a second, over us
    least = None if rate is None else 8e6 * size * busbw_factor(task.hosts or task.ranks) / rate  # us
    made = []
    for library, times in found.items():
        us = median(times)
        cable = max(b.sent for b in mine if b.library == library) // task.iterations if task.hosts else None
        cpu = [
            sum(b.cpu for b in mine if (b.library, b.round) == (library, number)) / task.iterations / 1e3
            for number in range(task.rounds)
        ]
        of_link = None if least is None else least / us
        of_sockets = share(found["sockets"], times)
        row = WireRow(
            library, task.ranks, task.hosts, size, us, busbw / us, of_sockets, of_link, cable, times, min(cpu)
        )
        made.append(row)
    return made


COLUMNS = (
    Column("library", "", -10, lambda row: row.library),
    Column("hosts", "", 5, lambda row: str(row.hosts or "-")),
    Column("ranks", "", 5, lambda row: str(row.ranks)),
    Column("size", "(B)", 8, lambda row: format_size(row.bytes)),
    Column("time", "(us)", 11, lambda row: f"{row.time_us:.0f}"),
    Column("busbw", "(GB/s)", 8, lambda row: f"{row.busbw_gbps:.3f}"),
    Column("of sockets", "", 10, lambda row: f"{row.of_sockets:.0%}"),
    Column("of the link", "", 11, lambda row: "-" if row.of_link is None else f"{row.of_link:.0%}"),
    Column("processor", "(us)", 11, lambda row: f"{row.cpu_us:.0f}" if row.cpu_us else "-"),
    Column("a host sent", "(MB)", 11, lambda row: "-" if row.cable_bytes is None else f"{row.cable_bytes / 1e6:.2f}"),
)


def idle_line(one: Idle) -> str:
    return f"# {one.ranks} ranks: waiting for {one.seconds:.1f} s in an op takes {one.cpu_pct:.2f}% of a core, at most"


def network_line(one: Network) -> str:
    return (
        f"# {one.ranks} ranks: the network took up to {one.busy_pct:.0f}% of a core; {one.dropped} of {one.forwarded} "
        "packets dropped at full queues"
    )


EXPERIMENT = Experiment(
    "wire",
    WireRequest,
    measure,
    [
        Table("rows", WireRow, COLUMNS),
        Table("idle", Idle, line=idle_line),
        Table("networks", Network, line=network_line),
    ],
)


# -- in a rank ---------------------------------------------------------------------------------------------------------


ListenAddress = tuple[str, int]  # an IPv4 address and a port


class Pair:
    """The sockets to the right and from the left neighbour."""

    def __init__(self, rank: int, ranks: int, host: str, tell: Callable[[ListenAddress], list[ListenAddress]]) -> None:
        """`host` is the address of this rank; `tell` its place to all, and get theirs."""
        with socket.create_server((host, 0)) as server:
            places = tell((host, server.getsockname()[1]))
            self.right = socket.create_connection(places[(rank + 1) % ranks], timeout=DEADLINE)
            server.settimeout(DEADLINE)
            self.left, _ = server.accept()
        for sock in (self.right, self.left):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfer(self, given: memoryview, taken: memoryview, nbytes: int) -> None:
        """Send so many bytes and receive as many, from and into arrays that are gone through again and again."""
        sent = received = 0
        while sent < nbytes or received < nbytes:
            moved = False
            if received < nbytes:
                at = received % len(taken)
                try:
                    count = self.left.recv_into(taken[at : at + nbytes - received])
                except BlockingIOError:
                    pass
                else:
                    if not count:
                        raise ConnectionError("the left neighbour has closed the connection")
                    received, moved = received + count, True
            if sent < nbytes:
                at = sent % len(given)
                try:
                    sent += self.right.send(given[at : at + nbytes - sent])
                    moved = True
                except BlockingIOError:
                    pass
            if not moved:
                poll = select.poll()
                if received < nbytes:
                    poll.register(self.left, select.POLLIN)
                if sent < nbytes:
                    poll.register(self.right, select.POLLOUT)
                if not poll.poll(DEADLINE * 1e3):
                    raise TimeoutError(f"nothing has moved for {DEADLINE:g} s")


def rank(task: WireTask) -> None:
    host, first = divmod(int(os.environ["FTCOMM_REPLICA"]), max(1, task.ranks_per_host))
    if task.hosts:
        settle(f"host-{host}")
    group = ftcomm.init()
    me, ranks = group.replica, task.ranks

    def tell(mine: ListenAddress) -> list[ListenAddress]:
        out = np.zeros(2 * ranks, np.uint32)
        group.allgather(out, np.array([int(ipaddress.IPv4Address(mine[0])), mine[1]], np.uint32))
        places = [(str(ipaddress.IPv4Address(int(host))), int(port)) for host, port in out.reshape(ranks, 2)]
        return places[:: max(1, task.ranks_per_host)]

    ends = task.hosts or ranks
    pair: Pair | None = None
    if first == 0:
        pair = Pair(host, ends, os.environ["FTCOMM_HOST"], tell)
    else:
        tell(("0.0.0.0", 0))
    gloo = _gloo(task, me) if "gloo" in task.libraries else None

    everybody = [(replica, 0) for replica in range(ranks)]
    protected = {
        data: StaticGroup.in_job(group, f"bench {data}", everybody, data=data)
        for data in PROTECTED
        if data in task.libraries
    }

    def ops(size: int) -> dict[str, Callable[[], Any]]:
        x, y = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
        given, taken, each = x.view(np.uint8).data, y.view(np.uint8).data, 2 * (ends - 1) * size // ends
        ours = dict.fromkeys(("ftcomm", DIRECT, TWO_LEVELS), lambda: group.allreduce(x))
        return {
            "sockets": lambda: pair.transfer(given, taken, each) if pair is not None else None,
            "gloo": lambda: gloo(x) if gloo is not None else None,
            **ours,
            **{data: functools.partial(made.allreduce, x) for data, made in protected.items()},
        }

    def turn(library: str) -> None:
        if library in TUNINGS:
            group.internals.exchange.tune(TUNINGS[library])

    baseline.run(task, group, ops, turn=turn, count=_sent if task.hosts else lambda: 0)
    for made in protected.values():
        made.close()
    Records(task.folder, me).write(_wait(group, me, task.idle))
    ftcomm.shutdown()


def _sent() -> int:
    """Bytes that have left this host by its cable."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith(f"{CABLE}:")).partition(":")[2].split()
    return int(fields[8])


def _wait(group: ftcomm.Group, rank: int, seconds: float) -> Waited:
    token = np.zeros(1, np.float32)
    group.barrier()
    begun, cpu = time.monotonic(), time.process_time()
    if rank == 0:
        time.sleep(seconds)
    group.allreduce(token)
    return Waited(rank, time.monotonic() - begun, time.process_time() - cpu)


def _gloo(task: WireTask, rank: int) -> Callable[[Any], Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.folder}/rendezvous", rank=rank, world_size=task.ranks)
    return lambda x: dist.all_reduce(torch.from_numpy(x))
