"""Says who waits for whom: a task stands before a gate until certain members have raised a word far enough.

    may it go on       `is_open`
    wait for that      `wait`, until it is open, an interrupt, or the end of one sleep
    whom to blame      `behind`

Words hold `epoch << COUNTER | counter` and only grow, so a word of another epoch opens no gate.
"""

from __future__ import annotations

from collections.abc import Iterable

from ftcomm.collective.plan import GroupView
from ftcomm.kernels.epochs import COUNTER
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import Peer


def token(replica: int, word: int) -> int:
    """Returns the value of a member's ASLEEP word while it sleeps on a word of `replica`; 0 means awake."""
    return (replica + 1) << 16 | word


class Gate:
    """A gate, which opens for so many tasks when all of `peers` have raised `word` as far in this epoch.

    They tell that themselves or, if it is `relayed`, through another member.
    """

    __slots__ = ("_places", "_words", "high", "low", "peers", "relayed", "word")

    def __init__(self, view: GroupView, word: int, peers: Iterable[Peer], *, relayed: bool = False) -> None:
        self.word, self.peers, self.relayed = word, tuple(peers), relayed
        self._words = [peer.heard if relayed else peer.words for peer in self.peers]
        self._places = [
            (words, peer.address + 8 * word, token(peer.replica, word))
            for words, peer in zip(self._words, self.peers, strict=True)
        ]
        self.low, self.high = view.epoch << COUNTER, (view.epoch + 1) << COUNTER

    def is_open(self, count: int) -> bool:
        word, target, high = self.word, self.low + count, self.high
        for words in self._words:  # noqa: SIM110 (a generator would double the price of a poll)
            if not target <= words[word] < high:
                return False
        return True

    def wait(self, count: int, waiter: Waiter) -> bool:
        """Wait until the gate is open, where the members share memory. False if it was not seen open before an
        interrupt or the end of one sleep."""
        word, target, high = self.word, self.low + count, self.high
        for words in self._words:  # without the places, which few waits need
            if not target <= words[word] < high:
                break
        else:
            return True
        for words, address, asleep in self._places:
            if not target <= words[word] < high and not waiter.until(words, word, address, target, high, asleep):
                return False
        return True

    def behind(self, count: int) -> list[Peer]:
        """Returns the peers that keep the gate shut."""
        word, target, high = self.word, self.low + count, self.high
        return [peer for peer, words in zip(self.peers, self._words, strict=True) if not target <= words[word] < high]
