"""Lets another process of this user see where the threads of this one stand, and does no harm to it.

Two ways, for a process that `StackServer` has opened:

    it is asked     a thread of this process answers on a unix socket with the stacks of all threads. It reads them
                    with the interpreter lock in its hands, so nothing changes meanwhile
    it is signalled if the lock is held (a C call that does not let it go), no thread answers. Then `SIGNAL`, sent to
                    one thread, makes `faulthandler` write the stack of that thread alone into a file. A thread must not
                    walk the frames of another one that runs (`all_threads=True`): that has crashed processes

The head of that file says what can be read of this process at any moment: which thread answers, and since when the
garbage collector has held the lock.

`ftcomm.diagnosis.stacks` is the other side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from ftcomm.control import fork

log = logging.getLogger("ftcomm")

SIGNAL = signal.SIGRTMAX - 5  # of those that no library is known to use
SOCKET, WRITTEN = ".stacks", ".stacks.txt"  # endings of the names of the socket and of the file

PID = ".pid-"  # before the process id in the name of a recording

MAGIC = b"FTSTACKS"
HEAD = mmap.PAGESIZE  # bytes before what faulthandler writes
# magic, thread that answers, collections of the oldest generation, since when one runs (0: none), seconds of all
FIELDS = struct.Struct("<8sQQdd")
_RUNS, _SECONDS = 3, 4  # words

THREADS, FRAMES = 256, 128  # at most; of the frames the innermost
TEXT = 300  # characters of a name, at most
_SEND = 2.0  # s for the other side to take the answer


class StackFrame(msgspec.Struct, frozen=True, array_like=True):
    """A line of a program that a thread is at, or has called from."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class ThreadStack(msgspec.Struct, frozen=True):
    """The Python stack of a thread, the innermost frame first. `id` is the kernel's; `name` is empty if unknown."""

    id: int
    name: str
    frames: tuple[StackFrame, ...]


class StackAnswer(msgspec.Struct, frozen=True):
    """The answer of a process."""

    pid: int
    threads: tuple[ThreadStack, ...]


class StackServer:
    """Answers for this process until it is closed. `prefix` is the path, without its ending, of the socket and of the
    file, in a directory of this user alone. Raises `OSError` if they cannot be made. Any thread may close it."""

    def __init__(self, prefix: Path) -> None:
        self._paths = prefix.with_name(prefix.name + SOCKET), prefix.with_name(prefix.name + WRITTEN)
        with contextlib.ExitStack() as stack:
            fd = os.open(self._paths[1], os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = stack.enter_context(os.fdopen(fd, "r+b", buffering=0))
            os.posix_fallocate(fd, 0, HEAD)
            self._head = mmap.mmap(fd, HEAD)
            self._times = memoryview(self._head).cast("d")
            self._words = memoryview(self._head).cast("Q")
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            folder = os.open(prefix.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            with contextlib.suppress(FileNotFoundError):
                self._paths[0].unlink()
            # A long path does not fit into the address of a socket.
            self._listener.bind(f"/proc/self/fd/{folder}/{self._paths[0].name}")
            self._listener.listen(8)
            fork.keep_from_children(self._listener)
            # A process that was in a job before ignores it (`close`), and so do those that it starts.
            self._listens = signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
            if self._listens:
                faulthandler.register(SIGNAL, self._file, all_threads=False, chain=False)
            self._thread = threading.Thread(target=self._serve, name="ftcomm-stacks", daemon=True)
            self._thread.start()
            gc.callbacks.append(self._collects)
            stack.pop_all()
            os.close(folder)

    def close(self) -> None:
        """Stop answering, and remove the socket and the file; idempotent."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collects)
        if self._listens:
            self._listens = False
            # Ignored from now on: by default the signal of somebody who asks just now would end this process.
            with contextlib.suppress(ValueError, OSError):  # ValueError: this is not the main thread
                signal.signal(SIGNAL, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        with contextlib.suppress(OSError):  # the script has closed it
            self._listener.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _serve(self) -> None:
        with contextlib.suppress(ValueError):
            FIELDS.pack_into(self._head, 0, MAGIC, threading.get_native_id(), 0, 0.0, 0.0)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed, or cut off in a forked child
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_SEND)
                connection.sendall(msgspec.json.encode(StackAnswer(os.getpid(), here())))

    def _collects(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] != 2:
            return
        times, now = self._times, time.monotonic()
        if phase == "start":
            times[_RUNS] = now
        else:
            times[_SECONDS] += now - times[_RUNS]
            times[_RUNS] = 0.0
            self._words[2] += 1


def serve(recording: Path | None) -> StackServer | None:
    """Let others see the stacks of this process, beside its recording; what earlier processes of this rank have left
    there is removed. None without a recording, or if there is no room: then only py-spy sees them."""
    if recording is None:
        return None
    prefix = recording.with_suffix("")
    try:
        rank, _, _ = prefix.name.rpartition(PID)
        for left in prefix.parent.glob(f"{rank}{PID}*{SOCKET}*"):
            pid = left.name.removeprefix(f"{rank}{PID}").partition(".")[0]
            if not os.path.exists(f"/proc/{pid}"):
                left.unlink(missing_ok=True)
        return StackServer(prefix)
    except OSError as error:
        log.warning("this process cannot be asked for its stacks: %s", error.strerror or error)
        return None


def here() -> tuple[ThreadStack, ...]:
    """Returns the stacks of all threads of this process but the calling one."""
    me = threading.get_ident()
    known = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in list(sys._current_frames().items())[:THREADS]:
        if ident == me:
            continue
        thread = known.get(ident)
        found.append(
            ThreadStack(
                0 if thread is None else thread.native_id or 0,
                "" if thread is None else thread.name[:TEXT],
                _frames(frame),
            )
        )
    main = threading.main_thread().native_id
    return tuple(sorted(found, key=lambda stack: stack.id != main))


def _frames(frame: FrameType | None) -> tuple[StackFrame, ...]:
    found: list[StackFrame] = []
    while frame is not None and len(found) < FRAMES:
        code = frame.f_code
        found.append(StackFrame(code.co_filename[-TEXT:], frame.f_lineno or 0, code.co_name[:TEXT]))
        frame = frame.f_back
    return tuple(found)
