"""The agent of a host in a thread of the test, in place of a process of its own."""

from __future__ import annotations

import os

from ftcomm.control import handshake
from ftcomm.control.host_agent_process import HostAgentConfig, HostAgentProcess
from ftcomm.control.own_host_agent import AgentPlace
from ftcomm.control.timeouts import Timeouts
from tests.rigs.companion import CompanionThread


class HostAgentThread(CompanionThread[HostAgentProcess]):
    """`address` is where its ranks find it. Its first rank ends, as it should, at `close`."""

    def __init__(
        self,
        leader: tuple[str, int],
        credentials: handshake.Credentials,
        timeouts: Timeouts,
        shards: range,
        ranks: int,
        replica: int = 0,
    ) -> None:
        super().__init__()
        self.shards = shards
        config = HostAgentConfig(
            *(replica, shards.start, len(shards), ranks, os.getpid(), leader, credentials.token, credentials.job, None),
            *(timeouts, "127.0.0.1", 20),
        )
        self.start(lambda sock: HostAgentProcess(config, sock))

    def place(self, there: tuple[str, int] | None = None) -> AgentPlace:
        """For its ranks, which find it `there`."""
        return AgentPlace(there or self.address, self.shards, None)

    @property
    def ranks(self) -> set[int]:
        """Those that are connected."""
        return set(self.process.ranks)
