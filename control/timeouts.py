"""All times that somebody waits, as one chain derived from one number, so that each link can do its work in time.

beat         heartbeat / 10   between two signs of life
heartbeat    op / 24, 0.2 to 5 s: silence of its kernel after which a host, and what runs on it, is lost. Not of a
             process: one that holds its interpreter lock (a compilation, a long C call), or is stopped, lives, and what
             waits for it is a stall, by the numbers that follow
op_floor     op / 4, and above heartbeat: the earliest that an op without progress is called a stall
op           THE NUMBER. The latest that it is; between the two the deadline follows what such ops really took
grace        op / 4, 5 s at most: how long a stall is watched before the one who causes it is removed
ceiling      op - op_floor: the same for one that lives and does not speak, so that the stall has lasted for op by then.
             What such ops took before says nothing of how long it holds its interpreter
give_up      2 * op: then the op fails, whatever the coordinator does
"""

from __future__ import annotations

import dataclasses

REPORT = 1.0  # s between two reports of a stall that lasts: one that is lost does not matter
LEAST_HEARTBEAT = 0.1  # s; less than two kernels may take to acknowledge (40 ms each) would be no silence


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Seconds. Made by `derive`. Raises `ValueError`, with the reason and the mend, on a chain that cannot work."""

    heartbeat: float
    op_floor: float
    op: float

    @classmethod
    def derive(cls, op: float = 120.0, heartbeat: float | None = None, op_floor: float | None = None) -> Timeouts:
        """The whole chain from `op`; what is given by itself stands."""
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
        """With neither a word of its process nor an answer of its kernel for that long one is lost to who counts on it:
        so that, with the beat that was under way and the look that finds it, no host is silent for longer than
        `heartbeat`."""
        return 0.8 * self.heartbeat

    @property
    def unheard(self) -> float:
        """Likewise for that long members complain of each other; `patience` is still to come."""
        return 0.5 * self.heartbeat

    @property
    def presence(self) -> float:
        """Who gave a sign of life within that time is taken for alive when two cannot reach each other."""
        return 3 * self.beat

    @property
    def patience(self) -> float:
        """Until a complaint is acted upon: longer than `presence`, so that one that has just died is known to be
        absent by then, whatever became of the news of its end."""
        return 4 * self.beat

    @property
    def grace(self) -> float:
        return min(self.op / 4, 5.0)

    @property
    def ceiling(self) -> float:
        """Less where it has to be, so that the view is replaced before the ops give up."""
        return max(self.grace, self.op - max(self.op_floor, self._to_replace))

    @property
    def _to_replace(self) -> float:
        """To report a stall, find its cause and replace the view."""
        return self.grace + 2 * REPORT + self.heartbeat

    @property
    def give_up(self) -> float:
        return 2 * self.op

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
