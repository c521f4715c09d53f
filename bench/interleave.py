"""Interleaved measurement: the command gives one library a turn at a time, and its ranks take it and answer.

Each library runs in processes of its own, which sleep until it is their turn. So libraries alternate within a second,
A B A B, and one that crashes takes no other with it. One socket, lines of JSON; an end that finds the other one closed
knows that it is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ftcomm.bench.collectives import OUT

ResultT = TypeVar("ResultT")
HELLO = 90.0  # s that the ranks of a library may take to come


class RankHello(msgspec.Struct, frozen=True):
    job: str
    rank: int
    error: str = ""  # why this rank cannot measure


class BenchTurn(msgspec.Struct, frozen=True):
    library: str
    size: int  # index
    place: str = OUT


class TimedBlock(msgspec.Struct, frozen=True):
    """Timings of one rank; nanoseconds."""

    rank: int
    times: list[int] = []  # of each timed op
    elapsed: int = 0  # from the first timed op's start to the last one's end, without what lies between cuts
    wrong: int = 0  # elements
    error: str = ""  # instead of all that: what went wrong
    refused: bool = False  # with an error: the op is not there, and nothing has begun


class RanksGone(Exception):
    """Ranks of a job that crashed, or do not come or answer; its text is for the job's rows."""


class OpDeclined(Exception):
    """All ranks of a job live, and say that this op is none of theirs."""


class Interleaver:
    """The command's end. `async with Interleaver(path) as turns`; then `expect` a job, and give `turn`s to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._came: dict[str, dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._told: dict[str, str] = {}
        self._change = asyncio.Condition()

    async def __aenter__(self) -> Interleaver:
        self._server = await asyncio.start_unix_server(self._greet, self.path, limit=1 << 26)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for ranks in self._came.values():
            for _, writer in ranks.values():
                writer.close()

    async def expect(self, job: str, ranks: int, process: asyncio.Future[str]) -> None:
        """Wait until all ranks of a job have come. `process` is done, with words, when the job has ended.

        Raises `RanksGone`."""

        def all_there() -> bool:
            return len(self._came.get(job, ())) == ranks or job in self._told

        async def come() -> None:
            async with self._change:
                await self._change.wait_for(all_there)

        await self._or_gone(come(), process, HELLO, "its ranks did not all come")
        if job in self._told:
            raise RanksGone(self._told[job])

    async def turn(self, job: str, turn: BenchTurn, timeout: float, process: asyncio.Future[str]) -> list[TimedBlock]:
        """All ranks' blocks, in rank order. Raises `RanksGone` or `OpDeclined`."""

        async def take() -> list[TimedBlock]:
            ranks = [pair for _, pair in sorted(self._came[job].items())]
            for _, writer in ranks:
                writer.write(msgspec.json.encode(turn) + b"\n")
            blocks = []
            answers = [asyncio.ensure_future(reader.readline()) for reader, _ in ranks]
            try:
                for answer in asyncio.as_completed(answers):
                    blocks.append(await self._read(answer, process))
            finally:
                for one in answers:  # a silent one may answer in another turn
                    one.cancel()
            if refused := next((block for block in blocks if block.refused), None):
                raise OpDeclined(refused.error)
            return sorted(blocks, key=lambda block: block.rank)

        return await self._or_gone(take(), process, timeout, f"it was not done with {turn}")

    async def _read(self, answer: Awaitable[bytes], process: asyncio.Future[str]) -> TimedBlock:
        """Read a block. No rank is waited for that answers after one that failed: it may hang in the op."""
        try:
            line = await answer
        except OSError:
            line = b""
        block = msgspec.json.decode(line, type=TimedBlock) if line.endswith(b"\n") else None
        if block is None or (block.error and not block.refused):
            # To say how it ended, not only that it did, be it that another one has heard of that first.
            await asyncio.wait([process], timeout=5 if block is None else 3)
            otherwise = "a rank closed its connection" if block is None else block.error
            raise RanksGone(process.result() if process.done() else otherwise)
        return block

    async def _or_gone(
        self, what: Coroutine[Any, Any, ResultT], process: asyncio.Future[str], timeout: float, otherwise: str
    ) -> ResultT:
        task = asyncio.ensure_future(what)
        try:
            await asyncio.wait([task, process], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if process.done():
                raise RanksGone(process.result())
            raise RanksGone(f"{otherwise} within {timeout:g} s")
        finally:
            task.cancel()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line:
            return
        hello = msgspec.json.decode(line, type=RankHello)
        async with self._change:
            if hello.error:
                self._told[hello.job] = f"rank {hello.rank}: {hello.error}"
            self._came.setdefault(hello.job, {})[hello.rank] = reader, writer
            self._change.notify_all()


class RankChannel:
    """A rank's end. Blocking."""

    def __init__(self, path: str, job: str, rank: int, error: str = "") -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.sendall(msgspec.json.encode(RankHello(job, rank, error)) + b"\n")

    def turns(self) -> Iterator[BenchTurn]:
        """Each is to be answered before the next; ends when the command has gone."""
        with self._socket.makefile("rb") as lines:
            for line in lines:
                yield msgspec.json.decode(line, type=BenchTurn)

    def answer(self, block: TimedBlock) -> None:
        self._socket.sendall(msgspec.json.encode(block) + b"\n")
