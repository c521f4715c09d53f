"""`ftcomm bench nixl`: how much of what NIXL alone puts an all-reduce over NIXL carries, in the same run.

The baseline is NIXL alone in the pattern of a ring. Each rank puts to its right neighbour what an all-reduce has to
send, 2 (n - 1) / n of the array, and receives as much from its left one. It puts out of an array of that size into one
at the neighbour; a put is as large as a chunk of ftcomm, and as many are in flight as ftcomm may have. One thread does
it, with agents of its own. Nothing is agreed upon, and a notification comes only at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import msgspec
import numpy as np

import ftcomm
from ftcomm.bench.baseline import DEADLINE, BaselineBlock, BaselineTask, check, reporter, rounds_us, run, share
from ftcomm.bench.harness import SIZES, BenchReport, Column, Experiment, Table, option
from ftcomm.bench.job import run_ranks
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import busbw_factor, median
from ftcomm.errors import SettingsError
from ftcomm.transport.nixl import library as nixl_library
from ftcomm.transport.nixl import network as nixl_network
from ftcomm.transport.nixl.memory import address_of
from ftcomm.transport.segment import CHUNK, NEAR

LIBRARIES = ("puts", "large puts", "in cache", "one way", "with sum", "ftcomm")
STAGED = NEAR * CHUNK  # bytes that ftcomm may have under way to a peer on this host
LARGE = 8 << 20  # bytes of a large put
_BLOB = 4096  # bytes that an agent's metadata fit in


@dataclasses.dataclass(frozen=True)
class NixlRequest:
    """All-reduce over NIXL beside NIXL alone, which puts the same bytes.

    puts: every rank puts 2 (n - 1) / n of the array to the next one, out of an array of that size into one there, in
    puts as large as a chunk of ftcomm, both ways at once. large puts: of 8 MB. in cache: within the first MB, which no
    all-reduce of a larger array can: it tells what the memory costs. one way: every other rank puts, and the others
    receive. with sum: each also adds as many bytes as it puts, as an all-reduce has to. None agrees on anything. Shares
    are of rounds, in which all ran one after the other. UCX_NET_DEVICES and UCX_TLS choose the way, for both.
    """

    sizes: Sequence[int] = option((64 << 20, 256 << 20), kind=SIZES, help="Arrays (fp32).")
    ranks: int = option(2, help="Processes.")
    iterations: int = option(5, "-n", "--iters", help="Timed ops in a round.")
    rounds: int = option(5, help="So many times puts, ftcomm.")

    def smoke(self) -> NixlRequest:
        """Two ranks and 1 MB, to see that it runs."""
        return NixlRequest((1 << 20,), 2, 2, 1)

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot be measured."""
        check(self.sizes, (self.ranks,), self.iterations, self.rounds, arrays=3)
        if self.ranks % 2:
            raise SettingsError(f"--ranks {self.ranks}: expected an even number, as every other one puts to its right.")


class NixlRow(msgspec.Struct, frozen=True):
    """One of `LIBRARIES` at one size. The time is that of the slowest rank; medians over rounds of medians."""

    library: str
    ranks: int
    bytes: int
    time_us: float
    rate_gbps: float  # what each rank has to put over the time
    of_puts: float  # the share of what puts both ways carried in the same round, median over rounds
    round_us: list[float]


async def measure(request: NixlRequest, report: BenchReport) -> None:
    """Report the rows of each size as soon as the ranks have measured it. Raises `FtcommError` if one fails."""
    report.more["nixl"] = nixl_library.load().version
    task = BaselineTask(
        ranks=request.ranks,
        sizes=tuple(request.sizes),
        iterations=request.iterations,
        rounds=request.rounds,
        libraries=LIBRARIES,
    )
    total = request.ranks * len(task.sizes) * task.rounds * len(LIBRARIES)
    look = reporter(task, lambda blocks, size: rows(blocks, task, size), report.add)
    await run_ranks(
        rank, task, request.ranks, BaselineBlock, total, report.progress, lambda job, new: look(new), transport="nixl"
    )


def rows(blocks: Iterable[BaselineBlock], task: BaselineTask, size: int) -> list[NixlRow]:
    """All ranks' blocks of one size -> a row for each library, the baseline first."""
    found = rounds_us(blocks, task, size)
    made = size * busbw_factor(task.ranks) / 1e3  # GB a second, over us
    return [
        NixlRow(library, task.ranks, size, median(times), made / median(times), share(found["puts"], times), times)
        for library, times in found.items()
    ]


COLUMNS = (
    Column("what", "", -10, lambda row: row.library),
    Column("ranks", "", 5, lambda row: str(row.ranks)),
    Column("size", "(B)", 8, lambda row: format_size(row.bytes)),
    Column("time", "(us)", 13, lambda row: f"{row.time_us:.0f}"),
    Column("rate", "(GB/s)", 13, lambda row: f"{row.rate_gbps:.2f}"),
    Column("of puts", "", 10, lambda row: f"{row.of_puts:.0%}"),
)

EXPERIMENT = Experiment(
    "nixl",
    NixlRequest,
    measure,
    [Table("rows", NixlRow, COLUMNS)],
    heading=lambda request: [f"# NIXL {nixl_library.load().version}"],
)


# -- in a rank ---------------------------------------------------------------------------------------------------------


class NixlRing:
    """The agents of two neighbours, and puts that are prepared once. `most` is the size of their arrays in bytes."""

    def __init__(
        self, rank: int, ranks: int, most: int, gather: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    ) -> None:
        self._agent = agent = nixl_library.load().agent(f"bench.{rank}", "", nixl_network.here())
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
        self._expected = self._ended = 0  # runs of the left neighbour, which may be one ahead of us

    def transfer(
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
        self._expected += theirs
        end = monotonic() + DEADLINE
        while left or flying or self._ended < self._expected:
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


def rank(task: BaselineTask) -> None:
    group = ftcomm.init()
    ranks = task.ranks

    def gather(card: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.zeros(ranks * len(card), np.uint8)
        group.allgather(out, card)
        return out.reshape(ranks, -1)

    ring = NixlRing(group.replica, ranks, max(task.sizes), gather)
    even = group.replica % 2 == 0

    def ops(size: int) -> dict[str, Callable[[], Any]]:
        x, each = np.zeros(size // 4, np.float32), 2 * (ranks - 1) * size // ranks
        return {
            "puts": lambda: ring.transfer(each, size),
            "large puts": lambda: ring.transfer(each, size, size=LARGE),
            "in cache": lambda: ring.transfer(each, min(size, STAGED)),
            "one way": lambda: ring.transfer(each, size, even, not even),
            "with sum": lambda: ring.transfer(each, size, sums=True),
            "ftcomm": lambda: group.allreduce(x),
        }

    run(task, group, ops)
    ftcomm.shutdown()
