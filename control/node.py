"""All that one rank does in the control plane, pure: its `Machine`, in rank 0 the replica's `Leader`, and what must be
told when. `ftcomm.control.agent` drives it with real sockets and time, `ftcomm.simulation` with simulated ones.

    up      the connection to the coordinator (rank 0), or to the leader of the replica
    down    in rank 0: the connections of the other ranks of the replica
    peers   links to this rank of the other replicas of the view
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from ftcomm.control import leader as lead
from ftcomm.control import member as mem
from ftcomm.control import messages as m
from ftcomm.control.actions import Failed, Freeze, Known, Passed, Queued, Resume
from ftcomm.control.blame import BOUNDARY, CHANGE
from ftcomm.control.detector import Detector
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Address, View


@dataclasses.dataclass(frozen=True)
class Up:
    message: m.Message


@dataclasses.dataclass(frozen=True)
class Down:
    rank: int
    message: m.Message


@dataclasses.dataclass(frozen=True)
class ToPeer:
    replica: int
    message: m.Message


@dataclasses.dataclass(frozen=True)
class LookAtWaits:
    """Somebody asks on whom the exchange waits; answer with `waits`."""


@dataclasses.dataclass(frozen=True)
class Acked:
    """The coordinator knows that this replica has finished."""


Action = Up | Down | ToPeer | Freeze | Resume | LookAtWaits | Passed | Queued | Known | Acked | Failed


KEPT = 1000  # reports while the coordinator is away; then the oldest go


class Node:
    """Not thread-safe. Times are seconds of any origin. Every method returns actions in order."""

    def __init__(
        self,
        replica: int,
        rank: int,
        ranks: int,
        incarnation: str,
        address: Address,
        timeouts: Timeouts,
        state: Callable[[Address], str] = lambda there: "",
    ) -> None:
        self.rank = rank
        self.machine = mem.Machine(replica)
        self.leader = lead.Leader(replica, incarnation, ranks, timeouts, state) if rank == 0 else None
        self.view: View | None = None  # that the exchange runs in
        self._timeouts = timeouts
        self._hello = m.Hello(rank, address)
        self._up = False
        self._ended: set[m.Suspect] = set()  # members whose end is known: said again to a coordinator that was away
        self._unsaid: deque[m.Report] = deque(maxlen=KEPT)  # reports made while nobody could hear them
        self._detector: Detector[tuple[int, str]] = Detector(timeouts.unheard)
        self._peers: set[tuple[int, str]] = set()  # (replica, incarnation) of those that we listen to
        self._silent: dict[tuple[int, str], float] = {}  # when we complained of it last
        self._above: Detector[str] = Detector(timeouts.unheard)  # of the leader, by its other ranks
        self._from_above = False  # it has spoken since the last tick
        self._up_refused = False  # whoever answers for it refuses
        self._leaderless = False  # neither its process nor its kernel is heard, which proves no end of it
        self._lasting: dict[str, m.Message] = {}  # what this rank has said to its leader once and for all
        self._unreachable: set[int] = set()  # whose memory we fail to reach
        self._reaching: tuple[int, ...] = ()  # whose memory we are about to reach
        self._waiting_since: tuple[tuple[int, int], float] | None = None  # (epoch, what), since when
        self._said = float("-inf")

    # -- connections ---------------------------------------------------------------------------------------------

    def start(self) -> list[Action]:
        """Once, before all else."""
        return self._do_leader(self.leader.from_rank(0, self._hello)) if self.leader is not None else []

    def up_opened(self) -> list[Action]:
        """The connection upwards is there, for the first time or again."""
        self._up, self._up_refused = True, False
        if self.leader is None:
            hello = msgspec.structs.replace(self._hello, incarnation=self.machine.incarnation)
            return [Up(hello), *self._said_again(), *self._said_late()]
        join = self.leader.join()
        if join is not None:  # and what it may not have heard, having been away
            return [Up(join), *([Up(m.Finished(True))] if self.leader.finished else []), *self._said_late()]
        return [Queued("not all ranks of this replica have started yet", m.Stage.WAITING)]

    def _said_again(self) -> list[Action]:
        """What a rank has said to its leader, and may have been lost with the connection."""
        again: list[m.Message] = list(self._lasting.values())
        if self.view is not None:
            again.append(m.Installed(self.view.epoch))
        return [Up(message) for message in (*again, *self.machine.asked())]

    def _said_late(self) -> list[Action]:
        view = self.machine.view
        self._ended = {x for x in self._ended if view is not None and view.has(x.replica, x.incarnation)}
        late: list[m.Message] = [*sorted(self._ended, key=lambda x: x.replica), *self._unsaid]
        self._unsaid.clear()
        return [Up(message) for message in late]

    def up_lost(self, reason: str, refused: bool = False, here: bool = False) -> list[Action]:
        """It is down, or cannot be made again, as (`refused`) nobody listens there any more: so it is if our own kernel
        (`here`) says so, and not another host. The coordinator may be away, but the replica lives and dies as one."""
        self._up = False
        self._up_refused = refused
        return self._orphaned(reason) if refused and here else []

    def _orphaned(self, reason: str) -> list[Action]:
        if self.leader is None and (self.view is not None or self.machine.preview is not None):
            return self._from_leader(m.Expelled(reason))
        return []

    def up_acknowledged(self, at: float) -> list[Action]:
        """The kernel at the other end of the connection upwards answers."""
        self._above.acknowledged("leader", at)
        return []

    def from_up(self, message: m.Message) -> list[Action]:
        self._from_above = True
        return self._do_leader(self.leader.from_coordinator(message)) if self.leader else self._from_leader(message)

    def from_rank(self, rank: int, message: m.Message, now: float) -> list[Action]:
        """In rank 0, from another rank of the replica."""
        if self.leader is None:
            return []
        self.leader.detector.heard(rank, now)
        return self._do_leader(self.leader.from_rank(rank, message))

    def rank_acknowledged(self, rank: int, at: float) -> list[Action]:
        """In rank 0: the kernel of another rank answers, whatever its process does."""
        if self.leader is not None:
            self.leader.detector.acknowledged(rank, at)
        return []

    def rank_lost(self, rank: int, reason: str) -> list[Action]:
        """In rank 0: the process of another rank has ended."""
        if self.leader is None:
            return []
        self.leader.detector.forget(rank)
        return self._do_leader(self.leader.rank_lost(rank, reason))

    def from_peer(self, message: m.Message, now: float) -> list[Action]:
        if isinstance(message, m.Alive):
            return self._heard(message, now)
        if isinstance(message, m.MemberProgress):
            return self._do_member(self.machine.from_member(message))
        if isinstance(message, m.Boundary) and self.leader is not None:
            return self._do_leader(self.leader.from_leader(message))
        return []

    def rank_refused(self, rank: int, reason: str) -> list[Action]:
        """In rank 0: another host refuses another rank, which was connected."""
        return self._do_leader(self.leader.rank_refused(rank, reason)) if self.leader is not None else []

    def peer_opened(self, replica: int) -> list[Action]:
        """The link to it is there, for the first time or again: say what may have been lost."""
        actions = self._do_member(self.machine.again(replica))
        return actions + self._do_leader(self.leader.again(replica)) if self.leader is not None else actions

    def peer_lost(self, replica: int, epoch: int, reason: str, proof: bool) -> list[Action]:
        """A member of the view of `epoch` cannot be reached, or (`proof`) its process is known to have ended."""
        for view in (self.view, self.machine.view):  # the second is of a change that is under way
            member = view.member(replica) if view is not None and view.epoch == epoch else None
            if member is not None:
                return self.tell(m.Suspect(replica, member.incarnation, reason, proof, self.rank))
        return []

    def peers_acknowledged(self, at: Mapping[int, float]) -> list[Action]:
        """When the kernels of members, by replica, were last known to answer: their processes may hold their
        interpreters, but the network leads there."""
        actions: list[Action] = []
        for life in sorted(self._peers):
            if life[0] in at:
                self._detector.acknowledged(life, at[life[0]])
                known = self._silent.get(life)
                if known is not None and at[life[0]] > known:
                    del self._silent[life]
                    actions += self.peer_back(life[0])
        return actions

    def peer_back(self, replica: int) -> list[Action]:
        """It can be reached again after all."""
        return self.tell(m.Reachable(replica))

    def _heard(self, alive: m.Alive, now: float) -> list[Action]:
        life = (alive.replica, alive.incarnation)
        if life not in self._peers:
            return []
        self._detector.heard(life, now)
        if life not in self._silent:
            return []
        del self._silent[life]
        return self.peer_back(alive.replica)

    def _listen(self, now: float) -> list[Action]:
        """Our sign of life to the members of the newest view, and complaints about those that give none."""
        view = self.machine.view
        me = self.machine.replica
        peers = {(x.replica, x.incarnation) for x in view.members if x.replica != me} if view is not None else set()
        for life in sorted(self._peers - peers):
            self._detector.forget(life)
            self._silent.pop(life, None)
        for life in sorted(peers - self._peers):  # in one order, so that a simulated history is one
            self._detector.heard(life, now)
        self._peers = peers
        alive = m.Alive(me, self.machine.incarnation)
        actions: list[Action] = [ToPeer(replica, alive) for replica, _ in sorted(peers)]
        for life, seconds in self._detector.silent(now).items():
            if not self.machine.ran:  # the others hear of a joiner when they come to its boundary, whenever that is
                self._detector.heard(life, now)
            elif view is not None and now - self._silent.get(life, float("-inf")) >= REPORT:
                self._silent[life] = now
                actions += self.peer_lost(life[0], view.epoch, f"silent for {seconds:.1f} s", proof=False)
        return actions

    # -- the user's code and the exchange ------------------------------------------------------------------------

    def boundary(self, step: int) -> list[Action]:
        """The user's code stands at the boundary of `step`, with no op in flight. `Passed` comes now or later."""
        return self._do_member(self.machine.boundary(step))

    def tell(self, message: m.Message) -> list[Action]:
        """Report, Ready, CaughtUp, Leave, Finished: to the leader."""
        return self._do_member([mem.ToLeader(message)])

    def _say(self, message: m.Message) -> list[Action]:
        if isinstance(message, m.Suspect) and message.proof:
            self._ended.add(message)
        if isinstance(message, m.Report) and not self._up:
            self._unsaid.append(message)
            return []
        if self.leader is None and isinstance(message, m.Ready | m.CaughtUp | m.Leave | m.Finished):
            self._lasting[type(message).__name__] = message
        return [Up(message)]

    def quiesced(self, epoch: int, progress: m.Progress) -> list[Action]:
        """The exchange stands still; `epoch` is that of the `Freeze` that is answered."""
        return self._do_member(self.machine.quiesced(epoch, progress))

    def wants(self, view: View) -> bool:
        """Whether the `Resume` for `view` is still to be carried out."""
        return self.machine.view is view and self.machine.phase is mem.Phase.RESUMING

    def reaching(self, replicas: tuple[int, ...]) -> list[Action]:
        """Whose memory we are about to reach: who is waited for, if that takes long, and not complained of."""
        self._reaching = replicas
        return []

    def unreachable(self, epoch: int, replica: int, reason: str) -> list[Action]:
        self._unreachable.add(replica)
        return self.peer_lost(replica, epoch, f"its memory cannot be reached: {reason}", proof=False)

    def resumed(self, view: View) -> list[Action]:
        """The exchange runs in `view`."""
        self.view = view
        forgiven = [action for replica in sorted(self._unreachable) for action in self.peer_back(replica)]
        self._unreachable.clear()
        self._reaching = ()
        return forgiven + self._do_member(self.machine.resumed(view.epoch))

    def stalled(self, epoch: int, op: int, waiting_on: tuple[int, ...]) -> list[Action]:
        """The exchange has made no progress for its deadline; to be repeated every `REPORT` seconds."""
        return self.tell(m.Stalled(self.rank, epoch, op, waiting_on, True))

    def waits(self, op: int, waiting_on: tuple[int, ...]) -> list[Action]:
        """What the exchange waits for; on nobody if it does not wait. Answers `LookAtWaits`."""
        what, missing = self._waiting()
        if missing:
            op, waiting_on = what, missing
        return self.tell(m.Stalled(self.rank, self._epoch(), op, waiting_on, False))

    def failed(self, reason: str) -> list[Action]:
        """This rank cannot go on."""
        if self.machine.phase is mem.Phase.FAILED:
            return []
        self.machine.fail()
        if self.leader is not None:
            said = self._do_leader(self.leader.rank_lost(0, reason))
        else:
            said = [Up(m.Finished(False, reason))]
        return [*said, Failed(reason)]

    @property
    def all_finished(self) -> bool:
        """Whether nobody is left in the replica whose end is to be waited for, as far as this rank can know."""
        return self.leader.finished if self.leader is not None else not self._up

    # -- time ----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """To be called every `Timeouts.beat`: our sign of life, and the waits that are too long."""
        if self.leader is None:
            ended = self._look_up(now)
            divided = "does not hear its leader" if self._leaderless else ""
            actions: list[Action] = [Up(m.Heartbeat(self.machine.step, divided=divided)), *ended]
        else:
            self.leader.from_rank(0, m.Heartbeat(self.machine.step))
            actions = self._do_leader(self.leader.tick(now))
        return [*actions, *self._listen(now), *self._watch(now)]

    def _look_up(self, now: float) -> list[Action]:
        """A leader whose host is gone tells its ranks nothing any more, and so does one that is cut off from them for a
        while. So they wait for it, until somebody knows that the job goes on without them (`passed_by`), at the
        longest for as long as an op."""
        if self._from_above:
            self._from_above = False
            self._above.heard("leader", now)
        silent = self._above.silent(now)
        self._leaderless = bool(silent) or self._up_refused
        for leader, seconds in silent.items():
            if seconds > self._timeouts.give_up:
                self._above.forget(leader)
                return self._orphaned(f"the leader of the replica is lost: silent for {seconds:.1f} s")
        return []

    def passed_by(self, alive: m.Message) -> m.NewView | None:
        """What to answer a peer: the view that we run in, to one that is in none any more. Its leader may be gone, who
        would tell it."""
        if not isinstance(alive, m.Alive) or self.view is None or self.view.has(alive.replica, alive.incarnation):
            return None
        return m.NewView(self.view)

    def from_beside(self, message: m.Message) -> list[Action]:
        """What a member of our view has answered: a later one, perhaps, in which we are not."""
        if not (self._leaderless or self._up_refused) or not isinstance(message, m.NewView):
            return []
        known, later = self.machine.view, message.view
        me = self.machine
        out = known is not None and later.epoch > known.epoch and not later.has(me.replica, me.incarnation)
        return self._from_leader(message) if out else []

    def _watch(self, now: float) -> list[Action]:
        """A change of view or a boundary that does not come about is a stall like that of an op."""
        what, missing = self._waiting()
        key = (self._epoch(), what)
        if not missing or not self.machine.ran:  # a joiner waits for everybody's computation, however long that takes
            self._waiting_since = None
        elif self._waiting_since is None or self._waiting_since[0] != key:
            self._waiting_since = (key, now)
        elif now - self._waiting_since[1] > self._deadline(what) and now - self._said >= REPORT:
            self._said = now
            return self.stalled(self._epoch(), what, missing)
        return []

    def _deadline(self, what: int) -> float:
        """A view without a lost member takes milliseconds; at a boundary one waits for somebody's computation."""
        view = self.machine.view
        at_once = what == CHANGE and view is not None and view.proposal == 0
        return self._timeouts.op_floor if at_once else self._timeouts.op

    def _waiting(self) -> tuple[int, tuple[int, ...]]:
        missing = self.machine.missing()
        if self.machine.phase is mem.Phase.RESUMING:
            missing = self._reaching or tuple(self._unreachable)
        if missing:
            return CHANGE, missing
        return (
            BOUNDARY,
            self.leader.waiting() if self.leader is not None and self.machine.phase is mem.Phase.RUNNING else (),
        )

    def _epoch(self) -> int:
        return self.machine.view.epoch if self.machine.view is not None else 0

    # -- between the machines ------------------------------------------------------------------------------------

    def _from_leader(self, message: m.Message) -> list[Action]:
        if isinstance(message, m.FinishAck):
            return [Acked()]
        if isinstance(message, m.WhoWaits):
            return [LookAtWaits()]
        return self._do_member(self.machine.from_leader(message))

    def _do_leader(self, actions: list[lead.Action]) -> list[Action]:
        result: list[Action] = []
        for action in actions:
            if isinstance(action, lead.ToCoordinator):
                result += self._say(action.message)
            elif isinstance(action, lead.ToLeader):
                result.append(ToPeer(action.replica, action.message))
            elif action.rank == 0:
                result += self._from_leader(action.message)
            else:
                result.append(Down(action.rank, action.message))
        return result

    def _do_member(self, actions: list[mem.Action]) -> list[Action]:
        result: list[Action] = []
        for action in actions:
            if isinstance(action, mem.ToLeader):
                if self.leader is not None:
                    result += self._do_leader(self.leader.from_rank(0, action.message))
                else:
                    result += self._say(action.message)
            elif isinstance(action, mem.ToMember):
                result.append(ToPeer(action.replica, action.message))
            else:
                result.append(action)
        return result
