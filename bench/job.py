"""A job under the real launcher, with somebody beside it who reads what its ranks write."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec

from ftcomm.errors import FtcommError
from ftcomm.launch import Launcher, RunOptions
from ftcomm.launch.run import DRAINED, FINISHED

Record = TypeVar("Record")
KEPT_LINES = 30  # of the ranks' output, for the error when a job fails


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

    async def runs(self, seconds: float) -> bool:
        """Wait `seconds`, or until the job has ended; False if it has."""
        await asyncio.wait([self._run], timeout=seconds)
        return not self._run.done()

    async def finish(self) -> None:
        """Wait for the end; raises `FtcommError`, with the last lines of the ranks, if it was a bad one."""
        code = await asyncio.shield(self._run)
        if code not in (FINISHED, DRAINED):
            raise FtcommError(f"the ranks failed (exit code {code}); their last lines:\n  " + "\n  ".join(self.lines))

    def _line(self, replica: int, rank: int, line: str) -> None:
        self.lines.append(f"[{replica}] {line}")


class Tail(Generic[Record]):
    """The records that ranks append to their files as lines of JSON, each read once."""

    def __init__(self, paths: Iterable[Path], kind: type[Record]) -> None:
        self._places = dict.fromkeys(paths, 0)
        self._decoder = msgspec.json.Decoder(kind)

    def read(self) -> list[Record]:
        """What came since the last call; a line that is not complete is left for the next."""
        found: list[Record] = []
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
