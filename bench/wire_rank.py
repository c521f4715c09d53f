"""One rank of `ftcomm bench wire`: python -m ftcomm.bench.wire_rank TASK_FILE, under the launcher.

The yardstick has the pattern of a ring and nothing else: each rank sends to its right neighbour what an all-reduce has
to send, 2 (n - 1) / n of the array, out of its array, and receives as much from its left into another one. One thread,
two sockets that do not block, `poll` when neither can go on. No sum, no agreement, no frames.
"""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import numpy as np

import ftcomm

DEADLINE = 60.0  # seconds that a connection, or a neighbour that stands still, may take


class Task(msgspec.Struct, frozen=True):
    """Written by the command, read by each rank."""

    ranks: int
    sizes: tuple[int, ...]  # bytes
    iterations: int
    rounds: int
    libraries: tuple[str, ...]
    folder: str  # each rank appends its blocks to rank-N.jsonl here


class Block(msgspec.Struct, frozen=True):
    rank: int
    bytes: int
    round: int
    library: str
    times: list[int]  # ns of each op


class Pair:
    """The sockets to the right and from the left neighbour."""

    def __init__(self, rank: int, ranks: int, exchange_ports: Callable[[int], list[int]]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports = exchange_ports(server.getsockname()[1])
            self.right = socket.create_connection(("127.0.0.1", ports[(rank + 1) % ranks]), timeout=DEADLINE)
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
    group = ftcomm.init()
    rank, ranks = group.replica, task.ranks
    encoder = msgspec.json.Encoder()

    def ports(mine: int) -> list[int]:
        out = np.zeros(ranks, np.int64)
        group.all_gather(out, np.array([mine], np.int64))
        return [int(port) for port in out]

    pair = Pair(rank, ranks, ports)
    token = np.zeros(1, np.float32)
    gloo = _gloo(task, rank) if "gloo" in task.libraries else None
    with (Path(task.folder) / f"rank-{rank}.jsonl").open("ab", buffering=0) as out:
        for size in task.sizes:
            x, y = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
            given, taken, each = x.view(np.uint8).data, y.view(np.uint8).data, 2 * (ranks - 1) * size // ranks
            ops: dict[str, Callable[[], Any]] = {
                "sockets": lambda given=given, taken=taken, each=each: pair.carry(given, taken, each),
                "ftcomm": lambda x=x: group.allreduce(x),
                "gloo": lambda x=x: gloo(x) if gloo is not None else None,
            }
            for number in range(task.rounds):
                for library in task.libraries:
                    times = []
                    ops[library]()
                    group.allreduce(token)  # all begin together
                    for _ in range(task.iterations):
                        begin = perf_counter_ns()
                        ops[library]()
                        times.append(perf_counter_ns() - begin)
                    out.write(encoder.encode(Block(rank, size, number, library, times)) + b"\n")
    ftcomm.shutdown()


def _gloo(task: Task, rank: int) -> Callable[[Any], Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.folder}/rendezvous", rank=rank, world_size=task.ranks)
    return lambda x: dist.all_reduce(torch.from_numpy(x))


if __name__ == "__main__":
    main(sys.argv)
