"""Whether this process still hears by NIXL: a sender that dies while it sends may leave its receiver deaf.

Within a host UCX has one queue for each receiver, in shared memory. A sender claims an element, fills it, and marks it
as full. If it is killed in between, that element is never marked, and the receiver reads nothing that lies behind it,
from no sender. A sender that is stopped there does the same until it goes on. UCX has no mend (its issue 10370): the
receiver needs new agents, which have new queues.

So a process that waits in vain for the first put of a connection, or in an op for longer than a moment, asks itself
(`HearingProbe`): another agent of its process tells it something. If it does not hear that, it starts anew
(`ftcomm.transport.nixl.context`).
"""

from __future__ import annotations

import time

from ftcomm.errors import TransportError
from ftcomm.transport.nixl import frames
from ftcomm.transport.nixl.agent import NixlEndpoint
from ftcomm.transport.nixl.library import describe

HEARING_TIMEOUT = 1.0  # s for what it tells itself: one that sends may wait for a processor while its element is empty
_LOOKS = 100  # at least, as this process may have to wait for a processor itself; a few are enough for who hears
_GLANCE = 200e-6  # s between two looks


class _ProbeReceiver:
    """See `ftcomm.transport.nixl.agent.FrameReceiver`."""

    heard = False

    def arrive(self, frame: frames.Frame) -> None:
        self.heard = True

    def broken(self, reason: str) -> None:
        """Ignore it: what counts is what is heard."""

    def end(self) -> None:
        """Do nothing: there is no other side."""


class HearingProbe:
    """An agent that tells another endpoint of its process something. For one thread at a time."""

    def __init__(self, endpoint: NixlEndpoint) -> None:
        """Use the network of `endpoint`. Raises `TransportError`."""
        self._errors = endpoint.library.errors
        self._agent = endpoint.library.agent(f"{endpoint.names[0]}.probe", endpoint.devices[0], endpoint.network)
        self._known: set[str] = set()  # for ever: UCX does not unmap the queues of a connection that was closed

    def reaches(self, endpoint: NixlEndpoint, seconds: float = HEARING_TIMEOUT) -> bool:
        """Whether all agents of `endpoint` hear it. Blocks for at least so many seconds if not. Raises `TransportError`
        if that cannot be told."""
        receivers = {name: _ProbeReceiver() for name in endpoint.names}
        channels = [endpoint.open_channel(receiver) for receiver in receivers.values()]
        try:
            for name, metadata, channel in zip(receivers, endpoint.contacts(), channels, strict=True):
                if name not in self._known:
                    self._agent.add_remote_agent(metadata)
                    self._known.add(name)
                self._agent.send_notif(name, frames.pack(frames.GREETING, channel, 0, 0, 0, 0, 0, (0, 0, 0)))
            told, looks = time.monotonic(), 0
            while not all(each.heard for each in receivers.values()) and (
                looks < _LOOKS or time.monotonic() - told < seconds
            ):
                looks += 1
                self._agent.get_new_notifs()  # moves on what it tells
                if not endpoint.poll():
                    time.sleep(_GLANCE)
        except self._errors as error:
            raise TransportError(f"NIXL cannot tell this process anything: {describe(error)}") from error
        finally:
            for channel in channels:
                endpoint.close_channel(channel)
        return all(receiver.heard for receiver in receivers.values())
