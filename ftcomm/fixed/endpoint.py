"""How the members of fixed groups find each other: a port that listens, with or without a job, and who is called there.

In a job the control thread of a rank listens already. `Endpoint` does so without a coordinator, and its `handle` is all
that others need to call it. A `Switchboard` deals the connections for fixed groups out, by the name of the group.

    member j                                   member i
      dial("fixed", group, what, member)  ---> listener -> Switchboard -> the group of that name
                                                                      \\-> waits until that group is made here
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ftcomm.address import resolved
from ftcomm.control import fork, wire
from ftcomm.control.dropped import drop
from ftcomm.control.links import Listener, event_loop, hand_over, listen
from ftcomm.control.sealed import Channel
from ftcomm.control.tls import Tls
from ftcomm.control.views import View
from ftcomm.credentials import from_env
from ftcomm.errors import ArgumentError, TransportError
from ftcomm.own import own_process

Handler = Callable[[Channel, wire.Fields], None]
Dial = Callable[[str, wire.Fields, float], Channel]  # (purpose, fields, timeout) -> authenticated, blocking

PURPOSE = "fixed"  # of every connection between members of a fixed group
LINK = "link"  # what the first one is for; it may come before the group
ASK = "ask"  # the same between members of a group that follows the views of a job (ftcomm.subgroup)
EARLY = (LINK, ASK)
MAX_PARKED = 256  # connections that came before their group; the oldest makes room for a newer one

_HANDLE = re.compile(r"ftcomm://(?P<host>[^/]{1,200}):(?P<port>[0-9]{1,5})/(?P<token>[0-9A-Za-z_-]{1,128})")


_PUBLIC = re.compile(r"(ftcomm://)?[^/]{1,200}:[0-9]{1,5}(?=/|$)")


def shown(handle: object) -> str:
    """What of it may stand in a message: all but the token."""
    if not isinstance(handle, str):
        return f"a {type(handle).__name__}"
    found = _PUBLIC.match(handle)
    return f"{found[0]}/..." if found else f"a text of {len(handle)} characters"


class Place(NamedTuple):
    """What a handle says."""

    host: str
    port: int
    token: str

    def __repr__(self) -> str:
        return f"Place({self.host}:{self.port})"

    def dial(self, purpose: str, fields: wire.Fields, timeout: float, tls: Tls | None = None) -> Channel:
        """An authenticated blocking connection. Raises `OSError`."""
        credentials = wire.Credentials(self.token, tls=tls)
        return wire.connect((self.host, self.port), credentials, purpose, fields, timeout)


def parse(handle: str) -> Place:
    """Raises `ArgumentError` on what is no handle."""
    found = _HANDLE.fullmatch(handle) if isinstance(handle, str) else None
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ArgumentError(
            f"{shown(handle)} is no handle of ftcomm; pass what Endpoint.handle gives on each member, "
            "ftcomm://host:port/token"
        )
    return Place(found["host"].strip("[]"), int(found["port"]), found["token"])


class Server(Protocol):
    """What listens: an `Endpoint`, or the control thread of a rank in a job."""

    def serve(self, purpose: str, handler: Handler) -> None: ...


class Endpoint:
    """A listening port of this rank without a coordinator. Thread-safe.

    host: an address of this host that the other members can reach; None: FTCOMM_HOST, or the loopback.
    token: what callers have to prove that they hold; None: a random one, which the handle carries. Whoever has the
        handle may call, so keep it among the members.

    Several may live in one process, one for each rank. Raises `TransportError` if it cannot listen, and
    `SettingsError` if `host` is nothing that this host knows, or FTCOMM_TLS_* name files of no use.
    """

    def __init__(self, host: str | None = None, token: str | None = None) -> None:
        own_process()
        self.host = host = resolved(os.environ.get("FTCOMM_HOST", "127.0.0.1") if host is None else host)
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.tls = from_env(self.token).tls
        try:
            sock = listen(host, 0)
        except OSError as error:
            raise TransportError(
                f"cannot listen on {host}: {error.strerror or error}; FTCOMM_HOST has to be an address of this host"
            ) from None
        self.port: int = sock.getsockname()[1]
        self._handlers: dict[str, Handler] = {}
        self.switchboard = Switchboard(self)
        self._loop = event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(sock,), name="ftcomm-endpoint", daemon=True)
        self._thread.start()
        fork.take_part(self, f"the endpoint {host}:{self.port}")
        self._ready.wait()
        if self._loop.is_closed():
            fork.part(self)
            raise TransportError(f"the port {self.port} on {host} cannot be served; see the error above")

    @property
    def handle(self) -> str:
        """The same as long as this endpoint is open."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ftcomm://{host}:{self.port}/{self.token}"

    def serve(self, purpose: str, handler: Handler) -> None:
        """Hand every incoming connection of `purpose` (blocking) to `handler`, which owns it and must not block."""
        self._handlers[purpose] = handler

    def close(self) -> None:
        """Listen no more, and end the thread; idempotent. Groups that were made with it go on."""
        if fork.is_child():
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.switchboard.close()
        fork.part(self)

    def _run(self, sock: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with sock:
                self._loop.run_until_complete(self._listen(sock))
                self._loop.call_soon(self._ready.set)  # from now on `close` stops what runs forever
                self._loop.run_forever()
                self._loop.run_until_complete(self._listener.close())
        finally:
            self._loop.close()
            self._ready.set()  # also if it could not listen: nobody waits for it for ever

    async def _listen(self, sock: socket.socket) -> None:
        self._listener = Listener(sock, wire.Credentials(self.token, tls=self.tls), self._called)

    async def _called(self, sock: Channel, opening: wire.Opening) -> None:
        handler = self._handlers.get(opening.purpose)
        if handler is None:
            drop("purpose", f"a connection for {opening.purpose!r}, which an endpoint does not serve")
            sock.close()
            return
        sock.setblocking(True)
        hand_over(handler, sock, opening.fields)


class Call(NamedTuple):
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


class Taker(Protocol):
    def take(self, call: Call) -> bool:
        """Own the connection from now on; False: it is not for this group, but maybe for the next one of its name.
        In any thread; does not block."""
        ...

    def entered(self, view: View) -> None:
        """In a job: `view` is in force. Does not block."""
        ...


class Switchboard:
    """Deals incoming connections out to the groups of this rank. Thread-safe; nothing here blocks.

    What comes before its group is parked, so that a member may call another one that is slower.
    """

    def __init__(self, server: Server) -> None:
        self._lock = threading.Lock()
        self._takers: dict[str, Taker] = {}
        self._parked: deque[Call] = deque()
        self._closed = False
        self.newest: View | None = None  # in a job: what `entered` has told all groups that were there
        server.serve(PURPOSE, self._incoming)

    def open(self, name: str, taker: Taker) -> None:
        """Give `taker` all connections for the group `name`. Raises `ArgumentError` if this rank has such a group."""
        with self._lock:
            if self._closed:
                raise TransportError(f"the endpoint of group {name!r} was closed; make a new one")
            if name in self._takers:
                raise ArgumentError(
                    f"this rank has a group {name!r} already; close that one first, or choose another name"
                )
            self._takers[name] = taker
            waiting = [call for call in self._parked if call.group == name]
            self._parked = deque(call for call in self._parked if call.group != name)
        for call in waiting:
            self._deal(call)

    def forget(self, name: str, taker: Taker) -> None:
        """`taker` wants no more; idempotent."""
        with self._lock:
            if self._takers.get(name) is taker:
                del self._takers[name]

    def entered(self, view: View) -> None:
        """Tell all groups."""
        with self._lock:
            self.newest = view
            takers = list(self._takers.values())
        for taker in takers:
            taker.entered(view)

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
        self._deal(Call(group, what, wire.number(fields, "member"), life, sock, epoch, nonce, there))

    def _deal(self, call: Call) -> None:
        refused: Taker | None = None
        while True:
            with self._lock:
                taker = self._takers.get(call.group)
                if taker is None or taker is refused:
                    gone = self._park(call) if call.what in EARLY else [call]
                    break
            if taker.take(call):
                return
            refused = taker
        for lost in gone:
            lost.sock.close()

    def _park(self, call: Call) -> list[Call]:
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
