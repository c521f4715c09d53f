"""The interface that a group has of its engine, whichever FTCOMM_ENGINE has chosen: see `ftcomm.engines.registry`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ftcomm.collective.checksum import Divergence
from ftcomm.collective.member import GroupExchange
from ftcomm.collective.operation import Operation
from ftcomm.collective.watchdog import Stall
from ftcomm.p2p.slots import Slots
from ftcomm.recorder.recorder import GroupRecorder
from ftcomm.transport.base import OnLost, Peer
from ftcomm.transport.segment import Segment

if TYPE_CHECKING:
    from ftcomm.arrays import Staged
    from ftcomm.arrays.flat import Flat

Finish = Callable[[], Any]  # see `ftcomm.arrays.Staged`
ExchangeT_co = TypeVar("ExchangeT_co", bound=GroupExchange[Any], covariant=True)


class CollectiveCall(NamedTuple):
    """A call of a collective at this rank. `roster` are the replicas, in rank order; `root`: a rank."""

    kind: str
    roster: tuple[int, ...]
    rank: int
    root: int | None = None
    op: str = ""  # of what is reduced
    counts: Sequence[Sequence[int]] = ()  # of an alltoall: elements from each rank to each


class ReducingGroup(Protocol):
    """The part of a group that an engine calls."""

    @property
    def roster(self) -> tuple[int, ...]: ...

    @property
    def rank(self) -> int: ...

    def allreduce(self, x: Any, op: str) -> Any: ...


class CallEngine(Protocol):
    """The part of an engine that calls ask: which of them there are, and for the op of an all-reduce."""

    by_stream: bool  # a stream of the caller's waits for an op, which may be in flight when it was waited for

    def all_reduce(
        self, x: Any, op: str, atomic: bool, compression: str, max_sms: int | None
    ) -> tuple[Operation, Finish | None]:
        """The op, to be submitted, and what is to be called behind it. Arguments are those of `Calls.allreduce`.
        Raises `ArgumentError`."""

    def may_move(self, call: str) -> None:
        """Raises `ArgumentError`, with what to type, if this engine does not have the call; all have the all-reduce."""

    def to_write(self, x: Any) -> Flat:
        """The bytes of `x`, where this engine works on them: `ftcomm.arrays.flat.to_write`. Raises `ArgumentError`."""

    def to_read(self, x: Any) -> Flat:
        """The same of an array that stays as it is."""

    def stage(self, x: Any) -> Staged:
        """The elements of `x`, to be reduced, where this engine works on them. Raises `ArgumentError`."""

    def collective(self, call: CollectiveCall, array: Any, source: Any, dtype: str, count: int, size: int) -> Operation:
        """The op of a call other than an all-reduce: from `source` into `array`, flat as they were staged; `count`
        elements, of `size` bytes, of each rank, or as many as its `counts` say. Raises `ArgumentError`."""

    def allgather_by_copies(self, group: ReducingGroup, out: Any, x: Any) -> bool:
        """Gather by copy engines, as `Calls.allgather` says; False where there are none. Blocks."""


class Events(NamedTuple):
    """The callbacks of an exchange. `ftcomm.collective.exchange.Exchange` says when it calls each."""

    on_stall: Callable[[Stall], None]
    on_failed: Callable[[BaseException], None]
    on_lost: OnLost
    on_divergence: Callable[[Divergence], None]


class GroupEngine(CallEngine, Protocol[ExchangeT_co]):
    """The engine of a group. It has this rank's memory, and makes the exchange that drives the ops; `close` gives the
    memory back."""

    segment: Segment
    transport: str  # by which peers are reached, as FTCOMM_TRANSPORT says it
    slots: Slots | None  # through which messages go by copy engines

    @property
    def arithmetic(self) -> str:
        """Names how this engine computes: members where it is equal reduce to the same bits. "" is equal to nothing."""

    def exchange(self, events: Events, recorder: GroupRecorder) -> ExchangeT_co:
        """Makes the exchange that runs its ops, once, and lets `recorder` record them."""

    def warm(self) -> None:
        """Prepare what any op needs, before the first one. Blocks, for seconds maybe."""

    def reach(self, peer: Peer) -> None:
        """An epoch that is to come has this peer. Blocks. Raises `TransportError`."""

    def leave(self, peer: Peer) -> None:
        """No view needs it any more; idempotent."""

    def close(self) -> None:
        """Close the engine; called after `fail` of the exchange. Blocks for two seconds at most."""


JobEngine = GroupEngine[GroupExchange[Any]]  # of the group of a job, whichever drives it
