"""The engine of a shard group at one member: what callers and the control plane may ask of it.

    freeze    the driver stops at its next wait (between two memory operations) and parks
    progress  what this member holds, for the others
    resume    a new epoch: a new stream, with the tasks that are left; the driver goes on

It is a core, which decides and moves (`ftcomm.collective.core`), and a driver, who is the thread that moves it
(`ftcomm.collective.driver`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.chunks import Contributors
from ftcomm.collective.core import ExchangeCore, nothing
from ftcomm.collective.driver import Driver
from ftcomm.collective.inflight import Resumed
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.roster import pass_boundary
from ftcomm.collective.stream import Interrupted
from ftcomm.collective.watchdog import Stall, Watchdog
from ftcomm.control.messages import Progress, Roster
from ftcomm.errors import DivergenceError, TransportError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.own import own_process
from ftcomm.sync.futex import Waiter
from ftcomm.sync.sched import cores
from ftcomm.transport.base import Lost, MirrorWriter, Peer
from ftcomm.transport.connect import poller_for
from ftcomm.transport.segment import ASLEEP, Segment
from ftcomm.tuning import Tuning

# Rounds of polling and yielding before a sleep. A sleeping member takes 26 us to answer, a polling one 1 us. Without
# the yield two members that share a core wait for each other until the polls are used up (1 KB: 160 us, not 5 us).
_ROUNDS = 32  # every member on this host has a core: about 80 us
_ROUNDS_CROWDED = 4  # 1 KB, four members on two cores: 21 us; 63 us without a yield


class Exchange:
    """The collectives of one member of a group. Frozen until the first `resume`; ops submitted before wait for it.

    `on_stall` is called by the driving thread when an op has made no progress for longer than its deadline, and about
    every second from then on. The deadline follows what ops of its size have taken, between `deadline_floor` and
    `deadline_ceiling` seconds. After `give_up` seconds without progress, or without a new view, the engine fails with
    `CollectiveTimeout`.

    `on_lost(replica, epoch, reason)` is called by the driving thread when the connection to a member that reads through
    TCP has broken; the op goes on waiting, for the view change. `on_failed(error)` is called once, by any thread, if
    the engine fails of its own accord, not by `fail`. With `on_divergence` the results of all members are compared; it
    is called by the driving thread for every chunk that differs. If this member is not in the majority, or there is
    none, the engine then fails with `DivergenceError`. `ranks_per_replica` tells how crowded the host is. `reducer` is
    what reduces, and of this exchange alone; None: the processor does.
    """

    def __init__(
        self,
        replica: int,
        segment: Segment,
        *,
        deadline_floor: float,
        deadline_ceiling: float,
        give_up: float,
        on_stall: Callable[[Stall], None],
        on_lost: Lost = lambda replica, epoch, reason: None,
        on_failed: Callable[[BaseException], None] = lambda error: None,
        on_divergence: Callable[[Divergence], None] | None = None,
        ranks_per_replica: int = 1,
        reducer: Reducer | None = None,
    ) -> None:
        self.replica = replica
        self._on_lost, self._on_failed, self._on_divergence = on_lost, on_failed, on_divergence
        self._ranks_per_replica = ranks_per_replica
        self._mutex = threading.Lock()
        self._waiter = waiter = Waiter(segment.words, ASLEEP, 0)
        self.core = ExchangeCore(
            replica,
            segment,
            waiter,
            Reducer() if reducer is None else reducer,
            Watchdog(deadline_floor, deadline_ceiling, give_up),
            on_lost=self._lost,
            on_divergence=None if on_divergence is None else self._diverged,
            poller=lambda peers: poller_for(peers, waiter),
            mutex=self._mutex,
        )
        self._driver = Driver(self.core, waiter, self._mutex, on_stall=on_stall, on_failed=on_failed)

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """Enqueue; the worker drives it. Does not block. If the engine has failed, `op.error` is set at once."""
        own_process()
        self._driver.submit(op)

    def run(self, op: Operation) -> None:
        """Enqueue, and return when `op.done`. The outcome is in `op.error`."""
        own_process()
        self._driver.drive(op)
        op.wait()

    def wait(self, op: Operation, timeout: float | None = None) -> bool:
        """Block until `op` is done; False if `timeout` seconds pass before. Any thread."""
        if not op.done:
            own_process()
        return op.wait(timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Block until nothing is in flight. Raises `CollectiveTimeout` after `timeout` seconds; not the ops' errors."""
        self.core.inflight.drain(self._mutex, timeout)

    def common(self, *, reset: bool = False) -> Contributors | None:
        """After `drain`: whose input is in every chunk that was reduced since the last reset; None if nothing was."""
        flight = self.core.inflight
        common, flight.common = flight.common, None if reset else flight.common
        return common

    @property
    def stood(self) -> float:
        """Seconds that ops have stood still here, waiting for members that did not move, or were lost."""
        return self.core.watch.stood

    @property
    def returned(self) -> int:
        """How many ops of the group have returned here."""
        return self.core.inflight.returned

    def waiting(self, seconds: float) -> Stall | None:
        """On whom the op in flight waits, if it has made no progress for at least `seconds`. Disturbs nobody."""
        return None if self.core.frozen else self.core.watch.waiting(seconds)

    @property
    def view(self) -> GroupView:
        """The one that this member runs in; it has entered one."""
        assert self.core.stream is not None
        return self.core.stream.view

    def tune(self, tuning: Tuning) -> None:
        """Other switch points until the next view, for `ftcomm bench tune`: all members between the same two ops."""
        with self._mutex:
            if self.core.stream is None or self.core.inflight.ops:
                raise RuntimeError("tune() while ops are in flight, or before the first view")
            self.core.stream.tune(tuning)

    def roster(self, step: int) -> Roster:
        """That from the boundary of `step` on. After the first view."""
        with self._mutex:
            return self.core.rosters.at(step)

    def stand(self, step: int) -> None:
        """A joiner begins as if it had passed the boundary of `step`."""
        with self._mutex:
            self.core.rosters.stand(step)

    def pass_boundary(self, step: int, timeout: float) -> Roster:
        """See `ftcomm.collective.roster.pass_boundary`."""
        core = self.core
        moves = lambda: not core.frozen or core.error is not None  # noqa: E731
        return pass_boundary(core.rosters, self._driver.changed, moves, step, timeout)

    # -- the control side: none of these blocks ----------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], None]) -> None:
        """Stop; `quiesced` is called, here or by the driver, when no memory operation of ours runs. May be repeated."""
        self._driver.freeze(quiesced)

    def nudge(self) -> None:
        """Wake the driver if it sleeps: it has something to look at."""
        self._waiter.wake()

    def progress(self) -> Progress:
        """Where this member stands. Between `quiesced` and `resume`. Raises the engine's error if it has failed."""
        with self._mutex:
            return self.core.progress()

    def admit(self, reader: MirrorWriter) -> None:
        """Serve a member that reads this one through a connection.

        May come before `resume` for the epoch that it was dialled for, or long after: the member gets what it missed.
        Replaces the connection that it had before. Serves in later epochs, too, as long as that life is a member."""
        with self._mutex:
            self.core.admit(reader)
        self._waiter.interrupt()

    def resume(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Resumed:
        """Enter the epoch of `view`. `peers` are all its other members, `progress` is of all its members, this one too.

        A defect in the members' accounts of themselves fails the engine with `ProtocolError`.
        """
        with self._mutex:
            core, driver = self.core, self._driver
            if not core.frozen or not driver.has_quiesced:
                raise RuntimeError("resume() before the engine has quiesced")
            if core.error is not None:
                return Resumed(0, 0, 0)
            self._waiter.rounds = self._rounds(peers)
            resumed, failed = core.enter(view, peers, progress)
            kick = driver.resumed(failed)
        if failed is not None:
            self._on_failed(failed)
        if kick:
            driver.kick()
        return resumed

    def fail(self, error: BaseException) -> None:
        """The end: every op in flight and every later one fails with `error`. The first error counts."""
        self._driver.fail(error, tell=False)

    def forget(self) -> None:
        """After `fail`, when nothing is in flight: know nobody who knows this exchange, so that its memory goes with
        the last who holds it, and does not wait for the garbage collector."""
        with self._mutex:
            if self._driver.is_idle:
                self.core.forget()
        self._driver.forget()
        self._on_lost = self._on_failed = nothing
        self._on_divergence = None

    # -- what the driving thread says --------------------------------------------------------------------------------

    def _lost(self, replica: int, epoch: int, reason: str) -> None:
        """The connection to a reader has broken, or this member itself cannot send."""
        if replica == self.replica:
            self._driver.fail(TransportError(f"replica {replica} cannot go on: {reason}"), tell=True)
        else:
            self._on_lost(replica, epoch, reason)

    def _diverged(self, divergence: Divergence) -> None:
        """The results of a chunk differ. The majority goes on; the others fail before they return the op."""
        assert self._on_divergence is not None
        self._on_divergence(divergence)
        if self.replica in divergence.wrong:
            self._driver.fail(DivergenceError(f"replica {self.replica} cannot go on. {divergence}."), tell=True)
            raise Interrupted

    def _rounds(self, peers: Mapping[int, Peer]) -> int:
        """How long to poll before a sleep."""
        if any(not peer.shares_memory for peer in peers.values()):
            return 0  # a poll holds the interpreter lock, which the receiving threads need
        here = self._ranks_per_replica * (1 + len(peers))
        return _ROUNDS if here <= cores() else _ROUNDS_CROWDED
