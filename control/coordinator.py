"""The coordinator: decides who is in the job. A pure state machine, driven by `ftcomm.control.server`.

It is needed only to change membership. Views are persisted before they are sent, so that an epoch is never reused
and a restarted coordinator knows the job; what else it must know its members tell it when they connect again.

    forming   fewer replicas than expected have joined, no view yet
    steady    all members have installed the view
    losing    a view without lost members is out; not all have installed it yet
    changing  a proposal (join, contribute, leave) for a step boundary waits for promises, or is committed and not yet
              installed by all. A loss gives it up as long as no member has said that it runs in it. One that does has
              heard from all others that they have stopped for it, so from then on it stands

Silence is no proof of death, nor is a connection that ends. A member goes when it is proved that its process has ended
(its port refuses us, the kernel of its host says so, its replica comes with another life; another member has proof of
it and it does not answer us), when its kernel is silent and a contributing member that speaks complains of it, too,
when its leader does not hear one of its own ranks, or as a stall. Where no contributing member can be heard it is the
coordinator that is cut off: it decides nothing and goes on looking for them. Nor does it where none is whole. The job
ends when all who hold its state are proved to have ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Set

from ftcomm.control import messages as m
from ftcomm.control.admission import MESSAGE, Room, other_job, too_large
from ftcomm.control.blame import FRESH, Blame
from ftcomm.control.detector import Detector
from ftcomm.control.dials import Dials, Life, Outcome
from ftcomm.control.joiners import Joiners
from ftcomm.control.limits import EPOCHS
from ftcomm.control.liveness import described
from ftcomm.control.reconfiguration import Proposal, contributing, given_up, wanted
from ftcomm.control.timeouts import REPORT, Timeouts
from ftcomm.control.views import Address, Member, View

Conn = int  # a connection of a leader, numbered by the runtime

WAITS = m.Queued(
    "joins at the next step boundary that all replicas can agree on (ftcomm.steps, Group.boundary)", m.Stage.JOINING
)
ALONE = m.Queued(
    "waits for the replicas that hold the state of the training, of which none is heard; if they have ended for good, "
    "end this coordinator, remove its store, and start the job again from its last checkpoint"
)
FINISHED = m.Expelled("the job has finished", m.Ending.TOO_LATE)
OVER = m.Expelled("the job has ended or is being drained", m.Ending.TOO_LATE)
DRAINED = "the job is being drained"
EARLY = 100  # ticks, in each of which who has come is heard: those of ten heartbeat timeouts, where they are in time
WITNESSES = 4  # hosts that are dialled when another one refuses
LINGER = 2.0  # s that a finished member stays in the view, so that a job's end is not a cascade of views


@dataclasses.dataclass(frozen=True)
class Send:
    conn: Conn
    message: m.Message


@dataclasses.dataclass(frozen=True)
class Close:
    conn: Conn


@dataclasses.dataclass(frozen=True)
class Persist:
    """Must be on the disk before the actions after it are carried out."""

    view: View


@dataclasses.dataclass(frozen=True)
class Dial:
    """Connect to where the leader of that life listens, and tell the outcome by `dialled`. `call`: if that answers, and
    no connection of that replica is on the way, say there where we are; it may hang on to a coordinator before us."""

    replica: int
    incarnation: str
    address: Address
    call: bool


@dataclasses.dataclass(frozen=True)
class Ask:
    """Ask by a handshake whether the process of that rank is at its address, and tell by `asked`. Another member says
    that it has ended."""

    replica: int
    incarnation: str
    rank: int
    address: Address


@dataclasses.dataclass(frozen=True)
class Probe:
    """Connect anew to an address, and tell the outcome by `probed`. Another host refuses rank `rank` of that life: is
    it refused whomever we want, and does it still refuse us (`itself`)?"""

    replica: int
    incarnation: str
    rank: int
    itself: bool
    address: Address


@dataclasses.dataclass(frozen=True)
class Log:
    """For the event log."""

    kind: str
    fields: dict[str, object]


@dataclasses.dataclass(frozen=True)
class Done:
    """The job has ended; `failed` says why if it did not end well."""

    failed: str = ""


@dataclasses.dataclass(frozen=True)
class Unfit:
    """The job goes on, and this coordinator must decide nothing more in it; why."""

    reason: str


Action = Send | Close | Persist | Dial | Ask | Probe | Log | Done | Unfit


@dataclasses.dataclass
class _Link:
    replica: int
    incarnation: str
    step: int
    epoch: int
    mute: str = ""  # what those of its ranks do that live and do not speak
    divided: str = ""  # which of its ranks its leader does not reach
    since: float = 0.0  # when it began to say so


@dataclasses.dataclass
class _Refused:
    """That another host refuses a rank."""

    since: float
    last: float
    why: str


class Coordinator:
    """Not thread-safe. Every method takes the time `now` (seconds, any origin) and returns actions in order."""

    def __init__(
        self,
        replicas: int,
        ranks_per_replica: int,
        timeouts: Timeouts,
        views: list[View],
        now: float,
        lifetime: int,
        state: Callable[[Address], str] = lambda there: "",
        room: Room = MESSAGE,
        boot: str = "",
    ) -> None:
        """`views`: the last two that were persisted. `lifetime`: a number that no earlier run of this job's
        coordinator had, so that a proposal of a dead one is never taken for one of ours. `state`: what the process at
        an address does, as far as it can be known here (`ftcomm.control.liveness.state_of`). `room`: for a view, where
        the views are persisted. `boot`: of our kernel."""
        self._state, self._room, self._boot = state, room, boot
        self.expected = replicas
        self.ranks_per_replica = ranks_per_replica
        self.view: View | None = views[-1] if views else None
        self._before: View | None = views[-2] if len(views) > 1 else None  # what a change not yet installed replaces
        self._epoch = self.view.epoch if self.view else 0
        self._lifetime, self._proposals = lifetime & 0xFFFF_FFFF, 0
        self.timeouts = timeouts
        self.detector: Detector[int] = Detector(timeouts.silence)
        self.links: dict[Conn, _Link] = {}
        self.joiners = Joiners()  # no view has them, or one that nobody will install
        self.installed: set[int] = set()
        self.proposal: Proposal | None = None
        self._margin = 1  # steps ahead that a change is proposed for; doubled for as long as members are faster
        self.caught_up: set[int] = set()
        self.leaving: set[int] = set()
        self.draining = False
        self.finished: dict[int, float] = {}
        self._displaced: dict[int, int] = {}  # by replica: how often another life came while one was connected
        self._refusals: dict[int, tuple[str, str]] = {}  # by replica: the life that was refused last, and why
        self._blame = Blame(timeouts.patience, timeouts.grace, timeouts.ceiling)
        self._dials = Dials(timeouts.op)
        self._refused: dict[tuple[Life, int], _Refused] = {}  # by life and rank
        self._accused: dict[tuple[Life, int], tuple[Conn, int, m.Suspect]] = {}  # who, and which rank; by whom
        self.done = False
        self._unfit = False
        self.alone = bool(views)  # no contributing member can be heard
        self._begun = now
        self._met = not views  # all that we know of have come, or had the time to, see `_early`
        self._ticks = 0  # for as long as not
        self._held: dict[tuple[object, ...], tuple[Conn, m.Message]] = {}  # what is decided upon then
        self._spared = 0  # the epoch in which a verdict without proof was not carried out
        self._held_up: dict[int, float] = {}  # who lives and did not speak, when last
        self._doubted = float("-inf")  # when no holder of the state was known to be whole last
        self._untold: set[Life] = set()  # those that catch up by our store, and may have done so since
        for member in self._running():
            if not self._contributes(member.replica, member.incarnation):
                self._untold.add((member.replica, member.incarnation))
        for member in self._running():
            self.detector.heard(member.replica, now)

    # -- events --------------------------------------------------------------------------------------------------

    def receive(self, conn: Conn, message: m.Message, now: float) -> list[Action]:
        if self._unfit:
            return [Close(conn)]
        if isinstance(message, m.Join):
            return self._join(conn, message, now)
        link = self.links.get(conn)
        if link is None:
            return [Close(conn)]
        if isinstance(message, m.Suspect | m.Withdrawn) and self._early(now):
            return self._hold(conn, message)
        if isinstance(message, m.Suspect) and message.proof and self._may_hold({message.replica}):
            return self._hold(conn, message)  # it is said once
        met = self._heard(link, now)
        if isinstance(message, m.Report):
            return [*met, Log(message.kind, {**message.fields, "replica": link.replica})]
        if not self._counts(link.replica, link.incarnation):
            return [*met, *self._from_joiner(conn, link, message)]
        return [*met, *self._from_member(conn, link, message, now)]

    def _heard(self, link: _Link, now: float) -> list[Action]:
        """Who was cut off gives the members a heartbeat timeout to show up, from when the first one does."""
        self.detector.heard(link.replica, now)
        self._dials.found((link.replica, link.incarnation))
        self._refused.pop(((link.replica, link.incarnation), 0), None)
        if not self.alone or not self._contributes(link.replica, link.incarnation):
            return []
        self.alone = False
        self.detector.pardon(now)
        return self._tell_all_joiners(WAITS)

    def _early(self, now: float) -> bool:
        """Restarted, we know what our store holds and no more: it may be older than the job, and who has caught up
        since says so when it comes. So nothing is decided before all have come, or have had a heartbeat timeout to.

        Nobody could come while this process was stopped, so the timeout begins anew after a pause. On a host where no
        tick comes in time it would never end, so it ends after `EARLY` of them."""
        if not self._met:
            here = {(link.replica, link.incarnation) for link in self.links.values()}
            all_here = here >= {(member.replica, member.incarnation) for member in self._running()}
            since = max(self._begun, self.detector.since(now))
            self._met = all_here or now - since > self.timeouts.heartbeat or self._ticks > EARLY
        return not self._met

    def _hold(self, conn: Conn, message: m.Suspect | m.Withdrawn) -> list[Action]:
        """Until it can be decided upon. Of what a connection says again, however it says why, the last counts."""
        self._held = {key: held for key, held in self._held.items() if held[0] in self.links}
        about: tuple[object, ...] = ()
        if isinstance(message, m.Suspect):
            about = message.replica, message.incarnation, message.rank, message.proof
        self._held[(conn, *about)] = conn, message
        return []

    def acknowledged(self, conn: Conn, at: float) -> None:
        """The kernel at the other end has answered, whatever its process does."""
        link = self.links.get(conn)
        if link is not None:
            self.detector.acknowledged(link.replica, at)

    @property
    def missed(self) -> set[Life]:
        """Who is looked for."""
        return self._dials.searched

    def _from_joiner(self, conn: Conn, link: _Link, message: m.Message) -> list[Action]:
        replica = link.replica
        if isinstance(message, m.Finished):
            return [Send(conn, m.FinishAck())]
        if self.view is None or not self.joiners.has(replica, link.incarnation):
            return []
        if isinstance(message, m.Ready) and self.joiners.ready(replica):
            return [Log("ready", {"replica": replica}), Send(conn, WAITS), *self._propose()]
        if isinstance(message, m.Leave):
            return self._dismiss(conn, replica)
        return []

    def _from_member(self, conn: Conn, link: _Link, message: m.Message, now: float) -> list[Action]:
        replica = link.replica
        if isinstance(message, m.Heartbeat):
            link.step, link.mute = message.step, message.mute
            link.since = link.since if link.divided else now
            link.divided = message.divided
            return self._tell_joiners()
        elif isinstance(message, m.Suspect):
            return self._suspected(conn, replica, message, now)
        elif isinstance(message, m.Stalled):
            return self._stalled(replica, message, now)
        elif isinstance(message, m.Reachable):
            self._blame.withdraw(replica, message.replica)
        elif isinstance(message, m.Promise):
            return self._promised(link, message)
        elif isinstance(message, m.Withdrawn):
            return self._withdrawn(message)
        elif isinstance(message, m.Installed):
            link.epoch = message.epoch
            return self._installed(replica, message.epoch)
        elif isinstance(message, m.CaughtUp):
            known = replica in self.caught_up  # it says so at every boundary until a view has it contributing
            self.caught_up.add(replica)
            return [] if known else [Log("caught_up", {"replica": replica, "step": message.step}), *self._propose()]
        elif isinstance(message, m.Leave):
            self.leaving.add(replica)
            return self._propose()
        elif isinstance(message, m.Finished):
            self.finished[replica] = now
            return [Log("finished", {"replica": replica}), Send(conn, m.FinishAck()), *self._check_done()]
        return []

    def _installed(self, replica: int, epoch: int) -> list[Action]:
        if self.view is None or epoch != self.view.epoch:
            return []
        self.installed.add(replica)
        if self._settled() and self.view.proposal:  # the view after one that was withdrawn says nothing of the next
            self._margin = 1
        return self._propose()

    def disconnected(self, conn: Conn, now: float) -> list[Action]:
        link = self.links.pop(conn, None)
        if link is None:
            return []
        replica = link.replica
        if self._counts(replica, link.incarnation):
            return [] if replica in self.finished else self._dial(replica, link.incarnation, now)
        if self.joiners.has(replica, link.incarnation):
            self.detector.forget(replica)
            self._dials.forget((replica, link.incarnation))
            return self._forget(replica)
        return []

    def exited(self, replica: int, reason: str) -> list[Action]:
        """Its launcher has seen it end, and not well. It may have said that it has finished: no process knows its own
        exit code."""
        if self.done or self.view is None or self.finished.pop(replica, None) is None:
            return []
        return self._lose({replica: reason}, proved=True)

    def drain(self) -> list[Action]:
        """All members leave at one common step boundary; joiners are turned away."""
        self.draining = True
        actions: list[Action] = [Log("draining", {})]
        if self.view is None:
            return [*actions, *self._turn_away(m.Expelled(DRAINED)), *self._finish()]
        if self.proposal is not None:
            actions += self._cancel()
        return [*actions, *self._turn_away(m.Dismissed(DRAINED)), *self._propose()]

    def tick(self, now: float) -> list[Action]:
        """To be called several times per heartbeat timeout."""
        if self.done or self._unfit:
            return []
        silent = self.detector.silent(now)
        self._ticks += not self._met
        actions: list[Action] = [*self._look(silent, now)]
        if self._early(now):
            return actions
        held, self._held = self._held, {}
        for by, message in held.values():
            if by in self.links:
                actions += self.receive(by, message, now)
        if self.done:
            return actions
        lost: dict[int, str] = {}
        for replica, seconds in silent.items():
            conn = self._conn(replica)
            if conn is not None and not self._counts(replica, self.links[conn].incarnation):
                self.detector.forget(replica)
                actions += [Close(conn), *self.disconnected(conn, now)]
            elif replica not in self.finished and self._corroborated(replica, silent, now):
                lost[replica] = f"silent for {seconds:.1f} s"
        finished = {
            replica: "finished"
            for replica, since in self.finished.items()
            if self.view is not None and replica in self.view.replicas and now - since > LINGER
        }
        if finished:
            return actions + self._lose(finished, proved=True)
        divided = self._divided()
        refused = {
            life[0]: x for (life, _), x in self._refused.items() if now - x.last <= FRESH and self._counts(*life)
        }
        ripe = {replica: why for replica, (why, since) in divided.items() if now - since > self.timeouts.patience}
        ripe |= {replica: x.why for replica, x in refused.items() if now - x.since > self.timeouts.heartbeat}
        holders = self._holders() - set(self.finished)
        whole = holders - set(silent) - set(divided) - set(refused)
        if holders and not whole:
            self._doubted = now  # the network may be cut, and those that only catch up be cut off with us
            doubtful = {replica: why for replica, (why, _) in divided.items()}
            doubtful |= {replica: x.why for replica, x in refused.items()}
            return actions + (self._spare({**doubtful, **lost}) if ripe or lost else [])
        if now - self._doubted > self.timeouts.heartbeat:
            lost = {**ripe, **lost}
        if not lost and whole:
            lost = self._culprit(now, divided.keys() | refused.keys())
        if not lost:
            return actions
        decided = self._lose(lost, proved=False)
        if not any(isinstance(action, Persist) for action in decided):
            return actions + decided
        # None of them has told its end: who has started them may have to end them.
        return [
            *actions,
            *decided,
            *(Log("removed", {"replica": replica, "reason": lost[replica]}) for replica in lost),
        ]

    def _look(self, silent: Collection[int], now: float) -> list[Action]:
        """Dial who is not heard; and if that is everybody who contributes, it is we who are cut off."""
        actions: list[Action] = []
        for member in self._running():
            quiet = not self.detector.within(member.replica, self.timeouts.silence / 2, now)
            if quiet or self._conn(member.replica) is None:
                actions += self._dial(member.replica, member.incarnation, now)
        holders = self.view.contributing - set(self.finished) if self.view is not None else frozenset()
        if holders and holders <= set(silent) and not self.alone:
            self.alone = True
            reason = (
                "none of the replicas that contribute is heard: this coordinator itself may be cut off, so it waits"
            )
            actions += [Log("cut_off", {"reason": reason}), *self._tell_all_joiners(ALONE)]
        return actions

    def _divided(self) -> dict[int, tuple[str, float]]:
        """Members whose leaders do not hear a rank of theirs: why, and since when they say so."""
        members = (
            link for link in self.links.values() if link.divided and self._counts(link.replica, link.incarnation)
        )
        return {link.replica: (link.divided, link.since) for link in members if link.replica not in self.finished}

    def _corroborated(self, replica: int, silent: Collection[int], now: float) -> bool:
        """Whether a contributing member that speaks misses it, too; else it may be our own network."""
        if self.view is None or not self._is_member(replica):
            return False
        return any(
            by in self.view.contributing and by not in silent and self._conn(by) is not None
            for by in self._blame.accusers(replica, now)
        )

    # -- looking for who is not heard ----------------------------------------------------------------------------

    def _dial(self, replica: int, incarnation: str, now: float) -> list[Action]:
        life = replica, incarnation
        member = self._life(replica, incarnation)
        if member is None or not self._dials.due(life, now):
            return []
        call = self._conn(replica) is None and self._dials.long(life)
        return [Dial(replica, incarnation, member.ranks[0], call)]

    def dialled(self, replica: int, incarnation: str, outcome: Outcome, now: float) -> list[Action]:
        """What became of a `Dial`."""
        life = replica, incarnation
        verdict = self._dials.judged(life, outcome, now)
        if outcome != "refused":
            self._refused.pop((life, 0), None)
        member = self._life(replica, incarnation)
        if member is None:
            self._dials.forget(life)  # it has gone meanwhile
        if member is None or self.done or self._unfit:
            return []
        if outcome == "answered":
            self.detector.acknowledged(replica, now)
        conn = self._conn(replica)
        if conn is not None and self.detector.within(replica, self.timeouts.presence, now):
            self._dials.found(life)  # it speaks
            return []
        if not verdict or replica in self.finished or self._early(now):
            return []
        if conn is not None and self.detector.answers(replica, self.timeouts.presence, now):
            return []  # its connection stands: what refuses is in between, or we are about to see that end
        if self._counts(replica, incarnation):
            why = "its process has ended"
            return self._lose({replica: why}, proved=True) if verdict == "ended" else self._refuses(life, 0, why, now)
        return [Close(conn), *self.disconnected(conn, now)] if conn is not None else self._forget(replica)

    def _refuses(self, life: Life, rank: int, why: str, now: float) -> list[Action]:
        """Another host refuses that rank. So does what is in between when it restarts, for all who are behind it. So
        the rank is lost as soon as another host takes a connection and this one still refuses; else after a heartbeat
        timeout, if anybody is whole. The last holder of the state never is."""
        known = self._refused.get((life, rank))
        if known is None or now - known.last > FRESH:
            self._refused[life, rank] = known = _Refused(now, now, why)
        known.last = now
        others = (x for x in self._running() if x.replica != life[0] and x.replica in self._holders())
        hosts = {x.ranks[rank].boot: x.ranks[rank] for x in others if x.ranks[rank].boot != self._boot}
        probes: list[Action] = [Probe(*life, rank, False, there) for there in list(hosts.values())[:WITNESSES]]
        return probes or self._probe(life, rank)

    def _probe(self, life: Life, rank: int) -> list[Action]:
        member = self._life(*life)
        return [] if member is None else [Probe(*life, rank, True, member.ranks[rank])]

    def probed(self, replica: int, incarnation: str, rank: int, itself: bool, outcome: Outcome) -> list[Action]:
        """What became of a `Probe`."""
        life = replica, incarnation
        if (life, rank) not in self._refused or self.done or self._unfit or replica in self.finished:
            return []
        if not itself:
            return self._probe(life, rank) if outcome == "answered" else []
        return self._believe(life, rank) if outcome in ("ended", "refused") else []

    def _believe(self, life: Life, rank: int) -> list[Action]:
        refused = self._refused.pop((life, rank))
        return self._lose({life[0]: refused.why}, proved=False) if self._counts(*life) else []

    def _culprit(self, now: float, doubtful: Set[int]) -> dict[int, str]:
        """Who has to go by what members complain of. Between two that do not reach each other it is the `doubtful` one:
        a rank of it is missed by others, too."""
        if self.view is None:
            return {}
        present = {  # after a restart all count as heard, so ask for a connection, too
            replica
            for replica in self.view.replicas
            if self._conn(replica) is not None and self.detector.within(replica, self.timeouts.presence, now)
        } - doubtful
        mute = {link.replica: link.mute for link in self.links.values() if link.mute}
        for replica, seconds in self.detector.mute(now).items():
            member = self.view.member(replica)
            mute[replica] = described(seconds, self._state(member.ranks[0]) if member is not None else "")
        self._held_up.update(dict.fromkeys(mute, now))  # one word between two compilations makes nobody slow
        # Longer than reports are good for: who reported it may fall mute before it can say that the op goes on.
        lately = max(self.timeouts.op_floor, FRESH + REPORT)
        held = {replica for replica, last in self._held_up.items() if now - last <= lately}
        return self._blame.culprit(now, self.view.contributing, present, mute, held)

    # -- joining -------------------------------------------------------------------------------------------------

    def _join(self, conn: Conn, join: m.Join, now: float) -> list[Action]:
        replica = join.replica
        refusal = self._refusal(join)
        refused = "" if refusal is None else refusal.reason
        if not refused and self.view is not None and max(join.epoch, join.heard) > self._epoch:
            return self._outdated(conn, join, now)
        if refused and join.epoch > 0 and not self.done:  # it runs: its job must not end with a wrong start of ours
            return [*self._refuse(join, refused), Close(conn)]
        if refusal is not None:
            return [*self._refuse(join, refused), Send(conn, refusal), Close(conn)]
        if self._is_last(replica, join.incarnation, now):
            reason = (
                f"another process is replica {replica}, and the only one that holds the state of the training; give "
                "each replica a number of its own (FTCOMM_REPLICA)"
            )
            return [*self._refuse(join, reason), Close(conn)]  # it comes again
        actions: list[Action] = []
        said = self.links.get(conn)
        if said is not None and (said.replica, said.incarnation) != (replica, join.incarnation):
            return [*self.disconnected(conn, now), Close(conn)]  # it speaks for one life of one replica, or for none
        if join.epoch > 0 and not self._counts(replica, join.incarnation):
            return self._outlived(conn, join, now)
        if join.heard > 0 and self.view is None:  # it may enter that view at any moment, or have entered it
            reason = f"it was told of epoch {join.heard} of a job that this coordinator has no file of views of"
            return [*self._refuse(join, reason), Close(conn)]  # it comes again
        old = self._conn(replica)
        if old is not None and old != conn:
            if self.links[old].incarnation == join.incarnation:
                del self.links[old]  # it connected again before we saw the old connection close
            else:
                actions += [*self._displace(replica), *self.disconnected(old, now)]
            actions.append(Close(old))
        if not self._counts(replica, join.incarnation) and self._is_member(replica):
            if self._early(now) or self._may_hold({replica}):
                return [*actions, Close(conn)]  # it comes again
            self.finished.pop(replica, None)  # its earlier life is lost, whatever became of it
            actions += self._lose({replica: "restarted"}, proved=True)
            if self.done:
                return [*actions, Send(conn, m.Expelled("the job has ended with its earlier life")), Close(conn)]
        link = self.links[conn] = _Link(replica, join.incarnation, join.step, join.epoch)
        self._untold.discard((replica, join.incarnation))
        actions += self._heard(link, now)
        if self._counts(replica, join.incarnation):
            if join.leaving:
                self.leaving.add(replica)
            if join.caught_up:
                self.caught_up.add(replica)
            return [*actions, *self._rejoined(conn, join), *self._reach(join, now)]
        self.finished.pop(replica, None)
        self.leaving.discard(replica)  # what its earlier life wanted
        self.caught_up.discard(replica)
        actions.append(Log("joined", {"replica": replica}))
        return [*actions, *self._register(conn, join), *self._reach(join, now)]

    def _refuse(self, join: m.Join, reason: str) -> list[Action]:
        """Log why a life is refused, once: one that may try again does so twice a second."""
        refusal = join.incarnation, reason
        if self._refusals.get(join.replica) == refusal:
            return []
        self._refusals[join.replica] = refusal
        return [Log("refused", {"replica": join.replica, "reason": reason})]

    def _is_last(self, replica: int, incarnation: str, now: float) -> bool:
        """Whether another life of the replica is connected, answers, and nobody else holds the state: that another one
        comes is no proof then that it has ended."""
        old = self._conn(replica)
        if old is None or self._counts(replica, incarnation) or not self._counts(replica, self.links[old].incarnation):
            return False
        return self._holders() - set(self.finished) == {replica} and self.detector.answers(
            replica, self.timeouts.silence, now
        )

    def _reach(self, join: m.Join, now: float) -> list[Action]:
        """Once, while it lives: whether its port answers us, and so whether a refusal means anything."""
        return (
            []
            if self._dials.known((join.replica, join.incarnation))
            else self._dial(join.replica, join.incarnation, now)
        )

    def _outdated(self, conn: Conn, join: m.Join, now: float) -> list[Action]:
        """It has been in views that we know nothing of: what we decided would have the number of one of them."""
        reason = (
            f"the store is older than the job: it ends with epoch {self._epoch}, and replica {join.replica} knows of "
            f"epoch {max(join.epoch, join.heard)}. The job goes on without a coordinator; start one with the store "
            "that it had"
        )
        if not self._counts(join.replica, join.incarnation) and not self._early(now) and not self.alone:
            # Nobody that we know, and those that we know have come: it may be of another job.
            return [*self._refuse(join, reason), Close(conn)]
        self._unfit = True
        return [Log("outdated", {"replica": join.replica, "reason": reason}), Close(conn), Unfit(reason)]

    def _register(self, conn: Conn, join: m.Join) -> list[Action]:
        """It has come to stay: it is known. In a running job nobody is to wait for it before its script is ready."""
        replica = join.replica
        member = Member(replica, join.incarnation, join.ranks, contributing=False)
        self.joiners.add(member, ready=join.ready or self.view is None)
        if self.view is None:
            return self._form()
        if join.leaving:
            return self._dismiss(conn, replica)
        if join.ready:
            news = ALONE if self.alone else WAITS
            return [Log("ready", {"replica": replica}), Send(conn, news), *self._propose()]
        if self.alone:
            return [Send(conn, ALONE)]
        reason = "joins when a step boundary was passed; nobody has come to one yet (ftcomm.steps, Group.boundary)"
        return self._tell_joiners() or [Send(conn, m.Queued(reason, m.Stage.JOINING))]

    def _tell_joiners(self) -> list[Action]:
        """Let those prepare who do not know yet that they may. Not before some boundary was passed: a job that passes
        none takes nobody in, and a script would train by itself while it waits for that."""
        if self.view is None or max(link.step for link in self.links.values()) < 0:
            return []
        return [Send(self._link_of(replica), m.Registered(seen)) for replica, seen in self.joiners.tell(self.view)]

    def _tell_all_joiners(self, news: m.Queued) -> list[Action]:
        """Those in a view that nobody has run in yet, too."""
        waiting = (
            conn
            for conn, link in self.links.items()
            if link.epoch == 0 or self.joiners.has(link.replica, link.incarnation)
        )
        return [Send(conn, news) for conn in waiting]

    def _dismiss(self, conn: Conn, replica: int) -> list[Action]:
        """It has asked to leave before it was in any view, so there is no boundary to wait for."""
        reason = "it has asked to leave before it had joined"
        return [
            Log("dismissed", {"replica": replica, "reason": reason}),
            Send(conn, m.Dismissed(reason)),
            *self._forget(replica),
        ]

    def _forget(self, replica: int) -> list[Action]:
        """It does not want to join any more."""
        self.joiners.drop(replica)
        if self.proposal is not None and replica in self.proposal.joins:
            return [*self._cancel(), *self._propose()]
        return []

    def _displace(self, replica: int) -> list[Action]:
        """Another life has come while one was connected. Once that is a restart whose end we have not seen; twice it is
        two launchers, and each would start its own again whenever the other's has taken its place."""
        self._displaced[replica] = self._displaced.get(replica, 0) + 1
        if self._displaced[replica] < 2:
            return []
        times = self._displaced[replica]
        reason = (
            f"replica {replica} was replaced {times} times by a process that came while the one before was connected: "
            f"two processes have FTCOMM_REPLICA={replica}. Give each replica a number of its own"
        )
        return [Log("twins", {"replica": replica, "reason": reason})]

    def _outlived(self, conn: Conn, join: m.Join, now: float) -> list[Action]:
        """It says that it runs in the job, which went on without it; another life may have its number by now."""
        replica = join.replica
        actions: list[Action] = []
        old = self._conn(replica)
        if old is not None and self.links[old].incarnation == join.incarnation:
            actions += self.disconnected(old, now)
            self.detector.forget(replica)
            if old != conn:
                actions.append(Close(old))
        if self.view is None:  # let it train on: nobody is served by ending a job for a lost file
            reason = f"it runs in epoch {join.epoch} of a job that this coordinator has no file of views of"
            return [*actions, *self._refuse(join, reason), Close(conn)]
        reason = f"replica {replica} was removed from the job in epoch {self._epoch} or before, while it was not heard"
        removed = Log("removed", {"replica": replica, "reason": "the job went on without it while it was not heard"})
        return [*actions, removed, Send(conn, m.Expelled(reason)), Close(conn)]

    def _refusal(self, join: m.Join) -> m.Expelled | None:
        other = other_job(join, self.ranks_per_replica, self.timeouts) or too_large(join, self.expected, self._room)
        if other:
            return m.Expelled(other)
        member = self._counts(join.replica, join.incarnation)  # of a view that it may not have installed yet
        if self.done or (self.draining and join.epoch == 0 and not member):
            return OVER
        return None

    def _form(self) -> list[Action]:
        here = self.joiners.waiting
        if len(here) < self.expected:
            missing = ", ".join(str(replica) for replica in range(self.expected) if replica not in here)
            reason = f"{len(here)} of {self.expected} replicas are here; missing: {missing}"
            return [Send(self._link_of(replica), m.Queued(reason)) for replica in here]
        members = [contributing(member) for member in here.values()]
        self.joiners.clear()
        return self._decide(tuple(sorted(members, key=lambda x: x.replica)), 0, "all replicas are here")

    def _rejoined(self, conn: Conn, join: m.Join) -> list[Action]:
        """A member connected again: after a restart of the coordinator, or a lost connection."""
        assert self.view is not None
        if join.epoch == self.view.epoch:
            asked = self.proposal is not None and join.replica not in self.proposal.promised
            again = self._cancel() if asked else []  # what it was asked, or has answered, may have been lost
            return [*again, *self._installed(join.replica, join.epoch), *self._tell_joiners()]
        alone = [Send(conn, ALONE)] if self.alone and join.epoch == 0 else []  # nobody may come to run in that view
        return [Send(conn, m.NewView(self.view)), *alone, *self._tell_joiners()]

    # -- losses --------------------------------------------------------------------------------------------------

    def _suspected(self, conn: Conn, by: int, suspect: m.Suspect, now: float) -> list[Action]:
        if not self._counts(suspect.replica, suspect.incarnation) or suspect.replica in self.finished:
            return []
        fields = {"replica": suspect.replica, "reason": suspect.reason, "by": by}
        if by == suspect.replica and suspect.proof:
            return [Log("suspect", fields), *self._lose({suspect.replica: suspect.reason}, proved=True)]
        if by == suspect.replica:
            member = self._life(suspect.replica, suspect.incarnation)
            known = member is not None and suspect.rank < len(member.ranks)
            life = suspect.replica, suspect.incarnation
            return self._refuses(life, suspect.rank, suspect.reason, now) if known else []
        if suspect.proof:
            return self._ask(conn, by, suspect, fields)
        first = self._blame.complaint(by, suspect.replica, now, suspect.reason)
        return [Log("suspect", fields)] if first else []

    def _ask(self, conn: Conn, by: int, suspect: m.Suspect, fields: dict[str, object]) -> list[Action]:
        """A member was proved by another one to have ended: that holds unless it answers us."""
        life = suspect.replica, suspect.incarnation
        member = self._life(*life)
        if member is None or suspect.rank >= len(member.ranks) or (life, suspect.rank) in self._accused:
            return []
        self._accused[life, suspect.rank] = conn, by, suspect
        return [Log("suspect", fields), Ask(*life, suspect.rank, member.ranks[suspect.rank])]

    def asked(self, replica: int, incarnation: str, rank: int, here: bool) -> list[Action]:
        """What became of an `Ask`: `here` if the process of that life has answered, and so lives."""
        accused = self._accused.pop(((replica, incarnation), rank), None)
        over = self.done or self._unfit or replica in self.finished
        if accused is None or over or not self._counts(replica, incarnation):
            return []
        conn, by, suspect = accused
        if here:
            reason = f"replica {by} says that it has ended ({suspect.reason}), and it answers"
            return [Log("spared", {"replica": replica, "reason": reason})]
        if self._may_hold({replica}):
            return self._hold(conn, suspect)  # it is said once
        return self._lose({replica: suspect.reason}, proved=True)

    def _stalled(self, by: int, stall: m.Stalled, now: float) -> list[Action]:
        if all(stall.epoch != view.epoch for view in self._in_force()):
            return []
        here = {replica for view in self._in_force() for replica in view.replicas}
        # A rank that answers may wait for another one of its replica, which says on whom that waits.
        waiting_on = tuple(x for x in stall.waiting_on if x in here and (x != by or not stall.due))
        if not self._blame.stalled(by, stall.rank, stall.op, waiting_on, stall.due, now):
            return []
        conns = [self._conn(replica) for replica in sorted(here)]
        return [Send(conn, m.WhoWaits()) for conn in conns if conn is not None]

    def _lose(self, lost: dict[int, str], *, proved: bool) -> list[Action]:
        """A view without `lost`, at once. A change in which nobody is known to run is given up with it. `proved`: that
        their processes have ended, or need nothing more; else nothing is done that would end the job."""
        assert self.view is not None
        base = self.view
        if lost and self.installed and not set(lost) & set(base.replicas):
            return []  # the change takes it out
        if not proved and self._holders() - set(self.finished) <= set(lost):
            return self._spare(lost)
        if self._may_hold(set(lost)):
            return []  # until those come, or are proved to have ended, too; who is lost is looked for again
        actions = self._cancel()
        step = None if self._settled() else base.step  # where those begin that have not run yet
        gone = set(lost) | {replica for replica in self.finished if self._conn(replica) is None}
        members = base.members
        if base.proposal and self._before is not None and not self.installed:
            self.caught_up |= base.contributing - self._before.contributing  # they hold the state all the same
            old = set(self._before.replicas)  # its joiners wait again: who ran with them has to start anew, too
            joiners = [x for x in base.members if x.replica not in old | gone and self._conn(x.replica) is not None]
            for member in joiners:
                self.joiners.add(member, ready=True)
            if self.draining:  # no view comes that could have them
                actions += self._turn_away(m.Dismissed(DRAINED))
            members = given_up(base, self._before, gone, withdrawn=not lost)
            base, step = self._before, None
        members = tuple(member for member in members if member.replica not in gone)
        if not any(member.contributing for member in members):  # who has caught up holds the state, boundary or not
            holders = self.caught_up | (self.view.contributing - gone)
            members = tuple(contributing(member) if member.replica in holders else member for member in members)
        for replica in gone:
            self.detector.forget(replica)
            self.caught_up.discard(replica)
            self._held_up.pop(replica, None)
        for replica, why in lost.items():
            conn = self._conn(replica)
            if replica not in self.finished and conn is not None:
                said = f"replica {replica} was removed from the job after epoch {self._epoch}: {why}"
                actions.append(Send(conn, m.Expelled(said)))
        why = "; ".join(f"lost {replica}: {reason}" for replica, reason in lost.items()) or "a change was withdrawn"
        if any(member.contributing for member in members):
            persist, *rest = self._decide(members, step, why)
            return [persist, *actions, *rest]  # nobody is sent away before that is written down
        if base.contributing & set(self.finished):  # the training is complete; who still catches up may end in peace
            return [*actions, *self._turn_away(FINISHED), *self._finish()]
        failed = (
            f"{why}: no replica that holds the state of the training is left; restart the job from its last checkpoint"
        )
        conns = [self._conn(member.replica) for member in members]
        self.view = View(self._epoch, None, (), failed)
        expelled = [Send(conn, m.Expelled(failed)) for conn in conns if conn is not None]
        return [*actions, *expelled, *self._turn_away(m.Expelled(failed)), *self._finish(failed)]

    def _holders(self) -> set[int]:
        """Who holds the state of the training."""
        views = self._in_force() if not self.installed else self._in_force()[:1]
        here = {replica for view in views for replica in view.replicas}
        return {replica for view in views for replica in view.contributing} | (self.caught_up & here)

    def _may_hold(self, lost: set[int]) -> bool:
        """Whether the state is lost with them as far as we know, and somebody who catches up cannot say whether it has
        caught up: by our store, and it has not come since we have begun; or its leader does not hear all of its ranks.
        """
        if lost <= set(self.finished) or not self._holders() - set(self.finished) <= lost:
            return False
        untold = {replica for replica, life in self._untold if self._counts(replica, life)}
        return bool((untold | self._divided().keys()) - lost)

    def _spare(self, lost: dict[int, str]) -> list[Action]:
        if not lost or self._spared == self._epoch:
            return []
        self._spared = self._epoch
        why = "; ".join(f"{replica}: {reason}" for replica, reason in lost.items())
        reason = f"nobody else holds the state of the training, and it is not proved that its process has ended ({why})"
        return [Log("spared", {"replica": replica, "reason": reason}) for replica in lost]

    # -- changes at a step boundary ------------------------------------------------------------------------------

    def _settled(self) -> bool:
        """All members run in the newest view. After a drain nobody does: that it was taken shows when all finish."""
        return self.view is not None and bool(self.view.members) and self.installed >= set(self.view.replicas)

    def _propose(self) -> list[Action]:
        """Ask every leader for its promise, if there is something to change and nothing else is under way."""
        view = self.view
        if view is None or self.proposal is not None or not self._settled() or self.done:
            return []
        here = set(view.replicas)
        if here & set(self.finished) or any(self._conn(replica) is None for replica in here):
            return []
        joins, contributes, leaves = wanted(view, self.joiners.waiting, self.caught_up, self.leaving, self.draining)
        if not (joins or contributes or leaves):
            return []
        self._proposals += 1
        step = max(self.links[self._link_of(replica)].step for replica in here) + self._margin
        number = self._proposals << 32 | self._lifetime
        self.proposal = Proposal(number, step, joins, contributes, leaves)
        prepare = m.Prepare(number, view.epoch, step)
        return [Send(self._link_of(replica), prepare) for replica in view.replicas]

    def _promised(self, link: _Link, promise: m.Promise) -> list[Action]:
        link.step = max(link.step, promise.step)
        proposal, view = self.proposal, self.view
        if proposal is None or view is None or self.done or promise.proposal != proposal.number:
            return []
        if not promise.ok:
            self._margin = min(2 * self._margin, 1 << 20)
            return [*self._cancel(), *self._propose()]
        proposal.promised.add(link.replica)
        if proposal.promised < set(view.replicas):
            return []
        self.proposal = None
        for replica in proposal.joins:
            self.joiners.drop(replica)
        self.caught_up -= proposal.contributes
        members = proposal.applied(view.members)
        return self._decide(members, proposal.step, proposal.why(), proposal.number)

    def _withdrawn(self, message: m.Withdrawn) -> list[Action]:
        if self.proposal is not None and self.proposal.number == message.proposal:
            self._margin = min(2 * self._margin, 1 << 20)
            return [*self._cancel(), *self._propose()]
        if self.view is not None and 0 != self.view.proposal == message.proposal and not self.installed:
            self._margin = min(2 * self._margin, 1 << 20)
            return self._lose({}, proved=True)
        return []

    def _cancel(self) -> list[Action]:
        if self.proposal is None or self.view is None:
            return []
        number, self.proposal = self.proposal.number, None
        conns = [self._conn(replica) for replica in self.view.replicas]
        return [Send(conn, m.Cancel(number)) for conn in conns if conn is not None]

    # -- deciding ------------------------------------------------------------------------------------------------

    def _decide(self, members: tuple[Member, ...], step: int | None, why: str, proposal: int = 0) -> list[Action]:
        if self._epoch + 1 >= EPOCHS:
            return self._finish(
                f"all {EPOCHS - 1:,} epochs that a job can have are used up; start it again from its last checkpoint, "
                "with an empty --store"
            )
        self._epoch += 1
        superseded = self._in_force() if not self.installed else [self.view] if self.view is not None else []
        hearers = {member.replica for member in members}.union(*(view.replicas for view in superseded))
        self._before = self.view
        self.view = View(self._epoch, step, members, why, proposal)
        self.installed = set()
        self._blame.clear()
        here = {(x.replica, x.incarnation) for x in (*self._running(), *self.joiners)}
        self._dials.keep(here)
        self._refused = {key: refused for key, refused in self._refused.items() if key[0] in here}
        conns = [self._conn(replica) for replica in sorted(hearers)]
        described = [{"replica": member.replica, "contributing": member.contributing} for member in members]
        begins = step if proposal or self._before is None else None  # a loss has none
        return [
            Persist(self.view),
            *[Send(conn, m.NewView(self.view)) for conn in conns if conn is not None],
            Log("view", {"epoch": self._epoch, "step": begins, "members": described, "why": why}),
        ]

    def _check_done(self) -> list[Action]:
        if self.view is None or self.done:
            return []
        last = self.view if self.view.members or self._before is None else self._before  # after a drain: who left
        if set(last.replicas) <= set(self.finished):
            return [*self._turn_away(FINISHED), *self._finish()]
        return []

    def _finish(self, failed: str = "") -> list[Action]:
        if self.done:
            return []
        self.done = True
        return [Log("failed", {"reason": failed}), Done(failed)] if failed else [Done()]

    def _turn_away(self, word: m.Expelled | m.Dismissed) -> list[Action]:
        """All joiners go, with this word."""
        conns = [self._conn(replica) for replica in self.joiners.clear()]
        return [Send(conn, word) for conn in conns if conn is not None]

    # -- look-ups ------------------------------------------------------------------------------------------------

    def _in_force(self) -> list[View]:
        """The newest view, and the one that it changes as long as some members may still run in that."""
        changing = self.view is not None and self.view.proposal != 0 and not self._settled()
        return [view for view in (self.view, self._before if changing else None) if view is not None]

    def _running(self) -> list[Member]:
        """Members of the views in force that have not finished."""
        members = {x.replica: x for view in reversed(self._in_force()) for x in view.members}
        return [members[replica] for replica in sorted(members.keys() - self.finished.keys())]

    def _life(self, replica: int, incarnation: str) -> Member | None:
        """A member of a view in force, or a joiner."""
        known = (*(x for view in self._in_force() for x in view.members), *self.joiners)
        return next((x for x in known if (x.replica, x.incarnation) == (replica, incarnation)), None)

    def _counts(self, replica: int, incarnation: str) -> bool:
        """Whether this life of the replica is a member that others may wait for."""
        return any(view.has(replica, incarnation) for view in self._in_force())

    def _contributes(self, replica: int, incarnation: str) -> bool:
        """Whether this life does, in some view that may be in force."""
        return any(view.has(replica, incarnation) and replica in view.contributing for view in self._in_force())

    def _is_member(self, replica: int) -> bool:
        """Whether some life of the replica is."""
        return any(replica in view.replicas for view in self._in_force())

    def _conn(self, replica: int) -> Conn | None:
        return next((conn for conn, link in self.links.items() if link.replica == replica), None)

    def _link_of(self, replica: int) -> Conn:
        conn = self._conn(replica)
        assert conn is not None, f"replica {replica} has no connection"
        return conn
