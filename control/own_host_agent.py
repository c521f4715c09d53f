"""The agent of a host, as the first rank there sees it, which has started it: a process beside it."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from ftcomm.control.handshake import Credentials
from ftcomm.control.host_agent_process import HostAgentConfig
from ftcomm.control.liveness import agent_ended
from ftcomm.control.own_companion import OwnCompanion, log_level
from ftcomm.control.timeouts import Timeouts


class AgentPlace(NamedTuple):
    """The place of the agent of a rank's host: it listens for `shards` at `there`, and the rank that starts it has the
    socket for that."""

    there: tuple[str, int]
    shards: range
    listening: socket.socket | None


class OwnHostAgent(OwnCompanion):
    what, module = "host agent", "ftcomm.control.host_agent_process"

    def __init__(
        self,
        replica: int,
        shards: range,
        ranks: int,
        leader: tuple[str, int],
        credentials: Credentials,
        timeouts: Timeouts,
        host: str,
        listening: socket.socket,
    ) -> None:
        """Starts it for `shards` of the `ranks` of a replica, on this host, which has the address `host`; `listening`
        is as of `OwnCompanion`. Raises `OSError`."""
        tls = None if credentials.tls is None else credentials.tls.files
        config = HostAgentConfig(
            *(replica, shards.start, len(shards), ranks, os.getpid(), leader, credentials.token, credentials.job, tls),
            *(timeouts, host, log_level()),
        )
        super().__init__(config, listening)

    def why(self, pid: int) -> str:
        return agent_ended(pid)
