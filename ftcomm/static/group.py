"""Groups whose membership never changes: the ranks of one replica, any subset of a job, or processes without a job.

    what ends it               how the others learn it                         what their ops fail with
    a process dies             the kernel's mark on its life (shared memory),  LostError that names the rank
                               or the end of its connection
    an op takes too long       the member that gives up says so                CollectiveTimeout; elsewhere LostError
    abort()                    the member says so                              LostError
    close(), and others go on  the member says after how many ops              LostError, in a later op;
                                                                               messages between others go on

Whatever comes first is the one error of the group: it ends every op in flight and every later one, here and, said by
those who have noticed, everywhere. A new group with the same members, or with those that are left, needs a new name.

A collective is what it is in a job (`ftcomm.collective`), with a view that is never replaced.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ftcomm.calls import Calls
from ftcomm.collective.checksum import Divergence
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.watchdog import Stall
from ftcomm.communicator import Communicator, Terms, closed
from ftcomm.control import fork, handshake
from ftcomm.control.limits import MEMBERS
from ftcomm.control.messages import Progress
from ftcomm.control.running_time import Patience, RunningTime
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import View
from ftcomm.engines.base import Events
from ftcomm.engines.host import HostEngine
from ftcomm.errors import ArgumentError, FtcommError, TransportError, fresh
from ftcomm.membership.static import (
    DOUBT,
    EPOCH,
    Action,
    End,
    FailOps,
    LastMessage,
    LoseMember,
    MemberHello,
    Said,
    StaticMembership,
    TellMember,
)
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.process.descriptors import room_for
from ftcomm.process.own import looked, own_process
from ftcomm.recorder.layout import GroupKind
from ftcomm.settings import check_data
from ftcomm.static.endpoint import Endpoint, parse, shown
from ftcomm.static.pairs import Arrivals, Pairs, PeerInfo, discard, meet
from ftcomm.sync.robust_mutex import hold, release
from ftcomm.transport.router import LINK, P2P, PURPOSE, ConnectionRouter, Incoming
from ftcomm.transport.segment import LIVES, Segment, life

if TYPE_CHECKING:
    from ftcomm.control.sealed import Channel
    from ftcomm.group import Group

log = logging.getLogger("ftcomm")

_PARTING = 5.0  # s in which a member that cannot be reached may say that it has closed the group


class StaticGroup(Calls):
    """The members, ranks 0 to n - 1, reduce and move data together until one of them ends.

    Made by `in_job` or `from_handles`, at the same time on all members. Ranks are numbers of this group, and every rank
    contributes.
    """

    _exchange: Exchange

    def __init__(
        self,
        name: str,
        me: int,
        infos: Sequence[PeerInfo],
        router: ConnectionRouter,
        terms: Terms,
        *,
        transport: str,
        deadlines: tuple[float, float, float],
        op_timeout: float,
        timeout: float,
        job: Group | None = None,
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
        room_for(len(infos) - 1, f"group {name!r} of {len(infos)} members")
        super().__init__(len(infos))
        self.roster = tuple(range(len(infos)))
        self.op_timeout = op_timeout
        self._infos = tuple(infos)
        self.name = name
        self._me = me
        self._lock = threading.Lock()  # never held across a wait
        self._happened = threading.Condition(self._lock)
        verify = job is not None and job.settings.verify
        self._p2p = ProgressEngine(str(self), self._dial_p2p, lambda rank: self._infos[rank].name)
        self._communicator = communicator = Communicator(
            name,
            me,
            HostEngine(me, Segment(members=len(infos)), transport, deadlines, verify=verify),
            Events(self._stalled, self._broken, self._connection_ended, self._diverged),
            self._p2p,
            terms,
            GroupKind.STATIC,
            on_died=lambda rank, epoch: self._lost(rank, "its process died"),
        )
        exchange = communicator.exchange
        assert isinstance(exchange, Exchange), "the ops of static groups are driven by the host"
        self._segment, self._exchange = communicator.segment, exchange
        members = hashlib.blake2b("\n".join(info.name for info in infos).encode(), digest_size=16).hexdigest()
        # The lock guards the next three.
        self._membership = StaticMembership(
            name, me, [info.name for info in infos], MemberHello(members, communicator.here), replicas
        )
        self._events: Arrivals | None = queue.SimpleQueue()  # while we meet
        self._closed = False
        self._ran = RunningTime(DOUBT / 10)  # of the thread of the pairs
        self._stall: tuple[int, int, tuple[int, ...]] | None = None  # the last that was logged
        lives = [self._segment.address + 8 * life(reader) for reader in range(min(LIVES, len(infos)))]
        self._pairs = Pairs(
            name,
            on_said=self._heard,
            on_end=self._lost,
            settle=self._settle,
            on_start=lambda: hold(*lives),
            on_stop=lambda: release(*lives),
            on_broken=lambda error: self._broken(FtcommError(f"{self}: internal error: {error!r}; please report it")),
        )
        fork.take_part(self, str(self))
        try:
            communicator.open(router, self)
            if job is not None:
                self.entered(job.view)
            self._begin(timeout)
        except BaseException as error:
            self._broken(fresh(error))
            self._pairs.join()
            communicator.forget()
            raise
        atexit.register(self._at_exit)

    @classmethod
    def in_job(
        cls,
        group: Group,
        name: str,
        members: Sequence[tuple[int, int]],
        *,
        op_timeout: float | None = None,
        timeout: float | None = None,
        data: str | None = None,
    ) -> StaticGroup:
        """A group of ranks of the job that `group` is part of; blocks until all of them have called this.

        name: the same on all members, and of no other group that they have.
        members: (replica, rank in it) in rank order, this rank among them.
        op_timeout: seconds without progress after which an op fails; None: as long as an op of the job may take.
        timeout: seconds until all have come; None: FTCOMM_INIT_TIMEOUT.
        data: how data are protected between hosts, the same on all members; None: FTCOMM_DATA.

        Raises `ArgumentError`, `TransportError` that names who did not come, and `LostError` if one was lost meanwhile.
        """
        settings = group.settings
        pairs = [(int(replica), int(rank)) for replica, rank in members]
        me = _position(name, pairs, (settings.replica, settings.shard))
        infos = [
            PeerInfo(
                f"rank {i} (replica {replica}, rank {rank} of it)",
                functools.partial(group.internals.dial_rank, replica, rank),
            )
            for i, (replica, rank) in enumerate(pairs)
        ]
        op_timeout = settings.timeouts.give_up if op_timeout is None else op_timeout
        terms = Terms(
            (settings.host, group.internals.port),
            settings.data if data is None else data,
            settings.algorithm,
            settings.tuning,
        )
        timeout = settings.init_timeout if timeout is None else timeout
        replicas = [replica for replica, _ in pairs]
        return cls(
            name,
            me,
            infos,
            group.internals.router,
            terms,
            transport=settings.transport,
            deadlines=_deadlines(op_timeout, settings.timeouts),
            op_timeout=op_timeout,
            timeout=timeout,
            job=group,
            replicas=replicas,
        )

    @classmethod
    def from_handles(
        cls,
        endpoint: Endpoint,
        name: str,
        handles: Sequence[str],
        *,
        op_timeout: float = 120.0,
        timeout: float = 60.0,
        transport: str = "auto",
    ) -> StaticGroup:
        """A group without a job, of those whose `Endpoint.handle` is in `handles`, in rank order; this one among them.

        name: the same on all members, and never used before with these endpoints.
        transport: "auto", "shm" or "tcp", as FTCOMM_TRANSPORT. The rest is as with `in_job`.
        """
        places = [parse(handle) for handle in handles]
        me = _position(name, list(handles), endpoint.handle, shown)
        infos = [
            PeerInfo(f"rank {i} ({p.host}:{p.port})", functools.partial(p.dial, tls=endpoint.tls))
            for i, p in enumerate(places)
        ]
        data = os.environ.get("FTCOMM_DATA", "none")
        check_data(data)
        return cls(
            name,
            me,
            infos,
            endpoint.router,
            Terms((endpoint.host, endpoint.port), data),
            transport=transport,
            deadlines=_deadlines(op_timeout),
            op_timeout=op_timeout,
            timeout=timeout,
        )

    def __str__(self) -> str:
        return f"group {self.name!r}, rank {self._me}"

    def _may_call(self) -> None:
        if not looked[0]:
            own_process()
        if self._closed:
            raise closed(self)

    def _patience(self) -> float:
        return self.op_timeout

    def abort(self, reason: str = "") -> None:
        """End every op in flight and every later one, here and on the other members, with `LostError`.

        From any thread; does not block, idempotent. The endpoint and its handle stay, for a new group.
        """
        self._happens(lambda: self._membership.aborts(reason))

    def close(self) -> None:
        """Leave the group; idempotent. Ops in flight fail, but for those that others may have returned. Those return
        here, and on all others.

        Blocks until what was sent is received, and such ops have returned, for 2 seconds each at most.
        """
        if fork.is_child():
            return
        with self._lock:
            again, self._closed = self._closed, True
            self._membership.parts()
        if not again:
            error = closed(self)
            self._p2p.close(error)  # what was sent arrives
            self._exchange.part(error)
            self._communicator.drain()
            self._exchange.fail(error)
            self._communicator.drain()  # then nothing returns any more
            self._happens(lambda: self._membership.leaves(error, self._exchange.returned, self._exchange.taken))
        self._pairs.join()
        self._communicator.forget()

    # -- how it begins -------------------------------------------------------------------------------------------

    def _begin(self, timeout: float) -> None:
        patience = Patience(timeout, time.monotonic)
        communicator, events = self._communicator, self._events
        assert events is not None
        try:
            met = meet(self._membership, self.name, self._infos, events, patience)
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
                    EPOCH, member, there.hello.address, functools.partial(self._dial, member, patience.left())
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
            raise fresh(self.error)

    def _has_closed(self, member: int) -> bool:
        """Whether a member that cannot be reached has closed the group before any op, so that no op needs it. What it
        has said may take a moment to be heard."""
        membership = self._membership
        with self._happened:
            self._happened.wait_for(lambda: membership.is_over or membership.left_after(member) is not None, _PARTING)
            return not membership.is_over and membership.left_after(member) == 0

    def _dial(self, member: int, seconds: float, fields: handshake.Fields) -> Channel:
        return self._infos[member].dial(PURPOSE, fields, max(0.001, seconds))

    def _dial_p2p(self, member: int) -> Channel:
        fields = self._communicator.fields(P2P, self._nonces[member], EPOCH)
        return self._dial(member, self.op_timeout, fields)

    def take(self, call: Incoming) -> bool:
        """See `ftcomm.transport.router.Receiver`, also for the other methods that it has."""
        if call.what == LINK:
            return self._meets(call)
        if call.member not in self.roster:
            call.sock.close()
        elif call.what == P2P and call.life == self._segment.nonce:
            self._p2p.accept(call.sock, call.member)
        else:
            self._communicator.accept(call)
        return True

    def _meets(self, call: Incoming) -> bool:
        with self._lock:
            if self._events is None:
                return False  # of the next group of this name
            self._events.put(call)
        return True

    def job_changes(self) -> None:
        """The job begins to change its view: a member may be waiting for that, and an op here for the member."""
        self._exchange.job_changes()

    def coordinator_away(self, seconds: float) -> None:
        """The members of this group find out by themselves who is lost. But one of them may be waiting for a member of
        the job, and an op here for that one."""
        self._exchange.excuse(seconds)

    def entered(self, view: View) -> None:
        self._happens(lambda: self._membership.entered(view))

    # -- how it ends ---------------------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """Why no op can succeed any more; None while all is well."""
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
        self._happens(lambda: self._membership.look(self._exchange.returned, ran))
        with self._lock:
            return self._membership.waits

    def _diverged(self, divergence: Divergence) -> None:
        log.warning("%s: %s", self, divergence)

    def waiting(self, seconds: float) -> tuple[int, tuple[int, ...]] | None:
        """Tells for which replicas an op waits, in a job. It may be this one: then another rank of it has to move, and
        says for whom it waits."""
        stall = self._exchange.waiting(seconds)
        replicas = () if stall is None else self._membership.replicas_of(stall.waiting_on)
        return (stall.op, replicas) if stall is not None and replicas else None

    def _stalled(self, stall: Stall) -> None:
        """Report a stall. In a job that is said from a deadline on that follows how long ops take; otherwise it is the
        end, after `op_timeout`."""
        if self._exchange.member.watch.unmoved >= self.op_timeout:
            self._happens(lambda: self._membership.gives_up(stall.op, stall.waiting_on, self.op_timeout))
        elif stall[:3] != self._stall:
            self._stall = stall[:3]
            who = self._membership.names(stall.waiting_on)
            log.warning("%s: op %d makes no progress; waiting for %s", self, stall.op, who)

    def _happens(self, what: Callable[[], list[Action]]) -> None:
        """Tell the membership what has happened, and do what follows. Any thread; does not block."""
        with self._happened:
            actions = what()
            self._happened.notify_all()
        for action in actions:
            match action:
                case LoseMember(rank, why):
                    self._p2p.lose(rank, why)
                case FailOps(error):
                    self._exchange.fail(error)
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


def _deadlines(op_timeout: float, of_job: Timeouts | None = None) -> tuple[float, float, float]:
    """Returns the earliest and the latest time at which an op is said to stand still, the latter `op_timeout` without a
    job; and the time at which the exchange ends by itself, long after the group has ended it."""
    floor, ceiling = (op_timeout, op_timeout) if of_job is None else (of_job.op_floor, of_job.op)
    return min(floor, op_timeout), min(ceiling, op_timeout), 2 * op_timeout


def _position(name: str, members: Sequence[Any], me: Any, show: Callable[[Any], str] = str) -> int:
    """`show` says what of a member may stand in a message."""
    said = ", ".join(map(show, members)) or "nobody"
    if len(set(members)) != len(members):
        raise ArgumentError(f"group {name!r}: a member is there twice in {said}; name each once")
    if me not in members:
        raise ArgumentError(f"group {name!r}: this rank, {show(me)}, is not among its members: {said}")
    return members.index(me)
