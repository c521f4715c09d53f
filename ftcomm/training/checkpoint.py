"""Checkpoints for the case that all replicas are lost, written while the training goes on.

All replicas hold the same state, so one of them writes it: the lowest that contributes, each rank its own part, in the
format of `torch.distributed.checkpoint`, from a copy in host memory and by a thread.

    checkpoints/
        .step-00000300.5f3a.../      being written, or left by a replica that has died
        step-00000200/               complete, all of it on the disk
            shard-0/                 for each shard: __0_0.distcp, .metadata, skeleton, index
            shard-1/

A rename gives a checkpoint its name when everything is in it, and takes the name away before anything is removed. So
what has the name is complete, whichever process dies when. Later changes on the disk are found by checksums (CRC-32 of
the skeleton and of each tensor, made from memory), and refused. The folder must be the same for all replicas that may
write or read it.

Nothing that is read is unpickled (`ftcomm.training.checkpoint_index`); but a writer to the folder decides what is
trained on.
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
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from ftcomm.control.failed_dials import start
from ftcomm.control.rank_name import rank_name
from ftcomm.errors import ArgumentError, FtcommError, StateError
from ftcomm.training.checkpoint_index import Index, fill, find
from ftcomm.training.entries import as_entry
from ftcomm.training.state import SAME_SCRIPT, FlatState, allocate, first_difference, flatten, load, names

if TYPE_CHECKING:
    from ftcomm.groups.group import Group

log = logging.getLogger("ftcomm")
CLOSE = 600.0  # s that `close` waits for a checkpoint that is still being written
_INDEX = msgspec.json.Decoder(Index)
_LOOK = 0.05  # s between two looks whether another replica has written it
_COMPLETE = re.compile(r"step-(\d{8,18})")  # more digits are no step
_UNNAMED = re.compile(r"\.step-(\d{8,})\..+")
# Each rank writes alone, as no_dist asks; torch warns of that every time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Checkpoints:
    """Writes a checkpoint of `state` every so many steps, and keeps the last `keep` of them.

        checkpoints = Checkpoints("checkpoints", state, every=500)
        loop = StepLoop(state, start=checkpoints.restore())
        for step in loop.steps(total):
            checkpoints.before(step)
            ...
        checkpoints.close(loop.step)

    state: as for the step loop; restored in place.
    every: steps between two checkpoints.

    The replica that writes stands still while it copies its state to host memory, and all others with it in their next
    op. The rest happens in a thread. If that fails, for want of space, say, the log and the events of the job tell it,
    and what was written is removed. The training goes on, but `close` raises if the last checkpoint was not written. No
    checkpoint begins while another is being written.

    Not thread-safe: call all methods from one thread, on all ranks alike. Raises `ArgumentError`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        every: int = 1000,
        keep: int = 3,
        group: Group | None = None,
    ) -> None:
        if group is None:
            from ftcomm.groups.default_group import default_group

            group = default_group()
        if every < 1 or keep < 1:
            raise ArgumentError(f"every={every}, keep={keep}: expected at least 1 of each")
        self._folder, self._group = Path(folder), group
        self._state = {name: as_entry(name, value) for name, value in state.items()}
        self._every, self._keep = every, keep
        self._ranks = group.shards
        self._writing: threading.Thread | None = None
        self._saved = -1  # the last step whose checkpoint was begun here
        self._failed: Exception | None = None  # why that one failed
        self._passed_on = False  # another replica was the writer since then

    def restore(self) -> int:
        """Load the newest checkpoint. Returns the step that it enters, which is the one to begin with, or 0 without
        any.

        All replicas of a new job load the same one, however many there are, and whichever wrote it. A replica that
        joins a running job loads nothing: it gets its state from the others. Blocks for an all-reduce and for the disk.
        Raises `StateError` if the replicas do not all find it, or if it does not fit.
        """
        if self._group.internals.catching_up:
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
        """Write the state with which `step` begins, if a checkpoint is due and this replica is the writer. Blocks while
        the state is copied.

        Call it first in each step.
        """
        if step % self._every == 0 and step > 0:
            self._save(step)

    def close(self, step: int | None = None) -> None:
        """End after the last step: block until what is being written here, and the state entering `step`, if given, is
        on the disk.

        A replica that is not the writer waits for it, and writes the state itself if the writer dies. One that has left
        the job waits for nobody. Raises `FtcommError` if that takes longer than ten minutes, or if this replica could
        not write the last checkpoint. May be repeated: one that failed is tried again.
        """
        self._wait()
        if step is not None:
            self._save(step)
            self._wait()
            self._wait_for_the_writer(step)
        if self._failed is not None and not self._passed_on:
            raise FtcommError(
                f"{rank_name(self._group.replica, self._group.shard)}: the checkpoint of step {self._saved} was not "
                f"written to {self._folder}: {self._failed}. It holds those of the steps {complete(self._folder)}; "
                "mend that, and call close(step) again"
            ) from self._failed

    def _wait_for_the_writer(self, step: int) -> None:
        """Block while another replica has to write the state entering `step`; become the writer if none is left."""
        end = time.monotonic() + CLOSE
        while self._passed_on and not self._group.drained and step not in complete(self._folder):
            if time.monotonic() > end:
                raise FtcommError(
                    f"{rank_name(self._group.replica, self._group.shard)}: replica {min(self._group.contributing)} "
                    f"has not written the checkpoint of step {step} within {CLOSE:.0f} s; look at its log, and whether "
                    f"it has the same folder {self._folder}"
                )
            time.sleep(_LOOK)
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
        if me is None or (step == self._saved and self._failed is None):
            return
        if group.replica != min(group.contributing):
            self._passed_on = True
            return
        if self._writing is not None and self._writing.is_alive():
            group.emit("checkpoint_skipped", step=step)
            return
        started = time.monotonic()
        flat = flatten(self._state).on_host()
        self._saved, self._failed, self._passed_on = step, None, False
        stall = time.monotonic() - started
        unnamed = self._folder / f".{_name(step)}.{me.incarnation}"
        what = step, unnamed, flat, stall
        self._writing = threading.Thread(target=self._write, args=what, name="ftcomm-checkpoint", daemon=True)
        lacks = start(self._writing)
        if lacks:  # the step loop waits for the disk
            self._writing = None
            log.warning("the checkpoint of step %d is written at once: %s", step, lacks)
            self._write(*what)

    def _write(self, step: int, unnamed: Path, flat: FlatState, stall: float) -> None:
        started = time.monotonic()
        part = unnamed / f"shard-{self._group.shard}"
        try:
            self._abandon(step, unnamed)
            write(part, flat)
            last = finish(self._folder, step, unnamed, self._ranks)
            if last:
                prune(self._folder, self._keep)
        except Exception as error:  # no error here may end a training
            # It would keep the space that the next one needs. The other ranks will not write theirs again.
            shutil.rmtree(part, ignore_errors=True)
            with contextlib.suppress(OSError):
                unnamed.rmdir()
            self._failed = error
            log.warning("the checkpoint of step %d failed: %s; look at %s", step, error, self._folder)
            self._group.emit("checkpoint_failed", step=step, reason=str(error)[:200])
            return
        seconds = round(time.monotonic() - started, 3)
        self._group.emit(
            "checkpoint", step=step, bytes=flat.nbytes, seconds=seconds, stall_seconds=round(stall, 4), complete=last
        )

    def _abandon(self, step: int, unnamed: Path) -> None:
        """Remove what this life of the replica began before `step` and can never complete, since this rank has no part
        in it. Of a later checkpoint another rank may have written its part already."""
        for path in _entries(self._folder):
            match = _UNNAMED.fullmatch(path.name)
            earlier = match and int(match[1]) < step and path.suffix == unnamed.suffix
            if earlier and not (path / f"shard-{self._group.shard}").exists():
                shutil.rmtree(path, ignore_errors=True)

    def _load(self, path: Path) -> None:
        ranks = len(list(path.glob("shard-*")))
        if not ranks:
            raise StateError(
                f"{path} has no part that this version can read (shard-0 and so on), as one of ftcomm 0.1 has none; "
                "take it away, and an older one will be used"
            )
        if ranks != self._ranks:
            raise StateError(
                f"{path} was written by replicas of {ranks} ranks, here they have {self._ranks}; restart with as many "
                "ranks a replica, of as many replicas as you like"
            )
        flat = read(path / f"shard-{self._group.shard}")
        found = first_difference(flatten(self._state).skeleton, flat.skeleton)
        if found is not None:
            raise StateError(f"{path} does not fit here: {found} (there: in the checkpoint). {SAME_SCRIPT}")
        load(flat, self._state)


# -- the disk ----------------------------------------------------------------------------------------------------------


def complete(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `folder`, ascending."""
    found = {path.name: _COMPLETE.fullmatch(path.name) for path in _entries(folder)}
    steps = {name: int(match[1]) for name, match in found.items() if match}
    return sorted(step for name, step in steps.items() if name == _name(step))


def write(path: Path, flat: FlatState) -> None:
    """Writes the part of one rank. Its index comes last, by a rename. Raises `OSError`, `FtcommError`."""
    path.mkdir(parents=True, exist_ok=True)
    _write_file(path / "skeleton", flat.skeleton)
    tensors = {
        name: torch.from_numpy(held) if isinstance(held, np.ndarray) else held
        for name, held in zip(names(flat.skeleton), flat.tensors, strict=True)
    }
    try:
        metadata = dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path, sync_files=True), no_dist=True)
    except dcp.api.CheckpointException as error:  # not a subclass of `Exception`
        raise FtcommError(_causes(error)) from error
    index = Index(zlib.crc32(flat.skeleton), find(path, list(tensors), flat.views(), metadata))
    _write_file(path / ".index", msgspec.json.encode(index))
    (path / ".index").rename(path / "index")
    _sync(path)


def read(path: Path) -> FlatState:
    """Reads what `write` has written. Raises `StateError` if it cannot be read, or is not what was written."""
    skeleton = path / "skeleton"
    try:
        index = _index(path / "index")
        data = skeleton.read_bytes()
        if zlib.crc32(data) != index.skeleton:
            raise ValueError(f"{skeleton} has changed since it was written: its checksum is another one")
        flat = _allocated(skeleton, data)
        fill(path, names(data), flat.views(), index.tensors)
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read: {error}; take it away, and an older one will be used") from error
    return flat


def _index(file: Path) -> Index:
    try:
        return _INDEX.decode(file.read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _allocated(skeleton: Path, data: bytes) -> FlatState:
    try:
        return allocate(data)
    except StateError as error:
        raise ValueError(f"{skeleton} is of no use: {error.__cause__ or error}") from error


def _causes(error: dcp.api.CheckpointException) -> str:
    return "; ".join(repr(_first(cause)) for cause, _ in error.failures.values())


def _first(error: BaseException) -> BaseException:
    """Returns the error of the system that has led to this one, if any: torch's writer trips over a later one."""
    chain = error
    while not isinstance(chain, OSError):
        before = chain.__cause__ or chain.__context__
        if before is None:
            return error
        chain = before
    return chain


def finish(folder: Path, step: int, unnamed: Path, ranks: int) -> bool:
    """Give `unnamed` its name if the parts of all ranks are there. Each rank tries, and the last one succeeds."""
    if any(not (unnamed / f"shard-{rank}" / "index").exists() for rank in range(ranks)):
        return False
    try:
        _sync(unnamed)
        unnamed.rename(folder / _name(step))
    except OSError:  # two ranks were last, or another replica has written the same step
        if unnamed.exists() and not (folder / _name(step)).exists():
            raise
        return False
    _sync(folder)
    return True


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the last `keep`, and incomplete ones older than the newest."""
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


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make sure that what was created or renamed in `folder` is on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
