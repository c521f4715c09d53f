"""A coordinator for a program that torchrun or mp.spawn has started: a process of its own, so that the job outlives
rank 0. It ends with the job, or when nobody has been connected for a while.

    python -m ftcomm.launch.sidecar REPLICAS RANKS_PER_REPLICA HOST    # the token comes by FTCOMM_TOKEN

It does not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

from ftcomm.control.server import CoordinatorServer, ServerError
from ftcomm.credentials import from_env
from ftcomm.errors import InitError
from ftcomm.settings import timeouts
from ftcomm.sync.sched import request_short_slice

ALONE = 30.0  # s without anybody, after which it ends; at the start nobody takes that long to come


def start(replicas: int, ranks_per_replica: int, token: str, host: str) -> str:
    """Start one; its endpoint. Blocks until it listens. Raises `InitError`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ftcomm.launch.sidecar", str(replicas), str(ranks_per_replica), host],
        env={**os.environ, "FTCOMM_TOKEN": token},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # what ends this process, Ctrl-C too, must not end it
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
    request_short_slice()  # it hears of the deaths
    try:
        await server.start()
    except ServerError as error:
        raise SystemExit(f"ftcomm: the coordinator cannot start: {error}") from None
    try:
        with os.fdopen(os.dup(1), "w") as out:
            print(server.endpoint, file=out)
        with open(os.devnull, "w") as nothing:  # who started us must not wait for us at its end
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
