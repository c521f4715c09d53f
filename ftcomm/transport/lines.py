"""The connections of one stream, as the thread that drives it serves them: it receives, sends and sleeps by itself.

One thread does what a thread for each connection did, so nothing is handed from one to another for every frame. It
sleeps in `poll`, on all connections at once and on a bell, which other threads ring when they have news for it, and so
do the members that share memory with this one.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable

from ftcomm.kernels.wait import SLEEP, Waiter
from ftcomm.transport.tcp import Reader, TcpPeer

_ROUNDS = 4  # looks before a sleep, with a yield after each
_AWHILE = 10  # sleeps in which nothing has come; then the next may be longer
_LONG = 5 * SLEEP  # seconds of those. Frames, room and pokes end them like any other, so only a look may be too late
_PATIENCE = 0.002  # seconds; the longest sleep where some peers only wake who sleeps on their words


class Lines:
    """`peers` are those that this thread receives from (`TcpPeer.drive`): all that share no memory with it, or none.
    `waiter` is where it waits."""

    straight_from = 0  # bytes of an op from which it pays to send from the caller's array where it lies
    lands = False  # whether what a reader was told of lies at the peer, whatever becomes of the connection

    def __init__(self, peers: Iterable[TcpPeer], waiter: Waiter) -> None:
        self.peers = list(peers)
        self._waiter = waiter
        self._poll = select.poll()
        self._by_fd: dict[int, TcpPeer] = {}
        self._to_come = [peer for peer in self.peers if not peer.is_open]
        self._idle = 0  # sleeps since something has come
        for peer in self.peers:
            self._listen(peer)

    def wait(self, clogged: Iterable[Reader], look: Callable[[], bool] | None = None) -> bool:
        """Until a word was raised, or one of the readers `clogged` has room: True. False at a poke, and after one sleep
        of at most `SLEEP` seconds, `_LONG` when nothing has come for long. With `look` also until that says so: for
        words in shared memory."""
        self._idle = 0 if self._wait(clogged, look) else self._idle + 1
        return not self._idle

    def _wait(self, clogged: Iterable[Reader], look: Callable[[], bool] | None) -> bool:
        waiter, poll = self._waiter, self._poll
        for peer in [peer for peer in self._to_come if peer.is_open]:
            self._to_come.remove(peer)
            self._listen(peer)
        noticed = look is None and not self._to_come  # whatever may come, without a look
        patience = _LONG if noticed and self._idle >= _AWHILE else SLEEP
        for _ in range(1 if self._idle else _ROUNDS):
            if self._pump(fd for fd, _ in poll.poll(0)):
                return True
            if waiter.poked:
                return False
            os.sched_yield()
            if look is not None and look():
                return True
        writers = {reader.fileno() for reader in clogged}
        for fd in writers:
            poll.register(fd, select.POLLOUT)
        try:
            end = time.monotonic() + (patience if self.peers else _PATIENCE)
            while (left := end - time.monotonic()) > 0 and not waiter.poked:
                ready = waiter.doze(poll, left, look)
                if ready is None or self._pump(ready) or not writers.isdisjoint(ready):
                    return True
            return False
        finally:
            for fd in writers:
                poll.unregister(fd)

    def _listen(self, peer: TcpPeer) -> None:
        if peer.fileno() >= 0:
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
