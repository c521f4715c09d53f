"""The leader of a replica that has several ranks, as shard 0 sees it, which has started it: a process beside it."""

from __future__ import annotations

import os
import socket

from ftcomm.control import leaderless
from ftcomm.control.handshake import Credentials
from ftcomm.control.leader_process import LeaderConfig
from ftcomm.control.liveness import started
from ftcomm.control.own_companion import OwnCompanion, log_level
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from ftcomm.control.views import Address


class OwnLeader(OwnCompanion):
    what, module = "leader", "ftcomm.control.leader_process"

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
        """Starts it for a shard 0 that is reached at `here`; `listening` is as of `OwnCompanion`. Raises `OSError`."""
        tls = None if credentials.tls is None else credentials.tls.files
        config = LeaderConfig(
            *(rank, os.getpid(), started(), ranks, coordinator, credentials.token, credentials.job, tls),
            *(timeouts, here.host, here.processes, log_level()),
        )
        super().__init__(config, listening)

    def why(self, pid: int) -> str:
        return leaderless.reason(pid)
