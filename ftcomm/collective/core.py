"""The exchange of one member as a state machine: events come in, and what to do about them comes out.

    submit   an op is called                          at_once   do it in one go, if that is possible
    freeze   a view change: nothing moves             progress  returns where this member stands, for the others
    enter    a new epoch, with what all have told     admit     a member reads this one through a connection
    step     do the next thing that can be done       wait      nothing can be done: wait for others
                                                      blocked   they did not come for a while: who is to blame
    fail     the end                                  abandon   the end of every op in flight, too
    part     the end, as soon as nothing is in flight here that may have returned elsewhere

It has no thread and no clock. `ftcomm.collective.driver` drives it, in threads and in virtual time, and
`ftcomm.simulation.live` in all orders of its steps.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Collection, Mapping

import msgspec

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.member import Entered, GroupMember
from ftcomm.collective.operation import Operation
from ftcomm.collective.pending import PendingReaders, is_current
from ftcomm.collective.pipeline import LAST, used_up
from ftcomm.collective.plan import GroupView
from ftcomm.collective.stream import Stream
from ftcomm.collective.watchdog import Stall
from ftcomm.control.messages import Progress
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import MirrorWriter, OnLost, Peer, Poller
from ftcomm.transport.segment import Segment


class StepOutcome(enum.Enum):
    """The outcome of a step."""

    MOVED = enum.auto()
    RETURNED = enum.auto()  # the first op in flight has returned
    NOTHING = enum.auto()  # others have to act first


MOVED, RETURNED, NOTHING = StepOutcome  # names of a module cost half as much as those of a class


def nothing(*said: object) -> None:
    """Tell no one."""


def _no_poller(peers: Collection[Peer]) -> Poller | None:
    return None


class ExchangeCore:
    """The state machine that runs the ops of `member` on the host. `ftcomm.collective.exchange.Exchange` has the
    callbacks, which are called from `step`, `wait` and `welcome`. All other calls, except `at_once` and `blocked`, are
    made with `mutex` held."""

    stream_type: type[Stream] = Stream

    def __init__(
        self,
        member: GroupMember[Operation],
        segment: Segment,
        waiter: Waiter,
        reducer: Reducer,
        *,
        on_lost: OnLost,
        on_divergence: Callable[[Divergence], None] | None = None,
        poller: Callable[[Collection[Peer]], Poller | None] = _no_poller,
        mutex: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self.member = member
        self._inflight, self._watch = member.inflight, member.watch
        self._recorder = member.watch.recorder
        self._segment, self._waiter, self._reducer = segment, waiter, reducer
        self._on_lost, self._on_divergence = on_lost, on_divergence
        self._poller = poller
        self._mutex = contextlib.nullcontext() if mutex is None else mutex
        self.stream: Stream | None = None  # None: this member has never been in a view
        self._pending = PendingReaders()
        self._severed: dict[int, str] = {}  # the nonces of peers whose connection has ended
        self.elsewhere = 0  # how many ops a member has returned that has left
        self.parting = False  # it has failed, and is not abandoned before what it has taken has returned
        self.taken = 0  # ops that were taken here in the end, which others may have returned; see `Exchange.taken`

    @property
    def epoch(self) -> int:
        view = self.member.view
        return 0 if view is None else view.epoch

    # -- ops -----------------------------------------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """Add an op. Raises `ArgumentError` if there are too many."""
        inflight, stream, watch = self._inflight, self.stream, self._watch
        now = watch.clock()
        if not inflight.ops:
            watch.began = now
        inflight.add(op)
        self._recorder.called(op, now)
        if stream is not None:
            stream.pipeline.unposted.append(op)

    def at_once(self, op: Operation) -> bool:
        """Do `op`, which was just submitted as the only one in flight, in one go. True if it has returned; otherwise it
        goes on from where it is."""
        stream = self.stream
        if stream is None or (fast_path := stream.fast_path) is None or op.schedule is not None or stream.readers:
            return False
        if fast_path.run(op):
            self._watch.returns(op)
            self._inflight.return_first()
            return True
        return False

    def step(self) -> StepOutcome:
        """Do one thing, while an op is in flight and nothing is frozen. Raises `Interrupted`, and `FtcommError` if this
        member cannot go on."""
        stream = self.stream
        assert stream is not None
        if stream.advance():
            self._watch.wait = None
            return MOVED
        op = self._inflight.ops[0]
        if stream.stable(op):
            self._watch.returns(op)
            self._inflight.return_first()
            return RETURNED
        if stream.pipeline.posted >= LAST and op.end < 0:
            raise used_up(self.member.replica, stream.view.epoch)
        if self.parting and not stream.pipeline.has_taken(op):
            self.parting, self._waiter.interrupted = False, True  # the driver looks around, and abandons it
        return NOTHING

    def wait(self) -> bool:
        """Wait for what has to come first, after a step has done nothing. False if it did not come before an interrupt,
        or the end of one sleep. Raises what `step` does."""
        stream = self.stream
        assert stream is not None
        if stream.wait(self._inflight.ops[0]):
            self._watch.wait = None
            return True
        return False

    def blocked(self) -> Stall | None:
        """Note that a wait has ended, and nothing has moved. Returns the stall, when it is due to be reported. Raises
        `FtcommError` when it is time to give up."""
        stream, op = self.stream, self._inflight.ops[0]
        assert stream is not None
        missing = stream.missing(op)
        stall = self.member.stalled(op, missing, stream.come)
        waited = self._watch.waited
        for replica in missing:
            self.member.peers[replica].overdue(waited)
        return stall

    # -- who reads this member through a connection -------------------------------------------------------------------

    def admit(self, reader: MirrorWriter) -> None:
        """Keep a reader until it is `due`, or until no epoch can serve it any more."""
        late = reader.epoch <= self.epoch and not is_current(reader, self.epoch, self.member.nonces)
        if self.is_over or late:
            reader.close()
            return
        self._pending.add(reader)

    def due(self) -> list[MirrorWriter]:
        """Returns the readers that this epoch serves from now on, to be given to `welcome` without the mutex."""
        stops = self.member.frozen or self.is_over or self.stream is None
        return [] if stops else self._pending.take(self.epoch, self.member.nonces)

    def welcome(self, readers: list[MirrorWriter]) -> None:
        """Attach readers, and send them what they missed."""
        for reader in readers:
            assert self.stream is not None
            self._severed.pop(reader.replica, None)
            self.stream.publisher.welcome(reader)

    def _send_failed(self, replica: int, epoch: int, reason: str) -> None:
        """Note that the connection to a reader has broken; no news if the next one is here already."""
        with self._mutex:
            nonce = self.member.nonces.get(replica, "")
            replaced = self._pending.holds(replica, nonce)
            if not replaced and replica != self.member.replica:
                self._severed[replica] = nonce
        if not replaced:
            self._on_lost(replica, epoch, reason)

    # -- views ---------------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Returns where this member stands, frozen. Raises the error with which it has failed."""
        severed = (x for x, nonce in sorted(self._severed.items()) if not self._pending.holds(x, nonce))
        return msgspec.structs.replace(self.member.account(), severed=tuple(severed))

    def enter(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Entered:
        """Enter the epoch of `view`. `peers` are all its other members, `progress` is of all its members."""
        member = self.member
        stay = member.replace_peers(peers)
        for peer in peers.values():
            peer.relay_for(peers if view.ring else {})
            peer.enter(view.epoch)
        nonces = member.nonces
        self._severed = {x: nonce for x, nonce in self._severed.items() if nonces.get(x) == nonce}
        self._reducer.use([self._segment.buffer, *(peer.buffer for peer in peers.values())])
        stream = self.stream_type(
            view,
            self._segment,
            member.peers,
            self._waiter,
            self._reducer,
            self._send_failed,
            self._on_divergence,
            self._poller(member.peers.values()),
            self._recorder,
        )
        if self.stream is not None:  # first, since it may send from the arrays of ops that return now
            for reader in self.stream.close(nonces):
                self._pending.bring_back(reader)
        self.stream = stream
        entered = member.enter(view, progress, stay)
        stream.pipeline.unposted.extend(self._inflight.ops)
        return entered

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether it has failed, and waits for nothing any more."""
        return self.member.error is not None and (not self.parting or self.member.frozen)

    def part(self) -> None:
        """Begin nothing any more; called by who drives, while it is `parting`. What was taken here may have returned
        elsewhere, and `step` returns it when all others have taken it, too."""
        if self.stream is not None:
            self.stream.pipeline.stop()

    def abandon(self) -> None:
        """End every op in flight with the error. No memory operation is under way."""
        taken = 0
        if self.stream is not None:
            pipeline, flight = self.stream.pipeline, self._inflight
            pipeline.stop()
            taken = flight.returned + sum(1 for _ in itertools.takewhile(pipeline.has_taken, flight.ops))
            self.stream.close()  # first, since it may send from the arrays of the ops
        self._inflight.return_below(self.elsewhere)
        self.taken = max(self.taken, taken)
        self.member.abandon()
        self._pending.close()

    def forget(self) -> None:
        """Drop all references to the owner of this core. Called after the end, when nothing is in flight."""
        self.stream, self.member.peers = None, {}
        self._on_lost, self._on_divergence = nothing, None
