"""What the control thread drives of the data plane: the exchange of this rank, and the way to its peers' memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ftcomm.collective.inflight import Resumed
from ftcomm.collective.placement import group_view, order
from ftcomm.collective.plan import GroupView
from ftcomm.collective.watchdog import Stall
from ftcomm.control import messages as m
from ftcomm.control.engine import Unreachable
from ftcomm.control.views import Address, View
from ftcomm.errors import ExpelledError, FtcommError, TooLateError, TransportError
from ftcomm.sync.death_watch import DeathWatch, MutexWord
from ftcomm.transport.base import Lost, Peer
from ftcomm.transport.connect import Dial, connect
from ftcomm.transport.nixl.context import rdma_available
from ftcomm.transport.segment import HOST, Layout, OtherEngine, life
from ftcomm.tuning import BUILT_IN, Tuning

log = logging.getLogger("ftcomm")


def expelled(who: str, reason: str, ending: m.Ending) -> ExpelledError:
    """What a rank raises that is told this by the job."""
    return TooLateError(f"{who} came too late: {reason}") if ending is m.Ending.TOO_LATE else ExpelledError(reason)


class Drives(Protocol):
    """What the control side does with an exchange, see `ftcomm.collective.exchange.Exchange`."""

    replica: int

    def freeze(self, quiesced: Callable[[], None]) -> None: ...

    def nudge(self) -> None: ...

    def progress(self) -> m.Progress: ...

    def resume(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, m.Progress]) -> Resumed: ...

    def waiting(self, seconds: float) -> Stall | None: ...

    def fail(self, error: BaseException) -> None: ...


class Engine:
    """What the control thread drives (`ftcomm.control.agent.Engine`): the exchange, and the way to its peers.

    Shared memory and connections of a peer serve as long as that process is a member (NIXL: one epoch), so that a loss
    dials nobody, and a joiner is all that is dialled when it comes.
    `on_died(replica, epoch)` is called, in a thread of its own, when the process of a member of this host has died.
    `algorithm` is that of large all-reduces, as FTCOMM_ALGORITHM says it, `tuning` what FTCOMM_TUNING says. `layout` is
    that of the segments of all members; `on_reached(peer)` makes the memory of a device reachable that a
    segment tells of, and may raise `TransportError`; `on_left(peer)` says that no view needs it any more, be it that
    none was entered which did. `on_view(view)` is told of every view that is entered, `on_failed` of the error with
    which this rank ends. `on_waits(seconds)` says of other groups of this rank what `waiting` says of the exchange.
    """

    def __init__(
        self,
        rank: int,
        exchange: Drives,
        here: Address,
        *,
        mode: str,
        dial: Dial,
        on_lost: Lost,
        on_died: Callable[[int, int], None],
        layout: Layout = HOST,
        data: str = "none",
        algorithm: str = "auto",
        tuning: Tuning = BUILT_IN,
        on_reached: Callable[[Peer], object] = lambda peer: None,
        on_left: Callable[[Peer], object] = lambda peer: None,
        on_view: Callable[[View], object] = lambda view: None,
        on_failed: Callable[[FtcommError], object] = lambda error: None,
        on_waits: Callable[[float], tuple[int, tuple[int, ...]] | None] = lambda seconds: None,
    ) -> None:
        self._rank, self._exchange, self._here = rank, exchange, here
        self._mode, self._dial, self._on_lost = mode, dial, on_lost
        self._algorithm, self._tuning = algorithm, tuning
        self._layout, self._on_reached, self._on_left = layout, on_reached, on_left
        self._data = data
        self._on_view, self._on_failed, self._on_waits = on_view, on_failed, on_waits
        self._watcher: DeathWatch[tuple[int, int]] = DeathWatch(lambda member: on_died(*member))  # (replica, epoch)
        self._lock = threading.Lock()  # guards the rest; never held across a wait
        self._reaching: tuple[int, ...] = ()
        self._epoch = -1  # resumed
        self._peers: dict[int, Peer] = {}  # in it
        self._kept: dict[str, Peer] = {}  # what serves longer than an epoch, by the nonce of the segment
        self._newest: tuple[int, frozenset[str]] = (-1, frozenset())  # the newest view to be reached: epoch, members
        self._opened: dict[str, Peer] = {}  # those to be told to `on_left`, likewise
        self._reached: dict[int, dict[int, Peer]] = {}  # epoch -> replica -> peer; of views that are not resumed yet

    def freeze(self, quiesced: Callable[[], None]) -> None:
        self._exchange.freeze(quiesced)

    def nudge(self) -> None:
        self._exchange.nudge()

    def waiting(self, seconds: float) -> tuple[int, tuple[int, ...]] | None:
        """The op in flight and the replicas that it waits for, if it does for at least `seconds`. Any thread."""
        stall = self._exchange.waiting(seconds)
        return self._on_waits(seconds) if stall is None else (stall.op, stall.waiting_on)

    def progress(self) -> m.Progress:
        return self._exchange.progress()

    def reach(self, view: View) -> Iterable[int]:
        """In a thread; for the next view maybe before this one is through. Called again after `Unreachable`."""
        with self._lock:
            if view.epoch <= self._epoch:
                return ()  # nobody needs it any more
            reached = self._reached.setdefault(view.epoch, {})
            if view.epoch > self._newest[0]:
                self._newest = view.epoch, frozenset(member.ranks[self._rank].nonce for member in view.members)
                self._forget()
        lazy = self._lazy(view)
        for member in view.members:
            replica, there = member.replica, member.ranks[self._rank]
            if replica == self._exchange.replica:
                continue
            with self._lock:
                known = reached.get(replica) or self._known(there.nonce, view.epoch)
                if known is not None:
                    reached[replica] = known
            if known is not None:
                if replica not in lazy and not known.is_open:
                    self._reaching = (replica,)
                    self._open(known)  # a neighbour from now on
                continue
            self._reaching = (replica,)
            peer = self._connect(view.epoch, replica, there, replica in lazy)
            with self._lock:
                late = view.epoch <= self._epoch or replica in reached
                unused = late and there.nonce not in self._opened
                if not late:
                    reached[replica] = peer
                    if peer.shares_memory:
                        self._opened[there.nonce] = peer
                    if peer.shares_memory or view.epoch == self._newest[0]:
                        self._kept[there.nonce] = peer
            if unused:
                self._on_left(peer)
            if late:
                peer.close()
        self._reaching = ()
        with self._lock:
            self._watch()
            return [replica for replica, peer in reached.items() if peer.shares_memory]

    def reaching(self) -> tuple[int, ...]:
        """The replica whose memory `reach` is at, if any. Any thread."""
        return self._reaching

    def _known(self, nonce: str, epoch: int) -> Peer | None:
        """What serves in `epoch` too, with the lock. A joiner that has run in no view may have been out of the job in
        between, and its connections with it: it makes new ones."""
        peer = self._kept.get(nonce)
        if peer is None or (not peer.shares_memory and (self._epoch < 0 or not peer.serves(epoch))):
            return None
        return peer

    def _forget(self) -> None:
        """Connections to who is not in the newest view: the other side closes them, and it may come back. With the
        lock."""
        _, members = self._newest
        self._kept = {nonce: peer for nonce, peer in self._kept.items() if peer.shares_memory or nonce in members}

    def _lazy(self, view: View) -> frozenset[int]:
        """Whom this one dials when an op needs it, and not before: in a ring all but the neighbours, if nobody shares
        memory with this one, so that its driver hears of all from its left neighbour."""
        here = {member.replica: member.ranks[self._rank] for member in view.members}
        me = self._exchange.replica
        by_tcp = self._mode == "tcp" or (self._mode == "auto" and not rdma_available())
        shares = self._mode == "auto" and any(there.boot == self._here.boot for m, there in here.items() if m != me)
        if self._algorithm != "ring" or not by_tcp or shares or me not in here:
            return frozenset()
        ring = order(here, self._tuning)
        place = ring.index(me)
        return frozenset(ring) - {me, ring[place - 1], ring[(place + 1) % len(ring)]}

    @staticmethod
    def _open(peer: Peer) -> None:
        try:
            peer.open_now()
        except OSError as error:
            raise Unreachable(peer.replica, str(error)) from error

    def _connect(self, epoch: int, replica: int, there: Address, lazy: bool) -> Peer:
        me = self._exchange.replica
        try:
            peer = connect(
                me,
                self._here,
                replica,
                there,
                epoch=epoch,
                mode=self._mode,
                dial=self._dial,
                on_lost=self._on_lost,
                layout=self._layout,
                data=self._data,
                lazy=lazy,
            )
            self._on_reached(peer)
        except OtherEngine as error:  # a person has to mend it; the view changes only say who was left out
            log.error("replica %d rank %d: %s", me, self._rank, error)
            raise Unreachable(replica, str(error)) from error
        except (TransportError, OSError, RuntimeError) as error:  # RuntimeError: no thread could be started
            raise Unreachable(replica, str(error)) from error
        how = f"{peer.transport}, when it is needed" if lazy else peer.transport
        log.info("replica %d rank %d: reaches replica %d by %s", me, self._rank, replica, how)
        return peer

    def resume(self, view: View, progress: dict[int, m.Progress]) -> dict[str, int]:
        addresses = {member.replica: member.ranks[self._rank] for member in view.members}
        members = {there.nonce for there in addresses.values()}
        with self._lock:
            self._epoch = view.epoch
            self._peers = peers = self._reached.pop(view.epoch)
            over = [self._reached.pop(epoch) for epoch in sorted(self._reached) if epoch < view.epoch]
            needed = {id(peer) for known in (peers, *self._reached.values()) for peer in known.values()}
            for peer in (peer for reached in over for peer in reached.values()):
                if id(peer) not in needed:
                    peer.close()
            kept = {addresses[replica].nonce: peer for replica, peer in peers.items()} | self._kept
            self._kept = {n: peer for n, peer in kept.items() if not peer.shares_memory or n in members}
            self._forget()
            self._watch()
            left = [nonce for nonce, peer in self._opened.items() if id(peer) not in needed]
            gone = [self._opened.pop(nonce) for nonce in left]
        for peer in gone:
            self._on_left(peer)
        plan = group_view(
            view.epoch,
            self._exchange.replica,
            addresses,
            view.contributing,
            ring=self._algorithm == "ring",
            hierarchical=self._algorithm == "auto",
            tuning=self._tuning,
        )
        if not (plan.one_host or plan.alike):
            log.info(
                "replica %d rank %d: hosts differ in processor or libraries, so each element is summed on one of them, "
                "which costs small ops a second hop",
                plan.me,
                self._rank,
            )
        self._on_view(view)
        return self._exchange.resume(plan, peers, progress)._asdict()

    def fail(self, reason: str, ending: m.Ending) -> None:
        self._watcher.close()
        error = expelled(f"replica {self._exchange.replica} rank {self._rank}", reason, ending)
        self._exchange.fail(error)
        self._on_failed(error)

    def close(self) -> None:
        """Watch nobody any more; idempotent."""
        self._watcher.close()

    def _watch(self) -> None:
        """Those that share memory with us, in this epoch and in those to come. With the lock."""
        views = {**self._reached, self._epoch: self._peers}
        word = life(self._exchange.replica)
        self._watcher.watch(
            {
                (replica, epoch): MutexWord(peer.words, word, peer.address + 8 * word)
                for epoch, peers in views.items()
                for replica, peer in peers.items()
                if peer.shares_memory
            }
        )
