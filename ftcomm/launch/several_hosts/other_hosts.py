"""The launchers of the other hosts, if several start one job: what they tell this one, and it them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from ftcomm.control.handshake import Credentials
from ftcomm.control.messages import Event
from ftcomm.control.server import Serve
from ftcomm.errors import InitError
from ftcomm.launch.options import RunOptions
from ftcomm.launch.policy import CHECKPOINT
from ftcomm.launch.several_hosts.hub import LauncherHub
from ftcomm.launch.several_hosts.link import LauncherLink
from ftcomm.launch.several_hosts.messages import (
    LAUNCHER,
    CoordinatorSaid,
    Heard,
    JobIsLost,
    LauncherMessage,
    RankFailed,
    ReplicaIs,
    WhatWasHeard,
)
from ftcomm.launch.several_hosts.node_place import NodePlace
from ftcomm.launch.several_hosts.refusals import Refusals
from ftcomm.transport.address import look_up, own_address


class HostsListener(Protocol):
    """The listener to the other hosts. All of it is called on the event loop and must not block."""

    def event(self, event: Event) -> None: ...  # of the coordinator; not on host 0
    def replica(self, message: ReplicaIs) -> None: ...  # what has become of a replica of another host
    def heard(self, message: Heard) -> None: ...  # what the coordinator has heard of a replica; not on host 0
    def judge(self, replica: int, starts: int) -> None: ...  # all that the coordinator had heard of it has been told
    def anew(self, node: int) -> None: ...  # another launcher has taken the place of that of this host; on host 0
    def failed(self, replica: int, code: int) -> None: ...  # a rank of another host has exited by an error; on host 0
    def lost(self, reason: str) -> None: ...  # the job, and why
    def changed(self) -> None: ...  # a launcher has come or gone
    def known(self, replica: int, question: int) -> Heard: ...  # what was heard of a replica; on host 0
    def states(self) -> Iterable[ReplicaIs | CoordinatorSaid]: ...  # what a launcher that comes has to know
    def stands(self) -> float: ...  # since when the training does here, by the monotonic clock; not on host 0
    def log(self, text: str) -> None: ...


class OtherHosts:
    """The others, seen from host `options.node.rank`; none, if one host has the whole job. On one event loop; only
    `addresses` blocks."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._changed = asyncio.Event()
        self._interrupted = False
        self._ready = False  # to hear of replicas
        self._early: list[Callable[[], None]] = []  # what to do with messages that came before
        self._questions = 0
        self._unjudged: dict[int, tuple[int, int]] = {}  # replica that has ended -> its start, number of the question
        self._unreached_since = 0.0  # of the loop's clock; while host 0 is not reached
        self._hub: LauncherHub | None = None
        self._link: LauncherLink | None = None

    def open(self, place: NodePlace, run: str, credentials: Credentials, listener: HostsListener) -> None:
        """Have others, from here on. `run` names this launcher and no later one."""
        self._place, self._run, self._credentials, self._listener = place, run, credentials, listener
        self._init_timeout = self._options.init_timeout
        if place.rank == 0:
            self._hub = LauncherHub(
                place.count, self._options.alike, self._heard_from, self._on_change, self._on_new, listener.states
            )

    def addresses(self) -> tuple[str, str]:
        """Returns the addresses of host 0 and of this host. May block for a time. Raises `SettingsError`."""
        asked = {**os.environ, **self._options.env}.get("FTCOMM_HOST", "")
        towards = self._place.host, self._place.port
        here = own_address(asked, towards, "--rdzv-endpoint", self._init_timeout)  # the name is known from here on
        return look_up(*towards, socket.SOCK_STREAM)[1][0], here

    @property
    def served(self) -> Mapping[str, Serve]:
        """Returns what host 0 serves at the port of its coordinator."""
        return {} if self._hub is None else {LAUNCHER: self._hub.serve}

    async def gather(self, store: str) -> None:
        """Wait on host 0 until all others have come, then let them begin. Raises `InitError`."""
        hub = self._hub
        assert hub is not None
        if hub.missing:
            self._listener.log(f"waiting for the launchers of hosts {_listed(hub.missing)}")
        if not await self._until(lambda: not hub.missing):
            raise InitError(
                f"the launchers of hosts {_listed(hub.missing)} have not come to {self._place.endpoint} in time "
                "(--init-timeout). Start the same command there with their --node-rank and the same FTCOMM_TOKEN, "
                "and see that this port is reached."
            )
        hub.begin(store, self._credentials.job)

    async def follow(self, address: str) -> tuple[str, str]:
        """Wait on another host until host 0 lets it begin; returns the endpoint of torch's store and the name of the
        job. Raises `InitError`."""
        link = self._link = LauncherLink(
            (address, self._place.port),
            self._place,
            self._run,
            self._options.alike,
            self._credentials,
            self._heard,
            self._on_change,
            self._listener.log,
            Refusals(self._place.endpoint, self._options.timeouts.op, self._listener.stands),
        )
        if not await self._until(lambda: link.begun is not None):
            raise InitError(
                f"host 0 at {self._place.endpoint} has not let this one begin in time (--init-timeout): {link.why}"
            )
        if link.begun is None:  # drained before it has begun, so it needs neither
            return self._place.endpoint, ""
        return link.begun.store, link.begun.job

    def interrupt(self) -> None:
        """Stop waiting for the others."""
        self._interrupted = True
        self._changed.set()

    def ready(self) -> None:
        """Hear of replicas from now on."""
        self._ready = True
        early, self._early = self._early, []
        for act in early:
            act()
        self._introduce()

    def endpoint(self, address: str) -> str:
        """Returns the endpoint of the coordinator at the address of host 0."""
        return dataclasses.replace(self._place, host=address).endpoint

    @property
    def is_first(self) -> bool:
        """Whether this is host 0, or the only one."""
        return self._options.node is None or self._options.node.rank == 0

    @property
    def reached(self) -> bool:
        """Whether host 0 is heard of."""
        return self._link is None or self._link.is_up

    @property
    def is_given_up(self) -> bool:
        """Whether host 0 has not been reached for the init timeout."""
        since = self._unreached_since
        return since > 0 and not self.reached and asyncio.get_running_loop().time() - since > self._init_timeout

    @property
    def given_up(self) -> str:
        """Says so."""
        return (
            f"host 0 at {self._place.endpoint}, which has the coordinator, is not reached (--init-timeout, "
            f"{self._init_timeout:g} s), so no replica can join. {CHECKPOINT}: the same command on each host"
        )

    def is_missing(self, replica: int) -> bool:
        """Whether, on host 0, the launcher of a replica is not connected."""
        return self._hub is not None and self._place.node_of(replica, self._options.replicas) in self._hub.missing

    def tell(self, message: ReplicaIs | JobIsLost | RankFailed) -> None:
        """Tell all of it."""
        if self._hub is not None:
            self._hub.send(message)
        elif self._link is not None:
            self._link.send(message)

    def tell_event(self, event: Event) -> None:
        """Tell the others, from host 0, what the coordinator has said."""
        if self._hub is not None:
            self._hub.event(event)

    def asks(self, replica: int, starts: int) -> bool:
        """Let `judge` be called once all has arrived that the coordinator has heard of a replica that has ended.
        Returns False if there is nothing to wait for."""
        if self._link is None or not self._link.is_up:
            return False
        self._unjudged[replica] = starts, self._questions + 1
        self._ask(replica)
        return True

    def _ask(self, replica: int) -> None:
        assert self._link is not None
        self._questions += 1
        self._link.send(WhatWasHeard(replica, self._questions))

    def close(self) -> None:
        """Say what has been said, and end."""
        if self._hub is not None:
            self._hub.close()
        if self._link is not None:
            self._link.close()

    async def _until(self, true: Callable[[], bool]) -> bool:
        """Wait until something holds that another host changes, or `interrupt`; returns False after the init
        timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._init_timeout
        while not (true() or self._interrupted):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - loop.time()))
            except asyncio.TimeoutError:
                return False
        return True

    def _on_change(self) -> None:
        self._changed.set()
        if self._link is not None and not self._link.is_up:
            self._unreached_since = self._unreached_since or asyncio.get_running_loop().time()
        else:
            self._unreached_since = 0.0
        if not self._ready:
            return
        self._introduce()
        if not self.reached:
            unjudged, self._unjudged = self._unjudged, {}
            for replica, (starts, _) in unjudged.items():
                self._listener.judge(replica, starts)
        self._listener.changed()

    def _introduce(self) -> None:
        """Say how things stand here, and ask how they stand there."""
        if self._link is None or not self._link.is_up:
            return
        for message in self._listener.states():
            if isinstance(message, ReplicaIs) and self._is_mine(message):
                self._link.send(message)
        for replica in range(self._options.replicas):
            self._ask(replica)

    def _on_new(self, node: int) -> None:
        if self._ready:
            self._listener.anew(node)

    def _is_mine(self, message: ReplicaIs) -> bool:
        return message.replica in self._options.started_here

    def _heard_from(self, node: int, message: LauncherMessage) -> None:
        """A message to host 0."""
        if not self._ready:
            self._early.append(lambda: self._heard_from(node, message))
        elif isinstance(message, JobIsLost):
            self._listener.lost(message.reason)
        elif isinstance(message, WhatWasHeard) and message.replica < self._options.replicas:
            assert self._hub is not None
            self._hub.send_to(node, self._listener.known(message.replica, message.number))
        elif isinstance(message, ReplicaIs | RankFailed) and message.replica < self._options.replicas:
            if self._place.node_of(message.replica, self._options.replicas) != node:
                return
            if isinstance(message, RankFailed):
                self._listener.failed(message.replica, message.code)
            else:
                self._listener.replica(message)

    def _heard(self, message: LauncherMessage) -> None:
        """A message from host 0."""
        if not self._ready:
            self._early.append(lambda: self._heard(message))
        elif isinstance(message, CoordinatorSaid):
            self._listener.event(message.event)
        elif isinstance(message, JobIsLost):
            self._listener.lost(message.reason)
        elif isinstance(message, ReplicaIs) and message.replica < self._options.replicas and not self._is_mine(message):
            self._listener.replica(message)
        elif isinstance(message, Heard) and message.replica < self._options.replicas:
            self._listener.heard(message)
            starts, number = self._unjudged.get(message.replica, (0, 0))
            if number == message.number:
                del self._unjudged[message.replica]
                self._listener.judge(message.replica, starts)


def _listed(hosts: list[int]) -> str:
    return ", ".join(map(str, hosts))
