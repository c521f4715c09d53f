"""Jobs under the real launcher: started with a task, followed by the coordinator's events and the ranks' records.

The command writes the task to a file; each rank (`ftcomm.bench.rank`) reads it, and appends its records as lines of
JSON to a file of its own (`Records`), from which the command reads them while the job runs (`Tail`). A rank that is
killed leaves whole lines behind.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec

from ftcomm.errors import FtcommError
from ftcomm.launch import Launcher, RunOptions
from ftcomm.launch.policy import State
from ftcomm.launch.run import DRAINED, FINISHED

RecordT = TypeVar("RecordT")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # in the environment of ranks
KEPT_LINES = 30  # of the ranks' output, for the error when a job fails
WAIT_TIMEOUT = 60.0  # s that what an experiment waits for may take, before it gives up
FOREVER = 1 << 40  # steps of ranks that run until the job is drained

OnProgress = Callable[[str, float], None]  # what runs now, and the share that is done


class Job:
    """`async with Job(options) as job` starts the ranks; none of them lives on when the block is left."""

    def __init__(self, options: RunOptions, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self.launcher = Launcher(options, on_event, self._line, self.lines.append)

    async def __aenter__(self) -> Job:
        self._run = asyncio.create_task(self.launcher.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.cancel()
        with contextlib.suppress(asyncio.CancelledError, FtcommError):
            await self._run

    @property
    def ended(self) -> bool:
        return self._run.done()

    def pids(self) -> dict[tuple[int, int], int]:
        """Returns (replica, rank) -> pid of every rank that lives."""
        return self.launcher.pids()

    async def runs(self, seconds: float) -> bool:
        """Wait `seconds`, or until the job has ended; False if it has."""
        await asyncio.wait([self._run], timeout=seconds)
        return not self.ended

    async def finish(self) -> None:
        """Wait for the end; raises `FtcommError`, with the last lines of the ranks, if it was a bad one."""
        code = await asyncio.shield(self._run)
        if code not in (FINISHED, DRAINED):
            raise FtcommError(f"the ranks failed (exit code {code}); their last lines:\n  " + "\n  ".join(self.lines))

    def finished(self) -> None:
        """Raise `FtcommError`, with the last lines of the ranks, unless every replica has done all of its work."""
        for number, state in self.launcher.states().items():
            if state is not State.FINISHED:
                said = "\n  ".join(self.lines)
                raise FtcommError(f"replica {number} has not finished ({state.value}); the last lines:\n  {said}")

    def _line(self, replica: int, rank: int, line: str) -> None:
        self.lines.append(f"[{replica}] {line}")


class Tail(Generic[RecordT]):
    """The records that ranks append to their files as lines of JSON, each read once."""

    def __init__(self, paths: Iterable[Path], kind: type[RecordT]) -> None:
        self._places = dict.fromkeys(paths, 0)
        self._decoder = msgspec.json.Decoder(kind)

    def read(self) -> list[RecordT]:
        """Returns what came since the last call; a line that is not complete is left for the next."""
        found: list[RecordT] = []
        for path, place in self._places.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(place)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            found += [self._decoder.decode(line) for line in data[:whole].splitlines()]
            self._places[path] = place + whole
        return found


class Records:
    """The records that one rank writes down. One write a record, so that no reader, and no later process of this rank,
    sees half of one."""

    def __init__(self, folder: str, number: int) -> None:
        self._file = records_path(folder, number).open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def write(self, record: Any) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")


def records_path(folder: str, number: int) -> Path:
    return Path(folder) / f"rank-{number}.jsonl"


def tail(folder: str, ranks: int, kind: Any) -> Tail[Any]:
    return Tail([records_path(folder, rank) for rank in range(ranks)], kind)


@contextlib.contextmanager
def written_task(task: Any) -> Iterator[tuple[Any, Path]]:
    """A folder for the job and its task, a struct with a field `folder`, as a file in it; both go with the block."""
    with tempfile.TemporaryDirectory(prefix="ftcomm-bench-") as folder:
        task = msgspec.structs.replace(task, folder=folder)
        path = Path(folder) / "task.json"
        path.write_bytes(msgspec.json.encode(task))
        yield task, path


def rank_arguments(function: Callable[..., None], task: Path, *more: str) -> tuple[str, ...]:
    """Returns the arguments of `python -m ftcomm.bench.rank`, for a function of an experiment's module."""
    return (f"{function.__module__}:{function.__name__}", str(task), *more)


def job_options(
    arguments: Sequence[str], replicas: int, *, env: Mapping[str, str] | None = None, **options: Any
) -> RunOptions:
    """Makes the options of a job whose ranks are `ftcomm.bench.rank` with these arguments; more are of `RunOptions`."""
    env = {**ONE_THREAD, **(env or {})}
    args = tuple(arguments)
    return RunOptions(replicas=replicas, script="ftcomm.bench.rank", module=True, args=args, env=env, **options)


def whole_job(arguments: Sequence[str], ranks: int, **options: Any) -> RunOptions:
    """Makes those of a job that fails with its first rank: a measurement among fewer would be another one."""
    return job_options(arguments, ranks, min_replicas=ranks, max_restarts=0, **options)


def part(progress: OnProgress, number: int, of: int) -> OnProgress:
    """Returns the progress of one of several jobs, which run one after the other."""
    return lambda what, share: progress(what, (number + share) / of)


async def run_ranks(
    function: Callable[..., None],
    task: Any,
    ranks: int,
    kind: Any,
    total: int,
    progress: OnProgress,
    look: Callable[[Job, list[Any]], object] = lambda job, records: None,
    **options: Any,
) -> list[Any]:
    """A job of so many ranks that call `function` with `task`, and its records of `kind`, about `total` of them. `look`
    is called a few times a second with those that have come so far. Raises `FtcommError` if a rank fails; no process is
    left."""
    records: list[Any] = []
    with written_task(task) as (task, path):
        new = tail(task.folder, ranks, kind)
        async with Job(whole_job(rank_arguments(function, path), ranks, **options)) as job:
            runs = True
            while runs:
                progress(f"{ranks} ranks", min(1.0, len(records) / total))
                runs = await job.runs(0.2)
                records += new.read()
                look(job, records)
            await job.finish()
            job.finished()
    return records


class Observer(Generic[RecordT]):
    """A job that is waited for, and hit, by what its ranks write down. `job` is a `Job`, or one of a peer's ranks."""

    def __init__(
        self, job: Any, task: Any, kind: Any, replicas: int, ranks: int = 1, events: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.job, self.task, self.replicas, self.events = job, task, replicas, events
        self.records: list[RecordT] = []
        self.saw: Callable[[RecordT], object] = lambda record: None  # is called with each new one
        self._new = tail(task.folder, replicas * ranks, kind)

    async def until(self, what: str, true: Callable[[], bool], timeout: float = WAIT_TIMEOUT, **how: Any) -> None:
        """Wait until `true()`. Raises `FtcommError` when the job ends before that, and after `timeout` seconds."""
        if not await self.comes(true, timeout, **how):
            said = "\n  ".join([*map(str, self.records[-self.replicas :]), *self.job.lines])
            raise FtcommError(f"it did not come to pass within {timeout:g} s that {what}; last seen:\n  {said}")

    async def comes(
        self,
        true: Callable[[], bool],
        timeout: float = WAIT_TIMEOUT,
        pause: float = 0.02,
        moved: Callable[[], object] = lambda: None,
    ) -> bool:
        """Wait as `until` does, but return False after `timeout` seconds. They begin anew whenever `moved()` has
        another value."""
        deadline, last = time.monotonic() + timeout, moved()
        while not true():
            if time.monotonic() > deadline:
                return False
            runs = await self.job.runs(pause)
            for record in self._new.read():
                self.records.append(record)
                self.saw(record)
            if not runs and not true():
                await self.job.finish()
                raise FtcommError("the job ended by itself")
            if moved() != last:
                deadline, last = time.monotonic() + timeout, moved()
        return True

    def kill(self, replica: int, rank: int = 0) -> float:
        """SIGKILL; returns `time.monotonic()` of the call."""
        now = time.monotonic()
        os.kill(self.job.pids()[replica, rank], signal.SIGKILL)
        return now

    def said(self, kind: str, since: int = 0) -> list[dict[str, Any]]:
        return [event for event in self.events[since:] if event["kind"] == kind]

    def full_view(self, since: int) -> dict[str, Any] | None:
        """The newest view since then, if all replicas contribute in it."""
        views = self.said("view", since)
        members = views[-1]["members"] if views else []
        return views[-1] if len(members) == self.replicas and all(m["contributing"] for m in members) else None

    def view_without(self, replica: int, since: int) -> dict[str, Any] | None:
        """The first one."""
        views = self.said("view", since)
        return next((view for view in views if all(m["replica"] != replica for m in view["members"])), None)


@contextlib.asynccontextmanager
async def observed(
    function: Callable[..., None],
    task: Any,
    kind: Any,
    replicas: int,
    *,
    max_restarts: int = 1000,
    ranks_per_replica: int = 1,
    **options: Any,
) -> AsyncIterator[Observer[Any]]:
    """A job whose replicas are restarted at once when the block kills them. If they go on until they are drained, the
    end of the block does that."""
    events: list[dict[str, Any]] = []
    with written_task(task) as (task, path):
        again: dict[str, Any] = dict(max_restarts=max_restarts, backoff=0.05, backoff_limit=0.05)
        arguments = rank_arguments(function, path)
        chosen = job_options(arguments, replicas, ranks_per_replica=ranks_per_replica, **again, **options)
        async with Job(chosen, events.append) as job:
            yield Observer(job, task, kind, replicas, ranks_per_replica, events)
            if not job.ended:
                job.launcher.drain()
            await job.finish()


def together(records: Sequence[Any], replicas: int, least: int) -> bool:
    """Whether each replica has written so many of these records."""
    return all(sum(record.replica == replica for record in records) >= least for replica in range(replicas))
