"""Changes membership at a step boundary: who joins, begins to contribute and leaves once all have promised. Pure."""

from __future__ import annotations

from ftcomm.control import messages as m
from ftcomm.control.coordinator_actions import CoordinatorAction, Send
from ftcomm.control.decisions import Decisions
from ftcomm.control.known_job import KnownJob
from ftcomm.control.leader_links import LeaderLink
from ftcomm.control.reconfiguration import Proposal, wanted
from ftcomm.control.views import Member, View


class BoundaryChanges:
    """The change that is under way, of which there is one at most."""

    def __init__(self, known: KnownJob, decisions: Decisions, lifetime: int) -> None:
        """No earlier run of this job's coordinator had the number `lifetime`, so a proposal of a dead one is never
        taken for one of ours."""
        self._known, self._decisions = known, decisions
        self.proposal: Proposal | None = None
        self._margin = 1  # a change is proposed so many steps ahead; doubled as long as members are faster
        self._lifetime, self._proposals = lifetime & 0xFFFF_FFFF, 0

    def propose(self) -> list[CoordinatorAction]:
        """Ask every leader for its promise if there is a change to make and none is under way."""
        return [*self.send_on(), *self._prepare()]

    def _prepare(self) -> list[CoordinatorAction]:
        known = self._known
        view = known.view
        if view is None or self.proposal is not None or not known.job.settled or known.done:
            return []
        here = set(view.replicas)
        if here & set(known.job.finished) or any(known.links.conn_of(replica) is None for replica in here):
            return []
        joins, contributes, leaves = self.wanted(view)
        if not (joins or contributes or leaves):
            return []
        self._proposals += 1
        step = max(known.links[known.conn_of(replica)].step for replica in here) + self._margin
        number = self._proposals << 32 | self._lifetime
        loops = {known.links[known.conn_of(replica)].loop for replica in joins} - {0}
        self.proposal = Proposal(number, step, joins, contributes, leaves)
        prepare = m.Prepare(number, view.epoch, step, min(loops, default=0), tuple(joins.values()))
        return [Send(known.conn_of(replica), prepare) for replica in view.replicas]

    def wanted(self, view: View) -> tuple[dict[int, Member], frozenset[int], frozenset[int]]:
        """The replicas to join, to begin to contribute and to leave after `view`."""
        known = self._known
        return wanted(view, known.joiners.waiting, known.job.caught_up, known.leaving, known.draining)

    def promised(self, link: LeaderLink, promise: m.Promise) -> list[CoordinatorAction]:
        known = self._known
        link.step = max(link.step, promise.step)
        proposal, view = self.proposal, known.view
        if proposal is None or view is None or known.done or promise.proposal != proposal.number:
            return []
        if not promise.ok:
            self.postpone()
            return [*self.cancel(), *self.propose()]
        proposal.promised.add(link.replica)
        if proposal.promised < set(view.replicas):
            return []
        self.proposal = None
        for replica in proposal.joins:
            known.joiners.drop(replica)
        known.job.caught_up -= proposal.contributes
        members = proposal.applied(view.members)
        return self._decisions.decide(members, proposal.step, proposal.why(), proposal.number)

    def cancel(self) -> list[CoordinatorAction]:
        if self.proposal is None or self._known.view is None:
            return []
        number, self.proposal = self.proposal.number, None
        conns = [self._known.links.conn_of(replica) for replica in self._known.view.replicas]
        return [Send(conn, m.Cancel(number)) for conn in conns if conn is not None]

    def send_on(self) -> list[CoordinatorAction]:
        """Send joiners on that wait in a step loop which is over. A member holds the others up on its way to theirs."""
        known = self._known
        conns = [known.conn_of(replica) for replica in known.joiners.waiting]
        late = [conn for conn in conns if 0 < known.links[conn].loop < known.loop]
        actions: list[CoordinatorAction] = []
        for conn in late:
            replica = known.links[conn].replica
            known.joiners.go_on(replica)
            if self.proposal is not None and replica in self.proposal.joins:
                actions += self.cancel()
            actions.append(Send(conn, m.Behind(known.loop)))
        return actions

    def installed(self, replica: int, epoch: int) -> list[CoordinatorAction]:
        known = self._known
        if known.view is None or epoch != known.view.epoch:
            return []
        known.job.installed.add(replica)
        if known.job.settled:
            known.severed.entered(epoch)
        if known.job.settled and known.view.proposal:  # a view after a withdrawn change says nothing of the next
            self._margin = 1
        return self.propose()

    def forget(self, replica: int) -> list[CoordinatorAction]:
        """Forget a joiner that does not want to join any more."""
        self._known.joiners.drop(replica)
        if self.proposal is not None and replica in self.proposal.joins:
            return [*self.cancel(), *self.propose()]
        return []

    def postpone(self) -> None:
        """Note that members were faster than a proposal."""
        self._margin = min(2 * self._margin, 1 << 20)
