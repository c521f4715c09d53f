"""Checkpoints: whole or not there, whoever dies while they are written, and good for any number of replicas."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import struct
import threading
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ftcomm.errors import FtcommError, StateError
from ftcomm.training.checkpoint import Checkpoints, complete, finish, prune, read, write
from ftcomm.training.entries import as_entry
from ftcomm.training.state import FlatState, flatten

from ..process.job import Job
from . import saving
from .test_steps import digests, reported

STEPS = 5 * saving.EVERY


def job(folder: Path, name: str, replicas: int, **arguments: object) -> Job:
    (folder / name).mkdir()
    arguments = {"checkpoints": str(folder / "one/checkpoints"), **arguments}
    return Job(folder / name, replicas=replicas, body=saving.train, **arguments)  # type: ignore[arg-type]


def restored(job: Job) -> list[tuple[int, str]]:
    return [(note["step"], note["digest"]) for _, _, note in job.notes() if note["kind"] == "restored"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.protocol), 2])
def test_a_replica_dies_while_it_writes_and_the_next_job_has_other_replicas(tmp_path: Path, ranks: int) -> None:
    with job(tmp_path, "one", 3, ranks=ranks, steps=STEPS, back=True) as one:
        one.wait_event("death", lambda events: any("lost 0" in str(event.get("why")) for event in events))
        seen = len(one.events)
        one.kill(0)  # its other ranks, as under the launcher
        one.start(0)
        one.wait_contributing({0, 1, 2}, since=seen)
        (tmp_path / "one/back").touch()
        for replica in range(3):
            assert one.join(replica) == [0] * ranks, one.errors()
        written = {(event["step"], event["replica"]) for event in reported(one, "checkpoint") if event["complete"]}
        assert (saving.EVERY, 0) in written
        assert 2 * saving.EVERY not in {step for step, _ in written}, "it was taken for whole"
        assert not reported(one, "checkpoint_failed")
        folder = tmp_path / "one/checkpoints"
        assert complete(folder) == sorted(step for step, _ in written)[-2:]
        assert complete(folder)[-1] == STEPS
        assert {path.name[0] for path in folder.iterdir()} == {"s"}, "what is of no use was left there"
        ends = [digests(one)[rank, STEPS - 1] for rank in range(ranks)]
        assert all(len(end) == 1 for end in ends)

    with job(tmp_path, "two", 2, ranks=ranks, steps=0, other=True) as two:
        for replica in range(2):
            assert two.join(replica) == [0] * ranks, two.errors()
        assert {step for step, _ in restored(two)} == {STEPS}
        assert {digest for _, digest in restored(two)} == set.union(*ends)
    if ranks == 1:
        refused(tmp_path)


def refused(folder: Path) -> None:
    with job(folder, "ranks", 1, ranks=2, steps=0) as two:
        assert two.join(0) == [1, 1]
        said = [text for *_, text in two.errors()]
        assert any("written by replicas of 1 ranks, here they have 2" in text for text in said), said
        # One that is slow hears that the other has gone.
        assert all("written by replicas" in text or text.startswith("RemovedError") for text in said), said
    with job(folder, "width", 1, steps=0, width=301) as other:
        assert other.join(0) == [1]
        ((*_, text),) = other.errors()
        assert "does not fit here: model.0.weight is float32[300, 4] there and float32[301, 4] here" in text
    for step in complete(folder / "one/checkpoints"):
        part = folder / "one/checkpoints" / f"step-{step:08}"
        (part / "shard-0").rename(part / "rank-0")
    with job(folder, "older", 1, steps=0) as later:
        assert later.join(0) == [1]
        ((*_, text),) = later.errors()
        assert "has no part that this version can read" in text


def flat(value: float = 1.0) -> FlatState:
    model = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(model.weight, value)
    return flatten({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}).on_host()


def test_only_the_last_of_the_ranks_gives_it_its_name(tmp_path: Path) -> None:
    unnamed = tmp_path / ".step-00000007.life"
    write(unnamed / "shard-1", flat())
    assert not finish(tmp_path, 7, unnamed, 2)
    assert complete(tmp_path) == []
    write(unnamed / "shard-0", flat())
    assert finish(tmp_path, 7, unnamed, 2)
    assert not finish(tmp_path, 7, unnamed, 0), "the other of two that came last at once"
    assert complete(tmp_path) == [7]


def test_the_last_are_kept_and_what_may_still_be_completed(tmp_path: Path) -> None:
    for step in (1, 2, 300_000_000):
        (tmp_path / f"step-{step:08d}").mkdir()
    for name in (".step-00000002.dead", ".step-300000001.alive", "step-x", "other"):
        (tmp_path / name).mkdir()
    prune(tmp_path, 2)
    left = {"step-00000002", "step-300000000", ".step-300000001.alive", "step-x", "other"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_the_tensors_have_their_names_for_others_who_read_them(tmp_path: Path) -> None:
    write(tmp_path / "shard-0", flat(3.0))
    weight = {"model.weight": torch.empty(3, 2)}
    torch.distributed.checkpoint.load(weight, checkpoint_id=tmp_path / "shard-0")
    assert torch.equal(weight["model.weight"], torch.full((3, 2), 3.0))


def test_one_that_is_damaged_is_named(tmp_path: Path) -> None:
    write(tmp_path / "shard-0", flat())
    shutil.copytree(tmp_path / "shard-0", tmp_path / "shard-1")
    (tmp_path / "shard-0/__0_0.distcp").write_bytes(b"")
    (tmp_path / "shard-1/skeleton").unlink()
    for rank in range(2):
        with pytest.raises(StateError, match=f"shard-{rank} cannot be read: .* take it away, and an older one"):
            read(tmp_path / f"shard-{rank}")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    """torch's own reader loads it."""
    path = tmp_path / "shard-0"
    write(path, flat(3.0))
    data = path / "__0_0.distcp"
    flip(data, data.read_bytes().index(struct.pack("6f", *[3.0] * 6)) + 7)
    weight = {"model.weight": torch.empty(3, 2)}
    dcp.load(weight, checkpoint_id=path)
    assert weight["model.weight"].flatten().tolist() != [3.0] * 6
    with pytest.raises(StateError, match=r"1 of 2 tensors in its \.distcp files have changed .*, model\.weight: "):
        read(path)


@pytest.mark.parametrize("checked", [True, False])
def test_a_damaged_skeleton_is_named(tmp_path: Path, checked: bool) -> None:
    path = tmp_path / "shard-0"
    write(path, flat())
    flip(path / "skeleton", 0)
    if not checked:
        change_index(path, lambda index: index.update(skeleton=zlib.crc32((path / "skeleton").read_bytes())))
    with pytest.raises(StateError, match=r"shard-0/skeleton (has changed|is of no use).* take it away") as raised:
        read(path)
    assert "same script" not in str(raised.value)


def change_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((path / "index").read_bytes())
    change(index)
    (path / "index").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: index["tensors"][1].update(file="../shard-1/__0_0.distcp"), "leads out of the folder, to '../"),
        (lambda index: index["tensors"].pop(), "its index has 1 tensors, its skeleton 2"),
        (lambda index: index["tensors"][0].update(offset=1 << 40), "1 of 2 tensors .* have changed"),
        (lambda index: index["tensors"][0].update(offset=-1), "shard-0/index is damaged: .*`int` >= 0"),
        (lambda index: index["tensors"].reverse(), "2 of 2 tensors .* have changed"),
        (lambda index: index["tensors"][0].pop("crc"), "shard-0/index is damaged: .*missing required field `crc`"),
    ],
)
def test_an_index_is_checked(tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    path = tmp_path / "shard-0"
    write(path, flat())
    shutil.copytree(path, tmp_path / "shard-1")
    change_index(path, change)
    with pytest.raises(StateError, match=f"cannot be read: .*{said}"):
        read(path)


@pytest.mark.parametrize("rubbish", [b"", b"x", b"{}", b'{"skeleton": 1', bytes(1000)])
def test_a_damaged_index_is_named(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "shard-0"
    write(path, flat())
    (path / "index").write_bytes(rubbish)
    with pytest.raises(StateError, match=r"shard-0/index is damaged: .*take it away"):
        read(path)


def test_every_dtype_and_shape_is_found(tmp_path: Path) -> None:
    written = flatten(
        {
            name: as_entry(name, value)
            for name, value in {
                "strided": torch.arange(12.0).reshape(3, 4).t(),
                "part": torch.arange(100)[7:9],
                "half": torch.arange(3, dtype=torch.bfloat16),
                "scalar": torch.tensor(7.5),
                "none": torch.empty(0, 3),
                "true": torch.tensor([True, False]),
                "complex": torch.tensor([1 + 2j]),
                "array": np.arange(5, dtype=np.uint16),
            }.items()
        }
    ).on_host()
    write(tmp_path / "shard-0", written)
    found = read(tmp_path / "shard-0")
    assert len(found.tensors) == 8
    assert found.skeleton == written.skeleton  # names, dtypes and shapes
    assert found.views() == written.views()


def test_what_has_no_name_of_a_step_is_none(tmp_path: Path) -> None:
    for name in ("step-00000007", "step-99999999999999999999", "step-000000008"):
        (tmp_path / name).mkdir()
    assert complete(tmp_path) == [7]


@pytest.mark.protocol
def test_one_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=1, body=saving.fail, checkpoints=str(tmp_path / "checkpoints")) as one:
        assert one.join(0) == [0], one.errors()
        (said,) = [note for _, _, note in one.notes() if note["kind"] == "failed"]
        assert said["error"].startswith("replica 0 shard 0: the checkpoint of step 2 was not written to ")
        assert "File too large" in said["error"]
        assert "It holds those of the steps [1]" in said["error"]
        assert said["left"] == ["step-00000001"], "what was not completed keeps the space"
        assert [event["step"] for event in reported(one, "checkpoint_failed")] == [2, 2]
        assert [event["step"] for event in reported(one, "checkpoint")] == [1, 2]
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.protocol
def test_one_that_a_single_rank_could_not_write_is_whole_when_that_has_written_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Job(tmp_path, replicas=1, ranks=2, body=saving.fail_in_one_rank, checkpoints=str(folder)) as one:
        assert one.join(0) == [0, 0], one.errors()
        assert [rank for _, rank, note in one.notes() if note["kind"] == "failed"] == [0]
        assert complete(folder) == [5], list(folder.rglob("*"))
        for rank in range(2):
            read(folder / f"step-00000005/shard-{rank}")


@dataclasses.dataclass
class Member:
    incarnation: str = "life"


class Alone:
    """What `Checkpoints` asks its group for; it says the same all the time."""

    def __init__(self, replica: int, shard: int, shards: int) -> None:
        self.replica, self.shard, self.shards = replica, shard, shards
        self.contributing = {replica}
        self.view = self
        self.drained = False

    def member(self, replica: int) -> Member:
        return Member()

    def emit(self, kind: str, **fields: object) -> None:
        pass


def test_what_can_never_be_completed_is_taken_away_and_nothing_that_may_be(tmp_path: Path) -> None:
    """Rank 1 is late with step 6, and rank 0 writes step 7 already."""
    never, mine, later, foreign = (
        tmp_path / part
        for part in (
            ".step-00000004.life/shard-0",
            ".step-00000005.life/shard-1",
            ".step-00000007.life/shard-0",
            ".step-00000004.another/shard-0",
        )
    )
    for part in (never, mine, later, foreign):
        part.mkdir(parents=True)
    group: Any = Alone(replica=0, shard=1, shards=2)
    Checkpoints(tmp_path, {"model": torch.nn.Linear(2, 3)}, group=group).close(6)
    assert (tmp_path / ".step-00000006.life/shard-1/index").exists()
    assert not never.parent.exists(), "it keeps the space"
    assert mine.exists()
    assert foreign.exists()
    assert later.exists(), "rank 0 is writing it"


def test_who_could_not_write_one_raises_until_another_has_become_the_writer(tmp_path: Path) -> None:
    for step in (1, 4):
        (tmp_path / f".step-{step:08d}.life").touch()  # where its folder would be
    group: Any = Alone(replica=1, shard=0, shards=1)
    checkpoints = Checkpoints(tmp_path, {"model": torch.nn.Linear(2, 3)}, every=1, group=group)
    checkpoints.before(1)
    with pytest.raises(FtcommError, match="the checkpoint of step 1 was not written"):
        checkpoints.close()
    group.contributing = {0, 1}
    checkpoints.before(2)
    (tmp_path / "step-00000003").mkdir()
    checkpoints.close(3)
    group.contributing = {1}
    with pytest.raises(FtcommError, match="the checkpoint of step 4 was not written"):
        checkpoints.close(4)
    (tmp_path / ".step-00000004.life").unlink()
    checkpoints.close(4)
    assert complete(tmp_path) == [3, 4]


def test_who_waits_for_the_writer_of_the_last_one_takes_its_place(tmp_path: Path) -> None:
    group: Any = Alone(replica=1, shard=0, shards=1)
    group.contributing = {0, 1}
    checkpoints = Checkpoints(tmp_path, {"model": torch.nn.Linear(2, 3)}, group=group)
    lost = threading.Timer(0.3, lambda: setattr(group, "contributing", {1}))
    lost.start()
    checkpoints.close(9)
    lost.join()
    assert complete(tmp_path) == [9]


def test_who_has_left_waits_for_nobody(tmp_path: Path) -> None:
    group: Any = Alone(replica=1, shard=0, shards=1)
    group.contributing, group.drained = {0, 1}, True
    Checkpoints(tmp_path, {"model": torch.nn.Linear(2, 3)}, group=group).close(9)
    assert complete(tmp_path) == []


def test_arrays_without_state_dict_are_written_and_restored(tmp_path: Path) -> None:
    group: Any = Alone(replica=0, shard=0, shards=1)
    group.internals = types.SimpleNamespace(catching_up=False)
    group.allreduce = lambda array, op: array
    state = {"w": np.arange(4.0), "seen": {"tokens": np.zeros(2, np.int64)}}
    Checkpoints(tmp_path, state, group=group).close(5)
    state["w"][:], state["seen"]["tokens"][:] = 0, 7  # type: ignore[index]
    assert Checkpoints(tmp_path, state, group=group).restore() == 5
    assert state["w"].tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert state["seen"]["tokens"].tolist() == [0, 0]  # type: ignore[index]


class Trap:
    """What makes the folder `trap` when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self._trap = trap

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._trap),)


def test_nothing_of_a_checkpoint_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own reader does that."""
    path, trap = tmp_path / "shard-0", tmp_path / "trap"
    write(path, flat(3.0))
    (path / ".metadata").write_bytes(pickle.dumps(Trap(trap)))
    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    assert any(torch.equal(tensor, torch.full((3, 2), 3.0)) for tensor in read(path).tensors)
    monkeypatch.undo()
    assert not trap.exists()
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load({}, checkpoint_id=path)
    assert trap.exists()


def test_a_checkpoint_for_which_no_thread_can_be_had_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "ftcomm-checkpoint":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    group: Any = Alone(replica=0, shard=0, shards=1)
    checkpoints = Checkpoints(tmp_path, {"w": np.ones(3)}, every=1, group=group)
    checkpoints.before(1)
    assert complete(tmp_path) == [1]
    checkpoints.close(2)
    assert complete(tmp_path) == [1, 2]
