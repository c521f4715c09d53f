"""A copy of the training state as it is at a step boundary, made while the next step already computes.

Parameters, and the state of an optimizer itself, change only when the optimizer steps. So a thread copies those during
forward and backward, and `finish`, before the step, waits for the rest; everything else is copied at once. If a script
changes such a tensor by other means, torch's version counter of the tensor shows it: the copy is then spoiled and never
served.

    boundary            forward, backward                     optimizer.step()
    |  plain values,   |  parameters, moments ... by a       |  finish: wait for the rest
    |  buffers         |  thread (CUDA: on a side stream)    |
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ftcomm.arrays import is_torch
from ftcomm.arrays.dtensor import local
from ftcomm.control.failed_dials import start
from ftcomm.training.catchup_protocol import BlockStream
from ftcomm.training.kinds import is_lbfgs, is_optimizer
from ftcomm.training.state import FlatState, Stateful, bytes_of, flatten, host_copy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger("ftcomm")

AT_ONCE = 1 << 16  # bytes; smaller tensors are copied at once
PIECE = 4 << 20  # bytes copied in one go
_NOT_YET = np.empty(0, np.uint8)


class Snapshot:
    """The state entering the step after boundary `step`, in host memory. With `overlap` it copies later what can
    wait."""

    def __init__(self, step: int, state: Mapping[str, Stateful], overlap: bool = False) -> None:
        started = time.monotonic()
        self.step = step
        live = flatten(state)
        waits = _only_optimizers_change(state) if overlap else frozenset()
        later = {
            place: tensor
            for place, tensor in enumerate(live.tensors)
            if not isinstance(tensor, np.ndarray)
            and (tensor.nbytes >= AT_ONCE and tensor.data_ptr() in waits and tensor.is_contiguous())
        }
        copies = [_NOT_YET if i in later else host_copy(t) for i, t in enumerate(live.tensors)]
        self.flat = FlatState(live.skeleton, copies)
        self.nbytes = live.nbytes
        self.spoiled = False  # known once the copy is complete
        self._stream: BlockStream | None = None
        self._ready = threading.Event()
        if later:
            versions = {place: _changes(tensor) for place, tensor in later.items()}
            written = {tensor.device: _mark(tensor.device) for tensor in later.values() if tensor.is_cuda}
            what = later, versions, written
            lacks = start(threading.Thread(target=self._copy, args=what, name="ftcomm-snapshot", daemon=True))
            if lacks:  # the step loop waits for the copy
                log.warning("the state is copied at once: %s", lacks)
                self._copy(*what)
        else:
            self._ready.set()
        self.seconds = time.monotonic() - started  # s that the step loop stood still for it, with `finish`

    def finish(self) -> float:
        """Block until the live state may change; returns for how many seconds. Idempotent."""
        if self._ready.is_set():
            return 0.0
        started = time.monotonic()
        self._ready.wait()
        seconds = time.monotonic() - started
        self.seconds += seconds
        return seconds

    def wait(self, seconds: float) -> bool:
        """Wait for the copy, for at most `seconds`; returns whether it is complete. Any thread."""
        return self._ready.wait(seconds)

    def stream(self) -> BlockStream | None:
        """The bytes of the copy, once complete; None if the state was changed meanwhile. Any thread."""
        assert self._ready.is_set()
        if self._stream is None and not self.spoiled:
            self._stream = BlockStream(self.flat)
        return self._stream

    def _copy(
        self,
        left: dict[int, Tensor],
        versions: dict[int, int],
        written: dict[torch.device, tuple[torch.cuda.Event, torch.cuda.Stream]],
    ) -> None:
        import torch

        self.spoiled = True  # if anything ends this thread early
        try:
            for place, tensor in left.items():
                if tensor.is_cuda:
                    event, side = written[tensor.device]
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    with torch.cuda.stream(side):
                        side.wait_event(event)
                        copy.copy_(tensor, non_blocking=True)
                else:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
                    _copy_bytes(copy, tensor)
                self.flat.tensors[place] = copy
            for _, side in written.values():
                side.synchronize()
            self.spoiled = any(_changes(tensor) != versions[place] for place, tensor in left.items())
        finally:
            self._ready.set()


def _changes(tensor: Tensor) -> int:
    """Returns how often torch has changed a tensor."""
    return int(tensor._version)


def _copy_bytes(to: Tensor, of: Tensor) -> None:
    """Copy between contiguous tensors on the host. NumPy does it: it releases the interpreter lock, and starts no
    threads that would compete with forward and backward. It copies in pieces, so that they share a core."""
    target, source = bytes_of(to), bytes_of(of)
    for at in range(0, len(target), PIECE):
        np.copyto(target[at : at + PIECE], source[at : at + PIECE])


def _mark(device: torch.device) -> tuple[torch.cuda.Event, torch.cuda.Stream]:
    """Returns an event after the last write to the state on the current stream, and a stream for the copy."""
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event, torch.cuda.Stream(device)


def _only_optimizers_change(state: Mapping[str, Stateful]) -> frozenset[int]:
    """Returns the addresses of the tensors that change only when the optimizers in `state` step."""
    found: set[int] = set()
    for optimizer in state.values():
        if not is_optimizer(optimizer) or is_lbfgs(optimizer):
            continue
        params = [p for group in optimizer.param_groups for p in group["params"]]
        moments = [value for of in optimizer.state.values() for value in of.values() if is_torch(value)]
        found |= {local(tensor).data_ptr() for tensor in (*params, *moments)}
    return frozenset(found)
