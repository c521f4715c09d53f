"""The leader of a replica that has several ranks, as shard 0 sees it, which has started it: a process beside it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket

import msgspec

from ftcomm.control import leaderless
from ftcomm.control.companion import Companion, own_end
from ftcomm.control.handshake import Credentials
from ftcomm.control.leader_process import LeaderCharge
from ftcomm.control.liveness import started
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.views import Address

MODULE = "ftcomm.control.leader_process"


class OwnLeader:
    """The process. `ended` belongs to the event loop of the control thread."""

    def __init__(
        self,
        rank: NamedRank,
        ranks: int,
        coordinator: tuple[str, int],
        credentials: Credentials,
        timeouts: Timeouts,
        here: Address,
        listening: socket.socket,
    ) -> None:
        """Starts it for a shard 0 that is reached at `here`. It gets `listening`, to which the ranks come, and nobody
        listens there once it has ended. Raises `OSError`."""
        tls = None if credentials.tls is None else credentials.tls.files
        level = logging.getLogger("ftcomm").getEffectiveLevel()
        charge = LeaderCharge(
            *(rank, os.getpid(), started(), ranks, coordinator, credentials.token, credentials.job, tls),
            *(timeouts, here.host, here.processes, level),
        )
        environment = {name: value for name, value in os.environ.items() if name != "FTCOMM_TOKEN"}
        end = own_end()
        descriptors = (listening.fileno(), *([end] if end >= 0 else []))
        try:
            self._process = Companion(MODULE, msgspec.json.encode(charge), descriptors, environment, errors=None)
        finally:
            listening.close()
            if end >= 0:
                os.close(end)

    @property
    def pid(self) -> int:
        """The process, once it has begun; before that 0."""
        return self._process.pid

    async def ended(self) -> str:
        """Wait for its end, and return why the replica ends with it."""
        why = await self._process.begun()
        if why:
            return f"its leader cannot start: {why}"
        with contextlib.suppress(OSError):  # the script has closed the descriptor
            await self._process.ended()
        return leaderless.reason(self.pid)

    def dismiss(self) -> None:
        """Tell the leader that this rank ends as it should."""
        self._process.dismiss()
