"""dist.init_process_group("ftcomm"): every call, on every kind of group, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ftcomm.errors import SettingsError
from ftcomm.launch.coordinator import sidecar
from ftcomm.torch.rendezvous import join_by_store
from tests.rigs import preforked_ranks

from ..process.job import Job, only_on_host
from . import pg_bodies as bodies
from .test_steps import ENDLESS, end_together, stepped


@pytest.mark.parametrize(("replicas", "ranks"), [pytest.param(3, 1, marks=pytest.mark.protocol), (2, 2)])
def test_every_call_on_every_kind_of_group(tmp_path: Path, replicas: int, ranks: int) -> None:
    world = replicas * ranks
    with Job(tmp_path, replicas=replicas, ranks=ranks, body=bodies.everything, world=world, ranks_each=ranks) as job:
        for replica in range(replicas):
            assert job.join(replica) == [0] * ranks, "\n".join(map(str, job.errors()))
    done = [note["group"] for _, _, note in job.notes() if note["kind"] == "done"]
    assert {name: done.count(name) for name in done} == {
        "world": world,
        "all but one": world - 1,
        **({"replicate": world, "shard": world} if ranks > 1 else {}),
    }
    gone = [note["text"] for _, _, note in job.notes() if note["kind"] == "destroyed"]
    assert len(gone) == world - 1
    assert all("does not exist any more: it was destroyed" in text for text in gone)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.protocol)])
def test_groups_of_the_same_ranks_are_independent(tmp_path: Path, ranks: int) -> None:
    """In order, in messages and in errors; from several threads too."""
    with Job(tmp_path, replicas=2, ranks=ranks, body=bodies.same_ranks, ranks_each=ranks) as job:
        for replica in range(2):
            assert job.join(replica) == [0] * ranks, "\n".join(map(str, job.errors()))
    notes = [note for _, _, note in job.notes()]
    sums = [note for note in notes if note["kind"] == "sums"]
    assert len(sums) == 4 * ranks
    assert all(note["got"] == note["expected"] for note in sums), sums
    assert [note["got"] for note in notes if note["kind"] == "messages"] == [list(range(7))] * 2 * ranks


@pytest.mark.parametrize(
    ("who", "ranks"),
    [("autograd", 1), *(pytest.param(who, 2, marks=pytest.mark.protocol) for who in ("loop", "autograd"))],
)
def test_a_call_that_one_replica_skips_is_told_at_once(tmp_path: Path, who: str, ranks: int) -> None:
    """Whichever thread makes it for the step loop: one of autograd, or one of ours."""
    only_on_host("a comparison of steps")
    with Job(tmp_path, replicas=2, ranks=ranks, body=bodies.skip_once, skip=2, who=who) as job:
        for replica in range(2):
            assert job.join(replica) == [0] * ranks, "\n".join(map(str, job.errors()))
    notes = [note for _, _, note in job.notes() if note["kind"] == "call"]
    assert sorted(note["value"] for note in notes if "value" in note) == sorted([0.0, 1.0] * 2 * ranks)
    said = [note["text"] for note in notes if "text" in note]
    assert len(said) == 2 * ranks
    assert all("was called at different steps: replica 0 at step 2, replica 1 at step 3" in text for text in said), said


def test_a_call_has_a_timeout_of_its_own(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=2, body=bodies.slow_peer) as job:
        for replica in range(2):
            assert job.join(replica) == [0], job.errors()
    late = [note["text"] for _, _, note in job.notes() if note["kind"] == "late"]
    assert len(late) == 2
    assert all(
        text.startswith("all_reduce of group") and re.search(r" timed out after .* timeout ", text) for text in late
    )


def test_a_monitored_barrier_names_who_has_not_come_and_outlives_a_loss(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, body=bodies.missing_ranks) as job:
        for replica in (0, 1):
            assert job.join(replica) == [0], job.errors()
    notes = [note | {"replica": replica} for replica, _, note in job.notes()]
    late = {(note["replica"], note["number"]): note["text"] for note in notes if note["kind"] == "late"}
    assert {who: text.split(" within ")[0] for who, text in late.items() if who[0] == 0} == {
        (0, 0): "Rank 1 failed to pass monitoredBarrier",
        (0, 1): "Rank 1 failed to pass monitoredBarrier",
        (0, 2): "Ranks 1, 2 failed to pass monitoredBarrier",
    }
    assert late.keys() == {(0, 0), (0, 1), (0, 2), (2, 0)}
    assert late[2, 0].startswith("Rank 2 successfully reached monitoredBarrier, but received errors")
    assert {note["replica"] for note in notes if note["kind"] == "passed"} == {0, 1}


def test_the_compiler_the_profiler_and_checkpoints_of_torch_find_what_they_look_for(tmp_path: Path) -> None:
    splits = torch.__version__ >= (2, 15)  # type: ignore[operator]  # a TorchVersion; before, torch asks for a GPU
    with Job(tmp_path, replicas=2, body=bodies.as_torch_expects, splits=splits) as job:
        for replica in range(2):
            assert job.join(replica) == [0], job.errors()
    assert len([note for _, _, note in job.notes() if note["kind"] == "done"]) == 2


@pytest.mark.slow
def test_what_is_compiled_has_the_bits_of_what_is_not_before_and_after_a_loss(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, body=bodies.compiled) as job:
        for replica, code in ((0, 0), (1, 0), (2, -9)):
            assert job.join(replica) == [code], job.errors()
    steps = [
        (note["step"], note["size"]) for replica, _, note in job.notes() if replica == 0 and note["kind"] == "step"
    ]
    assert [step for step, _ in steps] == [0, 1, 2, 3]
    assert steps[0] == (0, 3)
    assert steps[3] == (3, 2)
    stale = [note["text"] for _, _, note in job.notes() if note["kind"] == "stale"]
    assert len(stale) == 2, "a graph of three members was run by two"


def test_without_its_root_a_broadcast_fails_alike_and_ranks_change_at_the_boundary(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=3, body=bodies.lost_root) as job:
        for replica in (1, 2):
            assert job.join(replica) == [0], job.errors()
    notes = [note | {"replica": replica} for replica, _, note in job.notes() if replica != 0]
    lost = [note for note in notes if note["kind"] == "lost"]
    assert {note["step"] for note in lost} == {1}
    assert len(lost) == 2
    assert len({note["text"] for note in lost}) == 1
    assert {(note["replica"], note["rank"], note["size"]) for note in lost} == {(1, 1, 3), (2, 2, 3)}
    got = {(n["step"], n["replica"], n["rank"], n["size"], n["value"]) for n in notes if n["kind"] == "got"}
    assert got == {
        *((0, replica, replica, 3, 0.0) for replica in (1, 2)),
        *((step, replica, replica - 1, 2, 1.0) for step in (2, 3) for replica in (1, 2)),
    }
    sums = {(n["step"], n["value"]) for n in notes if n["kind"] == "sum"}
    assert sums == {(0, 3.0), (1, 2.0), (2, 2.0), (3, 2.0)}


@pytest.mark.protocol
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_some_replicas_live_on(tmp_path: Path, ranks: int) -> None:
    """Of two of three replicas, in a row with all their ranks, or in a column with one of each; split off, or new."""
    with Job(tmp_path, replicas=3, ranks=ranks, body=bodies.some_replicas, split=ranks == 2, steps=4) as job:
        for replica in (0, 2):
            assert job.join(replica) == [0] * ranks, "\n".join(map(str, job.errors()))
    did = [(replica, rank, note) for replica, rank, note in job.notes() if note["kind"] == "did" and replica != 1]
    assert len(did) == 2 * ranks * 4
    for replica, rank, note in did:
        step = note["step"]
        alive = (0, 2) if step else (0, 1, 2)
        assert note["contributed"] == list(alive), (replica, note)
        seats = (0, 1, 2) if step < 2 else (0, 2)  # a loss changes ranks at the next boundary
        for name, (value, place, size) in note["said"].items():
            among = (0, 1, 2) if name == "world" else (0, 1)
            own = [rank] if name == "column" else list(range(ranks))
            assert value == sum(2.0 ** (ranks * r + s) for r in alive if r in among for s in own), (replica, note)
            if step != 1:  # whose boundary may have been passed before or after the loss was known
                there = [(r, s) for r in seats if r in among for s in own]
                assert (place, size) == (there.index((replica, rank)), len(there)), (replica, note)
    assert {name for replica, _, note in did for name in note["said"] if replica == 0} == {"world", "row", "column"}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.protocol)])
def test_groups_across_replicas_know_the_ranks_of_the_world_that_they_have_now(tmp_path: Path, ranks: int) -> None:
    """After the replica before them is lost, and after it is back."""
    with Job(tmp_path, replicas=3, ranks=ranks, body=bodies.ranks_across_replicas, steps=ENDLESS) as job:
        job.wait_contributing({0, 1, 2})
        stepped(job, 3, {0, 1, 2})
        seen = len(job.events)
        job.kill(0)
        stepped(job, 5, {1, 2})
        job.start(0)
        job.wait_contributing({0, 1, 2}, since=seen)
        stepped(job, 5, {0, 1, 2})
        end_together(job, {0, 1, 2})
    rosters = [note["roster"] for replica, _, note in job.notes() if note["kind"] == "step" and replica == 1]
    assert [0, 1, 2] in rosters[:3]
    assert [1, 2] in rosters
    assert rosters[-1] == [0, 1, 2]


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("ftcomm")
x = torch.ones(5)
dist.all_reduce(x)
print(dist.get_rank(), dist.get_world_size(), int(x[0]), flush=True)
dist.destroy_process_group()
"""


SETTINGS = """
import torch.distributed as dist, ftcomm
dist.init_process_group("ftcomm")
s = ftcomm.default_group().settings
t = s.timeouts
print(t.op, t.heartbeat, t.op_floor, s.init_timeout, s.verify, s.algorithm, s.rack, s.max_sms, flush=True)
dist.destroy_process_group()
"""


def run(folder: Path, environment: dict[str, str]) -> str:
    """What the script says in a process of its own, in a folder where nothing of ours lies."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "FTCOMM_LOG": "error", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=230,
    )
    return done.stdout if done.returncode == 0 else done.stderr


def test_found_by_name_in_a_program_of_another_launcher(tmp_path: Path) -> None:
    """No import of ours, no coordinator: a world of one, as torchrun would start it."""
    assert run(tmp_path, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}) == "0 1 1\n"


@pytest.mark.protocol
def test_the_environment_counts_in_a_program_of_another_launcher() -> None:
    """The coordinator that it starts has the same timeouts, or it would refuse it."""
    asked = {"OP_TIMEOUT": "20", "HEARTBEAT_TIMEOUT": "0.5", "OP_TIMEOUT_FLOOR": "4", "INIT_TIMEOUT": "33"}
    asked |= {"VERIFY": "1", "ALGORITHM": "ring", "RACK": "r1", "SMS": "3"}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    given = world | {f"FTCOMM_{name}": value for name, value in asked.items()}
    _, said, _ = preforked_ranks.completed(["-c", SETTINGS], {**os.environ, "FTCOMM_LOG": "error", **given})
    assert said.split() == ["20.0", "0.5", "4.0", "33.0", "True", "ring", "r1", "3"]


def test_a_wrong_setting_is_said_before_there_is_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would live on for half a minute and wait for a rank to come."""
    monkeypatch.setenv("FTCOMM_VERIFY", "yes")
    monkeypatch.setattr(sidecar, "start", lambda *arguments: pytest.fail("there is one"))
    with pytest.raises(SettingsError, match=r"FTCOMM_VERIFY='yes'; expected 1 \(on\) or 0 \(off\)"):
        join_by_store(dist.HashStore(), 0, 1, timedelta(seconds=1))


@pytest.mark.parametrize("shards", ["2", "none", "0"])
def test_a_world_that_is_not_replicas_times_ranks(monkeypatch: pytest.MonkeyPatch, shards: str) -> None:
    monkeypatch.setenv("FTCOMM_RANKS_PER_REPLICA", shards)
    with pytest.raises(SettingsError, match="in a world of 3 ranks: a world is replicas x ranks of each"):
        join_by_store(dist.HashStore(), 0, 3, timedelta(seconds=1))


def test_the_job_knows_rank_and_size(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=1, body=bodies.told_another_rank) as job:
        assert job.join(0) == [0], job.errors()
    (said,) = [note["text"] for _, _, note in job.notes() if note["kind"] == "told"]
    assert "init_process_group(rank=1, world_size=4) in a job in which this is rank 0 of 1" in said
