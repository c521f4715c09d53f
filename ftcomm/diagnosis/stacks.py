"""Reads where the threads of another process stand. See `ftcomm.process.stacks` for the two ways, and why they are
safe.

A process that is frozen answers nothing and is sent nothing. Where py-spy is installed, it reads the stacks of such a
process, and native ones of a process that holds its interpreter, from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ftcomm.diagnosis import processes
from ftcomm.process.stacks import (
    FIELDS,
    FRAMES,
    HEAD,
    MAGIC,
    SIGNAL,
    SOCKET,
    TEXT,
    WRITTEN,
    StackAnswer,
    StackFrame,
    ThreadStack,
)

ANSWER = 0.4  # s for a thread to get the interpreter lock and to answer
AGAIN = 1.0  # s for it if it does not wait for the lock: then it gets no CPU
LOOK = 0.3  # s in which it is seen whether that thread waits for the lock
WRITE = 2.0  # s for a thread to write its stack
MOST = 4 << 20  # bytes of an answer
KEPT = 1 << 20  # bytes of written stacks after which the file begins anew
SPY = 5.0  # s for py-spy

_libc = ctypes.CDLL(None, use_errno=True)
_ANSWER = msgspec.json.Decoder(StackAnswer)
_LINE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Stacks(msgspec.Struct, frozen=True):
    """The Python stacks of a process; `native` is what py-spy says. `held`: it did not give the interpreter lock away.
    `collects`: for how many seconds the garbage collector has had it; 0 if it does not run. `missing` says why there
    are no stacks, or what could not be read."""

    threads: tuple[ThreadStack, ...] = ()
    held: bool = False
    collects: float = 0.0
    native: str = ""
    missing: str = ""

    @property
    def main(self) -> tuple[StackFrame, ...]:
        """The frames of the main thread, the innermost first."""
        return self.threads[0].frames if self.threads else ()


def take(prefix: Path, pid: int) -> Stacks:
    """Returns where the threads of process `pid` stand, whose `StackServer` has this `prefix`. Blocks for two seconds
    at most if it does not answer, for `SPY` more if py-spy does not end. Any thread."""
    state = processes.state(pid)
    if not state:
        return Stacks(missing="it has no process")
    if state in processes.STOPPED:
        native = _spy(pid, "--nonblocking")
        return Stacks(native=native, missing="" if native else f"it is frozen (state {state}); {_install()}")
    written = prefix.with_name(prefix.name + WRITTEN)
    try:
        try:
            return Stacks(_ask(prefix, pid, ANSWER))
        except TimeoutError:
            speaker, collects = _head(written)
            if not _waits(pid, speaker):
                return Stacks(_ask(prefix, pid, AGAIN))
    except TimeoutError:
        return Stacks(collects=collects, missing="it has no time to answer: its threads get no CPU")
    except (FileNotFoundError, ConnectionRefusedError):
        native = _spy(pid)
        return Stacks(native=native, missing="" if native else f"it has not called ftcomm.init() yet; {_install()}")
    except (OSError, msgspec.DecodeError, ValueError) as error:
        return Stacks(missing=f"it does not answer as a rank does: {error}")
    running = [thread.id for thread in processes.threads(pid) if _matters(thread, pid)]
    threads = tuple(_signalled(written, pid, running))
    native = _spy(pid, "--native")
    return Stacks(threads, True, collects, native, "" if threads or native else "no thread has answered the signal")


def _matters(thread: processes.KernelThread, pid: int) -> bool:
    """Whether a thread of a process that holds its interpreter may be the one that holds it. The others sleep until
    they get it."""
    return thread.id == pid or thread.state in ("R", "D")


def _ask(prefix: Path, pid: int, timeout: float) -> tuple[ThreadStack, ...]:
    data = bytearray()
    until = time.monotonic() + timeout
    folder = os.open(prefix.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(timeout)
            asked.connect(f"/proc/self/fd/{folder}/{prefix.name}{SOCKET}")
            while True:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                asked.settimeout(left)
                more = asked.recv(1 << 16)
                if not more:
                    break
                data += more
                if len(data) > MOST:
                    raise ValueError(f"an answer of more than {MOST} bytes")
    finally:
        os.close(folder)
    answer = _ANSWER.decode(bytes(data))
    if answer.pid != pid:
        raise ValueError(f"process {answer.pid} answers in place of {pid}")
    return answer.threads


def _head(written: Path) -> tuple[int, float]:
    """Returns which thread answers, and for how many seconds a collection has run; (0, 0.0) if that cannot be read."""
    speaker, since, _ = _fields(written)
    return speaker, max(0.0, time.monotonic() - since) if since > 0 else 0.0


def collected(prefix: Path) -> float:
    """Returns for how many seconds the garbage collector of a process has run, with a collection that runs by now."""
    _, since, seconds = _fields(prefix.with_name(prefix.name + WRITTEN))
    return seconds + (max(0.0, time.monotonic() - since) if since > 0 else 0.0)


def _fields(written: Path) -> tuple[int, float, float]:
    with contextlib.suppress(OSError), open(written, "rb") as file:
        data = file.read(FIELDS.size)
        if len(data) == FIELDS.size:
            magic, speaker, _, since, seconds = FIELDS.unpack(data)
            if magic == MAGIC:
                return speaker, since, seconds
    return 0, 0.0, 0.0


def _waits(pid: int, speaker: int) -> bool:
    """Whether the thread that answers waits for the interpreter lock. If it merely gets no CPU, the lock may be free,
    and the frames of others change while they are signalled."""
    asleep, until = 0, time.monotonic() + LOOK
    while asleep < 2 and time.monotonic() < until:  # it wakes up every 5 ms to ask for the lock
        asleep += processes.state(pid, speaker) == "S"
        time.sleep(0.002)
    return asleep >= 2


def _signalled(written: Path, pid: int, threads: Iterable[int]) -> Iterable[ThreadStack]:
    """Yields what each of the threads writes after a signal, the main thread first."""
    try:
        fd = os.open(written, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        for thread in sorted(threads, key=lambda thread: thread != pid):
            if not processes.catches(pid, thread, SIGNAL):
                continue
            before = os.fstat(fd).st_size
            if before > KEPT:
                os.ftruncate(fd, HEAD)
                before = HEAD
            if not signal_thread(pid, thread):
                continue
            frames = _parsed(_grown(fd, before, pid, thread))
            if frames:
                yield ThreadStack(thread, "", frames)
    finally:
        os.close(fd)


def signal_thread(pid: int, thread: int) -> bool:
    """Let one thread of a process write its stack; whether there is such a thread. Only if it catches `SIGNAL`: the
    default of that signal ends a process."""
    return bool(_libc.tgkill(pid, thread, SIGNAL) == 0)


def _grown(fd: int, before: int, pid: int, thread: int) -> bytes:
    """Returns what a thread writes behind `before` within `WRITE`. It writes line by line, and blocks `SIGNAL` until it
    has written the last one."""
    until = time.monotonic() + WRITE
    while time.monotonic() < until:
        time.sleep(0.01)
        if os.fstat(fd).st_size > before and processes.catches(pid, thread, SIGNAL):
            break
    return os.pread(fd, min(KEPT, max(0, os.fstat(fd).st_size - before)), before)


def _parsed(written: bytes) -> tuple[StackFrame, ...]:
    found = []
    for line in written.decode(errors="replace").splitlines():
        if match := _LINE.fullmatch(line):
            file, number, function = match.groups()
            found.append(StackFrame(file[-TEXT:], int(number) if number.isdigit() else 0, function[:TEXT]))
    return tuple(found[:FRAMES])


def _spy(pid: int, *options: str) -> str:
    """Returns what py-spy says of a process; empty if it is not installed, or may not look."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid), *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SPY,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")[:KEPT] if done.returncode == 0 else ""


def _install() -> str:
    return "to see where it stands: pip install 'ftcomm[stacks]'"
