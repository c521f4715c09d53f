"""One rank of `ftcomm bench nixl`: python -m ftcomm.bench.nixl_rank TASK_FILE, under the launcher.

The yardstick is NIXL alone in the pattern of a ring: each rank puts to its right neighbour what an all-reduce has to
send, 2 (n - 1) / n of the array, in puts as large as ftcomm's, as many at a time as ftcomm may have under way, and is
put as much by its left one. "one way": the even ranks alone put. One thread, agents of its own. No sum, no agreement.
"""

from __future__ import annotations

import itertools
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Any

import msgspec
import numpy as np

import ftcomm
from ftcomm.bench.wire_rank import DEADLINE, Block, Task
from ftcomm.transport import nixl_library
from ftcomm.transport.nixl_memory import address_of
from ftcomm.transport.segment import CHUNK, SLOTS

_BLOB = 4096  # bytes that an agent's metadata fit in


class Ring:
    """The agents of two neighbours, and puts that were prepared once."""

    def __init__(self, rank: int, ranks: int, gather: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
        self._ranks, self._put = ranks, CHUNK // ranks  # a shard
        self._agent = agent = nixl_library.load().agent(f"bench.{rank}", "")
        self._given, self._taken = (mmap.mmap(-1, SLOTS * CHUNK) for _ in range(2))
        handles = [agent.register_memory([(address_of(m), len(m), 0, "")], "DRAM") for m in (self._given, self._taken)]
        metadata = agent.get_agent_metadata()
        card = np.zeros(_BLOB, np.uint8)
        card[:16] = np.frombuffer(np.array([address_of(self._taken), len(metadata)], np.int64).tobytes(), np.uint8)
        card[16 : 16 + len(metadata)] = np.frombuffer(metadata, np.uint8)
        right = gather(card)[(rank + 1) % ranks]
        there, length = (int(word) for word in right[:16].view(np.int64))
        self._right = name = agent.add_remote_agent(right[16 : 16 + length].tobytes())
        self._prepared = [
            agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs([(address_of(self._given) + at, self._put, 0)], "DRAM"),
                agent.get_xfer_descs([(there + at, self._put, 0)], "DRAM"),
                name,
                b"",
            )
            for at in range(0, SLOTS * CHUNK, self._put)
        ]
        self._handles = handles  # as long as this lives
        self._ended = 0  # runs of the left neighbour

    def carry(self, nbytes: int, mine: bool, theirs: bool) -> None:
        """Put so many bytes to the right, if `mine`, and be put as many by the left, if `theirs`."""
        agent = self._agent
        left = -(-nbytes // self._put) if mine else 0
        handles = itertools.cycle(self._prepared)
        handle, flying = next(handles), []
        wanted = self._ended + theirs
        end = monotonic() + DEADLINE
        while left or flying or self._ended < wanted:
            while left and handle not in flying:
                left -= 1
                if agent.transfer(handle) == "PROC":
                    flying.append(handle)
                handle = next(handles)
            while flying and agent.check_xfer_state(flying[0]) == "DONE":  # in their order: that is when they go on
                del flying[0]
            if mine and not left and not flying:
                agent.send_notif(self._right, b"all")
                mine = False
            self._ended += sum(len(messages) for messages in agent.get_new_notifs().values())
            if monotonic() > end:
                raise TimeoutError(f"{len(flying)} puts of {self._put} bytes have not ended within {DEADLINE:g} s")


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    group = ftcomm.init()
    rank, ranks = group.replica, task.ranks
    encoder = msgspec.json.Encoder()

    def gather(card: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.zeros(ranks * len(card), np.uint8)
        group.all_gather(out, card)
        return out.reshape(ranks, -1)

    ring = Ring(rank, ranks, gather)
    token = np.zeros(1, np.float32)
    even = rank % 2 == 0
    with (Path(task.folder) / f"rank-{rank}.jsonl").open("ab", buffering=0) as out:
        for size in task.sizes:
            x, each = np.zeros(size // 4, np.float32), 2 * (ranks - 1) * size // ranks
            ops: dict[str, Callable[[], Any]] = {
                "puts": lambda each=each: ring.carry(each, True, True),
                "one way": lambda each=each: ring.carry(each, even, not even),
                "ftcomm": lambda x=x: group.allreduce(x),
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


if __name__ == "__main__":
    main(sys.argv)
