"""The coordinator of a run. It lives in the launcher's event loop, and can be replaced as if it had crashed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ftcomm.control.handshake import Credentials
from ftcomm.control.port import Port
from ftcomm.control.server import CoordinatorServer, Serve, ServerError
from ftcomm.errors import FtcommError, InitError
from ftcomm.launch.options import RunOptions
from ftcomm.sync.sched import request_short_slice

RETRY = 1.0  # s between two attempts to come back


class EmbeddedCoordinator:
    """Runs the coordinator of one job on one event loop; calls `emit(kind)` when the coordinator goes and comes."""

    def __init__(
        self,
        options: RunOptions,
        credentials: Credentials,
        host: str,
        store: Path,
        on_event: Callable[[dict[str, Any]], None],
        emit: Callable[[str], None],
        port: int = 0,
        others: Mapping[str, Serve] = MappingProxyType({}),
    ) -> None:
        self._others = others
        self._options, self._credentials, self._host, self._store = options, credentials, host, store
        self._on_event, self._emit = on_event, emit
        self._draining = False
        self._returning: asyncio.Task[None] | None = None
        self._port = Port(host, port)
        self.server = self._new()  # replaced by `restart`

    @property
    def away(self) -> bool:
        return self._returning is not None

    async def start(self) -> None:
        """Start the coordinator. Raises `InitError`."""
        request_short_slice()  # since it hears of deaths
        try:
            await self.server.start()
        except ServerError as error:
            raise InitError(f"the coordinator cannot start: {error}") from None

    def drain(self) -> None:
        """Drain the job, also by the coordinator that comes back if none is here now."""
        self._draining = True
        self.server.drain()

    def restart(self, away: float) -> asyncio.Task[None]:
        """Restart, as `Launcher.restart_coordinator` says."""
        if self._returning is not None:
            raise FtcommError("the coordinator is being restarted already; ask again when it is back")
        self._returning = asyncio.get_running_loop().create_task(self._replace(away))
        return self._returning

    async def stop(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.wait([self._returning])
        await self.server.stop()
        self._port.close()

    def _new(self) -> CoordinatorServer:
        return CoordinatorServer(
            replicas=self._options.replicas,
            ranks_per_replica=self._options.ranks_per_replica,
            credentials=self._credentials,
            host=self._host,
            port=self._port,
            store=self._store,
            timeouts=self._options.timeouts,
            on_event=self._on_event,
            others=self._others,
        )

    async def _return(self) -> None:
        """Start the new coordinator, with as many attempts as it takes: the job trains on without it, even while the
        store is down."""
        told = ""
        while True:
            try:
                await self.start()
                break
            except (InitError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    self._tell(
                        f"{told}. Until then no replica joins, leaves or is replaced; "
                        f"it is tried again every {RETRY:g} s"
                    )
            await asyncio.sleep(RETRY)
        if told:
            self._tell("the coordinator is back")

    def _tell(self, text: str) -> None:
        self._on_event({"kind": "store", "text": text, "time": time.time(), "mono": time.monotonic()})

    async def _replace(self, away: float) -> None:
        try:
            await self.server.stop()
            self._emit("coordinator_stopped")
            await asyncio.sleep(away)
            self.server = self._new()
            await self._return()
            self._emit("coordinator_started")
            if self._draining:
                self.server.drain()
        finally:
            self._returning = None
