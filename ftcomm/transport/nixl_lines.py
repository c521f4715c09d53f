"""The peers of one stream that are all reached by NIXL, as the thread that drives the stream serves them.

NIXL has nothing to sleep on, so the driver looks, and sleeps ever longer between two looks: nothing has come for a
while because the others compute, and may do so for minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ftcomm.kernels.wait import SLEEP, Waiter
from ftcomm.transport.lines import Lines
from ftcomm.transport.nixl import NixlPeer

_ROUNDS = 32  # looks before a sleep, with a yield after each
_SHORT = 20e-6  # seconds of the first sleep; each is longer than the last
_GROWS = 1.5
_LONG = 0.01
_PATIENCE = 5 * SLEEP  # seconds without, after a sleep as long as that; what looks around costs as much as ten looks
_AWHILE = 0.001  # seconds of a sleep behind which nothing is expected to come at once


class Clogged(Protocol):
    def flush(self) -> bool: ...


class NixlLines(Lines):
    """`peers` are all of the view; all have one endpoint."""

    straight_from = 512 << 10  # to register it and to prepare a put takes 40 us, to copy a chunk beside 90
    lands = True  # in the mirror, which is that of the next connection as well

    def __init__(self, peers: Sequence[NixlPeer], waiter: Waiter) -> None:
        super().__init__((), waiter)
        self.peers = list(peers)  # type: ignore[arg-type]  # the two are served alike, but for what they sleep on
        for peer in peers:
            peer.drive()
        self._endpoint = peers[0].endpoint
        self._pause = 0.0  # seconds of the last sleep; 0: something has come

    def _listen(self, peer: object) -> None:
        """Nothing: there is no descriptor that tells."""

    def pump(self) -> bool:
        return self._endpoint.poll()

    def wait(self, clogged: Iterable[object], look: Callable[[], bool] | None = None) -> bool:
        """Until a frame has come or a put has ended: True. False at a poke, and after `SLEEP` seconds without, or
        `_PATIENCE` where nothing has come for long. There is nothing to `look` at, as all peers are reached like this.
        """
        waiter = self._waiter
        for _ in range(1 if self._pause > _AWHILE else _ROUNDS):
            if self.pump():
                self._pause = 0.0
                return True
            if waiter.poked:
                return False
            os.sched_yield()
        end = time.monotonic() + (SLEEP if self._pause < _LONG else _PATIENCE)
        while (left := end - time.monotonic()) > 0 and not waiter.poked:
            self._pause = min(_LONG, max(_SHORT, _GROWS * self._pause))
            self._endpoint.rest(self._pause)
            time.sleep(min(self._pause, left))
            if self.pump():
                self._pause = 0.0
                return True
        return False
