"""Asks the kernel about a process of this user: its state, whether it gets a CPU, and which full disks it writes to.

Read from /proc, so that it works on a process that is frozen, dead or holds its interpreter. Nothing here waits for
the process, and it notices nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

import msgspec

PROC = Path("/proc")
LEAST_FREE = 1 << 20  # bytes; a file system with less is full
AGAIN = 0.1  # s
HARDLY = 0.01  # of the time: a thread that ran for less computes nothing
_FILES = 4096  # descriptors that are looked at
_ENVIRONMENT = 1 << 20  # bytes of it that are read
STOPPED = ("T", "t")  # states of a process that a signal or a debugger has stopped
_UNSEEN = ("/proc/", "/sys/", "/dev/pts/")


class KernelThread(msgspec.Struct, frozen=True):
    """A thread of a process. `state` is a letter of proc(5), `waits_in` the function of the kernel that it waits in."""

    id: int
    name: str
    state: str
    waits_in: str


class ProcessFacts(msgspec.Struct, frozen=True):
    """A process. `ran` and `delayed` are shares of a time in which its main thread was on a CPU, or was ready and got
    none; `starved` is that of the thread that was ready for longest. `full` are the full file systems that it has files
    open on for writing, or works in."""

    pid: int
    state: str  # of its main thread: R, S, D, T (stopped), t (traced), Z, ...
    threads: tuple[KernelThread, ...] = ()
    ran: float = 0.0
    delayed: float = 0.0
    starved: float = 0.0
    full: tuple[str, ...] = ()
    rack: str = ""

    @property
    def frozen(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        return self.state in STOPPED


class ThreadTimes(msgspec.Struct, frozen=True):
    """The time that the scheduler has given to a thread so far: nanoseconds on a CPU, and ready without one, which the
    kernel counts when it gets one. `slept`: how often it went to sleep."""

    ran: int
    delayed: int
    slept: int
    ready: bool  # it runs, or waits for a CPU


class SchedulerTimes(msgspec.Struct, frozen=True):
    """The threads of a process; `at` in seconds."""

    at: float
    threads: dict[int, ThreadTimes]


def scheduled(pid: int) -> SchedulerTimes:
    """Returns what the scheduler has given to the threads of a process so far."""
    found = {}
    at = time.monotonic()
    for thread in _numbers(PROC / str(pid) / "task"):
        folder = PROC / str(pid) / "task" / str(thread)
        with contextlib.suppress(OSError, ValueError, KeyError):
            ran, delayed, _ = _read(folder / "schedstat").split()
            said = dict(line.split(":", 1) for line in _read(folder / "status").splitlines())
            ready = said["State"].split()[0] == "R"
            found[thread] = ThreadTimes(int(ran), int(delayed), int(said["voluntary_ctxt_switches"]), ready)
    return SchedulerTimes(at, found)


def look(pid: int, before: SchedulerTimes | None = None) -> ProcessFacts | None:
    """Returns what is known of a process, or None if there is none. `before` is an earlier `scheduled`, from which
    the shares are counted; if it slept since, and is ready now but hardly ran, they are counted anew for `AGAIN`
    seconds, which this blocks for."""
    folder = PROC / str(pid)
    if not (letter := state(pid)):
        return None
    shares = {} if before is None else _shares_since(before, pid)
    ran, delayed = shares.get(pid, (0.0, 0.0))
    found = threads(pid)
    return ProcessFacts(
        pid=pid,
        state=letter,
        threads=found,
        ran=ran,
        delayed=delayed,
        starved=max((share for _, share in shares.values()), default=0.0),
        full=_full(folder),
        rack=_rack(folder),
    )


def state(pid: int, thread: int | None = None) -> str:
    """Returns the state of a process, or of one of its threads; empty if there is none."""
    return _state(PROC / str(pid) / "task" / str(pid if thread is None else thread) / "stat")


def threads(pid: int) -> tuple[KernelThread, ...]:
    """Returns the threads of a process."""
    return tuple(
        KernelThread(thread, _text(at / "comm"), _state(at / "stat"), _text(at / "wchan"))
        for thread in _numbers(PROC / str(pid) / "task")
        for at in (PROC / str(pid) / "task" / str(thread),)
    )


def started(pid: int) -> int:
    """Returns when a process started, in clock ticks after the boot; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_read(PROC / str(pid) / "stat").rpartition(")")[2].split()[19])
    return 0


def catches(pid: int, thread: int, number: int) -> bool:
    """Whether a process has a handler for a signal that this thread would run: it ends no process that has."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(
            line.split(":", 1) for line in _read(PROC / str(pid) / "task" / str(thread) / "status").splitlines()
        )
        bit = 1 << (number - 1)
        return bool(int(fields["SigCgt"], 16) & bit) and not int(fields["SigBlk"], 16) & bit
    return False


def _shares_since(before: SchedulerTimes, pid: int) -> dict[int, tuple[float, float]]:
    """Returns the shares of the threads since `before`. How long a thread has waited for a CPU by now is not counted
    yet, and not known if it slept meanwhile: it may have waited ever since, or only now."""
    after = scheduled(pid)
    shares, now, then = _shares(before, after), after.threads.get(pid), before.threads.get(pid)
    unsure = now is not None and now.ready and (then is None or then.slept != now.slept or not then.ready)
    if not unsure or shares[pid][0] > HARDLY:
        return shares
    time.sleep(AGAIN)
    return _shares(after, scheduled(pid))


def _shares(before: SchedulerTimes, after: SchedulerTimes) -> dict[int, tuple[float, float]]:
    """Returns for each thread for which shares of the time it had a CPU, and waited for one: all the rest, if it was
    ready and has not slept since."""
    passed = max(1e-9, after.at - before.at) * 1e9
    found = {}
    for thread, now in after.threads.items():
        then = before.threads.get(thread, now)
        ran = min(1.0, (now.ran - then.ran) / passed)
        awake = then.ready and then is not now and then.slept == now.slept
        found[thread] = ran, 1.0 - ran if awake else min(1.0, (now.delayed - then.delayed) / passed)
    return found


def _full(folder: Path) -> tuple[str, ...]:
    paths = [folder / "cwd"]
    with contextlib.suppress(OSError):
        for number in sorted(_numbers(folder / "fd"))[:_FILES]:
            if _writes(folder, number):
                paths.append(folder / "fd" / str(number))
    full: dict[int, str] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            info, name = path.stat(), os.readlink(path)
            if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)) or info.st_dev in full:
                continue
            if name.startswith(_UNSEEN):
                continue
            free = os.statvfs(path)
            if free.f_blocks and free.f_bavail * free.f_frsize < LEAST_FREE:
                full[info.st_dev] = name
    return tuple(sorted(full.values()))


def _writes(folder: Path, number: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        for line in _read(folder / "fdinfo" / str(number)).splitlines():
            if line.startswith("flags:"):
                return bool(int(line.split()[1], 8) & (os.O_WRONLY | os.O_RDWR))
    return False


def _rack(folder: Path) -> str:
    """Returns the label of `FTCOMM_RACK`; nothing else of the environment is kept."""
    with contextlib.suppress(OSError), open(folder / "environ", "rb") as file:
        for entry in file.read(_ENVIRONMENT).split(b"\0"):
            if entry.startswith(b"FTCOMM_RACK="):
                return entry.partition(b"=")[2].decode(errors="replace")[:256]
    return ""


def _state(path: Path) -> str:
    with contextlib.suppress(OSError, IndexError):
        return _read(path).rpartition(")")[2].split()[0]
    return ""


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        text = _read(path).strip()
        return "" if text == "0" else text
    return ""


def _numbers(folder: Path) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    return []


def _read(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 16)
