"""Keeps what each end knows of a connection: which messages it has held back, offered, sent ahead, accepted. Pure."""

from __future__ import annotations

import itertools
from collections import deque

from ftcomm.p2p.matching import Unexpected
from ftcomm.p2p.protocol import MessageRequest, RecvRequest, SendRequest
from ftcomm.p2p.slots import Track


class SendChannel:
    """The end of the sender. It is not open while it is dialled."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.is_open = False
        self.numbers = itertools.count()
        self.held: deque[SendRequest] = deque()  # not sent yet, for want of room or of a connection
        self.offers: dict[int, SendRequest] = {}
        self.unasked: dict[int, int] = {}  # number -> bytes of each message sent ahead and not received yet
        self.nbytes = 0  # their sum
        self.track = Track()
        self.fetching: list[SendRequest] = []  # being copied to the host, to be sent as bytes

    def clear(self) -> list[MessageRequest]:
        """Take out and return all messages that have not ended."""
        open_ones: list[MessageRequest] = [*self.held, *self.offers.values(), *self.track.sends, *self.fetching]
        for messages in (self.held, self.offers, self.track.sends, self.fetching):
            messages.clear()
        return open_ones


class RecvChannel:
    """The end of the receiver."""

    def __init__(self, peer: int, nonce: str = "") -> None:
        self.peer = peer
        self.nonce = nonce  # names the sender's memory
        self.expected: dict[int, RecvRequest] = {}  # offers that were accepted
        self.reading: RecvRequest | Unexpected | None = None  # the message of which bytes are being read

    def clear(self) -> list[MessageRequest]:
        """Take out and return all messages that have not ended."""
        open_ones: list[MessageRequest] = [*self.expected.values()]
        if isinstance(self.reading, RecvRequest):
            open_ones.append(self.reading)
        self.expected.clear()
        self.reading = None
        return open_ones


MessageChannel = SendChannel | RecvChannel
