"""Which communicator of this rank an incoming connection is for: a rank listens at one port for all that it has.

member j                                          member i
  dial("fixed", group, what, member, ...)  --->     listener -> ConnectionRouter -> the communicator of that name
                                                                               \\-> waits until that is made here
"""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ftcomm.control import wire
from ftcomm.control.dropped import drop
from ftcomm.control.sealed import Channel
from ftcomm.control.views import View
from ftcomm.errors import ArgumentError, TransportError

Handler = Callable[[Channel, wire.Fields], None]

PURPOSE = "fixed"  # of every connection between members of a communicator
LINK = "link"  # what the first one is for, between members that never change; it may come before the group
ASK = "ask"  # the same between members of a group that follows the views of a job (ftcomm.subgroup)
EARLY = (LINK, ASK)
POST = "post"  # messages
MAX_PARKED = 256  # connections that came before their group; the oldest makes room for a newer one


class Server(Protocol):
    """What listens: an `Endpoint`, or the control thread of a rank in a job."""

    def serve(self, purpose: str, handler: Handler) -> None: ...


class Incoming(NamedTuple):
    """A connection from `member` of the group `group`, which is for `what`. `life` tells that group of others which had
    its name before, `epoch` is that of a group which has several, `nonce` is that of the caller's segment, and `there`
    that of ours, if the caller knows it."""

    group: str
    what: str
    member: int
    life: str
    sock: Channel
    epoch: int = 0
    nonce: str = ""
    there: str = ""


class Receiver(Protocol):
    def take(self, call: Incoming) -> bool:
        """Own the connection from now on; False: it is not for this group, but maybe for the next one of its name.
        In any thread; does not block."""
        ...

    def entered(self, view: View) -> None:
        """In a job: `view` is in force. Does not block."""
        ...

    def waiting(self, seconds: float) -> tuple[int, tuple[int, ...]] | None:
        """In a job: the op that has made no progress for at least `seconds`, and the replicas that have to move."""
        ...


class ConnectionRouter:
    """Deals incoming connections out to the groups of this rank. Thread-safe; nothing here blocks.

    What comes before its group is parked, so that a member may call another one that is slower.
    """

    def __init__(self, server: Server) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[str, Receiver] = {}
        self._parked: deque[Incoming] = deque()
        self._closed = False
        self.newest: View | None = None  # in a job: what `entered` has told all groups that were there
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
        """`receiver` wants no more; idempotent."""
        with self._lock:
            if self._receivers.get(name) is receiver:
                del self._receivers[name]

    def entered(self, view: View) -> None:
        """Tell all groups."""
        with self._lock:
            self.newest = view
            receivers = list(self._receivers.values())
        for receiver in receivers:
            receiver.entered(view)

    def waiting(self, seconds: float) -> tuple[int, tuple[int, ...]] | None:
        """What some group says of that."""
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

    def _incoming(self, sock: Channel, fields: wire.Fields) -> None:
        group, what = wire.text(fields, "group"), wire.text(fields, "what")
        life = wire.text(fields, "life") if what != LINK else ""
        epoch = wire.number(fields, "epoch") if "epoch" in fields else 0
        nonce = wire.text(fields, "nonce") if "nonce" in fields else ""
        there = wire.text(fields, "there") if "there" in fields else ""
        self._deal(Incoming(group, what, wire.number(fields, "member"), life, sock, epoch, nonce, there))

    def _deal(self, call: Incoming) -> None:
        refused: Receiver | None = None
        while True:
            with self._lock:
                receiver = self._receivers.get(call.group)
                if receiver is None or receiver is refused:
                    gone = self._park(call) if call.what in EARLY else [call]
                    break
            if receiver.take(call):
                return
            refused = receiver
        for lost in gone:
            lost.sock.close()

    def _park(self, call: Incoming) -> list[Incoming]:
        """Those to be closed for it: callers that have hung up, and the oldest if there are too many. With the lock."""
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
            drop("crowded", f"the oldest of {MAX_PARKED} connections for groups that nobody has made here")
        self._parked.append(call)
        return gone
