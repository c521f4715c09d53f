"""The fault of the histories of kind `missed`: two members do not come to the boundary of a change.

one        is killed and comes back, or asks to leave: a change is proposed for boundary m
two more   promise it, and their scripts do not come to m. The others stand there, and wait for both
           nobody says that the change is given up: the coordinator is started again, or decides it late
the first  of the two is killed: a view without it comes at once, in which the others go on
the second comes then, or never: how long it was waited for counts, for it and for nobody else
the first  comes back, and stands still for less than makes a stall
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcomm.control.blame import SETTLED
from ftcomm.control.timeouts import REPORT

if TYPE_CHECKING:
    from ftcomm.simulation.faults import Faults

_SOON = 0.0002  # s between two looks; most messages take longer
_MOST = 1.5  # s in which a change is proposed that no leader refuses


class MissedBoundary:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._job, self._world, self._random = faults.job, faults.world, faults.random
        self._stands = self._random.random() < 0.5  # the second one, for good
        self._begin()

    def _begin(self) -> None:
        """Wait until all run in the first view, and let there be a change."""
        job = self._job
        known = None if job.coordinator is None else job.coordinator.machine.job
        if known is None or known.view is None or not known.settled:
            self._world.after(0.01, None, self._begin)
            return
        changes, self._first, self._second, *_ = self._random.sample(job.replicas, len(job.replicas))
        self._random.choice((self._faults.kill, self._faults.leave))(changes)
        self._await_proposal(self._world.now + _MOST)

    def _await_proposal(self, until: float) -> None:
        job, coordinator = self._job, self._job.coordinator
        proposal = None if coordinator is None else coordinator.machine.proposal
        ranks = [rank for replica in job.replicas for rank in replica.ranks if rank.holds_state]
        if self._world.now > until:
            self._faults.mend()
            return
        if proposal is None or any(rank.next_boundary > proposal.step for rank in ranks):  # a member refuses it
            self._world.after(_SOON, None, self._await_proposal, until)
            return
        numbers = self._first.number, self._second.number
        self._world.say("chance", "replicas %s do not come to boundary %s", numbers, proposal.step)
        for replica in (self._first, self._second):
            self._faults.excuse(replica, "does not come to the boundary", stalls=True)
            for script in replica.scripts:
                script.misses = proposal.step
        if self._random.random() < 0.5:
            job.kill_coordinator()
            self._world.after(self._random.choice((0.01, 0.4)), None, job.start_coordinator)
        else:  # a promise comes late, and with it the decision
            here = job.scenario.coordinator_host
            self._faults.block([(host, here) for host in set(self._second.hosts)], self._random.uniform(0.2, 0.6))
        self._world.after(self._random.choice((0.7, 1.5, job.timeouts.op_floor + 1.0)), None, self._kill)

    def _kill(self) -> None:
        if self._first.running:
            self._faults.kill(self._first)
        if self._stands and self._second.running:
            timeouts = self._job.timeouts
            most = timeouts.op + timeouts.grace + SETTLED + 2 * REPORT + timeouts.heartbeat
            self._await_removal(self._second.ranks[0].incarnation, self._world.now + most)
        else:
            for script in self._second.scripts:
                script.misses = None
            self._await_return(self._first.lives)

    def _await_removal(self, incarnation: str, until: float) -> None:
        job = self._job
        if job.stored[-1].has(self._second.number, incarnation) and self._world.now < until:
            self._world.after(0.5, None, self._await_removal, incarnation, until)
        else:
            job.promises.stood_still(incarnation)
            self._faults.mend()

    def _await_return(self, lives: int) -> None:
        """Let the next life stand still when it contributes. No member may be removed for that."""
        first, timeouts = self._first, self._job.timeouts
        member = self._job.stored[-1].member(first.number)
        back = member is not None and member.contributing and member.incarnation == first.ranks[0].incarnation
        if self._faults.over:
            return
        if not back or first.lives == lives:
            self._world.after(0.05, None, self._await_return, lives)
            return
        for script in first.scripts:
            script.stuck = True
        self._world.after(0.7 * (timeouts.op_floor + timeouts.grace), None, self._faults.mend)
