"""Keeps tensors in host memory up to a limit, and beyond that in a file without a name, which goes with the process.

Tensors are put and taken in the same order, so the file is one run of bytes that begins anew whenever it is empty.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from typing import IO, TYPE_CHECKING

from ftcomm.errors import StateError
from ftcomm.training.state import bytes_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits in bytes: in host memory, and then in the file."""

    memory: int = 4 << 30
    disk: int = 16 << 30

    @classmethod
    def from_env(cls) -> Limits:
        memory = os.environ.get("FTCOMM_CATCHUP_BYTES", cls.memory)
        disk = os.environ.get("FTCOMM_CATCHUP_DISK_BYTES", cls.disk)
        try:
            limits = cls(int(memory), int(disk))
        except ValueError:
            limits = cls(-1, -1)
        if min(limits.memory, limits.disk) < 0:
            raise StateError(
                f"FTCOMM_CATCHUP_BYTES={memory}, FTCOMM_CATCHUP_DISK_BYTES={disk}; expected numbers of bytes from 0."
            )
        return limits


class SpilledTensor:
    """A tensor that was put; `take` gives it back, once."""

    def __init__(self, owner: Spill, tensor: Tensor, at: int | None) -> None:
        self._owner = owner
        self._at = at  # the offset in the file, or None
        self._tensor = tensor if at is None else tensor.new_empty(0, device="cpu")
        self._shape = tensor.shape
        self.nbytes = tensor.nbytes

    def take(self) -> Tensor:
        tensor = self._tensor if self._at is None else self._owner.read(self._at, self._shape, self._tensor.dtype)
        self._owner.taken(self.nbytes, self._at is not None)
        return tensor


class Spill:
    """The store of kept tensors. Not thread-safe. `folder` is for the file; the default is that of temporary files
    (TMPDIR)."""

    def __init__(self, limits: Limits, folder: str | None = None) -> None:
        self._limits = limits
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0  # end of the file
        self.in_memory = 0
        self.on_disk = 0

    def put(self, tensor: Tensor) -> SpilledTensor:
        """Keep a host copy of a plain tensor. Raises `StateError` when neither memory nor disk may take it."""
        nbytes = tensor.nbytes
        if self.in_memory + nbytes <= self._limits.memory:
            self.in_memory += nbytes
            return SpilledTensor(self, tensor.detach().to("cpu", copy=True), None)
        if self.on_disk + nbytes > self._limits.disk:
            raise StateError(
                f"The gradients kept until the state of the other replicas has arrived take "
                f"{(self.in_memory + self.on_disk + nbytes) / 1e9:.2f} GB, above the limits of "
                f"{self._limits.memory / 1e9:.2f} GB of memory and {self._limits.disk / 1e9:.2f} GB of disk. Allow "
                "more with FTCOMM_CATCHUP_BYTES and FTCOMM_CATCHUP_DISK_BYTES, or give the transfer a faster network."
            )
        at = self._write(tensor.detach().to("cpu").contiguous())
        self.on_disk += nbytes
        return SpilledTensor(self, tensor, at)

    def read(self, at: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        assert self._file is not None
        import torch

        tensor = torch.empty(shape, dtype=dtype)
        view = bytes_of(tensor).data
        try:
            self._file.seek(at)
            if self._file.readinto(view) != view.nbytes:  # type: ignore[attr-defined]
                raise OSError("the file is shorter than what was written")
        except OSError as error:
            raise StateError(f"Gradients that were kept on the disk cannot be read: {error}") from error
        return tensor

    def taken(self, nbytes: int, from_disk: bool) -> None:
        if not from_disk:
            self.in_memory -= nbytes
            return
        self.on_disk -= nbytes
        if self.on_disk == 0 and self._file is not None:
            self._end = 0
            self._file.truncate(0)

    def close(self) -> None:
        """Close the file; idempotent. Tensors that were not taken are lost."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, tensor: Tensor) -> int:
        at = self._end
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, prefix="ftcomm-", buffering=0)  # noqa: SIM115
            self._file.seek(at)
            view = bytes_of(tensor).data
            while view.nbytes:
                view = view[self._file.write(view) :]
                self._end = self._file.tell()
        except OSError as error:
            raise StateError(
                f"Gradients that are kept until the state has arrived cannot be written to {tempfile.gettempdir()}: "
                f"{error.strerror}. Set TMPDIR to a disk with room, or allow more memory with FTCOMM_CATCHUP_BYTES."
            ) from error
        return at
