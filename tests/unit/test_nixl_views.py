"""View changes at random moments over NIXL, all members in this process: real streams, real agents, real puts.

Who is left behind runs on in its view, as a member does that was suspected for nothing. It must return nothing that the
others did not, whatever they put meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ftcomm.transport.nixl import Nixl
from ftcomm.transport.segment import Peer
from tests.exchange_rig import Rig, socket_pair
from tests.unit import test_exchange
from tests.unit.test_exchange import _switch_often  # noqa: F401

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")

MOST = 5  # members of a rig


@pytest.fixture(scope="module")
def ways() -> Iterator[list[Nixl]]:
    made = [Nixl(str(replica), ("lo",)) for replica in range(MOST)]
    yield made
    for way in made:
        way.close()


@pytest.mark.parametrize("how", ["nixl", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_view_changes_at_random_moments(seed: int, how: str, ways: list[Nixl], monkeypatch: pytest.MonkeyPatch) -> None:
    class NixlRig(Rig):
        """ "mixed": some pairs share memory, so that no driver can serve all of its peers by itself."""

        def connect(self, me: int, other: int) -> Peer:
            member, there = self.members[me], self.members[other]
            if self.how == "mixed" and (me + other) % 2 == 0:
                return super().connect(me, other)
            near, far = socket_pair()

            def accept() -> None:
                there.exchange.admit(ways[other].accept(me, self.epoch, far, lambda *args: there.lost.append(args)))

            threading.Thread(target=accept, daemon=True).start()
            return ways[me].connect(
                other, self.epoch, there.segment.nonce, near, lambda *args: member.lost.append(args)
            )

    monkeypatch.setattr(test_exchange, "Rig", NixlRig)
    test_exchange.test_view_changes_at_random_moments(seed, how)
