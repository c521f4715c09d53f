"""The agents of this process, one for each rail, the puts that are under way, and what moves them on.

Nothing happens in NIXL unless somebody calls it: neither here, nor at a peer that a put goes to. Whoever drives a
stream calls `poll` while it waits; a thread does so otherwise, ever more rarely, since what is left to be moved then is
the rest of what others have put or are told. Idle, it looks twenty times a second.

A put is followed to its end only as long as the connection that it belongs to is open. If that closes, at the end of
its epoch, the staging is used again, and a put that goes on (its target may be stopped) brings what nobody has
announced. NIXL sends the notification when the end of the put is seen here; so it is not looked for, and the
notification never goes.

NIXL has no deadline either. A put that makes no progress for `patience` seconds counts as failed, as one does that ends
with an error: then nobody knows what it has written or will write, and that mirror is not written to again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ftcomm.control.dropped import drop
from ftcomm.errors import TransportError
from ftcomm.transport import nixl_frames as frames
from ftcomm.transport import nixl_library
from ftcomm.transport.nixl_memory import DRAM, Mirror, Mirrors, Region, Registrations, Shadow, address_of, keep
from ftcomm.transport.nixl_window import Window
from ftcomm.transport.segment import CHUNK, SIZE, SLOTS

log = logging.getLogger("ftcomm.transport")

PATIENCE = 120.0  # seconds; the driver of an op complains much earlier, and the control plane removes who is silent
_BUSY = 0.002  # seconds after the last progress during which the thread yields and looks again
_AWAKE = 0.05  # ... during which it sleeps as short as it can
_SHORT, _LONG = 50e-6, 0.05  # its sleeps; the long one in an idle group
_DRIVEN = 0.01  # seconds for which it leaves the polling to the driver that has just polled
_LINGER = 5.0  # seconds for which a peer stays known that no connection needs
_PARTING = 2.0  # seconds at the end for what is under way

Place = tuple[int, int, int, int]  # rail, address here, address there, bytes


class Channel(Protocol):
    """Who gets the frames of one channel. Called with the lock of the endpoint."""

    def arrive(self, frame: frames.Frame) -> None:
        """Raises `ValueError` for what cannot be."""

    def broken(self, reason: str) -> None:
        """Called without the lock."""


class Sender:
    """Whose puts are under way. `closed` is set and read with the lock of the endpoint."""

    closed = False

    def broken(self, reason: str) -> None:
        """Called without the lock."""


@dataclasses.dataclass(eq=False)
class Put:
    """One transfer, prepared once and posted again and again, each time with another notification."""

    handle: Any
    remote: Remote
    region: Region
    place: Place
    payload: memoryview | None = None  # keeps the memory there for as long as the put is under way
    sender: Sender | None = None  # None: not under way
    since: float = 0.0


class Remote:
    """The agents of a peer, as the writer knows them, and its mirror. Guarded by the lock of the endpoint."""

    def __init__(self, names: tuple[str, ...], token: int, address: int) -> None:
        self.names, self.token, self.address = names, token, address
        self.windows = [Window(SLOTS * CHUNK // len(names)) for _ in names]
        self.shadow: Shadow | None = None
        self.idle: dict[tuple[Place, Region], list[Put]] = {}
        self.left: list[Put] = []  # under way when their sender closed
        self.users = 0
        self.since = time.monotonic()  # when the last of them left
        self.problem = ""  # why nothing can be put any more


class Endpoint:
    """Use `ftcomm.transport.nixl.Nixl`. All methods from any thread; none waits, but for `close`.

    `devices` are those of each rail, as UCX_NET_DEVICES; "" leaves the choice to UCX. Methods that begin with `_` want
    the lock, and so do `put` and `tell`.
    """

    def __init__(self, name: str, devices: Sequence[str] = ("",), patience: float = PATIENCE) -> None:
        self.library = nixl_library.load()
        self.devices, self._patience = tuple(devices), patience
        incarnation = secrets.token_hex(8)
        self.names = tuple(f"{name}.{incarnation}.{rail}" for rail in range(len(devices)))
        self._agents = [self.library.agent(*pair) for pair in zip(self.names, devices, strict=True)]
        self.lock = threading.Lock()  # every call of an agent, and what follows from it; never held across a wait
        self._registrations = Registrations(self._register, self._deregister, self._forget_region)
        self._mirrors = Mirrors(SIZE, self._register, self._deregister)
        self._channels: dict[int, Channel] = {}
        self._remotes: dict[int, Remote] = {}  # by the token of the mirror
        self._spoiled: set[int] = set()  # tokens of mirrors that a put may still write to
        self._flying: list[Put] = []
        self._greeting = mmap.mmap(-1, mmap.PAGESIZE)
        self._active = time.monotonic()  # when something last moved
        self._driven = 0.0  # when somebody but the thread last looked
        self._looked = 0.0  # when `_look_around` was last called
        self._said: set[str] = set()
        self._closed = False
        self._kick = threading.Event()
        self._dozes = False
        self._thread = threading.Thread(target=self._run, name="ftcomm-nixl", daemon=True)
        self._thread.start()

    # -- what moves it -----------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Move on what can be; True if a frame has come or a put has ended. Errors are told to those they concern."""
        self._driven = time.monotonic()
        return self._poll_once()

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
                        self.put(remote, 0, memoryview(self._greeting)[:8], 8, b"", parting)
        while not self._closed and self._flying and time.monotonic() < end:
            if not self._poll_once():
                time.sleep(_SHORT)
        self._closed = True
        self._kick.set()
        self._thread.join(_PARTING)

    def _run(self) -> None:
        while not self._closed:
            driven = time.monotonic() - self._driven < _DRIVEN
            if not driven:
                self._poll_once()
            idle = time.monotonic() - self._active
            if driven or idle > _AWAKE:
                self._dozes = not driven
                self._kick.wait(_DRIVEN if driven else min(_LONG, idle / 10))
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
            moved = self._take(calls) | self._follow(calls)
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
                        frame = frames.unpack(message)
                    except ValueError as error:
                        drop("data", f"from NIXL agent {name}: {error}")
                        continue
                    channel = self._channels.get(frame.channel)
                    if channel is None:
                        continue  # of an epoch that is over
                    try:
                        channel.arrive(frame)
                    except ValueError as error:
                        del self._channels[frame.channel]
                        drop("data", f"from NIXL agent {name}: {error}; its connection is closed")
                        calls.append((channel.broken, str(error)))
        return came

    def _follow(self, calls: list[tuple[Callable[[str], None], str]]) -> bool:
        ended = False
        flying, self._flying = self._flying, []
        for put in flying:
            if put.sender is None or put.sender.closed:
                put.remote.left.append(put)
                continue
            problem = self._look_at(put)
            if problem is None:
                self._flying.append(put)
                continue
            ended = True
            if problem:
                put.remote.left.append(put)
                calls.append((put.sender.broken, problem))
        return ended

    def _look_at(self, put: Put) -> str | None:
        """None: under way; "": done, and free for another; else why it has failed. Sends the notification of a put that
        has ended."""
        nbytes = put.place[3]
        waited = time.monotonic() - put.since
        try:
            state = self._agents[put.place[0]].check_xfer_state(put.handle)
        except self.library.errors as error:
            problem = f"a put of {nbytes} bytes: {nixl_library.describe(error)}"
        else:
            if state == "PROC" and waited < self._patience:
                return None
            problem = "" if state == "DONE" else f"a put of {nbytes} bytes is at {state} after {waited:.1f} s"
        if problem:
            self._spoil(put.remote, problem)
        else:
            self._ended(put)
        return problem

    def _ended(self, put: Put) -> None:
        put.sender = put.payload = None
        put.remote.windows[put.place[0]].close(put.place[3])
        self._registrations.release(put.region)
        put.remote.idle.setdefault((put.place, put.region), []).append(put)

    def _look_around(self, now: float) -> None:
        """Once a second: what UCX has said, and peers that nobody needs any more."""
        paths, troubles = self.library.said()
        for path in paths:
            text = f"{path.where}: {path} (link speed: {nixl_library.speed(path) or 'unknown'})"
            if path.where != "self" and text not in self._said:
                self._said.add(text)
                log.info("NIXL %s, UCX %s, %s", self.library.version, self.library.ucx, text)
        for trouble in troubles:
            log.debug("UCX: %s", trouble)
        for remote in list(self._remotes.values()):
            if not remote.users and now - remote.since > _LINGER:
                self._forget(remote)

    # -- what is put -------------------------------------------------------------------------------------------------

    def put(self, remote: Remote, rail: int, payload: memoryview, offset: int, message: bytes, sender: Sender) -> None:
        """Post a put of `payload` to `offset` in the mirror, which `message` announces when it is there. `payload` must
        stay as it is until then. Raises `ConnectionError` if the peer cannot be reached any more."""
        nbytes = len(payload)
        if not isinstance(payload.obj, mmap.mmap):
            if remote.shadow is None:
                remote.shadow = Shadow(SIZE)
            payload = remote.shadow.hold(payload, offset)
        region = self._registrations.lease_map(payload.obj)  # type: ignore[arg-type]
        put = None
        try:
            put = self._prepared(remote, (rail, address_of(payload), remote.address + offset, nbytes), region)
            put.payload, put.sender, put.since = payload, sender, time.monotonic()
            remote.windows[rail].open(nbytes)
            state = self._agents[rail].transfer(put.handle, message)
        except self.library.errors as error:
            if put is not None:
                remote.left.append(put)  # whatever it has begun; and no handle may be freed without the lock
            self._spoil(remote, nixl_library.describe(error))
            raise ConnectionError(f"NIXL cannot put: {remote.problem}") from None
        if state == "DONE":
            self._ended(put)
        else:
            self._flying.append(put)

    def tell(self, remote: Remote, message: bytes) -> None:
        """A notification without a put. Raises `ConnectionError`."""
        try:
            self._agents[0].send_notif(remote.names[0], message)
        except self.library.errors as error:
            self._spoil(remote, nixl_library.describe(error))
            raise ConnectionError(f"NIXL cannot notify: {remote.problem}") from None

    def settled(self, remote: Remote) -> bool:
        """True if nothing is under way of a sender that is closed. Raises `ConnectionError`."""
        if self._flying:
            remote.left += [put for put in self._flying if put.remote is remote and put.sender.closed]
            self._flying = [put for put in self._flying if put not in remote.left]
        for put in tuple(remote.left):
            if not remote.problem and self._look_at(put) == "":
                remote.left.remove(put)
        if remote.problem:
            raise ConnectionError(remote.problem)
        return not remote.left

    def greet(self, remote: Remote, channel: int, sender: Sender) -> None:
        """The first frame, by every rail. Raises `ConnectionError`."""
        with self.lock:
            for rail in range(len(remote.names)):
                frame = frames.Frame(frames.GREETING, channel, 0, rail, len(remote.names), 0, 0, 0, (0, 0, 0))
                payload = memoryview(self._greeting)[:8]
                self.put(remote, rail, payload, 8 * rail, frames.pack(frame), sender)
        self.kick()

    def _prepared(self, remote: Remote, place: Place, region: Region) -> Put:
        idle = remote.idle.get((place, region))
        if idle:
            return idle.pop()
        rail, here, there, nbytes = place
        agent = self._agents[rail]
        local = agent.get_xfer_descs([(here, nbytes, region.device)], region.kind)
        far = agent.get_xfer_descs([(there, nbytes, 0)], DRAM)
        return Put(agent.initialize_xfer("WRITE", local, far, remote.names[rail], b""), remote, region, place)

    def _spoil(self, remote: Remote, problem: str) -> None:
        """Nobody knows what a put has written, or will write."""
        remote.problem = remote.problem or problem
        self._spoiled.add(remote.token)

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
                            f"{nixl_library.describe(error)}; install one version everywhere"
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

    def use_mirror(self, nonce: str) -> Mirror:
        """The reader's side: the mirror for the segment with that nonce. Raises `TransportError`."""
        with self.lock:
            return self._mirrors.use(nonce)

    def leave_mirror(self, mirror: Mirror) -> None:
        with self.lock:
            self._mirrors.leave(mirror)

    def renew_mirror(self, nonce: str, mirror: Mirror) -> None:
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

    def metadata(self, mirror: Mirror) -> tuple[tuple[str, bytes], ...]:
        """Of each rail: its name, how to reach it, and the key to the mirror."""
        with self.lock:
            pairs = zip(self._agents, mirror.handles, strict=True)
            blobs = [agent.get_partial_agent_metadata(handle, True, ["UCX"]) for agent, handle in pairs]
        return tuple(zip(self.names, blobs, strict=True))

    def _forget(self, remote: Remote) -> None:
        del self._remotes[remote.token]
        left = [put for put in self._flying if put.remote is remote] + remote.left
        if left:
            self._spoil(remote, "forgotten with puts under way")
            for put in left:  # it may be read until its target wakes up or dies
                keep(put.payload)
            self._flying = [put for put in self._flying if put.remote is not remote]
        for put in [*left, *(put for puts in remote.idle.values() for put in puts)]:
            with contextlib.suppress(*self.library.errors):  # one that is under way is cancelled, if that is possible
                put.handle.release()
        if all(other.names != remote.names for other in self._remotes.values()):
            for agent, name in zip(self._agents, remote.names, strict=False):
                with contextlib.suppress(*self.library.errors):  # it may have gone by itself
                    agent.remove_remote_agent(name)

    def _register(self, address: int, nbytes: int, kind: str, device: int) -> list[Any]:
        try:
            return [agent.register_memory([(address, nbytes, device, "")], kind) for agent in self._agents]
        except self.library.errors as error:
            raise TransportError(
                f"NIXL cannot register {nbytes} bytes of {kind}: {nixl_library.describe(error)}. RDMA needs a limit of "
                f"locked memory (ulimit -l) above what is staged; see `ftcomm doctor`."
            ) from error

    def _deregister(self, handles: list[Any]) -> None:
        for agent, handle in zip(self._agents, handles, strict=True):
            with contextlib.suppress(*self.library.errors):  # nobody needs it any more, whatever NIXL thinks of it
                agent.deregister_memory(handle)

    def _forget_region(self, region: Region) -> None:
        """Transfers that were prepared for it name a registration that will be gone."""
        for remote in self._remotes.values():
            for key in [key for key in remote.idle if key[1] is region]:
                for put in remote.idle.pop(key):
                    with contextlib.suppress(*self.library.errors):
                        put.handle.release()
