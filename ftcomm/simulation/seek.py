"""Finds out in a simulated process whether another one has ended, as `ftcomm.control.rank_connections.seek` does."""

from __future__ import annotations

from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.rank_connections import Sought
from ftcomm.control.timeouts import Timeouts
from ftcomm.simulation.network import SimulatedNetwork
from ftcomm.simulation.world import Process


def seek(owner: Process, network: SimulatedNetwork, port: int, timeouts: Timeouts, tell: Sought) -> None:
    """Ask at `port`, until that is known."""
    begun = owner.clock()

    def probe() -> None:
        if not tell.is_back():
            network.probe(owner, port, found)

    def found(outcome: ProbeOutcome) -> None:
        if not tell.take(outcome, owner.clock(), begun, timeouts):
            owner.after(timeouts.beat, probe)

    probe()
