"""The engine of a shard group at one member: what callers and the control plane may ask of it.

    freeze    the driver stops at its next wait (between two memory operations) and parks
    progress  what this member holds, for the others
    resume    a new epoch: a new stream, with the tasks that are left; the driver goes on

Who drives, and how, is in `ftcomm.collective.driver`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftcomm.collective.chunks import Contributors
from ftcomm.collective.driver import Driver
from ftcomm.collective.inflight import Resumed
from ftcomm.collective.operation import Operation
from ftcomm.collective.pending import is_current
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import ProtocolError
from ftcomm.collective.stream import Stream
from ftcomm.collective.watchdog import Stall
from ftcomm.control.messages import Progress
from ftcomm.errors import FtcommError
from ftcomm.own import own_process
from ftcomm.sync.sched import cores
from ftcomm.transport.base import MirrorWriter, Peer
from ftcomm.transport.connect import poller_for
from ftcomm.tuning import Tuning

# Rounds of polling and yielding before a sleep. A sleeping member takes 26 us to answer, a polling one 1 us. Without
# the yield two members that share a core wait for each other until the polls are used up (1 KB: 160 us, not 5 us).
_ROUNDS = 32  # every member on this host has a core: about 80 us
_ROUNDS_CROWDED = 4  # 1 KB, four members on two cores: 21 us; 63 us without a yield


class Exchange(Driver):
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

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """Enqueue; the worker drives it. Does not block. If the engine has failed, `op.error` is set at once."""
        own_process()
        try:
            if self._admit(op):
                self._kick()
        except BaseException as error:
            self._break_off(op, error)
            raise

    def run(self, op: Operation) -> None:
        """Enqueue, and return when `op.done`. The outcome is in `op.error`."""
        own_process()
        self._drive(op)
        op.wait()

    def wait(self, op: Operation, timeout: float | None = None) -> bool:
        """Block until `op` is done; False if `timeout` seconds pass before. Any thread."""
        if not op.done:
            own_process()
        return op.wait(timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Block until nothing is in flight. Raises `CollectiveTimeout` after `timeout` seconds; not the ops' errors."""
        self._inflight.drain(self._mutex, timeout)

    def common(self, *, reset: bool = False) -> Contributors | None:
        """After `drain`: whose input is in every chunk that was reduced since the last reset; None if nothing was."""
        flight = self._inflight
        common, flight.common = flight.common, None if reset else flight.common
        return common

    @property
    def stood(self) -> float:
        """Seconds that ops have stood still here, waiting for members that did not move, or were lost."""
        return self._watch.stood

    @property
    def returned(self) -> int:
        """How many ops of the group have returned here."""
        return self._inflight.returned

    def waiting(self, seconds: float) -> Stall | None:
        """On whom the op in flight waits, if it has made no progress for at least `seconds`. Disturbs nobody."""
        return None if self._frozen else self._watch.waiting(seconds)

    @property
    def view(self) -> GroupView:
        """The one that this member runs in; it has entered one."""
        assert self._stream is not None
        return self._stream.view

    def tune(self, tuning: Tuning) -> None:
        """Other switch points until the next view, for `ftcomm bench tune`: all members between the same two ops."""
        with self._mutex:
            if self._stream is None or self._inflight.ops:
                raise RuntimeError("tune() while ops are in flight, or before the first view")
            self._stream.tune(tuning)

    # -- the control side: none of these blocks ----------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], None]) -> None:
        """Stop; `quiesced` is called, here or by the driver, when no memory operation of ours runs. May be repeated."""
        with self._mutex:
            self._frozen = True
            for peer in self._peers.values():
                peer.quiet()
            now = self._parked or self._driver is None
            if not now:
                self._quiesced.append(quiesced)
        if now:
            quiesced()
        else:
            self._waiter.interrupt()

    def nudge(self) -> None:
        """Wake the driver if it sleeps: it has something to look at."""
        self._waiter.wake()

    def progress(self) -> Progress:
        """Where this member stands. Between `quiesced` and `resume`. Raises the engine's error if it has failed."""
        with self._mutex:
            if self._error is not None:
                raise self._error
            if self._stream is None:
                return Progress(returned=0, ops=(), fresh=True)
            return self._told(self._inflight.progress())

    def admit(self, reader: MirrorWriter) -> None:
        """Serve a member that reads this one through a connection.

        May come before `resume` for the epoch that it was dialled for, or long after: the member gets what it missed.
        Replaces the connection that it had before. Serves in later epochs, too, as long as that life is a member."""
        with self._mutex:
            current = 0 if self._stream is None else self._stream.view.epoch
            late = reader.epoch <= current and not is_current(reader, current, self._lives)
            if self._error is not None or late:
                reader.close()
                return
            self._pending.add(reader)
        self._waiter.interrupt()

    def resume(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Resumed:
        """Enter the epoch of `view`. `peers` are all its other members, `progress` is of all its members, this one too.

        A defect in the members' accounts of themselves fails the engine with `ProtocolError`.
        """
        with self._mutex:
            if not self._frozen or (self._driver is not None and not self._parked):
                raise RuntimeError("resume() before the engine has quiesced")
            if self._error is not None:
                return Resumed(0, 0, 0)
            for peer in self._peers.values():
                if all(peer is not kept for kept in peers.values()):
                    peer.close()
            for peer in peers.values():
                peer.relay_for(peers if view.ring else {})
                peer.enter(view.epoch)
            self._peers = dict(peers)
            self._lives = {replica: peer.nonce for replica, peer in peers.items()}
            self._reducer.use([self._segment.buffer, *(peer.buffer for peer in peers.values())])
            self._waiter.rounds = self._rounds()
            stream = Stream(
                view,
                self._segment,
                self._peers,
                self._waiter,
                self._reducer,
                self._send_failed,
                self._diverged if self._on_divergence is not None else None,
                poller_for(self._peers.values(), self._waiter),
            )
            if self._stream is None:
                self._inflight.number_from(progress)
            else:
                for reader in self._stream.close(self._lives):
                    self._pending.bring_back(reader)
            self._stream = stream
            self._agree(view, progress)
            resumed = Resumed(0, 0, 0)
            failed: BaseException | None = None
            try:
                resumed = self._inflight.resume(progress, view.contributors)
                stream.pipeline.unposted.extend(self._inflight.ops)
            except ProtocolError as error:
                failed = error
            if not view.contributing:
                failed = FtcommError("no contributing member is left; the state of the training is lost")
            self._watch.disturbed(self._inflight.issued)
            self._frozen = False
            if failed is not None:
                self._end(failed)
            kick = bool(self._inflight.ops) and self._driver is None
            if kick:
                self._driver = self
            self._waiter.interrupted = True
            self._changed.notify_all()
        if failed is not None:
            self._on_failed(failed)
        if kick:
            self._kick()
        return resumed

    def fail(self, error: BaseException) -> None:
        """The end: every op in flight and every later one fails with `error`. The first error counts."""
        with self._mutex:
            self._end(error)
        self._waiter.interrupt()

    def forget(self) -> None:
        """After `fail`, when nothing is in flight: know nobody who knows this exchange, so that its memory goes with
        the last who holds it, and does not wait for the garbage collector."""
        with self._mutex:
            if self._driver is None:
                self._stream, self._peers = None, {}
        self._on_stall = self._on_lost = self._on_failed = _nothing
        self._on_divergence = None

    def _rounds(self) -> int:
        """How long to poll before a sleep."""
        if any(not peer.shares_memory for peer in self._peers.values()):
            return 0  # a poll holds the interpreter lock, which the receiving threads need
        here = self._ranks_per_replica * (1 + len(self._peers))
        return _ROUNDS if here <= cores() else _ROUNDS_CROWDED


def _nothing(*said: object) -> None:
    pass
