"""The first moments of a rank's process: it ties its life to the launcher's, then becomes the script.

    python -I -S exec_stub.py LAUNCHER_PID PROGRAM ARGS...

It uses `exec` and not `runpy`: the script then is a plain `python -u SCRIPT`, with its own `__main__`, `sys.argv`,
`sys.path` and tracebacks, and the requests to the kernel here outlive the exec. It is started by its path with -I -S,
so that nothing in the user's directory affects these imports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(argv: list[str]) -> None:
    launcher, command = int(argv[1]), argv[2:]
    # The kernel sends this when the *thread* that started us ends: the launcher starts ranks from its event loop.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:  # the launcher died before that request
        os.kill(os.getpid(), signal.SIGKILL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv)
