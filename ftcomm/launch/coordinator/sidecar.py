"""A coordinator for a program that torchrun or mp.spawn has started. It is a process of its own, so that the job
outlives rank 0. It ends with the job, or when no rank has been connected for a while.

    python -m ftcomm.launch.coordinator.sidecar REPLICAS RANKS_PER_REPLICA HOST     # and FTCOMM_TOKEN, FTCOMM_JOB

It does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

from ftcomm.control.server import CoordinatorServer, ServerError
from ftcomm.errors import InitError
from ftcomm.settings import timeouts
from ftcomm.settings.credentials import from_env
from ftcomm.sync.sched import request_short_slice

ALONE = 30.0  # s without a connection, after which it ends; the first one comes sooner


def start(replicas: int, ranks_per_replica: int, token: str, job: str, host: str) -> str:
    """Start a sidecar; returns its endpoint. Blocks until it listens. Raises `InitError`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ftcomm.launch.coordinator.sidecar", str(replicas), str(ranks_per_replica), host],
        env={**os.environ, "FTCOMM_TOKEN": token, "FTCOMM_JOB": job},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a signal to this process, such as Ctrl-C, must not end it
    )
    assert process.stdout is not None
    with process.stdout as answer:
        endpoint = answer.readline().decode().strip()
    if not endpoint:
        raise InitError(f"the coordinator ended with code {process.wait()} before it listened on {host}; see above")
    return endpoint


async def _serve(replicas: int, ranks_per_replica: int, host: str) -> None:
    server = CoordinatorServer(
        replicas, ranks_per_replica, from_env(os.environ["FTCOMM_TOKEN"]), host=host, timeouts=timeouts(os.environ)
    )
    request_short_slice()  # since it hears of deaths
    try:
        await server.start()
    except ServerError as error:
        raise SystemExit(f"ftcomm: the coordinator cannot start: {error}") from None
    try:
        with os.fdopen(os.dup(1), "w") as out:
            print(server.endpoint, file=out)
        with open(os.devnull, "w") as nothing:  # the starter must not wait for this process at its end
            os.dup2(nothing.fileno(), 1)
        done = asyncio.ensure_future(server.wait_done())
        alone = 0.0
        while alone < ALONE and not done.done():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(done), 1.0)
            alone = 0.0 if server.steps else alone + 1.0
        done.cancel()
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
