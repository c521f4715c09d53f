"""The eleven calls as a user knows them: on a group and at module level, and alike for every kind of array."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch

import ftcomm
import ftcomm.groups.default_group
from ftcomm.groups.static_group import StaticGroup
from ftcomm.groups.subgroup import Subgroup
from ftcomm.p2p.progress import ProgressEngine
from tests.rigs import cupy_stub
from tests.rigs.exchange import DEADLINE, Rig, socket_pair
from tests.unit.test_calls import Caller
from tests.unit.test_calls import Group as Members

pytestmark = pytest.mark.protocol

CALLS = (
    *("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "reduce", "gather", "scatter"),
    *("barrier", "send", "recv"),
)
CUPY = cupy_stub.module()  # tests/gpu has some of the real one
MAKE: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda values: np.array(values, np.float32),
    "torch": lambda values: torch.tensor(values, dtype=torch.float32),
    "jax": lambda values: jax.numpy.array(values, np.float32),
    "cupy": lambda values: CUPY.array(values, np.float32),
}
ROSTER = (1, 4, 6)


@pytest.fixture
def members() -> Iterator[Members]:
    with Rig(ROSTER, "shm") as rig:
        rig.view(ROSTER)
        group = Members(rig, ROSTER)

        def dial(me: int, peer: int) -> Any:
            near, far = socket_pair()
            group.callers[ROSTER.index(peer)]._p2p.accept(far, me)
            return near

        for caller in group.callers:
            caller._default_timeout = lambda: DEADLINE
            caller._p2p = ProgressEngine(f"rank {caller.rank}", lambda peer, me=caller._me: dial(me, peer), str)
        yield group
        for caller in group.callers:
            caller._p2p.fail(RuntimeError("the test is over"))
        for caller in group.callers:
            caller._p2p.close(RuntimeError("the test is over"))


def call(name: str, caller: Caller, make: Callable[[Any], Any], async_op: bool) -> tuple[Any, Any]:
    """What a call of that name gives, and the array that it is to put the result into, if any."""
    rank = caller.rank
    x = make([rank + 1.0, 10.0])  # of two elements, of which some calls send one
    every = make([10.0 * rank + i for i in range(3)])
    one, two, six = make([0.0]), make([0.0, 0.0]), make([0.0] * 6)
    right, left = (rank + 1) % 3, (rank - 1) % 3
    arguments: dict[str, tuple[Any, ...]] = {
        "allreduce": (x,),
        "allgather": (six, x),
        "reduce_scatter": (one, every),
        "alltoall": (make([0.0] * 3), every),
        "broadcast": (x, 2),
        "reduce": (x, 1),
        "gather": (six if rank == 1 else None, x, 1),
        "scatter": (one, every if rank == 2 else None, 2),
        "barrier": (),
        "send": (x, right, 7),
        "recv": (two, left, 7),
    }
    if name == "send":
        sent = caller.send(*arguments["send"], async_op=True)
        caller.recv(np.zeros(2, np.float32), left, 7)
        return sent.wait(), None
    if name == "recv":
        sent = caller.send(*arguments["send"], async_op=True)
        received = caller.recv(*arguments["recv"], async_op=async_op)
        result = received.wait() if async_op else received
        assert not async_op or received.source == left
        sent.wait()
        return result, two
    done = getattr(caller, name)(*arguments[name], async_op=async_op)
    return (done.wait() if async_op else done), arguments[name][0] if arguments[name] else None


WANTED: dict[str, Callable[[int], Any]] = {
    "allreduce": lambda rank: [6.0, 30.0],
    "allgather": lambda rank: [1.0, 10.0, 2.0, 10.0, 3.0, 10.0],
    "reduce_scatter": lambda rank: [30.0 + 3 * rank],
    "alltoall": lambda rank: [10.0 * i + rank for i in range(3)],
    "broadcast": lambda rank: [3.0, 10.0],
    "reduce": lambda rank: [6.0, 30.0] if rank == 1 else [rank + 1.0, 10.0],
    "gather": lambda rank: [1.0, 10.0, 2.0, 10.0, 3.0, 10.0] if rank == 1 else None,
    "scatter": lambda rank: [20.0 + rank],
    "barrier": lambda rank: None,
    "send": lambda rank: None,
    "recv": lambda rank: [(rank - 1) % 3 + 1.0, 10.0],
}


@pytest.mark.parametrize("library", MAKE)
@pytest.mark.parametrize("name", CALLS)
def test_every_call_takes_every_kind_of_array(
    members: Members, name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "cupy":
        monkeypatch.setitem(sys.modules, "cupy", CUPY)
    for async_op in (False, True):
        outcomes = members.all(lambda caller, async_op=async_op: call(name, caller, MAKE[library], async_op))
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                raise outcome
            result, into = outcome
            wanted = WANTED[name](rank)
            if wanted is None:
                assert result is None
                continue
            values = result.get() if library == "cupy" else np.asarray(result)
            assert values.tolist() == wanted, f"rank {rank}, async_op={async_op}"
            assert type(result) is type(MAKE[library]([0.0]))
            assert (result is into) == (library != "jax" or (name == "reduce" and rank != 1)), (
                "in place, or a new array"
            )


def test_rank_and_world_size_are_of_the_roster(members: Members) -> None:
    assert [(caller.rank, caller.world_size) for caller in members.callers] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("name", CALLS)
def test_the_module_has_the_calls_of_the_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, method = getattr(ftcomm, name), getattr(ftcomm.Group, name)
    of_method = list(inspect.signature(method).parameters.values())[1:]
    of_function = list(inspect.signature(function).parameters.values())
    assert [p.name for p in of_function] == [*(p.name for p in of_method), "group"]
    assert [p.default for p in of_function[:-1]] == [p.default for p in of_method]
    assert name in ftcomm.__all__
    said: list[Any] = []
    default, other = (SimpleNamespace(**{name: lambda *a, who=who, **k: said.append((who, a, k))}) for who in "do")
    monkeypatch.setattr(ftcomm.groups.default_group, "_default", default)
    function(1, op=2)
    function(3, group=other)
    assert said == [("d", (1,), {"op": 2}), ("o", (3,), {})]


def test_only_what_a_user_needs_is_public() -> None:
    public = {name for name in dir(ftcomm.Group) if not name.startswith("_")}
    assert public == {
        *CALLS,
        *("name", "rank", "world_size", "view", "epoch", "members", "contributing", "contributes", "contributed"),
        *("next_boundary", "ready", "boundary", "leave", "subgroup", "verify", "report", "emit", "close"),
    }


def test_what_public_calls_take_and_return_is_public() -> None:
    """A user who writes types, or makes one, need not look where it is defined."""
    assert {"Settings", "Work", "Span", "MessageWork", "Group", "Subgroup", "StaticGroup", "Endpoint"} <= {
        *ftcomm.__all__
    }


@pytest.mark.parametrize("package", ["ftcomm", "ftcomm.training", "ftcomm.torch"])
def test_a_package_lists_its_public_names(package: str) -> None:
    """Also those that are imported on first use, so that a shell completes them."""
    found = importlib.import_module(package)
    assert set(found.__all__) <= set(dir(found))


@pytest.mark.parametrize("package", ["ftcomm", "ftcomm.training", "ftcomm.torch", "ftcomm.launch"])
def test_no_public_name_is_that_of_a_module(package: str) -> None:
    """The import of `package.name` would put the module in the place of the public object."""
    found = importlib.import_module(package)
    modules = {each.name for each in pkgutil.iter_modules(found.__path__)}
    assert not modules.intersection(found.__all__)


@pytest.mark.parametrize(
    ("group", "own"),
    [
        (Subgroup, {"name", "replica", "contributors", "close", "internals", "error"}),
        (StaticGroup, {"name", "op_timeout", "in_job", "from_handles", "abort", "close", "internals", "error"}),
    ],
)
def test_a_group_shows_what_a_user_may_call(group: type, own: set[str]) -> None:
    """What others of ftcomm need of it is in its `internals`."""
    attributes = set(re.findall(r"self\.([a-z]\w*)(?=(?:, self\.\w+)* = )", inspect.getsource(group)))
    shown = attributes | {name for name in dir(group) if not name.startswith("_")}
    assert shown == own | set(CALLS) | {"rank", "world_size", "roster"}
