"""One op, from its submission to its end: an all-reduce. `ftcomm.collective.scheduled` has all other collectives."""

from __future__ import annotations

from _thread import LockType, allocate_lock
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from ftcomm.arrays.flat import Bytes
from ftcomm.collective.buffer_pool import acquire, release
from ftcomm.collective.chunks import Contributors, chunk_count, spans
from ftcomm.collective.compression import FP8, unsupported_compression, widest
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import Task, all_reduce, resume_tasks
from ftcomm.collective.schedule import Batch, Schedule, explained
from ftcomm.control.messages import Progress
from ftcomm.errors import ArgumentError, MismatchError
from ftcomm.kernels.call_codes import ATOMIC, COMPRESSION, COMPRESSIONS, ELSEWHERE, MOVES, NAMES, NUMBER, UNKNOWN
from ftcomm.kernels.dtypes import CODES, HOST_DTYPES, OPS, unsupported_on_host
from ftcomm.kernels.host.tensors import torch_missing
from ftcomm.transport.segment import CHUNK

# A place says which op a call is and when it was made. The stamp in its upper bits is the boundary that the thread of
# the step loop has passed, plus 2, so a call that one member has skipped meets one of another step. After 16 million
# steps it begins anew, and so do the steps that an error names.
_STEPS = (1 << 64 - NUMBER) - 2

# The elements, the bytes of one and of all, how many elements are in each chunk but the last, what members compare, and
# a task for each chunk. A bare tuple: one with names costs several times as much to take apart.
Outline = tuple[int, int, int, int, int, tuple[Task, ...]]


class Operation:
    """An all-reduce of `array`, in place: one-dimensional, contiguous, writable, on the host, and untouched by the
    caller until `done`. `dtype` is the name of the elements' type, and `array.dtype` what carries it (uint16 for
    bfloat16). `chunk` is the size of a chunk in bytes, that of the staging of all members. With `atomic` all chunks end
    with the same contributors: the op then keeps a copy of its input, as far as it has gone, to go back to. An op of
    one chunk is always atomic and keeps none. `compression` is the form in which elements travel, see
    `ftcomm.collective.compression`. `outline` is that of the op where a subclass has another one.

    Raises `ArgumentError` for what cannot be reduced.
    """

    number = -1  # counts the ops of the group; given at submission
    # Compared between members beside the call, in the upper bits of the word of the number: see `stamp_of`. The lag
    # makes a training step of it for the error, see `ftcomm.groups.group_internals`.
    stamp = UNKNOWN
    lag = 0
    place = 0  # both of them in one word; given at submission
    caller = 0  # the line of the script that has called it, as a recorder numbers it
    record = 0  # what is recorded of it, see `ftcomm.recorder`
    done = False
    atomic = False
    compression = COMPRESSIONS[0]
    error: BaseException | None = None  # set before `done`
    schedule: Schedule | None = None  # None in an all-reduce, whose chunks all lie in `array`
    detail = 0  # the rest of the call, besides `call`; compared between members

    # The rest belongs to the driving thread, and begins anew in every epoch.
    tasks: tuple[Task, ...] | tuple[Batch, ...]
    next = 0  # index of the first task that is not posted
    verified = False  # all members have made the same call
    doom: BaseException | None = None  # it fails with this as soon as all have called it
    kept: np.ndarray[Any, Any] | None = None  # the input of each chunk that was ever posted
    kept_memory: Bytes | None = None  # the memory of `kept`
    _latch: LockType | None = None  # held until the op is done; the first thread that has to wait for it makes it

    end = -1  # tasks of the epoch up to and including the last one of this op; -1 while some are not posted

    def __init__(
        self,
        array: Any,
        dtype: str,
        op: str,
        chunk: int = CHUNK,
        atomic: bool = False,
        compression: str = COMPRESSIONS[0],
        outline: Outline | None = None,
    ) -> None:
        self.array = array
        self.dtype = dtype
        self.op = op
        self.compression = compression
        if outline is None:
            outline = outline_of(dtype, op, compression, atomic, len(array), chunk)
        self.count, self.itemsize, self.nbytes, self.elements, self.call, tasks = outline
        self.tasks = tasks
        self.finals: list[Contributors | None] = [None] * len(tasks)  # per chunk; None while it is INPUT
        if atomic:
            self.atomic = True
            self._keep_input()

    def _keep_input(self) -> None:
        """Make room for a copy of the input, if the op needs one."""
        if len(self.finals) > 1:
            self.kept_memory = acquire(self.nbytes)
            self.kept = self.kept_memory[: self.nbytes].view(self.array.dtype)

    @cached_property
    def memory(self) -> memoryview:
        """Returns the bytes of `array`, which is on the host."""
        return memoryview(self.array.view(np.uint8))

    def size(self, chunk: int) -> int:
        """Returns the bytes of a chunk."""
        return max(0, min(self.elements, self.count - chunk * self.elements)) * self.itemsize

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the op is done; False after `timeout` seconds. Any thread."""
        if not self.done:
            latch: LockType = self.__dict__.setdefault("_latch", _held())
            # First the latch, then the look: `finish` does the reverse, so one of the two sees what the other has done.
            if not self.done and latch.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                latch.release()
        return self.done

    def keep(self, chunk: int, again: bool) -> None:
        """Keep the input of a chunk that is about to be posted. The driving thread calls it; nothing waits in between.

        INPUT is copied, to go back to. FINAL becomes INPUT if the chunk is to be reduced `again`; until this moment it
        is FINAL, so that each chunk is INPUT or FINAL at every interruption.
        """
        kept = self.kept
        if kept is None:
            return
        here = slice(chunk * self.elements, (chunk + 1) * self.elements)
        if self.finals[chunk] is None:
            kept[here] = self.array[here]
        elif again:
            self.array[here] = kept[here]
            self.finals[chunk] = None

    def resume(self, progress: Mapping[int, Progress], contributors: Contributors) -> tuple[Task, ...]:
        """Returns the tasks that are left in a new view. See `ftcomm.collective.resume`, which raises
        `ProtocolError`."""
        if self.error is not None:
            self.tasks = ()
            return ()
        only = contributors if self.atomic else None
        self.tasks = tasks = resume_tasks(self.number, len(self.finals), progress, only)
        return tasks

    def posted(self) -> set[int]:
        """Returns the chunks that were posted in this epoch."""
        return {task.chunk for task in self.tasks[: self.next]}

    def enter(self, view: GroupView) -> None:
        """Prepare for the epoch of `view`, in which the first task of the op is about to be posted."""

    def finish(self, error: BaseException | None = None) -> None:
        """End the op. The engine calls it once."""
        self.error = error
        if self.kept_memory is not None:
            self.kept = None
            release(self.kept_memory)
            self.kept_memory = None
        self.done = True
        if self._latch is not None:
            self._latch.release()

    def spans(self) -> tuple[tuple[int, int, Contributors], ...]:
        """Returns (start, stop, contributors) in elements, adjacent, for a finished op."""
        return tuple(spans(self.finals, self.elements, self.count))


def _held() -> LockType:
    """Makes a lock that is held. A bare one: an Event costs ten times as much."""
    lock = allocate_lock()
    lock.acquire()
    return lock


@lru_cache(maxsize=4096)
def outline_of(
    dtype: str, op: str, compression: str, atomic: bool, count: int, chunk: int, as_is: bool = False
) -> Outline:
    """Returns the outline of an all-reduce of `count` elements in chunks of `chunk` bytes, which hold elements in the
    form in which they travel, or `as_is`."""
    call, itemsize, width = call_of(dtype, op, compression)
    elements = chunk // (itemsize if as_is else width)
    call |= count << 16 | (ATOMIC if atomic else 0)
    return count, itemsize, count * itemsize, elements, call, all_reduce(chunk_count(count, elements))


@cache
def call_of(dtype: str, op: str, compression: str = COMPRESSIONS[0]) -> tuple[int, int, int]:
    """Returns all three as one number, the bytes of an element, and the most bytes that it takes in a slot. `op` is ""
    for what only moves."""
    if not op:
        return CODES[dtype] << 8 | MOVES, 1, 1
    reason = unsupported_on_host(dtype, op) or unsupported_compression(dtype, op, compression)
    if not reason and (HOST_DTYPES[dtype].kind == "half" or compression == FP8):
        reason = torch_missing(dtype)  # here, in the caller's thread: an import takes seconds
    if reason:
        raise ArgumentError(reason)
    code = HOST_DTYPES[dtype].code << 8 | COMPRESSIONS.index(compression) << COMPRESSION | OPS.index(op)
    return code, HOST_DTYPES[dtype].itemsize, widest(dtype, compression)


def stamp_of(boundary: int) -> int:
    """Returns the stamp of a call that the thread of the step loop makes after it has passed this boundary."""
    return (boundary % _STEPS + 2) << NUMBER


def unlike(places: Collection[int]) -> bool:
    """Whether members with these places cannot have made the same call. All members judge the same places."""
    numbers = {place & (1 << NUMBER) - 1 for place in places}
    return len(numbers) > 1 or len({place >> NUMBER for place in places} - {UNKNOWN}) > 1


def mismatch(calls: Iterable[tuple[int, int, int, int]], lag: int = 0) -> MismatchError:
    """Makes the error for members (replica, place, call, detail), ascending, that have made different calls."""
    who: dict[tuple[int, int, int], list[int]] = {}
    for replica, *made in calls:
        who.setdefault((made[0], made[1], made[2]), []).append(replica)
    if len(who) > 1 and len({(place & (1 << NUMBER) - 1, call, detail) for place, call, detail in who}) == 1:
        return _out_of_step(who, lag)
    said = "; ".join(
        f"{_named(members)}: op {place & (1 << NUMBER) - 1}{_when(place, lag)}, {describe(call, detail)}"
        for (place, call, detail), members in who.items()
    )
    return MismatchError(
        f"the members of the group made different calls. {said}. Every rank must make the same collective calls in "
        "the same order, with the same number of elements and dtype."
    )


def _out_of_step(who: Mapping[tuple[int, int, int], Sequence[int]], lag: int) -> MismatchError:
    """Makes the error for equal calls that were not made at the same step, or not by the same thread."""
    (place, call, detail), _ = next(iter(who.items()))
    op = f"op {place & (1 << NUMBER) - 1}, {describe(call, detail)}"
    said = ", ".join(f"{_named(members)}{_when(place, lag)}" for (place, *_), members in who.items())
    if any(place >> NUMBER == ELSEWHERE >> NUMBER for place, *_ in who):
        return MismatchError(
            f"{op}, was called by different threads: {said}. Threads that call collectives of one group need an order "
            "between their calls that is the same on all ranks; better give each thread a group of its own."
        )
    return MismatchError(
        f"{op}, was called at different steps: {said}. One of them has skipped a call or made one more; look for a "
        "branch that not all ranks take."
    )


def _named(members: Sequence[int]) -> str:
    return f"{'replicas' if len(members) > 1 else 'replica'} {', '.join(map(str, members))}"


def _when(place: int, lag: int) -> str:
    stamp = place >> NUMBER << NUMBER
    if stamp == UNKNOWN:
        return ""
    if stamp == ELSEWHERE:
        return " in another thread than that of the step loop"
    return f" at step {(stamp >> NUMBER) - 2 - lag}"


def describe(call: int, detail: int = 0) -> str:
    """Describes a call in words."""
    dtype = NAMES.get(call >> 8 & 0xFF, f"dtype {call >> 8 & 0xFF}")
    code = call & 0xFF & ~ATOMIC
    kind, more = explained(detail)
    said = [more] if more else []
    if code != MOVES:
        code, wire = code & (1 << COMPRESSION) - 1, code >> COMPRESSION
        said.insert(0, f"op={OPS[code]!r}" if code < len(OPS) else f"op={code}")
        if wire:
            said.insert(1, f"compression={COMPRESSIONS[wire]!r}" if wire < len(COMPRESSIONS) else f"compression={wire}")
    if call & ATOMIC:
        said.append("atomic=True")
    return f"{kind}({', '.join(said)}) of {call >> 16} x {dtype}"
