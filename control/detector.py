"""A failure detector by silence. It is pure: it is told of every sign of life and of the time.

Each peer has two clocks, since alive is not the same as quick. One is for messages of its process. The other is for
acknowledgements of its kernel (`ftcomm.control.liveness`), which go on while the process holds its interpreter or is
stopped.

    speaks    the process has spoken within the timeout
    mute      it has not, but its kernel answers: it lives. The others wait for it until that is a stall
    silent    neither: its host is gone, or the network in between
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

PeerT = TypeVar("PeerT", bound=Hashable)


class Detector(Generic[PeerT]):
    """Suspects a peer after `timeout` seconds without a sign of life.

    It must be ticked several times per timeout. A gap between ticks of more than half the timeout means that the
    observer itself did not run (a stopped process, a suspended machine). Silence in a gap proves nothing, so every peer
    is given a full timeout again. That is no sign of life: `within` counts only what was heard.

    A leader of thousands of ranks ticks several times a second, so no tick looks at each of them while the oldest sign
    of all is younger than the timeout. Times of signs do not run backwards.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._heard: dict[PeerT, float] = {}
        self._acknowledged: dict[PeerT, float] = {}
        self._ticked: float | None = None
        self._since = float("-inf")  # silence before this proves nothing
        self._oldest_sign = self._oldest_heard = float("-inf")  # no peer has given a sign, or spoken, last before that

    def heard(self, peer: PeerT, now: float) -> None:
        """Note that the process of a peer has spoken; the first time makes it a peer."""
        self._heard[peer] = now

    def acknowledged(self, peer: PeerT, at: float) -> None:
        """Note that the kernel of a peer has answered; ignored for any other process."""
        if peer in self._heard:
            self._acknowledged[peer] = max(at, self._acknowledged.get(peer, at))

    def within(self, peer: PeerT, seconds: float, now: float) -> bool:
        """Whether the process of a peer has spoken in the last `seconds`."""
        return now - self._heard.get(peer, float("-inf")) <= seconds

    def answers(self, peer: PeerT, seconds: float, now: float) -> bool:
        """Whether the process of a peer has spoken, or its kernel has answered, in the last `seconds`."""
        return self.within(peer, seconds, now) or now - self._acknowledged.get(peer, float("-inf")) <= seconds

    def restart_timeouts(self, now: float) -> None:
        """Give every peer a full timeout again, since none could be heard until now."""
        self._since = now

    def forget(self, peer: PeerT) -> None:
        self._heard.pop(peer, None)
        self._acknowledged.pop(peer, None)

    def since(self, now: float) -> float:
        """Returns when the observer last began to run again after a gap; silence before that proves nothing."""
        if self._ticked is not None and now - self._ticked > self.timeout / 2:
            self._since = now
        return self._since

    def silent(self, now: float) -> dict[PeerT, float]:
        """Returns the suspected peers with the seconds of their silence. Called in every tick."""
        self.since(now)
        self._ticked = now
        if now - self._oldest_sign <= self.timeout:
            return {}
        signs = {peer: max(at, self._acknowledged.get(peer, at)) for peer, at in self._heard.items()}
        self._oldest_sign = min(now, min(signs.values(), default=now))
        silence = {peer: now - max(at, self._since) for peer, at in signs.items()}
        return {peer: seconds for peer, seconds in silence.items() if seconds > self.timeout}

    def unheard(self, now: float) -> dict[PeerT, float]:
        """Returns the peers that have not spoken since the observer runs again, with the seconds since they spoke:
        whether they are mute will be known after the timeout."""
        return {peer: now - at for peer, at in self._heard.items() if at < self._since}

    def mute(self, now: float) -> dict[PeerT, float]:
        """Returns the peers that live and do not speak, with the seconds since they spoke."""
        if now - self._oldest_heard <= self.timeout:
            return {}
        self._oldest_heard = min(now, min(self._heard.values(), default=now))
        quiet = {peer: now - at for peer, at in self._heard.items() if now - max(at, self._since) > self.timeout}
        answers = (peer for peer in quiet if now - self._acknowledged.get(peer, float("-inf")) <= self.timeout)
        return {peer: quiet[peer] for peer in answers}
