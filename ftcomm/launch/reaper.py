"""The process that cleans up after a launcher, however the launcher ends, also by SIGKILL or for want of memory.

    python -I -S reaper.py MARK RUN_DIR     started by the launcher, in a session of its own

The launcher holds the only write end of its standard input, and tells it in lines which sessions ranks lead:

    start PID       a rank has been started (its pid is its session)
    end PID MARK    that rank is dead; kill what it left behind

At the end of file the launcher is gone: the reaper kills everything of the run, removes its directory and exits. A
process belongs to the run if it is in the session of a rank, or if its environment carries the run's mark, which
children inherit; so a process with a session of its own is found as well. It uses the standard library only, and little
of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

MARK = "FTCOMM_RUN"  # set in all descendants of a rank: run id, replica, start, rank, each with a colon
EXEC = 0.005  # s, longer than an exec takes
EXIT_TIMEOUT = 10.0  # s for a killed process to go; one stuck in a driver may never go


def kill_all(mark: str, sessions: set[int], timeout: float = EXIT_TIMEOUT) -> None:
    """SIGKILL all processes whose mark begins with `mark`, or in one of `sessions`; return when they are gone."""
    deadline = time.monotonic() + timeout
    clear = 0
    # A process may fork during a look, and shows no environment in the midst of exec. So only two empty looks, a
    # moment apart, end this.
    while clear < 2 and time.monotonic() < deadline:
        pidfds = [fd for pid in _pids() if (fd := _open_if_ours(pid, mark, sessions)) is not None]
        if not pidfds:
            clear += 1
            time.sleep(EXEC)
            continue
        clear = 0
        poll = select.poll()
        for fd in pidfds:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            poll.register(fd, select.POLLIN)
        waiting = set(pidfds)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                waiting.discard(fd)
        for fd in pidfds:
            os.close(fd)


def _pids() -> list[int]:
    me = os.getpid()
    return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != me]


def _open_if_ours(pid: int, mark: str, sessions: set[int]) -> int | None:
    """Returns a pidfd of `pid` if it belongs to the run and lives. It is opened before the look, so it means the same
    process."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if _is_ours(pid, mark, sessions):
        return fd
    os.close(fd)
    return None


def _is_ours(pid: int, mark: str, sessions: set[int]) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # pid (name) state parent group session ...; the name may hold blanks and brackets
            state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
        if state in (b"Z", b"X"):
            return False
        if int(session) in sessions:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"\0{MARK}={mark}".encode() in b"\0" + file.read()
    except OSError:  # gone meanwhile, or another user's
        return False


def main(argv: list[str]) -> None:
    mark, run_dir = argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signals are for the launcher, whose end this process waits for
    sessions: set[int] = set()
    for line in sys.stdin:
        kind, pid, *rest = line.split()
        if kind == "start":
            sessions.add(int(pid))
        else:
            kill_all(rest[0], {int(pid)})
            sessions.discard(int(pid))
    kill_all(mark, sessions)
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv)
