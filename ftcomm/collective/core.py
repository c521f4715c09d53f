"""The exchange of one member as a state machine: what happens to it comes in, what is to be done about it comes out.

    submit      an op is called                     at_once   it may be done in one go
    freeze      a view change: nothing moves        progress  where this member stands, for the others
    enter       a new epoch, with what all told     admit     a member reads this one through a connection
    step        the next thing that can be done     blocked   nothing could be done for a while: who is to blame
    fail        the end                             abandon   of every op in flight, too

It has no thread and no clock, and waits for nothing. Threads drive it in `ftcomm.collective.driver`, virtual time in
`ftcomm.simulation.rank`, and all orders of its steps in `ftcomm.simulation.live`.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.inflight import Inflight, Resumed
from ftcomm.collective.operation import Operation
from ftcomm.collective.pending import PendingReaders, is_current
from ftcomm.collective.pipeline import LAST, used_up
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import ProtocolError
from ftcomm.collective.roster import RosterTracker
from ftcomm.collective.stream import Stream
from ftcomm.collective.watchdog import Due, Stall, Watchdog, gave_up
from ftcomm.control.messages import Progress
from ftcomm.errors import FtcommError
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import Lost, MirrorWriter, Peer, Poller
from ftcomm.transport.segment import Segment


class Did(enum.Enum):
    """What a step has done."""

    MOVED = enum.auto()
    RETURNED = enum.auto()  # the first op in flight
    NOTHING = enum.auto()  # others have to do something first


MOVED, RETURNED, NOTHING = Did  # a name of a module costs half of what one of a class does


class Entered(NamedTuple):
    resumed: Resumed
    error: FtcommError | ProtocolError | None = None  # why this member cannot go on in that view


def nothing(*said: object) -> None:
    """Nobody is told."""


def _no_poller(peers: Collection[Peer]) -> Poller | None:
    return None


class ExchangeCore:
    """One member of one group. See `ftcomm.collective.exchange.Exchange` for the callbacks, which are called from
    `step` and `welcome`. `mutex` is held for all calls but these, `at_once` and `blocked`, where there are threads."""

    stream_type: type[Stream] = Stream

    def __init__(
        self,
        replica: int,
        segment: Segment,
        waiter: Waiter,
        reducer: Reducer,
        watch: Watchdog,
        *,
        on_lost: Lost,
        on_divergence: Callable[[Divergence], None] | None = None,
        poller: Callable[[Collection[Peer]], Poller | None] = _no_poller,
        mutex: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self.replica = replica
        self._segment, self._waiter, self._reducer = segment, waiter, reducer
        self.watch = watch
        self._on_lost, self._on_divergence = on_lost, on_divergence
        self._poller = poller
        self._mutex = contextlib.nullcontext() if mutex is None else mutex
        self.inflight = Inflight()
        self.rosters = RosterTracker()
        self.stream: Stream | None = None  # None: has never been in a view
        self.peers: dict[int, Peer] = {}
        self._pending = PendingReaders()
        self._lives: dict[int, str] = {}  # of the peers: replica -> nonce of its segment
        self.frozen = True
        self.error: BaseException | None = None

    @property
    def epoch(self) -> int:
        return 0 if self.stream is None else self.stream.view.epoch

    # -- ops -----------------------------------------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """Raises `ArgumentError` if there are too many."""
        inflight, stream = self.inflight, self.stream
        inflight.add(op)
        if len(inflight.ops) == 1:
            watch = self.watch
            watch.began = watch.clock()
        if stream is not None:
            stream.pipeline.unposted.append(op)

    def at_once(self, op: Operation) -> bool:
        """`op` was submitted a moment ago, as the only one in flight: True if it could be done in one go, and has
        returned. Else it is where it is."""
        stream = self.stream
        if stream is None or (fast_path := stream.fast_path) is None or op.schedule is not None or stream.readers:
            return False
        pipeline = stream.pipeline
        if pipeline.posted == pipeline.taken < LAST and len(pipeline.unposted) == 1 and fast_path.run(op):
            self.watch.returns(op)
            self.inflight.return_first()
            return True
        return False

    def step(self) -> Did:
        """One thing, while an op is in flight and nothing is frozen. Raises what `Interrupted` is for, and
        `FtcommError` if this member cannot go on."""
        stream = self.stream
        assert stream is not None
        if stream.advance():
            self.watch.wait = None
            return MOVED
        op = self.inflight.ops[0]
        if stream.stable(op):
            self.watch.returns(op)
            self.inflight.return_first()
            return RETURNED
        if stream.pipeline.posted >= LAST and op.end < 0:
            raise used_up(self.replica, stream.view.epoch)
        return NOTHING

    def blocked(self) -> Stall | None:
        """A wait has ended, and nothing has moved. The stall, when it is due to be reported. Raises `FtcommError` when
        it is time to give up."""
        stream, op = self.stream, self.inflight.ops[0]
        assert stream is not None
        missing = stream.missing(op)
        due = self.watch.waits(stream.view.epoch, op, missing)
        if due is Due.GIVE_UP:
            raise gave_up(op, self.watch.give_up, missing)
        return Stall(stream.view.epoch, op.number, missing) if due is Due.REPORT else None

    # -- who reads this member through a connection -------------------------------------------------------------------

    def admit(self, reader: MirrorWriter) -> None:
        """Keep it until it is `due`, or until it is known that no epoch will serve it."""
        late = reader.epoch <= self.epoch and not is_current(reader, self.epoch, self._lives)
        if self.error is not None or late:
            reader.close()
            return
        self._pending.add(reader)

    def due(self) -> list[MirrorWriter]:
        """The readers that this epoch serves from now on, to be given to `welcome` without the mutex."""
        stops = self.frozen or self.error is not None or self.stream is None
        return [] if stops else self._pending.take(self.epoch, self._lives)

    def welcome(self, readers: list[MirrorWriter]) -> None:
        """They get what they missed."""
        for reader in readers:
            assert self.stream is not None
            self.stream.publisher.welcome(reader)

    def _send_failed(self, replica: int, epoch: int, reason: str) -> None:
        """The connection to a reader has broken; no news if the next one is here already."""
        with self._mutex:
            replaced = self._pending.holds(replica, self._lives.get(replica, ""))
        if not replaced:
            self._on_lost(replica, epoch, reason)

    # -- views ---------------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Nothing moves from now on, before `enter`. What ends meanwhile is no news."""
        self.frozen = True
        for peer in self.peers.values():
            peer.quiet()

    def progress(self) -> Progress:
        """Where this member stands, frozen. Raises the error with which it has failed."""
        if self.error is not None:
            raise self.error
        if self.stream is None:
            return Progress(returned=0, ops=(), fresh=True)
        return self.rosters.told(self.inflight.progress())

    def enter(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Entered:
        """The epoch of `view`. `peers` are all its other members, `progress` is of all its members."""
        for peer in self.peers.values():
            if all(peer is not kept for kept in peers.values()):
                peer.close()
        for peer in peers.values():
            peer.relay_for(peers if view.ring else {})
            peer.enter(view.epoch)
        self.peers = dict(peers)
        self._lives = {replica: peer.nonce for replica, peer in peers.items()}
        self._reducer.use([self._segment.buffer, *(peer.buffer for peer in peers.values())])
        stream = self.stream_type(
            view,
            self._segment,
            self.peers,
            self._waiter,
            self._reducer,
            self._send_failed,
            self._on_divergence,
            self._poller(self.peers.values()),
        )
        if self.stream is None:
            self.inflight.number_from(progress)
        else:
            for reader in self.stream.close(self._lives):
                self._pending.bring_back(reader)
        self.stream = stream
        self.rosters.agree(view, progress)
        resumed = Resumed(0, 0, 0)
        error: FtcommError | ProtocolError | None = None
        try:
            resumed = self.inflight.resume(progress, view.contributors)
            stream.pipeline.unposted.extend(self.inflight.ops)
        except ProtocolError as wrong:
            error = wrong
        if not view.contributing:
            error = FtcommError("no contributing member is left; the state of the training is lost")
        self.watch.disturbed(self.inflight.issued)
        self.frozen = False
        return Entered(resumed, error)

    # -- the end -------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> bool:
        """True for the first error, which counts."""
        first = self.error is None
        if first:
            self.error = error
        return first

    def abandon(self) -> None:
        """End every op in flight with the error. No memory operation is under way."""
        assert self.error is not None
        if self.stream is not None:
            self.stream.close()  # first: what it sends may lie in the arrays of the ops
        self.inflight.abandon(self.error)
        for peer in self.peers.values():
            peer.close()
        self._pending.close()
        self.watch.wait = None

    def forget(self) -> None:
        """After the end, when nothing is in flight: know nobody who knows this one."""
        self.stream, self.peers = None, {}
        self._on_lost, self._on_divergence = nothing, None
