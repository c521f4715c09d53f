"""Removes members that are not proved to have ended: silent, divided and refused ones, and those that hold others up.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set

from ftcomm.control import messages as m
from ftcomm.control.blame import FRESH, Culprit, Removal
from ftcomm.control.boundary_changes import BoundaryChanges
from ftcomm.control.coordinator_actions import Close, CoordinatorAction, Log, Persist, Send
from ftcomm.control.known_job import KnownJob
from ftcomm.control.liveness import described, leader_described
from ftcomm.control.lost_members import LostMembers
from ftcomm.control.suspects import Suspects
from ftcomm.control.timeouts import REPORT
from ftcomm.control.unmissed_leaders import UnmissedLeaders
from ftcomm.control.views import Address

# s that others may wait for a finished member, so that the end of a job needs no view per member
LINGER = 2.0


class Removals:
    """The verdicts without proof. No member is removed while no holder of the state is known to be whole."""

    def __init__(
        self,
        known: KnownJob,
        changes: BoundaryChanges,
        lost: LostMembers,
        suspects: Suspects,
        state: Callable[[Address], str],
    ) -> None:
        """`state` tells what the process at an address does, where this host can see it."""
        self._known, self._lost, self._suspects, self._state = known, lost, suspects, state
        self._unmissed = UnmissedLeaders(known, changes)
        self._doubted = float("-inf")  # when last no holder of the state was known to be whole

    def due(self, silent: Mapping[int, float], now: float) -> list[CoordinatorAction]:
        """Remove who is lost by now. `silent`: the members that are not heard, and for how long."""
        known = self._known
        ran, actions = known.ran.seconds, list[CoordinatorAction]()
        lost: dict[int, str] = {}
        unmissed = self._unmissed.due(now)
        asked = known.suspicions.asked(ran)  # their silence is decided on with the proof against them
        for replica, seconds in silent.items():
            conn = known.links.conn_of(replica)
            if conn is not None and not known.job.counts(replica, known.links[conn].incarnation):
                known.detector.forget(replica)
                actions += [Close(conn), *self._suspects.disconnected(conn, now)]
            elif replica not in {*known.job.finished, *asked} and self._corroborated(replica, silent):
                lost[replica] = f"silent for {seconds:.1f} s"
        lingered = {replica for replica, since in known.job.finished.items() if now - since > LINGER}
        awaited = known.blame.awaited(ran)
        finished = {replica: "finished" for replica in lingered if known.job.needs(replica) or replica in awaited}
        if finished and known.job.running:  # otherwise nobody waits for them
            return actions + self._lost.lose(finished, proved=True)
        if any(known.job.is_member(replica) for replica in lingered) and known.blame.asks(ran):
            actions += self._ask()  # it left with all others, of which one may have missed its last word
        divided = known.divided()
        refused = {life[0]: why for life, why in known.suspicions.refusals(ran).items() if known.job.counts(*life)}
        ripe = {replica: why for replica, (why, since) in divided.items() if ran - since > known.timeouts.hold_down}
        holders = known.job.unfinished_holders
        whole = holders - set(silent) - set(divided) - set(refused)
        if holders and not whole:
            self._doubted = ran  # the network may be cut, with those that only catch up on this side
            doubtful = {replica: why for replica, (why, _) in divided.items()} | refused
            return actions + (self._lost.refuse_to_remove({**doubtful, **lost}) if ripe or lost or refused else [])
        if ran - self._doubted > known.timeouts.heartbeat:
            lost = {**ripe, **lost}
        culprits = {} if lost or not whole else self._culprit(now, divided.keys() | refused.keys()) or unmissed
        lost = lost or {replica: culprit.why for replica, culprit in culprits.items()}
        if not lost:
            here = [member.replica for member in known.job.running]
            late = bool(whole) and known.severed.ripe(ran, known.present(here, divided.keys() | refused.keys(), now))
            return actions + self._suspects.reconnect() if late else actions
        decided = self._lost.lose(lost, proved=False)
        if not any(isinstance(action, Persist) for action in decided):
            return actions + decided
        # None of them has told its end: their launcher may have to end them.
        for replica, reason in lost.items():
            culprit = culprits.get(replica, Culprit(Removal.SILENCE, reason, silent.get(replica, 0.0)))
            decided.append(removed(replica, culprit.removal, reason, culprit.lasted))
        return [*actions, *decided]

    def _corroborated(self, replica: int, silent: Collection[int]) -> bool:
        """Whether a contributing member that speaks misses the replica, too. Otherwise the network of the coordinator
        may be the cause."""
        known = self._known
        if known.view is None or not known.job.is_member(replica):
            return False
        return any(
            by in known.view.contributing and by not in silent and known.links.conn_of(by) is not None
            for by in known.blame.accusers(replica, known.ran.seconds)
        )

    def _culprit(self, now: float, doubtful: Set[int]) -> dict[int, Culprit]:
        """Choose whom to remove by the complaints of members. Of two that do not reach each other it is the `doubtful`
        one, a rank of which others miss, too."""
        known = self._known
        if known.view is None:
            return {}
        present = known.present(known.view.replicas, doubtful, now)
        says = {link.replica: link.mute for link in known.links.values() if link.mute}
        mute, unheard = known.detector.mute(now), known.detector.unheard(now)
        ran = known.ran.seconds
        known.held_up.update(dict.fromkeys([*says, *mute], ran))  # one message in between does not change that
        # Longer than a report holds: its sender may fall mute before it can say that the op goes on.
        lately = max(known.timeouts.op_floor, FRESH + REPORT)
        held = {replica for replica, last in known.held_up.items() if ran - last <= lately}
        # A member that was mute before this process stood still, and has not spoken since, is so as far as is known.
        quiet = {replica: seconds for replica, seconds in unheard.items() if replica in held} | mute
        says.update((replica, self._described(replica, seconds)) for replica, seconds in quiet.items())
        return known.blame.culprit(ran, known.view.contributing, present, says, held | unheard.keys())

    def _described(self, replica: int, seconds: float) -> str:
        """Describe a member that lives and has not spoken for so many seconds."""
        member = self._known.view.member(replica) if self._known.view is not None else None
        if member is not None and len(member.ranks) > 1:
            return leader_described(seconds)
        return described(seconds, self._state(member.ranks[0]) if member is not None else "")

    def _ask(self) -> list[CoordinatorAction]:
        """Ask all members for whom they wait."""
        known = self._known
        conns = [known.links.conn_of(member.replica) for member in known.job.running]
        return [Send(conn, m.WhoWaits()) for conn in conns if conn is not None]

    def stalled(self, by: int, stall: m.Stalled) -> list[CoordinatorAction]:
        known = self._known
        if all(stall.epoch != view.epoch for view in known.job.in_force):
            return []
        here = {replica for view in known.job.in_force for replica in view.replicas}
        # A rank that answers may wait for another rank of its replica, which reports its own wait.
        waiting_on = tuple(x for x in stall.waiting_on if x in here and (x != by or not stall.due))
        if not known.blame.stalled(by, stall.shard, stall.op, waiting_on, stall.due, known.ran.seconds, stall.lasted):
            return []
        return self._ask()


def removed(replica: int, removal: Removal, reason: str, lasted: float = 0.0) -> Log:
    """Tell the launcher of a replica that its process may live, and has to be ended. `lasted`: the seconds for which
    the others have waited, as far as known."""
    fields: dict[str, object] = {
        "replica": replica,
        "removal": removal.value,
        "reason": reason,
        "lasted": round(lasted, 1),
    }
    return Log("removed", fields)
