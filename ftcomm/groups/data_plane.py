"""The data plane of one rank, as its control thread drives it: it takes the communicator of the group of all from view
to view."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from ftcomm.collective.placement import order
from ftcomm.control import handshake
from ftcomm.control import messages as m
from ftcomm.control.data_plane import Unreachable, WaitsFor
from ftcomm.control.rank_name import rank_name
from ftcomm.control.sealed import Channel
from ftcomm.control.views import Address, View
from ftcomm.errors import FtcommError, RemovedError, TooLateError, TransportError
from ftcomm.groups.communicator import JobCommunicator
from ftcomm.p2p.calls import JobProgressEngine
from ftcomm.transport.group_connection import P2P, GroupConnection
from ftcomm.transport.segment import OtherEngine

log = logging.getLogger("ftcomm")


def removed_error(who: str, reason: str, ending: m.Ending) -> RemovedError:
    """Returns the error that a rank raises when the job tells it this."""
    return TooLateError(f"{who} came too late: {reason}") if ending is m.Ending.TOO_LATE else RemovedError(reason)


class LocalDataPlane:
    """The `ftcomm.control.data_plane.DataPlane` that the control thread drives, of rank `rank` of a replica.

    `dial(there, fields)` connects to the same rank of another replica, `on_view` is told of every view before any op
    runs in it, `on_failed` of the error with which this rank ends.
    """

    def __init__(
        self,
        rank: int,
        communicator: JobCommunicator,
        p2p: JobProgressEngine,
        *,
        dial: Callable[[Address, handshake.Fields], Channel],
        on_view: Callable[[View], object] = lambda view: None,
        on_failed: Callable[[FtcommError], object] = lambda error: None,
    ) -> None:
        self._rank, self._communicator, self._p2p = rank, communicator, p2p
        self._dial, self._on_view, self._on_failed = dial, on_view, on_failed
        self._exchange, self._connector = communicator.exchange, communicator.connector
        self._reaching: tuple[int, ...] = ()

    # -- what the control thread asks ----------------------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], None]) -> None:
        self._communicator.router.job_changes()
        self._exchange.freeze(quiesced)

    def wake(self) -> None:
        self._exchange.wake()

    def wait_on(self, away: float) -> None:
        self._communicator.router.coordinator_away(away)

    def progress(self) -> m.Progress:
        return self._exchange.progress()

    def stalls(self, seconds: float) -> WaitsFor | None:
        """Returns what `waiting` says of this group or of another one of this rank. Any thread."""
        return self._communicator.router.waiting(seconds)

    def awaited(self) -> dict[int, float]:
        """Returns for how many seconds this group has waited for each replica. Called between `quiesced` and
        `enter`."""
        return self._exchange.member.watch.awaited

    def hand_waits(self, seconds: Mapping[int, float]) -> None:
        """Let the next op wait for replicas as if it had waited for so many seconds already. Any thread."""
        self._exchange.member.watch.hand_waits(seconds)

    def reach(self, view: View, severed: frozenset[int] = frozenset()) -> Iterable[int]:
        """Reach the memory of all members. Called in a thread of its own, for the next view maybe before this call is
        through, and again after `Unreachable`."""
        epoch, me = view.epoch, self._communicator.me
        if not self._connector.expect(epoch, view.replicas, severed):
            return ()  # no longer needed
        lazy = self._lazy(view)
        for member in view.members:
            replica, there = member.replica, member.ranks[self._rank]
            known = None if replica == me else self._connector.find(epoch, replica, there.nonce)
            if replica == me or (known is not None and (known.is_open or replica in lazy)):
                continue
            self._reaching = (replica,)
            try:
                if known is not None:
                    known.open_now()  # a neighbour from now on
                else:
                    self._connect(epoch, replica, there, replica in lazy)
            except OtherEngine as error:  # a person has to mend it; the view changes only say who was removed
                log.error("%s: %s", rank_name(me, self._rank), error)
                raise Unreachable(replica, str(error)) from error
            except (TransportError, OSError, RuntimeError) as error:  # RuntimeError: no thread could be started
                raise Unreachable(replica, str(error)) from error
        self._reaching = ()
        return self._connector.sharing_memory(epoch)

    def reaching(self) -> tuple[int, ...]:
        """The replica whose memory `reach` is at, if any. Any thread."""
        return self._reaching

    def _connect(self, epoch: int, replica: int, there: Address, lazy: bool) -> None:
        peer = self._communicator.reach(epoch, replica, there, lambda fields: self._dial(there, fields), lazy=lazy)
        if peer is not None:
            how = f"{peer.transport}, when it is needed" if lazy else peer.transport
            log.info("%s: reaches replica %d by %s", rank_name(self._communicator.me, self._rank), replica, how)

    def _lazy(self, view: View) -> frozenset[int]:
        """Returns whom this member dials when an op needs it, and not before: in a ring all but the neighbours, if all
        can wait, so that its driver hears of all from its left neighbour."""
        there = {member.replica: member.ranks[self._rank] for member in view.members}
        me, terms = self._communicator.me, self._communicator.terms
        others = [address for member, address in there.items() if member != me]
        if terms.algorithm != "ring" or me not in there or not self._connector.may_wait(others):
            return frozenset()
        ring = order(there, terms.tuning)
        place = ring.index(me)
        return frozenset(ring) - {me, ring[place - 1], ring[(place + 1) % len(ring)]}

    def enter(self, view: View, progress: dict[int, m.Progress]) -> dict[str, int]:
        plan = self._communicator.plan(view, self._rank, ring=self._communicator.terms.algorithm == "ring")
        if not (plan.one_host or plan.alike):
            log.info(
                "%s: hosts differ in processor or libraries, so each element is summed on one of them, "
                "which costs small ops a second hop",
                rank_name(plan.me, self._rank),
            )
        self._communicator.router.job_entered(view)
        return self._communicator.enter(plan, progress)._asdict()

    def fail(self, reason: str, ending: m.Ending) -> None:
        error = removed_error(rank_name(self._communicator.me, self._rank), reason, ending)
        self._communicator.fail(error)
        self._on_failed(error)

    # -- what the router asks, see `ftcomm.transport.router.Receiver` --------------------------------------------------

    def take(self, call: GroupConnection) -> bool:
        if call.what == P2P:
            self._p2p.incoming(call)
        else:
            self._communicator.accept(call)
        return True

    def job_changes(self) -> None:
        self._exchange.job_changes()

    def coordinator_away(self, seconds: float) -> None:
        self._exchange.coordinator_away(seconds)

    def job_entered(self, view: View) -> None:
        self._on_view(view)
        self._p2p.enter(view)

    def waiting(self, seconds: float) -> WaitsFor | None:
        stall = self._exchange.waiting(seconds)
        return None if stall is None else WaitsFor(stall.op, stall.waiting_on)
