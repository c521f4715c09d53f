"""The leader of a replica of several ranks in a thread of the test, in place of a process of its own."""

from __future__ import annotations

import os

from ftcomm.control import handshake, liveness
from ftcomm.control.leader_process import LeaderConfig, LeaderProcess
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.unstarted import NamedRank
from tests.rigs.companion import CompanionThread


class Led(CompanionThread[LeaderProcess]):
    """`address` is where its ranks find it. Rank 0 ends, as it should, at `close`."""

    def __init__(
        self,
        coordinator: tuple[str, int],
        credentials: handshake.Credentials,
        timeouts: Timeouts,
        ranks: int = 2,
        replica: int = 0,
    ) -> None:
        super().__init__()
        config = LeaderConfig(
            *(NamedRank.of(replica, 0, self.address), os.getpid(), liveness.started(), ranks, coordinator),
            *(credentials.token, credentials.job, None, timeouts, "127.0.0.1", liveness.processes(), 20),
        )
        self.start(lambda sock: LeaderProcess(config, sock))

    @property
    def ranks(self) -> set[int]:
        """Those that are connected."""
        return set(self.process.driver.ranks)
