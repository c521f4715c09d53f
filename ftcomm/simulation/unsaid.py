"""The fault of the histories of kind `unsaid`: a leader is stopped after it has passed a view on, and before it has
said that its ranks run in it. No op misses it, and a replica waits to join, which it holds up.

for good     it is removed as a stall
for a while  less than makes a stall, and nobody is removed
suspended    all are but the coordinator, for long, and that leader goes on last, and late
cut          it goes on soon, and the path between its host and the coordinator is blocked for long
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcomm.control.timeouts import REPORT
from ftcomm.simulation.job import Replica
from ftcomm.simulation.leader import SimulatedLeader

if TYPE_CHECKING:
    from ftcomm.simulation.faults import Faults

_SOON = 0.00005  # s between two looks; most messages take longer
_OFTEN = 0.05  # s between two looks whether somebody waits
_MOST = 5.0  # s in which the view without the lost one comes


class Unsaid:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._job, self._world, self._random = faults.job, faults.world, faults.random
        timeouts = self._job.timeouts
        self._limit = timeouts.op + timeouts.grace
        self._begin()

    def _begin(self) -> None:
        """Wait until all contribute, and let one be lost, which comes back."""
        job = self._job
        known = None if job.coordinator is None else job.coordinator.machine.job
        view = None if known is None else known.view
        if known is None or view is None or not known.settled or len(view.contributing) < len(job.replicas):
            self._world.after(0.01, None, self._begin)
            return
        lost, stopped = self._random.sample(job.replicas, 2)
        assert stopped.leader is not None
        self._faults.kill(lost)
        self._await_view(stopped, stopped.leader, view.epoch, self._world.now + _MOST)

    def _await_view(self, replica: Replica, leader: SimulatedLeader, epoch: int, until: float) -> None:
        said = leader.node.leader
        if said.epoch > epoch or self._world.now > until:
            self._faults.mend()  # it was too quick
        elif said.heard <= epoch:
            self._world.after(_SOON, None, self._await_view, replica, leader, epoch, until)
        else:
            self._stop(leader)
            self._random.choice((self._for_good, self._for_a_while, self._suspended, self._cut))(replica, leader)

    def _stop(self, leader: SimulatedLeader) -> None:
        leader.say("is stopped before it can say that its ranks run in view %s", leader.node.leader.heard)
        leader.freeze()

    def _go_on(self, leader: SimulatedLeader) -> None:
        leader.say("goes on")
        leader.thaw()

    def _for_good(self, replica: Replica, leader: SimulatedLeader) -> None:
        self._faults.excuse(replica, "its leader is stopped", stalls=True)
        limit = 1.1 * self._limit + 2 * self._job.timeouts.heartbeat + 2 * REPORT
        self._watch(replica.ranks[0].incarnation, limit, self._world.now + 3 * limit)

    def _watch(self, incarnation: str, limit: float, until: float) -> None:
        """Let it be removed once somebody has waited to join for `limit` seconds in all. One that has to go on to a
        later step loop waits for nothing until it is ready there."""
        job = self._job
        waits = job.coordinator is not None and bool(job.coordinator.machine.known.joiners.waiting)
        if limit > 0.0 and self._world.now < until:
            self._world.after(_OFTEN, None, self._watch, incarnation, limit - _OFTEN * waits, until)
            return
        if limit <= 0.0:
            job.promises.stood_still(incarnation)
        self._faults.mend()

    def _for_a_while(self, replica: Replica, leader: SimulatedLeader) -> None:
        seconds = self._limit * self._random.uniform(0.3, 0.9)
        self._world.after(seconds, None, self._go_on, leader)
        self._world.after(seconds + 1.0, None, self._faults.mend)

    def _suspended(self, replica: Replica, leader: SimulatedLeader) -> None:
        seconds = 2 * self._limit
        for process in self._faults.processes():
            if process is not leader:
                self._world.after(0.5 * self._random.random(), None, process.freeze)
                self._world.after(seconds + 1.5 * self._random.random(), None, process.thaw)
        self._world.after(seconds + 1.5 + 0.7 * self._limit, None, self._go_on, leader)
        self._world.after(seconds + self._limit, None, self._faults.mend)

    def _cut(self, replica: Replica, leader: SimulatedLeader) -> None:
        seconds, here = 2 * self._limit, self._job.scenario.coordinator_host
        ways = [way for host in replica.hosts for way in ((here, host), (host, here))]
        self._faults.block(self._random.choice((ways, ways[::2], ways[1::2])), seconds)
        self._world.after(self._limit * self._random.random(), None, self._go_on, leader)
        self._world.after(seconds + self._limit, None, self._faults.mend)
