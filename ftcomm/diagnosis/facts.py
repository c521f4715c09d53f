"""All that is known of a job at one moment, as typed data: what a verdict is made from.

Times are seconds before that moment, so that facts of several hosts can stand side by side. What is not known is left
empty: a rank on a host that does not answer has no process, no stacks and no ops.
"""

from __future__ import annotations

import msgspec

from ftcomm.diagnosis.processes import ProcessFacts
from ftcomm.diagnosis.stacks import Stacks
from ftcomm.recorder.layout import ALL

Rank = tuple[int, int]  # replica, and rank in it
COORDINATOR: Rank = (-1, 0)  # the end of a connection that is the coordinator's


class WaitFacts(msgspec.Struct, frozen=True):
    """A wait of an op for a rank, for so many seconds until now."""

    rank: Rank
    seconds: float


CallKey = tuple[str, int, int]  # what is alike for all that are in the same op, or the same phase


class OpFacts(msgspec.Struct, frozen=True):
    """An op of a rank. `what` says in words what was called, alike on all members; `caller` is the line of the script.
    An op that is not `open` has returned, `over` seconds ago; `epoch` is that of the view in which it goes on. Groups
    with the same name and `column` are the same: rank i of all replicas has a group of its own for each i."""

    group: str
    number: int
    what: str
    age: float  # since it was called
    caller: str = ""
    open: bool = True
    over: float = 0.0
    failed: bool = False
    column: int = 0
    epoch: int = 0
    waits: tuple[WaitFacts, ...] = ()
    any_ends = False  # all have to come

    @property
    def same(self) -> CallKey:
        return self.group, self.column, self.number

    @property
    def named(self) -> str:
        return f"{self.short} ({self.what})"

    @property
    def within(self) -> str:
        return f"in {self.named}"

    def removes(self, by: Rank, on: Rank) -> bool:
        """Whether `on` is removed if `by` waits for it for too long."""
        return True

    @property
    def short(self) -> str:
        return f"op {self.number}" if self.group == ALL else f"op {self.number} of group {self.group!r}"


class PhaseFacts(msgspec.Struct, frozen=True):
    """Something besides ops that a rank is in, and in which it waits for others: a step boundary ("stand"), what the
    ranks of one replica tell each other ("meet"), a message ("send", "recv"), a sign of life ("alive"). `named` says in
    words what it is. `group` is alike for all that are in the same one; each message has one of its own. It fails by
    itself in `left` seconds, if that is known."""

    kind: str
    named: str
    group: str
    number: int
    caller: str = ""
    left: float | None = None
    waits: tuple[WaitFacts, ...] = ()

    @property
    def same(self) -> CallKey:
        return f"{self.kind} {self.group}", 0, self.number

    @property
    def any_ends(self) -> bool:
        """Whether it is over when any of those comes that it waits for; else all have to."""
        return self.kind == "recv"

    @property
    def within(self) -> str:
        how = {"stand": "at", "alive": "for"}.get(self.kind, "in")
        return f"{how} {self.named}"

    def removes(self, by: Rank, on: Rank) -> bool:
        """Whether `on` is removed if `by` waits for it for too long."""
        return self.kind in ("stand", "alive") and by[0] != on[0]


class PauseFacts(msgspec.Struct, frozen=True):
    """A step loop that pauses before `step`, since too few replicas contribute, and fails by itself in `left`
    seconds. `contributing` were there when it began; `needed` says in words how many it takes."""

    step: int
    contributing: int
    needed: str
    age: float
    left: float | None


class RankFacts(msgspec.Struct, frozen=True):
    """A rank. `began` says whether its script has come to ftcomm.init(); `collecting` is the share of time that the
    garbage collector takes."""

    rank: Rank
    host: str = ""
    reached: bool = True  # whether the host was asked; else nothing below is known
    began: bool = True
    member: bool = True
    reason: str = ""  # why its replica is not in the job
    process: ProcessFacts | None = None
    stacks: Stacks = Stacks()
    collecting: float = 0.0
    phase: str = ""  # what it does besides ops
    phase_age: float = 0.0
    idle: float = 0.0  # since its last op returned
    step: float = 0.0  # what it usually takes from the return of an op to the next call
    ops: tuple[OpFacts, ...] = ()  # the newest, oldest first
    phases: tuple[PhaseFacts, ...] = ()  # in which it is, and waits
    pause: PauseFacts | None = None

    @property
    def open(self) -> tuple[OpFacts, ...]:
        """The ops in flight."""
        return tuple(op for op in self.ops if op.open)

    @property
    def inside(self) -> tuple[OpFacts | PhaseFacts, ...]:
        """All that it is in and may wait in."""
        return (*self.open, *self.phases)


class LinkFacts(msgspec.Struct, frozen=True):
    """A TCP connection for data in one direction."""

    sender: Rank
    receiver: Rank
    waiting: int = 0  # bytes that the receiver has not acknowledged
    retries: int = 0  # how often the oldest segment was sent again
    lost: int | None = None  # segments that were sent and never got; None: the receiver's count is not known
    rate: float = 0.0  # bytes a second that the receiver acknowledges by now
    arrived: int = 0  # segments that it got between two looks
    heard: float | None = None  # seconds since it got data last; None: not known

    @property
    def works(self) -> bool:
        """Whether what is sent arrives, though nothing that says so comes back."""
        return self.lost == 0 and self.waiting > 0 and self.retries > 0


class JobFacts(msgspec.Struct, frozen=True):
    """A job at the time `at`, in seconds since 1970. `forming`: there is no view yet."""

    at: float
    run: str = ""
    replicas: int = 0
    ranks_per_replica: int = 1
    op_floor: float = 30.0  # s after which a wait is a stall at the earliest
    op_timeout: float = 120.0  # and at the latest
    grace: float = 5.0  # s for which a stall is watched before its cause is removed
    presence: float = 1.5  # s after a sign of life for which the coordinator takes a member for alive
    forming: bool = False
    ranks: tuple[RankFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    # Of a moment before, if somebody waited then for one whom it does not wait for now; its processes are those of now
    earlier: JobFacts | None = None
