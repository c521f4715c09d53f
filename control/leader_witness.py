"""The witness of a leader: a fork of its process, which tells the coordinator when that ends as it should not.

Shard 0 sees the end of its leader and tells it, too, unless its interpreter is held. The other ranks find that nobody
listens at the port of the leader; but that is proof on its own host alone, and they may be held themselves. No script
can hold the witness.

    leader       an address, a line     of a coordinator that has taken the job over: it is called before all others
                 an empty line          the leader ends as it should
                 nothing more           it has ended: the witness calls in turn whom it knows
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable

import msgspec

from ftcomm.control import leaderless
from ftcomm.control.handshake import Credentials
from ftcomm.control.witness import call

log = logging.getLogger("ftcomm.control")

_ADDRESS = msgspec.json.Decoder(tuple[str, int])


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
        self._newest = coordinator
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
        known = _heard(heard, coordinator)
        if known:
            fields = leaderless.told(replica, life, leaderless.reason(leader))
            call(known, credentials, leaderless.PURPOSE, fields, call_timeout)
        os._exit(0)

    def moved(self, coordinator: tuple[str, int]) -> None:
        """Tell the witness where a coordinator is that has taken the job over."""
        if coordinator != self._newest:  # a witness that is stopped reads nothing, and a pipe holds 64 KB
            self._newest = coordinator
            self._say(msgspec.json.encode(coordinator))

    def dismiss(self) -> None:
        """Tell the witness that the leader ends as it should, if it lives."""
        self._say(b"")

    def _say(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # it does not live
            os.write(self._said, line + b"\n")


def _heard(pipe: int, coordinator: tuple[str, int]) -> list[tuple[str, int]]:
    """Wait for the end of the leader. Returns where coordinators may be, the newest first; none if it was dismissed."""
    known = [coordinator]
    with os.fdopen(pipe, "rb") as lines:
        for line in lines:
            if line == b"\n":
                return []
            there = _ADDRESS.decode(line)
            known = [there, *(other for other in known if other != there)]
    return known
