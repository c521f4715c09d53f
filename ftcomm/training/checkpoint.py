"""Checkpoints for the day on which all replicas are lost, written while the training goes on.

All replicas hold the same state, so one of them writes it: the lowest that contributes, each rank its own part, in the
format of `torch.distributed.checkpoint`, from a copy in host memory and by a thread.

    checkpoints/
        .step-00000300.5f3a.../     being written; or was, by a replica that has died
        step-00000200/              complete, all of it on the disk
            rank-0/                 for each rank of a replica: __0_0.distcp, .metadata, skeleton
            rank-1/

A checkpoint gets its name when everything is in it, by a rename, and loses it before anything is taken away. So what
has the name is whole, whoever dies when. The folder must be the same for all replicas that may write or read it.
Nothing in it is run when it is read (`ftcomm.training.metadata`); but who may write to it decides what is trained on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed.checkpoint as dcp

from ftcomm.errors import ArgumentError, FtcommError, StateError
from ftcomm.training.metadata import Reader
from ftcomm.training.state import SAME_SCRIPT, FlatState, Stateful, allocate, first_difference, flatten, load, names

if TYPE_CHECKING:
    from ftcomm.group import Group

log = logging.getLogger("ftcomm")
CLOSE = 600.0  # s that `close` waits for a checkpoint that is still being written
_COMPLETE = re.compile(r"step-(\d{8,})")
_UNNAMED = re.compile(r"\.step-(\d{8,})\..+")
# Each rank writes alone, which is what no_dist asks for; torch says so every time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Checkpoints:
    """A checkpoint of `state` every so many steps, the last `keep` of them kept.

        checkpoints = Checkpoints("checkpoints", state, every=500)
        loop = StepLoop(state, start=checkpoints.restore())
        for step in loop.steps(total):
            checkpoints.before(step)
            ...
        checkpoints.close(loop.step)

    state: as for the step loop; restored in place. every: steps between two of them.

    The replica that writes stands still for a copy of its state in host memory, and all others with it in their next
    op. Everything else happens in a thread, and if it fails, for want of space, say, that is told in the log and in the
    events of the job; the training goes on. While one checkpoint is being written no other is begun. Call all methods
    from one thread, on all ranks alike. Raises `ArgumentError`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, Stateful],
        *,
        every: int = 1000,
        keep: int = 3,
        group: Group | None = None,
    ) -> None:
        if group is None:
            from ftcomm.group import default_group

            group = default_group()
        if every < 1 or keep < 1:
            raise ArgumentError(f"every={every}, keep={keep}: expected at least 1 of each")
        self._folder, self._state, self._group = Path(folder), dict(state), group
        self._every, self._keep = every, keep
        self._ranks = group.shards
        self._writing: threading.Thread | None = None
        self._saved = -1  # the last step of which one was begun here

    def restore(self) -> int:
        """Load the newest checkpoint; returns the step that it enters, the one to begin with, or 0 without any.

        All replicas of a new job load the same one; how many there are, and which of them wrote it, does not matter.
        One that joins a running job loads nothing: it gets its state from the others. Blocks, for an all-reduce and for
        the disk. Raises `StateError` if the replicas do not all find it, or if it does not fit.
        """
        if self._group._fresh:
            return 0
        newest = max(complete(self._folder), default=0)
        least, most = np.array([newest]), np.array([newest])
        self._group.allreduce(least, "min")
        self._group.allreduce(most, "max")
        step = int(least[0])
        if (step == 0 and most[0] > 0) or (step > 0 and step not in complete(self._folder)):
            raise StateError(
                f"replica {self._group.replica} finds the checkpoints {complete(self._folder)} in {self._folder}, and "
                f"others find one of step {step or most[0]}; give all replicas the same folder"
            )
        if step:
            self._load(self._folder / _name(step))
            self._saved = step
        return step

    def before(self, step: int) -> None:
        """Write the state with which `step` begins, if a checkpoint is due and this replica is the one to write it.

        Call it first in each step."""
        if step % self._every == 0 and step > 0:
            self._save(step)

    def close(self, step: int | None = None) -> None:
        """End after the last step: write the state entering `step`, if given, and wait until all is on the disk.

        Raises `FtcommError` if that takes longer than ten minutes. May be repeated.
        """
        self._wait()
        if step is not None:
            self._save(step)
            self._wait()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.join(CLOSE)
            if self._writing.is_alive():
                raise FtcommError(f"a checkpoint was not on the disk after {CLOSE:.0f} s; look at {self._folder}")

    def _save(self, step: int) -> None:
        group = self._group
        me = group.view.member(group.replica)
        if step == self._saved or me is None or group.replica != min(group.contributing):
            return
        if self._writing is not None and self._writing.is_alive():
            group.report("checkpoint_skipped", step=step)
            return
        started = time.monotonic()
        flat = flatten(self._state).on_host()
        self._saved = step
        stall = time.monotonic() - started
        unnamed = self._folder / f".{_name(step)}.{me.incarnation}"
        self._writing = threading.Thread(
            target=self._write, args=(step, unnamed, flat, stall), name="ftcomm-checkpoint", daemon=True
        )
        self._writing.start()

    def _write(self, step: int, unnamed: Path, flat: FlatState, stall: float) -> None:
        started = time.monotonic()
        try:
            write(unnamed / f"rank-{self._group.shard}", flat)
            last = finish(self._folder, step, unnamed, self._ranks)
            if last:
                prune(self._folder, self._keep)
        except Exception as error:  # whatever it is, a training does not end for it
            log.warning("the checkpoint of step %d failed: %s; look at %s", step, error, self._folder)
            self._group.report("checkpoint_failed", step=step, reason=str(error)[:200])
            return
        seconds = round(time.monotonic() - started, 3)
        self._group.report(
            "checkpoint", step=step, bytes=flat.nbytes, seconds=seconds, stall_seconds=round(stall, 4), complete=last
        )

    def _load(self, path: Path) -> None:
        ranks = len(list(path.glob("rank-*")))
        if ranks != self._ranks:
            raise StateError(
                f"{path} was written by replicas of {ranks} ranks, here they have {self._ranks}; restart with as many "
                "ranks a replica, of as many replicas as you like"
            )
        flat = read(path / f"rank-{self._group.shard}")
        found = first_difference(flatten(self._state).skeleton, flat.skeleton)
        if found is not None:
            raise StateError(f"{path} does not fit here: {found} (there: in the checkpoint). {SAME_SCRIPT}")
        load(flat, self._state)


# -- the disk ----------------------------------------------------------------------------------------------------------


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder` that are whole, ascending."""
    found = [_COMPLETE.fullmatch(path.name) for path in _entries(folder)]
    return sorted(int(match[1]) for match in found if match)


def write(path: Path, flat: FlatState) -> None:
    """The part of one rank. What is last to be there, by a rename, is `.metadata`."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / "skeleton").open("wb") as file:
        file.write(flat.skeleton)
        file.flush()
        os.fsync(file.fileno())
    tensors = dict(zip(names(flat.skeleton), flat.tensors, strict=True))
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, sync_files=True), no_dist=True)
    _sync(path)


def read(path: Path) -> FlatState:
    """What `write` has written. Raises `StateError` if it cannot be read."""
    try:
        flat = allocate((path / "skeleton").read_bytes())
        tensors = dict(zip(names(flat.skeleton), flat.tensors, strict=True))
        dcp.load(tensors, storage_reader=Reader(path, tensors), no_dist=True)
    except (OSError, dcp.api.CheckpointException) as error:
        why = error if isinstance(error, OSError) else "; ".join(repr(cause) for cause, _ in error.failures.values())
        raise StateError(f"{path} cannot be read: {why}; take it away, and an older one will be used") from error
    return flat


def finish(folder: Path, step: int, unnamed: Path, ranks: int) -> bool:
    """Give `unnamed` its name if the parts of all ranks are there. Each rank asks, the one that comes last succeeds."""
    if any(not (unnamed / f"rank-{rank}" / ".metadata").exists() for rank in range(ranks)):
        return False
    try:
        _sync(unnamed)
        unnamed.rename(folder / _name(step))
    except OSError:  # two ranks came last, or another replica has written the same step
        if not (folder / _name(step)).exists():
            raise
        return False
    _sync(folder)
    return True


def prune(folder: Path, keep: int) -> None:
    """Take away all checkpoints but the last `keep`, and what was never completed and is older than the newest."""
    steps = complete(folder)
    for step in steps[:-keep]:
        with contextlib.suppress(FileNotFoundError):
            (folder / _name(step)).rename(folder / f".{_name(step)}.old")
    for path in _entries(folder):
        match = _UNNAMED.fullmatch(path.name)
        if match and steps and int(match[1]) <= steps[-1]:
            shutil.rmtree(path, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _sync(folder: Path) -> None:
    """What was created or renamed in `folder` is on the disk afterwards."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
