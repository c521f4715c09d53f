"""Groups whose membership never changes: the ranks of one replica, any subset of a job, or processes without a job.

    what ends it               how the others learn it                         what their ops fail with
    a process dies             the kernel's mark on its life (shared memory),  LostError that names the rank
                               or the end of its connection
    an op takes too long       the member that gives up says so                CollectiveTimeout; elsewhere LostError
    abort()                    the member says so                              LostError
    close(), and others go on  the member says after how many ops              LostError, in a later op

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
from ftcomm.collective.watchdog import Stall
from ftcomm.communicator import Communicator, Terms, closed
from ftcomm.control import fork, handshake
from ftcomm.control.dropped import printable
from ftcomm.control.messages import Progress
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Member, View
from ftcomm.engines.base import Events
from ftcomm.engines.host import HostEngine
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, LostError, TransportError, fresh
from ftcomm.membership.derived import Left
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.process.descriptors import room_for
from ftcomm.process.own import looked, own_process
from ftcomm.settings import check_data
from ftcomm.static.endpoint import Endpoint, parse, shown
from ftcomm.static.pairs import Arrivals, MemberFailed, MemberHello, Pairs, PeerInfo, Said, discard, meet
from ftcomm.sync.robust_mutex import hold, release
from ftcomm.transport.router import LINK, P2P, PURPOSE, ConnectionRouter, Incoming
from ftcomm.transport.segment import LIVES, Segment, life

if TYPE_CHECKING:
    from ftcomm.control.sealed import Channel
    from ftcomm.group import Group

log = logging.getLogger("ftcomm")

EPOCH = 1  # the only one
MOST = 256  # members
_DOUBT = 0.5  # s that a member may take to say why its connection for data has ended


class StaticGroup(Calls):
    """The members, ranks 0 to n - 1, reduce and move data together until one of them ends.

    Made by `in_job` or `from_handles`, at the same time on all members. Ranks are numbers of this group, and every rank
    contributes.
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
        if not 0 < len(infos) <= MOST:
            raise ArgumentError(f"group {name!r} of {len(infos)} members; expected 1 to {MOST}")
        for what, seconds in (("op_timeout", op_timeout), ("timeout", timeout)):
            if not 0 < seconds < float("inf"):
                raise ArgumentError(f"group {name!r}: {what}={seconds}; expected a positive number of seconds")
        room_for(len(infos) - 1, f"group {name!r} of {len(infos)} members")
        self.roster = tuple(range(len(infos)))
        self.op_timeout = op_timeout
        self._infos = tuple(infos)
        self._replicas = tuple(replicas)
        self._lives: dict[int, str] = {}  # of the ranks, as the first view that had them has said
        self.name, self._me = name, me
        self.error: BaseException | None = None  # why no op can succeed any more; None while all is well
        self._lock = threading.Lock()  # never held across a wait
        verify = job is not None and job.settings.verify
        self._p2p = ProgressEngine(str(self), self._dial_p2p, lambda rank: self._infos[rank].name)
        self._communicator = communicator = Communicator(
            name,
            me,
            HostEngine(me, Segment(), transport, deadlines, verify=verify),
            Events(self._stalled, self._broken, self._connection_ended, self._diverged),
            self._p2p,
            terms,
            on_died=lambda rank, epoch: self._lose(rank, "its process died"),
        )
        self._segment, self._exchange = communicator.segment, communicator.exchange
        # The lock guards the next five, and the error.
        self._over = False  # nothing is left to be ended
        self._left: dict[int, int] = {}  # ranks that have closed the group -> after how many ops
        self._doubts: dict[int, tuple[float, str]] = {}  # connections that ended: when, and what is known of it
        self._events: Arrivals | None = queue.SimpleQueue()  # while we meet
        self._closed = False
        self._stall: tuple[int, int, tuple[int, ...]] | None = None  # the last that was logged
        lives = [self._segment.address + 8 * life(reader) for reader in range(min(LIVES, len(infos)))]
        self._pairs = Pairs(
            name,
            on_said=self._heard,
            on_end=self._lose,
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
        why = f"it was aborted{': ' if reason else ''}{reason}"
        self._end(LostError(f"{self}: {why}; make a new group to go on"), MemberFailed(-1, printable(why, 1000)))

    def close(self) -> None:
        """Leave the group; idempotent. Ops in flight fail, ops that have returned here return everywhere.

        Blocks until what was sent is received, 2 seconds at most.
        """
        if fork.is_child():
            return
        with self._lock:
            again, self._closed = self._closed, True
        if not again:
            error = closed(self)
            self._p2p.close(error)  # what was sent arrives
            self._exchange.fail(error)
            self._communicator.drain()  # then nothing returns any more
            self._end(error, Left(self._exchange.returned))
        self._pairs.join()
        self._communicator.forget()

    # -- how it begins -------------------------------------------------------------------------------------------

    def _begin(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        members = hashlib.blake2b("\n".join(info.name for info in self._infos).encode(), digest_size=16).hexdigest()
        communicator, events = self._communicator, self._events
        assert events is not None
        try:
            met = meet(self.name, self._me, self._infos, MemberHello(members, communicator.here), events, deadline)
        finally:
            with self._lock:
                self._events = None
            discard(events)
        self._nonces = {member: there.address.nonce for member, there in met.items()}
        self._pairs.add({member: there.sock for member, there in met.items()})
        communicator.connector.expect(EPOCH, self.roster)
        for member, there in met.items():
            try:
                communicator.reach(EPOCH, member, there.address, functools.partial(self._dial, member, deadline))
            except (OSError, TransportError) as error:
                raise TransportError(f"{self}: cannot reach {self._infos[member].name}: {error}") from error
        addresses = {self._me: communicator.here, **{member: there.address for member, there in met.items()}}
        seated = tuple(Member(rank, "", (addresses[rank],), True) for rank in self.roster)
        view = View(EPOCH, None, seated)
        communicator.enter(communicator.plan(view), dict.fromkeys(self.roster, Progress(0, ())))
        if self.error is not None:  # a member was lost meanwhile
            raise fresh(self.error)

    def _dial(self, member: int, deadline: float, fields: handshake.Fields) -> Channel:
        return self._infos[member].dial(PURPOSE, fields, max(0.001, deadline - time.monotonic()))

    def _dial_p2p(self, member: int) -> Channel:
        fields = self._communicator.fields(P2P, self._nonces[member], EPOCH)
        return self._dial(member, time.monotonic() + self.op_timeout, fields)

    def take(self, call: Incoming) -> bool:
        """See `ftcomm.transport.router.Receiver`, also for `entered` and `waiting`."""
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

    def entered(self, view: View) -> None:
        """Treat whoever is not in `view` as lost. In a job, when a view is in force."""
        for rank, replica in enumerate(self._replicas):
            member = view.member(replica)
            life = None if member is None else member.incarnation
            known = self._lives.get(rank)
            if life is not None and known is None:
                self._lives[rank] = life
            elif life != known and rank != self._me:
                self._lose(rank, f"its replica is not in the view of epoch {view.epoch}")

    # -- how it ends ---------------------------------------------------------------------------------------------

    def _heard(self, rank: int, said: Said) -> None:
        """Another member ends. In the thread of the pairs."""
        if isinstance(said, Left):
            with self._lock:
                self._left[rank] = said.returned
            self._p2p.lose(rank, "it has closed the group")
        elif isinstance(said, MemberFailed):
            if said.lost in self.roster and said.lost != self._me:
                self._lose(said.lost, f"{said.why} (as {self._infos[rank].name} has noticed)")
            else:
                self._broken(LostError(f"{self}: {self._infos[rank].name} has given up: {said.why}; {_MEND}"))

    def _connection_ended(self, rank: int, epoch: int, why: str) -> None:
        """The connection for data to or from a member has ended. What that means, the member says itself, or its end
        does, a moment later; if nothing comes, it is lost."""
        with self._lock:
            self._doubts.setdefault(rank, (time.monotonic(), why))
        self._pairs.wake()

    def _settle(self, looked: float) -> bool:
        """Whether something is still to be waited for. In the thread of the pairs. A doubt ends by what was heard until
        `looked`: this thread itself may not have run for longer than that."""
        with self._lock:
            doubts = {rank: doubt for rank, doubt in self._doubts.items() if rank not in self._left}
            left = dict(self._left) if self.error is None else {}
        for rank, (since, why) in doubts.items():
            if looked - since > _DOUBT:
                self._lose(rank, why)
        for rank, returned in left.items():
            # What it has returned is FINAL here, so nobody is needed to return it here too.
            if self._exchange.returned >= returned:
                name = self._infos[rank].name
                error = LostError(f"{self}: Connection closed by peer: {name} has closed the group; {_MEND}")
                with self._lock:
                    self.error = self.error or error
                self._exchange.fail(error)
        return (bool(doubts) and not self._over) or (bool(left) and self.error is None)

    def _lose(self, rank: int, why: str) -> None:
        with self._lock:
            if rank in self._left:
                return
        self._end(
            LostError(f"{self}: {self._infos[rank].name} was lost: {why}; {_MEND}"), MemberFailed(rank, why[:1000])
        )

    def _diverged(self, divergence: Divergence) -> None:
        log.warning("%s: %s", self, divergence)

    def waiting(self, seconds: float) -> tuple[int, tuple[int, ...]] | None:
        """Tells for which replicas an op waits, in a job. It may be this one: then another rank of it has to move, and
        says for whom it waits."""
        stall = self._exchange.waiting(seconds)
        if stall is None or not self._replicas:
            return None
        return stall.op, tuple(sorted({self._replicas[rank] for rank in stall.waiting_on}))

    def _stalled(self, stall: Stall) -> None:
        """Report a stall. In a job that is said from a deadline on that follows how long ops take; otherwise it is the
        end, after `op_timeout`."""
        who = ", ".join(self._infos[rank].name for rank in stall.waiting_on)
        if self._exchange.waiting(self.op_timeout) is None:
            if stall[:3] != self._stall:
                self._stall = stall[:3]
                log.warning("%s: op %d makes no progress; waiting for %s", self, stall.op, who)
            return
        error = CollectiveTimeout(
            f"{self}: op {stall.op} has waited {self.op_timeout:g} s for {who}. Did they make the same call? A longer "
            "timeout waits longer"
        )
        self._broken(error)

    def _broken(self, error: BaseException) -> None:
        self._end(error, MemberFailed(-1, printable(str(error), 1000)))

    def _end(self, error: BaseException, last: Left | MemberFailed) -> None:
        """End the group, and tell the others why. Any thread; does not block; the first end counts."""
        if fork.is_child():
            return
        with self._lock:
            if self._over:
                return
            self._over = True
            self.error = self.error or error
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


_MEND = "make a new group of those that are left"


def _position(name: str, members: Sequence[Any], me: Any, show: Callable[[Any], str] = str) -> int:
    """`show` says what of a member may stand in a message."""
    said = ", ".join(map(show, members)) or "nobody"
    if len(set(members)) != len(members):
        raise ArgumentError(f"group {name!r}: a member is there twice in {said}; name each once")
    if me not in members:
        raise ArgumentError(f"group {name!r}: this rank, {show(me)}, is not among its members: {said}")
    return members.index(me)
