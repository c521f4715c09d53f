"""Finds out in a simulated process whether another one has ended, as `ftcomm.control.rank_connections` does."""

from __future__ import annotations

from ftcomm.control.probe_schedule import ProbeOutcome
from ftcomm.control.rank_connections import ProbeListener
from ftcomm.control.timeouts import Timeouts
from ftcomm.simulation.network import SimulatedNetwork
from ftcomm.simulation.world import Process


def probe_until_known(
    owner: Process, network: SimulatedNetwork, port: int, timeouts: Timeouts, listener: ProbeListener
) -> None:
    """Ask at `port`, until that is known."""
    begun = owner.clock()

    def probe() -> None:
        if not listener.is_back():
            network.probe(owner, port, found)

    def found(outcome: ProbeOutcome) -> None:
        if not listener.take(outcome, owner.clock(), begun, timeouts):
            owner.after(timeouts.beat, probe)

    probe()
