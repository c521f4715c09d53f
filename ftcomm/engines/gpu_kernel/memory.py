"""The memory of a rank on a GPU, and how other ranks of its host reach it.

    ctl            pinned host memory: this rank's host and kernels
    state, view    device memory: this rank's kernels
    lanes' words   a memfd, registered as pinned memory: this rank's host and kernels write the copy of its flags there,
                   which hosts read
    staging,       device memory, opened by others by CUDA IPC; or behind the words in the memfd, where two GPUs of the
    flags          host cannot read each other's memory

Other than a segment, the memfd is not sealed against writing: registering memory for a GPU takes a writable mapping (a
B300 with driver 610 refuses read-only ones, `HostRegisterReadOnlySupported` is 0), as does CUDA IPC. So here it is our
kernels alone that keep to the rule that every word and every byte of staging has one writer, its owner. Its size is
sealed: whoever cut it off would end its owner by SIGBUS.

Memory that a rank had exported has to stay readable for those who have it open, for a moment, when the rank dies: their
kernels may be reading it. The driver keeps it for them; the documentation of CUDA IPC does not promise that, and calls
freeing such memory undefined. A memfd is certain to stay: FTCOMM_STAGING=host does not depend on it.

How another rank gets there stands in the words of the owner's segment, from EXPORT_AT on (`Export`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from cupy.cuda import runtime

from ftcomm.control.fork import keep_from_children, keep_memory_from_children
from ftcomm.engines.gpu import driver
from ftcomm.engines.gpu.pinned import PORTABLE_MAPPED
from ftcomm.engines.gpu_kernel.layout import EXPORT_WORDS
from ftcomm.errors import TransportError

_FORMAT = "<16sQQQQQQ16s64s"
_PEER_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled


class Export(NamedTuple):
    """Tells how the memory of a rank is opened: by process `pid` alone at `pointer`, by others by `handle`."""

    nonce: bytes  # 16, of the segment: the memfd begins with the same
    fd: int  # of the memfd
    size: int  # of it
    staging_at: int  # offset of the staging in the memfd, 0 if it is in device memory
    staging: int  # bytes
    pointer: int  # of the staging in device memory
    device: int  # number of the GPU in that process
    uuid: bytes  # 16, of the GPU
    handle: bytes  # 64, cudaIpcMemHandle_t

    def pack(self) -> tuple[int, ...]:
        """EXPORT_WORDS words."""
        packed = struct.pack(_FORMAT, *self).ljust(EXPORT_WORDS * 8, b"\0")
        return struct.unpack(f"<{EXPORT_WORDS}Q", packed)

    @classmethod
    def unpack(cls, words: Sequence[int]) -> Export:
        packed = struct.pack(f"<{EXPORT_WORDS}Q", *words)
        return cls(*struct.unpack(_FORMAT, packed[: struct.calcsize(_FORMAT)]))


def staging_place(setting: str, peers: Sequence[Sequence[bool]]) -> tuple[str, str | None]:
    """("device" or "host", what to say about it in the log). `peers[i][j]`: can GPU i read the memory of GPU j?

    Known only of the GPUs that this process sees; `FTCOMM_STAGING=host` is for those who see one each.
    """
    if setting != "auto":
        return setting, None
    cut = [(i, j) for i, row in enumerate(peers) for j, can in enumerate(row) if i != j and not can]
    if not cut:
        return "device", None
    i, j = cut[0]
    return "host", (
        f"GPU {i} cannot read the memory of GPU {j} (no peer access): staging in pinned host memory, which is slower. "
        "See nvidia-smi topo -p2p r"
    )


def visible_peers() -> list[list[bool]]:
    gpus = range(runtime.getDeviceCount())
    return [[i == j or bool(runtime.deviceCanAccessPeer(i, j)) for j in gpus] for i in gpus]


class Shared:
    """A memfd of `size` bytes mapped shared and registered, this rank's own (`create`) or that of a peer (`open`).

    It stays mapped until `close`, even if it is not held any more: the driver goes on counting an address as
    registered, and refuses what is mapped there next.
    """

    _registered: ClassVar[set[Shared]] = set()

    def __init__(self, memory: mmap.mmap, fd: int) -> None:
        self.fd = fd  # -1 of a peer
        self.size = len(memory)
        self.words = memoryview(memory).cast("Q")
        self._bytes = np.frombuffer(memory, np.uint8)
        self._host: int = self._bytes.ctypes.data
        keep_memory_from_children(memory, self._host)
        keep_from_children(self, lambda shared: (shared.fd,))
        runtime.hostRegister(self._host, self.size, PORTABLE_MAPPED)
        self._registered.add(self)
        self.address = driver.mapped_address(self._host)

    @classmethod
    def create(cls, size: int, nonce: bytes) -> Shared:
        fd = os.memfd_create("ftcomm-lanes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = mmap.mmap(fd, size)
            memory[:16] = nonce
            return cls(memory, fd)
        except (OSError, RuntimeError) as error:
            os.close(fd)
            raise TransportError(
                f"cannot reserve {size >> 10} KB of pinned host memory: {error}. Raise the limit of locked memory "
                "(ulimit -l) and of the container's memory."
            ) from error

    @classmethod
    def open(cls, pid: int, export: Export) -> Shared:
        path = f"/proc/{pid}/fd/{export.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if os.fstat(fd).st_size != export.size:
                    raise TransportError(f"{path} does not hold the words of that rank: it has another size")
                memory = mmap.mmap(fd, export.size)
            finally:
                os.close(fd)
            if memory[:16] != export.nonce:
                raise TransportError(f"{path} holds the words of another rank")
            return cls(memory, -1)
        except (OSError, ValueError, RuntimeError) as error:
            raise TransportError(f"cannot map and register {path}: {error}") from error

    def close(self) -> None:
        """No kernel reads it any more. May wait for all that runs on the GPU."""
        runtime.hostUnregister(self._host)
        self._registered.discard(self)

    def stop(self) -> None:
        """Let no process open it any more; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Staging(NamedTuple):
    """Tells where kernels of this process find the staging of a peer."""

    address: int
    opened: bool  # by CUDA IPC


def open_staging(pid: int, export: Export, shared: Shared, device: int) -> Staging:
    """Raises `TransportError`. With `device` as the current GPU."""
    try:
        if export.staging_at:
            return Staging(shared.address + export.staging_at, False)
        if pid == os.getpid():  # a handle cannot be opened where it was made
            _enable(device, export.device)
            return Staging(export.pointer, False)
        return Staging(driver.open_ipc(export.handle), True)
    except RuntimeError as error:
        raise TransportError(
            f"the GPU memory of process {pid} cannot be opened here: {error}. If there is no peer access between the "
            "two GPUs (nvidia-smi topo -p2p r), or CUDA IPC is barred by the container (it takes one IPC namespace), "
            "set FTCOMM_STAGING=host on all ranks."
        ) from error


def _enable(device: int, peer: int) -> None:
    if device == peer:
        return
    try:
        runtime.deviceEnablePeerAccess(peer)
    except runtime.CUDARuntimeError as error:
        if error.status != _PEER_ENABLED:
            raise


def uuid_of(properties: Any) -> bytes:
    """Returns the 16 bytes that name a GPU, from `torch.cuda.get_device_properties`."""
    return bytes.fromhex(str(properties.uuid).replace("-", ""))
