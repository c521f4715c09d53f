"""The link of a leader to the coordinator, or of a rank to its leader, and the news from there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from ftcomm.control import handshake
from ftcomm.control import messages as m
from ftcomm.control.links import Link
from ftcomm.control.rank_name import rank_name
from ftcomm.control.unstarted import NamedRank

log = logging.getLogger("ftcomm.control")


class JoinNews(NamedTuple):
    """The last news of this rank on its way into the job, and how far it has got."""

    text: str
    stage: m.Stage = m.Stage.WAITING


class UpwardLink:
    """The link, from `open` to `close`. In the event loop of the control thread; other threads read `news` and
    `refused`. `what` is at the other end, at `there`; `host` is that of this process. `on_open()` is called when there
    is a connection, `on_lost(reason, refused, here)` when there is none: nobody listens there (`refused`), on this host
    (`here`), `on_mute()` as long as only the kernel there answers. `trains` says whether the rank is in a view."""

    def __init__(
        self,
        me: NamedRank,
        what: str,
        there: tuple[str, int],
        credentials: handshake.Credentials,
        purpose: str,
        fields: handshake.Fields,
        host: str,
        *,
        on_open: Callable[[], None],
        on_lost: Callable[[str, bool, bool], None],
        trains: Callable[[], bool],
        on_mute: Callable[[], None] = lambda: None,
    ) -> None:
        self._me, self._what, self._there, self._credentials = me, what, there, credentials
        self._purpose, self._fields, self._host = purpose, fields, host
        self._on_open, self._on_lost, self._trains, self._on_mute = on_open, on_lost, trains, on_mute
        self.link: Link | None = None
        self.news = JoinNews("no connection was tried yet")
        self.refused: Exception | None = None
        self._told = False  # this connection has told what we wait for
        self._warned = ""  # the last refusal that was logged

    def open(self, on_message: Callable[[m.AnyMessage], None]) -> None:
        self.link = Link(
            self._there,
            self._credentials,
            self._purpose,
            dict(self._fields),
            on_open=self._opened,
            on_message=on_message,
            on_down=self._lost,
            on_mute=self._mute,
        )

    def close(self) -> None:
        """Close the link for good."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def queued(self, reason: str, stage: m.Stage) -> None:
        """Note what this rank was told that it waits for."""
        self.news, self._told = JoinNews(reason, stage), True

    def lost_above(self, reason: str) -> None:
        """Note that the other end has lost its own way up. What this rank waits for it waits for still, as over the
        loss of this connection, which comes with the next way up."""
        if not self._told:
            self.news = JoinNews(reason)

    def _opened(self) -> None:
        self.refused, self._told = None, False
        self._on_open()

    def _lost(self, error: Exception) -> None:
        self.refused = error
        there = self._there if self.link is None else self.link.address
        news = (
            f"the {self._what} at {there[0]}:{there[1]} cannot be reached ({error}); is it running there, and is the "
            "port open to this host?"
        )
        told, self._told = self._told, False
        if not told:  # otherwise it was ended with a reason
            self.news = JoinNews(news)
        if self._trains():
            log.debug("%s: %s", rank_name(self._me.replica, self._me.shard), news)
        elif isinstance(error, handshake.HandshakeError) and str(error) != self._warned:
            self._warned = str(error)
            log.warning("%s: %s", rank_name(self._me.replica, self._me.shard), news)
        refused = isinstance(error, ConnectionRefusedError)
        self._on_lost(f"the {self._what} is lost: {error}", refused, there[0] == self._host)

    def _mute(self) -> None:
        host, port = self._there if self.link is None else self.link.address
        self.news = JoinNews(
            f"the {self._what} at {host}:{port} has not answered yet; it is stopped, or something else listens there"
        )
        self._on_mute()
