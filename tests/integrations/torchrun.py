"""A torchrun for each replica of a job, whose workers are forks of it: it has imported what they need, and to import it
takes them longer than all that they do. Everything else of torchrun is torch's own, its agent and its store."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.process import job
from tests.rigs import preforked_ranks
from tests.rigs.deadlines import DEADLINE
from tests.rigs.orphan_watch import end_with_pytest
from tests.rigs.ports import free_port

MAX_RESTARTS = 5


class Worker:
    """What torchrun needs of a `Popen`."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], out: int) -> None:
        self.args = args
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # torchrun has handlers
            signal.signal(signal.SIGINT, signal.default_int_handler)
            command = list(args[args.index("-u") + 1 :])
            preforked_ranks.become_rank(command, env, os.getcwd(), {1: os.dup(out), 2: os.dup(out)}, None)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _torchrun(arguments: list[str], environment: dict[str, str], output: str) -> None:
    end_with_pytest()
    os.environ.clear()
    os.environ.update(environment)
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    subprocess_handler.SubprocessHandler._popen = lambda _, args, env: Worker(args, env, out)
    sys.argv = ["torchrun", *arguments]
    run.main(arguments)


def torchrun(folder: Path, *arguments: str, **environment: str) -> tuple[int | None, str]:
    """Returns how a torchrun has ended that is told of no job, and all that it and its workers have said."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("FTCOMM_")}
    output = folder / "output"
    there = ours | {"OMP_NUM_THREADS": "1"} | environment
    process = job._context.Process(target=_torchrun, args=(["--standalone", *arguments], there, str(output)))
    process.start()
    try:
        process.join(DEADLINE)
        return process.exitcode, output.read_text()
    finally:
        process.kill()


class Torchruns(job.Job):
    """`job.Job`, whose replicas are torchruns that run a script with its arguments; `ranks` workers of each."""

    def __init__(self, folder: Path, command: list[str], *, replicas: int = 2, ranks: int = 1) -> None:
        super().__init__(folder, replicas=replicas, ranks=ranks, body=lambda *_: None)
        self.command = command

    def start(self, replica: int) -> None:
        arguments = ["--standalone", "--nproc-per-node", str(self.ranks), "--max-restarts", str(MAX_RESTARTS)]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FTCOMM_")},
            "FTCOMM_COORDINATOR": self.endpoint,
            "FTCOMM_TOKEN": job.TOKEN,
            "FTCOMM_JOB": job.JOB,
            "FTCOMM_REPLICA": str(replica),
            "FTCOMM_REPLICAS": str(self.replicas),
            "FTCOMM_RANKS_PER_REPLICA": str(self.ranks),
            "FTCOMM_HEARTBEAT_TIMEOUT": "10",
            "FTCOMM_OP_TIMEOUT": "60",
            "FTCOMM_LOG": "warning",
        }
        if self.ranks > 1:
            environment["FTCOMM_LEADER"] = f"127.0.0.1:{free_port()}"
        process: Any = job._context.Process(
            target=_torchrun, args=([*arguments, *self.command], environment, str(self.output(replica)))
        )
        process.start()
        self.processes[replica, 0] = process

    def output(self, replica: int) -> Path:
        return self.folder / f"output-{replica}"

    def said(self) -> str:
        return "\n".join(self.output(replica).read_text() for replica in range(self.replicas))
