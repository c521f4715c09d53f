"""All waiting times, as one chain derived from one number, so that each link can do its work in time.

beat       heartbeat / 10         between two signs of life; of a leader with many ranks, and between the members of a
                                  large group, some beats (`beats`, `beats_between`)
heartbeat  op / 24, 0.2 to 5 s    a host whose kernel is silent for so long is lost, with what runs on it. A process
                                  that holds its interpreter lock (a compilation, a long C call), or is stopped,
                                  lives: what waits for it is a stall, by the numbers that follow
op_floor   op / 4, > heartbeat    the earliest time at which an op without progress is called a stall
op         THE NUMBER             the latest time; in between, the deadline follows what such ops really took
grace      op / 4, 5 s at most    a stall is watched for so long before its cause is removed. If the cause lives and is
                                  mute, it has lasted for op: earlier ops do not tell how long it holds its interpreter
give_up    2 * op                 then the op fails, whatever the coordinator does
absence    30 * op                but as long as nobody hears the coordinator, who waits does so for so long: only the
                                  coordinator can decide that a member is lost

Who waits counts the seconds in which its own process runs (`ftcomm.control.running_time`).
"""

from __future__ import annotations

import dataclasses

REPORT = 1.0  # s between two reports of a stall that lasts, so one may be lost
RANKS_PER_BEAT = 1024  # with which a leader exchanges signs of life in a beat, as long as `MOST_BEATS` are enough
MEMBERS_PER_BEAT = 256  # to which a rank gives a sign of life in a beat, likewise
MOST_BEATS = 4  # between two signs of life
AWAITED_EVERY = 0.05  # s between two looks of a thread that waits outside of an op, at whom it waits for
INIT_TIMEOUT = 120.0  # s in which a rank tries to join, unless the user says otherwise
LEAST_HEARTBEAT = 0.1  # s; two kernels may take 40 ms each to acknowledge


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """The times in seconds, made by `derive`. Raises `ValueError`, with the reason and the mend, if the chain cannot
    work."""

    heartbeat: float
    op_floor: float
    op: float

    @classmethod
    def derive(cls, op: float = 120.0, heartbeat: float | None = None, op_floor: float | None = None) -> Timeouts:
        """Derives the whole chain from `op`; a time that is given stays as it is."""
        if heartbeat is None:
            heartbeat = min(5.0, max(2 * LEAST_HEARTBEAT, op / 24))
        if op_floor is None:
            op_floor = max(op / 4, min(op, 2 * heartbeat))
        return cls(heartbeat, op_floor, op)

    @property
    def beat(self) -> float:
        return self.heartbeat / 10

    @property
    def silence(self) -> float:
        """The seconds without a message of the process or an answer of the kernel after which a rank is lost. They
        leave room for the beat that was under way and for the tick that notices, so that no host is silent for longer
        than `heartbeat`."""
        return 0.8 * self.heartbeat

    @property
    def unheard(self) -> float:
        """The seconds of silence after which members complain of each other; `hold_down` is still to come."""
        return 0.5 * self.heartbeat

    def beats(self, ranks: int) -> int:
        """The beats between two signs of life of a leader and each of the `ranks` of its replica, of which shard 0
        gives and gets them every beat. They watch each other for as many times `unheard`. So a host of such a replica
        is lost within (0.6 * beats + 0.55) * heartbeat, and never later than a stall."""
        return self._beats(ranks, RANKS_PER_BEAT)

    def beats_between(self, members: int) -> int:
        """The beats between two signs of life of a rank to each member of a group of so many: in each beat it gives
        them to `MEMBERS_PER_BEAT` or so. It may find out so many beats later that a member is silent."""
        return self._beats(members, MEMBERS_PER_BEAT)

    def _beats(self, peers: int, at_once: int) -> int:
        return max(1, min(-(-peers // at_once), MOST_BEATS, int(self.op_floor / self.heartbeat)))

    @property
    def presence(self) -> float:
        """A member is taken for alive for so many seconds after its sign of life, when two cannot reach each other."""
        return 3 * self.beat

    @property
    def hold_down(self) -> float:
        """The seconds that a complaint is held before it is acted upon. They are more than `presence`, so that a member
        that has just died is known to be absent by then, even if the news of its end is lost."""
        return 4 * self.beat

    def hold_down_among(self, members: int) -> float:
        """The same for a complaint of one of so many members. They find out up to `beats_between` apart that one of
        them is cut off, and it takes the complaints of all to tell which."""
        return self.hold_down + (self.beats_between(members) - 1) * self.beat

    @property
    def grace(self) -> float:
        return min(self.op / 4, 5.0)

    @property
    def _to_replace(self) -> float:
        """The seconds to report a stall, find its cause and replace the view."""
        return self.grace + 2 * REPORT + self.heartbeat

    @property
    def replaced(self) -> float:
        """The seconds that an op waits at most until a replica that stands still is out of the view."""
        return self.op + self._to_replace

    @property
    def give_up(self) -> float:
        return 2 * self.op

    @property
    def absence(self) -> float:
        return 30 * self.op

    def __post_init__(self) -> None:
        for name, seconds in dataclasses.asdict(self).items():
            if not 0 < seconds < float("inf"):
                raise ValueError(f"the {_NAMES[name]} of {seconds} s; expected a positive number of seconds")
        if self.heartbeat < LEAST_HEARTBEAT:
            raise ValueError(
                f"the heartbeat timeout of {self.heartbeat:g} s is below {LEAST_HEARTBEAT:g} s: a host whose network "
                "is merely busy for a moment would be lost. Raise it"
            )
        if self.op <= self.heartbeat:
            raise ValueError(
                f"the op timeout of {self.op:g} s is not above the heartbeat timeout of {self.heartbeat:g} s: an op "
                "would give up before a silent replica is found. Raise the first or lower the second"
            )
        if not self.heartbeat < self.op_floor <= self.op:
            raise ValueError(
                f"the floor of the op timeout of {self.op_floor:g} s is not between the heartbeat timeout "
                f"({self.heartbeat:g} s) and the op timeout ({self.op:g} s): below the first a host that is gone "
                "would be called a stall before its silence is noticed, above the second it would never apply. Choose "
                "one between them"
            )
        needed = self._to_replace
        if self.give_up - self.op <= needed:
            raise ValueError(
                f"the op timeout of {self.op:g} s leaves too little time before an op gives up, after twice that: "
                f"reporting a stall, finding its cause and replacing the view take up to {needed:g} s with a heartbeat "
                f"timeout of {self.heartbeat:g} s. Raise the first above {needed:g} s, or lower the second"
            )


_NAMES = {"heartbeat": "heartbeat timeout", "op_floor": "floor of the op timeout", "op": "op timeout"}
