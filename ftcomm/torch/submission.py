"""Starts the calls of a process group, and makes their works: how torch waits, until when, and what a profiler sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d

from ftcomm.errors import CollectiveTimeout, FtcommError
from ftcomm.process.own import own_process
from ftcomm.torch.work import FtWork, Futures, WorkPart


class Submission:
    """The calls of one process group. `group` is the group beneath, of which rank and size are asked anew in every
    call; `timeout` is that of a call without one of its own."""

    def __init__(self, group: Any, timeout: float, name: str) -> None:
        self.group, self.timeout, self.name = group, timeout, name
        self.sequence = 0
        self.gone = ""  # why the process group has ended
        self._futures = Futures(getattr(group, "repeats_step_after", lambda error: False))
        self._together: list[FtWork] | None = None  # the calls since `start_coalescing`

    def close(self, why: str, end: Callable[[], None]) -> None:
        """Note that the process group has ended, and call `end`, the first time."""
        if not self.gone:
            self.gone = why
            end()
            self._futures.close()

    def check(self) -> None:
        """Raise if no call is possible any more."""
        own_process()
        if self.gone:
            raise FtcommError(
                f"process group {self.name!r} does not exist any more: {self.gone}. Call dist.init_process_group, or "
                "dist.new_group, before any collective."
            )
        if self._futures.cut_off:
            # A caller that waits for a future, as DDP does, refills the buffer before the op writes its result.
            raise CollectiveTimeout(
                f"process group {self.name!r} is at its end: {self._futures.cut_off} timed out while it went on in a "
                "buffer that DDP, or a hook, uses again. Start the program again from its last checkpoint, or raise "
                "the timeout of the group (dist.init_process_group(timeout=...))."
            )

    def call(self, opts: Any, at_once: bool, call: str, *args: Any) -> list[WorkPart]:
        """Start an op. If torch waits for it anyway (and `at_once` allows it), this thread drives it to its end, which
        saves two changes of threads. A timeout that comes before the op's own needs another thread to watch the clock.
        """
        # Does an op that stands still fail by itself before the timeout of this group?
        in_time = self.group.op_timeout <= self.timeout
        drive = at_once and in_time and not opts.asyncOp and opts.timeout.total_seconds() <= 0
        method = getattr(self.group, call)
        if torch.autograd._profiler_enabled():
            with seen_by_profilers(call):
                made = method(*args, async_op=not drive)
        else:
            made = method(*args, async_op=not drive)
        return [] if drive else [made]

    def work(
        self,
        name: str,
        parts: Sequence[WorkPart],
        result: list[torch.Tensor],
        opts: Any,
        finish: Callable[[], None] | None = None,
    ) -> FtWork:
        """Returns the work of a call that has been started in `parts`; `finish` brings the result to where torch wants
        it."""
        self.sequence += 1
        seconds = 0.0 if opts is None else opts.timeout.total_seconds()
        timeout = seconds if seconds > 0 else self.timeout
        what = f"{name} of group {self.name!r}"
        work = FtWork(what, parts, result, self._futures, finish, timeout, self.sequence)
        if opts is not None and opts.asyncOp and _distributed_c10d._allow_inflight_collective_as_graph_input():
            work.register()
        if self._together is not None:
            self._together.append(work)
        return work

    def start_coalescing(self) -> None:
        if self._together is not None:
            raise FtcommError("_start_coalescing was called twice; end the first window first")
        self._together = []

    def end_coalescing(self) -> FtWork:
        works, self._together = self._together or [], None
        parts: list[Any] = list(works)
        return self.work("coalesced ops", [_Nested(work) for work in parts], [], None)


def seen_by_profilers(call: str) -> contextlib.AbstractContextManager[Any]:
    """Records the event of a call under torch's name for it; for an asynchronous call, the event of its start."""
    if not torch.autograd._profiler_enabled():
        return _UNSEEN
    seen: contextlib.AbstractContextManager[Any] = torch.autograd.profiler.record_function(
        f"ftcomm:{'all_reduce' if call == 'allreduce' else call}"
    )
    return seen


_UNSEEN = contextlib.nullcontext()


class _Nested:
    """A work of torch as a part of another one."""

    def __init__(self, work: FtWork) -> None:
        self._work = work

    def wait(self, timeout: float | None = None) -> Any:
        self._work.wait(None if timeout is None else timedelta(seconds=max(timeout, 1e-3)))

    def done(self) -> bool:
        return self._work.is_completed()
