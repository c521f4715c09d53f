"""Every interleaving of a small group and its faults, on the state machines of the product. Breadth first, so that the
history of a violation is one of the shortest.

What runs: `Coordinator`, `RankNode` and `LeaderNode` in `control/`, `ExchangeCore` with all that it is made of and the
resume plan in `ftcomm/collective/`, on memories of a few hundred bytes. What is explored, each in any order with all
else:

    calls op N        the caller calls its next op; it may call all before the first returns
    reduces, copies   a chunk becomes FINAL (the stage `take`); two-shot: a member reduces its slice (`step`)
    looks             a look at the TAKEN words of the others stops between two of them
    returns op N      from then on the caller's buffer is the caller's
    hears             the next message of the coordinator comes: it stops, and tells the members of the view
    enters            everybody has told, the member resumes
    takes for lost    a fault; the member lives and goes on in its old view until it hears, or never does. Or it has
                      crashed: a member that does nothing more, its memory as it was for those who map it
    connects anew     a connection for data has ended, and the next view has the same members (`resets`)

Checked in every state: whoever returns an op returns the same bytes and contributors, the one that was removed too; a
chunk at a member of the newest view is its INPUT or the sum that it says; an atomic op has one set of contributors; no
`ProtocolError`; an epoch has one view; and where no member of the newest view can move, all of them have returned all
ops in it.

What is not explored on its own, and why nothing is lost by it (`reduced=False` explores it all the same; a test
compares the two):

- `post`, and `arrive`, which only counts, happen as soon as they can. A member waits for what others have
  posted, never for what they have not; a post that comes later is a member that is slow to read it, which is explored;
  and what is overwritten is overwritten as early as can be, which is the worst. Not so a post of an atomic op that
  turns FINAL back into INPUT, or that compares fingerprints.
- The progress of a member is delivered when it is sent. It does nothing before the receiver carries out the `EnterView`
  that it completes, which is a step of its own; one that is lost is one whose `EnterView` is not carried out before the
  next view, and that comes, since its sender is gone.
- Hearing of a view and having quiesced are one step: what is done in between could as well be done before hearing.
- A crash, and that the coordinator notices it later: all that others see of the time in between is a member that is
  slow. What it has sent may be lost, see above. That nobody waits for the dead for ever is checked, since no member of
  the newest view may need a step of one that is not.
- `Installed` reaches the coordinator at once: it matters to changes at a boundary and to joiners, and there are none.
- What a member does after it has heard that it is removed: it fails its ops, which is checked, and stands still, which
  is explored as a member that never hears.

Words are read in program order and at once seen by all, as on the processors on which memory is shared; a reader over
TCP sees a prefix of that, later.

States of three members with two faults, by `ftcomm check --ops 1 --chunks C --faults 2`:

    chunks    states              chunks               states
    1         15,522              2, --two-shot       128,873
    2         54,007              2, --atomic          62,300

Not explored: a coordinator that dies, joiners, links that break and come back, and
what runs in threads; that is what the random simulation and the tests with real processes are for.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from ftcomm.control import messages as m
from ftcomm.simulation.live import CheckedGroup
from ftcomm.simulation.local import Coordination, Decided, Members, Numbering, StepKind, Transition, opening
from ftcomm.simulation.mutations import Mutation

_BITS = 26  # of the number of a pair in a packed state
_MASK = (1 << _BITS) - 1


class Control(NamedTuple):
    """The part of a state that is not in the members."""

    coordinator: int
    newest: tuple[int, ...]  # members of the newest view
    epoch: int
    queues: tuple[tuple[int, ...], ...]  # messages of the coordinator under way to each member
    mail: tuple[tuple[int, int, int], ...]  # (from, to, progress) under way; only if not reduced
    outcomes: tuple[int | None, ...]  # of each op: what it returned where it returned first
    faults: int  # still to come
    resets: int  # the same for connections
    dead: tuple[int, ...] = ()


StateNumbers = tuple[int, ...]  # the number of its control, then of each member's pair
Happening = tuple[int, StepKind, str, StateNumbers]  # the actor (-1: the coordinator), its step, and the state after it


@dataclasses.dataclass
class CheckReport:
    """Says how far a check has come. `broken` is "" or says what does not hold, with the `history` that leads to it."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    frontier: int = 0
    ends: int = 0  # states in which all of the newest view are done
    local: int = 0  # different states of a member and its memory
    seconds: float = 0.0
    complete: bool = False
    broken: str = ""
    history: list[str] = dataclasses.field(default_factory=list)


class _Found(Exception):
    """A step that breaks a promise."""

    def __init__(self, line: str, broken: str) -> None:
        super().__init__(broken)
        self.line, self.broken = line, broken


class ExhaustiveCheck:
    """The exhaustive check. Not thread-safe. Call `run` once."""

    def __init__(
        self,
        group: CheckedGroup,
        faults: int = 2,
        mutation: Mutation | None = None,
        *,
        resets: int = 0,
        reduced: bool = True,
        forming: bool = False,
    ) -> None:
        """Resets of connections (`resets`) come beside the `faults`. With `forming` it begins when the first view is
        decided and no member has heard of it; otherwise when all run in it."""
        self.group, self._reduced = group, reduced
        eager = set()
        if reduced:
            eager.add("arrive")
            eager |= set() if group.verify else {"first"} if group.atomic else {"post"}
        self.members = Members(group, mutation or Mutation(), frozenset(eager))
        self._eager = bool(eager)
        self._coordination = Coordination(group)
        self._controls = Numbering()
        self._messages = Numbering()
        self._following: dict[tuple[object, ...], int] = {}  # (control, what happens) -> control
        self._everyone = range(group.members)
        self._first = self._start(faults, resets, forming)
        self.endings: set[tuple[object, ...]] = set()  # the newest view, and what its ops returned

    def run(
        self, seconds: float = float("inf"), progress: Callable[[CheckReport], None] = lambda report: None
    ) -> CheckReport:
        """Explore until there is nothing left, a violation is found, or the time is over. `progress` is called now and
        then."""
        report = CheckReport()
        began = time.monotonic()
        states = [_pack(self._first)]
        parents = array("I", [0])
        visited = set(states)
        index, level = 0, 1  # `level`: where the next depth begins
        width = self.group.members
        while index < len(states):
            if index == level:
                report.depth, level = report.depth + 1, len(states)
            if index & 0x3FFF == 0:
                self._fill(report, index, len(states), began)
                progress(report)
                if report.seconds > seconds:
                    return report
            state = _unpack(states[index], width)
            try:
                for _, _, _, following in self.successors(state, report):
                    report.steps += 1
                    key = _pack(following)
                    if key not in visited:
                        visited.add(key)
                        states.append(key)
                        parents.append(index)
            except _Found as found:
                self._fill(report, index, len(states), began)
                report.broken = found.broken
                report.history = [*self._history(states, parents, index), found.line]
                return report
            index += 1
        self._fill(report, index, len(states), began)
        report.complete = True
        return report

    def _fill(self, report: CheckReport, done: int, found: int, began: float) -> None:
        report.states, report.frontier, report.local = found, found - done, len(self.members.pairs)
        report.seconds = time.monotonic() - began

    def _history(self, states: list[int], parents: array[int], index: int) -> list[str]:
        path = [index]
        while path[-1]:
            path.append(parents[path[-1]])
        path.reverse()
        lines = []
        for before, after in itertools.pairwise(path):
            steps = self.successors(_unpack(states[before], self.group.members), CheckReport())
            lines.append(next(_line(actor, text) for actor, _, text, state in steps if _pack(state) == states[after]))
        return lines

    # -- the first state ---------------------------------------------------------------------------------------------

    def _start(self, faults: int, resets: int, forming: bool) -> StateNumbers:
        coordinator = self._coordination.first
        sent: list[tuple[int, int]] = []
        for i in self._everyone:
            for message in opening(self.members.live[i]):
                decided = self._coordination.receive(coordinator, i, message)
                coordinator = decided.coordinator
                sent = [(to, self._messages.number(x)) for to, x in decided.sent if isinstance(x, m.NewView)]
        queues = tuple(tuple(message for to, message in sent if to == i) for i in self._everyone)
        view = self._coordination.views(coordinator)[-1]
        control = Control(coordinator, view.replicas, view.epoch, queues, (), (None,) * self.group.ops, faults, resets)
        state: StateNumbers = (self._controls.number(control), *(self.members.new(i) for i in self._everyone))
        ready = (StepKind.HEARS, StepKind.IS_TOLD, StepKind.ENTERS)
        while not forming:
            steps = self.successors(state, CheckReport())
            following = next((after for _, kind, _, after in steps if kind in ready), None)
            if following is None:
                break
            state = following
        return state

    # -- one state -> the next ---------------------------------------------------------------------------------------

    def successors(self, state: StateNumbers, report: CheckReport) -> list[Happening]:
        """Returns what can happen."""
        number, pairs = state[0], state[1:]
        control: Control = self._controls.values[number]
        members, newest, queues = self.members, control.newest, control.queues
        memory, looking = members.memory, members.looking
        memories = tuple([memory[pair] for pair in pairs])
        found: list[Happening] = []
        able = False  # a member that has to go on can
        for i, pair in enumerate(pairs):
            if i in control.dead:
                if i in newest:
                    able = True
                    following = self._event(number, "closed", i)
                    found.append((-1, StepKind.DECIDES, self._loss(following, i), (following, *pairs)))
                continue
            steps = members.steps(i, pair, memories)
            for step in steps:
                found.append((i, step.kind, step.text, self._stepped(number, pairs, memories, i, step)))
            if queues[i] and not looking[pair]:
                self._hear(number, pairs, i, found)
            able = able or (i in newest and bool(steps or queues[i] or looking[pair]))
        if control.mail:
            able = True
            self._deliver(number, pairs, found)
        if not able:
            self._check_end(control, pairs, report)
        if control.faults:
            alive = [i for i in newest if i not in control.dead]
            for i in alive if len(alive) > 1 else ():
                following = self._event(number, "suspected", i)
                found.append((-1, StepKind.DECIDES, self._loss(following, i), (following, *pairs)))
                if not self._reduced:
                    after = [members.crashed(pair) if j == i else pair for j, pair in enumerate(pairs)]
                    found.append((i, StepKind.CRASHES, "crashes", (self._event(number, "crashed", i), *after)))
        alive = [i for i in newest if i not in control.dead]
        if control.resets and len(alive) > 1:  # whichever two it is between, the view is the same
            following = self._event(number, "severed", alive[-1])
            epoch = self._controls.values[following].epoch
            found.append((-1, StepKind.DECIDES, f"connects all anew and decides view {epoch}", (following, *pairs)))
        return found

    def _stepped(
        self, number: int, pairs: tuple[int, ...], memories: tuple[int, ...], i: int, step: Transition
    ) -> StateNumbers:
        members = self.members
        if step.broken:
            raise _Found(_line(i, step.text), step.broken)
        after = list(pairs)
        after[i] = pair = step.pair
        if step.returned or step.entered is not None:
            number = self._came_of(number, i, step)
        if members.wrong[pair] and i in self._controls.values[number].newest:
            raise _Found(_line(i, step.text), members.wrong[pair])
        if self._eager and members.memory[pair] != memories[i]:
            self._settle(after, i)
        return (number, *after)

    def _hear(self, number: int, pairs: tuple[int, ...], i: int, found: list[Happening]) -> None:
        control: Control = self._controls.values[number]
        step = self._told(i, pairs[i], control.queues[i][0], by_member=False)
        if step.failed and self._reduced:
            return  # from here on it stands still, which it may do without having heard, too
        after = list(pairs)
        after[i] = step.pair
        mail = []
        for to, message in step.out:
            if not self._reduced:
                mail.append((i, to, self._messages.number(message)))
            elif to not in control.dead:
                after[to] = self._told(to, after[to], self._messages.number(message), by_member=True).pair
        found.append((i, step.kind, step.text, (self._event(number, "heard", i, tuple(mail)), *after)))

    def _deliver(self, number: int, pairs: tuple[int, ...], found: list[Happening]) -> None:
        mail = self._controls.values[number].mail
        for at, (source, to, message) in enumerate(mail):
            if all(earlier[:2] != (source, to) for earlier in mail[:at]):
                after = list(pairs)
                after[to] = self._told(to, pairs[to], message, by_member=True).pair
                text = f"is told what {source} holds"
                found.append((to, StepKind.IS_TOLD, text, (self._event(number, "delivered", at), *after)))

    def _told(self, i: int, pair: int, message: int, by_member: bool) -> Transition:
        step = self.members.hear(i, pair, self._messages.values[message], message, by_member)
        if step.broken or (by_member and step.out):
            raise _Found(_line(i, step.text), step.broken or f"answers {step.out}")
        return step

    def _settle(self, pairs: list[int], i: int) -> None:
        """Does what happens by itself, at `i` first, until nothing more does."""
        members = self.members
        memory, dead = members.memory, members.dead
        quiet = 0  # members in a row for whom there was nothing to do
        memories = tuple([memory[pair] for pair in pairs])
        while quiet < len(pairs):
            pair = pairs[i]
            after = pair if dead[pair] else members.settle(i, pair, memories)
            if after == pair:
                quiet += 1
            else:
                quiet, pairs[i] = 1, after
                memories = tuple([memory[pair] for pair in pairs])
            i = (i + 1) % len(pairs)

    def _check_end(self, control: Control, pairs: tuple[int, ...], report: CheckReport) -> None:
        """Check a state in which no member of the newest view can do anything more, whatever others do."""
        for i in control.newest:
            if self.members.finished[pairs[i]] != control.epoch:
                raise _Found(
                    f"nobody of view {control.epoch} can do anything more", f"{i} has not returned all its ops"
                )
        report.ends += 1
        outcomes = [self.members.outcomes.values[x][1:] for x in control.outcomes if x is not None]
        self.endings.add((control.newest, *outcomes))

    # -- what is not in the members ----------------------------------------------------------------------------------

    def _came_of(self, number: int, i: int, step: Transition) -> int:
        """A member has entered a view, or returned ops."""
        key = (number, i, step.returned, step.entered is not None and step.entered.epoch)
        known = self._following.get(key)
        if known is not None:
            return known
        control: Control = self._controls.values[number]
        if step.entered is not None:
            if step.entered not in self._coordination.views(control.coordinator):
                raise _Found(_line(i, step.text), f"the coordinator has not decided {step.entered}")
            for message in step.up:
                control = self._decided(control, self._coordination.receive(control.coordinator, i, message))
        for op, outcome in step.returned:
            first = control.outcomes[op]
            if first is None:
                control = control._replace(outcomes=(*control.outcomes[:op], outcome, *control.outcomes[op + 1 :]))
            elif first != outcome:
                there, here = (self.members.outcomes.values[x][1:] for x in (first, outcome))
                raise _Found(_line(i, step.text), f"op {op} has returned {there} at one member and {here} at another")
        return self._following.setdefault(key, self._controls.number(control))

    def _event(self, number: int, kind: str, i: int, *more: object) -> int:
        key = (number, kind, i, *more)
        known = self._following.get(key)
        if known is None:
            control = getattr(self, f"_{kind}")(self._controls.values[number], i, *more)
            known = self._following[key] = self._controls.number(control)
        return known

    def _heard(self, control: Control, i: int, mail: tuple[tuple[int, int, int], ...]) -> Control:
        queues = tuple(queue[1:] if j == i else queue for j, queue in enumerate(control.queues))
        mail = tuple(letter for letter in mail if letter[1] not in control.dead)
        return control._replace(queues=queues, mail=control.mail + mail)

    def _delivered(self, control: Control, at: int) -> Control:
        return control._replace(mail=control.mail[:at] + control.mail[at + 1 :])

    def _crashed(self, control: Control, i: int) -> Control:
        queues = tuple(() if j == i else queue for j, queue in enumerate(control.queues))
        mail = tuple(letter for letter in control.mail if letter[1] != i)
        faults = control.faults - 1
        return control._replace(queues=queues, mail=mail, faults=faults, dead=tuple(sorted((*control.dead, i))))

    def _closed(self, control: Control, i: int) -> Control:
        return self._decided(control, self._coordination.closed(control.coordinator, i))

    def _suspected(self, control: Control, i: int) -> Control:
        by = next(j for j in control.newest if j != i and j not in control.dead)
        decided = self._coordination.suspected(control.coordinator, i, by)
        return self._decided(control._replace(faults=control.faults - 1), decided)

    def _severed(self, control: Control, i: int) -> Control:
        by = next(j for j in control.newest if j != i and j not in control.dead)
        decided = self._coordination.severed(control.coordinator, i, by)
        return self._decided(control._replace(resets=control.resets - 1), decided)

    def _decided(self, control: Control, decided: Decided) -> Control:
        queues = list(control.queues)
        for to, message in decided.sent:
            if to not in control.dead:
                queues[to] = (*queues[to], self._messages.number(message))
        newest = decided.views[-1]
        return control._replace(
            coordinator=decided.coordinator, newest=newest.replicas, epoch=newest.epoch, queues=tuple(queues)
        )

    def _loss(self, number: int, lost: int) -> str:
        control: Control = self._controls.values[number]
        return f"takes {lost} for lost and decides view {control.epoch} of {'+'.join(map(str, control.newest))}"


def _pack(state: StateNumbers) -> int:
    packed = 0
    for number in state:
        packed = packed << _BITS | number
    return packed


def _unpack(packed: int, members: int) -> StateNumbers:
    return tuple([packed >> _BITS * position & _MASK for position in range(members, -1, -1)])


def _line(actor: int, text: str) -> str:
    return f"{'the coordinator' if actor < 0 else actor} {text}"
