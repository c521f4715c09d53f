"""FTCOMM_ENGINE=host: a thread of this process drives all ops, and reduces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcomm.arrays import stage
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.operation import Operation
from ftcomm.engines.base import Events, Finish
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.settings import Settings
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import HOST, Layout, Segment, putting

if TYPE_CHECKING:
    from ftcomm.calls import Calls


class HostCalls:
    """The `CallEngine` of ops that the host drives: all calls are there, and arrays of a GPU go through host memory."""

    by_stream = False

    def all_reduce(
        self, x: Any, op: str, *, atomic: bool, compression: str, max_sms: int | None
    ) -> tuple[Operation, Finish | None]:
        staged = stage(x)
        return Operation(staged.flat, staged.dtype, op, atomic=atomic, compression=compression), staged.finish

    def may_move(self, call: str) -> None:
        """All are there."""

    def allgather_by_copies(self, group: Calls, out: Any, x: Any) -> bool:
        return False


class HostEngine(HostCalls):
    """See `ftcomm.engines.base.GroupEngine`. Raises `TransportError` without memory."""

    slots = None

    def __init__(self, settings: Settings, layout: Layout | None = None, reducer: Reducer | None = None) -> None:
        layout = HOST if layout is None else layout
        self._settings = settings
        self.transport = settings.transport
        self.segment = Segment(putting(layout) if settings.transport == "nixl" else layout)
        self._reducer = Reducer() if reducer is None else reducer

    @property
    def arithmetic(self) -> str:
        return self._reducer.arithmetic

    def exchange(self, events: Events) -> Exchange:
        settings, times = self._settings, self._settings.timeouts
        return Exchange(
            settings.replica,
            self.segment,
            deadline_floor=times.op_floor,
            deadline_ceiling=times.op,
            give_up=times.give_up,
            on_stall=events.on_stall,
            on_lost=events.on_lost,
            on_failed=events.on_failed,
            on_divergence=events.on_divergence if settings.verify else None,
            ranks_per_replica=settings.ranks_per_replica,
            reducer=self._reducer,
        )

    def warm(self) -> None:
        """Nothing is to be prepared."""

    def reach(self, peer: Peer) -> None:
        """The exchange maps what it needs."""

    def leave(self, peer: Peer) -> None:
        """Nothing was mapped here."""

    def close(self) -> None:
        self.segment.close()
