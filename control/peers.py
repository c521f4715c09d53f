"""The other members of a rank's group, as its control thread sees them: a link to each, and a watch on its process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable

from ftcomm.control import messages as m
from ftcomm.control.failed_dials import shortage
from ftcomm.control.fork import keep_from_children
from ftcomm.control.handshake import Credentials, ProcessReplaced
from ftcomm.control.links import Ended, Link
from ftcomm.control.rank_name import rank_name
from ftcomm.control.views import Member, View

log = logging.getLogger("ftcomm.control")

OnDead = Callable[[View, int, str], None]  # (view, replica whose process has ended, reason)
OnFailed = Callable[[View, int, str, Exception], None]  # (view, replica, reason, error)


class Peers:
    """The links to all peers, in the event loop of the control thread.

    `on_open(replica)` is called when a link is there, for the first time or again. `on_back(replica)` is called when
    its kernel answers again after `on_failed`, which is called for each attempt that fails.
    """

    def __init__(
        self,
        replica: int,
        shard: int,
        credentials: Credentials,
        *,
        on_open: Callable[[int], None],
        on_message: Callable[[m.AnyMessage], None],
        on_lost: OnDead,
        on_failed: OnFailed,
        on_back: Callable[[int], None],
    ) -> None:
        self._replica, self._shard, self._credentials = replica, shard, credentials
        self._on_open, self._on_lost, self._on_failed, self._on_back = on_open, on_lost, on_failed, on_back
        self._on_message = on_message
        self._down: set[int] = set()  # links with a complaint
        self._view: View | None = None
        self._links: dict[int, tuple[str, Link]] = {}  # replica -> (incarnation, link)
        self._watched: dict[int, tuple[str, int | None]] = {}  # replica -> (incarnation, pidfd; None when it has ended)
        self._local: dict[int, Member] = {}  # members whose processes run on this host
        self._told = False  # the log says why a process is not watched
        keep_from_children(self, lambda peers: [fd for _, fd in peers._watched.values() if fd is not None])

    def connect(self, view: View) -> None:
        """Make links to the members of `view`, and close all others."""
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
        address = member.ranks[self._shard]
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
        """Returns for how many seconds the kernels of connected peers have not acknowledged what they were sent,
        whether their processes answer or not. Ask before more is sent to them."""
        seconds = {replica: link.unanswered() for replica, (_, link) in self._links.items()}
        known = {replica: since for replica, since in seconds.items() if since is not None}
        for replica in [replica for replica in self._down if known.get(replica) == 0.0]:
            self._back(replica)
        return known

    def _broken(self, member: Member, error: Exception) -> None:
        if isinstance(error, Ended):
            return  # only a link that cannot be made again proves something
        self._down.add(member.replica)
        there = member.ranks[self._shard]
        reason = f"the link to it at {there.host}:{there.port} is down: {error}"
        if isinstance(error, ProcessReplaced):
            self._lost(member, reason)
        else:
            self._failed(member, reason, error)

    def send(self, replica: int, message: m.Message) -> None:
        """Send a message; it is dropped without a link. `on_open` is the moment to repeat what matters."""
        known = self._links.get(replica)
        if known is not None:
            known[1].send(message)

    def watch(self, view: View, local: Iterable[int]) -> None:
        """Watch the processes of this host among the members: their ends are events and need no timeout."""
        members = ((replica, view.member(replica)) for replica in local)
        self._local = {replica: member for replica, member in members if member is not None}
        self.watch_again()

    def watch_again(self) -> None:
        """Watch the processes that could not be watched before. To be called now and then."""
        for replica, member in self._local.items():
            if replica in self._watched or self._view is None or not self._view.has(replica, member.incarnation):
                continue
            pid = member.ranks[self._shard].pid
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError as error:
                self._watched[replica] = (member.incarnation, None)
                self._lost(member, f"process {pid}: {error.strerror}")
                continue
            except OSError as error:
                lacks = shortage(error)
                if not lacks:
                    self._failed(member, f"process {pid}: {error.strerror}", error)
                elif not self._told:  # the links tell of an end, too, so nothing is lost by waiting
                    self._told = True
                    log.warning(
                        "%s: process %d of replica %d is not watched yet, which is tried again: %s",
                        *(rank_name(self._replica, self._shard), pid, replica, lacks),
                    )
                continue
            self._told = False
            self._watched[replica] = (member.incarnation, fd)
            asyncio.get_running_loop().add_reader(fd, self._ended, member, pid)

    def close(self) -> None:
        """Stop watching; the links end with the loop."""
        for replica in list(self._watched):
            self._unwatch(replica)

    def _ended(self, member: Member, pid: int) -> None:
        self._unwatch(member.replica)
        self._watched[member.replica] = (member.incarnation, None)
        self._lost(member, f"its process {pid} ended")

    def _unwatch(self, replica: int) -> None:
        _, fd = self._watched.pop(replica)
        if fd is not None:
            asyncio.get_event_loop().remove_reader(fd)
            os.close(fd)

    def _lost(self, member: Member, reason: str) -> None:
        view = self._view
        if view is not None and view.has(member.replica, member.incarnation):
            self._on_lost(view, member.replica, reason)

    def _failed(self, member: Member, reason: str, error: Exception) -> None:
        view = self._view
        if view is not None and view.has(member.replica, member.incarnation):
            self._on_failed(view, member.replica, reason, error)
