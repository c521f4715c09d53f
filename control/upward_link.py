"""The link of a rank to the coordinator, if it leads its replica, or else to its leader, and the news from there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from ftcomm.control import handshake
from ftcomm.control import messages as m
from ftcomm.control.links import Link
from ftcomm.control.node import Node
from ftcomm.control.unstarted import NamedRank

log = logging.getLogger("ftcomm.control")


class News(NamedTuple):
    """The last news of this rank on its way into the job, and how far it has got."""

    text: str
    stage: m.Stage = m.Stage.WAITING


class UpwardLink:
    """The link, from `open` to `close`. In the event loop of the control thread; other threads read `news` and
    `refused`. `host` is that of this rank; `do(event, *args)` tells the node of an event and carries out its
    actions."""

    def __init__(
        self,
        me: NamedRank,
        node: Node,
        credentials: handshake.Credentials,
        coordinator: tuple[str, int],
        leader: tuple[str, int] | None,
        host: str,
        do: Callable[..., None],
    ) -> None:
        self._me, self._node, self._credentials, self._host, self._do = me, node, credentials, host, do
        if node.leader is not None:
            self._what, self._there, self._purpose, self._fields = "coordinator", coordinator, "leader", me.fields
        else:
            assert leader is not None
            self._what, self._there, self._purpose = "leader of the replica", leader, "rank"
            self._fields = {"replica": me.replica, "shard": me.shard}
        self.link: Link | None = None
        self.news = News("no connection was tried yet")
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
        self.news, self._told = News(reason, stage), True

    def _opened(self) -> None:
        self.refused, self._told = None, False
        self._do(self._node.up_opened)

    def _lost(self, error: Exception) -> None:
        self.refused = error
        there = self._there if self.link is None else self.link.address
        news = (
            f"the {self._what} at {there[0]}:{there[1]} cannot be reached ({error}); is it running there, and is the "
            "port open to this host?"
        )
        told, self._told = self._told, False
        if not told:  # otherwise it was ended with a reason
            self.news = News(news)
        if self._node.view is not None:
            log.debug("replica %d rank %d: %s", self._me.replica, self._me.shard, news)
        elif isinstance(error, handshake.HandshakeError) and str(error) != self._warned:
            self._warned = str(error)
            log.warning("replica %d rank %d: %s", self._me.replica, self._me.shard, news)
        refused = isinstance(error, ConnectionRefusedError)
        self._do(self._node.up_lost, f"the {self._what} is lost: {error}", refused, there[0] == self._host)

    def _mute(self) -> None:
        host, port = self._there if self.link is None else self.link.address
        self.news = News(
            f"the {self._what} at {host}:{port} has not answered yet; it is stopped, or something else listens there"
        )
