"""`ftcomm coordinator`: a coordinator on its own, for replicas that a cluster's own launcher starts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from pathlib import Path
from typing import Any

from ftcomm.control.server import CoordinatorServer, ServerError
from ftcomm.control.timeouts import Timeouts
from ftcomm.errors import InitError, SettingsError
from ftcomm.kernels.urgent import urgent
from ftcomm.launch.options import TIMEOUT_OPTIONS
from ftcomm.launch.words import describe
from ftcomm.settings import chain

FINISHED, FAILED, STOPPED = 0, 1, 3  # exit codes

MAKE_TOKEN = "export FTCOMM_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')"


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
    """Times are seconds. Without `store` the file of views lies in the working directory, named after the port."""

    replicas: int
    token: str = dataclasses.field(repr=False)
    ranks_per_replica: int = 1
    host: str = "127.0.0.1"
    port: int = 29400
    store: Path | None = None
    heartbeat_timeout: float | None = None
    op_timeout: float = 120.0
    op_timeout_floor: float | None = None

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, on what cannot work."""
        if self.replicas < 1 or self.ranks_per_replica < 1:
            raise SettingsError("--replicas and --ranks-per-replica: expected 1 or more, as in --replicas 4.")
        if not 0 <= self.port < 65536:
            raise SettingsError(f"--port {self.port}: expected 0 (any free one) to 65535.")
        if not self.token:
            raise SettingsError(f"FTCOMM_TOKEN is not set; all of a job share one secret. Make it with: {MAKE_TOKEN}")
        _ = self.timeouts

    @property
    def timeouts(self) -> Timeouts:
        """Raises `SettingsError` if they cannot work together."""
        return chain(self.op_timeout, self.heartbeat_timeout, self.op_timeout_floor, TIMEOUT_OPTIONS)


def run(options: CoordinatorOptions) -> int:
    """Serve one job to its end; the exit code. Raises `SettingsError`, `InitError`. Blocks."""
    options.check()
    return asyncio.run(_serve(options))


async def _serve(options: CoordinatorOptions) -> int:
    store = options.store or Path(f"ftcomm-views-{options.port}.jsonl")
    lost = False

    def on_event(event: dict[str, Any]) -> None:
        nonlocal lost
        lost |= event["kind"] == "failed"
        _say(event)

    server = CoordinatorServer(
        replicas=options.replicas,
        ranks_per_replica=options.ranks_per_replica,
        token=options.token,
        host=options.host,
        port=options.port,
        store=store,
        timeouts=options.timeouts,
        on_event=on_event,
    )
    try:
        urgent()
        await server.start()
    except ServerError as error:
        raise InitError(f"the coordinator cannot start: {error}") from None
    try:
        print(_instructions(options, server.endpoint), flush=True)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        done = asyncio.ensure_future(server.wait_done())
        signalled = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({done, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if done.done():
            if server.failed and not lost:  # the file could not be written: the job goes on, and needs it
                _tell(f"{server.failed}. Then start this coordinator again with --port and --store as they were.")
                return FAILED
            # The file of a job that is over would make the next one of this name begin with members that are gone.
            store.unlink(missing_ok=True)
            return FAILED if server.failed else FINISHED
        done.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await done
        _tell(f"stopped; the job goes on. Start this coordinator again with --port and --store {store} as they were.")
        return STOPPED
    finally:
        await server.stop()


def _instructions(options: CoordinatorOptions, endpoint: str) -> str:
    lines = [
        f"ftcomm: coordinator at {endpoint}, waiting for {options.replicas} replicas. On every replica:",
        f"  export FTCOMM_COORDINATOR={endpoint}",
        "  export FTCOMM_TOKEN=...   # the same secret as here",
        f"  export FTCOMM_REPLICAS={options.replicas}",
        f"  export FTCOMM_REPLICA=0   # to {options.replicas - 1}, its own",
    ]
    if options.ranks_per_replica > 1:
        lines += [
            f"  export FTCOMM_RANKS_PER_REPLICA={options.ranks_per_replica}",
            f"  export FTCOMM_RANK=0   # to {options.ranks_per_replica - 1}, each process its own",
            "  export FTCOMM_LEADER=HOST:PORT   # where rank 0 of this replica listens; the same on all its ranks",
        ]
    if options.timeouts != Timeouts.derive():
        lines += [
            f"  export FTCOMM_HEARTBEAT_TIMEOUT={options.timeouts.heartbeat:g}",
            f"  export FTCOMM_OP_TIMEOUT_FLOOR={options.timeouts.op_floor:g}",
            f"  export FTCOMM_OP_TIMEOUT={options.timeouts.op:g}",
        ]
    return "\n".join(lines)


def _say(event: dict[str, Any]) -> None:
    text = event.get("reason") if event["kind"] == "failed" else describe(event)
    if text:
        _tell(text)


def _tell(text: str) -> None:
    print(f"ftcomm: {text}", file=sys.stderr, flush=True)
