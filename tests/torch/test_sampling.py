"""Every sample is trained once, with real replicas that are killed anywhere in a step."""

from __future__ import annotations

import os
import random
import time
import types
from collections import Counter
from pathlib import Path

import pytest

from ftcomm.training.data import Batches, Ledger

from ..process.job import Job
from . import sampling
from .test_steps import ENDLESS, finals, stepped

SEED = int(os.environ.get("FTCOMM_TEST_SEED", random.randrange(1 << 30)))

KILLS = 5


@pytest.mark.protocol
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_the_weights_say_that_every_sample_was_trained_once(tmp_path: Path, ranks: int) -> None:
    print(f"FTCOMM_TEST_SEED={SEED}")
    chance = random.Random(SEED)
    with Job(tmp_path, replicas=3, ranks=ranks, body=sampling.train, steps=ENDLESS, slow=0.1) as job:
        job.wait_contributing({0, 1, 2})
        for _ in range(KILLS):
            stepped(job, 3, {0, 1, 2})
            time.sleep(0.05 * chance.random())
            seen, victim = len(job.events), chance.randrange(3)
            job.kill(victim, rank=chance.randrange(ranks))
            job.start(victim)
            job.wait_contributing({0, 1, 2}, since=seen)
        stepped(job, 3, {0, 1, 2})
        job.drain()
        for replica in range(3):
            assert job.join(replica) == [0] * ranks, job.errors()
        for rank in range(ranks):
            ends = finals(job, rank)
            assert len(ends) == 3
            for end in ends:
                used, counted = Counter(dict(enumerate(end["seen"]))), trained(end["state"], rank, ranks)
                assert not counted - used, "a sample was left out"
                # Of a replica whose ranks are killed one after the other, one may have contributed all and another not.
                assert (used - counted).total() <= (0 if ranks == 1 else KILLS * sampling.SIZE)
                assert end["state"]["first"] > 40
                assert len(end["state"]["late"]) <= 3


def trained(state: dict[str, object], rank: int, ranks: int) -> Counter[int]:
    """Of each sample how often, by the ledger."""
    group = types.SimpleNamespace(replica=0, shard=rank, internals=types.SimpleNamespace(catching_up=False))
    batches = Batches(sampling.SAMPLES, sampling.SIZE, seed=7, part=(rank, ranks), group=group)  # type: ignore[arg-type]
    batches.load_state_dict(state)
    ledger: Ledger = batches.ledger
    numbers = set(range(ledger.first)) - set(ledger.late)
    return Counter(sample for number in numbers for sample in batches.samples_of(number))
