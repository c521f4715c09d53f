"""Virtual time: one queue of events, one source of chance. The same seed is the same history, to the last event.

An event belongs to a process, or to nobody (the network, the launcher, chance). What belongs to a dead process never
happens; what belongs to a stopped one happens when it goes on, in the order in which it would have.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Callback = Callable[..., object]


class World:
    """All times are seconds of virtual time since the beginning."""

    def __init__(self, seed: int, *, traced: bool = False, trees: bool = False) -> None:
        """`trees`: small all-reduces go through a tree, however few members there are."""
        self.seed, self.trees = seed, trees
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.over = False
        self.armed: list[Callback] = []  # to be called in the middle of an op
        self.trace: list[tuple[float, str, str, tuple[object, ...]]] | None = [] if traced else None
        self._queue: list[tuple[float, int, Process | None, Callback, tuple[Any, ...]]] = []
        self._number = 0

    def at(self, when: float, owner: Process | None, call: Callback, *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, owner, call, args))

    def after(self, seconds: float, owner: Process | None, call: Callback, *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + seconds, self._number, owner, call, args))

    def say(self, who: str, text: str, *args: object) -> None:
        """Write to the trace; the text is formatted only when somebody reads it."""
        if self.trace is not None:
            self.trace.append((self.now, who, text, args))

    def run(self, until: float) -> None:
        """Run until `over`, or until that time, or until nothing is left to happen."""
        queue, pop = self._queue, heapq.heappop
        while queue and not self.over:
            when, _, owner, call, args = pop(queue)
            if when > until:
                return
            self.now = when
            self.events += 1
            if owner is not None:
                if not owner.alive:
                    continue
                if owner.frozen:
                    owner.backlog.append((call, args))
                    continue
            call(*args)


class Process:
    """Something that lives on a host, with a clock of its own, and can be killed, stopped and slowed down."""

    def __init__(self, world: World, name: str, host: int) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.alive = True
        self.frozen = False
        self.backlog: list[tuple[Callback, tuple[Any, ...]]] = []
        self.connections: dict[Any, int] = {}  # open ones -> which end of it is ours
        self.rate, self.offset = 1.0, 0.0  # of its clock
        self.slow = 1.0  # how much longer its work takes

    def clock(self) -> float:
        return self.offset + self.rate * self.world.now

    def after(self, seconds: float, call: Callback, *args: Any) -> None:
        """Call it in so many seconds of its own clock."""
        self.world.at(self.world.now + seconds / self.rate, self, call, *args)

    def busy(self, seconds: float, call: Callback, *args: Any) -> None:
        """Call `call` when the process has worked for `seconds`."""
        self.world.at(self.world.now + seconds * self.slow, self, call, *args)

    def say(self, text: str, *args: object) -> None:
        self.world.say(self.name, text, *args)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            backlog, self.backlog = self.backlog, []
            for call, args in backlog:
                self.world.at(self.world.now, self, call, *args)
