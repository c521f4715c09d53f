"""The peers of one stream that are all reached by NIXL, served by the thread that drives the stream.

NIXL has nothing to sleep on, so the driver looks, and sleeps ever longer between two looks: if nothing has come for a
while the others compute, and may do so for minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

from ftcomm.sync.futex import MAX_SLEEP, Waiter
from ftcomm.transport.base import MirrorWriter, Poller
from ftcomm.transport.nixl.mirror import NixlMirror

_ROUNDS = 32  # looks before a sleep, with a yield after each
_SHORT = 20e-6  # seconds of the first sleep; each is longer than the last
_GROWS = 1.5
_LONG = 0.01
_PATIENCE = 5 * MAX_SLEEP  # seconds without, after a sleep as long as that; looking around costs as much as ten looks
_AWHILE = 0.001  # seconds of a sleep behind which nothing is expected to come at once


class NixlPoller(Poller):
    """Receives from `peers`, which are all of the view and have one endpoint."""

    straight_from = 512 << 10  # to register it and to prepare a put takes 40 us, to copy a chunk beside 90
    lands = True  # in the mirror, which is that of the next connection as well

    def __init__(self, peers: Sequence[NixlMirror], waiter: Waiter) -> None:
        self.peers = peers
        self._waiter = waiter
        for peer in peers:
            peer.drive()
        self._endpoint = peers[0].endpoint
        self._pause = 0.0  # seconds of the last sleep; 0: something has come

    def pump(self) -> bool:
        return self._endpoint.poll()

    def wait(self, clogged: Iterable[MirrorWriter], look: Callable[[], bool] | None = None) -> bool:
        """Wait until a frame has come or a put has ended: True. False at an interrupt, and after `MAX_SLEEP` seconds
        without, or `_PATIENCE` where nothing has come for long. `look` is not asked: all peers are reached by NIXL.
        """
        waiter = self._waiter
        for _ in range(1 if self._pause > _AWHILE else _ROUNDS):
            if self.pump():
                self._pause = 0.0
                return True
            if waiter.interrupted:
                return False
            os.sched_yield()
        end = time.monotonic() + (MAX_SLEEP if self._pause < _LONG else _PATIENCE)
        while (left := end - time.monotonic()) > 0 and not waiter.interrupted:
            self._pause = min(_LONG, max(_SHORT, _GROWS * self._pause))
            self._endpoint.rest(self._pause)
            time.sleep(min(self._pause, left))
            if self.pump():
                self._pause = 0.0
                return True
        return False
