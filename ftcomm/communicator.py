"""What all groups with an exchange of their own do alike, whatever says who their members are.

    class         members                           enters
    Subgroup      some replicas of a job's views    each of them, when all who are in it have told where they stand
    FixedGroup    those that it was made of         one view, when all have met

A communicator has a segment, the exchange that works with it, and connections for messages. What others dial comes by
the router of this rank, which knows a communicator by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from ftcomm.calls import Calls
from ftcomm.collective.checksum import Divergence
from ftcomm.collective.exchange import Exchange
from ftcomm.collective.placement import group_view
from ftcomm.collective.watchdog import Stall
from ftcomm.control import wire
from ftcomm.control.messages import Progress
from ftcomm.control.sealed import Connection
from ftcomm.control.views import Address
from ftcomm.errors import CollectiveTimeout, FtcommError
from ftcomm.messages.post import Post
from ftcomm.router import POST, ConnectionRouter, Incoming
from ftcomm.transport.base import Peer
from ftcomm.transport.connect import CONNECTIONS, Fields, accept, connect, here_is
from ftcomm.transport.segment import Segment
from ftcomm.tuning import BUILT_IN, Tuning

_PARTING = 2.0  # s that an op may take to notice that it is over


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a communicator goes by; all its members have the same, but for where they listen."""

    listens: tuple[str, int]
    transport: str
    data: str
    deadlines: tuple[float, float, float]  # floor, ceiling and end of an op without progress, see `Exchange`
    algorithm: str = "auto"
    tuning: Tuning = BUILT_IN
    ranks_per_replica: int = 1


class Communicator(Calls, ABC):
    """The calls are those of `Group`, thread-safe, and end with `error` when it is over.

    Arrays on a GPU go through host memory and are reduced by the host, whatever FTCOMM_ENGINE is.
    """

    def __init__(
        self,
        name: str,
        me: int,
        router: ConnectionRouter,
        terms: Terms,
        *,
        later: bool,
        on_divergence: Callable[[Divergence], None] | None,
    ) -> None:
        """`later`: most of the memory is taken by `self._segment.reserve()`, before the first op."""
        self.name, self._me = name, me
        self._router, self._terms = router, terms
        self._lock = threading.Lock()  # never held across a wait
        self._error: BaseException | None = None  # why no op can succeed any more
        self._segment = Segment(later=later)
        self._here = here_is(*terms.listens, self._segment, terms.tuning, data=terms.data)
        floor, ceiling, give_up = terms.deadlines
        self._exchange = Exchange(
            me,
            self._segment,
            deadline_floor=floor,
            deadline_ceiling=ceiling,
            give_up=give_up,
            on_stall=self._stalled,
            on_lost=self._connection_ended,
            on_failed=self._broken,
            on_divergence=on_divergence,
            ranks_per_replica=terms.ranks_per_replica,
        )
        self._post = self._make_post()

    @property
    def error(self) -> BaseException | None:
        """Why no op can succeed any more; None while all is well."""
        return self._error

    # -- what its membership says ------------------------------------------------------------------------------------

    _greeting: str  # what a connection of a member is for that enters a view

    @abstractmethod
    def _make_post(self) -> Post: ...

    @abstractmethod
    def _belongs(self, member: int) -> bool:
        """Whether it is another member, now or maybe later."""

    @abstractmethod
    def _meets(self, call: Incoming) -> bool:
        """Own the connection of somebody who enters a view; False: it is for the next group of this name."""

    @abstractmethod
    def _takes_messages(self, call: Incoming) -> None:
        """Own a connection by which a member sends messages."""

    @abstractmethod
    def _stalled(self, stall: Stall) -> None:
        """An op makes no progress; said again every second."""

    @abstractmethod
    def _broken(self, error: BaseException) -> None:
        """The exchange cannot go on."""

    def _connection_ended(self, member: int, epoch: int, why: str) -> None:
        """A connection for data is gone, in any thread. By itself that is no news."""

    # -- the other members -------------------------------------------------------------------------------------------

    def _fields(self, what: str, life: str, epoch: int) -> wire.Fields:
        """What a connection is opened with that goes to the member with this life."""
        fields: wire.Fields = {"group": self.name, "what": what, "member": self._me}
        fields.update(life=life, epoch=epoch, nonce=self._here.nonce)
        return fields

    def _reach(self, member: int, there: Address, epoch: int, dial: Callable[[wire.Fields], Connection]) -> Peer:
        """The way to the memory of a member. Blocks while dialling. Raises `OSError` and `TransportError`."""

        def opened(there: Address, what: str, fields: Fields) -> Connection:
            return dial(self._fields(what, there.nonce, epoch))

        return connect(
            self._me,
            self._here,
            member,
            there,
            epoch=epoch,
            mode=self._terms.transport,
            dial=opened,
            on_lost=self._connection_ended,
            data=self._terms.data,
        )

    def _resume(
        self,
        epoch: int,
        others: Mapping[int, Address],
        contributing: frozenset[int],
        peers: Mapping[int, Peer],
        progress: Mapping[int, Progress],
    ) -> None:
        """Let the exchange enter a view, of this member and `others`."""
        addresses = {**others, self._me: self._here}
        algorithm, tuning = self._terms.algorithm, self._terms.tuning
        view = group_view(epoch, self._me, addresses, contributing, hierarchical=algorithm == "auto", tuning=tuning)
        self._exchange.resume(view, peers, progress)

    def take(self, call: Incoming) -> bool:
        """A connection to this group, from the router."""
        if call.what == self._greeting:
            return self._meets(call)
        if call.what == POST and self._belongs(call.member):
            self._takes_messages(call)
        elif call.what in CONNECTIONS and call.life == self._segment.nonce and self._belongs(call.member):
            lost, data = self._connection_ended, self._terms.data
            accept(self._exchange, call.what, call.sock, call.member, call.epoch, call.nonce, lost, data=data)
        else:
            call.sock.close()
        return True

    # -- the end -----------------------------------------------------------------------------------------------------

    def _closing(self) -> FtcommError:
        return FtcommError(f"{self} was closed; make a new one before any op")

    def _fail_all(self, error: BaseException) -> None:
        """Every op and message, and every later one, fails with `error`; the first counts. Does not block."""
        self._exchange.fail(error)
        self._post.fail(error)
        self._router.forget(self.name, self)

    def _drain(self) -> None:
        """After that: block until no op runs."""
        with contextlib.suppress(CollectiveTimeout):
            self._exchange.drain(_PARTING)

    def _let_go(self) -> None:
        """Nothing of it runs any more: its memory is to go with the last who holds it, and that is not itself."""
        self._segment.close()
        self._exchange.forget()
        self._post.forget()
