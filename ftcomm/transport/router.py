"""Hands each incoming connection to the communicator that it is for: a rank listens at one port for all of them.

member j                                               member i
  dial("communicator", group, what, member, ...)  -->  listener -> ConnectionRouter -> the communicator of that name
                                                                         \\-> waits until that is made here
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from ftcomm.control import handshake
from ftcomm.control.data_plane import WaitsFor
from ftcomm.control.dropped import drop
from ftcomm.control.incoming import Handler
from ftcomm.control.limits import MEMBERS
from ftcomm.control.sealed import Channel
from ftcomm.control.views import View
from ftcomm.errors import ArgumentError, TransportError
from ftcomm.transport.closed_groups import ClosedGroups
from ftcomm.transport.group_connection import EARLY, LINK, GroupConnection

PURPOSE = "communicator"  # every connection between members of a communicator has this purpose
MAX_PARKED = MEMBERS  # connections that wait for their group, as many as one may bring; the oldest goes first


class Server(Protocol):
    """A listener: an `Endpoint`, or the control thread of a rank in a job."""

    def serve(self, purpose: str, handler: Handler) -> None: ...


class Receiver(Protocol):
    def take(self, call: GroupConnection) -> bool:
        """Own the connection from now on. False if it is not for this group, but maybe for the next one of its name.
        Any thread; does not block."""
        ...

    def job_changes(self) -> None:
        """Note that the job begins to change its view. Does not block."""
        ...

    def coordinator_away(self, seconds: float) -> None:
        """Note that for so long no member of the job could be decided to be lost. Does not block."""
        ...

    def job_entered(self, view: View) -> None:
        """Note that `view` is in force in a job. Does not block."""
        ...

    def waiting(self, seconds: float) -> WaitsFor | None:
        """Returns the op that has made no progress for at least `seconds`, and the replicas that have to move, in a
        job."""
        ...


class ConnectionRouter:
    """Deals incoming connections out to the groups of this rank. Thread-safe; no method blocks.

    A connection that comes before its group is parked, so that a member may call one that is slower.
    """

    def __init__(self, server: Server) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[str, Receiver] = {}
        self._parked: deque[GroupConnection] = deque()
        self._closed = False
        self._left: ClosedGroups[bytes] = ClosedGroups()  # with what this member said as it closed them
        self.newest: View | None = None  # in a job: the view that `entered` has told the groups
        self.changes = 0  # how often a change of the job's view has begun
        self.away = 0.0  # s in which none could be decided on
        server.serve(PURPOSE, self._incoming)

    def open(self, name: str, receiver: Receiver) -> None:
        """Give `receiver` all connections for the group `name`. Raises `ArgumentError` if there is one already."""
        with self._lock:
            if self._closed:
                raise TransportError(f"the endpoint of group {name!r} was closed; make a new one")
            if name in self._receivers:
                raise ArgumentError(
                    f"this rank has a group {name!r} already; close that one first, or choose another name"
                )
            self._receivers[name] = receiver
            waiting = [call for call in self._parked if call.group == name]
            self._parked = deque(call for call in self._parked if call.group != name)
        for call in waiting:
            self._deal(call)

    def forget(self, name: str, receiver: Receiver) -> None:
        """Give `receiver` no more connections; idempotent."""
        with self._lock:
            if self._receivers.get(name) is receiver:
                del self._receivers[name]

    def retire(self, name: str, segments: Iterable[str], last: bytes, before: int = 0) -> None:
        """Answer `last` to all who call a group that this member has closed; see `ClosedGroups.add`."""
        with self._lock:
            self._left.add(name, segments, last, before)
            waiting = [call for call in self._parked if self._left.answer(call) is not None]
            self._parked = deque(call for call in self._parked if self._left.answer(call) is None)
        for call in waiting:
            self._deal(call)

    def since(self, name: str) -> int:
        """See `ClosedGroups.since`."""
        with self._lock:
            return self._left.since(name)

    def job_changes(self) -> None:
        """Tell all groups that the job begins to change its view."""
        with self._lock:
            self.changes += 1
            receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.job_changes()

    def coordinator_away(self, seconds: float) -> None:
        """Tell all groups that for so long no member of the job could be decided to be lost."""
        with self._lock:
            self.away += seconds
            receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.coordinator_away(seconds)

    def job_entered(self, view: View) -> None:
        """Tell all groups that `view` is in force."""
        with self._lock:
            self.newest = view
            receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.job_entered(view)

    def waiting(self, seconds: float) -> WaitsFor | None:
        """Returns the answer of the first group that waits."""
        with self._lock:
            receivers = list(self._receivers.values())
        waits = (receiver.waiting(seconds) for receiver in receivers)
        return next((wait for wait in waits if wait is not None), None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, deque()
        for call in parked:
            call.sock.close()

    def _incoming(self, sock: Channel, fields: handshake.Fields) -> None:
        group, what = handshake.text(fields, "group"), handshake.text(fields, "what")
        instance = handshake.text(fields, "instance") if what != LINK else ""
        epoch = handshake.number(fields, "epoch") if "epoch" in fields else 0
        nonce = handshake.text(fields, "nonce") if "nonce" in fields else ""
        there = handshake.text(fields, "there") if "there" in fields else ""
        made, since = (handshake.number(fields, x, most=1 << 53) if x in fields else 0 for x in ("made", "since"))
        member = handshake.number(fields, "member")
        self._deal(GroupConnection(group, what, member, instance, sock, epoch, nonce, there, made, since))

    def _deal(self, call: GroupConnection) -> None:
        refused: Receiver | None = None
        while True:
            with self._lock:
                last = self._left.answer(call)
                receiver = self._receivers.get(call.group)
                if last is not None or receiver is None or receiver is refused:
                    gone = self._park(call) if last is None and call.what in EARLY else [call]
                    break
            if receiver.take(call):
                return
            refused = receiver
        for lost in gone:
            with contextlib.suppress(OSError), lost.sock as sock:
                if last is not None:
                    sock.sendall(last)

    def _park(self, call: GroupConnection) -> list[GroupConnection]:
        """Park a connection. Returns those to close: callers that have hung up, and the oldest if there are too many.
        With the lock."""
        if self._closed:
            return [call]
        poll = select.poll()
        for parked in self._parked:
            poll.register(parked.sock, select.POLLRDHUP)
        hung_up = {fd for fd, _ in poll.poll(0)}
        gone = [parked for parked in self._parked if parked.sock.fileno() in hung_up]
        self._parked = deque(parked for parked in self._parked if parked.sock.fileno() not in hung_up)
        if len(self._parked) >= MAX_PARKED:
            gone.append(self._parked.popleft())
            drop("crowded", f"the oldest of {MAX_PARKED} connections for groups that were not made here")
        self._parked.append(call)
        return gone
