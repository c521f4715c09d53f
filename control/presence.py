"""Says whether the coordinator hears those who hold the state of the training, or is cut off itself. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ftcomm.control.coordinator_actions import CoordinatorAction, Log
from ftcomm.control.joiner_messages import ALONE, MUTE, WAITS, JoinerMessages
from ftcomm.control.known_job import KnownJob
from ftcomm.control.leader_links import LeaderLink
from ftcomm.control.probe_schedule import PAUSE
from ftcomm.control.suspects import Suspects

# s, beside a heartbeat timeout, in which a member that had finished may come to a new coordinator
ACKNOWLEDGED = 2 * PAUSE


class Presence:
    """Keeps track of which members the coordinator hears, and dials the others."""

    def __init__(self, known: KnownJob, joiner_messages: JoinerMessages, suspects: Suspects) -> None:
        self._known, self._joiner_messages, self._suspects = known, joiner_messages, suspects

    def heard(self, link: LeaderLink, now: float) -> list[CoordinatorAction]:
        """Note that a process speaks. A coordinator that was cut off gives the members a heartbeat timeout to show up,
        from when the first one does."""
        known = self._known
        known.detector.heard(link.replica, now)
        known.spoke((link.replica, link.incarnation))
        known.suspicions.heard((link.replica, link.incarnation))
        if known.unheard is None or not known.job.contributes(link.replica, link.incarnation):
            return []
        if known.alone:
            known.detector.restart_timeouts(now)
        known.unheard = None
        return self._joiner_messages.tell_all(WAITS)

    def look(self, silent: Collection[int], now: float) -> list[CoordinatorAction]:
        """Dial the members that are not heard, also those that had finished before this coordinator came: they may
        wait for their acknowledgement at the place of another. If no contributing member is heard, this coordinator is
        cut off."""
        known = self._known
        actions: list[CoordinatorAction] = []
        if known.ran.seconds > known.timeouts.heartbeat + ACKNOWLEDGED:
            known.unacknowledged.clear()
        for replica, incarnation in sorted(known.unacknowledged):
            if known.links.conn_of(replica) is None:
                actions += self._suspects.search(replica, incarnation)
        for member in known.job.running:
            quiet = not known.detector.within(member.replica, known.timeouts.silence / 2, now)
            if quiet or known.links.conn_of(member.replica) is None:
                actions += self._suspects.search(member.replica, member.incarnation)
        holders = known.view.contributing - set(known.job.finished) if known.view is not None else frozenset()
        if holders and holders <= set(silent) and not known.alone:
            known.unheard = ALONE
            reason = (
                "none of the replicas that contribute is heard: this coordinator itself may be cut off, so it waits"
            )
            actions += [Log("cut_off", {"reason": reason}), *self._joiner_messages.tell_all(ALONE)]
        spoken = any(known.detector.within(replica, known.timeouts.op, now) for replica in holders)
        if holders and not spoken and known.unheard is None:
            known.unheard = MUTE
            actions += self._joiner_messages.tell_all(MUTE)
        return actions
