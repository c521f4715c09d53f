"""The other members of a rank's group as its control thread sees them: a link to each, and an eye on its process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from ftcomm.control import messages as m
from ftcomm.control.fork import apart
from ftcomm.control.links import Ended, Link
from ftcomm.control.views import Member, View
from ftcomm.control.wire import Credentials, Elsewhere

Lost = Callable[[View, int, str, bool], None]  # (view, replica, reason, whether its end is certain)


class Peers:
    """All of it runs in the event loop of the control thread.

    `on_open(replica)` is called when a link is there, for the first time or again, `on_back(replica)` if its loss had
    been told and its kernel answers again. `on_lost` may be called often.
    """

    def __init__(
        self,
        replica: int,
        rank: int,
        credentials: Credentials,
        *,
        on_open: Callable[[int], None],
        on_message: Callable[[m.AnyMessage], None],
        on_lost: Lost,
        on_back: Callable[[int], None],
    ) -> None:
        self._replica, self._rank, self._credentials = replica, rank, credentials
        self._on_open, self._on_lost, self._on_back = on_open, on_lost, on_back
        self._on_message = on_message
        self._down: set[int] = set()  # links that we have complained about
        self._view: View | None = None
        self._links: dict[int, tuple[str, Link]] = {}  # replica -> (incarnation, link)
        self._watched: dict[int, tuple[str, int | None]] = {}  # replica -> (incarnation, pidfd; None when it has ended)
        apart(self, lambda peers: [fd for _, fd in peers._watched.values() if fd is not None])

    def connect(self, view: View) -> None:
        """Links to the members of `view`; those to anybody else are closed."""
        self._view = view
        for replica, (incarnation, link) in list(self._links.items()):
            if not view.has(replica, incarnation):
                link.close()
                del self._links[replica]
                self._down.discard(replica)
        for replica, (incarnation, _) in list(self._watched.items()):
            if not view.has(replica, incarnation):
                self._unwatch(replica)
        for member in view.members:
            if member.replica != self._replica and member.replica not in self._links:
                self._links[member.replica] = (member.incarnation, self._link(member))

    def _link(self, member: Member) -> Link:
        address = member.ranks[self._rank]
        return Link(
            (address.host, address.port),
            self._credentials,
            "member",
            {"replica": self._replica},
            to=address,
            on_open=lambda: self._opened(member.replica),
            on_message=self._on_message,
            on_down=lambda error: self._broken(member, error),
        )

    def _opened(self, replica: int) -> None:
        self._on_open(replica)
        self._back(replica)

    def _back(self, replica: int) -> None:
        if replica in self._down:
            self._down.discard(replica)
            self._on_back(replica)

    def unanswered(self) -> dict[int, float]:
        """Of those to whom there is a connection, answered by their process or not: for how many seconds their kernels
        have not acknowledged what they were sent. To be asked before they are sent more."""
        seconds = {replica: link.unanswered() for replica, (_, link) in self._links.items()}
        known = {replica: since for replica, since in seconds.items() if since is not None}
        for replica in [replica for replica in self._down if known.get(replica) == 0.0]:
            self._back(replica)
        return known

    def _broken(self, member: Member, error: Exception) -> None:
        if isinstance(error, Ended):
            return  # it proves nothing; that it cannot be made again would
        self._down.add(member.replica)
        there = member.ranks[self._rank]
        ended = isinstance(error, Elsewhere)
        self._lost(member, f"the link to it at {there.host}:{there.port} is down: {error}", proof=ended)

    def send(self, replica: int, message: m.Message) -> None:
        """Dropped without a link; `on_open` is the moment to say again what matters."""
        known = self._links.get(replica)
        if known is not None:
            known[1].send(message)

    def watch(self, view: View, local: Iterable[int]) -> None:
        """The end of a process of this host is an event: no timeout needed."""
        for replica in local:
            member = view.member(replica)
            if member is None or replica in self._watched:
                continue
            pid = member.ranks[self._rank].pid
            try:
                fd = os.pidfd_open(pid)
            except OSError as error:
                gone = isinstance(error, ProcessLookupError)
                self._lost(member, f"process {pid}: {error.strerror}", proof=gone)
                continue
            self._watched[replica] = (member.incarnation, fd)
            asyncio.get_running_loop().add_reader(fd, self._ended, member, pid)

    def close(self) -> None:
        """Stop watching; the links end with the loop."""
        for replica in list(self._watched):
            self._unwatch(replica)

    def _ended(self, member: Member, pid: int) -> None:
        self._unwatch(member.replica)
        self._watched[member.replica] = (member.incarnation, None)
        self._lost(member, f"its process {pid} ended", proof=True)

    def _unwatch(self, replica: int) -> None:
        _, fd = self._watched.pop(replica)
        if fd is not None:
            asyncio.get_event_loop().remove_reader(fd)
            os.close(fd)

    def _lost(self, member: Member, reason: str, proof: bool) -> None:
        view = self._view
        if view is not None and view.has(member.replica, member.incarnation):
            self._on_lost(view, member.replica, reason, proof)
