"""The end of all other hosts: the connection of their launchers to that of host 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ftcomm.control import handshake
from ftcomm.control.links import Link
from ftcomm.control.messages import Message
from ftcomm.launch.several_hosts.messages import (
    LAUNCHER,
    BeginJob,
    JobIsLost,
    LauncherMessage,
    TurnedAway,
    decode_launcher_message,
)
from ftcomm.launch.several_hosts.node_place import NodePlace
from ftcomm.launch.several_hosts.refusals import Refusals


class LauncherLink:
    """Connects to host 0, again and again until `close`, or until `refusals` prove that it is gone.
    `on_message(message)` gets what host 0 says, `on_change()` is called when the connection has come or gone. All on
    one event loop."""

    def __init__(
        self,
        address: tuple[str, int],
        place: NodePlace,
        run: str,
        options: str,
        credentials: handshake.Credentials,
        on_message: Callable[[LauncherMessage], None],
        on_change: Callable[[], None],
        tell: Callable[[str], None],
        refusals: Refusals,
    ) -> None:
        self._refusals = refusals
        self._place, self._on_message, self._on_change, self._tell = place, on_message, on_change, tell
        self.begun: BeginJob | None = None
        self.why = "it has not been tried yet"  # there is no connection
        self._turned_away = False  # host 0 has said why it ends this connection
        self._link = Link(
            address,
            credentials,
            LAUNCHER,
            {"node": place.rank, "run": run, "options": options},
            on_open=self._opened,
            on_message=self._received,
            on_down=self._down,
            decode=decode_launcher_message,
        )

    @property
    def is_up(self) -> bool:
        return self._link.is_up

    def send(self, message: Message) -> None:
        """Tell host 0; dropped without a connection."""
        self._link.send(message)

    def close(self) -> None:
        self._link.close()

    def _opened(self) -> None:
        self._on_change()

    def _received(self, message: LauncherMessage) -> None:
        if isinstance(message, TurnedAway):
            self._turned_away = True
            self._say(message.reason)
        elif isinstance(message, BeginJob):
            if self.begun is not None and message.job != self.begun.job:
                self._lose(f"another job runs at {self._place.endpoint} now, where host 0 of this one was")
                return
            self.why = ""
            self.begun = message
            self._on_change()
        else:
            self._on_message(message)

    def _down(self, error: Exception) -> None:
        if not self._turned_away:
            self._say(str(error) or repr(error))
        self._turned_away = False
        loop = asyncio.get_running_loop()
        if self.begun is not None and (reason := self._refusals.proof(error, loop.time())):
            self._lose(reason)
            return
        loop.call_soon(self._on_change)  # when the link knows that it is down

    def _lose(self, reason: str) -> None:
        self._link.close()  # first: nothing of this job is for who listens there
        self._on_message(JobIsLost(reason))
        self._on_change()

    def _say(self, why: str) -> None:
        if why != self.why:
            self.why = why
            self._tell(f"no connection to the launcher of host 0 at {self._place.endpoint}: {why}")
