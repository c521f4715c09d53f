"""Ranks for tests of the all-reduce kernel: memory that the test and the processes of all ranks share, and processes
that launch the kernel in Triton's interpreter. The test plays the host of every rank.

Who imports this forks: nothing here may have started a thread before.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import msgspec
import torch
import triton.language as tl

from ftcomm.collective.chunks import chunk_count, pack
from ftcomm.collective.resume import REDUCE, Task, resume_tasks
from ftcomm.control.messages import Final, OpProgress, Progress
from ftcomm.engines.gpu_kernel.collective import CollectiveOperation
from ftcomm.engines.gpu_kernel.launch import collective_variant
from ftcomm.kernels.device import words as w
from ftcomm.kernels.device.allreduce import allreduce, collective
from ftcomm.kernels.dtypes import OPS
from ftcomm.kernels.epochs import COUNTER, COUNTS
from tests.rigs import rewritten_kernels  # noqa: F401  once for all ranks
from tests.rigs.orphan_watch import end_with_pytest

LANES, CHUNK, ONE_SHOT = 4, 1024, 4096
THREADS = 128
DEADLINE = 100.0  # s

_TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
}
_context = multiprocessing.get_context("fork")


def shared(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64).share_memory_()


class Rank:
    """The memory of one rank, and what its host does."""

    def __init__(self, replica: int = 0) -> None:
        self.replica = replica
        self.words = shared(w.LANES_AT + LANES * w.LINE)
        self.staging, self.flags = shared(2 * LANES * w.SLOTS * CHUNK // 8), shared(LANES * w.LINE)
        self.ctl, self.state, self.view = shared(w.CTL_WORDS), shared(w.STATE_WORDS), shared(w.VIEW_WORDS)
        self.tasks = shared(1024)
        self.epoch = 0
        self.left: int | None = None  # words of `tasks`, of the op that goes on in the next epoch

    def enter(self, members: Sequence[Rank], contributing: Sequence[int], epoch: int, number: int) -> None:
        """Indices in `members` of those who contribute. Everything but OPEN. With the `left` tasks of an op."""
        view = self.ctl[w.NEWS : w.NEWS + w.VIEW_WORDS]
        view[w.EPOCH], view[w.MEMBERS], view[w.ME] = epoch, len(members), members.index(self)
        view[w.SOURCES], view[w.CONTRIBUTES] = len(contributing), int(members.index(self) in contributing)
        view[w.SOLE], view[w.ONE_HOST] = (contributing[0] if len(contributing) == 1 else -1), 1
        for i, member in enumerate(members):
            view[w.FLAGS_OF + i], view[w.STAGING_OF + i] = member.flags.data_ptr(), member.staging.data_ptr()
        view[w.PRESENT] = sum(1 << member.replica for member in members)
        view[w.COPY] = self.words.data_ptr() + 8 * w.LANES_AT
        for j, index in enumerate(contributing):
            view[w.SOURCE_STAGING + j] = members[index].staging.data_ptr()
        for lane in range(LANES):
            self.words[w.LANES_AT + lane * w.LINE :][:3] = epoch << COUNTER
        view[w.RESUMED], view[w.TODO_OF] = number, 0
        if self.left is not None:
            view[w.TODO_OF], view[w.TODO], view[w.NTODO] = number + 1, self.tasks.data_ptr(), self.left
        self.ctl[w.RETURNED], self.epoch, self.left = number, epoch, None

    def freeze(self) -> None:
        """OPEN = 0, and nothing runs any more."""
        self.ctl[w.OPEN] = 0
        self.settle()

    def settle(self) -> None:
        until("the launch has ended", lambda: self.ctl[w.BEGUN] == self.ctl[w.FINISHED])

    @property
    def status(self) -> int:
        return int(self.ctl[w.STATUS])

    @property
    def returned(self) -> int:
        return int(self.ctl[w.RETURNED])

    @property
    def begun(self) -> bool:
        """Whether an op was begun that has not returned."""
        return int(self.ctl[w.STARTED]) == self.returned + 1

    def taken(self, ntasks: int) -> list[int]:
        """Which tasks of the op that was begun are done; frozen."""
        base, lanes = int(self.ctl[w.BASE_OF]), max(1, min(LANES, ntasks))
        done = []
        for lane in range(lanes):
            word = int(self.words[w.LANES_AT + lane * w.LINE + w.TAKEN])
            count = (word & (COUNTS - 1)) - base if word >> COUNTER == self.epoch else 0
            done += [lane + k * lanes for k in range(max(0, count))]
        return sorted(i for i in done if i < ntasks)

    def launch(
        self, x: torch.Tensor, *, op: str = "sum", call: int = 0, grid: int = 1, deadline: float = 0.0,
        template: int = 0, sources: int = 2, kept: torch.Tensor | None = None, coded: bool = False,
    ) -> None:  # fmt: skip
        """In the process of the rank."""
        chunks = chunk_count(x.numel(), CHUNK // x.element_size())
        allreduce[(max(1, min(grid, LANES, chunks)),)](
            self.ctl.data_ptr(), self.state.data_ptr(), self.view.data_ptr(), x.data_ptr(),
            0 if kept is None else kept.data_ptr(), chunks, x.numel(), call or x.numel(), template,
            int(deadline * 1e9), T=_TYPES[x.dtype], OP=OPS.index(op), W=sources, BLOCK=512 if coded else 256,
            COPIED=128, ALIGNED=True, LANES=LANES, CHUNK=CHUNK, ONE_SHOT=ONE_SHOT, THREADS=THREADS, CODED=coded,
        )  # fmt: skip

    def run(self, op: CollectiveOperation, *, grid: int = 1, sources: int = 2) -> None:
        """A collective that is no all-reduce, in the process of the rank."""
        layout = SimpleNamespace(lanes=LANES, chunk=CHUNK)
        view = SimpleNamespace(contributors=tuple(range(sources)))
        constants = msgspec.structs.asdict(collective_variant(op, layout, view))  # type: ignore[arg-type]
        rows = len(op.finals)
        table = torch.tensor(op.pieces) if op.pieces else None
        collective[(max(1, min(grid, LANES, rows)),)](
            self.ctl.data_ptr(), self.state.data_ptr(), self.view.data_ptr(), op.array.data_ptr(),
            op.source.data_ptr(), rows, op.elements, op.compared, max(0, op.template), 0, op.who,
            0 if table is None else table.data_ptr(), BLOCK=256, COPIED=128, THREADS=THREADS, **constants,
        )  # fmt: skip


def until(what: str, condition: Callable[[], object], deadline: float = DEADLINE) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"not within {deadline:g} s: {what}"
        time.sleep(0.0005)


def _run(body: Callable[[], None]) -> None:
    end_with_pytest()
    body()


def start(*bodies: Callable[[], None]) -> list[multiprocessing.process.BaseProcess]:
    processes = [_context.Process(target=_run, args=(body,), daemon=True) for body in bodies]
    for process in processes:
        process.start()
    return list(processes)


def join(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    end = time.monotonic() + DEADLINE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(codes)


@contextlib.contextmanager
def running(*bodies: Callable[[], None]) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """The processes are gone afterwards, whatever happens."""
    processes = start(*bodies)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def group(size: int, contributing: Sequence[int] | None = None, epoch: int = 1, number: int = 0) -> list[Rank]:
    ranks = [Rank(replica) for replica in range(size)]
    view_change(ranks, list(range(size)) if contributing is None else contributing, epoch, number)
    return ranks


def view_change(ranks: Sequence[Rank], contributing: Sequence[int], epoch: int, number: int) -> None:
    """All are frozen."""
    for rank in ranks:
        rank.enter(ranks, contributing, epoch, number)
    for rank in ranks:
        rank.ctl[w.OPEN] = epoch


class Op:
    """One op of a group over any number of views: what each rank holds of it, as its host knows."""

    def __init__(self, arrays: Sequence[torch.Tensor], number: int) -> None:
        self.arrays, self.number = arrays, number
        self.chunks = chunk_count(arrays[0].numel(), CHUNK // arrays[0].element_size())
        self.tasks: list[Task] = [Task(chunk, REDUCE, ()) for chunk in range(self.chunks)]
        self.finals: dict[int, dict[int, tuple[int, ...]]] = {who: {} for who in range(len(arrays))}

    def account(self, who: int, rank: Rank, contributing: Sequence[int]) -> None:
        """After a freeze in a view of `contributing`."""
        if rank.returned > self.number:
            self.finals[who] = {**self.finals[who], **self._done(range(len(self.tasks)), contributing)}
        elif rank.begun:
            self.finals[who].update(self._done(rank.taken(len(self.tasks)), contributing))

    def _done(self, tasks: Sequence[int], contributing: Sequence[int]) -> dict[int, tuple[int, ...]]:
        done = [self.tasks[i] for i in tasks]
        return {task.chunk: task.contributors or tuple(contributing) for task in done}

    def progress(self, who: int, rank: Rank) -> Progress:
        if rank.returned > self.number:
            return Progress(returned=rank.returned, ops=())
        sets: dict[tuple[int, ...], list[int]] = {}
        for chunk, contributors in self.finals[who].items():
            sets.setdefault(contributors, []).append(chunk)
        finals = tuple(Final(contributors, pack(held, self.chunks)) for contributors, held in sets.items())
        return Progress(returned=rank.returned, ops=(OpProgress(self.number, finals),))

    def plan(self, members: Sequence[int], ranks: Sequence[Rank]) -> None:
        """What is left to do in a view of `members`, written where their kernels read it."""
        progress = {who: self.progress(who, ranks[who]) for who in members}
        self.tasks = list(resume_tasks(self.number, self.chunks, progress))
        for who in members:
            for i, task in enumerate(self.tasks):
                holder = 0 if task.holder == REDUCE else list(members).index(task.holder) + 1
                skip = task.holder != REDUCE and task.chunk in self.finals[who]
                ranks[who].tasks[i] = task.chunk | holder << w.HOLDER | int(skip) << w.SKIP
            ranks[who].left = len(self.tasks) if ranks[who].begun else None


def seed() -> int:
    """FTCOMM_SEED, or one of its own; printed, so that a failure can be repeated."""
    value = int(os.environ.get("FTCOMM_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"FTCOMM_SEED={value}")
    return value
