"""Keeps what a member of a group has from view to view, and says how it goes from one to the next.

That is the same whether the host runs the ops (`ftcomm.collective.core`) or a kernel (`ftcomm.engines.gpu_kernel`), and
so is a part of the exchange.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Generic, NamedTuple

from ftcomm.collective.chunks import Contributors
from ftcomm.collective.inflight import Inflight, OpT, Resumed
from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import ProtocolError
from ftcomm.collective.roster import RosterTracker, pass_boundary
from ftcomm.collective.watchdog import Stall, Watchdog
from ftcomm.control.messages import Progress, Roster
from ftcomm.errors import FtcommError
from ftcomm.recorder.layout import PhaseKind
from ftcomm.recorder.recorder import listed
from ftcomm.transport.base import MirrorWriter, Peer


class Entered(NamedTuple):
    resumed: Resumed
    error: FtcommError | None = None  # why this member cannot go on in that view


class GroupMember(Generic[OpT]):
    """Frozen until the first `enter`. It has no thread and no clock, and waits for nothing."""

    def __init__(self, replica: int, watch: Watchdog) -> None:
        self.replica, self.watch = replica, watch
        self.inflight: Inflight[OpT] = Inflight()
        self.rosters = RosterTracker()
        self.view: GroupView | None = None  # None: has never been in one
        self.peers: dict[int, Peer] = {}
        self.frozen = True
        self.error: BaseException | None = None
        self.recorded_change: tuple[int, int] | None = None  # the change of view, as it is recorded

    @property
    def nonces(self) -> dict[int, str]:
        """The nonce of the segment of each peer."""
        return {replica: peer.nonce for replica, peer in self.peers.items()}

    def freeze(self) -> None:
        """Stop: nothing moves from now on, before `enter`. A connection that ends meanwhile is no news."""
        if not self.frozen:
            recorder = self.watch.recorder
            self.recorded_change = recorder.recorder.begin(PhaseKind.VIEW, note=recorder.name)
        self.frozen = True
        for peer in self.peers.values():
            peer.quiet()

    def account(self, begun: int | None = None) -> Progress:
        """Returns where this member stands, frozen; `begun` is that of `Inflight.progress`. Raises the error with which
        it has failed."""
        if self.error is not None:
            raise self.error
        if self.view is None:
            return Progress(returned=0, ops=(), fresh=True)
        return self.rosters.told(self.inflight.progress(begun))

    def replace_peers(
        self, peers: Mapping[int, Peer], leave: Callable[[Peer], object] = lambda peer: None
    ) -> list[int]:
        """Take `peers`, those of the next view; `leave` each of the others, and close it. Returns who stays, in the
        life that it had."""
        for peer in self.peers.values():
            if all(peer is not kept for kept in peers.values()):
                leave(peer)
                peer.close()
        before, self.peers = self.nonces, dict(peers)
        return [replica for replica, nonce in self.nonces.items() if before.get(replica) == nonce]

    def enter(self, view: GroupView, progress: Mapping[int, Progress], stay: Collection[int]) -> Entered:
        """Enter `view` with what all its members have told: return what is done, and plan what is left of the rest.
        `stay` is what `replace_peers` has returned."""
        ops = list(self.inflight.ops)
        if self.view is None:
            places = [op.place for op in ops]
            self.inflight.number_from(progress)
            for op, before in zip(ops, places, strict=True):
                self.watch.recorder.renumbered(op, before)
        self.view = view
        self.rosters.agree(view, progress)
        resumed = Resumed(0, 0, 0)
        error: FtcommError | None = None
        try:
            resumed = self.inflight.resume(progress, view.contributors)
        except ProtocolError as wrong:
            error = wrong
        if not view.contributing:
            error = FtcommError("no contributing member is left; the state of the training is lost")
        self.watch.disturbed(self.inflight.issued, frozenset(self.peers), stay)
        self._record(view, ops)
        self.frozen = False
        return Entered(resumed, error)

    def _record(self, view: GroupView, ops: Collection[OpT]) -> None:
        """Record the view that is entered, and what has become of the ops that were in flight."""
        recorder, now = self.watch.recorder, self.watch.clock()
        transports = {replica: peer.transport for replica, peer in self.peers.items()}
        members = {**dict.fromkeys(view.ring or view.members, ""), **transports}
        recorder.entered(view.epoch, *listed(members))
        for op in ops:
            if op.done:
                recorder.ended(op, now, op.error is not None)
            else:
                recorder.goes_on(op)
        change, self.recorded_change = self.recorded_change, None
        if change is not None:
            recorder.recorder.finish(change, number=view.epoch)

    def stalled(self, op: Operation, missing: tuple[int, ...], come: Callable[[int], int]) -> Stall | None:
        """`op` has waited for the replicas `missing`, and nothing has moved. See `Watchdog.waits`."""
        assert self.view is not None
        return self.watch.waits(self.view.epoch, op, missing, come)

    def fail(self, error: BaseException) -> bool:
        """Fail with `error`. True for the first error, which counts."""
        first = self.error is None
        if first:
            self.error = error
        return first

    def abandon(self) -> None:
        """End every op in flight with the error. No memory operation is under way."""
        assert self.error is not None
        for op in self.inflight.ops:
            self.watch.recorder.ended(op, self.watch.clock(), failed=True)
        self.inflight.abandon(self.error)
        for peer in self.peers.values():
            peer.close()
        self.watch.wait = None


class GroupExchange(ABC, Generic[OpT]):
    """The collectives of one member of a group. Frozen until the first `enter`; ops submitted before wait for it.

    `changed` is told when a view was entered, and at the end; with its lock transitions are guarded.
    """

    def __init__(self, member: GroupMember[OpT], changed: threading.Condition) -> None:
        self.replica = member.replica
        self.member, self._changed = member, changed

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    @abstractmethod
    def submit(self, op: OpT) -> None:
        """Enqueue `op`. Does not block. If the engine has failed, `op.error` is set at once."""

    @abstractmethod
    def run(self, op: OpT) -> None:
        """Enqueue `op`, and return when the caller may use its array. The outcome is in `op.error`."""

    @abstractmethod
    def wait(self, op: OpT, timeout: float | None = None) -> bool:
        """Block until the caller may use the array of `op`; False if `timeout` seconds pass before. Any thread."""

    @abstractmethod
    def wait_all(self, timeout: float | None = None) -> None:
        """Block until nothing is in flight. Raises `CollectiveTimeout` after `timeout` seconds; not the ops' errors."""

    def common(self, *, reset: bool = False) -> Contributors | None:
        """Returns the contributors to every chunk that was reduced since the last reset; None if nothing was. Called
        after `wait_all`."""
        flight = self.member.inflight
        common, flight.common = flight.common, None if reset else flight.common
        return common

    @property
    def capturing(self) -> bool:
        """Whether an op that this thread calls now is put into a graph, and no exchange before that is replayed."""
        return False

    @property
    def stalled_seconds(self) -> float:
        """The seconds for which ops have stood still here, waiting for members that were lost or did not move."""
        return self.member.watch.stalled_seconds

    @property
    def returned(self) -> int:
        """The number of ops of the group that have returned here."""
        return self.member.inflight.returned

    @property
    def issued(self) -> int:
        """The number of ops of the group that were called here, also in an earlier life."""
        return self.member.inflight.issued

    def waiting(self, seconds: float) -> Stall | None:
        """Returns the members that the op in flight waits for, if it has made no progress for `seconds`. Any thread; no
        lock."""
        return None if self.member.frozen else self.member.watch.waiting(seconds)

    @property
    def view(self) -> GroupView:
        """The one that this member runs in, or has run in last; it has entered one."""
        assert self.member.view is not None
        return self.member.view

    def roster(self, step: int) -> Roster:
        """Returns the roster from the boundary of `step` on. Called after the first view."""
        with self._changed:
            return self.member.rosters.at(step)

    def begin_at(self, step: int) -> None:
        """Let a joiner begin as if it had passed the boundary of `step`."""
        with self._changed:
            self.member.rosters.passed(step)

    def pass_boundary(self, step: int, timeout: float) -> Roster:
        """Pass a boundary, as `ftcomm.collective.roster.pass_boundary` says."""
        member = self.member
        moves = lambda: not member.frozen or member.error is not None  # noqa: E731
        return pass_boundary(
            member.rosters,
            self._changed,
            moves,
            step,
            timeout,
            lambda: member.watch.changes,
            lambda: member.watch.away,
        )

    # -- the control side: none of these blocks ----------------------------------------------------------------------

    def job_changes(self) -> None:
        """Note that the job begins to change its view, as `Watchdog.job_changes` says."""
        self.member.watch.job_changes()

    def coordinator_away(self, seconds: float) -> None:
        """Let waits go on, as `Watchdog.coordinator_away` says."""
        self.member.watch.coordinator_away(seconds)

    @abstractmethod
    def freeze(self, quiesced: Callable[[], None]) -> None:
        """Stop; `quiesced` is called, here or by another thread, when no memory operation of ours runs. May be
        repeated."""

    @abstractmethod
    def wake(self) -> None:
        """Wake the thread that drives or watches if it sleeps: it has something to look at. In a job also called once a
        beat."""

    @abstractmethod
    def progress(self) -> Progress:
        """Returns where this member stands. Called between `quiesced` and `enter`. Raises the engine's error if it has
        failed."""

    @abstractmethod
    def admit(self, reader: MirrorWriter) -> None:
        """Serve, or refuse, a member that reads this one through a connection."""

    @abstractmethod
    def enter(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Resumed:
        """Enter the epoch of `view`. `peers` are all its other members, `progress` is of all its members, this one too.

        A defect in the members' accounts of themselves fails the engine with `ProtocolError`.
        """

    def forget(self) -> None:
        """Drop the references to whoever knows this exchange, so that its memory goes with the last who holds it.
        Called after `fail`. An exchange that lives as long as its process keeps them."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End: every op in flight and every later one fails with `error`. The first error counts."""
