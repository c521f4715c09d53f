"""Probes: connections to the port of a process of the job that find out whether it lives, and is still the same one.

A kernel takes a connection whether or not the process that listens runs, and whichever process listens: the wanted one
may have ended, and a stranger may have its port by now. So only a handshake that names the wanted process, and is
answered with the job's token, proves that it lives. The outcomes:

    answered      that process has proved its identity
    mute          a kernel has taken the connection, and no answer came: the process may hold its interpreter, or be
                  stopped. It may also be gone, so this counts as a sign of life for a while only
    ended         the kernel of this host says so, of the process, or of a port that nothing else can be in front of;
                  or another process of the job has proved to have that very port
    refused       another host refuses: the process may have ended, or something in between may refuse
    unreachable   no kernel answers, or a process that is not of the job does; neither proves anything
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Set
from typing import Any

import msgspec

from ftcomm.control import handshake, wire
from ftcomm.control.links import connected
from ftcomm.control.liveness import is_ending, ports, processes, unanswered
from ftcomm.control.probe_schedule import Probe, ProbeOutcome
from ftcomm.control.views import Address, Life

KERNEL = 1.0  # s for the kernel there to answer


class ProbeConnection:
    """One connection to the process at `there`. It is kept until the process has answered, so that a process that is
    held up for long does not find a thousand of them. It belongs to an event loop, and begins at once."""

    def __init__(
        self, there: Address, credentials: handshake.Credentials, purpose: str, fields: handshake.Fields
    ) -> None:
        loop = asyncio.get_running_loop()
        self._there = there
        self._found: asyncio.Future[ProbeOutcome] = loop.create_future()
        self._taken: asyncio.Future[None] = loop.create_future()
        self._sock: socket.socket | None = None
        self._pidfd = -1
        self._task = loop.create_task(self._say(credentials, purpose, fields))
        if there.processes == processes():  # the kernel of this host tells its end
            try:
                self._pidfd = os.pidfd_open(there.pid)
                loop.add_reader(self._pidfd, self._tell, ProbeOutcome.ENDED)
            except OSError as error:
                if isinstance(error, ProcessLookupError):
                    self._tell(ProbeOutcome.ENDED)

    async def outcome(self, timeout: float) -> ProbeOutcome:
        """Wait for the outcome, for `timeout` seconds from when a kernel has taken the connection. May be called
        again."""
        if is_ending(self._there):
            self._tell(ProbeOutcome.ENDED)
        either: set[asyncio.Future[Any]] = {self._found, self._taken}
        if not self._found.done():  # a wait would take a turn of the loop in any case
            await asyncio.wait(either, timeout=KERNEL, return_when=asyncio.FIRST_COMPLETED)
        if not self._found.done():
            await asyncio.wait({self._found}, timeout=timeout if self._taken.done() else 0.0)
        if self._found.done():
            return self._found.result()
        seconds = None if self._sock is None else unanswered(self._sock)
        return ProbeOutcome.UNREACHABLE if seconds is None or seconds > KERNEL else ProbeOutcome.MUTE

    @property
    def over(self) -> bool:
        """Whether the outcome is final."""
        return self._found.done()

    def close(self) -> None:
        self._task.cancel()
        self._unwatch()

    def _tell(self, outcome: ProbeOutcome) -> None:
        self._unwatch()
        if not self._found.done():
            failed = outcome in (ProbeOutcome.REFUSED, ProbeOutcome.UNREACHABLE)  # the process may have begun to end
            self._found.set_result(ProbeOutcome.ENDED if failed and is_ending(self._there) else outcome)

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    async def _say(self, credentials: handshake.Credentials, purpose: str, fields: handshake.Fields) -> None:
        there = self._there
        try:
            self._sock = await connected((there.host, there.port), KERNEL)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            refusal = ProbeOutcome.ENDED if _alone(there) else ProbeOutcome.REFUSED
            self._tell(refusal if refused else ProbeOutcome.UNREACHABLE)
            return
        try:
            ask_often(self._sock)
            self._taken.set_result(None)
            steps = handshake.client(credentials, purpose, fields, there, handshake.place(self._sock.getpeername))
            await wire.handshake(self._sock, steps, wire.KERNEL, on_mute=lambda: None)
            self._tell(ProbeOutcome.ANSWERED)
        except handshake.ProcessReplaced:
            self._tell(ProbeOutcome.ENDED)
        except OSError:
            self._tell(ProbeOutcome.UNREACHABLE)
        finally:
            self._sock.close()


class Prober:
    """Probes many processes, by at most one connection at a time for each question.

    A mute process is asked by the one that is under way, and by no second one: a connection that is given up keeps its
    place in the backlog of the process, and a full backlog would look like a host that is gone.
    """

    def __init__(self, credentials: handshake.Credentials) -> None:
        self._credentials = credentials
        self._connections: dict[Probe, ProbeConnection] = {}

    async def outcome(self, probe: Probe, purpose: str, fields: handshake.Fields, timeout: float) -> ProbeOutcome:
        """Carry out `probe`, or wait for the one that is under way. See `ProbeConnection.outcome`."""
        question = msgspec.structs.replace(probe, call=False, also=None)
        connection = self._connections.get(question)
        if connection is None or connection.over:
            connection = self._connections[question] = ProbeConnection(
                probe.address, self._credentials, purpose, fields
            )
        outcome = await connection.outcome(timeout)
        if outcome is not ProbeOutcome.MUTE and self._connections.get(question) is connection:
            del self._connections[question]
            connection.close()
        return outcome

    def only(self, lives: Set[Life]) -> None:
        """Give up all probes of other lives."""
        for question in [question for question in self._connections if question.life not in lives]:
            self._connections.pop(question).close()


def ask_often(sock: socket.socket) -> None:
    """Let the own kernel ask the one at the other end, and not the process, once a second whether the connection
    stands."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


def _alone(there: Address) -> bool:
    """Whether the port is on this host, with no network and no firewall in between."""
    local = there.host == "::1" or there.host.startswith("127.")
    return local and there.ports == ports()
