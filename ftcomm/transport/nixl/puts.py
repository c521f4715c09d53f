"""Puts are prepared once and posted many times. They are followed to their end, also those that have failed.

Costs within a host, by CMA: a put of 512 KB takes 50 us from the cache and 100 from beyond; to prepare one takes 17 us,
and to post it again 5. So puts are kept ready by place.

The sender is told when its put has ended, and then announces it (`ftcomm.transport.nixl.writer`). NIXL can put and
notify in one call, which costs 30 us more than the put; a separate notification costs 7, and serves for several puts.

NIXL has no deadline. A put without progress for `timeout` seconds counts as failed, like one that ends with an error:
then it is unknown what it has written or will write, and that mirror is not written to again.

If a put to a known target cannot be prepared, the fault is in this process: nothing has left it. Then everything is
registered anew, and if that does not help, `CannotSend` says that this rank is in trouble.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ftcomm.errors import TransportError
from ftcomm.transport.base import CannotSend
from ftcomm.transport.nixl.library import NixlLibrary, describe
from ftcomm.transport.nixl.memory import DRAM, Region, Registrations, address_of, keep, source_of
from ftcomm.transport.nixl.window import Window
from ftcomm.transport.segment import STAGED

log = logging.getLogger("ftcomm.transport")

_PREPARED = 2048  # puts to a peer that are kept ready: 1 GB in puts of a chunk

PutSpan = tuple[int, int, int, int]  # rail, address here, address there, bytes


class Sender:
    """A writer whose puts are under way. `closed` is set and read with the lock of the endpoint."""

    closed = False

    def ended(self, frame: Any) -> None:
        """Learn that the put posted with `frame` has ended, not at once. Called with the lock, and not if the sender is
        closed. Raises `ConnectionError`."""

    def broken(self, reason: str) -> None:
        """Learn that a put has failed. Called without the lock."""

    def end(self) -> None:
        """End the connection: the other side hears of it. Called without the lock."""


@dataclasses.dataclass(eq=False)
class Put:
    """One transfer, which is prepared once and posted many times."""

    handle: Any
    remote: Remote
    region: Region
    place: PutSpan
    payload: Any = None  # keeps the memory there for as long as the put is under way
    sender: Sender | None = None  # None: not under way
    frame: Any = None
    since: float = 0.0


class Remote:
    """The agents of a peer, as the writer knows them, and its mirror. Guarded by the lock of the endpoint."""

    def __init__(self, names: tuple[str, ...], token: int, address: int) -> None:
        self.names, self.token, self.address = names, token, address
        self.windows = [Window(STAGED // len(names)) for _ in names]
        self.idle: OrderedDict[PutSpan, list[Put]] = OrderedDict()  # the least recently used first
        self.failed: list[Put] = []
        self.senders: set[Sender] = set()  # senders with open connections
        self.since = time.monotonic()  # when the last of them left
        self.problem = ""  # why no more puts are possible


class Puts:
    """The puts of one endpoint. All methods need its lock."""

    def __init__(self, library: NixlLibrary, agents: Sequence[Any], timeout: float) -> None:
        self._errors, self._agents, self.timeout = library.errors, agents, timeout
        self.registrations = Registrations(self.register, self.deregister, self._forget_region)
        self.flying: list[Put] = []
        self._remotes: set[Remote] = set()  # peers with puts kept ready

    def post(self, remote: Remote, rail: int, payload: Any, offset: int, sender: Sender, frame: Any = None) -> bool:
        """Put `payload`, a memoryview or an array on a GPU, to `offset` in the mirror. True if the put has ended at
        once; otherwise `sender` is told of `frame` when it has. `payload` must stay as it is until then. Raises
        `ConnectionError` if the peer cannot be reached any more, `CannotSend` if this process cannot put anything to
        any peer."""
        put = self._ready(remote, rail, payload, offset)
        remote.windows[rail].open(put.place[3])
        try:
            state = self._agents[rail].transfer(put.handle)
        except self._errors as error:
            remote.failed.append(put)  # whatever it has written
            remote.problem = describe(error)
            raise ConnectionError(f"NIXL cannot put: {remote.problem}") from None
        if state == "DONE":
            self._done(put)
            return True
        put.sender, put.frame, put.since = sender, frame, time.monotonic()
        self.flying.append(put)
        return False

    def follow(self, calls: list[tuple[Callable[[str], None], str]]) -> bool:
        """Look at the puts under way; True if one has ended. Adds to `calls` what to call without the lock, and the
        reason for it."""
        flying, self.flying = self.flying, []
        for put in flying:
            sender, frame = put.sender, put.frame
            assert sender is not None
            problem = self._look_at(put)
            if problem is None:
                self.flying.append(put)
                continue
            if problem:
                put.remote.failed.append(put)
                put.remote.problem = put.remote.problem or problem
            if sender.closed:
                continue
            try:
                if not problem:
                    sender.ended(frame)
            except ConnectionError as error:
                problem = str(error)
            if problem:
                calls.append((sender.broken, problem))
        return len(self.flying) < len(flying)

    def settled(self, remote: Remote) -> bool:
        """Whether nothing is under way of a sender that is closed. Raises `ConnectionError`."""
        if remote.problem:
            raise ConnectionError(remote.problem)
        return not any(put.remote is remote and put.sender is not None and put.sender.closed for put in self.flying)

    def forget(self, remote: Remote) -> bool:
        """Forget a peer, to which nothing is put any more. False if a put may still be under way."""
        left = [put for put in self.flying if put.remote is remote] + remote.failed
        ended = []
        for put in left:
            if self._reads(put):
                keep(put.payload)  # until its target wakes up or dies, which cannot be known
            else:
                ended.append(put)
        self.flying = [put for put in self.flying if put.remote is not remote]
        self._release([*left, *(put for puts in remote.idle.values() for put in puts)])
        for put in ended:
            self.registrations.release(put.region)
        remote.idle.clear()
        remote.failed.clear()
        self._remotes.discard(remote)
        return not left

    def register(self, address: int, nbytes: int, kind: str, device: int) -> list[Any]:
        try:
            return [agent.register_memory([(address, nbytes, device, "")], kind) for agent in self._agents]
        except self._errors as error:
            raise TransportError(
                f"NIXL cannot register {nbytes} bytes of {kind}: {describe(error)}. RDMA needs a limit of "
                f"locked memory (ulimit -l) above what is staged and reduced; see `ftcomm doctor`."
            ) from error

    def deregister(self, handles: list[Any]) -> None:
        for agent, handle in zip(self._agents, handles, strict=True):
            with contextlib.suppress(*self._errors):  # an error does not matter here
                agent.deregister_memory(handle)

    def _ready(self, remote: Remote, rail: int, payload: Any, offset: int) -> Put:
        """Returns a put of `payload`, kept ready or new, with a lease on its memory."""
        if isinstance(payload, memoryview):
            place = rail, address_of(payload), remote.address + offset, len(payload)
            idle = remote.idle.get(place)
            if idle and self.registrations.renew(idle[-1].region):
                put = idle.pop()
                put.payload = payload
                return put
        try:
            return self._prepare(remote, rail, payload, offset)
        except self._errors as error:
            self._check_known(remote, rail, error)
            log.warning("NIXL cannot prepare a put: %s; registering memory anew", describe(error))
        except TransportError as error:  # this memory cannot be registered
            raise CannotSend(str(error)) from None
        self.registrations.forget_all()
        failures: tuple[type[Exception], ...] = (TransportError, *self._errors)
        try:
            return self._prepare(remote, rail, payload, offset)
        except failures as error:
            raise CannotSend(f"NIXL cannot put: {describe(error)}") from None

    def _prepare(self, remote: Remote, rail: int, payload: Any, offset: int) -> Put:
        source = source_of(payload)
        place = rail, source.address, remote.address + offset, source.nbytes
        region = self.registrations.lease(source.owner, source.base, source.extent, source.kind, source.device)
        agent = self._agents[rail]
        try:
            here = agent.get_xfer_descs([(source.address, source.nbytes, region.device)], region.kind)
            there = agent.get_xfer_descs([(place[2], source.nbytes, 0)], DRAM)
            handle = agent.initialize_xfer("WRITE", here, there, remote.names[rail], b"")
        except BaseException:
            self.registrations.release(region)
            raise
        return Put(handle, remote, region, place, payload)

    def _check_known(self, remote: Remote, rail: int, error: BaseException) -> None:
        """Raise `ConnectionError` if `error` arose because NIXL has forgotten the agent, as it does when a put to
        another mirror of that agent was cut off, say."""
        if not self._agents[rail].check_remote_metadata(remote.names[rail]):
            remote.problem = describe(error)
            raise ConnectionError(f"NIXL cannot put: {remote.problem}: agent {remote.names[rail]} was cut off")

    def _look_at(self, put: Put) -> str | None:
        """Returns None if the put is under way, "" if it is done and free for another, and otherwise why it has
        failed."""
        nbytes = put.place[3]
        waited = time.monotonic() - put.since
        try:
            state = self._agents[put.place[0]].check_xfer_state(put.handle)
        except self._errors as error:
            return f"a put of {nbytes} bytes: {describe(error)}"
        if state == "DONE":
            self._done(put)
            return ""
        if state == "PROC" and waited < self.timeout:
            return None
        return f"a put of {nbytes} bytes is at {state} after {waited:.1f} s"

    def _reads(self, put: Put) -> bool:
        """Whether the put may still read its source."""
        try:
            return bool(self._agents[put.place[0]].check_xfer_state(put.handle) == "PROC")
        except self._errors:
            return False

    def _done(self, put: Put) -> None:
        put.sender = put.payload = put.frame = None
        remote = put.remote
        remote.windows[put.place[0]].close(put.place[3])
        self.registrations.release(put.region)
        idle = remote.idle
        self._remotes.add(remote)
        idle.setdefault(put.place, []).append(put)
        idle.move_to_end(put.place)
        if len(idle) > _PREPARED:  # sizes that do not repeat
            self._release(idle.popitem(last=False)[1])

    def _forget_region(self, region: Region) -> None:
        """Forget the transfers that were prepared for a region, since its registration will be gone."""
        for remote in self._remotes:
            for place, puts in list(remote.idle.items()):
                self._release([put for put in puts if put.region is region])
                puts[:] = [put for put in puts if put.region is not region]
                if not puts:
                    del remote.idle[place]

    def _release(self, puts: Iterable[Put]) -> None:
        for put in puts:
            with contextlib.suppress(*self._errors):  # a put under way is cancelled, if possible
                put.handle.release()
