"""The process that serves the live view of a job. It is one of its own, so that no reader can hold up the event loop
that hears of deaths; it asks the job by its admin socket, and ends with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ftcomm.launch.listen import Listen

ENDING = 5.0  # s to end in


class DashboardProcess:
    """The running process; `tell(text)` gets its lines. Belongs to the event loop that makes it; only `close`
    blocks."""

    def __init__(self, socket: Path, listen: Listen, tell: Callable[[str], None]) -> None:
        """Start it. Raises `OSError` if the system refuses the process."""
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._rest = b""
        environment = {name: value for name, value in os.environ.items() if name != "FTCOMM_TOKEN"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ftcomm.dashboard", str(socket), listen.host, str(listen.port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._loop.add_reader(self._output.fileno(), self._read)

    def close(self) -> None:
        """End it; blocks for `ENDING` seconds at most. From any thread."""
        self._closed = True
        self._process.terminate()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        data = os.read(self._output.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line.decode(errors="replace"))
        if data:
            return
        self._loop.remove_reader(self._output.fileno())
        self._output.close()
        if not self._closed:
            self._tell("the live view has ended; the job goes on. Look again with: ftcomm dashboard")
