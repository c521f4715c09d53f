"""The parts of a group that other parts of ftcomm use, and a user does not.

Subgroups and static groups need the connections of this rank, training needs its place in the step loop, torch both,
and experiments the exchange. All of them find it in the `internals` of a `Group`; names with an underscore are private
to the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ftcomm.control import messages as m
from ftcomm.errors import FtcommError, TransportError
from ftcomm.process.own import own_process

if TYPE_CHECKING:
    from ftcomm.control import handshake
    from ftcomm.control.control_thread import ControlThread
    from ftcomm.control.incoming import Handler
    from ftcomm.control.script_end import ScriptEnd
    from ftcomm.control.sealed import Channel
    from ftcomm.control.views import Address, View
    from ftcomm.settings import Settings
    from ftcomm.transport.router import ConnectionRouter

INTRA_REPLICA = "intra-replica"  # the purpose of connections between the ranks of one replica


class OpenLoop(Protocol):
    """A step loop, as a group knows it."""

    followed: bool  # another one has begun before this one was at its end

    def close(self) -> None: ...


class JobMember(Protocol):
    """The group of all at one rank, as the other groups of this rank know it. `Group` says what each is."""

    settings: Settings
    internals: Internals
    replica: int
    shard: int
    roster: tuple[int, ...]
    contributors: tuple[int, ...]

    @property
    def view(self) -> View: ...


class Internals:
    """The internals of one group, as `Group.internals`.

    port, router: where this rank listens, and what deals the connections out to its communicators.
    exchange: runs its ops; what kind it is depends on the engine.
    op_timeout: seconds until an op that stands still fails by itself.
    may_call: raises if no op can be called any more.
    when: the stamp of a call that this thread makes now, and the lag; see `Operation`.
    next_boundary: the number of the step boundary that is to come; 0 before this rank is in a view.
    stalled_seconds: for how long ops of this rank have stood still, for members that did not move, or were lost.
    join: takes part in the job; called once, before the first op.
    end_as: leaves the job as the script has ended, with an error.
    catching_up: whether this replica has joined a running job, and has not caught up yet.
    outside: whether it has joined a running job, and has not passed its first boundary yet.
    lag: boundaries passed beyond the training steps: of repeated steps, of pauses, and at the end of a step loop.
    loop: how many step loops the script of this rank has entered.
    step_loop: the one that the script is in, if it is in one.
    on_step_error: takes an error for which the step loop, if there is one that can, discards the step.
    on_roster: is called at a boundary, when the roster is that of the coming step.
    on_ended: takes the error with which this rank is out of the job. In the control thread, so it must not block.
    repeats: whether a rank may repeat a step by itself; not where the others of its replica would wait for it in groups
        of another backend.
    intra_replica_exchanges: how often the ranks of this replica have begun to meet in a step loop.
    """

    def __init__(
        self,
        control_thread: ControlThread,
        port: int,
        router: ConnectionRouter,
        exchange: Any,
        op_timeout: float,
        *,
        view: Callable[[], View],
        may_call: Callable[[], None],
        when: Callable[[], tuple[int, int]],
        next_boundary: Callable[[], int],
        stalled_seconds: Callable[[], float],
        join: Callable[[], None],
        end_as: Callable[[ScriptEnd], None],
    ) -> None:
        self._control_thread, self._view = control_thread, view
        self.port, self.router, self.exchange, self.op_timeout = port, router, exchange, op_timeout
        self.may_call, self.when, self.stalled_seconds = may_call, when, stalled_seconds
        self.next_boundary, self.join, self.end_as = next_boundary, join, end_as
        # Until the script comes to such an exchange.
        control_thread.serve(INTRA_REPLICA, lambda channel, fields: channel.close())
        self.catching_up = self.outside = False
        self.lag = self.loop = self.intra_replica_exchanges = 0
        self.step_loop: OpenLoop | None = None
        self.on_step_error: Callable[[Exception], None] | None = None
        self.on_roster: Callable[[], None] | None = None
        self.on_ended: Callable[[FtcommError], None] | None = None
        self.repeats = True

    def serve(self, purpose: str, handler: Handler) -> None:
        """Hand every incoming connection of `purpose` to `handler(channel, fields)`, in a thread of its own."""
        self._control_thread.serve(purpose, handler)

    def dial(self, replica: int, purpose: str, fields: handshake.Fields) -> Channel:
        """Returns an authenticated blocking connection to this rank of another replica, which hands it to the handler
        of `purpose`. Waits for as long as an op may for a process whose kernel answers. Raises `TransportError`."""
        try:
            return self._control_thread.dial(replica, purpose, fields)
        except OSError as error:
            raise TransportError(f"replica {replica} cannot be reached for {purpose!r}: {error}") from error

    def dial_rank(self, replica: int, shard: int, purpose: str, fields: handshake.Fields, timeout: float) -> Channel:
        """Returns an authenticated blocking connection to any rank of the view in force. Raises `OSError`."""
        there = self.address_of(replica, shard, timeout)
        return self._control_thread.dial_address(there, purpose, fields, timeout)

    def address_of(self, replica: int, shard: int, timeout: float) -> Address:
        """Returns where any rank of the view in force is reached. Blocks for up to `timeout` seconds. Raises
        `OSError`."""
        return self._control_thread.address_of(self._view(), replica, shard, timeout)

    @property
    def loop_of_job(self) -> int:
        """The step loop that the others are in, as a replica that joins them was told last."""
        return self._control_thread.loop_of_job

    @property
    def behind(self) -> bool:
        """Whether the script of this rank has still to come to the step loop that the job is in. Only that of a replica
        that joins has."""
        return self.outside and self.loop < self.loop_of_job

    def caught_up(self, step: int) -> None:
        """Note that this rank holds the state as of `step`: its replica may contribute from one of the next boundaries
        on."""
        own_process()
        self.catching_up = False
        self._control_thread.tell(m.CaughtUp(step))
