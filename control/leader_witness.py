"""The witness of a leader: a fork of its process, which tells the coordinator when that ends as it should not.

Rank 0 sees the end of its leader and tells it, too, unless its interpreter is held. The other ranks find that nobody
listens at the port of the leader; but that is proof on its own host alone, and they may be held themselves. No script
can hold the witness.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable

from ftcomm.control import leaderless
from ftcomm.control.handshake import Credentials
from ftcomm.control.witness import call

log = logging.getLogger("ftcomm.control")


class LeaderWitness:
    """The leader's end of the pipe to its witness."""

    def __init__(
        self,
        coordinator: tuple[str, int],
        credentials: Credentials,
        replica: int,
        life: str,
        call_timeout: float,
        others: Iterable[int],
    ) -> None:
        """Forks it, while this process has one thread. `life` is the incarnation of the replica, `call_timeout` the
        seconds for which a coordinator that is away is called. The witness keeps none of `others`, the descriptors of
        this process by which its end is seen."""
        leader = os.getpid()
        heard, self._said = os.pipe()
        try:
            child = os.fork()
        except OSError as error:
            log.warning("no process is left to witness the end of the leader of replica %d: %s", replica, error)
            child = -1
        if child:
            os.close(heard)
            return
        for descriptor in (self._said, *others):
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # at the end of which a reader may wait for the replica
        if not os.read(heard, 1):
            fields = leaderless.told(replica, life, leaderless.reason(leader))
            call(coordinator, credentials, leaderless.PURPOSE, fields, call_timeout)
        os._exit(0)

    def dismiss(self) -> None:
        """Tell the witness that the leader ends as it should, if it lives."""
        with contextlib.suppress(OSError):
            os.write(self._said, b"x")
