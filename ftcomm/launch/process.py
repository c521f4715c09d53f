"""One rank's process: started, watched and ended by the event loop, its output read as it comes."""

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
LAST = 1 << 20  # bytes read at most from a dead rank's pipe: the largest pipe that an ordinary user can have


class RankProcess:
    """Leads a session and a process group of its own, so no signal of the terminal reaches it.

    Lives on the event loop that makes it; nothing here blocks. `on_output(stream, data)` gets what it writes to 1 and
    2, `on_exit(code)` is called once, after the last output, when the process and all of its group are dead.
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
        for pipe in self._pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._ended)
        self._held = True
        self.hold(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone; what it started dies with it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL to the rank and its process group."""
        # Safe from hitting a stranger: until `_ended` has reaped the rank, its number cannot be given to another.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def hold(self, held: bool) -> None:
        """Stop or go on reading its output. While stopped, the rank has to wait once its pipe is full."""
        if held == self._held:
            return
        self._held = held
        for stream, pipe in self._pipes.items():
            if held:
                self._loop.remove_reader(pipe.fileno())
            else:
                self._loop.add_reader(pipe.fileno(), self._read, stream)

    def _read(self, stream: int) -> int:
        """The number of bytes read; 0 for none now and none ever."""
        pipe = self._pipes[stream]
        try:
            data = os.read(pipe.fileno(), READ)
        except BlockingIOError:
            return 0
        if data:
            self._on_output(stream, data)
        elif not self._held:
            self._loop.remove_reader(pipe.fileno())  # it has closed this stream; its pidfd tells when it ends
        return len(data)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.kill()  # before it is reaped, see there: what it started and left in its group
        code = self._process.wait()
        os.close(self._pidfd)
        self.hold(True)
        for stream, pipe in self._pipes.items():
            left = LAST
            while left > 0 and (read := self._read(stream)):
                left -= read
            pipe.close()
        self._on_exit(code)
