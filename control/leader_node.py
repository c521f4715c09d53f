"""All that the leader of a replica does in the control plane. It is pure. It holds the `Leader`, and knows what must be
told when, and what again. It runs in a process of its own (`ftcomm.control.leader_process`); in that of shard 0, if the
replica has no other rank (`ftcomm.control.rank_with_leader`).

    coordinator   the connection to it
    ranks         the connections of all ranks of the replica. Shard 0 has the links to the other leaders, so what goes
                  between leaders goes through it
"""

from __future__ import annotations

from collections.abc import Callable

from ftcomm.control import leader as lead
from ftcomm.control import messages as m
from ftcomm.control.leader import NAMED, ToCoordinator, ToRank
from ftcomm.control.outbox import Outbox
from ftcomm.control.running_time import RunningTime
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View

LeaderNodeAction = ToCoordinator | ToRank

NOT_ALL = m.Queued("not all ranks of this replica have started yet", m.Stage.WAITING)


class LeaderNode:
    """The state machine of the leader of one replica. Not thread-safe. Times are seconds of any origin. Every method
    returns actions in order."""

    def __init__(
        self,
        replica: int,
        incarnation: str,
        ranks: int,
        timeouts: Timeouts,
        state: Callable[[Address], str] = lambda there: "",
        processes: str = "",
    ) -> None:
        """`state` and `processes` are as of `Leader`."""
        self.leader = lead.Leader(replica, incarnation, ranks, timeouts, state, processes)
        self._timeouts = timeouts
        self._up = False  # there is a connection to the coordinator
        self._outbox = Outbox()
        self._ran = RunningTime()
        self._heard = False  # the coordinator has spoken since the last tick
        self._heard_at = 0.0  # when the coordinator has spoken last, in seconds of `_ran`
        self._waits = m.BoundaryWaits()  # the waits at the boundary, as shard 0 was told
        self._told_finished = False
        self._news: m.Queued | None = None  # the news that the connection to the coordinator is down

    # -- the coordinator -----------------------------------------------------------------------------------------

    def opened(self) -> list[LeaderNodeAction]:
        """Note that the connection to the coordinator is there, for the first time or again."""
        # That is no sign of it: a coordinator that sends nothing decides nothing, as its views are older than the job.
        self._up, self._news = True, None
        join = self.leader.join()
        if join is None:
            return [ToRank(0, NOT_ALL)]
        finished = [m.Finished(True)] if self.leader.finished else []
        late = self._outbox.late(self.leader.view)  # what the coordinator may have missed
        return [ToCoordinator(message) for message in (join, *finished, *late)]

    def lost(self, news: m.Queued | None = None) -> list[LeaderNodeAction]:
        """Note that the connection to the coordinator is down. It may be away; the replica trains on. Ranks that are in
        no view are told the `news` of it."""
        self._up = False
        if news is None or news == self._news or self.leader.view is not None:
            return []
        self._news = news
        return [ToRank(shard, news) for shard in range(self.leader.ranks)]

    def refused(self, reason: str) -> list[LeaderNodeAction]:
        """Note that the coordinator refuses this replica, and would do so again."""
        if self.leader.view is not None:
            return []  # the process at its address may know nothing of the job
        return self._do(self.leader.from_coordinator(m.Removed(reason)))

    def from_coordinator(self, message: m.Message) -> list[LeaderNodeAction]:
        self._heard = True
        return self._do(self.leader.from_coordinator(message))

    # -- the ranks -----------------------------------------------------------------------------------------------

    def turned_away(self, message: m.Message) -> m.Welcome | None:
        """Returns the answer to the first message of a connection that takes the place of none; None if it is that of a
        rank of this replica. The ranks of a replica live and die as one, so none goes on with the next life of another:
        it reads in the answer that this is one, and ends."""
        ours = isinstance(message, m.Hello) and message.incarnation in ("", self.leader.incarnation)
        return None if ours else self.leader.welcome

    def from_rank(self, shard: int, message: m.Message, now: float) -> list[LeaderNodeAction]:
        """Take a message that a rank has sent over its connection, which was not `turned_away`."""
        self.leader.detector.heard(shard, now)
        return self.told(shard, message)

    def told(self, shard: int, message: m.Message) -> list[LeaderNodeAction]:
        """Take a message from a rank, maybe one of this process, which cannot be silent."""
        if shard == 0 and isinstance(message, m.Boundary):
            return self._do(self.leader.from_leader(message))
        if shard == 0 and isinstance(message, m.Linked):
            return self._do(self.leader.again(message.replica))
        if isinstance(message, m.Hello):
            return self._greeted(shard, message)
        return self._do(self.leader.from_rank(shard, message))

    def _greeted(self, shard: int, hello: m.Hello) -> list[LeaderNodeAction]:
        """Take in a rank, for the first time or again, and repeat what is told to it alone."""
        if shard == 0:
            self._waits, self._told_finished = m.BoundaryWaits(), False
        actions = self._do(self.leader.from_rank(shard, hello))
        not_all = NOT_ALL if shard == 0 and self._up and len(self.leader.addresses) < self.leader.ranks else None
        news = self._news or not_all
        return [*actions, ToRank(shard, news)] if news is not None and self.leader.view is None else actions

    def rank_acknowledged(self, shard: int, at: float) -> list[LeaderNodeAction]:
        """Note that the kernel of a rank answers, whatever its process does."""
        self.leader.detector.acknowledged(shard, at)
        return []

    def rank_lost(self, shard: int, reason: str) -> list[LeaderNodeAction]:
        """Note that the process of a rank has ended."""
        self.leader.detector.forget(shard)
        return self._do(self.leader.rank_lost(shard, reason))

    def rank_refused(self, shard: int, reason: str) -> list[LeaderNodeAction]:
        """Note that another host refuses a rank, which was connected."""
        return self._do(self.leader.rank_refused(shard, reason))

    def agent_heard(self, shards: range, now: float) -> list[LeaderNodeAction]:
        """Note that the agent of the host of some ranks has spoken."""
        self.leader.agents.heard(shards, now)
        return []

    def agent_acknowledged(self, shards: range, at: float) -> list[LeaderNodeAction]:
        """Note that the kernel of such a host answers, which is also that of the ranks."""
        self.leader.agents.acknowledged(shards, at)
        for shard in shards:
            self.leader.detector.acknowledged(shard, at)
        return []

    @property
    def views(self) -> tuple[View | None, View | None]:
        """The views in which it knows where all ranks are, the best first."""
        return self.leader.view, self.leader.preview

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[LeaderNodeAction]:
        """Send signs of life. To be called every `Timeouts.beat`."""
        self._ran.at(now)
        if self._heard:
            self._heard, self._heard_at = False, self._ran.seconds
        seconds = self._ran.seconds - self._heard_at  # the coordinator speaks every beat
        missing = tuple(self.leader.not_come()[:NAMED])
        return self._do(self.leader.tick(now, seconds if seconds > self._timeouts.heartbeat else 0.0), missing)

    # -- to the others -------------------------------------------------------------------------------------------

    def _do(self, actions: list[lead.LeaderAction], missing: tuple[int, ...] | None = None) -> list[LeaderNodeAction]:
        """Returns what is to be sent. `missing` are the ranks that have not come to a boundary, if this is the moment
        to say so."""
        result: list[LeaderNodeAction] = []
        waits, known = self.leader.waiting(), self._waits
        ranks = known.ranks if missing is None else missing
        if waits != known.replicas or ranks != known.ranks:
            # Said first: a rank that has passed a boundary waits there for nobody.
            self._waits = m.BoundaryWaits(waits, ranks)
            result.append(ToRank(0, self._waits))
        for action in actions:
            if isinstance(action, lead.ToPeerLeader):
                result.append(ToRank(0, m.ForLeader(action.replica, action.message)))
            elif isinstance(action, ToCoordinator):
                result += [action] if self._outbox.says(action.message, self._up) else []
            else:
                result.append(action)
        if self.leader.finished and not self._told_finished:
            self._told_finished = True
            result.append(ToRank(0, m.AllFinished()))
        return result
