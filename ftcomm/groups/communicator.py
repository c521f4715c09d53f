"""The common part of all groups, whatever the source of their members: memory, the exchange that works with it, and
connections.

    group        members                     told by                                  enters a view
    Group        the replicas of the job     its views (`ftcomm.groups.data_plane`)   when all in it have told
    Subgroup     some of them                views derived from those                 when all in it have told
    StaticGroup  those that it was made of   themselves, when all have met            once

The router of this rank, which knows a communicator by its name, hands it what others dial.

Each source of members is a pure machine: `ftcomm.control.rank_node`, `ftcomm.membership.derived`,
`ftcomm.membership.static`. What drives it is a class of its own, since they are driven by different threads for
different reasons. The agent of a rank drives the first. A subgroup answers views that come while ops are in flight: one
thread asks, reaches and enters again and again, and is alone to do so. A static group meets once, by a deadline, in the
thread that makes it; from then on it hears of ends from several threads, of which none may wait for another. All that
waits, dials, accepts, enters and ends alike is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ftcomm.collective.core import nothing
from ftcomm.collective.inflight import Resumed
from ftcomm.collective.member import GroupExchange
from ftcomm.collective.placement import group_view
from ftcomm.collective.plan import GroupView
from ftcomm.control import handshake
from ftcomm.control.messages import Progress
from ftcomm.control.sealed import Connection
from ftcomm.control.views import Address, View
from ftcomm.engines.base import Events, GroupEngine
from ftcomm.errors import CollectiveTimeout, FtcommError
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.recorder.files import process_recorder
from ftcomm.recorder.layout import GroupKind
from ftcomm.settings.tuning import BUILT_IN, Tuning
from ftcomm.transport.base import Peer
from ftcomm.transport.connect import CONNECTIONS, accept, here_is
from ftcomm.transport.connector import Connector
from ftcomm.transport.group_connection import GroupConnection
from ftcomm.transport.router import ConnectionRouter, Receiver

ExchangeT = TypeVar("ExchangeT", bound=GroupExchange[Any])  # that the engine makes

END_NOTICED = 2.0  # s for an op to notice the end of its group


@dataclasses.dataclass(frozen=True)
class Terms:
    """The terms of a communicator, the same for all its members except where they listen."""

    listens: tuple[str, int]
    data: str
    algorithm: str = "auto"
    tuning: Tuning = BUILT_IN
    rack: str = ""


class Communicator(Generic[ExchangeT]):
    """Member `me` of the group `name`. `events` and `on_died` hear what happens, see `Events` and `Connector`."""

    def __init__(
        self,
        name: str,
        me: int,
        engine: GroupEngine[ExchangeT],
        events: Events,
        p2p: ProgressEngine,
        terms: Terms,
        kind: GroupKind,
        *,
        on_died: Callable[[int, int], None] | None = None,
    ) -> None:
        self.segment = engine.segment
        if terms.algorithm == "ring" and terms.tuning.has_tree(self.segment.layout.members):
            terms = dataclasses.replace(terms, tuning=terms.tuning.around())
        self.name, self.me, self.terms, self.p2p = name, me, terms, p2p
        self._recorder = process_recorder().group(name, me, kind)
        self.exchange = engine.exchange(events, self._recorder)
        self.here = here_is(*terms.listens, self.segment, terms.tuning, terms.rack, engine.arithmetic, terms.data)
        self.connector = Connector(
            me,
            self.here,
            mode=engine.transport,
            on_lost=events.on_lost,
            data=terms.data,
            layout=self.segment.layout,
            on_died=on_died,
            on_reached=engine.reach,
            on_left=engine.leave,
        )
        self._on_lost = events.on_lost
        self._leave: Callable[[], object] = nothing
        self.router: ConnectionRouter

    def open(self, router: ConnectionRouter, receiver: Receiver) -> None:
        """Let `receiver` get what others dial. Raises `ArgumentError` if this rank has a group of that name."""
        self.router, self._leave = router, functools.partial(router.forget, self.name, receiver)
        router.open(self.name, receiver)

    # -- the other members -------------------------------------------------------------------------------------------

    def fields(self, what: str, instance: str, epoch: int) -> handshake.Fields:
        """Returns the fields that open a connection to that instance of the group."""
        fields: handshake.Fields = {"group": self.name, "what": what, "member": self.me}
        fields.update(instance=instance, epoch=epoch, nonce=self.here.nonce)
        return fields

    def reach(
        self,
        epoch: int,
        member: int,
        there: Address,
        dial: Callable[[handshake.Fields], Connection],
        *,
        lazy: bool = False,
    ) -> Peer | None:
        """Reach a member, as `Connector.reach` says."""
        return self.connector.reach(
            epoch, member, there, lambda what: dial(self.fields(what, there.nonce, epoch)), lazy=lazy
        )

    def accept(self, call: GroupConnection) -> None:
        """Accept a connection from any member, the other end of `reach`."""
        if call.what not in CONNECTIONS or call.instance != self.here.nonce:
            call.sock.close()
            return
        lost, data = self._on_lost, self.terms.data
        accept(self.exchange, call.what, call.sock, call.member, call.epoch, call.nonce, lost, data=data)

    # -- views -------------------------------------------------------------------------------------------------------

    def plan(self, view: View, index: int = 0, *, ring: bool = False) -> GroupView:
        """Returns the plan for a view; the addresses of its members at `index` are those of their segments."""
        addresses = {member.replica: member.ranks[index] for member in view.members}
        hierarchical, tuning = self.terms.algorithm == "auto", self.terms.tuning
        return group_view(
            view.epoch, self.me, addresses, view.contributing, ring=ring, hierarchical=hierarchical, tuning=tuning
        )

    def enter(self, plan: GroupView, progress: Mapping[int, Progress]) -> Resumed:
        """Let the exchange enter an expected view, when it stands still."""
        return self.exchange.enter(plan, self.connector.enter(plan.epoch), progress)

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Fail every op and message, and every later one, with `error`; the first counts. Does not block."""
        self.exchange.fail(error)
        self.p2p.fail(error)
        self.connector.close()
        self._leave()

    def wait_all(self) -> None:
        """Block until no op runs; called when none begins any more."""
        with contextlib.suppress(CollectiveTimeout):
            self.exchange.wait_all(END_NOTICED)

    def forget(self) -> None:
        """Let go of the memory, since nothing of the group runs any more: it ends with its last holder."""
        self.segment.close()
        self.exchange.forget()
        self._recorder.close()
        self.p2p.forget()
        self.connector.forget()
        self._leave()
        self._on_lost, self._leave = nothing, nothing


def closed(group: object) -> FtcommError:
    """Makes the error of ops of a group that was closed."""
    return FtcommError(f"{group} was closed; make a new one before any op")


JobCommunicator = Communicator[GroupExchange[Any]]  # of all, whichever exchange its engine makes
