"""A fleet of GPUs that trains, fails and recovers, by discrete events (simpy).

What is counted is useful time: replicas that contribute over all replicas, while nobody waits, over the time that has
passed. That is the paper's effective training time. Failures come while others are being recovered from, too: then the
stall begins again, and so does the restart of a replica that is hit before it is back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Iterator
from typing import Any

import msgspec
import simpy

from ftcomm.bench.research.fleet_facts import FleetPipeline


class Failure(msgspec.Struct, frozen=True):
    """`gap` seconds after the one before. What is random in it comes with it, so that all pipelines meet the same."""

    gap: float
    which: float  # 0..1: of the replicas
    silent: float  # 0..1: below the share, the failure is silent
    draw: float  # 0..1: of the measured stalls
    within: float  # 0..1: of the step in progress


def at_random(interval: float, seed: int) -> Iterator[Failure]:
    """Independent of each other, `interval` seconds apart on average."""
    chance = random.Random(seed)
    while True:
        yield Failure(
            chance.expovariate(1 / interval), chance.random(), chance.random(), chance.random(), chance.random()
        )


def evenly(interval: float, replicas: int) -> Iterator[Failure]:
    """Yields one every `interval` seconds, the first at once, in one replica after the other, as in the paper."""
    for number in itertools.count():
        yield Failure(interval if number else 0.0, number % replicas / replicas, 1.0, 0.5, 0.5)


class Fleet:
    """One history. `run` returns the share of useful time."""

    def __init__(self, pipeline: FleetPipeline, failures: Iterator[Failure]) -> None:
        self._pipeline, self._failures = pipeline, failures
        self._env = simpy.Environment()
        self._hit = [self._env.event() for _ in range(pipeline.replicas)]
        self._present = pipeline.replicas
        self._stalled_until = 0.0
        self._counted_until = 0.0
        self._useful = 0.0  # seconds of the whole fleet
        self.count = 0
        self._env.process(self._fail())
        for replica in range(pipeline.replicas):
            self._env.process(self._live(replica))

    def run(self, seconds: float) -> float:
        self._env.run(until=seconds)
        self._count()
        return self._useful / seconds

    def _fail(self) -> Generator[simpy.Event, Any, None]:
        for failure in self._failures:
            yield self._env.timeout(failure.gap)
            self.count += 1
            self._count()
            if self._pipeline.checkpoint:
                self._useful -= self._useful % self._pipeline.checkpoint
            self._stall(self._length(failure))
            place = int(failure.which * self._pipeline.replicas)
            self._hit[place].succeed(failure.within * self._pipeline.step)
            self._hit[place] = self._env.event()

    def _length(self, failure: Failure) -> float:
        measured = self._pipeline.stalls
        drawn = measured[int(failure.draw * len(measured))] if measured else 0.0
        silence = self._pipeline.silence if failure.silent < self._pipeline.silent_share else 0.0
        return self._pipeline.seconds("stall") + drawn + silence

    def _live(self, replica: int) -> Generator[simpy.Event, Any, None]:
        """A replica that is away from a failure on until nothing has hit it for as long as it takes to come back."""
        away = self._pipeline.seconds("away")
        while away:
            lost = yield self._hit[replica]
            self._count()
            self._present -= 1
            while True:
                again = self._hit[replica]
                yield self._env.timeout(away + lost) | again
                if not again.triggered:
                    break
                lost = again.value
            self._count()
            self._present += 1
            self._stall(self._pipeline.seconds("rejoin"))

    def _stall(self, seconds: float) -> None:
        self._stalled_until = max(self._stalled_until, self._env.now + seconds)

    def _count(self) -> None:
        """The time since it was last called; nothing has changed in it but that a stall may have ended."""
        now = self._env.now
        went_on = now - max(self._counted_until, min(self._stalled_until, now))
        self._useful += went_on * self._present / self._pipeline.replicas
        self._counted_until = now
