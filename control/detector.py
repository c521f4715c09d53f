"""Failure detector by silence: pure, told of every sign of life and of the time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


class Detector(Generic[Peer]):
    """Suspects a peer after `timeout` seconds without a sign of life.

    It must be ticked several times per timeout. A gap between ticks of more than half the timeout means that the
    observer itself did not run (a stopped process, a suspended machine), so the silence proves nothing: every peer is
    given a full timeout again. That is no sign of life of anybody: `within` goes by what was heard.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._heard: dict[Peer, float] = {}
        self._ticked: float | None = None
        self._since = float("-inf")  # silence before that proves nothing

    def heard(self, peer: Peer, now: float) -> None:
        self._heard[peer] = now

    def within(self, peer: Peer, seconds: float, now: float) -> bool:
        """Whether it gave a sign of life in the last `seconds`."""
        return now - self._heard.get(peer, float("-inf")) <= seconds

    def forget(self, peer: Peer) -> None:
        self._heard.pop(peer, None)

    def silent(self, now: float) -> dict[Peer, float]:
        """Peers that are suspected, with the seconds of their silence."""
        if self._ticked is not None and now - self._ticked > self.timeout / 2:
            self._since = now
        self._ticked = now
        silence = {peer: now - max(at, self._since) for peer, at in self._heard.items()}
        return {peer: seconds for peer, seconds in silence.items() if seconds > self.timeout}
