"""The NIXL agents of this process, one for each rail, the peers they know, and what moves them on.

NIXL makes progress only when it is called, here and at the peer that a put goes to. The driver of a stream calls `poll`
while it waits. Otherwise a thread does so, ever more rarely, since only the rest of what others have put or told is
left to be moved then. When idle it looks twenty times a second.

A put is announced to the reader when it has ended, if its connection is still open. If that has closed, at the end of
its epoch, the source of the put is used again, and a put that goes on (its target may be stopped) brings bytes that are
never announced.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ftcomm.control import fork
from ftcomm.control.dropped import drop
from ftcomm.control.failed_dials import start
from ftcomm.errors import TransportError
from ftcomm.transport.nixl import frames, library, network
from ftcomm.transport.nixl.memory import MirrorMemories, MirrorMemory
from ftcomm.transport.nixl.puts import Puts, Remote, Sender
from ftcomm.transport.segment import SIZE

log = logging.getLogger("ftcomm.transport")

PUT_TIMEOUT = 120.0  # s; a driver complains much earlier, and the control plane removes the silent
_BUSY = 0.002  # seconds after the last progress during which the thread yields and looks again
_AWAKE = 0.05  # ... during which it sleeps as short as it can
_SHORT, _LONG = 50e-6, 0.05  # its sleeps; the long one in an idle group
_DRIVEN = 0.01  # seconds for which it leaves the polling to the driver that has just polled
_LINGER = 5.0  # s for which a peer without a connection stays known
_PARTING = 2.0  # seconds at the end for what is under way


class FrameReceiver(Protocol):
    """The receiver of the frames of one channel. Called with the lock of the endpoint."""

    def arrive(self, frame: frames.Frame) -> None:
        """Take a frame. Raises `ValueError` for an impossible one."""

    def broken(self, reason: str) -> None:
        """Learn that the channel is broken. Called without the lock."""

    def end(self) -> None:
        """End the connection: both sides hear of it. Called without the lock."""


class NixlEndpoint:
    """The agents; use `ftcomm.transport.nixl.context.Nixl`. All methods from any thread; only `close` waits.

    `devices` are those of each rail, as in UCX_NET_DEVICES; "" leaves the choice to UCX. `on_doubt` is called in the
    thread, see `doubt`. Methods that begin with `_` need the lock, and so do `tell`, `settled` and the methods of
    `puts`.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str] = ("",),
        on_doubt: Callable[[NixlEndpoint], None] = lambda endpoint: None,
    ) -> None:
        self.library = library.load()
        self.devices = tuple(devices)
        self.network = network.here()
        incarnation = secrets.token_hex(8)
        self.names = tuple(f"{name}.{incarnation}.{rail}" for rail in range(len(devices)))
        self._agents = [self.library.agent(*pair, self.network) for pair in zip(self.names, devices, strict=True)]
        self.lock = threading.Lock()  # guards every call of an agent; never held during a wait
        self.puts = Puts(self.library, self._agents, PUT_TIMEOUT)
        self._mirrors = MirrorMemories(SIZE, self.puts.register, self.puts.deregister)
        self._channels: dict[int, FrameReceiver] = {}
        self._remotes: dict[int, Remote] = {}  # by the token of the mirror
        self._spoiled: set[int] = set()  # tokens of mirrors that a put may still write to
        self.greeting = mmap.mmap(-1, mmap.PAGESIZE)  # a put of it shows that puts get through
        self._active = time.monotonic()  # when something last moved
        self._driven = 0.0  # when a driver last looked
        self._looked = 0.0  # when `_look_around` was last called
        self._said: set[str] = set()
        self._on_doubt = on_doubt
        self._doubted = float("-inf")  # when it was last doubted that it hears
        self._doubts = False
        self._closed = False
        self.retired = ""  # why nothing goes by it any more, see `retire`
        self._kick = threading.Event()
        self._dozes = False
        self._thread = threading.Thread(target=self._run, name="ftcomm-nixl", daemon=True)
        fork.take_part(self, f"NIXL agent {name}")  # children share its sockets
        lacks = start(self._thread)
        if lacks:
            fork.part(self)
            self._agents.clear()  # UCX holds memory and sockets for each, for as long as somebody knows it
            raise lacks

    # -- what moves it -----------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Make progress. True if a frame has come or a put has ended. Errors go to the owners of what has failed."""
        self._driven = time.monotonic()
        return self._poll_once()

    def rest(self, seconds: float) -> None:
        """Let the thread rest: the driver looks again after `seconds`."""
        self._driven = time.monotonic() + seconds

    def kick(self) -> None:
        """Note that something is under way: the thread looks at once, and often, unless a driver does."""
        self._active = now = time.monotonic()
        if self._dozes and now - self._driven > _DRIVEN:
            self._kick.set()

    def doubt(self, seconds: float) -> None:
        """Note that a thread has waited in vain for `seconds` to hear something: the agent's thread calls `on_doubt`,
        now and whenever the wait has lasted twice as long. Does not block."""
        now = time.monotonic()
        if now - self._doubted >= seconds / 2:
            self._doubted, self._doubts = now, True
            self._kick.set()

    def close(self) -> None:
        """Wait for what is under way, at most two seconds, and close; idempotent."""
        end = time.monotonic() + _PARTING
        parting = Sender()
        with self.lock:
            for remote in list(self._remotes.values()):
                if not remote.problem and not self._closed:
                    with contextlib.suppress(ConnectionError):  # flushes what was told before
                        self.puts.post(remote, 0, memoryview(self.greeting)[:8], 8, parting)
        while not self._closed and self.puts.flying and time.monotonic() < end:
            if not self._poll_once():
                time.sleep(_SHORT)
        self._closed = True
        self._kick.set()
        self._thread.join(_PARTING)
        fork.part(self)

    def retire(self, reason: str) -> None:
        """End all connections that go by it, and begin no other. What is under way may end."""
        with self.lock:
            self.retired = reason
            ends: list[FrameReceiver | Sender] = [*self._channels.values()]
            ends += [sender for remote in self._remotes.values() for sender in remote.senders]
            for remote in self._remotes.values():
                remote.problem = remote.problem or reason
            self.puts.registrations.forget_all()
        for end in ends:
            end.end()

    def _run(self) -> None:
        while not self._closed and not (self.retired and self._is_left()):
            if self._doubts:
                self._doubts = False
                self._on_doubt(self)
            driven = time.monotonic() - self._driven < _DRIVEN
            if not driven:
                self._poll_once()
            idle = time.monotonic() - self._active
            if driven or idle > _AWAKE:
                self._dozes = not driven
                self._kick.wait(_DRIVEN if driven and idle < _AWAKE else min(_LONG, idle / 10))
                self._dozes = False
                self._kick.clear()
            elif idle > _BUSY:
                time.sleep(_SHORT)
            else:
                os.sched_yield()

    def _poll_once(self) -> bool:
        calls: list[tuple[Callable[[str], None], str]] = []
        with self.lock:
            if self._closed:
                return False
            moved = self._take(calls)
            if self.puts.flying:
                moved |= self.puts.follow(calls)
            now = time.monotonic()
            if moved:
                self._active = now
            if now - self._looked > 1.0:
                self._looked = now
                self._look_around(now)
        for call, reason in calls:
            call(reason)
        return moved

    def _is_left(self) -> bool:
        """Whether it is not needed any more."""
        with self.lock:
            return not (self._channels or self._remotes or self.puts.flying)

    def _take(self, calls: list[tuple[Callable[[str], None], str]]) -> bool:
        came = False
        for agent in self._agents:
            for name, messages in agent.get_new_notifs().items():
                for message in messages:
                    came = True
                    try:
                        told = frames.unpack(message)
                    except ValueError as error:
                        drop("data", f"from NIXL agent {name}: {error}")
                        continue
                    for frame in told:
                        self._arrive(name, frame, calls)
        return came

    def _arrive(self, name: str, frame: frames.Frame, calls: list[tuple[Callable[[str], None], str]]) -> None:
        channel = self._channels.get(frame.channel)
        if channel is None:
            return  # a frame of an epoch that is over
        try:
            channel.arrive(frame)
        except ValueError as error:
            del self._channels[frame.channel]
            drop("data", f"from NIXL agent {name}: {error}; its connection is closed")
            calls.append((channel.broken, str(error)))

    def _look_around(self, now: float) -> None:
        """Look once a second at what UCX has said, and for peers that are no longer needed."""
        paths, troubles = self.library.said()
        for path in paths:
            text = f"{path.where}: {path} (link speed: {library.speed(path) or 'unknown'})"
            if path.where != "self" and text not in self._said:
                self._said.add(text)
                log.info("NIXL %s, UCX %s, %s", self.library.version, self.library.ucx, text)
        for trouble in troubles:
            log.debug("UCX: %s", trouble)
        for remote in list(self._remotes.values()):
            if not remote.senders and now - remote.since > _LINGER:
                self._forget(remote)

    # -- what is put -------------------------------------------------------------------------------------------------

    def tell(self, remote: Remote, message: bytes) -> None:
        """Send a notification. Raises `ConnectionError`."""
        try:
            self._agents[0].send_notif(remote.names[0], message)
        except self.library.errors as error:
            remote.problem = library.describe(error)
            raise ConnectionError(f"NIXL cannot notify: {remote.problem}") from None

    def settled(self, remote: Remote) -> bool:
        """Whether nothing is under way of a sender that is closed. Raises `ConnectionError`."""
        return (not self.puts.flying and not remote.problem) or self.puts.settled(remote)

    # -- who is there ------------------------------------------------------------------------------------------------

    def know(self, token: int, address: int, agents: Sequence[tuple[str, bytes]]) -> Remote | None:
        """Learn a peer with a mirror, on the writer's side; `enter` is to be called within seconds. None if a put may
        still write there, or this endpoint is retired.

        Raises `TransportError` if these cannot be agents.
        """
        agents = agents[: len(self._agents)]
        names = tuple(name for name, _ in agents)
        with self.lock:
            if self.retired:
                return None
            remote = self._remotes.get(token)
            if remote is None and token not in self._spoiled:
                for earlier in list(self._remotes.values()):
                    if earlier.names == names and earlier.problem:
                        self._forget(earlier)
                for agent, (name, metadata) in zip(self._agents, agents, strict=False):
                    try:
                        said = agent.add_remote_agent(metadata)
                    except self.library.errors as error:
                        raise TransportError(
                            f"NIXL {self.library.version} does not understand agent {name}: "
                            f"{library.describe(error)}; install one version everywhere"
                        ) from error
                    if said != name.encode():
                        raise TransportError(f"the metadata of agent {name} are those of {said!r}")
                remote = self._remotes[token] = Remote(names, token, address)
            if remote is None or remote.problem:
                return None
            remote.since = time.monotonic()
            return remote

    def enter(self, remote: Remote, sender: Sender) -> None:
        """Note that the connection of `sender` is open; `leave` ends that. Raises `ConnectionError`."""
        with self.lock:
            if remote.problem or self._remotes.get(remote.token) is not remote:
                raise ConnectionError(remote.problem or "its reader was forgotten meanwhile")
            remote.senders.add(sender)

    def leave(self, remote: Remote, sender: Sender) -> None:
        """Close the connection of `sender`: what it has under way is not announced any more."""
        with self.lock:
            if not sender.closed:
                sender.closed = True
                remote.senders.discard(sender)
                remote.since = time.monotonic()

    def use_mirror(self, nonce: str) -> MirrorMemory:
        """Returns the mirror for the segment with that nonce, on the reader's side. Raises `TransportError`."""
        with self.lock:
            return self._mirrors.use(nonce)

    def leave_mirror(self, mirror: MirrorMemory) -> None:
        with self.lock:
            self._mirrors.leave(mirror)

    def renew_mirror(self, nonce: str, mirror: MirrorMemory) -> None:
        with self.lock:
            self._mirrors.renew(nonce, mirror)
            self._mirrors.leave(mirror)

    def open_channel(self, channel: FrameReceiver) -> int:
        with self.lock:
            number = secrets.randbits(63)
            self._channels[number] = channel
            return number

    def close_channel(self, number: int) -> None:
        with self.lock:
            self._channels.pop(number, None)

    def metadata(self, mirror: MirrorMemory) -> tuple[tuple[str, bytes], ...]:
        """Returns the name of each rail, how to reach it, and the key to the mirror."""
        with self.lock:
            pairs = zip(self._agents, mirror.handles, strict=True)
            blobs = [agent.get_partial_agent_metadata(handle, True, ["UCX"]) for agent, handle in pairs]
        return tuple(zip(self.names, blobs, strict=True))

    def contacts(self) -> list[bytes]:
        """Returns for each rail what another agent has to know to tell it something."""
        with self.lock:
            return [agent.get_agent_metadata() for agent in self._agents]

    def _forget(self, remote: Remote) -> None:
        del self._remotes[remote.token]
        if not self.puts.forget(remote) or remote.problem:
            self._spoiled.add(remote.token)
        if all(other.names != remote.names for other in self._remotes.values()):
            for agent, name in zip(self._agents, remote.names, strict=False):
                with contextlib.suppress(*self.library.errors):  # it may have gone by itself
                    agent.remove_remote_agent(name)
