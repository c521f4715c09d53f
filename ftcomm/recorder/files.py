"""The recording of this process: one, whatever groups it has. Where it takes part in a job, it is in a file.

    ranks of `ftcomm run`       RUN/recordings/replica-2.shard-0.pid-4711.recording, in the directory of the run
    ranks that others start     the same, in a directory that the ranks of a job on this host share
    groups without a job        memory of the process, which no other process can read

The directory is in memory if that of this user's runs is (XDG_RUNTIME_DIR). The file takes all its room at once: a page
that cannot be had later would kill the process. Where there is no room the process records into its own memory, and
says so. The pages of the ring are mapped at once, too: the first store into one takes 3 us in memory and 5 us on a
disk, which is 0.1 to 0.16 us of each op. On a disk that comes again whenever the kernel has written the page back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import threading
from pathlib import Path

from ftcomm.control import fork
from ftcomm.control.rank_name import rank_name
from ftcomm.errors import SettingsError
from ftcomm.process.user_dir import LOCK, base_dir, locked, unused
from ftcomm.recorder import callers
from ftcomm.recorder.layout import PROCESS_SHAPE, RecordingEnd
from ftcomm.recorder.reader import SUFFIX, RecordingError, lives, read
from ftcomm.recorder.recorder import Owner, Recorder

log = logging.getLogger("ftcomm")

FOLDER = "recordings"  # in the directory of a run
SHARED = "ranks-"  # how the name of a directory begins that ranks without a launcher share
LIVES = 2  # dead lives of a rank whose recordings are kept


class _OwnRecording:
    """The recording of this process. Guarded by `_lock`."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.path: Path | None = None
        self._shares = -1  # the lock of a directory that ranks share

    def in_memory(self) -> Recorder:
        if self.recorder is None:
            self._record(mmap.mmap(-1, PROCESS_SHAPE.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        assert self.recorder is not None
        return self.recorder

    def in_file(self, owner: Owner, coordinator: str, run: str) -> None:
        """Record into a file with the name of its owner. Raises `OSError`, `SettingsError`."""
        base = base_dir()
        folder = base / run
        with locked(base):
            if not run or not folder.is_dir():
                folder = base / f"{SHARED}{_digest(coordinator, owner.job)}"
                _remove_unused(base, folder)
                self._share(folder)
            recordings = folder / FOLDER
            recordings.mkdir(mode=0o700, exist_ok=True)
            _remove_old(recordings, owner)
            path = recordings / f"replica-{owner.replica}.shard-{owner.shard}.pid-{os.getpid()}{SUFFIX}"
            if self.path is not None and self.path.exists():
                os.replace(self.path, path)  # this process was in another job before
            elif self.path is not None or self.recorder is None:  # a folder that ranks shared took it along
                self._record(_mapped(path))
            else:
                raise OSError(errno.EBUSY, "this process has made a group without a job before")
            self.path = path

    def close(self) -> None:
        """Let go of a directory that ranks share; the last one removes it."""
        if self._shares < 0 or self.path is None:
            return
        folder = self.path.parent.parent
        with contextlib.suppress(OSError), locked(folder.parent):
            os.close(self._shares)
            self._shares = -1
            if unused(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _record(self, memory: mmap.mmap) -> None:
        fork.keep_memory_from_children(memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        for page in range(PROCESS_SHAPE.ring, PROCESS_SHAPE.text, mmap.PAGESIZE):
            memory[page] = 0
        self.recorder = Recorder(memory, PROCESS_SHAPE)

    def _share(self, folder: Path) -> None:
        if self._shares >= 0:
            os.close(self._shares)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._shares = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._shares, fcntl.LOCK_SH)


def _mapped(path: Path) -> mmap.mmap:
    """Returns a new file with room for a recording, mapped. Raises `OSError`."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, PROCESS_SHAPE.size)
        return mmap.mmap(fd, PROCESS_SHAPE.size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


_lock = threading.Lock()
_own = _OwnRecording()


def process_recorder() -> Recorder:
    """Returns the recorder of this process. Any thread."""
    recorder = _own.recorder
    if recorder is None:
        with _lock:
            recorder = _own.in_memory()
    return recorder


def begin(owner: Owner, coordinator: str) -> Recorder:
    """Returns the recorder of this process, which takes part in a job from now on. Others find its file by the name;
    where there can be none, that is logged."""
    run = os.environ.get("FTCOMM_RUN", "").partition(":")[0]
    with _lock:
        lacks = ""
        try:
            _own.in_file(owner, coordinator, run)
        except (OSError, SettingsError) as error:
            lacks = str(getattr(error, "strerror", None) or error)
        recorder = _own.in_memory()
    recorder.describe(owner)
    if lacks:
        log.warning(
            "%s: no other process can read what this rank records, since it has no file of %d MiB in "
            "the directory of runs: %s. Make room there, or set XDG_RUNTIME_DIR to a directory in memory",
            *(rank_name(owner.replica, owner.shard), PROCESS_SHAPE.size >> 20, lacks),
        )
    return recorder


def end(ending: RecordingEnd) -> None:
    """Note that this process has left its job."""
    with _lock:
        if _own.recorder is not None:
            _own.recorder.end(ending)
        _own.close()


def own_path() -> Path | None:
    """Returns the file of the recording of this process, if others can read it."""
    return _own.path


def folders() -> dict[str, Path]:
    """Returns run -> directory of its recordings, for all of this user on this host. Raises `SettingsError`."""
    return {path.parent.name: path for path in sorted(base_dir().glob(f"*/{FOLDER}"))}


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _remove_unused(base: Path, but: Path) -> None:
    """Remove the directories of jobs that have ended, in which a rank was killed last."""
    for found in base.glob(f"{SHARED}*"):
        if found != but and found.is_dir() and not found.is_symlink() and unused(found):
            shutil.rmtree(found, ignore_errors=True)


def _remove_old(recordings: Path, owner: Owner) -> None:
    """Remove all but the newest recordings of earlier lives of a rank."""
    dead = []
    for found in recordings.glob(f"replica-{owner.replica}.shard-{owner.shard}.pid-*{SUFFIX}"):
        with contextlib.suppress(RecordingError):
            if not lives(recording := read(found)):
                dead.append((recording.began, found))
    for _, found in sorted(dead)[:-LIVES]:
        found.unlink(missing_ok=True)


def _in_child() -> None:
    """Give a forked child a recording of its own, should it ever need one."""
    global _own, _lock
    _own, _lock = _OwnRecording(), threading.Lock()
    callers.forget_all()


os.register_at_fork(after_in_child=_in_child)
