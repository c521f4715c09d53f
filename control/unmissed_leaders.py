"""Finds leaders that are stopped for good, and that no op misses. Pure.

Of several ranks the leader is a process of its own. They hear of a view from others, too, and run in it while it is
stopped. But it alone can say that they do, and before all leaders have said so no replica can join, begin to contribute
or leave. So such a leader is a stall after the number that the user has set. That is counted in seconds in which this
coordinator runs, in which the leader is mute and a change waits, and in each of which something else shows who is at
fault:

    the kernel at the other end of    the leader's host and the path to it are there. An answer to another connection
      its own connection answers      does not count: a firewall may have forgotten this one alone
    a contributing member speaks      the coordinator is not the one that is cut off, nor is the whole job suspended

The count begins anew whenever one of these does not hold, or the leader speaks; it only rests while no change waits,
since joiners come and go. So a network that heals, or a job that
goes on after it was suspended, gives a leader all of its time. Nobody is judged who has one rank: where a script holds
the interpreter no leader can speak, and an op will miss it.
"""

from __future__ import annotations

from collections.abc import Set

from ftcomm.control.blame import Culprit, Removal
from ftcomm.control.boundary_changes import BoundaryChanges
from ftcomm.control.known_job import KnownJob
from ftcomm.control.liveness import leader_described
from ftcomm.control.views import Life


class UnmissedLeaders:
    def __init__(self, known: KnownJob, changes: BoundaryChanges) -> None:
        self._known, self._changes = known, changes
        self._waited: dict[Life, float] = {}  # for so many seconds of running time a change has waited for it
        self._ran = 0.0  # at the last look

    def due(self, now: float) -> dict[int, Culprit]:
        """Returns the members to remove now, whose word alone a change waits for. To be called in every tick."""
        known, view = self._known, self._known.view
        passed, self._ran = known.ran.seconds - self._ran, known.ran.seconds
        if view is None or known.job.settled:
            self._waited.clear()
            return {}
        mute = known.detector.mute(now)
        unsaid = set(view.replicas) - known.job.installed - known.job.finished.keys()
        heard = self._hears_another(view.contributing - unsaid, now)
        waits = any(self._changes.wanted(view))
        stopped = {
            member.replica: (member.replica, member.incarnation)
            for member in view.members
            if heard
            and member.replica in unsaid & mute.keys()
            and len(member.ranks) > 1
            and self._answers(member.replica, now)
        }
        began = {life: self._waited.get(life) for life in stopped.values()}  # None: the count begins now
        self._waited = {x: 0.0 if waited is None else waited + passed * waits for x, waited in began.items()}
        lasted = {replica: self._waited[life] for replica, life in stopped.items()} if waits else {}
        due = {x: seconds for x, seconds in lasted.items() if seconds > known.timeouts.op + known.timeouts.grace}
        if not due or due.keys() != unsaid:
            return {}
        why = "a change of membership waits for it"
        return {x: Culprit(Removal.STALL, f"{why}; {leader_described(mute[x])}", due[x]) for x in sorted(due)}

    def _hears_another(self, others: Set[int], now: float) -> bool:
        """Whether one of these members speaks."""
        return any(self._known.detector.within(x, self._known.timeouts.silence, now) for x in others)

    def _answers(self, replica: int, now: float) -> bool:
        """Whether the kernel at the other end of the connection of its leader does."""
        conn = self._known.links.conn_of(replica)
        return conn is not None and now - self._known.links[conn].acknowledged <= self._known.timeouts.silence
