"""What ranks have said that cannot start, and whom it concerns. Pure.

    the ranks of the same replica   they live and die as one
    all other replicas              if trying again is of no use (`lasting`), and there is no view yet: the first one
                                    needs all replicas

It concerns the processes that ran when it was said. Who begins later was started again, maybe with other settings, so
no word is too old, and none is believed for too long.
"""

from __future__ import annotations

import dataclasses

from ftcomm.control.dropped import printable

# What a connection to the coordinator is for:
UNSTARTED = "unstarted"  # a process says why it cannot start
HOPELESS = "hopeless"  # a process that is in no view asks whether it waits in vain; the answer is `Expelled`, or none


@dataclasses.dataclass(frozen=True)
class Unstarted:
    """The word of a rank of `replica` that it cannot start, said at `at`."""

    replica: int
    reason: str
    lasting: bool
    at: float


class UnstartedRanks:
    """The last word from each replica, of `replicas`. Not thread-safe."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._words: dict[int, Unstarted] = {}

    def said(self, replica: int, reason: str, lasting: bool, now: float) -> Unstarted:
        word = Unstarted(replica, printable(reason, len(reason)), lasting, now)
        if replica < self._replicas:  # replicas wait for no other one
            self._words[replica] = word
        return word

    def started(self, replica: int) -> None:
        """Note that all ranks of a replica have started."""
        self._words.pop(replica, None)

    def why(self, replica: int, begun: float, forming: bool) -> str:
        """Returns why a process of `replica` that has run since `begun`, and is in no view, waits in vain; empty if it
        may hope. `forming`: there is no view yet."""
        words = (x for x in self._words.values() if begun <= x.at and (x.replica == replica or (forming and x.lasting)))
        return next((x.reason for x in words), "")
