"""Drives a static group from when its members meet until it ends, without the calls of users."""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.watchdog import Deadlines, Stall, StallLog
from ftcomm.control import fork, handshake
from ftcomm.control.data_plane import WaitsFor
from ftcomm.control.limits import MEMBERS
from ftcomm.control.messages import Progress
from ftcomm.control.running_time import RunningTime, RunningTimer
from ftcomm.control.views import View
from ftcomm.engines.base import Events
from ftcomm.engines.host import HostEngine
from ftcomm.errors import ArgumentError, FtcommError, TransportError, copy_of
from ftcomm.groups.communicator import Communicator, Terms, closed
from ftcomm.groups.static_pairs import Arrivals, Pairs, PeerInfo, discard, meet
from ftcomm.membership.static import (
    DOUBT,
    EPOCH,
    End,
    FailOps,
    LastMessage,
    LoseMember,
    MemberHello,
    Said,
    StaticAction,
    StaticMembership,
    TellMember,
)
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.process.descriptors import STATIC_PEER, room_for
from ftcomm.process.own import checked_page, own_process
from ftcomm.recorder.layout import GroupKind
from ftcomm.sync.robust_mutex import hold, release
from ftcomm.transport.group_connection import LINK, P2P, GroupConnection
from ftcomm.transport.router import PURPOSE, ConnectionRouter
from ftcomm.transport.segment import MUTEXES, Segment, mutex

if TYPE_CHECKING:
    from ftcomm.control.sealed import Channel
    from ftcomm.groups.group_internals import JobMember

log = logging.getLogger("ftcomm")

_CLOSING_HEARD = 5.0  # s in which a member that cannot be reached may say that it has closed the group


class StaticGroupInternals:
    """The internals of one static group, as `StaticGroup.internals`, for the router and `StaticGroup` itself.

    name, me, roster, op_timeout: as `StaticGroup` says them; `me` is the rank of this member.
    exchange, p2p: run its ops and its messages.
    """

    def __init__(
        self,
        name: str,
        me: int,
        infos: Sequence[PeerInfo],
        router: ConnectionRouter,
        terms: Terms,
        *,
        transport: str,
        deadlines: Deadlines,
        op_timeout: float,
        timeout: float,
        job: JobMember | None = None,
        replicas: Sequence[int] = (),
    ) -> None:
        """`infos` are all members in rank order. In a job, rank `i` is part of `replicas[i]`."""
        own_process()
        if not 0 < len(name) <= 200:
            raise ArgumentError(f"a group named {name!r}; expected a name of 1 to 200 characters")
        if not 0 < len(infos) <= MEMBERS:
            raise ArgumentError(f"group {name!r} of {len(infos)} members; expected 1 to {MEMBERS}")
        for what, seconds in (("op_timeout", op_timeout), ("timeout", timeout)):
            if not 0 < seconds < float("inf"):
                raise ArgumentError(f"group {name!r}: {what}={seconds}; expected a positive number of seconds")
        room_for(STATIC_PEER * (len(infos) - 1), f"group {name!r} of {len(infos)} members")
        self.roster = tuple(range(len(infos)))
        self.op_timeout = op_timeout
        self._infos = tuple(infos)
        self.name, self.me = name, me
        self._lock = threading.Lock()  # never held across a wait
        self._happened = threading.Condition(self._lock)
        verify = job is not None and job.settings.verify
        self.p2p = ProgressEngine(str(self), self._dial_p2p, lambda rank: self._infos[rank].name)
        self._communicator = communicator = Communicator(
            name,
            me,
            HostEngine(me, Segment(members=len(infos), chunks=0), transport, deadlines, verify=verify),
            Events(self._stalled, self._broken, self._connection_ended, self._diverged),
            self.p2p,
            terms,
            GroupKind.STATIC,
            on_died=lambda rank, epoch: self._pairs.died(rank, "its process died"),
        )
        self._segment, self.exchange = communicator.segment, communicator.exchange
        members = hashlib.blake2b("\n".join(info.name for info in infos).encode(), digest_size=16).hexdigest()
        # The lock guards the next three.
        self._membership = StaticMembership(
            name, me, [info.name for info in infos], MemberHello(members, communicator.here), replicas
        )
        self._events: Arrivals | None = queue.SimpleQueue()  # while we meet
        self._closed = False
        self._ran = RunningTime(DOUBT / 10)  # the seconds in which the thread of the pairs has run
        self._stalls = StallLog()
        mutexes = [self._segment.address + 8 * mutex(reader) for reader in range(min(MUTEXES, len(infos)))]
        self._pairs = Pairs(
            name,
            on_said=self._heard,
            on_end=self._lost,
            settle=self._settle,
            on_start=lambda: hold(*mutexes),
            on_stop=lambda: release(*mutexes),
            on_broken=lambda error: self._broken(FtcommError(f"{self}: internal error: {error!r}; please report it")),
        )
        fork.take_part(self, str(self))
        try:
            communicator.open(router, self)
            if job is not None:
                self.job_entered(job.view)
            self._begin(timeout)
        except BaseException as error:
            self._broken(copy_of(error))
            if self._pairs.join():
                communicator.forget()
            raise
        atexit.register(self._at_exit)

    def __str__(self) -> str:
        return f"group {self.name!r}, rank {self.me}"

    def may_call(self) -> None:
        """Raise if no op can be called any more."""
        if not checked_page[0]:
            own_process()
        if self._closed:
            raise closed(self)

    def abort(self, reason: str) -> None:
        """Fail every op, as `StaticGroup.abort` says."""
        self._happens(lambda: self._membership.aborts(reason))

    def close(self) -> None:
        """Leave the group, as `StaticGroup.close` says."""
        if fork.is_child():
            return
        with self._lock:
            again, self._closed = self._closed, True
            self._membership.parts()
        if not again:
            error = closed(self)
            self.p2p.close(error)  # what was sent arrives
            self.exchange.part(error)
            self._communicator.wait_all()
            self.exchange.fail(error)
            self._communicator.wait_all()  # then nothing returns any more
            self._happens(lambda: self._membership.leaves(error, self.exchange.returned, self.exchange.taken))
        if self._pairs.join():
            self._communicator.forget()

    # -- how it begins -------------------------------------------------------------------------------------------

    def _begin(self, timeout: float) -> None:
        timer = RunningTimer(timeout, time.monotonic)
        communicator, events = self._communicator, self._events
        assert events is not None
        try:
            met = meet(self._membership, self.name, self._infos, events, timer)
        finally:
            with self._lock:
                self._events = None
            discard(events)
        self._nonces = {member: there.hello.address.nonce for member, there in met.items()}
        self._pairs.add({member: there.sock for member, there in met.items()})
        communicator.connector.expect(EPOCH, self.roster)
        complete = True
        for member, there in met.items():
            try:
                communicator.reach(
                    EPOCH, member, there.hello.address, functools.partial(self._dial, member, timer.left())
                )
            except (OSError, TransportError) as error:
                if not self._has_closed(member):
                    raise TransportError(f"{self}: cannot reach {self._infos[member].name}: {error}") from error
                complete = False
        if complete:
            view = self._membership.view()
            communicator.enter(communicator.plan(view), dict.fromkeys(self.roster, Progress(0, ())))
        if self._membership.is_over:  # a member was lost meanwhile; if one has closed the group, messages go on
            assert self.error is not None
            raise copy_of(self.error)

    def _has_closed(self, member: int) -> bool:
        """Whether a member that cannot be reached has closed the group before any op, so that no op needs it. What it
        has said may take a moment to be heard."""
        membership = self._membership
        with self._happened:
            self._happened.wait_for(
                lambda: membership.is_over or membership.left_after(member) is not None, _CLOSING_HEARD
            )
            return not membership.is_over and membership.left_after(member) == 0

    def _dial(self, member: int, seconds: float, fields: handshake.Fields) -> Channel:
        return self._infos[member].dial(PURPOSE, fields, max(0.001, seconds))

    def _dial_p2p(self, member: int) -> Channel:
        fields = self._communicator.fields(P2P, self._nonces[member], EPOCH)
        return self._dial(member, self.op_timeout, fields)

    def take(self, call: GroupConnection) -> bool:
        """See `ftcomm.transport.router.Receiver`, also for the other methods that it has."""
        if call.what == LINK:
            return self._meets(call)
        if call.member not in self.roster:
            call.sock.close()
        elif call.what == P2P and call.instance == self._segment.nonce:
            self.p2p.accept(call.sock, call.member)
        else:
            self._communicator.accept(call)
        return True

    def _meets(self, call: GroupConnection) -> bool:
        with self._lock:
            if self._events is None:
                return False  # it is of the next group of this name
            self._events.put(call)
        return True

    def job_changes(self) -> None:
        """The job begins to change its view: a member may be waiting for that, and an op here for the member."""
        self.exchange.job_changes()

    def coordinator_away(self, seconds: float) -> None:
        """The members of this group find out by themselves who is lost. But one of them may be waiting for a member of
        the job, and an op here for that one."""
        self.exchange.coordinator_away(seconds)

    def job_entered(self, view: View) -> None:
        self._happens(lambda: self._membership.job_entered(view))

    # -- how it ends ---------------------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """Tells why no op can succeed any more; None while all is well."""
        return self._membership.error

    def _heard(self, rank: int, said: Said) -> None:
        self._happens(lambda: self._membership.said(rank, said))

    def _lost(self, rank: int, why: str) -> None:
        self._happens(lambda: self._membership.lost(rank, why))

    def _broken(self, error: BaseException) -> None:
        self._happens(lambda: self._membership.failed(error))

    def _connection_ended(self, rank: int, epoch: int, why: str) -> None:
        with self._lock:
            self._membership.severed(rank, why)
        self._pairs.wake()

    def _settle(self, heard: float) -> bool:
        """Whether something is still to be waited for. In the thread of the pairs. A doubt ends by what was heard until
        then: this thread itself may not have run for longer than that, and then not all of it counts."""
        ran = self._ran.at(heard)
        with self._lock:
            if not self._membership.waits:
                return False
        self._happens(lambda: self._membership.look(self.exchange.returned, ran))
        with self._lock:
            return self._membership.waits

    def _diverged(self, divergence: Divergence) -> None:
        log.warning("%s: %s", self, divergence)

    def waiting(self, seconds: float) -> WaitsFor | None:
        """Tells for which replicas an op waits, in a job. This replica may be among them: then another rank of it has
        to move, and says for whom it waits."""
        stall = self.exchange.waiting(seconds)
        replicas = () if stall is None else self._membership.replicas_of(stall.waiting_on)
        return WaitsFor(stall.op, replicas) if stall is not None and replicas else None

    def _stalled(self, stall: Stall) -> None:
        """Report a stall. In a job that is said from a deadline on that follows how long ops take; otherwise it is the
        end, after `op_timeout`."""
        if self.exchange.member.watch.unmoved >= self.op_timeout:
            self._happens(lambda: self._membership.gives_up(stall.op, stall.waiting_on, self.op_timeout))
        elif self._stalls.is_new(stall):
            who = self._membership.names(stall.waiting_on)
            log.warning("%s: op %d makes no progress; waiting for %s", self, stall.op, who)

    def _happens(self, what: Callable[[], list[StaticAction]]) -> None:
        """Tell the membership what has happened, and do what follows. Any thread; does not block."""
        with self._happened:
            actions = what()
            self._happened.notify_all()
        for action in actions:
            match action:
                case LoseMember(rank, why):
                    self.p2p.lose(rank, why)
                case FailOps(error):
                    self.exchange.fail(error)
                case TellMember(rank, said):
                    self._pairs.tell(rank, said)
                case End(error, last):
                    self._end(error, last)

    def _end(self, error: BaseException, last: LastMessage) -> None:
        if fork.is_child():
            return
        with self._lock:
            if self._events is not None and isinstance(error, Exception):
                self._events.put(error)
        atexit.unregister(self._at_exit)
        self._communicator.fail(error)
        self._pairs.end(last)
        self._segment.close()
        fork.part(self)

    def _at_exit(self) -> None:
        """A script that ends by an error is lost to the others."""
        if getattr(sys, "last_value", None) is None:
            self.close()
