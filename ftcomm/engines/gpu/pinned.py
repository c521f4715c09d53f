"""Page-locked memory, which the host and all GPUs reach."""

from __future__ import annotations

import ctypes

from cupy.cuda import runtime

PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped; CuPy has no names for them


class Pinned:
    """Page-locked host memory at one address for the host and for all GPUs; never freed before the process ends.

    Freeing it waits for all that runs on the GPU, which may be waiting for us.
    """

    def __init__(self, nbytes: int) -> None:
        self.address = runtime.hostAlloc(nbytes, runtime.hostAllocMapped | runtime.hostAllocPortable)
        ctypes.memset(self.address, 0, nbytes)
        self.buffer = memoryview((ctypes.c_uint8 * nbytes).from_address(self.address)).cast("B")
        self.words = self.buffer[: nbytes // 8 * 8].cast("Q")
