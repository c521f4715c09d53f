"""The coordinator's knowledge of its job: the views, who is connected, who joins, what is said of whom. Pure."""

from __future__ import annotations

from collections.abc import Collection, Set

from ftcomm.control import messages as m
from ftcomm.control.blame import FRESH, Blame
from ftcomm.control.coordinator_actions import Conn
from ftcomm.control.detector import Detector
from ftcomm.control.finishes import Finishes
from ftcomm.control.job_views import JobViews
from ftcomm.control.joiner_messages import ALONE
from ftcomm.control.joiners import Joiners
from ftcomm.control.leader_links import LeaderLinks
from ftcomm.control.probe_schedule import Suspicions
from ftcomm.control.running_time import RunningTime
from ftcomm.control.severed import SeveredPairs
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Life, Member, View

EARLY = 100  # ticks: as many as come in ten heartbeat timeouts, if they come in time; connections are heard in each


class KnownJob:
    """The knowledge that the parts of a `Coordinator` share, and what follows from it. Not thread-safe. All times are
    seconds."""

    def __init__(
        self,
        replicas: int,
        ranks_per_replica: int,
        timeouts: Timeouts,
        views: list[View],
        now: float,
        finishes: Finishes,
    ) -> None:
        """`views` are the last two that were persisted, and `finishes` what was stored beside them. If those are of a
        later view, somebody has put an older store there, whose lives may have finished and be members no more."""
        self.expected = replicas
        self.ranks_per_replica = ranks_per_replica
        self.timeouts = timeouts
        self.job = JobViews(views)
        if views and finishes.epoch <= self.job.epoch:
            self.job.finished = {replica: now for replica, life in finishes.lives if self.job.counts(replica, life)}
            again = {x.replica for x in self.job.running if (x.replica, x.incarnation) not in finishes.lives}
            self.job.completed = set(finishes.completed) - again  # another life of it has begun since
        # Those that had finished, as is stored, and may still wait to hear that this is known.
        self.unacknowledged: set[Life] = {
            (x.replica, x.incarnation)
            for view in self.job.in_force
            for x in view.members
            if x.replica in self.job.finished and self.job.counts(x.replica, x.incarnation)
        }
        # What is said of others counts in it: while this process is stopped, the members may be, too.
        self.ran = RunningTime(min(REPORT, 2 * timeouts.beat))
        self.detector: Detector[int] = Detector(timeouts.silence)
        self.links = LeaderLinks()
        self.joiners = Joiners()  # replicas in no view, or in one that no member will install
        self.blame = Blame(timeouts.hold_down_among(replicas), timeouts.grace, timeouts.op)
        self.suspicions = Suspicions(timeouts.op, FRESH)
        self.severed = SeveredPairs(timeouts.hold_down, timeouts.op)
        self.leaving: set[int] = set()
        self.draining = False
        self.done = False
        self.unfit = False  # this coordinator decides nothing more
        self.unheard = ALONE if self.job.unfinished_holders else None  # what joiners wait for, if not for a boundary
        self.unvisited = bool(views)  # no member of the job has come to this coordinator yet
        self.held: dict[Conn, m.Withdrawn] = {}  # what is to be decided when it is not too early any more
        self.held_up: dict[int, float] = {}  # by replica: when it lived and was mute last
        self.not_reconnected: set[Life] = set()  # members that catch up according to the store, and have not come yet
        self._to_speak: set[Life] | None = None  # members that catch up while all holders may be lost, see `note_loss`
        self._asked = 0.0  # s that this process had run when `_to_speak` was made
        self._begun = now
        self._met = not views  # all known members have come, or had the time to, see `is_early`
        self._ticks = 0  # ticks that have come until `_met`
        for member in self.job.running:
            if not self.job.contributes(member.replica, member.incarnation):
                self.not_reconnected.add((member.replica, member.incarnation))
        for member in self.job.running:
            self.detector.heard(member.replica, now)

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self.job.view

    @property
    def alone(self) -> bool:
        """Whether no contributing member can be heard."""
        return self.unheard is ALONE

    @property
    def lives(self) -> set[Life]:
        """The lives that run, want to join, or may wait to hear that it is known that they have finished."""
        here = {(member.replica, member.incarnation) for member in (*self.job.running, *self.joiners)}
        return here | self.unacknowledged

    @property
    def loop(self) -> int:
        """The step loop that the job is in, as far as a member has said."""
        return max((link.loop for link in self.links.values() if link.epoch), default=0)

    def ticked(self) -> None:
        """Note that a tick has come, on a host where they may be late."""
        self._ticks += not self._met

    def is_early(self, now: float) -> bool:
        """Whether it is too early to decide. A restarted coordinator knows only its store. That may be older than the
        job: a member that has caught up since says so when it connects. So nothing is decided before all members have
        connected, or have had a heartbeat timeout for it.

        No member could connect while this process was stopped, so the timeout begins anew after a pause. On a host
        where ticks are always late it would never end, so it ends after `EARLY` ticks.
        """
        if not self._met:
            here = {(link.replica, link.incarnation) for link in self.links.values()}
            all_here = here >= {(member.replica, member.incarnation) for member in self.job.running}
            since = max(self._begun, self.detector.since(now))
            self._met = all_here or now - since > self.timeouts.heartbeat or self._ticks > EARLY
        return not self._met

    def divided(self) -> dict[int, tuple[str, float]]:
        """The members whose leaders do not hear one of their ranks: the reason, and since when they say so."""
        members = (
            link for link in self.links.values() if link.divided and self.job.counts(link.replica, link.incarnation)
        )
        return {link.replica: (link.divided, link.since) for link in members if link.replica not in self.job.finished}

    def note_loss(self, lost: set[int]) -> None:
        """Note that `lost` seem to be lost. If they are all known holders of the state, the others have an op timeout
        to speak, from the first such note on; else the job goes on. To be called before `others_may_hold`."""
        if not self._are_all_holders(lost):
            self.not_lost()
        elif self._to_speak is None:
            holders = self.job.unfinished_holders
            others = (member for member in self.job.running if member.replica not in holders)
            self._to_speak = {(member.replica, member.incarnation) for member in others}
            self._asked = self.ran.seconds

    def others_may_hold(self, lost: set[int]) -> bool:
        """Whether `lost` are all known holders of the state, while another member may hold it: the store has it
        catching up and it has not connected since; its leader does not hear all of its ranks; or it has not spoken
        since that was first noted, an op timeout ago at most, so that its `CaughtUp` may be on the way."""
        if not self._are_all_holders(lost):
            return False
        late = self.ran.seconds - self._asked > self.timeouts.op
        to_speak = self._to_speak if self._to_speak and self.job.unfinished_holders and not late else set[Life]()
        silent = {replica for replica, life in self.not_reconnected | to_speak if self.job.counts(replica, life)}
        return bool((silent | self.divided().keys()) - lost)

    def _are_all_holders(self, lost: set[int]) -> bool:
        """Whether `lost` are all known holders of the state, and not only replicas that have finished."""
        return self.job.unfinished_holders <= lost and not lost <= set(self.job.finished)

    def not_lost(self) -> None:
        """Note that the job goes on. A later loss of all holders is another one, before which all speak again."""
        self._to_speak = None

    def spoke(self, life: Life) -> None:
        """Note that something has come from a process, and before it what that had said earlier. What it has said since
        may still be on the way."""
        if self._to_speak is not None:
            self._to_speak.discard(life)

    def present(self, replicas: Collection[int], doubtful: Set[int], now: float) -> set[int]:
        """Returns those of `replicas` that have just given a sign of life. After a restart all count as heard, so they
        must have a connection, too."""
        within = self.detector.within
        here = {x for x in replicas if self.links.conn_of(x) is not None and within(x, self.timeouts.presence, now)}
        return here - doubtful

    def life(self, replica: int, incarnation: str) -> Member | None:
        """A member of a view in force, or a joiner."""
        known = (*(x for view in self.job.in_force for x in view.members), *self.joiners)
        return next((x for x in known if (x.replica, x.incarnation) == (replica, incarnation)), None)

    def conn_of(self, replica: int) -> Conn:
        conn = self.links.conn_of(replica)
        assert conn is not None, f"replica {replica} has no connection"
        return conn
