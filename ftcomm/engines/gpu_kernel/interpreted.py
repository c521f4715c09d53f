"""A device without a GPU: the kernels run in Triton's interpreter, on host memory. For tests.

The interpreter keeps its state in globals, so one kernel runs at a time in a process, in a thread that serves the op
stream. Programs of a launch run one after the other, so a launch has one. Everything holds the interpreter lock most of
the time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from ftcomm.engines.gpu.interpreter import interpreter, tl  # first: Triton is to interpret

# isort: split
from ftcomm.arrays import Staged, stage
from ftcomm.arrays.flat import Flat, to_read, to_write
from ftcomm.engines.gpu_kernel.copies import WORDS, Copies, HostMover, Mover, PeerMemory
from ftcomm.engines.gpu_kernel.device import KernelLaunch, Reached
from ftcomm.engines.gpu_kernel.layout import COPIES_AT, flag_bytes
from ftcomm.errors import ArgumentError, FtcommError
from ftcomm.kernels.device.allreduce import allreduce, collective
from ftcomm.kernels.device.variant import CollectiveVariant
from ftcomm.kernels.device.words import CTL_WORDS, STATE_WORDS, VIEW_WORDS
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import Layout, Segment

_BLOCK = 16384  # elements, those of a chunk; a call of the interpreter costs the same for any number
_THREADS = 32


def _int64(value: int) -> tl.tensor:
    """Returns an int64 that is stored as one: of 2**31 .. 2**32 - 1 the interpreter makes one in 32 bits, and stores
    what lies behind it as well."""
    return tl.tensor(interpreter.TensorHandle(np.array([value], np.int64), tl.int64), tl.int64)


class InterpretedGraph:
    """The counterpart of `torch.cuda.CUDAGraph`: the ops that were queued while it was captured."""

    def __init__(self, queue: Callable[[Sequence[Callable[[], None]]], None]) -> None:
        self._queue = queue
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Queue them all. The arrays are to be left alone until `InterpretDevice.wait_replays` has returned."""
        self._queue(self.work)


def _reached(memory: Peer | Segment, layout: Layout) -> Reached:
    end = memory.address + layout.size
    staging, flags = memory.address + layout.staging_at, end - flag_bytes(layout.lanes)
    return Reached(memory.address, staging, flags, memory.buffer.cast("Q"))


class InterpretDevice:
    """See `ftcomm.engines.gpu_kernel.device.Device`; lanes, staging and flags lie in the segment."""

    blocking = True
    memory = "cpu"

    def __init__(self, segment: Segment) -> None:
        self.layout = segment.layout
        self.own = _reached(segment, segment.layout)
        self._words = np.zeros(CTL_WORDS + STATE_WORDS + VIEW_WORDS, np.uint64)
        self._ctl, self._state, self._view = np.split(self._words, np.cumsum((CTL_WORDS, STATE_WORDS)))
        self.ctl = self._ctl.data
        self._ops: deque[Callable[[], None]] = deque()
        self._tasks = np.zeros(0, np.int64)
        self._changed = threading.Condition()
        self._idle = True
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.copies_at = 2 * self.layout.lanes * self.layout.slots * self.layout.chunk
        self.copies_chunk = self.layout.chunk
        self._peers: dict[str, Peer] = {}  # by the nonce of the segment
        self._graph = threading.local()  # `into`: the graph that a thread captures

    def reach(self, peer: Peer) -> Reached:
        return _reached(self._peers.setdefault(peer.nonce, peer), self.layout)

    def leave(self, peer: Peer) -> None:
        """The mapping goes with the last who uses it."""
        self._peers.pop(peer.nonce, None)

    @contextlib.contextmanager
    def using(self, nonce: str) -> Iterator[Reached | None]:
        peer = self._peers.get(nonce)
        yield None if peer is None else _reached(peer, self.layout)

    def programs(self, nbytes: int, lanes: int, sms: int | None) -> int:
        return 1

    def stage(self, x: Any) -> Staged:
        staged = stage(x)
        if staged.finish is not None and self.capturing():
            raise ArgumentError(
                "an array that has to be copied cannot be captured; pass a contiguous array of the host"
            )
        return staged

    def stage_bytes(self, x: Any, *, writes: bool) -> Flat:
        return to_write(x) if writes else to_read(x)

    def duplicate(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def words(self, words: Sequence[int]) -> np.ndarray:
        return np.array(words, np.int64)

    def address(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)

    def empty(self, array: np.ndarray) -> np.ndarray:
        return np.empty_like(array)

    @contextlib.contextmanager
    def capture(self) -> Iterator[InterpretedGraph]:
        """Makes a graph of what this thread queues within, which does not run."""
        graph = self._graph.into = InterpretedGraph(self._extend)
        try:
            yield graph
        finally:
            del self._graph.into

    def capturing(self) -> bool:
        return hasattr(self._graph, "into")

    def follow(self) -> None:
        """Does nothing: what the caller has written to host memory, it has written."""

    def launch(self, launch: KernelLaunch) -> None:
        def run() -> None:
            moves = isinstance(launch.variant, CollectiveVariant)
            second = launch.source if moves else launch.kept
            scalars = (
                self._ctl.ctypes.data,
                self._state.ctypes.data,
                self._view.ctypes.data,
                self.address(launch.array),
                0 if second is None else self.address(second),
                launch.chunks,
                launch.count,
                launch.call,
                launch.template,
                0,  # no deadline: the monitor watches
                *((launch.who, 0 if launch.pieces is None else self.address(launch.pieces)) if moves else ()),
            )
            kernel = collective if moves else allreduce
            kernel[(launch.programs,)](
                *map(_int64, scalars),
                **msgspec.structs.asdict(launch.variant),
                BLOCK=_BLOCK,
                COPIED=_BLOCK,
                THREADS=_THREADS,
            )

        self._queue(run)

    def copy(self, source: np.ndarray, to: np.ndarray) -> None:
        self._queue(lambda: np.copyto(to, source))

    def mark(self) -> None:
        """The caller waits for the op itself."""

    def release(self, mark: object) -> None:
        """Do nothing: a mark is nothing here."""

    def copy_engines(self, me: int, members: Sequence[Reached], epoch: int, stop: Callable[[], bool]) -> Copies:
        before = self.copies_at
        ports = [PeerMemory(member.lanes[COPIES_AT : COPIES_AT + WORDS], member.staging + before) for member in members]
        return Copies(me, ports, epoch, HostMover(), stop, self.copies_chunk)

    def mover(self) -> Mover:
        return HostMover()

    def await_caller(self) -> None:
        """Does nothing: what the caller has written to host memory, it has written."""

    def leave_tasks(self, tasks: Sequence[int]) -> int:
        self._tasks = np.array(tasks, np.int64)
        return int(self._tasks.ctypes.data)

    def check(self) -> None:
        if self._failure is not None:
            raise FtcommError(f"a kernel has failed in the interpreter: {self._failure!r}") from self._failure

    def wait_replays(self, seconds: float) -> bool:
        self.check()
        return self.settle(seconds)

    def settle(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._idle and not self._ops, seconds)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _queue(self, work: Callable[[], None]) -> None:
        if self.capturing():
            self._graph.into.work.append(work)
        else:
            self._extend((work,))

    def _extend(self, work: Sequence[Callable[[], None]]) -> None:
        with self._changed:
            if self._failure is not None:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="ftcomm-interpreter", daemon=True)
                self._thread.start()
            self._ops.extend(work)
            self._changed.notify_all()

    def _serve(self) -> None:
        # Overflow and NaN in somebody's data are no news to the one who sums them.
        with np.errstate(all="ignore"):
            while True:
                with self._changed:
                    self._idle = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._ops or self._closed)
                    if self._closed:
                        return
                    self._idle = False
                    work = self._ops.popleft()
                try:
                    work()
                except BaseException as error:
                    with self._changed:
                        self._failure, self._idle = error, True
                        self._ops.clear()
                        self._changed.notify_all()
                    return
