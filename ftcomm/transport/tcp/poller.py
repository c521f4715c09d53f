"""The TCP connections of one stream, served by the thread that drives it.

One thread receives, sends and sleeps, so that no frame is handed from thread to thread. It sleeps in `poll` on all
connections at once and on a doorbell. Other threads ring that when they have news, and so do the members that share
memory with this one.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Sequence

from ftcomm.sync.futex import MAX_SLEEP, Waiter
from ftcomm.transport.base import MirrorWriter, Poller
from ftcomm.transport.tcp.mirror import TcpMirror

_ROUNDS = 4  # looks before a sleep, with a yield after each
_AWHILE = 10  # idle sleeps; after them a sleep may be longer
_LONG = 5 * MAX_SLEEP  # s of those. Frames, room and interrupts end them, so only a look may be late
_WORDS_SLEEP = 0.002  # s; the longest sleep if some peers wake only sleepers on their words


class TcpPoller(Poller):
    """Receives from `peers`, which may be empty, and sleeps at `waiter`."""

    def __init__(self, peers: Sequence[TcpMirror], waiter: Waiter) -> None:
        self.peers = peers
        self._waiter = waiter
        self._poll = select.poll()
        self._by_fd: dict[int, TcpMirror] = {}
        self._to_come = [peer for peer in self.peers if not peer.is_open]
        self._idle = 0  # sleeps since the last frame
        for peer in self.peers:
            self._listen(peer)

    def wait(self, clogged: Iterable[MirrorWriter], look: Callable[[], bool] | None = None) -> bool:
        """Wait, as `Poller` says. A sleep lasts `MAX_SLEEP` seconds at most, `_LONG` after many idle ones."""
        self._idle = 0 if self._wait(clogged, look) else self._idle + 1
        return not self._idle

    def _wait(self, clogged: Iterable[MirrorWriter], look: Callable[[], bool] | None) -> bool:
        waiter, poll = self._waiter, self._poll
        for peer in [peer for peer in self._to_come if peer.is_open]:
            self._to_come.remove(peer)
            self._listen(peer)
        noticed = look is None and not self._to_come  # all that may come rings, without a look
        longest = _LONG if noticed and self._idle >= _AWHILE else MAX_SLEEP
        for _ in range(1 if self._idle else _ROUNDS):
            if self._pump(fd for fd, _ in poll.poll(0)):
                return True
            if waiter.interrupted:
                return False
            os.sched_yield()
            if look is not None and look():
                return True
        writers = {reader.fileno() for reader in clogged}
        for fd in writers:
            poll.register(fd, select.POLLOUT)
        try:
            end = time.monotonic() + (longest if self.peers else _WORDS_SLEEP)
            while (left := end - time.monotonic()) > 0 and not waiter.interrupted:
                ready = waiter.poll_sleep(poll, left, look)
                if ready is None or self._pump(ready) or not writers.isdisjoint(ready):
                    return True
            return False
        finally:
            for fd in writers:
                poll.unregister(fd)

    def _listen(self, peer: TcpMirror) -> None:
        if peer.fileno() >= 0:
            self._by_fd[peer.fileno()] = peer
            self._poll.register(peer, select.POLLIN)

    def _pump(self, ready: Iterable[int]) -> bool:
        """Take in what has come on these descriptors; True if a word was raised."""
        came = False
        for fd in ready:
            peer = self._by_fd.get(fd)
            if peer is not None:
                came |= peer.pump()
                if peer.ended:  # the thread of the process may have seen the end first
                    self._poll.unregister(fd)
                    del self._by_fd[fd]
        return came
