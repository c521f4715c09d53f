"""Checkpoints: whole or not there, whoever dies while they are written, and good for any number of replicas."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ftcomm.errors import StateError
from ftcomm.training.checkpoint import complete, finish, prune, read, write
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


@pytest.mark.parametrize("ranks", [1, 2])
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
        assert all("written by replicas" in text or text.startswith("ExpelledError") for text in said), said
    with job(folder, "width", 1, steps=0, width=301) as other:
        assert other.join(0) == [1]
        ((*_, text),) = other.errors()
        assert "does not fit here: model.0.weight is float32[300, 4] there and float32[301, 4] here" in text


def flat(value: float = 1.0) -> FlatState:
    model = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(model.weight, value)
    return flatten({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}).on_host()


def test_only_the_last_of_the_ranks_gives_it_its_name(tmp_path: Path) -> None:
    unnamed = tmp_path / ".step-00000007.life"
    write(unnamed / "rank-1", flat())
    assert not finish(tmp_path, 7, unnamed, 2)
    assert complete(tmp_path) == []
    write(unnamed / "rank-0", flat())
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
    write(tmp_path / "rank-0", flat(3.0))
    weight = {"model.weight": torch.empty(3, 2)}
    torch.distributed.checkpoint.load(weight, checkpoint_id=tmp_path / "rank-0")
    assert torch.equal(weight["model.weight"], torch.full((3, 2), 3.0))


def test_one_that_is_damaged_is_named(tmp_path: Path) -> None:
    write(tmp_path / "rank-0", flat())
    shutil.copytree(tmp_path / "rank-0", tmp_path / "rank-1")
    (tmp_path / "rank-0/__0_0.distcp").write_bytes(b"")
    (tmp_path / "rank-1/skeleton").unlink()
    for rank in range(2):
        with pytest.raises(StateError, match=f"rank-{rank} cannot be read: .* take it away, and an older one"):
            read(tmp_path / f"rank-{rank}")


class Trap:
    """What makes the folder `trap` when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self._trap = trap

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._trap),)


def lead_out(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = f"../rank-0/{info.relative_path}"


def another_shape(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.weight"].size = torch.Size([2, 3])


def no_tensor(metadata: Metadata) -> None:
    """torch unpickles what stands where its bytes are."""
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()


def missing(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["model.weight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lead_out, "leads out of the folder, to '../rank-0/__0_0.distcp'"),
        (another_shape, r"model.weight is torch.float32 \[2, 3\] there, torch.float32 \[3, 2\] here"),
        (no_tensor, "names .*BytesStorageMetadata"),
        (missing, "no tensor model.weight"),
    ],
)
def test_metadata_must_be_of_what_is_awaited(tmp_path: Path, change: Callable[[Metadata], None], said: str) -> None:
    path = tmp_path / "rank-0"
    write(path, flat())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StateError, match=said):
        read(path)


def test_nothing_is_run_that_lies_in_a_checkpoint(tmp_path: Path) -> None:
    """torch's own reader does run it."""
    path, trap = tmp_path / "rank-0", tmp_path / "trap"
    write(path, flat())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = Trap(trap)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(StateError, match=r"names (posix|nt)\.mkdir, which is no part of a checkpoint"):
        read(path)
    assert not trap.exists()
    dcp.FileSystemReader(path).read_metadata()
    assert trap.exists()


@pytest.mark.parametrize("whom", ["pathlib\nPosixPath", "torch.serialization\n_get_layout"])
def test_nothing_but_what_is_read_is_changed(tmp_path: Path, whom: str) -> None:
    """A pickle may give attributes to a class, too: another `name`, by which it is seen where a path leads."""
    path = tmp_path / "rank-0"
    write(path, flat())
    (path / ".metadata").write_bytes(f"\x80\x02c{whom}\nN}}U\x04nameU\x01xs\x86b.".encode("latin-1"))
    with pytest.raises(StateError, match="which is no part of it"):
        read(path)
    assert (tmp_path / "y").name == "y"


@pytest.mark.parametrize("rubbish", [b"", b"x", pickle.dumps({}), pickle.dumps(Metadata({}))[:-1], bytes(1000)])
def test_metadata_that_are_none(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "rank-0"
    write(path, flat())
    (path / ".metadata").write_bytes(rubbish)
    with pytest.raises(StateError, match=r"cannot be read: .* take it away"):
        read(path)
