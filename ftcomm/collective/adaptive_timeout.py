"""Tells how long an op may stand still before that is reported, from how long ops of its size have taken.

A deadline that is right for 1 KB is wrong for 1 GB, and one that is right for a training whose members arrive together
is wrong for one whose members arrive seconds apart. So it follows the median and the spread of what was seen:

    4 * (median + 3 * 1.4826 * MAD)     of the last 64 ops whose bytes have the same power of two

MAD is the median distance from the median. Times 1.4826 it is the standard deviation of a normal distribution, but a
few ops that took very long (a step with a checkpoint in it) do not move it. Pure: it knows no clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

_KEPT = 64  # ops of a size
_LEAST = 8  # ops of a size, before they count
_SPREADS = 3 * 1.4826
_TIMES = 4


class AdaptiveTimeouts:
    """The timeouts in seconds, between `floor` and `ceiling`; `ceiling` until enough ops were seen. For one thread at a
    time.

    taken: the seconds that ops have taken, by the number of bits of their size. Who sees an op return adds to it, which
        a method would make twice as dear; `of`, which is called in a wait, does the work.
    """

    def __init__(self, floor: float, ceiling: float) -> None:
        if not 0 < floor <= ceiling:
            raise ValueError(
                f"the floor of the deadlines, {floor:g} s, is not between 0 and the ceiling, {ceiling:g} s"
            )
        self.floor = floor
        self.ceiling = ceiling
        self.taken: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def of(self, nbytes: int) -> float:
        """Returns for how many seconds an op of `nbytes` may stand still."""
        seen = self.taken.get(nbytes.bit_length(), ())
        if len(seen) < _LEAST:
            return self.ceiling
        usual = median(seen)
        spread = median(abs(seconds - usual) for seconds in seen)
        return min(self.ceiling, max(self.floor, _TIMES * (usual + _SPREADS * spread)))
