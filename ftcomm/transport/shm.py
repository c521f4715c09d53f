"""A peer on the same host: its segment is opened through /proc and mapped read-only.

Members read its staging, and not the callers' arrays. process_vm_readv would read those, at 3.5 GB/s a rank (two cores
of a Xeon of 2.5 GHz): 64 MB of two ranks would take at least 31 ms, where the staging takes 25. It also needs a
permission that containers often lack.
"""

from __future__ import annotations

import mmap
import os

from ftcomm.errors import TransportError
from ftcomm.sync.doorbell import RemoteDoorbell
from ftcomm.sync.futex import DOORBELL
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import ASLEEP, HEADER, HOST, Layout, wrong


class ShmPeer(Peer):
    """Maps the segment of `replica`. It stays valid when that process dies, and serves in any number of epochs.

    Raises `TransportError` if process `pid` does not hold, at descriptor `fd`, the segment with this nonce.
    """

    transport = "shm"
    shares_memory = True

    def __init__(self, replica: int, pid: int, fd: int, nonce: str, layout: Layout = HOST) -> None:
        super().__init__(replica)
        self._lay_out(layout)
        self.pid, self.nonce = pid, nonce
        path = f"/proc/{pid}/fd/{fd}"
        try:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                size = os.fstat(opened).st_size
                # Look before mapping, since its first words say best why its size differs.
                words = memoryview(os.pread(opened, HEADER, 0).ljust(HEADER, b"\0")).cast("Q")
                reason = wrong(words, nonce, layout)
                if reason is None and size != layout.size:
                    reason = f"it has {size} bytes, not {layout.size}"
                if reason:
                    raise TransportError(f"{path} is not the segment of replica {replica}: {reason}")
                memory = mmap.mmap(opened, layout.size, prot=mmap.PROT_READ)
            finally:
                os.close(opened)
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot open the segment of replica {replica} at {path}: {error}") from error
        self._map(memory)
        self._doorbell: RemoteDoorbell | None = None

    def wake(self) -> None:
        if self._doorbell is None:
            self._doorbell = RemoteDoorbell(self.pid, self.words[ASLEEP + DOORBELL], self.words[ASLEEP + DOORBELL + 1])
        self._doorbell.ring()
