"""What trainers of other libraries tell each other: all replicas make the same calls, also one in its first step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ftcomm.integrations import replica as integration
from ftcomm.integrations.replica import StepExchange


class Job:
    """A replica's view of a job whose largest values are known."""

    replicas = 4

    def __init__(self, replica, outside):
        self.replica = replica
        self.internals = SimpleNamespace(outside=outside)
        self.gave, self.largest = [], [2.0, 0.0]  # of "{}"

    def allreduce(self, array, op):
        assert op == "max"
        self.gave = array.tolist()
        array[:] = self.largest[: len(array)]


def begin(exchange, roster, contributors):
    exchange.group.roster, exchange.group.contributors = roster, contributors
    exchange.begin(SimpleNamespace(begin=lambda total: 7), None)


@pytest.mark.parametrize("joins", [0, 3])
def test_a_replica_joins_in_the_step_in_which_another_begins_to_contribute(monkeypatch, joins):
    """Replica 2 has contributed before, replica 1 begins to: all take what replica 2 says."""
    roots = []

    def stand_in(group, internals):
        return SimpleNamespace(broadcast_state=lambda buffer, root: roots.append(group.roster[root]))

    monkeypatch.setattr(integration.replicas, "Replicas", stand_in)
    exchanges = {replica: StepExchange(Job(replica, replica != 2)) for replica in (1, 2, joins)}
    for replica in (1, 2):
        begin(exchanges[replica], [1, 2], [2])
    for exchange in exchanges.values():
        begin(exchange, sorted(exchanges), [1, 2])
        assert exchange.waits_for_state, "by this all know that they have to tell"
    for exchange in exchanges.values():
        exchange.told({}, of_old=True)
    gave = [exchanges[replica].group.gave for replica in (1, 2)]  # those that catch up give nothing
    for exchange in exchanges.values():
        exchange.group.largest = [max(values) for values in zip(*gave, strict=True)]
    roots.clear()
    for exchange in exchanges.values():
        exchange.told({}, of_old=True)
    assert roots == [2, 2, 2]
