"""FTCOMM_ENGINE=host: a thread of this process drives all ops, and reduces."""

from __future__ import annotations

from ftcomm.collective.exchange import Exchange
from ftcomm.collective.watchdog import Deadlines
from ftcomm.engines.base import Events
from ftcomm.engines.host_calls import HostCalls
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.p2p.slots import Slots
from ftcomm.recorder.recorder import GroupRecorder
from ftcomm.settings import Settings
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import HOST, NEAR, Layout, Segment, layout_for


class HostEngine(HostCalls):
    """See `ftcomm.engines.base.GroupEngine`. Raises `TransportError` without memory."""

    slots: Slots | None = None

    def __init__(
        self,
        me: int,
        segment: Segment,
        transport: str,
        deadlines: Deadlines,
        *,
        verify: bool,
        ranks_per_replica: int = 1,
        reducer: Reducer | None = None,
    ) -> None:
        super().__init__(segment.layout.members)
        self.segment, self.transport = segment, transport
        self._me, self._deadlines, self._verify, self._ranks_per_replica = me, deadlines, verify, ranks_per_replica
        self._reducer = Reducer() if reducer is None else reducer

    @classmethod
    def of_job(cls, settings: Settings, layout: Layout = HOST, reducer: Reducer | None = None) -> HostEngine:
        layout = layout_for(settings.transport, layout)
        # What ops among members of one host use is had at the start, or never; but by TCP large ones are sent from the
        # caller's array. A device maps all of the segment.
        chunks = NEAR * layout.pair if reducer is None else None
        segment = Segment(layout, members=settings.replicas, chunks=chunks)
        return cls(
            settings.replica,
            segment,
            settings.transport,
            Deadlines.of(settings.timeouts),
            verify=settings.verify,
            ranks_per_replica=settings.ranks_per_replica,
            reducer=reducer,
        )

    @property
    def arithmetic(self) -> str:
        return self._reducer.arithmetic

    def exchange(self, events: Events, recorder: GroupRecorder) -> Exchange:
        deadlines = self._deadlines
        return Exchange(
            self._me,
            self.segment,
            deadline_floor=deadlines.floor,
            deadline_ceiling=deadlines.ceiling,
            give_up=deadlines.give_up,
            on_stall=events.on_stall,
            on_lost=events.on_lost,
            on_failed=events.on_failed,
            on_divergence=events.on_divergence if self._verify else None,
            ranks_per_replica=self._ranks_per_replica,
            reducer=self._reducer,
            recorder=recorder,
        )

    def warm(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def reach(self, peer: Peer) -> None:
        """The exchange maps what it needs."""

    def leave(self, peer: Peer) -> None:
        """Do nothing: nothing was mapped here."""

    def close(self) -> None:
        self.segment.close()
