"""Connections of ranks to a simulated leader or host agent, as of `ftcomm.control.rank_connections`."""

from __future__ import annotations

from ftcomm.control import messages as m
from ftcomm.control.rank_connections import RankListener
from ftcomm.control.view_differences import ViewsSent
from ftcomm.simulation.network import SimulatedConnection


def serve(
    ranks: dict[int, SimulatedConnection], shard: int, connection: SimulatedConnection, listener: RankListener
) -> None:
    """Serve a new connection of `shard`, which is in `ranks` as soon as it is not turned away."""
    greeted = False

    def received(message: m.AnyMessage) -> None:
        nonlocal greeted
        if not greeted:
            answer = listener.turned_away(message)
            if answer is not None:
                connection.send(1, answer)
                return
            greeted = True
            ranks[shard] = connection
        listener.received(shard, message)

    def closed(reason: object) -> None:
        if ranks.get(shard) is connection:  # else it is here again, by another one
            del ranks[shard]
            listener.closed(shard, str(reason))

    connection.receive[1] = received
    connection.told = ViewsSent(shard)
    connection.closed[1] = closed
