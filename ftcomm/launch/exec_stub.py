"""First moments of a rank's process: tie its life to the launcher's, then become the script.

    python -I -S exec_stub.py LAUNCHER_PID PROGRAM ARGS...

`exec` and not `runpy`: the script then is a plain `python -u SCRIPT`, with its own `__main__`, `sys.argv`, `sys.path`
and tracebacks, and what is asked of the kernel here outlives the exec. Started by its path with -I -S, so nothing in
the user's directory can stand in the way of these imports.
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
    if os.getppid() != launcher:  # it died before it could be asked for
        os.kill(os.getpid(), signal.SIGKILL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv)
