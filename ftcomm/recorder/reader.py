"""Reads the recording of a process, which may run, hang, be frozen or be dead.

A file is read as if an enemy had written it: it is never mapped (who truncates a mapped file kills its readers), at
most `layout.MOST_BYTES` of it are read, every offset and number is checked, and texts are made printable. What cannot
be read is left out and said in `problems`.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from ftcomm.errors import FtcommError
from ftcomm.kernels.call_codes import NUMBER, boundary_of, decode
from ftcomm.recorder import layout
from ftcomm.recorder.layout import GroupKind, PhaseKind, RecordingEnd, Shape

SUFFIX = ".recording"
_ENDINGS, _GROUPS, _PHASES = ({int(x): x.name.lower() for x in kind} for kind in (RecordingEnd, GroupKind, PhaseKind))
MANY = 100  # records among which there are ops, if there are any
MOST_MEMBERS = 4096  # of a group
_MOST_TIME = 1e10  # s after a boot, or since 1970, which no time is behind


class RecordingError(FtcommError):
    """A file that is no recording of this version, with what it is instead."""


class RecordedGroup(msgspec.Struct, frozen=True):
    """A group of ranks. `members` are those of its newest view, as in "0-3,7,5", in the order in which a ring
    goes through them; `closed`: when, None while it is open."""

    name: str
    kind: str  # "job", "subgroup", "static"
    me: int
    members: str
    opened: float
    closed: float | None


class RecordedOp(msgspec.Struct, frozen=True):
    """An op of a group. Times are seconds of the monotonic clock of its host; None: not yet.

    An op of the fast path has no `posted` and no `arrived`: it was posted when it was called, and all had come when the
    last of the others called, whose recordings say when. Without `returned` it is in flight.
    """

    group: str
    number: int
    kind: str  # "allreduce", "broadcast", ..., see `ftcomm.kernels.call_codes`
    dtype: str
    elements: int
    reduction: str  # "sum", ...; "" if nothing is reduced
    compression: str
    atomic: bool
    root: int | None
    boundary: int | None  # the step boundary that its thread had passed last; None: unknown, or another thread
    epoch: int  # of the view in which it was called
    called: float
    posted: float | None
    arrived: float | None
    returned: float | None
    last_epoch: int  # of the view in which it goes on, or has returned
    retries: int  # views that were entered while it was in flight
    failed: bool
    algorithm: str  # "" before it is posted
    transports: str  # by which members are reached, as in "shm tcp"
    caller: str  # "file:line function"; "" if unknown


class RecordedWait(msgspec.Struct, frozen=True):
    """A wait of an op for a replica, of 10 ms or more: for so many `seconds` up to now, from `began` on."""

    group: str
    op: int
    replica: int
    began: float
    seconds: float
    epoch: int


class RecordedPhaseWait(msgspec.Struct, frozen=True):
    """A wait of a phase for a rank, for so many `seconds` up to now. Without `rank` it is that with the same index as
    the one that waits or, in a static group, the member that `replica` numbers."""

    replica: int
    rank: int | None
    seconds: float


class RecordedPhase(msgspec.Struct, frozen=True):
    """Something that a rank did besides ops; see `layout.PhaseKind` for `number`. Without `ended` it is in it. One that
    waits for others has their `waits`, the line of the script, and the time at which it gives up."""

    name: str  # "step", "boundary", "vote", "view", ...: names of `layout.PhaseKind`
    step: int
    number: int
    note: str
    epoch: int
    began: float
    ended: float | None
    failed: bool
    caller: str = ""
    gives_up: float | None = None
    waits: tuple[RecordedPhaseWait, ...] = ()


class Recording(msgspec.Struct, frozen=True):
    """All that a process has recorded. Ops, waits and phases are in the order in which they began."""

    path: str
    job: str
    replica: int
    shard: int
    replicas: int
    ranks_per_replica: int
    pid: int
    started: int  # of the process, in clock ticks after the boot
    host: str
    boot: str  # processes with the same boot share the monotonic clock
    began: float  # by the monotonic clock
    wall_offset: float  # to be added to times for seconds since 1970, as it was when the recording began
    ending: str  # "none", "closed", "failed"
    ended: float | None
    lag: int  # boundaries passed beyond the training steps, as of now: step = boundary - lag
    groups: tuple[RecordedGroup, ...]
    ops: tuple[RecordedOp, ...]
    waits: tuple[RecordedWait, ...]
    phases: tuple[RecordedPhase, ...]
    torn: int  # records that were being written, or never finished
    problems: tuple[str, ...]  # what could not be read

    def step(self, op: RecordedOp) -> int | None:
        """Returns the training step of an op, if it is known."""
        return None if op.boundary is None else op.boundary - self.lag


def read(path: str | os.PathLike[str], newest: int | None = None) -> Recording:
    """Returns the recording in a file. Reads 6 MiB at most, and does not wait. All records take a tenth of a second;
    with `newest` only so many of them are taken, so many ops that failed, and what is not over, in milliseconds.

    Raises `RecordingError` if there is none that this version of ftcomm can read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        raise RecordingError(f"{os.fspath(path)}: {error.strerror or error}") from None
    try:
        return parse(_copied(fd), _copied(fd), os.fspath(path), newest)
    except OSError as error:
        raise RecordingError(f"{os.fspath(path)}: {error.strerror or error}") from None
    finally:
        os.close(fd)


def _copied(fd: int) -> bytes | mmap.mmap:
    """Returns the bytes of a file, in memory of their own that the system has back at once: in the heap of each thread
    of a launcher that reads them there would stay some MB of them."""
    size = min(os.fstat(fd).st_size, layout.MOST_BYTES)
    if size <= 0:
        return b""
    copy = mmap.mmap(-1, size)
    got = os.preadv(fd, [copy], 0)
    return copy if got == size else copy[:got]


def read_all(folder: Path) -> tuple[list[Recording], list[str]]:
    """Returns the recordings in a folder, in the order of replicas, ranks and time, and why others cannot be read."""
    found, problems = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            found.append(read(path))
        except RecordingError as error:
            problems.append(str(error))
    return sorted(found, key=lambda r: (r.replica, r.shard, r.began)), problems


def stands_since(folder: Path) -> float:
    """Returns since when a process of a folder that lives waits, in an op or at a boundary, and no op of any has
    returned, by the clock of the ranks; infinity if none waits."""
    last, waits = 0.0, math.inf
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(RecordingError):
            found = read(path, newest=MANY)
            last = max([last, *(op.returned for op in found.ops if op.returned is not None)])
            if lives(found):
                calls = (op.called for op in found.ops if op.returned is None)
                stops = (phase.began for phase in found.phases if phase.ended is None and phase.name == "boundary")
                waits = min([waits, *calls, *stops])
    return max(last, waits)


def parse(first: bytes | mmap.mmap, second: bytes | mmap.mmap, path: str = "", newest: int | None = None) -> Recording:
    """Returns the recording in two reads of the same file, one after the other: a record that differs between them is
    being written. See `read` for `newest`. Raises `RecordingError`."""
    return _Parser(first, second, path, newest).recording()


class _Parser:
    def __init__(self, first: bytes | mmap.mmap, second: bytes | mmap.mmap, path: str, newest: int | None) -> None:
        self._data, self._again, self._path, self._newest = first, second, path, newest
        self._problems: list[str] = []
        self._texts: dict[int, str] = {}
        self._torn = 0
        self._shape = self._checked_shape()
        self._groups = self._read_groups()

    def recording(self) -> Recording:
        pid, started, replica, shard, replicas, ranks, began, wall = layout.PROCESS.unpack_from(
            self._data, layout.PROCESS_AT
        )
        boot, host, job = (self._name(place) for place in range(layout.NAMES))
        ending, (ended,) = self._word(layout.ENDED), struct.unpack_from("<d", self._data, layout.ENDED_AT)
        ops, waits, phases = self._records()
        if self._torn:
            self._problems.append(f"{self._torn} records were being written, or never finished")
        return Recording(
            *(self._path, job, replica, shard, replicas, ranks, pid, started, host, boot),
            began=_time(began) or 0.0,
            wall_offset=wall - began if abs(wall - began) < _MOST_TIME else 0.0,
            ending=_ENDINGS.get(ending, "none"),
            ended=_time(ended),
            lag=struct.unpack_from("<q", self._data, layout.LAG)[0],
            groups=tuple(group for group in self._groups if group is not None),
            ops=tuple(ops),
            waits=tuple(waits),
            phases=tuple(phases),
            torn=self._torn,
            problems=tuple(self._problems),
        )

    def _checked_shape(self) -> Shape:
        data = self._data
        if len(data) < layout.HEADER:
            raise RecordingError(f"{self._path}: {len(data)} bytes; a recording has {layout.HEADER} and more")
        found = layout.SHAPE.unpack_from(data)
        magic, version, record, records, group, groups, texts = found[:7]
        if magic != layout.MAGIC:
            raise RecordingError(f"{self._path}: this is no recording of ftcomm")
        if version != layout.VERSION:
            raise RecordingError(
                f"{self._path}: a recording in format {version}; this ftcomm reads format {layout.VERSION}. Read it "
                "with the ftcomm that wrote it"
            )
        shape = Shape(groups, records, texts)
        told = (record, group, *found[7:])
        if (
            told != (layout.RECORD, layout.GROUP, layout.HEADER, shape.ring, shape.text)
            or shape.size > layout.MOST_BYTES
        ):
            raise RecordingError(f"{self._path}: its header contradicts itself, so nothing of it can be trusted")
        if len(data) < shape.size:
            self._problems.append(f"the file has {len(data)} of {shape.size} bytes: it was truncated")
        return shape

    # -- texts and groups ----------------------------------------------------------------------------------------------

    def _word(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self._data, at)[0])

    def _name(self, place: int) -> str:
        at = layout.NAMES_AT + 256 * place
        return _printable(self._data[at + 1 : at + 1 + self._data[at]])

    def _text(self, number: int) -> str:
        if number == 0:
            return ""
        if number not in self._texts:
            at, end = self._shape.text + number, min(self._shape.size, len(self._data))
            length = int.from_bytes(self._data[at : at + 2], "little")
            whole = number < self._shape.texts and length <= layout.MOST_TEXT and at + 2 + length <= end
            self._texts[number] = _printable(self._data[at + 2 : at + 2 + length]) if whole else "?"
        return self._texts[number]

    def _read_groups(self) -> list[RecordedGroup | None]:
        used = min(self._word(layout.GROUPS_USED), self._shape.groups)
        found: list[RecordedGroup | None] = []
        for number in range(used):
            at = layout.HEADER + layout.GROUP * number
            if at + layout.GROUP > len(self._data):
                break
            name, members, kind, me, opened, closed = layout.GROUP_FORMAT.unpack_from(self._data, at)
            if kind not in _GROUPS or _time(opened) is None:
                found.append(None)
                continue
            found.append(RecordedGroup(self._text(name), _GROUPS[kind], me, self._text(members), opened, _time(closed)))
        return found

    def _group(self, number: int, called: float) -> str:
        group = self._groups[number] if number < len(self._groups) else None
        if group is None:
            return "?"
        return group.name if called >= group.opened else "(closed)"  # its room in the table was used again

    def _route(self, number: int) -> str:
        at = layout.ROUTES_AT + 4 * number
        return self._text(int.from_bytes(self._data[at : at + 4], "little"))

    # -- records -------------------------------------------------------------------------------------------------------

    def _records(self) -> tuple[list[RecordedOp], list[RecordedWait], list[RecordedPhase]]:
        ops, waits = [], []
        phases: dict[int, RecordedPhase] = {}  # by their numbers
        within: dict[int, list[RecordedPhaseWait]] = {}  # number of a phase -> its waits
        end = min(self._shape.text, len(self._data), len(self._again))
        for at in self._places(end):
            kind = self._data[at + 8]
            if kind == 0:
                continue
            record = self._stable(at)
            if record is None:
                self._torn += 1
            elif kind == layout.OP:
                ops.append(self._op(record))
            elif kind == layout.WAIT and int.from_bytes(record[10:12], "little") == layout.PHASES:
                number, wait = self._phase_wait(record)
                within.setdefault(number, []).append(wait)
            elif kind == layout.WAIT:
                waits.append(self._wait(record))
            elif kind == layout.PHASE:
                number, phase = self._phase(record)
                phases[number] = phase
            else:
                self._torn += 1
        ops.sort(key=lambda op: (op.called, op.group, op.number))
        waits.sort(key=lambda wait: wait.began)
        told = [msgspec.structs.replace(phase, waits=tuple(within.get(n, ()))) for n, phase in phases.items()]
        return ops, waits, sorted(told, key=lambda phase: phase.began)

    def _places(self, end: int) -> Iterable[int]:
        """Returns the offsets of the records that are taken, of those before `end`."""
        places = range(self._shape.ring, end - layout.RECORD + 1, layout.RECORD)
        if self._newest is None or not places:
            return places
        words = np.frombuffer(self._again, "<u8", len(places) * layout.WORDS, places.start).reshape(-1, layout.WORDS)
        times, kinds = words.view("<f8"), words[:, 1] & 0xFF
        unended = ((kinds == layout.OP) | (kinds == layout.PHASE)) & (times[:, layout.RETURNED] == 0.0)
        unended |= (kinds == layout.WAIT) & np.isin(words[:, 0], words[unended, 0])
        began = np.where((times[:, -1] > 0.0) & (times[:, -1] < _MOST_TIME), times[:, -1], 0.0)
        taken = np.flatnonzero(unended)
        for some in (kinds != 0, (kinds == layout.OP) & (words[:, layout.FAILED] != 0)):
            among = np.flatnonzero(some)
            most = min(self._newest, len(among))
            taken = np.union1d(taken, among[np.argpartition(began[among], -most)[-most:]] if most else among)
        return [places[number] for number in taken.tolist()]

    def _stable(self, at: int) -> bytes | None:
        """Returns a record that was not being written, as it was at the later look."""
        first, second = self._data[at : at + layout.RECORD], self._again[at : at + layout.RECORD]
        if first[:24] != second[:24] or first[-8:] != second[-8:]:
            return None
        return second if _time(struct.unpack_from("<d", second, layout.RECORD - 8)[0]) is not None else None

    def _op(self, record: bytes) -> RecordedOp:
        place, _, route, group, epoch, call, detail, caller, *later, called = layout.READ_OP.unpack(record)
        *times, last_epoch, retries, failed, algorithm = later
        posted, arrived, returned = (_time(time) for time in times)
        made = decode(call, detail)
        name = self._text(algorithm & 0xFFFF_FFFF)
        return RecordedOp(
            *(self._group(group, called), place & (1 << NUMBER) - 1, made.kind, made.dtype, made.elements),
            *(made.reduction, made.compression, made.atomic, made.root),
            boundary=boundary_of(place),
            epoch=epoch,
            called=called,
            posted=posted,
            arrived=arrived,
            returned=returned,
            last_epoch=last_epoch or epoch,
            retries=retries,
            failed=bool(failed),
            algorithm=name or ("fast path" if returned is not None else ""),
            transports=self._route(route),
            caller=self._text(caller),
        )

    def _wait(self, record: bytes) -> RecordedWait:
        place, _, _, group, epoch, replica, _, seconds, began = layout.READ_WAIT.unpack(record)
        number = place & (1 << NUMBER) - 1
        return RecordedWait(self._group(group, began), number, replica, began, _lasted(seconds), epoch)

    def _phase_wait(self, record: bytes) -> tuple[int, RecordedPhaseWait]:
        """Returns the number of a phase, and a wait of it."""
        phase, *_, replica, rank, seconds, _ = layout.READ_WAIT.unpack(record)
        return phase, RecordedPhaseWait(replica, rank - 1 if rank else None, _lasted(seconds))

    def _phase(self, record: bytes) -> tuple[int, RecordedPhase]:
        """Returns the number of a phase in its process, and the phase."""
        mark, _, phase, _, epoch, step, number, note, caller, *later, began = layout.READ_PHASE.unpack(record)
        gives_up, ended, failed = later
        return mark, RecordedPhase(
            *(_PHASES.get(phase) or f"phase {phase}", step, number, self._text(note), epoch, began),
            ended=_time(ended),
            failed=bool(failed),
            caller=self._text(caller),
            gives_up=_time(gives_up),
        )


def numbers(members: str) -> list[int]:
    """Returns the replicas of a text as "0-3,7,5", in its order; none if it is no such text, or names more than
    `MOST_MEMBERS`."""
    found: list[int] = []
    for run in members.split(","):
        first, _, last = run.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or len(run) > 20:
            return []
        begin, end = int(first), int(last or first)
        if end - begin >= MOST_MEMBERS - len(found):
            return []
        found += range(begin, end + 1)
    return found


def lives(recording: Recording) -> bool:
    """Whether the process that has written a recording lives, on this host. A frozen one does."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{recording.pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return int(fields[19]) == recording.started and fields[0] not in (b"Z", b"X")
    return False


def _lasted(seconds: float) -> float:
    return seconds if 0.0 <= seconds < _MOST_TIME else 0.0


def _time(seconds: float) -> float | None:
    """Returns a time; None if it is none, or not yet."""
    return seconds if 0.0 < seconds < _MOST_TIME else None


def _printable(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
