"""The connections of one stream, as the thread that drives it serves them: it receives, sends and sleeps by itself.

One thread does what a thread for each connection did, so nothing is handed from one to another for every frame. It
sleeps in `poll`, on all connections at once and on a bell, which other threads ring when they have news for it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable

from ftcomm.kernels.wait import SLEEP, Waiter
from ftcomm.transport.tcp import Reader, TcpPeer

_ROUNDS = 4  # looks before a sleep, with a yield after each
_PATIENCE = 0.002  # seconds; the longest sleep where some peers only wake who sleeps on their words


class Lines:
    """`peers` are those that this thread receives from, all of the view or none. `waiter` is where it waits."""

    def __init__(self, peers: Iterable[TcpPeer], waiter: Waiter) -> None:
        self.peers = list(peers)
        self._waiter = waiter
        self._poll = select.poll()
        self._by_fd: dict[int, TcpPeer] = {}
        for peer in self.peers:
            peer.drive()
            self._listen(peer)

    def wait(self, clogged: Iterable[Reader]) -> bool:
        """Until a word was raised, or one of the readers `clogged` has room: True. False at a poke, and after one sleep
        of at most `SLEEP` seconds."""
        waiter, poll = self._waiter, self._poll
        for _ in range(_ROUNDS):
            if self._pump(fd for fd, _ in poll.poll(0)):
                return True
            if waiter.poked:
                return False
            os.sched_yield()
        writers = {reader.fileno() for reader in clogged}
        for fd in writers:
            poll.register(fd, select.POLLOUT)
        try:
            end = time.monotonic() + (SLEEP if self.peers else _PATIENCE)
            while (left := end - time.monotonic()) > 0 and not waiter.poked:
                ready = waiter.doze(poll, left)
                if self._pump(ready) or not writers.isdisjoint(ready):
                    return True
            return False
        finally:
            for fd in writers:
                poll.unregister(fd)

    def _listen(self, peer: TcpPeer) -> None:
        if not peer.ended:
            self._by_fd[peer.fileno()] = peer
            self._poll.register(peer, select.POLLIN)

    def _pump(self, ready: Iterable[int]) -> bool:
        """Take in what has come on these; True if a word was raised."""
        came = False
        for fd in ready:
            peer = self._by_fd.get(fd)
            if peer is not None:
                came |= peer.pump()
                if peer.ended:  # the thread that saw it end may have been quicker
                    self._poll.unregister(fd)
                    del self._by_fd[fd]
        return came
