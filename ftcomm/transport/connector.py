"""The paths to the memory of the other members of a communicator, from view to view.

Shared memory and connections of a peer serve as long as that process is a member (NIXL: one epoch). So after a loss
nothing is dialled, and when a joiner comes only the joiner is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

from ftcomm.control.views import Address
from ftcomm.sync.death_watch import DeathWatch, MutexWord
from ftcomm.transport.base import OnLost, Peer
from ftcomm.transport.connect import Dial, all_by_tcp, connect
from ftcomm.transport.peer_cache import PeerCache
from ftcomm.transport.segment import HOST, Layout, mutex


class Connector:
    """The connector of member `me`. `here` is its own memory, and `layout` that of all. Thread-safe; only `reach`
    blocks.

    `on_died(member, epoch)` is called when the process of a member of this host has died, in a thread that serves other
    groups, too, so it must not wait; None: that is not watched. `on_reached(peer)` makes the memory of a device
    reachable that a segment tells of, and may raise `TransportError`; `on_left(peer)` says that no view needs it any
    more, even if no view that needed it was entered.
    """

    def __init__(
        self,
        me: int,
        here: Address,
        *,
        mode: str,
        on_lost: OnLost,
        data: str = "none",
        layout: Layout = HOST,
        on_died: Callable[[int, int], None] | None = None,
        on_reached: Callable[[Peer], object] = lambda peer: None,
        on_left: Callable[[Peer], object] = lambda peer: None,
    ) -> None:
        self.me, self.here = me, here
        self._mode, self._data, self._layout, self._on_lost = mode, data, layout, on_lost
        self._on_reached, self._on_left = on_reached, on_left
        watch = None if on_died is None else DeathWatch[tuple[int, int]](lambda member: on_died(*member))
        self._watcher = watch
        self._lock = threading.Lock()  # guards the cache; never held during a wait
        self.cache = PeerCache()

    def expect(self, epoch: int, members: Iterable[int], severed: Collection[int] = ()) -> bool:
        """Note that the view of `epoch` is to be entered, maybe once more; False if that is over. `severed` have lost
        their connections to this member."""
        with self._lock:
            expected = self.cache.expect(epoch, members)
            for member in severed if expected else ():
                self.cache.severed(epoch, member)
            return expected

    def may_wait(self, others: Iterable[Address]) -> bool:
        """Whether `others` can be dialled when they are wanted, and not before: all are reached by TCP."""
        return all_by_tcp(self._mode, self.here, others)

    def find(self, epoch: int, member: int, nonce: str) -> Peer | None:
        """Returns the peer that serves in an expected view already, by the nonce of its segment."""
        with self._lock:
            return self.cache.find(epoch, member, nonce)

    def reach(self, epoch: int, member: int, there: Address, dial: Dial, *, lazy: bool = False) -> Peer | None:
        """Reach the memory of a member at `there`, for an expected view; None if that came too late. Arguments and
        errors are those of `ftcomm.transport.connect.connect`."""
        peer = connect(
            self.me,
            self.here,
            member,
            there,
            epoch=epoch,
            mode=self._mode,
            dial=dial,
            on_lost=self._on_lost,
            layout=self._layout,
            data=self._data,
            lazy=lazy,
        )
        self._on_reached(peer)
        with self._lock:
            if self.cache.add(epoch, member, peer):
                return peer
            needed = self.cache.needs(there.nonce)
        if not needed:
            self._on_left(peer)
        peer.close()
        return None

    def sharing_memory(self, epoch: int) -> list[int]:
        """Returns the members of that view that share memory, as far as they are reached; watched from now on."""
        with self._lock:
            self._watch()
            return [member for member, peer in self.cache.of(epoch).items() if peer.shares_memory]

    def enter(self, epoch: int) -> dict[int, Peer]:
        """Enter an expected view, all of whose members are reached; returns them."""
        with self._lock:
            left = self.cache.enter(epoch)
            self._watch()
            peers = self.cache.peers
        for peer in left:
            self._on_left(peer)
        return peers

    def close(self) -> None:
        """Stop watching; idempotent."""
        if self._watcher is not None:
            self._watcher.close()

    def forget(self) -> None:
        """Drop all connections, and all references to the owner of this connector: no member is reached or read any
        more."""
        self.close()
        self._on_lost = lambda *lost: None
        with self._lock:
            self.cache.close()

    def _watch(self) -> None:
        """Watch the members that share memory, in this epoch and in those to come. With the lock."""
        if self._watcher is not None:
            word = mutex(self.me)
            self._watcher.watch(
                {
                    (member, epoch): MutexWord(peer.words, word, peer.address + 8 * word)
                    for member, epoch, peer in self.cache.sharing()
                }
            )
