"""A process that a rank has started beside itself to serve other ranks: the leader of its replica, or the agent of its
host."""

from __future__ import annotations

import contextlib
import logging
import os
import socket

import msgspec

from ftcomm.control.companion import Companion, own_end


class OwnCompanion:
    """The process. `ended` belongs to the event loop of the control thread. `what` is what the process is, `why(pid)`
    is why the replica ends with it."""

    what = ""
    module = ""

    def __init__(self, config: msgspec.Struct, listening: socket.socket) -> None:
        """Starts it. It gets `listening`, to which the ranks come, and nobody listens there once it has ended. Raises
        `OSError`."""
        environment = {name: value for name, value in os.environ.items() if name != "FTCOMM_TOKEN"}
        end = own_end()
        descriptors = (listening.fileno(), *([end] if end >= 0 else []))
        try:
            self._process = Companion(self.module, msgspec.json.encode(config), descriptors, environment, errors=None)
        finally:
            listening.close()
            if end >= 0:
                os.close(end)

    def why(self, pid: int) -> str:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """The process, once it has begun; before that 0."""
        return self._process.pid

    async def ended(self) -> str:
        """Wait for its end, and return why the replica ends with it."""
        why = await self._process.begun()
        if why:
            return f"its {self.what} cannot start: {why}"
        with contextlib.suppress(OSError):  # the script has closed the descriptor
            await self._process.ended()
        return self.why(self.pid)

    def dismiss(self) -> None:
        """Tell it that this rank ends as it should."""
        self._process.dismiss()


def log_level() -> int:
    """Returns the level at which such a process logs: that of this one."""
    return logging.getLogger("ftcomm").getEffectiveLevel()
