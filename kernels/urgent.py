"""A thread that sleeps nearly always asks to be run as soon as it wakes.

More ranks than cores is a normal test, and then a thread that wakes up waits for its turn behind those that compute:
3 ms each with the slice of time that Linux gives, and one death has to pass through three or four threads until the
coordinator knows of it. Who asks for a short slice is due sooner, and gets no more time by that, so no privilege is
needed for it (Linux 6.12; earlier kernels do not look at the number).
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


def urgent() -> bool:
    """Ask for the calling thread, not for those that it starts. False if the kernel knows no such thing, or if the user
    has chosen another policy for this thread. Does not block."""
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    asked = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.byref(asked), 0) == 0)
