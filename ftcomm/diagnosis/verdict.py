"""Judges why a job stands still, from facts of all its ranks. Pure.

Ops say whom they wait for, and so do step boundaries, votes inside a replica, and messages. The waits are followed to a
rank that waits for nobody: it holds up all the others, and what its process and its stacks say is the verdict. The
waits may also go around in a circle. If the ranks are in different groups, or wait for messages, that is a deadlock of
their scripts. If all are in one op, which all have called, the network holds it up.

Where nothing passes between ranks that wait for each other, that comes first: nobody can say what a rank does that
nobody reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import msgspec

from ftcomm.control.decode import learn
from ftcomm.diagnosis.causes import StallCause, remedy
from ftcomm.diagnosis.facts import COORDINATOR, CallKey, JobFacts, LinkFacts, OpFacts, PhaseFacts, Rank, RankFacts
from ftcomm.diagnosis.frames import doing, of_script
from ftcomm.diagnosis.text import called_at, clock, duration, ranks_named, sentence
from ftcomm.diagnosis.unlike import Unlike, unlike

LEAST_WAIT = 0.5  # s; shorter waits are no news
PLACES = 3  # where others wait, that are named
MOSTLY = 0.5  # a share of time that explains a stall
ENOUGH, SLACK = 3.0, 0.1  # so many times its usual time, and so many s more, let a rank come to its next op
ELSEWHERE = (
    "Who answers has not started the ranks of this job, so it is not known what they do: ftcomm dump on their hosts "
    "keeps what they did."
)
CUT_RETRIES, CUT_LOST = 2, 2  # a segment was sent again, and none came, so often: the network is cut


class StallVerdict(msgspec.Struct, frozen=True):
    """The reason for which a job stands still. `culprits` are (replica, rank); `since` is in seconds since 1970, None
    if nobody waits; `removal` are the earliest and the latest time at which they are removed, or `removed` in their
    place, if that comes. `gives_up` says when a wait fails by itself, and which. `who`, `others` and `remedy` are
    sentences for people."""

    cause: str  # a value of `StallCause`
    culprits: tuple[Rank, ...] = ()
    since: float | None = None
    op: str = ""  # the op that waits
    lines: tuple[str, ...] = ()  # of scripts: where the culprits are
    removal: tuple[float, float] | None = None
    removed: tuple[Rank, ...] = ()  # if not the culprits: the job does not know of messages, for which these wait
    gives_up: tuple[float, str] | None = None
    sure: bool = True  # False while another look may say more
    who: str = ""
    others: str = ""
    remedy: str = ""

    def sentences(self, now: float) -> list[str]:
        """Returns the verdict in words, a sentence a line; `now` is in seconds since 1970."""
        said = [self.who]
        if self.since is not None:
            said.append(f"Since {clock(self.since)}, for {duration(max(0.0, now - self.since))}.")
        if self.others:
            said.append(self.others)
        if self.removal is not None:
            first, last = self.removal
            when = f"at {clock(last)} at the latest" + (f", and not before {clock(first)}" if first > now else "")
            what = ranks_named(self.removed) if self.removed else "what holds them up"
            verb = "are" if len(self.removed) > 1 else "is"
            said.append(f"If nothing moves, {what} {verb} removed {when}; the others then go on without it.")
        if self.gives_up is not None:
            at, what = self.gives_up
            error = "StepError" if self.cause == StallCause.PAUSE.value else "CollectiveTimeout"
            said.append(f"If nothing moves, {what} fails at {clock(at)} with a {error}.")
        if self.remedy:
            said.append(self.remedy)
        return said


learn(StallVerdict)


class _Edge(msgspec.Struct, frozen=True):
    by: Rank
    op: OpFacts | PhaseFacts
    on: Rank
    seconds: float

    @property
    def same(self) -> CallKey:
        return self.op.same

    @property
    def removes(self) -> bool:
        """Whether the job removes whom this waits for."""
        return self.op.removes(self.by, self.on)


def judge(facts: JobFacts) -> StallVerdict:
    """Returns the verdict. Facts may be incomplete: then it says less."""
    edges = _edges(facts.ranks)
    if (calls := unlike(facts.ranks)) is not None and not _gone_on(calls, edges):
        return _unlike(facts, calls)
    if facts.forming and (missing := [rank for rank in facts.ranks if not rank.began]):
        return _never_joined(facts, missing)
    if facts.earlier is not None and (before := _before(facts.earlier, facts)) is not None:
        return before
    if not edges:
        if facts.ranks and not any(rank.reached for rank in facts.ranks):
            return StallVerdict(StallCause.UNKNOWN.value, who=ELSEWHERE, remedy=remedy(StallCause.UNKNOWN))
        if (paused := _paused(facts)) is not None:
            return paused
        return StallVerdict(StallCause.NONE.value, who="Nobody waits for anybody.")
    return _of_waits(facts, edges)


def _of_waits(facts: JobFacts, edges: Sequence[_Edge]) -> StallVerdict:
    """Judges by the longest wait."""
    first = max(edges, key=lambda edge: edge.seconds)
    reached = _reached(first.by, edges)
    inside = _about(reached, edges)
    idle = [rank for rank in reached if not any(edge.by == rank for edge in edges)]
    judged = _Judged(facts, inside)
    if (cut := judged.cut()) is not None:
        return cut
    if first.op.any_ends and len(silent := [rank for rank in idle if any(w.rank == rank for w in first.op.waits)]) > 1:
        return judged.silent(silent)
    if idle:
        return judged.stands(max(idle, key=lambda rank: (sum(edge.on == rank for edge in inside), rank)))
    circle = _circle(first.by, edges)
    return judged.deadlock(circle) if len({edge.same[:2] for edge in circle}) > 1 else judged.network()


def _before(facts: JobFacts, now: JobFacts) -> StallVerdict | None:
    """Judges by earlier waits, for a rank that is removed by now: a network that was cut, or a stall that the waiting
    rank has left behind by a view."""
    edges = _edges(facts.ranks)
    if not edges:
        return None
    first = max(edges, key=lambda edge: edge.seconds)
    if (cut := _Judged(facts, _about(_reached(first.by, edges), edges)).cut()) is not None:
        return cut
    if not isinstance(first.op, OpFacts):
        return None
    same = first.same[:2]
    epochs = [op.epoch for rank in now.ranks if rank.rank == first.by for op in rank.ops if op.same[:2] == same]
    if first.seconds < facts.op_floor or max(epochs, default=0) <= first.op.epoch:
        return None
    verdict = _of_waits(facts, edges)
    return None if verdict.cause == StallCause.ENDED.value else verdict  # it has told by itself why it ended


def _gone_on(calls: Unlike, edges: Sequence[_Edge]) -> bool:
    """Whether members have left different calls behind, and wait in ops that they have begun since."""
    over = not any(op.open for _, op in calls.made)
    return over and bool(edges) and max(edge.seconds for edge in edges) < min(op.age for _, op in calls.made)


def _edges(ranks: Iterable[RankFacts]) -> list[_Edge]:
    """Returns the waits of phases, and of the first op in flight of each group; the ops behind it wait for it. A wait
    for a rank that has gone on in a later view of the group does not count: the waiting rank was removed, and has not
    heard of it."""
    ranks = tuple(ranks)
    newest, found = _newest(ranks), []
    for rank in ranks:
        firsts: dict[tuple[str, int], OpFacts] = {}
        for op in rank.open:
            known = firsts.setdefault((op.group, op.column), op)
            if op.number < known.number:
                firsts[op.group, op.column] = op
        for op in firsts.values():
            found += [
                _Edge(rank.rank, op, wait.rank, wait.seconds)
                for wait in op.waits
                if wait.seconds >= LEAST_WAIT and newest.get((wait.rank, op.group, op.column), 0) <= op.epoch
            ]
        for phase in rank.phases:
            found += [
                _Edge(rank.rank, phase, wait.rank, wait.seconds) for wait in phase.waits if wait.seconds >= LEAST_WAIT
            ]
    return found


def _newest(ranks: Iterable[RankFacts]) -> dict[tuple[Rank, str, int], int]:
    """Returns the newest view of each rank in each group."""
    newest: dict[tuple[Rank, str, int], int] = {}
    for rank in ranks:
        for op in rank.ops:
            key = rank.rank, op.group, op.column
            newest[key] = max(op.epoch, newest.get(key, 0))
    return newest


def _reached(start: Rank, edges: Sequence[_Edge]) -> list[Rank]:
    reached = [start]
    for rank in reached:
        reached += list(dict.fromkeys(edge.on for edge in edges if edge.by == rank and edge.on not in reached))
    return reached


def _about(ranks: Sequence[Rank], edges: Sequence[_Edge]) -> list[_Edge]:
    """Returns the waits that lead to some of `ranks`, in the order of `edges`."""
    about = set(ranks)
    while more := {edge.by for edge in edges if edge.on in about} - about:
        about |= more
    return [edge for edge in edges if edge.by in about]


def _circle(start: Rank, edges: Sequence[_Edge]) -> list[_Edge]:
    """Returns the waits of a circle that is reached from `start`, of ranks that all wait. Where a rank waits in several
    ops, the one leads on that is not the op by which it was reached: a deadlock is no matter of one op."""
    way: list[_Edge] = []
    at = start
    while at not in [edge.by for edge in way]:
        came = way[-1].same if way else None
        mine = [edge for edge in edges if edge.by == at]
        way.append(max(mine, key=lambda edge: (edge.same != came, edge.seconds, edge.on)))
        at = way[-1].on
    return way[[edge.by for edge in way].index(at) :]


class _Judged:
    """The waits that a verdict is about."""

    def __init__(self, facts: JobFacts, edges: Sequence[_Edge]) -> None:
        self._facts, self._edges = facts, edges
        self._ranks = {rank.rank: rank for rank in facts.ranks}
        self._all = sorted({edge.by for edge in edges} | {edge.on for edge in edges})

    def stands(self, culprit: Rank) -> StallVerdict:
        """Judges a rank that waits for nobody and that others wait for."""
        rank = self._ranks.get(culprit)
        waits = [edge for edge in self._edges if edge.on == culprit]
        if rank is None or not rank.reached:
            host = "" if rank is None else rank.host
            mates = [r.rank for r in self._facts.ranks if not r.reached and r.host == host] if host else [culprit]
            said = f"the host of {ranks_named(mates)}{host and f' ({host})'} does not answer."
            return self._verdict(StallCause.DEAD_HOST, mates, said, waits)
        cause, said, line = _why(rank, waits)
        return self._verdict(cause, [culprit], f"{ranks_named([culprit])} {said}", waits, (line,) if line else ())

    def silent(self, ranks: Sequence[Rank]) -> StallVerdict:
        """Judges ranks that do not wait themselves, of which any could send what another one waits for."""
        causes, said, lines = list[StallCause](), list[str](), list[str]()
        for rank in ranks:
            verdict = self.stands(rank)
            causes.append(StallCause(verdict.cause))
            said.append(verdict.who.removesuffix("."))
            lines += verdict.lines
        cause = next((cause for cause in causes if cause is not StallCause.OWN_CODE), StallCause.OWN_CODE)
        waits = [edge for edge in self._edges if edge.on in ranks]
        return self._verdict(cause, ranks, f"none of these has sent: {'; '.join(said)}.", waits, tuple(lines))

    def deadlock(self, circle: Sequence[_Edge]) -> StallVerdict:
        """Judges ranks that wait for each other in different groups, or for messages."""
        said = [
            f"{ranks_named([edge.by])} waits for {ranks_named([edge.on])} {edge.op.within}{called_at(edge.op.caller)}"
            for edge in circle
        ]
        lines = tuple(edge.op.caller for edge in circle if edge.op.caller)
        groups = all(isinstance(edge.op, OpFacts) for edge in circle)
        cause = StallCause.OTHER_GROUP if groups else StallCause.DEADLOCK
        who = f"ranks wait for each other{' in different groups' if groups else ''}: {'; '.join(said)}."
        return self._verdict(cause, [edge.by for edge in circle], who, circle, lines)

    def cut(self) -> StallVerdict | None:
        """Judges pairs of ranks of which one waits for the other and cannot reach it; None without such a pair."""
        pairs = {frozenset((edge.by, edge.on)) for edge in self._edges}
        lost = [link for link in self._facts.links if _is_cut(link)]
        cut = [link for link in lost if frozenset((link.sender, link.receiver)) in pairs]
        if not cut:
            return None
        directions = {(link.sender, link.receiver) for link in cut}
        ends = sorted({end for direction in directions for end in direction})
        works = {(link.sender, link.receiver) for link in self._facts.links if link.works}
        called = {(link.sender, link.receiver) for link in lost}
        called |= {(receiver, sender) for sender, receiver in called if (receiver, sender) not in works}
        if silent := [rank for rank in ends if (rank, COORDINATOR) in called and (COORDINATOR, rank) in called]:
            hosts = ", ".join(sorted({self._ranks[r].host for r in silent if r in self._ranks and self._ranks[r].host}))
            who = f"the host of {ranks_named(silent)}{hosts and f' ({hosts})'} does not answer: nobody reaches it."
            return self._verdict(StallCause.DEAD_HOST, silent, who, self._edges)
        if all((b, a) in works for a, b in directions):
            sender, receiver = min(directions)
            who = (
                f"the network is cut one way: what {ranks_named([sender])} sends does not reach "
                f"{ranks_named([receiver])}, while the other direction works."
            )
            return self._verdict(StallCause.CUT_ONE_WAY, [sender, receiver], who, self._edges)
        sure = not any(self._may_be_dead(end) for end in ends)
        counted = {end: sum(end in direction for direction in directions) for end in ends}
        alone = [end for end in ends if counted[end] == max(counted.values())]
        if len(alone) == 1 and len(ends) > 2:
            host = self._ranks[alone[0]].host if alone[0] in self._ranks else ""
            rest = ranks_named([end for end in ends if end != alone[0]])
            who = f"the network is cut: {ranks_named(alone)}{host and f' ({host})'} and {rest} do not reach each other."
            return self._verdict(StallCause.CUT, alone, who, self._edges, sure=sure)
        who = f"the network is cut between {ranks_named(ends)}, both ways."
        return self._verdict(StallCause.CUT, ends, who, self._edges, sure=sure)

    def _may_be_dead(self, rank: Rank) -> bool:
        """Whether nothing has passed between a rank and the coordinator for longer than between two signs of life, so
        far as their connections are known."""
        pair = {rank, COORDINATOR}
        known = [link for link in self._facts.links if {link.sender, link.receiver} == pair]
        passes = any(link.rate > 0 or link.arrived > 0 for link in known)
        heard = [link.heard for link in known if link.heard is not None]
        return bool(known) and not passes and min(heard, default=self._facts.presence) >= self._facts.presence

    def network(self) -> StallVerdict:
        """Judges ranks of one group that wait for each other, though all have called."""
        links = [link for link in self._facts.links if {link.sender, link.receiver} <= set(self._all)]
        starved = [self._ranks[r] for r in self._all if r in self._ranks and _share_delayed(self._ranks[r]) >= MOSTLY]
        if busy := [link for link in links if link.waiting > 0 and not starved]:
            slowest = min(busy, key=lambda link: (link.rate, -link.waiting))
            ends = [slowest.sender, slowest.receiver]
            who = (
                f"the network from {ranks_named(ends[:1])} to {ranks_named(ends[1:])} is slow: it carries "
                f"{slowest.rate / 1e6:.3g} MB/s, and {slowest.waiting / 1e6:.3g} MB are under way."
            )
            return self._verdict(StallCause.SLOW_NETWORK, ends, who, self._edges)
        if starved:
            return self.stands(max(starved, key=_share_delayed).rank)
        who = f"{ranks_named(self._all)} are in the same op, and each waits for another."
        return self._verdict(StallCause.UNKNOWN, self._all, who, self._edges)

    def _verdict(
        self,
        cause: StallCause,
        culprits: Sequence[Rank],
        who: str,
        waits: Sequence[_Edge],
        lines: tuple[str, ...] = (),
        sure: bool = True,
    ) -> StallVerdict:
        facts, longest = self._facts, max(waits, key=lambda edge: edge.seconds)
        waiting = {edge.by for edge in self._edges} - (set(culprits) if len(culprits) == 1 else set())
        others = _where(waiting, [longest, *waits], self._edges)
        since = facts.at - longest.seconds
        removing = [edge for edge in self._edges if edge.removes]
        stuck = sorted({edge.on for edge in removing} - {edge.by for edge in removing})
        instead = {replica for replica, _ in stuck}.isdisjoint(replica for replica, _ in culprits)
        removal = self._removal([edge for edge in waits if edge.removes] or removing)
        phases = [edge.op for edge in self._edges if isinstance(edge.op, PhaseFacts)]
        ends = [(facts.at + phase.left, phase.named) for phase in phases if phase.left is not None]
        gives_up = min(ends, default=None)
        if gives_up is not None and removal is not None and removal[1] < gives_up[0]:
            gives_up = None
        return StallVerdict(
            cause=cause.value,
            culprits=tuple(culprits),
            since=since,
            op=longest.op.named,
            lines=lines,
            removal=removal,
            removed=tuple(stuck) if phases and instead else (),
            gives_up=gives_up,
            sure=sure,
            who=sentence(who),
            others=others,
            remedy=remedy(cause),
        )

    def _removal(self, waits: Sequence[_Edge]) -> tuple[float, float] | None:
        """Returns when the job removes whom these wait for; None if they wait for nobody whom it removes."""
        if not waits:
            return None
        facts = self._facts
        since = facts.at - max(edge.seconds for edge in waits)
        return since + facts.op_floor + facts.grace, since + facts.op_timeout + facts.grace


def _where(waiting: Set[Rank], first: Sequence[_Edge], edges: Sequence[_Edge]) -> str:
    """Returns in words where ranks wait: those in the ops and phases of `first` there, any others for those."""
    rest, said = set(waiting), []
    for within in list(dict.fromkeys(edge.op.within for edge in first))[:PLACES]:
        inside = {edge.by for edge in edges if edge.op.within == within} & rest
        callers = dict.fromkeys(e.op.caller for e in first if e.op.within == within and e.op.caller and e.by in inside)
        said.append((inside, f"{within}{called_at(*list(callers)[:2])}"))
        rest -= inside
    return " ".join(
        f"{sentence(ranks_named(sorted(ranks)))} {'waits' if len(ranks) == 1 else 'wait'} {how}."
        for ranks, how in [*said, (rest, "for those")]
        if ranks
    )


def _why(rank: RankFacts, waits: Sequence[_Edge]) -> tuple[StallCause, str, str]:
    """Returns why a rank stands still, what is said of it, and its line."""
    process, stacks = rank.process, rank.stacks
    frame = of_script(stacks.main)
    line = "" if frame is None else str(frame)
    where = f", at {line}" if line else _last_call(rank)
    if process is None or process.state in ("Z", "X"):
        return StallCause.ENDED, f"has no process any more{rank.reason and f': {rank.reason}'}.", ""
    if process.frozen:
        how = "a debugger has stopped it" if process.state == "t" else "it was stopped by SIGSTOP or SIGTSTP"
        return StallCause.FROZEN, f"is frozen (process {process.pid}, state {process.state}): {how}{where}.", line
    what = doing(stacks.main)
    if what is StallCause.COMPILATION:  # which makes so many objects that the collector runs
        return what, f"compiles{where}.", line
    if rank.collecting >= MOSTLY or stacks.collects >= LEAST_WAIT:
        share = f" ({rank.collecting:.0%} of its time)" if rank.collecting else ""
        return StallCause.GARBAGE, f"collects garbage{share}{where}.", line
    if process.full:
        return StallCause.FULL_DISK, f"works on a disk that is full ({', '.join(process.full)}){where}.", line
    if what is StallCause.DATA_LOADER:
        return what, f"waits for its input{where}.", line
    if _starves(rank):
        share = f"it was ready to run and got none for {process.delayed:.0%} of the time"
        return StallCause.STARVED, f"gets no CPU: {share}{where}.", line
    called = {edge.same for edge in waits}
    if any(each.same in called for each in rank.inside):
        return StallCause.INSIDE, f"has called the same op and does not go on with it{where}.", line
    held = ", and does not give the interpreter lock away" if stacks.held else ""
    if not stacks.main and stacks.missing:
        held += f" ({stacks.missing})"
    return StallCause.OWN_CODE, f"is in its own code{where}{held}.", line


def _last_call(rank: RankFacts) -> str:
    return f", after its call at {rank.ops[-1].caller}" if rank.ops and rank.ops[-1].caller else ""


def _is_cut(link: LinkFacts) -> bool:
    """Whether what is sent does not arrive. If the receiver's count is not known, the sender's attempts say it."""
    if link.waiting <= 0 or link.retries < CUT_RETRIES or link.rate > 0 or link.arrived > 0:
        return False
    return link.lost is None or link.lost >= CUT_LOST


def _share_delayed(rank: RankFacts) -> float:
    return 0.0 if rank.process is None else rank.process.starved


def _starves(rank: RankFacts) -> bool:
    """Whether a rank is late because it gets no CPU: with what it has got since its last op it could not have come to
    the next one. On a busy machine a loop without an end is ready most of the time, too, and so are threads of a rank
    whose main thread sleeps."""
    process = rank.process
    if process is None or process.delayed < MOSTLY or process.delayed <= process.ran:
        return False
    return process.ran * rank.idle < ENOUGH * rank.step + SLACK


def _unlike(facts: JobFacts, calls: Unlike) -> StallVerdict:
    cause = StallCause.SWAPPED if calls.swapped else StallCause.MISMATCH
    said = "; ".join(f"{ranks_named([rank])}: {op.what}{called_at(op.caller)}" for rank, op in calls.made[:8])
    name = calls.made[0][1].short
    if calls.swapped:
        who = f"{ranks_named(calls.odd)} called {name} and the one next to it in another order: {said}."
    else:
        who = f"members called different ops as {name}: {said}."
    return StallVerdict(
        cause=cause.value,
        culprits=calls.odd,
        since=facts.at - min(op.age for _, op in calls.made),
        op=name,
        lines=tuple(op.caller for rank, op in calls.made if rank in calls.odd and op.caller),
        who=sentence(who),
        others="The op ends with a MismatchError on all members.",
        remedy=remedy(cause),
    )


def _paused(facts: JobFacts) -> StallVerdict | None:
    """Judges a job whose step loop waits for more replicas; None if no rank of a living process does."""
    pauses = {rank.rank: rank.pause for rank in facts.ranks if rank.pause is not None and rank.process is not None}
    if not pauses:
        return None
    longest = max(pauses.values(), key=lambda pause: pause.age)
    away = [rank for rank in facts.ranks if rank.rank[1] == 0 and not (rank.member and rank.pause is not None)]
    said = [f"{ranks_named([rank.rank])}{rank.reason and f' ({rank.reason})'}" for rank in away]
    return StallVerdict(
        cause=StallCause.PAUSE.value,
        since=facts.at - longest.age,
        gives_up=None if longest.left is None else (facts.at + longest.left, "the step loop"),
        who=f"The job pauses before step {longest.step}: too few replicas contribute ({longest.contributing} when that "
        f"began, {longest.needed}).",
        others=f"Not back yet: {', '.join(said)}." if said else "",
        remedy=remedy(StallCause.PAUSE),
    )


def _never_joined(facts: JobFacts, missing: Sequence[RankFacts]) -> StallVerdict:
    who = [rank.rank for rank in missing]
    lines = [str(frame) for rank in missing if (frame := of_script(rank.stacks.main)) is not None]
    alive = [rank for rank in missing if rank.process is not None]
    if lines:
        more = f", at {lines[0]}"
    elif any(rank.process is not None and rank.process.frozen for rank in alive):
        more = ": its process is frozen"
    elif alive:
        more = f" ({alive[0].stacks.missing})" if alive[0].stacks.missing else ""
    else:
        more = ": it has no process" + next((f" ({rank.reason})" for rank in missing if rank.reason), "")
    script = "its script has" if len(who) == 1 else "their scripts have"
    present = [rank for rank in facts.ranks if rank.began]
    ages = [rank.phase_age for rank in present if rank.phase_age > 0]
    return StallVerdict(
        cause=StallCause.NEVER_JOINED.value,
        culprits=tuple(who),
        since=facts.at - max(ages) if ages else None,
        lines=tuple(lines),
        who=sentence(f"{ranks_named(who)} never joined: {script} not come to ftcomm.init(){more}."),
        others=sentence(f"{ranks_named([rank.rank for rank in present])} wait for the first view.") if present else "",
        remedy=remedy(StallCause.NEVER_JOINED),
    )
