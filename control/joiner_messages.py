"""Tells replicas that wait to join what they wait for, or that they need not. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcomm.control import messages as m
from ftcomm.control.coordinator_actions import CoordinatorAction, Send

if TYPE_CHECKING:
    from ftcomm.control.known_job import KnownJob

WAITS = m.Queued(
    "joins at the next step boundary that all replicas can agree on (ftcomm.steps, Group.boundary)", m.Stage.JOINING
)
ALONE = m.Queued(
    "waits for the replicas that hold the state of the training, of which none is heard; if they have ended for good, "
    "end this coordinator, remove its store, and start the job again from its last checkpoint"
)
MUTE = m.Queued(
    "waits for the replicas that hold the state of the training: they live, and none has said anything for longer than "
    "FTCOMM_OP_TIMEOUT. They hold their interpreter locks, or are stopped; continue or end them"
)
FINISHED = m.Removed("the job has finished", m.Ending.TOO_LATE)
OVER = m.Removed("the job has ended or is being drained", m.Ending.TOO_LATE)
DRAINED = "the job is being drained"


class JoinerMessages:
    """Sends the joiners of a job what the coordinator has for them."""

    def __init__(self, known: KnownJob) -> None:
        self._known = known

    def register(self) -> list[CoordinatorAction]:
        """Let joiners prepare that have not been told yet. Nothing is told before the first boundary of the job: a job
        that passes none takes no replica in, and the script would train by itself while it waits."""
        known = self._known
        if known.view is None or max(link.step for link in known.links.values()) < 0:
            return []
        told = known.joiners.register(known.view)
        return [Send(known.conn_of(replica), m.Registered(seen, known.loop)) for replica, seen in told]

    def tell_all(self, news: m.Queued) -> list[CoordinatorAction]:
        """Send `news` to all joiners, also to those in a view in which no member runs yet."""
        waiting = (
            conn
            for conn, link in self._known.links.items()
            if link.epoch == 0 or self._known.joiners.has(link.replica, link.incarnation)
        )
        return [Send(conn, news) for conn in waiting]

    def turn_away(self, message: m.Removed | m.Dismissed) -> list[CoordinatorAction]:
        """Send `message` to all joiners and forget them."""
        conns = [self._known.links.conn_of(replica) for replica in self._known.joiners.clear()]
        return [Send(conn, message) for conn in conns if conn is not None]
