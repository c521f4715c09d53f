"""The exchange of one member of a group, as callers and the control plane see it.

    freeze      the driver stops at its next wait (between two memory operations) and parks
    progress    returns what this member holds, for the others
    enter       a new epoch: a new stream, with the tasks that are left; the driver goes on

It consists of a core, which decides and moves (`ftcomm.collective.core`), a driver, which says when
(`ftcomm.collective.driver`), and the threads that do it (`ftcomm.collective.threads`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.core import ExchangeCore, nothing
from ftcomm.collective.driver import Driver
from ftcomm.collective.inflight import Resumed
from ftcomm.collective.member import GroupExchange, GroupMember
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.stream import Interrupted
from ftcomm.collective.threads import Threads
from ftcomm.collective.watchdog import Stall, Watchdog
from ftcomm.control.messages import Progress
from ftcomm.errors import DivergenceError, TransportError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.process.own import own_process
from ftcomm.recorder.recorder import GroupRecorder
from ftcomm.settings.tuning import Tuning
from ftcomm.sync.sched import cores
from ftcomm.transport.base import MirrorWriter, OnLost, Peer
from ftcomm.transport.segment import ASLEEP, SLOTS, Segment

# Rounds of polling and yielding before a sleep, from which a member answers much later. Without the yield two members
# that share a core would wait for each other until the polls are used up (docs/transports.md, Measured choices).
_ROUNDS = 32  # every member on this host has a core: about 80 us
_ROUNDS_CROWDED = 4


class Exchange(GroupExchange[Operation]):
    """The collectives of a member whose ops the host runs.

    `on_stall` is called by the driving thread when an op has made no progress for longer than its deadline, and about
    every second from then on. The deadline follows what ops of its size have taken, between `deadline_floor` and
    `deadline_ceiling` seconds. After `give_up` seconds without progress, or without a new view, the engine fails with
    `CollectiveTimeout`.

    `on_lost(replica, epoch, reason)` is called by the driving thread when the connection to a member that reads through
    TCP has broken; the op goes on waiting, for the view change. `on_failed(error)` is called once, by any thread, if
    the engine fails of its own accord, not by `fail`. With `on_divergence` the results of all members are compared; it
    is called by the driving thread for every chunk that differs. If this member is not in the majority, or there is
    none, the engine then fails with `DivergenceError`. `ranks_per_replica` tells how crowded the host is. `reducer` is
    what reduces, and of this exchange alone; None: the processor does. `threads` are its share of the process.
    `recorder` records its ops; without it they are not recorded.
    """

    core_type: type[ExchangeCore] = ExchangeCore

    def __init__(
        self,
        replica: int,
        segment: Segment,
        *,
        deadline_floor: float,
        deadline_ceiling: float,
        give_up: float,
        on_stall: Callable[[Stall], None],
        on_lost: OnLost = lambda replica, epoch, reason: None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
        on_divergence: Callable[[Divergence], None] | None = None,
        ranks_per_replica: int = 1,
        reducer: Reducer | None = None,
        threads: Threads | None = None,
        recorder: GroupRecorder | None = None,
    ) -> None:
        self._on_lost, self._on_failed, self._on_divergence = on_lost, on_failed, on_divergence
        self._ranks_per_replica = ranks_per_replica
        threads = Threads() if threads is None else threads
        self._mutex = threads.mutex
        self._waiter = waiter = threads.waiter(segment.words, ASLEEP)
        watch = Watchdog(deadline_floor, deadline_ceiling, give_up, threads.clock, recorder)
        member = GroupMember[Operation](replica, watch)
        super().__init__(member, threads.changed)
        self.core = self.core_type(
            member,
            segment,
            waiter,
            Reducer() if reducer is None else reducer,
            on_lost=self._lost,
            on_divergence=None if on_divergence is None else self._diverged,
            poller=lambda peers: threads.poller(peers, waiter),
            mutex=self._mutex,
        )
        self.driver = Driver(self.core, waiter, threads, on_stall=on_stall, on_failed=on_failed)

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        self.driver.submit(op)

    def run(self, op: Operation) -> None:
        self.driver.drive(op)
        if not op.done:
            op.wait()

    def wait(self, op: Operation, timeout: float | None = None) -> bool:
        if not op.done:
            own_process()
        return op.wait(timeout)

    def wait_all(self, timeout: float | None = None) -> None:
        self.member.inflight.wait_all(self._mutex, timeout)

    def tune(self, tuning: Tuning) -> None:
        """Use other switch points until the next view, for `ftcomm bench tune`: all members between the same two
        ops."""
        with self._mutex:
            if self.core.stream is None or self.member.inflight.ops:
                raise RuntimeError("tune() while ops are in flight, or before the first view")
            self.core.stream.tune(tuning)
            self.member.view = self.core.stream.view

    # -- the control side: none of these blocks ----------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], None]) -> None:
        self.driver.freeze(quiesced)

    def wake(self) -> None:
        """Wake the driver; while no thread drives, take in what has come. An op that has returned here may not return
        on another member before the last frame about it has left this one, for which there may have been no room. That
        happens in a ring only, where frames come by two ways: elsewhere this member would not have returned the op
        either."""
        self._waiter.wake()
        with self._mutex:
            peers = list(self.member.peers.values()) if self.driver.idle else []
        for peer in peers:
            for _ in range(SLOTS):  # no writer is ahead by more payloads
                if not peer.pump():
                    break
                self._waiter.wake()  # a thread that has begun to drive may sleep, with nothing left to receive

    def progress(self) -> Progress:
        with self._mutex:
            return self.core.progress()

    def admit(self, reader: MirrorWriter) -> None:
        """Serve a member that reads this one through a connection.

        May come before `enter` for the epoch that it was dialled for, or long after: the member gets what it missed.
        Replaces the connection that it had before. Serves in later epochs, too, as long as that life is a member."""
        with self._mutex:
            self.core.admit(reader)
        self._waiter.interrupt()

    def enter(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Resumed:
        with self._mutex:
            member, driver = self.member, self.driver
            if not member.frozen or not driver.has_quiesced:
                raise RuntimeError("enter() before the engine has quiesced")
            if member.error is not None:
                return Resumed(0, 0, 0)
            self._waiter.rounds = self._rounds(peers)
            resumed, failed = self.core.enter(view, peers, progress)
            driver.entered(failed)
        if failed is not None:
            self._on_failed(failed)
        return resumed

    def returned_elsewhere(self, ops: int) -> None:
        """Note that a member that has left had returned so many ops: they return here, too, and fail with nothing that
        comes after this."""
        with self._mutex:
            self.core.elsewhere = max(self.core.elsewhere, ops)

    @property
    def taken(self) -> int:
        """The number of first ops that this member has taken whole, so that others may have returned them, and no other
        op. Called after `fail` and `wait_all`."""
        return max(self.core.taken, self.returned)

    def part(self, error: BaseException) -> None:
        """Fail as by `fail`, but only when nothing is in flight here that others may have returned. They do not need
        this member for that; who wants to wait no longer for them calls `fail`."""
        self.driver.part(error)

    def fail(self, error: BaseException) -> None:
        self.driver.fail(error, tell=False)

    def forget(self) -> None:
        """Drop all references to the owner of this exchange, so that its memory goes with the last holder, and does not
        wait for the garbage collector. Called after `fail`. A thread that still drives an op has it until then."""
        self.driver.forget()
        self._on_lost = self._on_failed = self._on_divergence = nothing

    # -- what the driving thread says --------------------------------------------------------------------------------

    def _lost(self, replica: int, epoch: int, reason: str) -> None:
        """Note that the connection to a reader has broken, or that this member itself cannot send."""
        if replica == self.replica:
            self.driver.fail(TransportError(f"replica {replica} cannot go on: {reason}"), tell=True)
        else:
            self._on_lost(replica, epoch, reason)

    def _diverged(self, divergence: Divergence) -> None:
        """Note that the results of a chunk differ. The majority goes on; the others fail before they return the op."""
        assert self._on_divergence is not None
        self._on_divergence(divergence)
        if self.replica in divergence.wrong:
            self.driver.fail(DivergenceError(f"replica {self.replica} cannot go on. {divergence}."), tell=True)
            raise Interrupted

    def _rounds(self, peers: Mapping[int, Peer]) -> int:
        """Returns how many rounds to poll before a sleep."""
        if any(not peer.shares_memory for peer in peers.values()):
            return 0  # a poll holds the interpreter lock, which the receiving threads need
        here = self._ranks_per_replica * (1 + len(peers))
        return _ROUNDS if here <= cores() else _ROUNDS_CROWDED
