"""The agents of this process, one for each rail, whom they know, and what moves them on.

Nothing happens in NIXL unless somebody calls it: neither here, nor at a peer that a put goes to. Whoever drives a
stream calls `poll` while it waits; a thread does so otherwise, ever more rarely, since what is left to be moved then is
the rest of what others have put or are told. Idle, it looks twenty times a second.

A put is announced to the reader when it has ended, if the connection that it belongs to is open still. If that has
closed, at the end of its epoch, its source is used again, and a put that goes on (its target may be stopped) brings
what nobody announces.
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
from ftcomm.errors import TransportError
from ftcomm.transport.nixl import frames, library, network
from ftcomm.transport.nixl.memory import MirrorMemories, MirrorMemory
from ftcomm.transport.nixl.puts import Puts, Remote, Sender
from ftcomm.transport.segment import SIZE

log = logging.getLogger("ftcomm.transport")

PATIENCE = 120.0  # seconds; the driver of an op complains much earlier, and the control plane removes who is silent
_BUSY = 0.002  # seconds after the last progress during which the thread yields and looks again
_AWAKE = 0.05  # ... during which it sleeps as short as it can
_SHORT, _LONG = 50e-6, 0.05  # its sleeps; the long one in an idle group
_DRIVEN = 0.01  # seconds for which it leaves the polling to the driver that has just polled
_LINGER = 5.0  # seconds for which a peer stays known that no connection needs
_PARTING = 2.0  # seconds at the end for what is under way


class Channel(Protocol):
    """Who gets the frames of one channel. Called with the lock of the endpoint."""

    def arrive(self, frame: frames.Frame) -> None:
        """Raises `ValueError` for what cannot be."""

    def broken(self, reason: str) -> None:
        """Called without the lock."""


class Endpoint:
    """Use `ftcomm.transport.nixl.context.Nixl`. All methods from any thread; none waits, but for `close`.

    `devices` are those of each rail, as UCX_NET_DEVICES; "" leaves the choice to UCX. Methods that begin with `_` want
    the lock, and so do `tell`, `settled` and what is called of `puts`.
    """

    def __init__(self, name: str, devices: Sequence[str] = ("",), patience: float = PATIENCE) -> None:
        self.library = library.load()
        self.devices = tuple(devices)
        self.network = network.here()
        incarnation = secrets.token_hex(8)
        self.names = tuple(f"{name}.{incarnation}.{rail}" for rail in range(len(devices)))
        self._agents = [self.library.agent(*pair, self.network) for pair in zip(self.names, devices, strict=True)]
        self.lock = threading.Lock()  # every call of an agent, and what follows from it; never held across a wait
        self.puts = Puts(self.library, self._agents, patience)
        self._mirrors = MirrorMemories(SIZE, self.puts.register, self.puts.deregister)
        self._channels: dict[int, Channel] = {}
        self._remotes: dict[int, Remote] = {}  # by the token of the mirror
        self._spoiled: set[int] = set()  # tokens of mirrors that a put may still write to
        self.greeting = mmap.mmap(-1, mmap.PAGESIZE)  # what is put to show that puts get through
        self._active = time.monotonic()  # when something last moved
        self._driven = 0.0  # when somebody but the thread last looked
        self._looked = 0.0  # when `_look_around` was last called
        self._said: set[str] = set()
        self._closed = False
        self._kick = threading.Event()
        self._dozes = False
        self._thread = threading.Thread(target=self._run, name="ftcomm-nixl", daemon=True)
        fork.take_part(self, f"NIXL agent {name}")  # children share its sockets
        self._thread.start()

    # -- what moves it -----------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Move on what can be; True if a frame has come or a put has ended. Errors are told to those they concern."""
        self._driven = time.monotonic()
        return self._poll_once()

    def rest(self, seconds: float) -> None:
        """Who drives looks again after so many: the thread may leave it to him."""
        self._driven = time.monotonic() + seconds

    def kick(self) -> None:
        """Something is under way: let the thread look at once, and often, unless somebody drives."""
        self._active = now = time.monotonic()
        if self._dozes and now - self._driven > _DRIVEN:
            self._kick.set()

    def close(self) -> None:
        """Let what is under way end, for two seconds at most; idempotent."""
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

    def _run(self) -> None:
        while not self._closed:
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
            return  # of an epoch that is over
        try:
            channel.arrive(frame)
        except ValueError as error:
            del self._channels[frame.channel]
            drop("data", f"from NIXL agent {name}: {error}; its connection is closed")
            calls.append((channel.broken, str(error)))

    def _look_around(self, now: float) -> None:
        """Once a second: what UCX has said, and peers that nobody needs any more."""
        paths, troubles = self.library.said()
        for path in paths:
            text = f"{path.where}: {path} (link speed: {library.speed(path) or 'unknown'})"
            if path.where != "self" and text not in self._said:
                self._said.add(text)
                log.info("NIXL %s, UCX %s, %s", self.library.version, self.library.ucx, text)
        for trouble in troubles:
            log.debug("UCX: %s", trouble)
        for remote in list(self._remotes.values()):
            if not remote.users and now - remote.since > _LINGER:
                self._forget(remote)

    # -- what is put -------------------------------------------------------------------------------------------------

    def tell(self, remote: Remote, message: bytes) -> None:
        """A notification. Raises `ConnectionError`."""
        try:
            self._agents[0].send_notif(remote.names[0], message)
        except self.library.errors as error:
            remote.problem = library.describe(error)
            raise ConnectionError(f"NIXL cannot notify: {remote.problem}") from None

    def settled(self, remote: Remote) -> bool:
        """True if nothing is under way of a sender that is closed. Raises `ConnectionError`."""
        return (not self.puts.flying and not remote.problem) or self.puts.settled(remote)

    # -- who is there ------------------------------------------------------------------------------------------------

    def know(self, token: int, address: int, agents: Sequence[tuple[str, bytes]]) -> Remote | None:
        """The writer's side: a peer with a mirror. To be given back by `leave`. None if a put may still write there.

        Raises `TransportError` for what no agent can be.
        """
        agents = agents[: len(self._agents)]
        names = tuple(name for name, _ in agents)
        with self.lock:
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
            remote.users += 1
            return remote

    def leave(self, remote: Remote, sender: Sender) -> None:
        """The connection of `sender` is closed; what it has under way is not announced any more."""
        with self.lock:
            if not sender.closed:
                sender.closed = True
                remote.users -= 1
                remote.since = time.monotonic()

    def use_mirror(self, nonce: str) -> MirrorMemory:
        """The reader's side: the mirror for the segment with that nonce. Raises `TransportError`."""
        with self.lock:
            return self._mirrors.use(nonce)

    def leave_mirror(self, mirror: MirrorMemory) -> None:
        with self.lock:
            self._mirrors.leave(mirror)

    def renew_mirror(self, nonce: str, mirror: MirrorMemory) -> None:
        with self.lock:
            self._mirrors.renew(nonce, mirror)
            self._mirrors.leave(mirror)

    def open_channel(self, channel: Channel) -> int:
        with self.lock:
            number = secrets.randbits(63)
            self._channels[number] = channel
            return number

    def close_channel(self, number: int) -> None:
        with self.lock:
            self._channels.pop(number, None)

    def metadata(self, mirror: MirrorMemory) -> tuple[tuple[str, bytes], ...]:
        """Of each rail: its name, how to reach it, and the key to the mirror."""
        with self.lock:
            pairs = zip(self._agents, mirror.handles, strict=True)
            blobs = [agent.get_partial_agent_metadata(handle, True, ["UCX"]) for agent, handle in pairs]
        return tuple(zip(self.names, blobs, strict=True))

    def _forget(self, remote: Remote) -> None:
        del self._remotes[remote.token]
        if not self.puts.forget(remote) or remote.problem:
            self._spoiled.add(remote.token)
        if all(other.names != remote.names for other in self._remotes.values()):
            for agent, name in zip(self._agents, remote.names, strict=False):
                with contextlib.suppress(*self.library.errors):  # it may have gone by itself
                    agent.remove_remote_agent(name)
