"""An NVIDIA GPU as a `Device`: streams and launches by PyTorch and Triton, the rest by CuPy's view of the CUDA runtime.

What may block what. A launch keeps the op stream, and the caller's stream with it, until the op has returned. After a
loss it goes on when this rank's host has written what is left of it, and for that the host calls nothing of the driver.
But a rank may have to launch while the op of another one in its process waits for it. So nothing that is launched may
wait for the GPU to be idle:

- All streams are our own, made by the runtime and not taken from PyTorch's pool, whose 32 streams go round, and of the
  highest priority. Streams that share a hardware queue run one behind the other; see `probe.connections`.
- A kernel that was never launched is loaded at its first launch, and loading may wait for all that runs ("Lazy Loading"
  in the CUDA programming guide). So before its first launch each variant is launched once on words that tell it to end
  at once (`_load`).
- Host and device exchange words in pinned memory, by loads and stores alone.
- Freeing, unregistering and closing IPC handles may wait for all that runs. It is put off until nothing of ours does,
  and done by a thread that does nothing else: what begins meanwhile may need the monitor and the control thread to end.
- What those two threads call lets the interpreter lock go (`driver`), so that a call that has to wait holds up nobody.
- While a graph is captured anywhere in the process such calls are errors and would break the capture, unless the thread
  has said that it knows better; ours has (`relaxed`).

What is captured goes through a stream of its own, which joins the capture of the caller's stream, so that the op stream
is never part of a graph. A replay waits for the ops that were called before it, whatever stream those were called on;
the other way round it is the caller's streams that say what follows what. Nobody says when a replay begins: from the
first capture on, nothing that may wait for the GPU is done but in `wait_replays` and at the end.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from cupy.cuda import runtime
from triton.errors import TritonError

from ftcomm.arrays import Staged
from ftcomm.arrays.flat import Flat
from ftcomm.engines.gpu.driver import (
    Context,
    close_ipc,
    destroy_stream,
    event_ended,
    make_stream,
    stream_ended,
    until,
)
from ftcomm.engines.gpu.pinned import Pinned
from ftcomm.engines.gpu_kernel import copies
from ftcomm.engines.gpu_kernel.arrays import stage_bytes, stage_device
from ftcomm.engines.gpu_kernel.blocks import programs, room
from ftcomm.engines.gpu_kernel.device import KernelLaunch, Reached
from ftcomm.engines.gpu_kernel.layout import COPIES_AT, CUDA, EXPORT_AT, EXPORT_WORDS, flag_bytes
from ftcomm.engines.gpu_kernel.loaded import LoadedKernel
from ftcomm.engines.gpu_kernel.memory import Export, Shared, open_staging, staging_place, uuid_of, visible_peers
from ftcomm.errors import ArgumentError, FtcommError, TransportError
from ftcomm.kernels.device import words as w
from ftcomm.kernels.device.allreduce import allreduce, collective
from ftcomm.kernels.device.variant import (
    COLLECTIVE_SCALARS,
    SCALARS,
    CollectiveVariant,
    Variant,
    compiled_for,
    small,
)
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import Segment

log = logging.getLogger("ftcomm")

_STAGING = 2 * CUDA.lanes * CUDA.slots * CUDA.chunk  # of the all-reduce; that of the copies lies behind it
_FLAGS_AT = _STAGING + copies.STAGING  # then the flags
_TABLE = 64 << 10  # tasks for which there is room at first: an op of 16 GB
_HIGHEST = -100  # priority; the runtime takes the nearest there is
_NO_DEADLINE = 0  # the host ends what lasts too long, by the word OPEN
_UNIT = 8  # bytes of a word
_COMPILED: dict[tuple[int, Variant | CollectiveVariant, bool], Any] = {}  # by GPU; of the process, as in Triton
_MASK = (1 << 64) - 1  # words are unsigned to the host


class _Peer(NamedTuple):
    reached: Reached
    export: Export
    shared: Shared
    opened: bool  # its staging, by CUDA IPC


class _Words:
    """The words through which a rank and its kernels speak (ctl, state and view), or a set on which a kernel ends at
    once."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        size = (w.STATE_WORDS + w.VIEW_WORDS) * _UNIT
        self.pinned = Pinned(w.CTL_WORDS * _UNIT)
        self.ctl = self.pinned.words
        self.state = runtime.malloc(size)
        self.view = self.state + w.STATE_WORDS * _UNIT
        runtime.memsetAsync(self.state, 0, size, stream.cuda_stream)
        stream.synchronize()

    @property
    def addresses(self) -> tuple[int, int, int]:
        return self.pinned.address, self.state, self.view


class _Scratch(_Words):
    """Serves launches whose only purpose is to load the kernel."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__(stream)
        self.ctl[w.OPEN] = w.CLOSED & _MASK


class CudaDevice:
    """See `ftcomm.engines.gpu_kernel.device.Device`. On the current GPU of PyTorch, which stays that of this rank.

    `staging`: "device", "host", or "auto": on the device unless GPUs of this process cannot read each other's memory.
    Raises `TransportError` if there is not enough memory. Call `ftcomm.engines.gpu.probe.require_cuda` first.
    """

    layout = CUDA
    blocking = False
    memory = "cuda"
    copies_at = _STAGING
    copies_chunk = copies.CHUNK

    def __init__(self, segment: Segment, *, staging: str = "auto") -> None:
        self._index = torch.cuda.current_device()
        self._device = torch.device("cuda", self._index)
        properties = torch.cuda.get_device_properties(self._index)
        self._multiprocessors: int = properties.multi_processor_count
        self._uuid = uuid_of(properties)
        place, reason = staging_place(staging, visible_peers())
        if reason:
            log.warning("%s", reason)
        self._context = Context(self._index)
        with self._on():
            self._op = self._stream()
            self._lanes, self._export = self._allocate(segment, place)
            self._words, self._scratch = _Words(self._op), _Scratch(self._op)
            self._table = Pinned(_TABLE * _UNIT)
        pointer = self._export.pointer
        self.own = Reached(self._lanes.address, pointer, pointer + _FLAGS_AT, self._lanes.words)
        self.ctl = self._words.ctl
        self._called = torch.cuda.Event(external=True)  # behind the last op that was called, once any was captured
        self._before = torch.cuda.Event()  # what the caller had queued before an op
        self._captures: torch.cuda.Stream | None = None  # from the first capture on
        self._engines: _CopyEngines | None = None
        self._lock = threading.Lock()  # guards the rest; never held across a wait
        self._loaded: dict[tuple[Variant | CollectiveVariant, bool], LoadedKernel] = {}
        self._peers: dict[str, _Peer] = {}  # by the nonce of the segment
        self._count_programs()
        self._leaving: list[_Peer] = []
        self._uses = 0  # of memory of peers, see `using`
        self._closing: threading.Thread | None = None

    def _allocate(self, segment: Segment, place: str) -> tuple[Shared, Export]:
        nonce = bytes.fromhex(segment.nonce)
        size = _FLAGS_AT + flag_bytes(CUDA.lanes)
        here = CUDA.staging_at
        lanes = Shared.create(here + size * (place == "host"), nonce)
        handle = bytes(64)
        if place == "host":
            pointer = lanes.address + here
        else:
            try:
                pointer = runtime.malloc(size)
                runtime.memsetAsync(pointer + _FLAGS_AT, 0, size - _FLAGS_AT, self._op.cuda_stream)
                self._op.synchronize()
                handle = runtime.ipcGetMemHandle(pointer)
            except runtime.CUDARuntimeError as error:
                lanes.close()
                lanes.stop()
                raise TransportError(
                    f"cannot set aside {size >> 20} MB of GPU memory that other processes may open: {error}. Free GPU "
                    "memory, or set FTCOMM_STAGING=host on all ranks."
                ) from error
        at = here if place == "host" else 0
        export = Export(nonce, lanes.fd, lanes.size, at, size, pointer, self._index, self._uuid, handle)
        for i, word in enumerate(export.pack()):
            segment.words[EXPORT_AT + i] = word
        return lanes, export

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(make_stream(_HIGHEST), device=self._device)

    @contextlib.contextmanager
    def _brief_stream(self) -> Iterator[torch.cuda.Stream]:
        """One that is there for as long as it is needed: hardware queues are few. What it was given is done at the
        end."""
        stream = self._stream()
        try:
            yield stream
            stream.synchronize()
        finally:
            destroy_stream(stream.cuda_stream)

    @contextlib.contextmanager
    def _on(self) -> Iterator[None]:
        """This rank's GPU is the current one of this thread, for PyTorch and for CuPy."""
        with torch.cuda.device(self._index), self._context.current():
            yield

    # ---- peers --------------------------------------------------------------------------------------------------

    def reach(self, peer: Peer) -> Reached:
        with self._lock:
            known = self._peers.get(peer.nonce)
        if known is not None:
            return known.reached
        export = Export.unpack(peer.words[EXPORT_AT : EXPORT_AT + EXPORT_WORDS])
        if export.nonce.hex() != peer.nonce:
            raise TransportError(f"replica {peer.replica} has not said where its GPU memory is")
        with self._context.current():
            shared = Shared.open(peer.pid, export)
            try:
                staging, opened = open_staging(peer.pid, export, shared, self._index)
            except TransportError:
                shared.close()
                raise
        reached = Reached(shared.address, staging, staging + _FLAGS_AT, shared.words.toreadonly())
        mine = _Peer(reached, export, shared, opened)
        with self._lock:
            first = self._peers.setdefault(peer.nonce, mine)
            if first is not mine:
                self._leaving.append(mine)  # another thread was faster
            self._count_programs()
        return first.reached

    def leave(self, peer: Peer) -> None:
        with self._lock:
            gone = self._peers.pop(peer.nonce, None)
            if gone is not None:
                self._leaving.append(gone)  # the caller is the control thread, which must not wait for the driver
                self._count_programs()

    @contextlib.contextmanager
    def using(self, nonce: str) -> Iterator[Reached | None]:
        with self._lock:
            peer = self._peers.get(nonce)
            self._uses += 1
        try:
            yield None if peer is None else peer.reached
        finally:
            with self._lock:
                self._uses -= 1

    def _sweep(self) -> None:
        """Close what was left, if nothing of ours runs, in a thread of its own. With a context that is current."""
        with self._lock:
            left, busy = list(self._leaving), self._uses > 0
        if not left or busy or (self._closing is not None and self._closing.is_alive()) or not self._idle():
            return  # what begins from here on is in a view without them
        with self._lock:
            self._leaving = [peer for peer in self._leaving if all(peer is not one for one in left)]
        self._closing = threading.Thread(target=self._shut, args=(left,), name="ftcomm-unmap", daemon=True)
        self._closing.start()

    def _shut(self, peers: Sequence[_Peer]) -> None:
        try:
            with self._context.current():
                for peer in peers:
                    if peer.opened:
                        close_ipc(peer.reached.staging)
                    peer.shared.close()
        except RuntimeError as error:  # `check` finds out, if the context is lost
            log.warning("memory of a rank that has left cannot be closed: %s", error)

    def _idle(self) -> bool:
        """Whether nothing of ours runs."""
        return stream_ended(self._op.cuda_stream) and self.ctl[w.BEGUN] == self.ctl[w.FINISHED]

    def _count_programs(self) -> None:
        """Count how many programs fit beside those of the peers."""
        self._sharing = 1 + sum(peer.export.uuid == self._uuid for peer in self._peers.values())
        self._fit = room(self._multiprocessors, self._sharing)

    def programs(self, nbytes: int, lanes: int, sms: int | None) -> int:
        if self._fit < 1:
            raise FtcommError(
                f"{self._sharing} ranks share a GPU of {self._multiprocessors} multiprocessors: too many to run at "
                "once. Use fewer ranks a GPU."
            )
        return programs(nbytes, lanes, sms, self._fit)

    # ---- arrays -------------------------------------------------------------------------------------------------

    def stage(self, x: Any) -> Staged:
        if self.capturing() and not (isinstance(x, torch.Tensor) and x.is_cuda):
            raise ArgumentError(
                f"{type(x).__name__} cannot be reduced inside a CUDA graph, as a replay would not copy it again; pass "
                "a torch tensor on the GPU, or reduce it outside."
            )
        return stage_device(x, self._device)

    def stage_bytes(self, x: Any, *, writes: bool) -> Flat:
        return stage_bytes(x, self._device, writes=writes)

    def duplicate(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()

    def words(self, words: Sequence[int]) -> torch.Tensor:
        return torch.tensor(words, dtype=torch.int64, device=self._device)

    def address(self, array: torch.Tensor) -> int:
        address: int = array.data_ptr()
        return address

    def empty(self, array: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(array)

    # ---- streams and launches -----------------------------------------------------------------------------------

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def follow(self) -> None:
        if not self.capturing():
            self._before.record(torch.cuda.current_stream(self._index))
            self._op.wait_event(self._before)
            return
        with self._on():
            if self._captures is None:
                self._captures = self._stream()
                self._say_called()
            caller = torch.cuda.current_stream(self._index)
            with torch.cuda.stream(self._captures):
                first = not torch.cuda.is_current_stream_capturing()  # of ops in this graph; the others stand behind it
                self._captures.wait_stream(caller)
                if first:
                    self._called.wait(self._captures)

    def _say_called(self) -> None:
        """An external event behaves as one for a current stream that is captured, and as any other else."""
        with torch.cuda.stream(self._op):
            self._called.record(self._op)

    def _order(self) -> torch.cuda.Stream:
        """The stream for what this thread queues."""
        return self._captures if self._captures is not None and self.capturing() else self._op

    def launch(self, launch: KernelLaunch) -> None:
        stream = self._order()
        array, variant, pieces = launch.array, launch.variant, launch.pieces
        moves = isinstance(variant, CollectiveVariant)
        second = launch.source if moves else launch.kept
        try:
            if launch.chunks > len(self._table.words):
                with self._on():
                    self._table = Pinned(launch.chunks * _UNIT)
            short = small(array.nbytes if second is None else max(array.nbytes, second.nbytes))
            kernel = self._loaded.get((variant, short)) or self._load(variant, short)
            scalars: tuple[int, ...] = (
                array.data_ptr(),
                0 if second is None else second.data_ptr(),
                *(launch.chunks, launch.count, launch.call, launch.template, _NO_DEADLINE),
            )
            array.record_stream(stream)
            if moves:
                scalars = (*scalars, launch.who, 0 if pieces is None else pieces.data_ptr())
                for other in (second, pieces):
                    if other is not None:
                        other.record_stream(stream)
            kernel.launch(launch.programs, stream.cuda_stream, scalars)
            if self._captures is not None and stream is self._op:
                with self._on():
                    self._say_called()
        except (RuntimeError, TritonError) as error:
            raise FtcommError(f"a kernel cannot be launched: {error}") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise FtcommError(
                f"Triton cannot build what launches a kernel: {error}. It needs a C compiler and the "
                "headers of this Python (Debian, Ubuntu: apt install gcc python3-dev), or the path of one in CC."
            ) from error

    def _load(self, variant: Variant | CollectiveVariant, short: bool) -> LoadedKernel:
        """Have the kernel loaded. The first in a process launches it once where it ends at once, and waits for that."""
        constants = compiled_for(variant, short)
        moves = isinstance(variant, CollectiveVariant)
        function, names = (collective, COLLECTIVE_SCALARS) if moves else (allreduce, SCALARS)
        words = self._words.addresses
        scalars = len(names) - len(words)
        compiled = _COMPILED.get((self._index, variant, short))
        if compiled is None:
            with self._on(), self._brief_stream() as stream, torch.cuda.stream(stream):
                compiled = function[(1,)](*self._scratch.addresses, *[0] * scalars, **constants)
            _COMPILED[self._index, variant, short] = compiled
        values = tuple(constants[name] for name in function.arg_names[len(names) :])
        kernel = self._loaded[variant, short] = LoadedKernel(self._context.pushed, compiled, words, scalars, values)
        return kernel

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        stream = self._order()
        with self._on(), torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            to.record_stream(stream)
            source.record_stream(stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._order())
        return event

    def release(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._index).wait_event(mark)

    def copy_engines(self, me: int, members: Sequence[Reached], epoch: int, stop: Callable[[], bool]) -> copies.Copies:
        """Returns the copies between members by copy engines. A call copies what the caller had queued on its current
        stream before, and returns when all is there."""
        ports = [
            copies.PeerMemory(member.lanes[COPIES_AT : COPIES_AT + copies.WORDS], member.staging + _STAGING)
            for member in members
        ]
        if self._engines is None:
            self._engines = _CopyEngines(self, follows=True)
        return copies.Copies(me, ports, epoch, self._engines, stop)

    def mover(self) -> copies.Mover:
        return _CopyEngines(self, follows=False)

    def await_caller(self) -> None:
        torch.cuda.current_stream(self._index).synchronize()

    # ---- the host's side ----------------------------------------------------------------------------------------

    def leave_tasks(self, tasks: Sequence[int]) -> int:
        table = self._table  # there has been room for all tasks of the op since it was launched
        for i, task in enumerate(tasks):
            table.words[i] = task
        return int(table.address)

    def check(self) -> None:
        try:
            with self._context.current():
                stream_ended(self._op.cuda_stream)
                if self._captures is None:
                    self._sweep()
        except RuntimeError as error:  # of any kernel of this process; the context is lost
            raise _unusable(error) from error

    def wait_replays(self, seconds: float) -> bool:
        try:
            with self._on():
                replayed = torch.cuda.Event()
                replayed.record(torch.cuda.current_stream(self._index))
                if not until(lambda: event_ended(replayed.cuda_event), seconds):
                    return False
                self._sweep()
        except RuntimeError as error:
            raise _unusable(error) from error
        return True

    def settle(self, seconds: float) -> bool:
        try:
            with self._context.current():
                if not until(self._idle, seconds):
                    return False
                self._sweep()
        except RuntimeError as error:  # `check` says so to whoever can do something about it
            log.warning("the GPU cannot be used any more: %s", error)
            return False
        return True

    def close(self) -> None:
        self._lanes.stop()


def _unusable(error: RuntimeError) -> FtcommError:
    return FtcommError(f"the GPU cannot be used any more: {error}; restart this process")


class _CopyEngines:
    """A `Mover` on a stream of its own. Copies between GPUs, and between a GPU and pinned memory, are made by the copy
    engines; within a GPU (into the sender's slot, and between ranks that share it) the driver may choose otherwise.

    `follows`: a copy waits for what the calling thread has put on its current stream. A message need not: what is
    copied was there when it was begun.
    """

    def __init__(self, device: CudaDevice, *, follows: bool) -> None:
        self._device = device
        self._follows = follows
        with device._on():
            self._stream = device._stream()

    def copy(self, to: int, source: int, nbytes: int) -> None:
        with self._device._on():
            if self._follows:
                self._stream.wait_stream(torch.cuda.current_stream())
            runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDefault, self._stream.cuda_stream)

    def wait(self) -> None:
        with self._device._on():
            done = torch.cuda.Event(blocking=True)  # lets other threads run meanwhile, unlike a stream's own wait
            done.record(self._stream)
            done.synchronize()
