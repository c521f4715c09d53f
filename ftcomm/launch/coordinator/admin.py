"""The admin socket of `ftcomm coordinator`: what a launcher answers of its job, as far as a coordinator knows it."""

from __future__ import annotations

import os
from collections.abc import Callable

from ftcomm.control.messages import Event
from ftcomm.control.server import CoordinatorServer
from ftcomm.errors import FtcommError
from ftcomm.launch.admin import protocol
from ftcomm.launch.admin.server import AdminServer
from ftcomm.launch.monitor import MonitorLoop
from ftcomm.launch.rundir import SocketDir
from ftcomm.monitoring.history import HistoryWriter
from ftcomm.monitoring.job import JobMonitor

SCRIPT = "(started elsewhere)"


class CoordinatorAdmin:
    """Serves the socket and the history of one job on one event loop. `server` is asked only after `open`."""

    def __init__(
        self, server: Callable[[], CoordinatorServer], replicas: int, ranks: int, history: HistoryWriter
    ) -> None:
        """Make the directory of the socket. Raises `SettingsError`, `OSError` where there is no place for it."""
        self._server, self._ranks = server, ranks
        self._directory = SocketDir()
        self.socket = self._directory.path / protocol.SOCKET
        job = JobMonitor(self._directory.run, SCRIPT, replicas, ranks, lambda replica: server().hosts.get(replica, ""))
        self._monitor = MonitorLoop(job, lambda: server().steps, history)
        self._admin = AdminServer(self.socket, self._answer)
        self._last = ""

    async def open(self) -> None:
        """Open the socket. Raises `OSError`."""
        self._monitor.start()
        await self._admin.open()

    async def close(self) -> None:
        await self._admin.close()
        self._monitor.close()
        self._directory.remove()

    def event(self, event: Event, text: str | None) -> None:
        """Take an event of the coordinator; `text` is what it says to people."""
        self._last = text or self._last
        self._monitor.event(event)
        self._admin.tell(dict(event))

    def _answer(self, request: protocol.AnyRequest) -> protocol.AnyAnswer:
        if isinstance(request, protocol.GetOverview):
            return protocol.OverviewAnswer(self._monitor.overview())
        if isinstance(request, protocol.GetStatus):
            return self._status()
        raise FtcommError("this coordinator starts no processes; what has started them restarts and drains them")

    def _status(self) -> protocol.Status:
        job, server = self._monitor.overview(), self._server()
        rows = [
            protocol.ReplicaStatus(
                replica=row.replica,
                state="running" if row.state in ("training", "catching up") else row.state,
                starts=row.starts,
                pids={},
                member=row.state in ("training", "catching up"),
                contributes=row.state == "training",
                step=row.step,
                host=row.host,
                effective=row.effective,
                reason=row.reason,
                since=row.since,
            )
            for row in job.rows
        ]
        return protocol.Status(
            run=job.run,
            pid=os.getpid(),
            script=SCRIPT,
            epoch=job.epoch,
            draining=job.state == "draining",
            coordinator=server.endpoint,
            away=False,
            ranks_per_replica=self._ranks,
            transport="",
            heartbeat_timeout=server.timeouts.heartbeat,
            op_timeout=server.timeouts.op,
            replicas=rows,
            last=self._last,
            launched=False,
        )
