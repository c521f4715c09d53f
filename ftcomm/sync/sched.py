"""Short time slices, for threads that sleep nearly always and have to run as soon as they wake.

With more ranks than cores a thread that wakes up waits behind those that compute: 3 ms each with the slice of time that
Linux gives, and the news of one death passes through three or four threads until the coordinator has it. A thread that
asks for a short slice is due sooner and gets no more time by that, so no privilege is needed (Linux 6.12; earlier
kernels do not look at the number).
"""

from __future__ import annotations

import ctypes
import os
import platform

SLICE = 100_000  # nanoseconds; the least that Linux grants

_RESET_ON_FORK = 1  # what this thread starts has the usual slice
_SYS_SCHED_SETATTR = {"x86_64": 314, "AMD64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}


class _Attributes(ctypes.Structure):
    """struct sched_attr, its first version"""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def request_short_slice() -> bool:
    """Ask for the calling thread, not for those that it starts. Returns False if the kernel cannot, or if the user has
    chosen another policy for this thread. Does not block."""
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    asked = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.byref(asked), 0) == 0)


def cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))
