"""Groups of some replicas of a job, which survive as the group of all does."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ftcomm.calls import Calls
from ftcomm.collective.checksum import Divergence
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.control import fork
from ftcomm.p2p.calls import JobProgressEngine
from ftcomm.subgroup_internals import PARTING, Dial, SubgroupInternals
from ftcomm.transport.base import Lost

if TYPE_CHECKING:
    from ftcomm.group import Group


class Subgroup(Calls):
    """The group of this rank and the ranks with the same index in some replicas of the job. Do not make one:
    `Group.subgroup` does, on all members.

    name, replica: what it was called when it was made, and the number of this replica.

    Ranks are places in `roster`, which is that of the group of all, in so far as it belongs to this one, and so changes
    at step boundaries alone. A member that catches up contributes nothing, unless all members do.
    """

    _exchange: Exchange
    _p2p: JobProgressEngine

    def __init__(
        self,
        group: Group,
        name: str,
        replicas: Collection[int],
        *,
        dial: Dial,
        on_stall: Callable[[int, int, tuple[int, ...], float], None],
        on_lost: Lost,
        on_failed: Callable[[BaseException], None],
        on_divergence: Callable[[Divergence], None],
        on_closed: Callable[[Subgroup], None],
    ) -> None:
        """See `Group.subgroup`, and `SubgroupInternals` for what is not said there."""
        self.internals = inside = SubgroupInternals(
            group,
            name,
            replicas,
            dial=dial,
            on_stall=on_stall,
            on_lost=on_lost,
            on_failed=on_failed,
            on_divergence=on_divergence,
        )
        super().__init__(len(replicas))
        self._group, self._on_closed = group, on_closed
        self.name = name
        self.replica = self._me = group.replica
        self._exchange, self._p2p = inside.exchange, inside.p2p

    def __str__(self) -> str:
        return str(self.internals)

    @property
    def error(self) -> BaseException | None:
        """Why no op can succeed any more; None while all is well."""
        return self.internals.error

    @property
    def roster(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.internals.among(self._group.roster)

    @property
    def contributors(self) -> tuple[int, ...]:
        """The contributors among these."""
        return self.internals.among(self._group.contributors) or self.roster

    def close(self, until: float | None = None) -> None:
        """Leave the group; idempotent. Ops in flight fail, but for those that others may have returned. Blocks until
        the others run in the view in which this member does, until what was sent is received, and until such ops have
        returned, for 2 seconds each. With `until`, a time of `time.monotonic`, it waits no longer than that for the
        first of these."""
        if fork.is_child():
            return
        self.internals.close(until)
        self._on_closed(self)

    def _may_call(self) -> None:
        self.internals.may_call()

    def _when(self) -> tuple[int, int]:
        return self.internals.when()

    def _patience(self) -> float:
        return self.internals.patience()

    def _carry_out(self, op: Operation, result: Any, finish: Callable[[], Any] | None, async_op: bool) -> Any:
        self.internals.reserve()
        done = super()._carry_out(op, result, finish, async_op)
        self.internals.check_called(op)
        return done


def close_all(groups: Collection[Subgroup]) -> None:
    """Close groups of this rank together: what each waits for happens at the same time."""
    until = time.monotonic() + PARTING
    for group in groups:
        group.close(until)
