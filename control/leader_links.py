"""The connections of leaders to the coordinator, and what each leader last said over its own."""

from __future__ import annotations

import collections
import dataclasses

from ftcomm.control.coordinator_actions import Conn


@dataclasses.dataclass
class LeaderLink:
    replica: int
    incarnation: str
    step: int
    epoch: int
    loop: int  # the step loop that the replica has come to, or waits in to join; 0: none
    mute: str = ""  # what a rank does that lives and does not speak; "" if all speak
    divided: str = ""  # the ranks that the leader does not hear, as it says; "": none
    since: float = 0.0  # when the leader began to say so
    acknowledged: float = float("-inf")  # when the kernel at the other end answered last, over this connection


class LeaderLinks(collections.UserDict[Conn, LeaderLink]):
    """All connections; a replica has one at most."""

    def __init__(self) -> None:
        self._conns: dict[int, Conn] = {}  # the connection of each replica's leader
        super().__init__()

    def __setitem__(self, conn: Conn, link: LeaderLink) -> None:
        if conn in self:
            del self[conn]
        super().__setitem__(conn, link)
        self._conns[link.replica] = conn

    def __delitem__(self, conn: Conn) -> None:
        replica = self[conn].replica
        super().__delitem__(conn)
        if self._conns.get(replica) == conn:
            del self._conns[replica]

    def conn_of(self, replica: int) -> Conn | None:
        """Returns the connection of a replica; None if it has none. Takes the same time with a thousand replicas."""
        return self._conns.get(replica)
