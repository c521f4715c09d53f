"""One op, from its submission to its end: an all-reduce. All other collectives: `ftcomm.collective.scripted`."""

from __future__ import annotations

import _thread
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np

from ftcomm.collective.chunks import Contributors, chunk_count, spans
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import Task, all_reduce, resume_tasks
from ftcomm.collective.script import Batch, Script, explained
from ftcomm.collective.spare import Bytes, borrow, give_back
from ftcomm.collective.wire import FP8, WIRES, unsupported_wire, widest
from ftcomm.control.messages import Progress
from ftcomm.errors import ArgumentError, MismatchError
from ftcomm.kernels.dtypes import CODES, HOST_DTYPES, HOST_OPS, unsupported, unsupported_on_host
from ftcomm.transport.segment import CHUNK

# The byte of the reduction: its number in 5 bits, the wire in 2, and
_ATOMIC = 0x80
MOVES = 0x7F  # in place of both: nothing is reduced
_WIRE = 5
_NAMES = {code: name for name, code in CODES.items()}


class Operation:
    """`array` is reduced in place: one-dimensional, contiguous, writable, on the host, and the caller keeps its hands
    off until `done`. `dtype` is the name of the elements' type, `array.dtype` what carries it (uint16 for bfloat16).
    `chunk` is the size of a chunk in bytes, that of the staging of all members. With `atomic` all chunks end with the
    same contributors: the op then keeps a copy of its input, as far as it has gone, to go back to. An op of one chunk
    is atomic by itself and keeps none. `on_device`: `array` is any flat array of a device, which checks it and keeps
    such copies itself. `wire` is the form in which elements cross, see `ftcomm.collective.wire`.

    Raises `ArgumentError` for what cannot be reduced.
    """

    sms: int | None = None  # programs that may run it at once, where a kernel does; None: as many as pay
    number = -1  # its place among the ops of the group; given at submission
    template = -1  # by which a device names its launch, see ftcomm.device.graphs
    done = False
    atomic = False
    wire = WIRES[0]
    error: BaseException | None = None  # set before `done`
    script: Script | None = None  # what moves; None in an all-reduce, whose chunks all lie in `array`
    detail = 0  # of the call, what `call` does not tell; compared between members

    # What follows belongs to the thread that drives the engine. It is begun anew in every epoch.
    next = 0  # the first of `tasks` that is not posted
    verified = False  # all members have made the same call
    doom: BaseException | None = None  # it will fail with this, as soon as all have called it
    two_shot = False
    routed = False  # it goes around the ring, or by two levels
    _kept: np.ndarray[Any, Any] | None = None  # the input of each chunk that was ever posted
    _spare: Bytes | None = None  # where it lies
    end = -1  # tasks of the epoch up to and including the last one of this op; -1 while some are not posted

    def __init__(
        self,
        array: Any,
        dtype: str,
        op: str,
        chunk: int = CHUNK,
        *,
        atomic: bool = False,
        on_device: bool = False,
        wire: str = WIRES[0],
    ) -> None:
        call, itemsize, width = call_of(dtype, op, wire)
        if on_device:
            if reason := unsupported(dtype, op):
                raise ArgumentError(
                    f"hosts can do this, kernels that run whole ops (FTCOMM_TRANSPORT=shm) cannot: {reason}"
                )
            if wire == FP8:
                raise ArgumentError(
                    "wire='fp8' is coded where the host drives: with FTCOMM_TRANSPORT=shm kernels run whole ops in the "
                    "memory of one host, which carries elements as they are. Leave wire away, or set "
                    "FTCOMM_TRANSPORT=tcp or FTCOMM_ENGINE=host on all ranks"
                )
        else:
            flags = array.flags
            if array.ndim != 1 or not flags.forc or not flags.writeable or array.itemsize != itemsize:
                raise ArgumentError(
                    f"allreduce needs a writable contiguous array of {dtype}; got {array.dtype} of shape "
                    f"{array.shape}, writable {flags.writeable}, contiguous {flags.forc}"
                )
        self.array = array
        self.dtype = dtype
        self.op = op
        self.wire = wire
        self.itemsize = itemsize
        self.count = count = len(array)
        self.call = count << 16 | call  # compared between members
        self.elements = elements = chunk // (itemsize if on_device else width)  # in each chunk but the last
        chunks = chunk_count(count, elements)
        self.finals: list[Contributors | None] = [None] * chunks  # per chunk; None while it is INPUT
        self.tasks: tuple[Task, ...] | tuple[Batch, ...] = all_reduce(chunks)
        if atomic:
            self.atomic = True
            self.call |= _ATOMIC
            if chunks > 1 and not on_device:
                self._spare = borrow(array.nbytes)
                self._kept = self._spare[: array.nbytes].view(array.dtype)
        # Held until the op is done. A bare lock: an Event costs ten times as much to make.
        self._latch = _thread.allocate_lock()
        self._latch.acquire()

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    @cached_property
    def memory(self) -> memoryview:
        """The bytes of `array`, which is on the host."""
        return memoryview(self.array.view(np.uint8))

    def size(self, chunk: int) -> int:
        """Its bytes."""
        return max(0, min(self.elements, self.count - chunk * self.elements)) * self.itemsize

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the op is done; False if `timeout` seconds pass before. Any thread."""
        if self.done:
            return True
        if self._latch.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self._latch.release()
        return self.done

    def keep(self, chunk: int, again: bool) -> None:
        """Before the chunk is posted. By the thread that drives; nothing waits in between.

        INPUT is copied, to be gone back to. FINAL becomes INPUT if the chunk is to be reduced `again`; until this
        moment it is FINAL, whatever the plan says, so that each chunk is INPUT or FINAL at every interruption.
        """
        kept = self._kept
        if kept is None:
            return
        here = slice(chunk * self.elements, (chunk + 1) * self.elements)
        if self.finals[chunk] is None:
            kept[here] = self.array[here]
        elif again:
            self.array[here] = kept[here]
            self.finals[chunk] = None

    def resume(self, progress: Mapping[int, Progress], contributors: Contributors) -> tuple[Task, ...]:
        """What is left to do of it in a new view. See `ftcomm.collective.resume`, which raises `ProtocolError`."""
        if self.error is not None:
            self.tasks = ()
            return ()
        only = contributors if self.atomic else None
        self.tasks = tasks = resume_tasks(self.number, len(self.finals), progress, only)
        return tasks

    def enter(self, view: GroupView) -> None:
        """Its first task is about to be posted in the epoch of `view`."""

    def finish(self, error: BaseException | None = None) -> None:
        """Once, by the engine."""
        self.error = error
        if self._spare is not None:
            self._kept = None
            give_back(self._spare)
            self._spare = None
        self.done = True
        self._latch.release()

    def spans(self) -> tuple[tuple[int, int, Contributors], ...]:
        """(start, stop, contributors) in elements, adjacent, for a finished op."""
        return tuple(spans(self.finals, self.elements, self.count))


@cache
def call_of(dtype: str, op: str, wire: str = WIRES[0]) -> tuple[int, int, int]:
    """All three as one number, the bytes of an element, and those that it takes in a slot at most. `op` is "" for what
    only moves."""
    if not op:
        return CODES[dtype] << 8 | MOVES, 1, 1
    reason = unsupported_on_host(dtype, op) or unsupported_wire(dtype, op, wire)
    if reason:
        raise ArgumentError(reason)
    code = HOST_DTYPES[dtype].code << 8 | WIRES.index(wire) << _WIRE | HOST_OPS.index(op)
    return code, HOST_DTYPES[dtype].itemsize, widest(dtype, wire)


def mismatch(calls: Iterable[tuple[int, int, int, int]]) -> MismatchError:
    """The members (replica, op number, call, detail), ascending, have made different calls."""
    who: dict[tuple[int, int, int], list[int]] = {}
    for replica, *made in calls:
        who.setdefault((made[0], made[1], made[2]), []).append(replica)
    said = "; ".join(
        f"{'replicas' if len(members) > 1 else 'replica'} {', '.join(map(str, members))}: op {number}, "
        f"{describe(call, detail)}"
        for (number, call, detail), members in who.items()
    )
    return MismatchError(
        f"the members of the group made different calls. {said}. Every rank must make the same collective calls in "
        "the same order, with the same number of elements and dtype."
    )


def describe(call: int, detail: int = 0) -> str:
    """A call as a person would say it."""
    dtype = _NAMES.get(call >> 8 & 0xFF, f"dtype {call >> 8 & 0xFF}")
    code = call & 0xFF & ~_ATOMIC
    kind, more = explained(detail)
    said = [more] if more else []
    if code != MOVES:
        code, wire = code & (1 << _WIRE) - 1, code >> _WIRE
        said.insert(0, f"op={HOST_OPS[code]!r}" if code < len(HOST_OPS) else f"op={code}")
        if wire:
            said.insert(1, f"wire={WIRES[wire]!r}" if wire < len(WIRES) else f"wire={wire}")
    if call & _ATOMIC:
        said.append("atomic=True")
    return f"{kind}({', '.join(said)}) of {call >> 16} x {dtype}"
