"""The history of jobs and their interruptions, in an SQLite file that outlives them.

One table row a job, and one an interruption, written again when more is known. Several launchers may write to one file
at once; SQLite serialises them. The file belongs to the user alone. It holds the last lines that an interrupted rank
had written, without the job's token.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ftcomm.errors import SettingsError
from ftcomm.monitoring.history_path import VARIABLE
from ftcomm.monitoring.interruptions import Interruption

_Record = TypeVar("_Record")

VERSION = 1  # of the tables
BUSY = 10.0  # s to wait for another writer
LATE = 10_000  # interruptions, the newest, that are kept for a disk on which nothing can be written

_TABLES = (
    "CREATE TABLE jobs (run TEXT PRIMARY KEY, began REAL NOT NULL, record BLOB NOT NULL)",
    "CREATE TABLE interruptions (run TEXT NOT NULL, number INTEGER NOT NULL, at REAL NOT NULL, record BLOB NOT NULL, "
    "PRIMARY KEY (run, number))",
    "CREATE INDEX interruptions_by_time ON interruptions (at)",
)


class JobRecord(msgspec.Struct, frozen=True):
    """A job. Times are seconds since 1970; `hosts` has the seconds for which each host was observed, `gpu_seconds`
    those of each `Use`."""

    run: str
    script: str
    replicas: int
    ranks_per_replica: int
    began: float  # the first view
    seen: float  # the last time that it was recorded
    over: bool = False
    steps: int = 0
    hosts: dict[str, float] = {}
    gpu_seconds: dict[str, float] = {}


_JOB = msgspec.json.Decoder(JobRecord)
_INTERRUPTION = msgspec.json.Decoder(Interruption)


class HistoryFile:
    """An open history file; for one thread at a time. Every call blocks for the disk, for `BUSY` seconds at most."""

    def __init__(self, path: Path, *, write: bool = True) -> None:
        """Open the file, and make it if it is missing and `write`. Raises `SettingsError` with the mend."""
        self._path = path
        try:
            if write:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            elif not path.exists():
                raise SettingsError(f"there is no history in {path}; a job that loses a replica writes one")
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=rw",  # a reader, too: of a launcher that was killed it undoes a half
                timeout=BUSY,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
            try:
                self._prepare(write)
            except BaseException:
                self._db.close()
                raise
        except sqlite3.OperationalError as error:  # locked, or on a disk that is full or gone
            raise SettingsError(f"cannot use {path}: {error}; name another: {VARIABLE}=FILE") from None
        except sqlite3.Error as error:
            raise SettingsError(f"{path} is no history of ftcomm ({error}); name another: {VARIABLE}=FILE") from None
        except OSError as error:
            raise SettingsError(f"cannot use {path}: {error.strerror}; name another: {VARIABLE}=FILE") from None

    def _prepare(self, write: bool) -> None:
        """Make the tables in a new file. A file with other tables is refused and stays as it is."""
        if write and self._version() == 0:
            self._db.execute("BEGIN IMMEDIATE")  # another launcher may be at it
            if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                for statement in (*_TABLES, f"PRAGMA user_version = {VERSION}"):
                    self._db.execute(statement)
            self._db.execute("COMMIT")
        if (version := self._version()) != VERSION:
            what = f"of another version of ftcomm ({version})" if version else "no history of ftcomm"
            raise SettingsError(f"{self._path} is {what}; name another: {VARIABLE}=FILE")

    def _version(self) -> int:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        return int(version)

    def put(self, job: JobRecord, interruptions: Sequence[Interruption]) -> None:
        """Write a job and some of its interruptions, in one transaction. Raises `OSError`."""
        rows = [(job.run, x.number, x.at, msgspec.json.encode(x)) for x in interruptions]
        with _as_os_error(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", (job.run, job.began, msgspec.json.encode(job))
            )
            self._db.executemany("INSERT OR REPLACE INTO interruptions VALUES (?, ?, ?, ?)", rows)

    def jobs(self, since: float = 0.0) -> list[JobRecord]:
        """Returns the jobs that were seen after `since`, the oldest first. Raises `SettingsError`."""
        rows = self._rows("SELECT record FROM jobs ORDER BY began")
        return [job for (data,) in rows if (job := self._decoded(data, _JOB)).seen >= since]

    def interruptions(self, since: float = 0.0) -> list[tuple[str, Interruption]]:
        """Returns (run, interruption) of those that began after `since`, the oldest first. Raises `SettingsError`."""
        query = "SELECT run, record FROM interruptions WHERE at >= ? ORDER BY at"
        return [(str(run), self._decoded(data, _INTERRUPTION)) for run, data in self._rows(query, since)]

    def close(self) -> None:
        self._db.close()

    def _rows(self, query: str, *values: float) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._unreadable(error) from None

    def _decoded(self, data: Any, decoder: msgspec.json.Decoder[_Record]) -> _Record:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, TypeError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> SettingsError:
        return SettingsError(f"{self._path} cannot be read ({error}); name another: {VARIABLE}=FILE")


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(0, str(error)) from None


class HistoryWriter:
    """Writes a job's history from a thread of its own, which starts with the first record. Trouble with the disk is
    told once, by `trouble(text)` in that thread, and never stops the job."""

    def __init__(self, path: Path | None, trouble: Callable[[str], object]) -> None:
        self._path, self._trouble = path, trouble
        self._queue: queue.SimpleQueue[tuple[JobRecord, Sequence[Interruption]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: JobRecord, interruptions: Sequence[Interruption]) -> None:
        """Write soon; does not block."""
        if self._path is None:
            return
        self._queue.put((job, interruptions))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftcomm-history", daemon=True)
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Write what is left; blocks for `timeout` seconds at most."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        assert self._path is not None
        told = False
        history: HistoryFile | None = None
        late: dict[int, Interruption] = {}  # what could not be written yet
        while (item := self._queue.get()) is not None:
            job, interruptions = item
            late |= {each.number: each for each in interruptions}
            try:
                history = history or HistoryFile(self._path)
                history.put(job, list(late.values()))
                late, told = {}, False
            except (OSError, SettingsError) as error:
                if history is not None:  # the file may be another one by now
                    history.close()
                    history = None
                if not told:
                    self._trouble(f"the history of the job is not written: {error}; the job goes on without it")
                told = True
                late = dict(islice(late.items(), max(0, len(late) - LATE), None))
        if history is not None:
            history.close()
