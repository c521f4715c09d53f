"""Writes dumps: the recordings of all ranks on this host at one moment, for later.

    DUMPS/ftcomm-dumps-1000/2026-11-24T12-03-10.250000-stall-1f0c9a7e/
        dump.json                            why and when, which ranks, and what could not be read
        rank_0, rank_1, ...                  for torch's analyser: torchfrtrace FOLDER
        replica-0.shard-0.pid-4711.recording  the recordings as they are: ftcomm trace FOLDER

DUMPS is FTCOMM_DUMP_DIR, or the directory for temporary files. `KEPT` dumps are kept, the newest. A dump is complete or
not there: it is written under another name first. There is nothing in it but what `ftcomm.recorder.layout` lists; no
settings, no environment and no data.
"""

from __future__ import annotations

import datetime
import os
import pickle
import re
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from ftcomm.errors import FtcommError, SettingsError
from ftcomm.process.user_dir import private
from ftcomm.recorder.layout import MOST_BYTES
from ftcomm.recorder.reader import SUFFIX, Recording, RecordingError, lives, read, read_all
from ftcomm.recorder.torch_format import newest, torch_dumps

KEPT = 8
_PAGE = 4096
_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{6}-[a-z]+-[0-9a-z-]+")


class DumpError(FtcommError):
    """No dump could be written, with the reason and the mend."""


class DumpSummary(msgspec.Struct, frozen=True):
    """The contents of dump.json. `unread` says which files are no recordings, `problems` what is missing in others."""

    cause: str
    time: float  # seconds since 1970
    job: str
    ranks: list[int]
    dead: list[str]  # recordings of processes that live no longer
    unread: list[str]
    problems: list[str]


def dump_dir() -> Path:
    """Returns the directory of this user's dumps; made if missing, mode 0700. Raises `SettingsError`."""
    parent = os.environ.get("FTCOMM_DUMP_DIR", "")
    return private(
        Path(parent or tempfile.gettempdir()),
        f"ftcomm-dumps-{os.getuid()}",
        "dumps",
        "remove it, or set FTCOMM_DUMP_DIR to a directory that you can write to",
    )


def write(recordings: Path, run: str, cause: str) -> Path:
    """Write a dump of the recordings in a folder; returns where it is. Blocks, for a second with many ranks.

    cause: one word. Raises `DumpError`; then nothing is left behind.
    """
    try:
        base = dump_dir()
        stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=base))
    except (OSError, SettingsError) as error:
        raise DumpError(f"no dump was written: {getattr(error, 'strerror', None) or error}") from None
    try:
        _fill(partial, recordings, cause)
        target = base / f"{stamp}-{cause}-{run}"
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DumpError(
            f"no dump was written to {base}: {error.strerror or error}; make room there, or set FTCOMM_DUMP_DIR"
        ) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _remove_old(base)
    return target


def _fill(folder: Path, recordings: Path, cause: str) -> None:
    no_files = []
    for path in sorted(recordings.glob(f"*{SUFFIX}")):
        try:
            data = _taken(path)
        except FileNotFoundError:
            continue  # it was replaced by that of a new life
        except OSError as error:
            no_files.append(f"{path}: {error.strerror or error}")
            continue
        _put(data, folder / path.name)
    found, unread = read_all(folder)
    for rank, dump in torch_dumps(found).items():
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    summary = DumpSummary(
        cause=cause,
        time=time.time(),
        job=next((recording.job for recording in found), ""),
        ranks=list(newest(found)),
        dead=[Path(recording.path).name for recording in found if not lives(recording)],
        unread=no_files + unread,
        problems=[f"{Path(r.path).name}: {problem}" for r in found for problem in r.problems],
    )
    (folder / "dump.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def _taken(source: Path) -> bytes:
    """Returns the bytes of a file. Follows no link, and waits for no writer of a pipe. Raises `OSError`."""
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        size = min(os.fstat(fd).st_size, MOST_BYTES)
        return os.pread(fd, size, 0) if size > 0 else b""
    finally:
        os.close(fd)


def _put(data: bytes, target: Path) -> None:
    """Write a file, with holes where it is empty."""
    with target.open("xb") as copy:
        for at in range(0, len(data), _PAGE):
            page = data[at : at + _PAGE]
            if page.count(0) == len(page):
                copy.seek(len(page), os.SEEK_CUR)
            else:
                copy.write(page)
        copy.truncate(len(data))


def _remove_old(base: Path) -> None:
    dumps = sorted(path for path in base.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink())
    for path in dumps[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def recordings_in(folder: Path) -> tuple[list[Recording], list[str]]:
    """Returns the recordings in the folder of a dump, or the one in a file, and why others cannot be read. Raises
    `RecordingError` if there are none."""
    if folder.is_file():
        return [read(folder)], []
    found, problems = read_all(folder)
    if not found:
        raise RecordingError(f"{folder} has no recordings{''.join(f'; {problem}' for problem in problems)}")
    return found, problems
