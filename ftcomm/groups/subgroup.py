"""Groups of some replicas of a job, which survive as the group of all does."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.control import fork
from ftcomm.engines.host_calls import HostCalls
from ftcomm.groups.calls import Calls
from ftcomm.groups.subgroup_internals import PARTING, SubgroupInternals
from ftcomm.p2p.calls import JobProgressEngine


class Subgroup(Calls):
    """The group of this rank and the ranks with the same index in some replicas of the job. Do not make one:
    `Group.subgroup` does, on all members.

    name, replica: what it was called when it was made, and the number of this replica.

    Ranks are places in `roster`, which has the replicas of the job's roster that belong to this group, and so changes
    at step boundaries alone. A member that catches up contributes nothing, unless all members do.
    """

    _exchange: Exchange
    _p2p: JobProgressEngine

    def __init__(self, internals: SubgroupInternals, on_closed: Callable[[Subgroup], None]) -> None:
        self.internals, self._on_closed = internals, on_closed
        self.replica = internals.replica
        engine = HostCalls(internals.size)
        super().__init__(internals.name, internals.replica, internals.p2p, engine, internals.exchange)

    def __str__(self) -> str:
        return str(self.internals)

    @property
    def error(self) -> BaseException | None:
        """Tells why no op can succeed any more; None while all is well."""
        return self.internals.error

    @property
    def roster(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.internals.roster

    @property
    def contributors(self) -> tuple[int, ...]:
        """The contributors among these."""
        return self.internals.contributors

    def close(self) -> None:
        """Leave the group; idempotent. Ops in flight fail, but for those that others may have returned. Blocks until
        the others run in the view in which this member does, until what was sent is received, and until such ops have
        returned, for 2 seconds each."""
        self._close(None)

    def _close(self, until: float | None) -> None:
        if fork.is_child():
            return
        self.internals.close(until)
        self._on_closed(self)

    def _may_call(self) -> None:
        self.internals.may_call()

    def _when(self) -> tuple[int, int]:
        return self.internals.when()

    def _default_timeout(self) -> float:
        return self.internals.call_timeout()

    def _carry_out(self, op: Operation, result: Any, finish: Callable[[], Any] | None, async_op: bool) -> Any:
        done = super()._carry_out(op, result, finish, async_op)
        self.internals.check_called(op)
        return done


def close_all(groups: Collection[Subgroup]) -> None:
    """Close groups of this rank together: what each waits for happens at the same time."""
    until = time.monotonic() + PARTING
    for group in groups:
        group._close(until)
