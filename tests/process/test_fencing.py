"""A replica that is stopped in the middle of a put, is removed, and wakes up when the others have gone on.

It must change no byte that they read, believe nothing that it reads, and learn that it was removed. The survivors
compare every element of every step with the sums that there can be, and `check` their results with each other's.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ftcomm.launch import run

from . import torn_puts
from .bodies import reduce_forever
from .job import SILENCE, STALL, Job, fewer
from .test_faults import _members, _until
from .test_faults import go_on as make_steps
from .test_kills import ENDLESS, SEED, check
from .test_launch_training import Job as LaunchedJob
from .test_launch_training import here  # noqa: F401

pytestmark = pytest.mark.protocol

VICTIM = 1
ELEMENTS = 300_001  # three chunks
LONG_AGO = fewer(30)  # ops that the others run before the victim wakes; they have used all of their staging many times
TIMES = 20  # the ops that run before


def job(folder: Path, place: str, transport: str, **settings: Any) -> Job:
    arguments: dict[str, Any] = dict(victim=(VICTIM, 0), place=place, times=TIMES, steps=ENDLESS, elements=ELEMENTS)
    arguments.update(**STALL, transport=transport, **settings)
    return Job(folder, replicas=3, body=torn_puts.reduce_and_stop, **arguments)


def wait_stopped(running: Job) -> None:
    for _ in _until(lambda: "stopped" in kinds(running), "the victim never came to the place where it stops"):
        pass


def kinds(running: Job) -> list[str]:
    return [note["kind"] for replica, _, note in running.notes() if replica == VICTIM]


def wait_lost(running: Job, seen: int = 0) -> None:
    running.wait_event(f"view without {VICTIM}", lambda events: any(_members(e) == [0, 2] for e in events[seen:]))


def go_on(running: Job, steps: int = LONG_AGO, replicas: tuple[int, ...] = (0, 2)) -> None:
    """Until each of these has run that many more steps."""
    make_steps(running, replicas, steps)


def set_aside(running: Job, replica: int, name: int) -> None:
    """From now on the test knows the processes of `replica` as `name`; the number is free for a new life."""
    for rank in range(running.ranks):
        running.processes[name, rank] = running.processes.pop((replica, rank))


def wake(running: Job, name: int) -> None:
    """Let it go on, and see that every rank of it learns that it is out, and why."""
    for rank in range(running.ranks):
        with contextlib.suppress(ProcessLookupError):  # the rank that was not stopped has ended
            os.kill(running.processes[name, rank].pid, signal.SIGCONT)
    assert running.join(name) == [1] * running.ranks
    assert "end" not in kinds(running)
    said = [text for replica, _, text in running.errors() if replica == VICTIM]
    assert len(said) == running.ranks, said
    for text in said:
        assert text.startswith("RemovedError"), text


def disturbed(running: Job, seen: int, members: set[int]) -> list[dict[str, Any]]:
    """What has happened to `members` since then. To begin to contribute may take several views, which is no harm, nor
    is a complaint that on a busy machine one of them was not heard for a while."""
    lost = [e for e in running.events[seen:] if e["kind"] == "view" and not members <= set(_members(e))]
    suspects = [e for e in running.events[seen:] if e["kind"] == "suspect"]
    return lost + [e for e in suspects if not e.get("silent")]


def finish(running: Job, replicas: tuple[int, ...]) -> None:
    running.drain()
    for replica in replicas:
        assert running.join(replica) == [0] * running.ranks
    check(running)


PUTS = [*(("shm", place) for place in torn_puts.SHARED), *(("tcp", place) for place in torn_puts.TCP)]
SWEPT = (("shm", "read"), ("shm", "taken"), ("tcp", "posted"))  # the other transport stops at each of these


@pytest.mark.parametrize(
    ("transport", "place"),
    [pytest.param(*each, marks=[pytest.mark.sweep] if each in SWEPT else []) for each in PUTS],
)
def test_who_wakes_in_the_middle_of_a_put_changes_nothing(tmp_path: Path, transport: str, place: str) -> None:
    with job(tmp_path, place, transport) as running:
        wait_stopped(running)
        wait_lost(running)
        go_on(running)
        before = len(running.events)
        wake(running, VICTIM)
        after = kinds(running)[kinds(running).index("woke") + 1 :]
        if transport == "tcp" and place in ("read", "taken") and after[0] == "step":
            # It had all, and all had told it so: their last messages lay in its sockets. With that knowledge it may
            # return the op, as they have; `check` compares the results. Through shared memory it sees that they have
            # gone on.
            del after[0]
        assert after == ["error"], "it returned an op that the others had without it"
        [text] = [text for _, _, text in running.errors()]
        last = max(e["epoch"] for e in running.events if VICTIM in _members(e))
        assert f"replica {VICTIM} was removed from the job after epoch {last}: " in text
        assert "waits for it" in text
        go_on(running)
        assert not disturbed(running, before, {0, 2})
        finish(running, (0, 2))


@pytest.mark.parametrize(
    ("transport", "place"), [pytest.param("shm", "copy", marks=pytest.mark.sweep), ("tcp", "frame")]
)
def test_who_wakes_when_its_number_is_taken(tmp_path: Path, transport: str, place: str) -> None:
    """Its next life is in the view, under the same number: nothing that it sends is taken for that one's."""
    with job(tmp_path, place, transport) as running:
        wait_stopped(running)
        wait_lost(running)
        seen = len(running.events)
        set_aside(running, VICTIM, 100)
        running.start(VICTIM)
        running.wait_contributing({0, 1, 2}, since=seen)
        go_on(running)
        seen = len(running.events)
        wake(running, 100)
        go_on(running)
        assert not disturbed(running, seen, {0, 1, 2})
        finish(running, (0, 1, 2))


@pytest.mark.parametrize(("transport", "rank"), [pytest.param("shm", 0, marks=pytest.mark.sweep), ("tcp", 1)])
def test_a_rank_that_is_removed_takes_its_sibling_along(tmp_path: Path, transport: str, rank: int) -> None:
    """The other rank of the replica runs all the while: it must stop, too, and say why."""
    with job(tmp_path, "posted", transport, ranks=2, victim=(VICTIM, rank)) as running:
        wait_stopped(running)
        wait_lost(running)
        go_on(running)
        wake(running, VICTIM)
        finish(running, (0, 2))


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.sweep)])
def test_stopped_at_random_moments(tmp_path: Path, transport: str) -> None:
    """From outside, several lives of one replica; each wakes when the next one is in the view."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    lives = 2
    settings: dict[str, Any] = dict(steps=ENDLESS, elements=ELEMENTS, transport=transport, pause=0.0, **STALL)
    with Job(tmp_path, replicas=3, body=reduce_forever, **settings) as running:
        running.wait_contributing({0, 1, 2})
        for life in range(lives):
            go_on(running, 5, (VICTIM,))  # it has joined
            time.sleep(rng.uniform(0.0, 0.1))
            seen = len(running.events)
            running.signal(VICTIM, signal.SIGSTOP)
            wait_lost(running, seen)
            set_aside(running, VICTIM, 100 + life)
            running.start(VICTIM)
            running.wait_contributing({0, 1, 2}, since=seen)
            seen = len(running.events)
            running.signal(100 + life, signal.SIGCONT)
            assert running.join(100 + life) == [1], f"seed {SEED}"
            go_on(running, fewer(30))
            assert not disturbed(running, seen, {0, 1, 2}), f"seed {SEED}"
        texts = [text for replica, _, text in running.errors() if replica == VICTIM]
        assert [text.partition(":")[0] for text in texts] == ["RemovedError"] * lives, f"seed {SEED}: {texts}"
        finish(running, (0, 1, 2))


TRAIN = """
import os
import torch
import ftcomm
from ftcomm.settings.engines import engine_kind
from ftcomm.training.state import digest
from tests.process.torn_puts import first_life, stop_at
group = ftcomm.init()
torch.set_num_threads(1)
torch.manual_seed(os.getpid())
model = torch.nn.Linear(200, 300)
if not group.contributes:
    print("fresh", flush=True)
else:
    for weights in model.parameters():
        torch.nn.init.constant_(weights, 0.01)
optimizer = torch.optim.AdamW(model.parameters())
if group.replica == 1 and first_life(os.curdir):
    stop_at("copy", 20, kernels=engine_kind(group.settings.engine).runs_ops)
state = {"model": model, "optimizer": optimizer}
for step in ftcomm.steps(1000000, state):
    x = torch.randn(2, 200, generator=torch.Generator().manual_seed(1000 * step + group.replica))
    model(x).square().mean().backward()
    for weights in model.parameters():
        ftcomm.allreduce(weights.grad, "avg")
    optimizer.step()
    optimizer.zero_grad()
    ftcomm.report(step=step)
print("final", digest(state), flush=True)
"""


@pytest.mark.usefixtures("preforked")
def test_the_launcher_brings_it_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Its script ends with the error that says so, is started again, and catches up to equal weights."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    training = LaunchedJob(here, TRAIN, heartbeat_timeout=SILENCE, op_timeout=16.0, op_timeout_floor=6.0)

    async def plan() -> None:
        await training.until(lambda: training.contributing() == {0, 2})
        step = training.steps()
        await training.until(lambda: training.steps() > step + fewer(50))
        os.kill(training.launcher.pids()[VICTIM, 0], signal.SIGCONT)
        await training.until(lambda: training.contributing() == {0, 1, 2})
        step = training.steps()
        await training.until(lambda: training.steps() > step + fewer(20))
        training.launcher.interrupt()

    assert training.run(plan) == run.DRAINED, (training.said, training.lines)
    assert [event["replica"] for event in training.of("process_started")] == [0, 1, 2, VICTIM], training.said
    assert any("RemovedError: replica 1 was removed from the job after epoch 1" in line for line in training.lines)
    assert training.lines.count("fresh") == 1
    final = [line for line in training.lines if line.startswith("final")]
    assert len(final) == 3
    assert len(set(final)) == 1, final
