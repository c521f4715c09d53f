"""The peers of one stream that are all reached by NIXL, served by the thread that drives the stream.

NIXL has nothing to sleep on, so the driver polls. Its sleeps get longer while nothing comes, since the others may
compute for minutes.
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
_LONGEST_WAIT = 5 * MAX_SLEEP  # s without news before it looks around, which costs as much as ten looks
_AWHILE = 0.001  # s of a sleep after which nothing is expected soon


class NixlPoller(Poller):
    """Receives from `peers`, which are all of the view. They have one endpoint, unless it was retired meanwhile."""

    straight_from = 512 << 10  # registration and a put take 40 us; a copy of a chunk 90
    confirms_arrival = True  # in the mirror, which the next connection keeps

    def __init__(self, peers: Sequence[NixlMirror], waiter: Waiter) -> None:
        self.peers = peers
        self._waiter = waiter
        for peer in peers:
            peer.drive()
        self._endpoints = list(dict.fromkeys(peer.endpoint for peer in peers))
        self._pause = 0.0  # s of the last sleep; 0 after news

    def pump(self) -> bool:
        moved = False
        for endpoint in self._endpoints:
            moved |= endpoint.poll()
        return moved

    def wait(self, clogged: Iterable[MirrorWriter], look: Callable[[], bool] | None = None) -> bool:
        """Wait. True once a frame has come or a put has ended. False at an interrupt, and after `MAX_SLEEP` seconds
        without, or `_LONGEST_WAIT` if nothing has come for long. `look` is not asked, since all peers are reached by
        NIXL."""
        waiter = self._waiter
        for _ in range(1 if self._pause > _AWHILE else _ROUNDS):
            if self.pump():
                self._pause = 0.0
                return True
            if waiter.interrupted:
                return False
            os.sched_yield()
        end = time.monotonic() + (MAX_SLEEP if self._pause < _LONG else _LONGEST_WAIT)
        while (left := end - time.monotonic()) > 0 and not waiter.interrupted:
            self._pause = min(_LONG, max(_SHORT, _GROWS * self._pause))
            for endpoint in self._endpoints:
                endpoint.rest(self._pause)
            time.sleep(min(self._pause, left))
            if self.pump():
                self._pause = 0.0
                return True
        return False
