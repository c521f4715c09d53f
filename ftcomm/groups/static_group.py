"""Groups whose membership never changes: the ranks of one replica, any subset of a job, or processes without a job.

    what ends it               how the others learn it                         what their ops fail with
    a process dies             the kernel's mark on its life (shared memory),  LostError that names the rank
                               or the end of its connection
    an op takes too long       the member that gives up says so                CollectiveTimeout; elsewhere LostError
    abort()                    the member says so                              LostError
    close(), and others go on  the member says after how many ops              LostError, in a later op;
                                                                               messages between others go on

Whatever comes first is the one error of the group. It ends every op in flight and every later one, on this member and
on all others, which hear of it from those who have noticed. A new group with the same members, or with those that
are left, needs a new name.

A collective is what it is in a job (`ftcomm.collective`), with a view that is never replaced.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ftcomm.collective.exchange import Exchange
from ftcomm.collective.watchdog import Deadlines
from ftcomm.control.rank_name import rank_name
from ftcomm.control.timeouts import Timeouts
from ftcomm.engines.host_calls import HostCalls
from ftcomm.errors import ArgumentError
from ftcomm.groups.calls import Calls
from ftcomm.groups.communicator import Terms
from ftcomm.groups.static_endpoint import Endpoint, parse, shown
from ftcomm.groups.static_internals import StaticGroupInternals
from ftcomm.groups.static_pairs import PeerInfo
from ftcomm.settings import check_data

if TYPE_CHECKING:
    from ftcomm.groups.group_internals import JobMember


class StaticGroup(Calls):
    """The members, ranks 0 to n - 1, reduce and move data together until one of them ends.

    Made by `in_job` or `from_handles`, at the same time on all members. Ranks are numbers of this group, and every rank
    contributes.

    name, roster: what it was called when it was made, and its ranks.
    op_timeout: seconds without progress after which an op fails.
    """

    _exchange: Exchange

    def __init__(self, internals: StaticGroupInternals) -> None:
        self.internals = internals
        engine = HostCalls(len(internals.roster))
        super().__init__(internals.name, internals.me, internals.p2p, engine, internals.exchange)
        self.roster, self.op_timeout = internals.roster, internals.op_timeout

    @classmethod
    def in_job(
        cls,
        group: JobMember,
        name: str,
        members: Sequence[tuple[int, int]],
        *,
        op_timeout: float | None = None,
        timeout: float | None = None,
        data: str | None = None,
    ) -> StaticGroup:
        """Makes a group of ranks of the job that `group` is part of; blocks until all of them have called this.

        name: the same on all members, and of no other group that they have.
        members: (replica, shard) of each, in rank order; this rank is one of them.
        op_timeout: seconds without progress after which an op fails; None: as long as an op of the job may take.
        timeout: seconds until all have come; None: FTCOMM_INIT_TIMEOUT.
        data: how data are protected between hosts, the same on all members; None: FTCOMM_DATA.

        Raises `ArgumentError`, `TransportError` that names who did not come, and `LostError` if one was lost meanwhile.
        """
        settings = group.settings
        pairs = [(int(replica), int(shard)) for replica, shard in members]
        me = _position(name, pairs, (settings.replica, settings.shard))
        infos = [
            PeerInfo(
                f"rank {i} ({rank_name(replica, shard)})",
                functools.partial(group.internals.dial_rank, replica, shard),
            )
            for i, (replica, shard) in enumerate(pairs)
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
        internals = StaticGroupInternals(
            *(name, me, infos, group.internals.router, terms),
            transport=settings.transport,
            deadlines=_deadlines(op_timeout, settings.timeouts),
            op_timeout=op_timeout,
            timeout=timeout,
            job=group,
            replicas=replicas,
        )
        return cls(internals)

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
        """Makes a group without a job: of the ranks whose `Endpoint.handle` is in `handles`, in rank order.

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
        terms = Terms((endpoint.host, endpoint.port), data)
        internals = StaticGroupInternals(
            *(name, me, infos, endpoint.router, terms),
            transport=transport,
            deadlines=_deadlines(op_timeout),
            op_timeout=op_timeout,
            timeout=timeout,
        )
        return cls(internals)

    def __str__(self) -> str:
        return str(self.internals)

    @property
    def error(self) -> BaseException | None:
        """Tells why no op can succeed any more; None while all is well."""
        return self.internals.error

    def abort(self, reason: str = "") -> None:
        """End every op in flight and every later one, here and on the other members, with `LostError`.

        From any thread; does not block, idempotent. The endpoint and its handle stay, for a new group.
        """
        self.internals.abort(reason)

    def close(self) -> None:
        """Leave the group; idempotent. Ops in flight fail, but for those that others may have returned. Those return
        here, and on all others.

        Blocks until what was sent is received, and such ops have returned, for 2 seconds each at most.
        """
        self.internals.close()

    def _may_call(self) -> None:
        self.internals.may_call()

    def _default_timeout(self) -> float:
        return self.op_timeout


def _deadlines(op_timeout: float, of_job: Timeouts | None = None) -> Deadlines:
    """Returns the deadlines of an op; without a job it stands still after `op_timeout`. Its exchange ends by itself,
    long after the group has ended it."""
    floor, ceiling = (op_timeout, op_timeout) if of_job is None else (of_job.op_floor, of_job.op)
    return Deadlines(min(floor, op_timeout), min(ceiling, op_timeout), 2 * op_timeout)


def _position(name: str, members: Sequence[Any], me: Any, show: Callable[[Any], str] = str) -> int:
    """Returns the place of `me` among `members`. `show` makes the text of a member in errors. Raises
    `ArgumentError`."""
    said = ", ".join(map(show, members)) or "nobody"
    if len(set(members)) != len(members):
        raise ArgumentError(f"group {name!r}: a member is there twice in {said}; name each once")
    if me not in members:
        raise ArgumentError(f"group {name!r}: this rank, {show(me)}, is not among its members: {said}")
    return members.index(me)
