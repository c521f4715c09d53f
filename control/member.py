"""The member: one rank's part of the protocol. A pure state machine beside the user's code."""

from __future__ import annotations

import enum

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.actions import EnterView, Failed, Freeze, GoOn, JoinPending, Known, Passed, ToLeader
from ftcomm.control.views import View


class ToMember(msgspec.Struct, frozen=True):
    """A message to this rank of another replica in the view."""

    replica: int
    message: m.MemberProgress


MemberAction = ToLeader | ToMember | Freeze | EnterView | Passed | Failed | JoinPending | Known | GoOn

AHEAD, MANY = 16, 1 << 16  # epochs, and members in each, whose progress is kept until their view is known


class Phase(enum.Enum):
    JOINING = "joining"  # no view yet; in a running job not before its script is ready
    RUNNING = "running"  # ops are exchanged in `view`
    CHANGING = "changing"  # a newer view is known: quiesce, tell the others the progress, wait for theirs
    ENTERING = "entering"  # all have told theirs; the exchange starts again
    LEFT = "left"  # the view in force does not have this replica, or it was sent away before any had it
    FAILED = "failed"  # removed, or the job has failed


class Machine:
    """The state machine of one rank. Not thread-safe. Every method returns actions in order."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.incarnation = ""  # the leader tells it
        self.phase = Phase.JOINING
        self.view: View | None = None  # the view in force, or the one that is being installed
        self.preview: View | None = None  # the members and this replica, as a running job first told them
        self.ran = False  # this rank has exchanged in some view
        self._came_in = 0  # the epoch of the first view that it has exchanged in
        self.step = -1  # the newest boundary that was passed
        self.loop = 0  # the step loop of the last boundary that the user's code came to
        self._loop_began = 0  # the first boundary of that loop
        self._told_loop = 0  # the step loop that the leader was told at a boundary
        self.loop_of_job = 0  # the step loop of the members, as a joiner was told
        self._promise: m.Prepare | None = None  # what this rank is bound to
        self._standing: int | None = None  # step of the boundary that the user's code waits at
        self._asked: int | None = None  # the proposal of which the leader was asked
        self._mine: m.Progress | None = None  # known since this rank has quiesced
        self._theirs: dict[int, dict[int, m.Progress]] = {}  # epoch -> replica -> progress

    # -- the user's code -----------------------------------------------------------------------------------------

    def boundary(self, step: int, loop: int = 0) -> list[MemberAction]:
        """Stand at the boundary of `step` in step loop `loop`, with no op in flight. `Passed` comes now or later."""
        self._standing = step
        if loop != self.loop:
            self.loop, self._loop_began = loop, step
        if self.phase is not Phase.RUNNING:
            return self._tell_loop()  # passed once the change under way is complete
        return self._ask_or_pass()

    def _ask_or_pass(self) -> list[MemberAction]:
        """Ask the leader if this rank is bound to a change at the boundary where it stands, else pass it."""
        if self._standing is not None and self._promise is not None and self._promise.step <= self._standing:
            self._asked = self._promise.proposal
            return [*self._tell_loop(), *map(ToLeader, self.asked())]
        return self._pass()

    def _pass(self) -> list[MemberAction]:
        if self._standing is None:
            return []
        assert self.view is not None
        first, self.step = self.step < 0, max(self.step, self._standing)
        self._standing = self._asked = None
        # A joiner waits for the first boundary of the job, so it is told at once and not with the next sign of life.
        passed = Passed(self.view, left=False)
        return [passed, *self._tell_loop(first)]

    def _tell_loop(self, first: bool = False) -> list[MemberAction]:
        """Returns a sign of life if the leader does not know the step loop, or after the first boundary. Joiners leave
        out the loops that the job has behind it, so the news does not wait for the next beat."""
        if self.loop == self._told_loop and not first:
            return []
        self._told_loop = self.loop
        return [ToLeader(self.heartbeat())]

    def heartbeat(self, divided: str = "") -> m.Heartbeat:
        return m.Heartbeat(self.step, divided=divided, loop=self.loop)

    # -- the leader ----------------------------------------------------------------------------------------------

    def from_leader(self, message: m.Message) -> list[MemberAction]:
        if self.phase in (Phase.LEFT, Phase.FAILED):
            return []
        if isinstance(message, m.Welcome):
            if self.incarnation in ("", message.incarnation):
                self.incarnation = message.incarnation
                return []
            self.phase = Phase.FAILED
            return [Failed(f"the leader of replica {self.replica} was started again, and this rank was not")]
        if isinstance(message, m.NewView):
            return self._install(message.view)
        if isinstance(message, m.Prepare):
            ok = self.phase is Phase.RUNNING and self.step < message.step
            if ok:
                self._promise = message
            return [ToLeader(m.Promise(message.proposal, ok, self.step))]
        if isinstance(message, m.Cancel):
            return self._release(message.proposal)
        if isinstance(message, m.Decision):
            return self._decided(message)
        if isinstance(message, m.Removed):
            self.phase = Phase.FAILED
            return [Failed(message.reason, message.ending)]
        if isinstance(message, m.Queued):
            return [JoinPending(message.reason, message.stage)]
        if isinstance(message, m.Registered) and self.preview is None and self.phase is Phase.JOINING:
            # All ranks keep the first one; a new coordinator would tell another.
            self.preview, self.loop_of_job = message.view, message.loop
            return [Known(message.view)]
        if isinstance(message, m.Behind) and self.phase is Phase.JOINING and message.loop > self.loop_of_job:
            self.loop_of_job = message.loop
            return [GoOn()]
        if isinstance(message, m.Dismissed) and not self.ran:
            return self._dismiss(message.reason)
        return []

    def _dismiss(self, reason: str) -> list[MemberAction]:
        if self.preview is None:  # the script still waits to hear of a job
            self.phase = Phase.FAILED
            return [Failed(reason)]
        self.phase = Phase.LEFT
        return [Passed(self.view or self.preview, left=True)]

    def _release(self, proposal: int) -> list[MemberAction]:
        if self._promise is not None and self._promise.proposal == proposal:
            self._promise = None
        if self._asked == proposal and self.phase is Phase.RUNNING:
            return self._ask_or_pass()  # a new connection brings the next proposal first, and it is promised by now
        return []

    def _decided(self, decision: m.Decision) -> list[MemberAction]:
        if decision.view is None or self._asked != decision.proposal or self.phase is not Phase.RUNNING:
            return self._release(decision.proposal)
        if decision.view.has(self.replica, self.incarnation):
            return self._install(decision.view)
        self.phase = Phase.LEFT
        self.view = decision.view
        return [Passed(self.view, left=True)]

    def _install(self, view: View) -> list[MemberAction]:
        if self.view is not None and view.epoch <= self.view.epoch:
            return []
        self._promise = None
        if not view.has(self.replica, self.incarnation):
            if not self.ran:
                self.phase, self.view = Phase.JOINING, None
                reason = "joins at a later boundary: the change that was to add this replica was given up"
                return [JoinPending(reason, m.Stage.JOINING)]
            self.phase = Phase.FAILED
            reason = f"the job went on without replica {self.replica} in epoch {view.epoch} ({view.why})"
            # If a change is given up by which this replica came in, ranks of it that had not run yet would join later.
            came_in = self.view is not None and self.view.epoch == self._came_in
            return [*([ToLeader(m.Finished(False, reason))] if came_in else []), Failed(reason)]
        self.phase, self.view, self._mine = Phase.CHANGING, view, None
        self._theirs = {epoch: told for epoch, told in self._theirs.items() if epoch >= view.epoch}
        return [Freeze(view)]

    def quiesced(self, epoch: int, progress: m.Progress) -> list[MemberAction]:
        """Note that the exchange stands still and holds `progress`; `epoch` is the one of the `Freeze` that this
        answers."""
        if self.phase is not Phase.CHANGING or self.view is None or epoch != self.view.epoch:
            return []
        first = self.view.step  # where the joiners come in
        loop = self.loop if first is None or first >= self._loop_began else self.loop - 1
        self._mine = progress = msgspec.structs.replace(progress, fresh=not self.ran, loop=loop)
        told = m.MemberProgress(self.replica, self.incarnation, self.view.epoch, progress)
        others = [replica for replica in self.view.replicas if replica != self.replica]
        return [*[ToMember(replica, told) for replica in others], *self._enter()]

    # -- the other members ---------------------------------------------------------------------------------------

    def from_member(self, message: m.MemberProgress) -> list[MemberAction]:
        if self.view is not None and message.epoch < self.view.epoch:
            return []
        told = self._theirs.setdefault(message.epoch, {})
        if message.replica in told or len(told) < MANY:
            told[message.replica] = message.progress
        while len(self._theirs) > AHEAD:
            del self._theirs[max(self._theirs)]
        return self._enter()

    def again(self, replica: int) -> list[MemberAction]:
        """Repeat over a new link to a member what may have been lost."""
        if self.view is None or self._mine is None or replica not in self.view.replicas:
            return []
        told = m.MemberProgress(self.replica, self.incarnation, self.view.epoch, self._mine)
        return [ToMember(replica, told)]

    def asked(self) -> list[m.Message]:
        """Returns the questions to the leader that it has not answered yet."""
        if self._asked is None or self._promise is None or self.phase is not Phase.RUNNING:
            return []
        return [m.AtBoundary(self._asked, later=0 < self._promise.loop < self.loop)]

    @property
    def quiescing(self) -> bool:
        """Whether this rank has not told its progress yet, so that it cannot say for whom it will wait."""
        return self.phase is Phase.CHANGING and self._mine is None

    def missing(self) -> tuple[int, ...]:
        """Returns the replicas whose progress a change of view waits for; empty without a change, or before this rank
        has told its own."""
        if self.phase is not Phase.CHANGING or self.view is None or self._mine is None:
            return ()
        told = self._theirs.get(self.view.epoch, {})
        return tuple(replica for replica in self.view.replicas if replica != self.replica and replica not in told)

    def fail(self) -> None:
        """Note that this rank cannot go on."""
        self.phase = Phase.FAILED

    def _enter(self) -> list[MemberAction]:
        if self.phase is not Phase.CHANGING or self.view is None or self._mine is None:
            return []
        theirs = self._theirs.get(self.view.epoch, {})
        if len(theirs) < len(self.view.members) - 1:  # as most messages find it, of which each member sends one
            return []
        told = {**theirs, self.replica: self._mine}
        if not all(replica in told for replica in self.view.replicas):
            return []
        progress = {replica: told[replica] for replica in self.view.replicas}
        self.phase = Phase.ENTERING
        if not self.ran:
            self.loop_of_job = max((told.loop for told in progress.values() if not told.fresh), default=0)
        return [EnterView(self.view, progress)]

    def entered(self, epoch: int, report: m.Report | None = None) -> list[MemberAction]:
        """Note that the exchange runs in the view of `epoch`, and tell the leader with the `report` of that."""
        if self.phase is not Phase.ENTERING or self.view is None or self.view.epoch != epoch:
            return []
        self.phase = Phase.RUNNING
        if not self.ran and self.view.step is not None:
            self.step = self.view.step - 1  # a joiner starts with that step
        self.ran, self._came_in = True, self._came_in or epoch
        return [ToLeader(m.Installed(epoch, report)), *self._pass()]
