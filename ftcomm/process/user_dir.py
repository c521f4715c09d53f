"""The directory of this user's runs on this host, and the lock under which it is changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ftcomm.errors import SettingsError

LOCK = "lock"  # in the directory of a run: held as long as somebody uses that


def base_dir() -> Path:
    """Returns the directory of this user's runs; made if missing, mode 0700. Raises `SettingsError` if others have
    access."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = Path(runtime) if runtime and os.access(runtime, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    mend = "remove it, or set TMPDIR to a directory that you can write to"
    return private(parent, f"ftcomm-{os.getuid()}", "the files of a run", mend)


def private(parent: Path, name: str, purpose: str, mend: str) -> Path:
    """Returns a directory for `purpose` that only this user can use; made if missing. Raises `SettingsError`, with the
    `mend`, if others can."""
    base = parent / name
    try:
        with contextlib.suppress(FileExistsError):
            base.mkdir(mode=0o700)
        info = base.lstat()
    except OSError as error:
        raise SettingsError(f"cannot use {base} for {purpose}: {error.strerror}; {mend}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        # In a shared /tmp another user could have made it first, to read or change what we put there.
        raise SettingsError(f"{base} is not a directory that only you can use; {mend}")
    return base


@contextlib.contextmanager
def locked(base: Path) -> Iterator[None]:
    """Hold the lock under which directories are made and cleaned, so that a new one is locked before it can look
    stale."""
    fd = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def unused(path: Path) -> bool:
    """Whether no process holds the lock of a run's directory, which was left by a power cut, or by processes that were
    killed. Called under the lock of all."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
