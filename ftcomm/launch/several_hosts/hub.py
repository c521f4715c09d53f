"""Host 0's end of the connections between the launchers of one job. They come in at the coordinator's port."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ftcomm.control import handshake, wire
from ftcomm.control.links import serve_messages
from ftcomm.control.messages import Message, encode
from ftcomm.control.sealed import Channel
from ftcomm.launch.several_hosts.messages import (
    BeginJob,
    CoordinatorSaid,
    LauncherMessage,
    TurnedAway,
    decode_launcher_message,
)

NOT_TOLD = ("report",)  # kinds of events, of a script's own, as many as it likes


class LauncherHub:
    """Takes in the launchers of hosts 1 to `count` - 1, each of which has to have the same `options`.

    `on_message(node, message)` gets what one says, `on_change()` is called when one has come or gone, and before that
    `on_new(node)` if it is another launcher than the last one of its host. `known()` are the messages that tell a
    newcomer how things stand. All on one event loop; nothing blocks.
    """

    def __init__(
        self,
        count: int,
        options: str,
        on_message: Callable[[int, LauncherMessage], None],
        on_change: Callable[[], None],
        on_new: Callable[[int], None],
        known: Callable[[], Iterable[Message]],
    ) -> None:
        self._count, self._options = count, options
        self._on_message, self._on_change, self._on_new, self._known = on_message, on_change, on_new, known
        self._writers: dict[int, wire.Writer] = {}
        self._runs: dict[int, str] = {}  # host -> the run of its last launcher
        self._begun: BeginJob | None = None

    @property
    def missing(self) -> list[int]:
        """The hosts whose launchers are not connected."""
        return [node for node in range(1, self._count) if node not in self._writers]

    def begin(self, store: str, job: str) -> None:
        """Let all start their replicas, and those that come later, too."""
        self._begun = BeginJob(store, job)
        self.send(self._begun)

    def send(self, message: Message) -> None:
        """Tell all launchers that are connected."""
        data = encode(message)
        for writer in self._writers.values():
            writer.write(data)

    def send_to(self, node: int, message: Message) -> None:
        """Tell the launcher of one host; dropped if it is not connected."""
        if node in self._writers:
            self._writers[node].write(encode(message))

    def event(self, event: dict[str, Any]) -> None:
        """Tell what the coordinator has said."""
        if self._writers and event["kind"] not in NOT_TOLD:
            self.send(CoordinatorSaid(event))

    def close(self) -> None:
        """Say what has been said, and no more."""
        for writer in self._writers.values():
            writer.close()

    async def serve(self, channel: Channel, fields: handshake.Fields) -> None:
        """Serve one connection to its end. Raises `handshake.BadFields`."""
        node = handshake.number(fields, "node", least=1, most=self._count - 1)
        options, run = handshake.text(fields, "options"), handshake.text(fields, "run")
        mine: list[wire.Writer] = []

        def ready(writer: wire.Writer) -> None:
            if why := self._refusal(node, options):
                writer.write(encode(TurnedAway(why)))
                writer.close()
                return
            mine.append(writer)
            self._writers[node] = writer
            before, self._runs[node] = self._runs.get(node, run), run
            if before != run:
                self._on_new(node)
            if self._begun is not None:
                for message in (self._begun, *self._known()):
                    writer.write(encode(message))
            self._on_change()

        def received(message: LauncherMessage) -> None:
            if mine:
                self._on_message(node, message)

        try:
            await serve_messages(channel, received, ready, decode_launcher_message)
        finally:
            if mine:
                del self._writers[node]
                self._on_change()

    def _refusal(self, node: int, options: str) -> str:
        if options != self._options:
            return f"it was started with {options}, and host 0 with {self._options}; give all hosts the same"
        if node in self._writers:
            return f"another launcher with --node-rank {node} is connected; each host has a number of its own"
        return ""
