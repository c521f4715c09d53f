"""One rank of `ftcomm bench nixl`: python -m ftcomm.bench.nixl_rank TASK_FILE, under the launcher.

The yardstick is NIXL alone in the pattern of a ring: each rank puts to its right neighbour what an all-reduce has to
send, 2 (n - 1) / n of the array, out of an array of that size into one at the neighbour, in puts as large as a chunk of
ftcomm, as many at a time as ftcomm may have under way, and is put as much by its left one. "large puts" are of 8 MB.
"in cache" does the same within the first few MB of both arrays, which no all-reduce of a larger one can: it tells what
the memory costs. "one way": the even ranks alone put. "with sum": each adds as many bytes as it puts, behind each put:
what is left of the rate when nothing but the sum is added. One thread, agents of its own. No agreement, and no
notification but at the end.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np

import ftcomm
from ftcomm.bench.yardstick import DEADLINE, Task, run
from ftcomm.transport import nixl_library
from ftcomm.transport.nixl_memory import address_of
from ftcomm.transport.segment import CHUNK, NEAR

STAGED = NEAR * CHUNK  # bytes that ftcomm may have under way to a peer on this host
LARGE = 8 << 20  # bytes of a large put
_BLOB = 4096  # bytes that an agent's metadata fit in


class Ring:
    """The agents of two neighbours, and puts that are prepared once. `most` is the size of their arrays in bytes."""

    def __init__(
        self, rank: int, ranks: int, most: int, gather: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    ) -> None:
        self._agent = agent = nixl_library.load().agent(f"bench.{rank}", "")
        self.given, self.taken = arrays = [np.zeros(max(most, STAGED), np.uint8) for _ in range(2)]
        for number, array in enumerate(arrays):
            array[:] = rank + number  # a first touch costs a page fault
        self._handles = [agent.register_memory([(address_of(a), len(a), 0, "")], "DRAM") for a in arrays]
        metadata = agent.get_agent_metadata()
        card = np.zeros(_BLOB, np.uint8)
        card[:16] = np.frombuffer(np.array([address_of(self.taken), len(metadata)], np.int64).tobytes(), np.uint8)
        card[16 : 16 + len(metadata)] = np.frombuffer(metadata, np.uint8)
        right = gather(card)[(rank + 1) % ranks]
        self._there, length = (int(word) for word in right[:16].view(np.int64))
        self._right = agent.add_remote_agent(right[16 : 16 + length].tobytes())
        self._prepared: dict[tuple[int, int], Any] = {}
        self._ended = 0  # runs of the left neighbour

    def carry(
        self, nbytes: int, span: int, mine: bool = True, theirs: bool = True, size: int = CHUNK, sums: bool = False
    ) -> None:
        """Put so many bytes to the right, if `mine`, and be put as many by the left, if `theirs`: out of and into the
        first `span` bytes of the arrays, which are gone through again and again, `size` bytes at a time. With `sums`
        what lies in the one array is added to the other, as many bytes as are put."""
        agent = self._agent
        size = min(size, nbytes, span)
        left = -(-nbytes // size) if mine else 0
        places = itertools.cycle(range(0, span - size + 1, size))
        flying: list[Any] = []
        most = max(1, min(STAGED, span) // size)
        wanted = self._ended + theirs
        end = monotonic() + DEADLINE
        while left or flying or self._ended < wanted:
            while left and len(flying) < most:
                left -= 1
                at = next(places)
                handle = self._prepare(at, size)
                if agent.transfer(handle) == "PROC":
                    flying.append(handle)
                if sums:
                    out = self.given[at : at + size].view(np.float32)
                    np.add(out, self.taken[at : at + size].view(np.float32), out=out)
            while flying and agent.check_xfer_state(flying[0]) == "DONE":  # in their order: that is when they go on
                del flying[0]
            if mine and not left and not flying:
                agent.send_notif(self._right, b"all")
                mine = False
            self._ended += sum(len(messages) for messages in agent.get_new_notifs().values())
            if monotonic() > end:
                raise TimeoutError(f"{len(flying)} puts of {size} bytes have not ended within {DEADLINE:g} s")

    def _prepare(self, at: int, size: int) -> Any:
        handle = self._prepared.get((at, size))
        if handle is None:
            here = self._agent.get_xfer_descs([(address_of(self.given) + at, size, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(self._there + at, size, 0)], "DRAM")
            handle = self._prepared[at, size] = self._agent.initialize_xfer("WRITE", here, there, self._right, b"")
        return handle


def main(argv: list[str]) -> None:
    task = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Task)
    group = ftcomm.init()
    ranks = task.ranks

    def gather(card: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.zeros(ranks * len(card), np.uint8)
        group.all_gather(out, card)
        return out.reshape(ranks, -1)

    ring = Ring(group.replica, ranks, max(task.sizes), gather)
    even = group.replica % 2 == 0

    def ops(size: int) -> dict[str, Callable[[], Any]]:
        x, each = np.zeros(size // 4, np.float32), 2 * (ranks - 1) * size // ranks
        return {
            "puts": lambda: ring.carry(each, size),
            "large puts": lambda: ring.carry(each, size, size=LARGE),
            "in cache": lambda: ring.carry(each, min(size, STAGED)),
            "one way": lambda: ring.carry(each, size, even, not even),
            "with sum": lambda: ring.carry(each, size, sums=True),
            "ftcomm": lambda: group.allreduce(x),
        }

    run(task, group, ops)
    ftcomm.shutdown()


if __name__ == "__main__":
    main(sys.argv)
