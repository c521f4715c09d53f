"""The writer of a recording. It costs an op some hundred nanoseconds, so what each op calls is written for speed.

A record is the next one of the ring, whoever writes it: `next` of an iterator in C needs no lock. The thread that has
it fills it in one store, and later changes single words of it, if it is still the same record: a ring comes around.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from ftcomm.recorder import layout
from ftcomm.recorder.layout import (
    ALGORITHM,
    ARRIVED,
    BEGUN,
    CALLED,
    FAILED,
    LAST_EPOCH,
    OP,
    PHASE,
    POSTED,
    RECORD,
    RETRIES,
    RETURNED,
    WAIT,
    GroupKind,
    PhaseKind,
    RecordingEnd,
    Shape,
)
from ftcomm.recorder.wait_records import WaitRecords

_U32 = (1 << 32) - 1


class Owner(NamedTuple):
    """The owner of a recording: a rank of a job."""

    replica: int
    shard: int
    replicas: int
    ranks_per_replica: int
    job: str
    host: str


class RecordedCall(Protocol):
    """The part of an op that a recorder needs."""

    place: int  # stamp and number
    call: int
    detail: int
    caller: int  # number of a text
    record: int  # offset of its record; the recorder sets it


class Recorder:
    """A recording of one process, in `memory`. All methods from any thread, and none blocks; `clock` is that of all
    times in it."""

    def __init__(
        self,
        memory: Any = None,
        shape: Shape = layout.SMALL_SHAPE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins a recording in `memory`, zeroed bytes of the size of `shape`; without it, in memory of its own."""
        self.memory = memory = bytearray(shape.size) if memory is None else memory
        self.shape, self.clock = shape, clock
        self.words = memoryview(memory).cast("Q")
        self.times = memoryview(memory).cast("d")
        self.next = itertools.cycle(range(shape.ring, shape.text, RECORD))
        deque(itertools.islice(self.next, shape.records), maxlen=0)  # the first time round it takes memory
        self._phases = itertools.count(1)
        self._lock = threading.Lock()  # guards texts and groups
        self._texts: dict[str, int] = {"": 0}
        self._routes: dict[str, int] = {"": 0}
        self._groups = 0
        self._closed: list[int] = []  # groups whose room can be used again
        self.epoch = 0  # of the job
        self._append(b"")
        layout.SHAPE.pack_into(
            *(memory, 0, layout.MAGIC, layout.VERSION, RECORD, shape.records, layout.GROUP, shape.groups, shape.texts),
            *(layout.HEADER, shape.ring, shape.text),
        )

    # -- texts ---------------------------------------------------------------------------------------------------------

    def text(self, text: str) -> int:
        """Returns the number of a text; 0 if there is no room for it."""
        number = self._texts.get(text)
        if number is not None:
            return number
        with self._lock:
            number = self._texts.get(text, 0) or self._append(_utf8(text, layout.MOST_TEXT))
            if number:  # else there is no room, and the next one is not kept in another place
                self._texts[text] = number
            return number

    def _append(self, data: bytes) -> int:
        used = self.words[layout.TEXTS_USED // 8]
        if used + 2 + len(data) > self.shape.texts:
            return 0
        at = self.shape.text + used
        self.memory[at : at + 2 + len(data)] = len(data).to_bytes(2, "little") + data
        self.words[layout.TEXTS_USED // 8] = used + 2 + len(data)
        return int(used)

    def route(self, name: str) -> int:
        """Returns the number, below 256, of the transports by which a group reaches its members; 0 if there is none
        left."""
        with contextlib.suppress(KeyError):
            return self._routes[name]
        text = self.text(name)
        with self._lock:
            number = len(self._routes)
            if number >= layout.ROUTES:
                return 0
            at = layout.ROUTES_AT + 4 * number
            self.memory[at : at + 4] = text.to_bytes(4, "little")
            self._routes[name] = number
        return number

    # -- who writes ----------------------------------------------------------------------------------------------------

    def describe(self, owner: Owner) -> None:
        """Write into the header whose recording this is."""
        started = _started()
        layout.PROCESS.pack_into(
            *(self.memory, layout.PROCESS_AT, os.getpid(), started, *owner[:4]),
            *(self.clock(), time.time()),
        )
        for place, name in enumerate((_boot(), owner.host, owner.job)):
            data = _utf8(name, 255)
            at = layout.NAMES_AT + 256 * place
            self.memory[at : at + 1 + len(data)] = bytes((len(data),)) + data
        self.words[layout.ENDED // 8] = RecordingEnd.NONE

    def lag(self, boundaries: int) -> None:
        """Note how many boundaries were passed beyond the training steps."""
        self.words[layout.LAG // 8] = boundaries & ((1 << 64) - 1)

    def end(self, ending: RecordingEnd) -> None:
        """Note that this process has no more to record."""
        self.times[layout.ENDED_AT // 8] = self.clock()
        self.words[layout.ENDED // 8] = ending

    # -- groups and phases ---------------------------------------------------------------------------------------------

    def group(self, name: str, me: int, kind: GroupKind) -> GroupRecorder:
        """Returns the recorder of the ops of a group; `me` is this rank in it."""
        text = self.text(name)
        with self._lock:
            if self._closed and self._groups >= self.shape.groups:
                number = self._closed.pop(0)
            elif self._groups < self.shape.groups:
                number = self._groups
                self._groups += 1
            else:
                number = layout.MANY
            if number != layout.MANY:
                at = layout.HEADER + layout.GROUP * number
                layout.GROUP_FORMAT.pack_into(self.memory, at, text, 0, kind, me & _U32, self.clock(), 0.0)
                self.words[layout.GROUPS_USED // 8] = self._groups
        return GroupRecorder(self, name, number)

    def close_group(self, number: int) -> None:
        """Note that a group was closed; its room may be used again."""
        if number == layout.MANY:
            return
        with self._lock:
            self.times[(layout.HEADER + layout.GROUP * number) // 8 + 3] = self.clock()
            self._closed.append(number)

    def begin(
        self,
        phase: PhaseKind,
        *,
        step: int = 0,
        number: int = 0,
        note: str = "",
        caller: int = 0,
        began: float | None = None,
        lasts: float | None = None,
    ) -> tuple[int, int]:
        """Record that a phase begins, or has `began`; returns what `finish` needs. `caller` is the number of a text.
        After `lasts` seconds it gives up."""
        at, mark = next(self.next), next(self._phases)
        head = PHASE | phase << 8 | self.epoch << 32
        text, now = self.text(note), self.clock() if began is None else began
        BEGUN.pack_into(self.memory, at, mark, head, _signed(step), _signed(number), text, caller, now)
        if lasts is not None:
            self.times[(at >> 3) + layout.GIVES_UP] = now + lasts
        return at, mark

    def is_phase(self, begun: tuple[int, int]) -> bool:
        """Whether the record of a phase is still there."""
        at, mark = begun[0] >> 3, begun[1]
        return bool(self.words[at] == mark and self.words[at + 1] & 0xFF == PHASE)

    def finish(self, begun: tuple[int, int], *, failed: bool = False, number: int | None = None) -> None:
        """Record that a phase is over; `number`, if it is known only now."""
        at, words = begun[0] >> 3, self.words
        if self.is_phase(begun):
            words[at + FAILED] = failed
            if number is not None:
                words[at + layout.NUMBER] = number
            self.times[at + RETURNED] = self.clock()

    @contextlib.contextmanager
    def phase(self, phase: PhaseKind, *, step: int = 0, number: int = 0, note: str = "") -> Iterator[None]:
        """A context that is recorded as a phase; one that an exception ends has failed."""
        begun = self.begin(phase, step=step, number=number, note=note)
        try:
            yield
        except BaseException:
            self.finish(begun, failed=True)
            raise
        self.finish(begun)


class GroupRecorder:
    """Records the ops of one group. The thread that drives the group, or the one that holds its mutex, calls it."""

    def __init__(self, recorder: Recorder, name: str, number: int) -> None:
        self.recorder, self.name, self.number, self.clock = recorder, name, number, recorder.clock
        self._next, self._memory = recorder.next, recorder.memory
        self._words, self._times = recorder.words, recorder.times
        self._epoch = 0
        # Records that an op was called, at a time; and that it returns, at a time. All that each op needs is bound.
        self.called: Callable[[RecordedCall, float], None] = self._to_call(0)
        self.returned: Callable[[RecordedCall, float], None] = self._to_return()
        self._waiting, self._waits = -1, WaitRecords()  # the place of the op that is waited for, and its waits

    # -- each op -------------------------------------------------------------------------------------------------------

    def _to_call(self, route: int) -> Callable[[RecordedCall, float], None]:
        pack, ring, records, head = CALLED.pack_into, self._memory, self._next, self._head(OP) | route << 8

        def called(op: RecordedCall, now: float) -> None:
            op.record = at = next(records)
            pack(ring, at, op.place, head, op.call, op.detail, op.caller, now)

        return called

    def _to_return(self) -> Callable[[RecordedCall, float], None]:
        words, times = self._words, memoryview(self._memory)[8 * RETURNED :].cast("d")

        def returned(op: RecordedCall, now: float) -> None:
            at = op.record >> 3
            if words[at] == op.place:
                times[at] = now

        return returned

    def failed(self, op: RecordedCall) -> None:
        """Record that `op`, which has returned, has failed."""
        self._set(op, FAILED, 1)

    # -- what not each op does -----------------------------------------------------------------------------------------

    def posted(self, op: RecordedCall, algorithm: str) -> None:
        """Record that the first task of `op` is about to be posted."""
        at = op.record >> 3
        if self._words[at] == op.place:
            self._times[at + POSTED] = self.clock()
            self._words[at + ALGORITHM] = self.recorder.text(algorithm)

    def arrived(self, op: RecordedCall) -> None:
        """Record that all members have posted the first task of `op`."""
        at = op.record >> 3
        if self._words[at] == op.place:
            self._times[at + ARRIVED] = self.clock()

    def waits(self, op: RecordedCall, replicas: tuple[int, ...], since: float, now: float) -> None:
        """Record that `op` has waited for `replicas` from `since` to `now`. Called every few milliseconds of a wait;
        the time of a replica adds up over the waits of an op."""
        if self._waiting != op.place:
            self._waiting, self._waits = op.place, WaitRecords()
        for replica in replicas:
            self._waits.write(self.recorder, (replica, None), op.place, self._head(WAIT), since, now)

    def _head(self, kind: int) -> int:
        return kind | self.number << 16 | self._epoch << 32

    # -- views ---------------------------------------------------------------------------------------------------------

    def entered(self, epoch: int, members: str, route: str) -> None:
        """Record the view of the ops that are called from now on: its members, and by which transports they are
        reached."""
        recorder = self.recorder
        self._epoch = epoch
        self.called = self._to_call(recorder.route(route))
        if self.number != layout.MANY:
            text = recorder.text(members)
            at = layout.HEADER + layout.GROUP * self.number + 4
            self._memory[at : at + 4] = text.to_bytes(4, "little")

    def ended(self, op: RecordedCall, now: float, failed: bool) -> None:
        """Record that `op` has returned at `now` because of a view, or of the end of its group."""
        self.returned(op, now)
        if failed:
            self.failed(op)

    def goes_on(self, op: RecordedCall) -> None:
        """Record that `op`, which is in flight, goes on in the view that was just entered."""
        self._set(op, LAST_EPOCH, self._epoch)
        at = (op.record >> 3) + RETRIES
        self._set(op, RETRIES, self._words[at] + 1)

    def renumbered(self, op: RecordedCall, before: int) -> None:
        """Record that `op` has another place than `before`: that of a member that has joined."""
        at = op.record >> 3
        if self._words[at] == before:
            self._words[at] = op.place

    def close(self) -> None:
        """Note that the group was closed; idempotent."""
        self.recorder.close_group(self.number)
        self.number = layout.MANY

    def _set(self, op: RecordedCall, word: int, value: int) -> None:
        at = op.record >> 3
        if self._words[at] == op.place:
            self._words[at + word] = value


def unread(clock: Callable[[], float] = time.monotonic) -> GroupRecorder:
    """Returns the recorder of a group whose recording is never read."""
    return Recorder(clock=clock).group("", 0, GroupKind.JOB)


def listed(replicas: Mapping[int, str]) -> tuple[str, str]:
    """Returns the members of a view as `0-3,7,5`, in the order of `replicas`, and their transports, each once.
    `replicas` names for each member the transport by which it is reached, "" for this one."""
    runs: list[list[int]] = []
    for replica in replicas:
        if runs and runs[-1][1] == replica - 1:
            runs[-1][1] = replica
        else:
            runs.append([replica, replica])
    members = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return members, " ".join(sorted({transport for transport in replicas.values() if transport}))


def _utf8(text: str, most: int) -> bytes:
    """Returns a text in UTF-8, with its end where it is too long, since that says more of a path."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return data
    return ("…" + data[len(data) - most + 3 :].decode("utf-8", "ignore")).encode()


def _signed(number: int) -> int:
    most = (1 << 63) - 1
    return max(-most, min(most, number))


def _boot() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def _started() -> int:
    """Returns when this process has started, in clock ticks after the boot: others tell it by that from a later one."""
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
