"""View changes at random moments over NIXL, all members in this process: real streams, real agents, real puts.

Who is left behind runs on in its view, as a member does that was suspected for nothing. It must return nothing that the
others did not, whatever they put meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.errors import TransportError
from ftcomm.settings.tuning import BUILT_IN, EVER, MEMBERS
from ftcomm.transport.base import Peer
from ftcomm.transport.nixl.context import Nixl
from ftcomm.transport.segment import HOST, putting
from tests.rigs import exchange as exchange_rig
from tests.rigs.exchange import DEADLINE, Rig, socket_pair
from tests.rigs.exchange_calls import _switch_often, check, start  # noqa: F401
from tests.unit import test_exchange

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")

MOST = 5  # members of a rig


@pytest.fixture(scope="module")
def ways() -> Iterator[list[Nixl]]:
    made = [Nixl(str(replica), ("lo",)) for replica in range(MOST)]
    yield made
    for way in made:
        way.close()


class NixlRig(Rig):
    """ "mixed": some pairs share memory, so that no driver can serve all of its peers by itself. "loopback": they know
    that they are on one host."""

    ways: list[Nixl]

    def connect(self, me: int, other: int) -> Peer:
        member, there, ways = self.members[me], self.members[other], self.ways
        if self.how == "mixed" and (me + other) % 2 == 0:
            return super().connect(me, other)

        def accept(far: socket.socket) -> None:
            with contextlib.suppress(OSError):  # it was given up, and another one is dialled
                there.exchange.admit(ways[other].accept(me, self.epoch, far, lambda *args: there.lost.append(args)))

        def dial() -> socket.socket:
            """Once more if nothing was put soon, as on a machine that does something else."""
            near, far = socket_pair()
            threading.Thread(target=accept, args=(far,), daemon=True).start()
            return near

        return ways[me].connect(other, self.epoch, there.segment.nonce, dial, lambda *args: member.lost.append(args))


@pytest.fixture
def rig(ways: list[Nixl], monkeypatch: pytest.MonkeyPatch) -> type[Rig]:
    monkeypatch.setattr(NixlRig, "ways", ways, raising=False)
    monkeypatch.setattr(test_exchange, "Rig", NixlRig)
    return NixlRig


@pytest.mark.parametrize(
    ("seed", "how"),
    [
        *((1, how) for how in ("nixl", "loopback", "mixed")),
        (0, "mixed"),
        *(pytest.param(0, how, marks=pytest.mark.sweep) for how in ("nixl", "loopback")),
        *(pytest.param(2, how, marks=pytest.mark.sweep) for how in ("nixl", "loopback", "mixed")),
    ],
)
def test_view_changes_at_random_moments(seed: int, how: str, rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_rig, "LAYOUT", putting(HOST))
    test_exchange.test_view_changes_at_random_moments(seed, how)


@pytest.mark.parametrize(("how", "fan"), [("nixl", 1), ("nixl", 2), ("mixed", 2)])
def test_small_ops_through_a_tree(how: str, fan: int, rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes two rounds of puts; some lie in the notifications."""
    points = ((MEMBERS, EVER),)
    tuning = dataclasses.replace(BUILT_IN, tree=points, tree_fan=fan)
    monkeypatch.setattr(exchange_rig, "LAYOUT", putting(HOST))
    monkeypatch.setattr(exchange_rig, "GroupView", functools.partial(GroupView, tuning=tuning))
    out: dict[int, list[Operation]] = {}
    todo = [(count, "int64", "sum") for count in (250, 8_000, 700_001, 1_000, 1_100, 8_000, 9)]
    with rig(range(5), how) as members:
        members.view(range(5))
        for caller in start(members, 11, todo, out).values():
            caller.join()
        assert not any(member.lost for member in members.members.values())
    for ops in out.values():
        for op in ops:
            check(op, 11)


def test_a_ring_of_four(rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is relayed around it, as each member has puts from all others."""
    monkeypatch.setattr(exchange_rig, "LAYOUT", putting(HOST))
    out: dict[int, list[Operation]] = {}
    with rig(range(4), "nixl ring") as members:
        members.view(range(4))
        for caller in start(members, 5, [(700_001, "float32", "sum")] * 2, out).values():
            caller.join()
        assert not any(member.lost for member in members.members.values())
    for ops in out.values():
        for op in ops:
            check(op, 5)


class Late:
    """What an agent does where a put reads its source later, as a network card does: after so many looks at it, which
    count from when another agent has `first` put something."""

    def __init__(self, agent: Any, looks: int, first: Late | None) -> None:
        self.looks, self.first = looks, first
        self.left: dict[int, int] = {}
        self.ended = 0
        self.post, self.check = agent.transfer, agent.check_xfer_state

    def transfer(self, handle: Any) -> str:
        self.left[id(handle)] = self.looks
        return "PROC"

    def check_xfer_state(self, handle: Any) -> Any:
        left = self.left.get(id(handle), 0)
        if left > 0:
            self.left[id(handle)] = left - (self.first is None or self.first.ended > 0)
            return "PROC"
        self.left[id(handle)] = -1
        state = self.post(handle) if left == 0 else self.check(handle)
        self.ended += state == "DONE"
        return state


@pytest.mark.parametrize("how", ["loopback", "nixl"])
def test_what_is_put_from_the_callers_array_is_the_input(
    how: str, rig: type[Rig], ways: list[Nixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it is read: one member is slow to put, when it has all that it needs to go on itself."""
    quick: Late | None = None
    for way, looks in ((ways[1], 0), (ways[0], 100)):
        [agent] = way.endpoint()._agents
        late = Late(agent, looks, quick)
        monkeypatch.setattr(agent, "transfer", late.transfer)
        monkeypatch.setattr(agent, "check_xfer_state", late.check_xfer_state)
        quick = late
    out: dict[int, list[Operation]] = {}
    todo = [(count, "float32", "sum") for count in (700_001, 262_144)]
    with rig(range(2), how) as members:
        members.view(range(2))
        for caller in start(members, 11, todo, out).values():
            caller.join()
    for ops in out.values():
        for op in ops:
            check(op, 11)


@pytest.mark.parametrize("how", ["loopback", "nixl"])
def test_who_cannot_put_is_the_one_that_ends(
    how: str, rig: type[Rig], ways: list[Nixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It complains of nobody: what it cannot do has nothing to do with the reader. Its array is its input still."""
    endpoint = ways[0].endpoint()
    not_found = next(each for each in endpoint.library.errors if each.__name__ == "nixlNotFoundError")

    def fail(*what: Any) -> Any:
        raise not_found("NIXL_ERR_NOT_FOUND")

    with rig(range(2), how) as members:
        members.view(range(2))
        monkeypatch.setattr(endpoint._agents[0], "initialize_xfer", fail)
        array = np.full(1_000_000, 3.0, np.float32)
        op = Operation(array, "float32", "sum")
        members.members[0].exchange.submit(op)
        assert op.wait(DEADLINE)
        with pytest.raises(TransportError, match=r"replica 0 cannot go on: .*NOT_FOUND"):
            raise op.error or AssertionError("it returned")
        assert not members.members[0].lost
        assert (array == 3.0).all()
