"""Drives a subgroup from view to view: its exchange, its membership and its connections, without the calls of users.

It is an exchange of its own, with a segment and a stream of its own. Which views it enters, and what the members ask of
each other before, `ftcomm.membership.derived` decides. A thread of the group drives that, one action after the other,
so that no view is entered after a newer one has stopped the exchange. What blocks has threads of its own, which tell it
what came of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Deadlines, Stall
from ftcomm.control import handshake, wire
from ftcomm.control.actions import EnterView, Freeze
from ftcomm.control.blame import CHANGE
from ftcomm.control.data_plane import WaitsFor
from ftcomm.control.dropped import drop
from ftcomm.control.failed_dials import shortage
from ftcomm.control.framing import Framing, receive_while
from ftcomm.control.running_time import RunningTimer
from ftcomm.control.sealed import Connection
from ftcomm.control.views import Address, View
from ftcomm.engines.base import Events
from ftcomm.engines.host import HostEngine
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, TransportError, copy_of
from ftcomm.groups.communicator import Communicator, Terms, closed
from ftcomm.membership.derived import (
    AskMember,
    DerivedAction,
    DerivedMembership,
    FailGroup,
    Left,
    ReachMember,
    ReportStall,
    ReturnedElsewhere,
    SubgroupProgress,
    TellCaller,
)
from ftcomm.p2p.calls import JobProgressEngine
from ftcomm.process.joining import join
from ftcomm.process.own import own_process
from ftcomm.recorder.layout import GroupKind
from ftcomm.transport.base import OnLost
from ftcomm.transport.group_connection import ASK, ENTERED, P2P, GroupConnection
from ftcomm.transport.router import PURPOSE
from ftcomm.transport.segment import Segment

if TYPE_CHECKING:
    from ftcomm.groups.group_internals import JobMember

log = logging.getLogger("ftcomm")

_LOOK = 0.05  # s between two looks at whether an answer is still wanted
_WAKE_AGAIN = 0.001  # s between wake-ups of a driver that sleeps on a word of a dead peer
_SEND = 2.0  # s for an answer to be taken
PARTING = 2.0  # s for others to enter the view that this member leaves
_MEND = "close it here, too, and make a new one"

DialAddress = Callable[[Address, str, handshake.Fields, float], Connection]

FRAMES: Framing[SubgroupProgress | Left] = Framing(SubgroupProgress | Left, wire.MAX_MESSAGE)


class SubgroupInternals:
    """The internals of one subgroup, as `Subgroup.internals`, for the group of all, torch and `Subgroup` itself.

    name, replica, size: of the group, of this member, and how many members it was made of.
    job: the internals of the group of all.
    exchange, p2p: run its ops and its messages.
    error: why no op can succeed any more; None while all is well.
    called: returns when a call was made, if one thread makes the calls of others; see `Internals.when`.
    """

    def __init__(
        self,
        group: JobMember,
        name: str,
        replicas: Collection[int],
        *,
        dial: DialAddress,
        on_stall: Callable[[Stall], None],
        on_lost: OnLost,
        on_failed: Callable[[BaseException], None],
        on_divergence: Callable[[Divergence], None],
    ) -> None:
        """See `Group.subgroup`. `on_stall`, every second, and `on_lost` before it,
        of those of them to whom a connection has ended. `on_failed`: this rank cannot go on."""
        settings = group.settings
        if group.replica not in replicas or len(set(replicas)) != len(replicas):
            raise ArgumentError(
                f"group {name!r} of replicas {list(replicas)} at replica {group.replica}; expected this one among "
                "them, and each once"
            )
        self._group = group
        self.name, self.replica, self.size = name, group.replica, len(replicas)
        self.job = group.internals
        self.called: tuple[int, int] | None = None
        self._dial, self._on_stall, self._on_lost = dial, on_stall, on_lost
        self._on_failed = on_failed
        in_view = group.internals.router.newest is not None
        made = group.internals.next_boundary() if in_view else None
        self.error: BaseException | None = None
        self._lock = threading.Lock()  # never held across a wait
        self.p2p = JobProgressEngine(group.replica, group.shard, self._dial_p2p)
        engine = HostEngine(
            group.replica,
            Segment(members=len(replicas), chunks=0),
            settings.transport,
            Deadlines.of(settings.timeouts),
            verify=settings.verify,
            ranks_per_replica=settings.ranks_per_replica,
        )
        self._communicator = communicator = Communicator(
            name,
            group.replica,
            engine,
            Events(self._stalled, on_failed, self._connection_ended, on_divergence),
            self.p2p,
            Terms((settings.host, group.internals.port), settings.data, settings.algorithm, settings.tuning),
            GroupKind.SUBGROUP,
        )
        self.exchange = communicator.exchange
        self._membership = DerivedMembership(group.replica, replicas, communicator.here, settings.timeouts, made)
        self._changed = threading.Condition(self._lock)  # told of changes of the membership, and of the error
        self._leaves = False  # this member closes the group
        self._waiting = 0  # threads of the user that wait for a view
        self._ended: dict[int, tuple[int, str]] = {}  # in which epoch the connection with a member has ended, and why
        # The thread alone uses the rest.
        self._events: queue.SimpleQueue[Callable[[], list[DerivedAction]]] = queue.SimpleQueue()
        self._stopping = False
        self._warned = 0  # epoch
        self._thread = threading.Thread(target=self._drive, name=f"ftcomm-subgroup-{name}", daemon=True)

    def begin(self, timeout: float) -> None:
        """Enter the view in force, once; blocks until its members have come. Without a view, in a replica that joins,
        `entered` and `follow` are to come. Raises `TransportError`."""
        router = self.job.router
        self._communicator.open(router, self)
        self._thread.start()
        view = router.newest  # looked at after `open`, so that of every later one we are told
        if view is None:
            return
        self.job_entered(view)
        # In a step those that do not come are removed as stalls, which takes longer than an op may.
        timeout = max(timeout, self.call_timeout()) if self._membership.made else timeout
        try:
            self._wait_for(view.epoch, timeout, "all that live have made this group")
        except CollectiveTimeout as error:
            raise TransportError(f"{error}. Do they run, and make it too (Group.subgroup, dist.new_group)?") from None

    def __str__(self) -> str:
        return f"group {self.name!r}, replica {self.replica}"

    # -- what the calls ask ------------------------------------------------------------------------------------------

    def may_call(self) -> None:
        """Raise if no op can be called. Blocks until the others have made this group, in a replica that comes back."""
        self.job.may_call()
        if self._membership.epoch == 0:
            self._wait_for(1, self.call_timeout(), "they have made this group again, which they may have closed")
        if self.error is None and self.exchange.issued >= self._membership.last:
            raise self._no_more()
        if self.error is not None:
            raise copy_of(self.error)

    def _no_more(self) -> FtcommError:
        return FtcommError(f"{self}: a member has closed the group after {self._membership.last} ops; {_MEND}")

    def when(self) -> tuple[int, int]:
        """Returns when a call is made now, see `Internals.when`."""
        return self.job.when() if self.called is None else self.called

    def check_called(self, op: Operation) -> None:
        """Raise for an op that was called after it was heard that a member has closed the group: whoever is left has
        done it alone, or waits."""
        if op.number >= self._membership.last:
            self.fail(self._no_more())
            raise self._no_more()

    def call_timeout(self) -> float:
        """The seconds that a call waits for other members."""
        return self._group.settings.timeouts.give_up

    @property
    def roster(self) -> tuple[int, ...]:
        """The members among the roster of all, in its order."""
        return self._among(self._group.roster)

    @property
    def contributors(self) -> tuple[int, ...]:
        """The contributors among the members, or all while there is none."""
        return self._among(self._group.contributors) or self.roster

    def _among(self, replicas: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(replica for replica in replicas if replica in self._membership.among)

    # -- with the group of all: these are called by it ---------------------------------------------------------------

    @property
    def of_all(self) -> bool:
        """Whether all who are there now are in it."""
        return self._membership.among.issuperset(self._group.roster)

    def follow(self, view: View, timeout: float) -> None:
        """Block until this group runs in `view` too, in which a boundary was passed, so that it has all who are
        in the roster from now on. Takes an exchange of messages if the view is new, else nothing. In a replica that
        has joined, and was in no view of this group yet, its first call waits instead: the others may have closed
        the group, and never make it again. Raises `CollectiveTimeout` after `timeout` seconds, which begin anew when
        the job changes its view."""
        if self.error is None and self._membership.epoch > 0:
            self._wait_for(view.epoch, timeout, f"they have come to the view of epoch {view.epoch}")

    def waiting(self, seconds: float) -> WaitsFor | None:
        """Tells for whom this group waits, as `DataPlane.stalls` does. Any thread."""
        stall = self.exchange.waiting(seconds)
        if stall is not None:
            return WaitsFor(stall.op, stall.waiting_on)
        with self._lock:
            missing = self._membership.missing()
        return WaitsFor(CHANGE, missing) if missing and self._needed() else None

    def job_changes(self) -> None:
        """The job begins to change its view."""
        self.exchange.job_changes()

    def coordinator_away(self, seconds: float) -> None:
        """The coordinator was not heard for so long, so who waits for a member waits on."""
        self.exchange.coordinator_away(seconds)

    def job_entered(self, view: View) -> None:
        """A view of the job is in force. Does not block."""
        with self._lock:
            actions = self._membership.job_entered(view)
            if actions:
                self.p2p.enter(view)
                self._events.put(lambda: actions)

    def fail(self, error: BaseException) -> None:
        """The end: every op and every later one fails with `error`. Does not block; the first counts."""
        with self._changed:
            if self.error is not None:
                return
            self.error = error
            actions = self._membership.close()
            self._changed.notify_all()
        self._events.put(list)  # it wakes the thread
        self._do(actions)
        self._communicator.fail(error)

    def close(self, until: float | None = None) -> None:
        """Leave the group, as `Subgroup.close` says. With `until`, a time of `time.monotonic`, it waits no longer than
        that for others to enter the view."""
        error = closed(self)
        with self._changed:
            timeout = PARTING if until is None else max(0.0, until - time.monotonic())
            self._changed.wait_for(lambda: self.error is not None or not self._membership.is_needed(), timeout)
        if self.error is None:
            self.p2p.close(error)
            self._leaves = True
            self.exchange.part(error)
            self._communicator.wait_all()
        self.fail(error)
        self._communicator.wait_all()
        with self._lock:
            segments, is_fresh = self._membership.segments(), self._membership.is_fresh
        left = Left(self.exchange.returned, self.exchange.taken, is_fresh)
        before = self.job.next_boundary() if is_fresh else 0
        self.job.router.retire(self.name, segments, FRAMES.frame(left), before)
        if not self._thread.is_alive() or join(self._thread, str(self)):
            self._communicator.forget()

    def _wait_for(self, epoch: int, timeout: float, until: str) -> None:
        own_process()
        watch, membership = self.exchange.member.watch, self._membership
        timer = RunningTimer(timeout, time.monotonic, lambda: watch.changes, lambda: watch.away)
        with self._changed:
            self._waiting += 1
            try:
                while membership.epoch < epoch and self.error is None and (part := timer.part()):
                    self._changed.wait(part)
            finally:
                self._waiting -= 1
            there, missing, error = membership.epoch >= epoch, membership.missing(), self.error
        if error is not None:
            raise copy_of(error)
        if not there:
            raise CollectiveTimeout(
                f"{self} has waited {timeout:g} s for replicas {', '.join(map(str, missing))}, until {until}"
            )

    # -- its thread: from view to view -------------------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            while self.error is None:
                self._do(self._next())
        except Exception as error:
            if self.error is None and not self._leaves:  # else it is that one
                drop("internal", f"{self}: {error!r}", error=error)
                self.fail(FtcommError(f"{self}: internal error: {error!r}; please report it"))
                self._on_failed(error)
        finally:
            self._communicator.connector.forget()

    def _next(self) -> list[DerivedAction]:
        """Block until something happens; returns what is to be done then."""
        due = self._membership.due()
        wait = _WAKE_AGAIN if self._stopping else None if due == float("inf") else max(0.0, due - time.monotonic())
        try:
            event = self._events.get(timeout=wait)
        except queue.Empty:
            event = functools.partial(self._membership.tick, time.monotonic())
            if self._stopping:
                self.exchange.wake()
        with self._changed:
            actions = event()
            self._changed.notify_all()
            return actions

    def _do(self, actions: list[DerivedAction]) -> None:
        for action in actions:
            match action:
                case Freeze(view):
                    self._freeze(view)
                case AskMember(_, member):
                    self._start(self._ask, f"ask-{member.replica}", action)
                case TellCaller(call, account):
                    _answer(call, account)
                case ReachMember(view, member, there, severed):
                    epoch, replica, connector = view.epoch, member.replica, self._communicator.connector
                    connector.expect(epoch, view.replicas, (replica,) if severed else ())
                    if connector.find(epoch, replica, there.nonce) is not None:
                        self._say(self._membership.reached, view.epoch, member.replica)
                    else:
                        self._start(self._reach_member, f"reach-{member.replica}", action)
                case EnterView(view, progress):
                    self._communicator.enter(self._communicator.plan(view), progress)
                    with self._changed:
                        asks = self._membership.entered(view.epoch)
                        self._changed.notify_all()
                    self._do(asks)
                case ReportStall(epoch, missing, lasted):
                    self._report(epoch, missing, lasted)
                case ReturnedElsewhere(ops):
                    self.exchange.returned_elsewhere(ops)
                case FailGroup(replica, ops):
                    self.fail(FtcommError(f"{self}: replica {replica} has closed the group after {ops} ops; {_MEND}"))

    def _say(self, happens: Callable[..., list[DerivedAction]], *what: Any) -> None:
        """Tell the thread that something has happened. Any thread."""
        self._events.put(lambda: happens(*what, time.monotonic()))

    def _start(self, work: Callable[[Any], None], name: str, action: AskMember | ReachMember) -> None:
        try:
            threading.Thread(target=work, args=(action,), name=f"ftcomm-{name}", daemon=True).start()
        except RuntimeError as error:  # none can be had now: it is tried again like a dial that has failed
            log.warning("%s: %s; it is tried again", self, shortage(error) or error)
            failed = self._membership.unanswered if isinstance(action, AskMember) else self._membership.unreachable
            self._say(failed, action.view.epoch, action.member.replica)

    def _freeze(self, view: View) -> None:
        self._communicator.connector.expect(view.epoch, view.replicas)
        self._stopping = True
        self.exchange.freeze(lambda: self._say(self._quiesced, view.epoch))

    def _quiesced(self, epoch: int, now: float) -> list[DerivedAction]:
        self._stopping = False
        return list(self._membership.quiesced(epoch, self.exchange.progress(), now))

    def _ask(self, ask: AskMember) -> None:
        epoch, replica = ask.view.epoch, ask.member.replica
        me = ask.view.member(self.replica)
        assert me is not None
        fields = self._communicator.fields(ENTERED if ask.entered else ASK, me.incarnation, epoch)
        fields.update(made=self._membership.made or 0, since=self.job.router.since(self.name))
        wanted = lambda: self._membership.is_current(epoch) and self.error is None  # noqa: E731
        if ask.there:
            fields["there"] = ask.there
        try:
            with self._dial(ask.member.ranks[self._group.shard], PURPOSE, fields, self.call_timeout()) as sock:
                said = FRAMES.read(receive_while(sock, wanted, _LOOK))
        except (OSError, msgspec.DecodeError):
            self._say(self._membership.unanswered, epoch, replica)
        else:
            if isinstance(said, SubgroupProgress):
                self._say(self._membership.told, epoch, replica, said)
            else:
                self._say(self._left, epoch, replica, said)

    def _left(self, epoch: int, replica: int, said: Left, now: float) -> list[DerivedAction]:
        exchange = self.exchange
        return self._membership.left(epoch, replica, said, exchange.returned, exchange.issued, now)

    def _reach_member(self, reach: ReachMember) -> None:
        epoch, replica = reach.view.epoch, reach.member.replica
        process = reach.member.ranks[self._group.shard]  # `address` is its segment of this group
        try:
            peer = self._communicator.reach(
                epoch, replica, reach.address, lambda fields: self._dial(process, PURPOSE, fields, self.call_timeout())
            )
        except (OSError, TransportError, RuntimeError) as error:  # RuntimeError: no thread could be started
            log.info("%s: replica %d cannot be reached: %s", self, replica, error)
            self._say(self._membership.unreachable, epoch, replica)
        else:
            if peer is not None:
                self._say(self._membership.reached, epoch, replica)

    def _report(self, epoch: int, missing: tuple[int, ...], lasted: float) -> None:
        if self._needed():
            if epoch != self._warned:
                self._warned, who = epoch, ", ".join(map(str, missing))
                log.warning("%s: replicas %s have not made it; a script makes its groups anew", self, who)
            self._on_stall(Stall(epoch, CHANGE, missing, lasted))

    def _needed(self) -> bool:
        """Whether somebody waits for this group: a script may have closed it elsewhere, and be about to do so here."""
        with contextlib.suppress(CollectiveTimeout):
            self.exchange.wait_all(0)
            return self._waiting > 0
        return True

    # -- connections -------------------------------------------------------------------------------------------------

    def take(self, call: GroupConnection) -> bool:
        """See `ftcomm.transport.router.Receiver`, also for the other methods that it has."""
        if call.member not in self._membership.among:
            call.sock.close()
        elif call.what in (ASK, ENTERED):
            return self._meets(call)
        elif call.what == P2P:
            self.p2p.incoming(call)
        else:
            self._communicator.accept(call)
        return True

    def _meets(self, call: GroupConnection) -> bool:
        with self._lock:
            if not self._membership.accepts(call):
                return False
            actions = self._membership.asked(call)
            self._changed.notify_all()
        self._do(actions)
        return True

    def _dial_p2p(self, replica: int, incarnation: str, epoch: int) -> Connection:
        fields = self._communicator.fields(P2P, incarnation, epoch)
        return self.job.dial_rank(replica, self._group.shard, PURPOSE, fields, self.call_timeout())

    def _connection_ended(self, member: int, epoch: int, why: str) -> None:
        """No news before an op stands still for it: members close a group without a view."""
        self._ended[member] = max(self._ended.get(member, (0, "")), (epoch, why))

    def _stalled(self, stall: Stall) -> None:
        """Ask the members that an op waits for: they may have closed the group, of which only the next view would
        tell."""
        if stall.op >= self._membership.last:
            self.fail(self._no_more())
            return
        self._events.put(lambda: self._membership.ask(stall.waiting_on))
        for member in stall.waiting_on:
            epoch, why = self._ended.get(member, (0, ""))
            if epoch == stall.epoch:
                self._on_lost(member, epoch, f"{self}: {why}")
        self._on_stall(stall)


def _answer(call: GroupConnection, account: SubgroupProgress | None) -> None:
    with contextlib.suppress(OSError), call.sock as sock:
        if account is not None:
            sock.settimeout(_SEND)
            sock.sendall(FRAMES.frame(account))
