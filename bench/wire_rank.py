"""One rank of `ftcomm bench wire`: python -m ftcomm.bench.wire_rank TASK_FILE, under the launcher.

The yardstick has the pattern of a ring and nothing else: each rank sends to its right neighbour what an all-reduce has
to send, 2 (n - 1) / n of the array, out of its array, and receives as much from its left into another one. One thread,
two sockets that do not block, `poll` when neither can go on. No sum, no agreement, no frames. Where several ranks share
a host, the first one of each host does so, for n hosts.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import ftcomm
from ftcomm.bench import yardstick
from ftcomm.bench.yardstick import DEADLINE
from ftcomm.launch.hosts import settle
from ftcomm.launch.network import CABLE
from ftcomm.tuning import BUILT_IN, EVER, MEMBERS

DIRECT, TWO_LEVELS = "direct", "two levels"
TUNINGS = {
    DIRECT: dataclasses.replace(BUILT_IN, two_levels=((MEMBERS, EVER),)),
    TWO_LEVELS: dataclasses.replace(BUILT_IN, two_levels=((MEMBERS, 0),)),
}


class Task(yardstick.Task, frozen=True, kw_only=True):
    ranks_per_host: int  # that many are on each host, in the order of their numbers; 0: all are on this one
    idle: float  # seconds that all ranks but the first wait for that one in the end

    @property
    def hosts(self) -> int:
        return self.ranks // self.ranks_per_host if self.ranks_per_host else 0


class Waited(msgspec.Struct, frozen=True, tag=True):
    """What a rank did while it waited for another one in an op."""

    rank: int
    seconds: float
    cpu: float  # seconds of processor time, of all its threads


Place = tuple[str, int]  # an IPv4 address and a port


class Pair:
    """The sockets to the right and from the left neighbour."""

    def __init__(self, rank: int, ranks: int, host: str, tell: Callable[[Place], list[Place]]) -> None:
        """`host` is the address of this rank; `tell` its place to all, and get theirs."""
        with socket.create_server((host, 0)) as server:
            places = tell((host, server.getsockname()[1]))
            self.right = socket.create_connection(places[(rank + 1) % ranks], timeout=DEADLINE)
            server.settimeout(DEADLINE)
            self.left, _ = server.accept()
        for sock in (self.right, self.left):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def carry(self, given: memoryview, taken: memoryview, nbytes: int) -> None:
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


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    host, first = divmod(int(os.environ["FTCOMM_REPLICA"]), max(1, task.ranks_per_host))
    if task.hosts:
        settle(f"host-{host}")
    group = ftcomm.init()
    rank, ranks = group.replica, task.ranks

    def tell(mine: Place) -> list[Place]:
        out = np.zeros(2 * ranks, np.uint32)
        group.all_gather(out, np.array([int(ipaddress.IPv4Address(mine[0])), mine[1]], np.uint32))
        places = [(str(ipaddress.IPv4Address(int(host))), int(port)) for host, port in out.reshape(ranks, 2)]
        return places[:: max(1, task.ranks_per_host)]

    ends = task.hosts or ranks
    pair: Pair | None = None
    if first == 0:
        pair = Pair(host, ends, os.environ["FTCOMM_HOST"], tell)
    else:
        tell(("0.0.0.0", 0))
    gloo = _gloo(task, rank) if "gloo" in task.libraries else None

    def ops(size: int) -> dict[str, Callable[[], Any]]:
        x, y = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
        given, taken, each = x.view(np.uint8).data, y.view(np.uint8).data, 2 * (ends - 1) * size // ends
        ours = dict.fromkeys(("ftcomm", DIRECT, TWO_LEVELS), lambda: group.allreduce(x))
        return {
            "sockets": lambda: pair.carry(given, taken, each) if pair is not None else None,
            "gloo": lambda: gloo(x) if gloo is not None else None,
            **ours,
        }

    def turn(library: str) -> None:
        if library in TUNINGS:
            group._exchange.tune(TUNINGS[library])

    yardstick.run(task, group, ops, turn=turn, count=_sent if task.hosts else lambda: 0)
    waited = _wait(group, rank, task.idle)
    with (Path(task.folder) / f"rank-{rank}.jsonl").open("ab", buffering=0) as out:
        out.write(msgspec.json.encode(waited) + b"\n")
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


def _gloo(task: Task, rank: int) -> Callable[[Any], Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.folder}/rendezvous", rank=rank, world_size=task.ranks)
    return lambda x: dist.all_reduce(torch.from_numpy(x))


if __name__ == "__main__":
    main(sys.argv)
