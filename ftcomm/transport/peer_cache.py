"""The peers of one communicator, by the views that need them, so that a view change reaches only new ones.

expect  a view is to be entered      find  returns a peer that serves in it already      add  keeps a new one
enter   it is entered                      returns the peers that no view needs any more
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ftcomm.transport.base import Peer


class PeerCache:
    """The peers. Not thread-safe. A peer serves as long as its process is a member; over a connection, as long as that
    lasts."""

    def __init__(self) -> None:
        self.epoch = -1  # the epoch that was entered
        self.peers: dict[int, Peer] = {}  # the peers in that epoch
        self._coming: dict[int, dict[int, Peer]] = {}  # epoch -> member -> peer, for views that are not entered yet
        self._usable: dict[str, Peer] = {}  # those for views to come, by the nonce of the segment
        self._newest = -1  # the newest expected view
        self._members: frozenset[int] = frozenset()  # its members

    def expect(self, epoch: int, members: Iterable[int]) -> bool:
        """Note that the view of `epoch` is to be entered, maybe once more; False if that is over."""
        if epoch <= self.epoch:
            return False
        self._coming.setdefault(epoch, {})
        if epoch > self._newest:
            self._newest, self._members = epoch, frozenset(members)
            self._keep(list(self._usable.values()))
        return True

    def severed(self, epoch: int, member: int) -> None:
        """Note that `member` has lost its connection to this member, as it has told for `epoch`. The connection may
        look whole here. So only a new one serves from now on, also in a later view, for which the member may not say so
        again."""
        if member not in self._coming.get(epoch, {}):
            self._usable = {nonce: peer for nonce, peer in self._usable.items() if peer.replica != member}

    def find(self, epoch: int, member: int, nonce: str) -> Peer | None:
        """Returns the peer that serves in `epoch`. A member that has run in no view may have been out of the job since
        a connection was made, which then is over at the other end: it makes new ones."""
        coming = self._coming.get(epoch, {})
        known = coming.get(member) or self._usable.get(nonce)
        if known is None:
            return None
        if member not in coming and not known.shares_memory and (self.epoch < 0 or not known.serves(epoch)):
            return None
        coming[member] = known
        return known

    def add(self, epoch: int, member: int, peer: Peer) -> bool:
        """Add a peer that was reached for `epoch`; False if it came too late, and is not needed."""
        coming = self._coming.get(epoch)
        if coming is None or member in coming:
            return False
        coming[member] = peer
        if peer.shares_memory or epoch == self._newest:
            self._usable[peer.nonce] = peer
        return True

    def enter(self, epoch: int) -> list[Peer]:
        """Enter an expected view. Closes the peers for views before it, which are not entered any more, and returns
        those that no view needs; the exchange closes those of the view before."""
        before, self.peers, self.epoch = self.peers, self._coming.pop(epoch), epoch
        passed = [self._coming.pop(other) for other in sorted(self._coming) if other < epoch]
        over = [peer for coming in passed for peer in coming.values()]
        needed = list(self._needed())
        for peer in over:
            if all(peer is not other for other in needed):
                peer.close()
        self._keep(needed)
        nonces = {peer.nonce for peer in needed}
        left = {peer.nonce: peer for peer in (*before.values(), *over) if peer.nonce not in nonces}
        return list(left.values())

    def needs(self, nonce: str) -> bool:
        """Whether a view needs the segment."""
        return any(peer.nonce == nonce for peer in self._needed())

    def of(self, epoch: int) -> Mapping[int, Peer]:
        """Returns the peers of an expected view, as far as they are reached, or of the entered one."""
        return self.peers if epoch == self.epoch else self._coming.get(epoch, {})

    def sharing(self) -> Iterator[tuple[int, int, Peer]]:
        """Yields all peers that share memory: member, epoch, peer."""
        for epoch, peers in ((self.epoch, self.peers), *self._coming.items()):
            yield from ((member, epoch, peer) for member, peer in peers.items() if peer.shares_memory)

    def close(self) -> None:
        """Close all peers: no view is entered any more."""
        peers = list(self._needed())
        self.peers, self._coming, self._usable = {}, {}, {}
        for peer in peers:
            peer.close()

    def _needed(self) -> Iterator[Peer]:
        for peers in (self.peers, *self._coming.values()):
            yield from peers.values()

    def _keep(self, peers: Collection[Peer]) -> None:
        """Keep only connections to members of the newest view: the other side closes the rest, and such a member may
        come back."""
        self._usable = {peer.nonce: peer for peer in peers if peer.shares_memory or peer.replica in self._members}
