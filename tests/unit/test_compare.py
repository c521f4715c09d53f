"""`ftcomm.verify`: equal states have one digest, and of those that differ the replica and the entries are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ftcomm.collective.operation import Operation
from ftcomm.errors import DivergenceError, FtcommError, MismatchError, StateError
from ftcomm.groups.compare import compare, hashes
from tests.rigs.exchange import Caller, Rig


class OneGroup:
    """What `compare` needs of a `Group`, on a real exchange."""

    shard = 0
    replicas = 4

    def __init__(self, rig: Rig, replica: int) -> None:
        self.replica = replica
        self._exchange = rig.members[replica].exchange

    def allreduce(self, x: np.ndarray, *, atomic: bool) -> None:
        assert atomic
        op = Operation(x.reshape(-1), "int64", "sum", atomic=True)
        self._exchange.run(op)
        if op.error is not None:
            raise op.error


def verify(states: dict[int, Any], contributing: Iterable[int]) -> dict[int, Any]:
    """What each member gets: its digest, or the error."""
    out: dict[int, Any] = {}

    def call(rig: Rig, replica: int) -> None:
        try:
            out[replica] = compare(states[replica], OneGroup(rig, replica))  # type: ignore[arg-type]
        except FtcommError as error:
            out[replica] = error

    with Rig(states) as rig:
        rig.view(states, contributing)
        for caller in [Caller.start(call, rig, m) for m in states]:
            caller.join()
    return out


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_equal_states_have_one_digest_on_all() -> None:
    got = verify({m: training() for m in range(3)}, range(3))
    assert len(set(got.values())) == 1
    assert len(got[0]) == 32
    assert verify({m: training(seed=1) for m in range(2)}, range(2))[0] != got[0]


def test_the_one_that_differs_is_named_with_what_differs() -> None:
    states = {m: training() for m in range(3)}
    with torch.no_grad():
        states[1]["model"][0].weight.view(torch.int32)[2, 1] ^= 1
    states[1]["optimizer"].param_groups[0]["lr"] = 0.2
    got = verify(states, range(3))
    for error in got.values():
        assert isinstance(error, DivergenceError)
        assert "the state of replica 1, shard 0, differs from that of replicas 0, 2: 2 of " in str(error)
        assert "entries, model.0.weight, optimizer.param_groups[0].lr." in str(error)


def test_of_two_nobody_knows_which() -> None:
    for error in verify({0: training(), 1: training(seed=1)}, range(2)).values():
        assert isinstance(error, DivergenceError)
        assert "replicas 0, 1, shard 0, differs, and none has a majority" in str(error)
        assert " more. Restart" in str(error)


def test_another_number_of_entries_is_said() -> None:
    for error in verify({0: [np.ones(2)], 1: [np.ones(2)] * 2, 2: [np.ones(2)]}, range(3)).values():
        assert isinstance(error, DivergenceError)
        assert "different numbers of entries: 1 on replica 0, 2 on replica 1, 1 on replica 2" in str(error)


@pytest.mark.parametrize("state", [lambda: training(seed=1), list], ids=["trained", "empty"])
def test_who_catches_up_is_not_compared(state: Callable[[], Any]) -> None:
    got = verify({0: training(), 1: state(), 3: training()}, {0, 3})
    assert len(set(got.values())) == 1
    assert got[1] == verify({0: training()}, {0})[0]


def test_what_two_states_may_differ_in() -> None:
    weight = torch.arange(4.0)
    alike = [{"a": weight}, {"a": weight.clone()}, {"a": weight.view(2, 2).T.contiguous().T.reshape(4)}]
    assert len({str(hashes(state)) for state in alike}) == 1
    others = [
        {"a": weight.double()},
        {"a": weight.view(2, 2)},
        {"b": weight},
        {"a": -weight},
        {"a": [weight]},
        {"a": 1},
        {"a": True},
        {"a": "1"},
        {"a": None},
        {"a": np.float32(0)},
        {},
    ]
    assert len({str(hashes(state)) for state in [alike[0], *others]}) == 1 + len(others)
    assert hashes({"a": 1, "b": 2}) == hashes({"b": 2, "a": 1})
    assert hashes(nn.Linear(2, 2)).keys() == {"weight", "bias"}
    assert all(0 < value < 1 << 63 for value in hashes(training()).values())


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(StateError, match=r"cannot compare a\.b of type object"):
        hashes({"a": {"b": object()}})


def test_a_replica_beyond_the_first_ones_gets_a_clear_error() -> None:
    got = verify({0: [1], 9: [1]}, {0, 9})
    assert all(isinstance(error, MismatchError) for error in got.values())
