"""Starts, watches and ends the process of one rank on the event loop, and reads its output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from ftcomm.launch import exec_stub as first_stage

READ = 1 << 16  # bytes a read
LAST = 1 << 20  # bytes read at most from a dead rank's pipe: the largest pipe of an ordinary user


class RankProcess:
    """The process of a rank. It leads its own session and process group, so no signal of the terminal reaches it.

    It belongs to the event loop that makes it; no method blocks. Raises `OSError` if the system refuses the process, or
    the means to watch it. `on_output(stream, data)` gets what it writes to 1 and
    2. `on_exit(code)` is called once, after the last output, when the process and all of its group are dead.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        on_output: Callable[[int, bytes], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_output = on_output
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", first_stage.__file__, str(os.getpid()), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pipes = {1: self._process.stdout, 2: self._process.stderr}
        self._pidfd = -1
        self._held = True
        try:
            for pipe in self._pipes.values():
                os.set_blocking(pipe.fileno(), False)
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self._ended)
            self.hold(False)
        except BaseException:
            self._abandon()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone; its children die with it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL to the rank and its process group."""
        # This hits no stranger: until `_ended` has reaped the rank, no other process gets its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def hold(self, held: bool) -> None:
        """Stop reading its output, or go on. While stopped, the rank has to wait once its pipe is full."""
        if held == self._held:
            return
        self._held = held
        for stream, pipe in self._pipes.items():
            if held:
                self._loop.remove_reader(pipe.fileno())
            else:
                self._loop.add_reader(pipe.fileno(), self._read, stream)

    def _abandon(self) -> None:
        """End a process that cannot be watched. It has only begun, so it ends at once."""
        self.kill()
        self._process.wait()
        self.hold(True)
        for pipe in self._pipes.values():
            pipe.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _read(self, stream: int) -> int:
        """Reads from a stream. Returns the number of bytes; 0 if there is none now, or ever."""
        pipe = self._pipes[stream]
        try:
            data = os.read(pipe.fileno(), READ)
        except BlockingIOError:
            return 0
        if data:
            self._on_output(stream, data)
        elif not self._held:
            self._loop.remove_reader(pipe.fileno())  # the rank has closed this stream; its pidfd tells when it ends
        return len(data)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.kill()  # before it is reaped, see `kill`: the children in its group
        code = self._process.wait()
        os.close(self._pidfd)
        self.hold(True)
        for stream, pipe in self._pipes.items():
            left = LAST
            while left > 0 and (read := self._read(stream)):
                left -= read
            pipe.close()
        self._on_exit(code)
