"""A peer on the same host: its segment, opened through /proc and mapped read-only."""

from __future__ import annotations

import mmap
import os

from ftcomm.errors import TransportError
from ftcomm.transport.segment import SIZE, Peer, wrong


class ShmPeer(Peer):
    """Raises `TransportError` if process `pid` does not hold, at descriptor `fd`, the segment with this nonce.

    Stays valid when that process dies. May serve in any number of epochs.
    """

    def __init__(self, replica: int, pid: int, fd: int, nonce: str) -> None:
        super().__init__(replica, "shm")
        path = f"/proc/{pid}/fd/{fd}"
        try:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if os.fstat(opened).st_size != SIZE:
                    raise TransportError(f"{path} is not the segment of replica {replica}: it has another size")
                memory = mmap.mmap(opened, SIZE, prot=mmap.PROT_READ)
            finally:
                os.close(opened)
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot open the segment of replica {replica} at {path}: {error}") from error
        self._map(memory)
        reason = wrong(self.words, nonce)
        if reason:
            raise TransportError(f"{path} is not the segment of replica {replica}: {reason}")
