"""Publishes what leaves a member in one epoch: the words that it raises, wake-ups of those that sleep on them, and
frames for those that read its segment through a connection.

    word         written by   value                polled by     before
    POSTED       owner        tasks posted         all others    they read its POSTED staging
    REDUCED      owner        tasks reduced        all others    they read its REDUCED staging (two-shot)
    TAKEN        owner        tasks taken          all others    they return an op: all must hold all of it FINAL;
                                                                 between hosts, they post what uses the slot again
    level(l)     owner        tasks that have      its readers   they read what that level announces, see
                              reached level l                    `ftcomm.collective.algorithms`
    of the tree  owner        see `ftcomm.collective.tree`

Fencing. A member enters an epoch by raising all its words to the epoch, before any staging is written. A member that
was left behind in the old epoch may still read that staging while it changes, and mark a chunk FINAL that is not. But
after it has read the data it looks again at the words of all members, to return the op. Then it sees that a word has
left its epoch, and never returns the op. The members that go on have all stopped reading before any of them enters the
new epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from ftcomm.collective.gate import Gate, token
from ftcomm.collective.pipeline import Pipeline, Slot
from ftcomm.collective.plan import GroupView
from ftcomm.kernels.epochs import COUNTER
from ftcomm.sync.futex import IN_POLL, wake
from ftcomm.transport.base import CannotSend, MirrorWriter, Peer
from ftcomm.transport.segment import (
    ANNOUNCED,
    ASLEEP,
    DESCRIPTORS,
    DETAIL,
    ENDS,
    FINGERPRINT,
    GATHERED,
    POSTED,
    REDUCED,
    SLOTS,
    TAKEN,
    TAKEN_DOWN,
    TAKEN_UP,
    Segment,
    descriptor,
)

_TO_ALL = frozenset((POSTED, REDUCED, TAKEN))  # the words that all others look at
_NOTHING = memoryview(b"")


class Delivered(Gate):
    """Opens when all others have got what these tasks have posted, through the connections by which they read it."""

    __slots__ = ("_count", "_readers")

    def __init__(self, view: GroupView, peers: Sequence[Peer], readers: list[MirrorWriter]) -> None:
        super().__init__(view, POSTED, peers)
        self._readers, self._count = readers, len(peers)

    def is_open(self, count: int) -> bool:
        value = self.low + count
        readers = self._readers
        return len(readers) == self._count and all(reader.told(POSTED, value) for reader in readers)

    def behind(self, count: int) -> list[Peer]:
        told = {reader.replica for reader in self._readers if reader.told(POSTED, self.low + count)}
        return [peer for peer in self.peers if peer.replica not in told]


class Publisher:
    """The publisher of one epoch. `on_lost(replica, epoch, reason)` hears of connections that broke, and of this member
    itself if it cannot send. `readers` read through connections; members that share memory need no frames. `compares`:
    members look at each other's results, and so at every task that is taken."""

    def __init__(
        self,
        pipeline: Pipeline,
        segment: Segment,
        readers: list[MirrorWriter],
        on_lost: Callable[[int, int, str], None],
        *,
        compares: bool,
    ) -> None:
        view = pipeline.view
        self._pipeline, self._segment = pipeline, segment
        self._me, self._epoch, self._on_lost = view.me, view.epoch, on_lost
        self._readers = readers
        self._own = segment.words
        self._low, self._high = view.epoch << COUNTER, (view.epoch + 1) << COUNTER
        self._peers = pipeline.peers
        self.taken_by_all = pipeline.taken_by_all
        self._levels = dict(pipeline.algorithms.readers)
        self._place = place = pipeline.place
        self._parent_of_leaf: frozenset[int] = frozenset()
        if place is not None:
            up = frozenset((place.parent,)) if place.children and place.parent >= 0 else frozenset()
            down = frozenset(place.children)
            self._parent_of_leaf = frozenset((place.parent,)) - up
            self._levels |= {GATHERED: up, TAKEN_UP: up, ANNOUNCED: down, TAKEN_DOWN: down}
        self._lookers = {word: self._peers for word in _TO_ALL} | {
            word: [peer for peer in self._peers if peer.replica in readers] for word, readers in self._levels.items()
        }
        self._tokens = {word: token(view.me, word) for word in (*_TO_ALL, *self._levels)}
        # With a tree: the readers for which something may be left, so that the others need not be asked.
        self._lately: dict[MirrorWriter, None] = {}
        self._compares = compares
        self._quiet = view.one_host and not compares  # the others look only at the last taken task of an op
        # In a ring members hear of others from the left neighbour, and tell the right one.
        at = view.ring.index(view.me) if view.ring else 0
        self._right = view.ring[(at + 1) % len(view.ring)] if view.ring else view.me
        others = self._peers if len(view.ring) > 3 else ()  # in a smaller ring all are neighbours
        self.relayed = [(peer, {POSTED: 0, TAKEN: 0}) for peer in others if peer.replica != self._right]
        # By word: what raises it for those that share memory.
        self.raisers = {word: self._raiser(word) for word in self._tokens}
        for word in self.raisers:
            self.publish(word, 0)

    # -- words -------------------------------------------------------------------------------------------------------

    def describe(self, slot: Slot) -> None:
        """Write beside the slot the op and the call whose first task it has, before it is posted."""
        op, own, at = slot.op, self._own, DESCRIPTORS[slot.index % SLOTS]
        own[at] = op.place
        own[at + 1] = op.call
        own[at + DETAIL] = self._pipeline.detail(op)

    def publish(self, word: int, count: int, *, last: bool = True) -> None:
        """Raise a word. `last`: this task is the last one of its op."""
        assert self._own[word] < self._low + count or not count, (
            f"word {word} goes from {self._own[word]:#x} to {self._low + count:#x}"
        )
        self.raisers[word](count)
        if not self._readers or (word == TAKEN and self._quiet and not last):
            return
        concerned = self._concerned(word, count)
        for reader in tuple(self._readers):
            if concerned is None or reader.replica in concerned:
                self._send(reader, word, count)

    def _raiser(self, word: int) -> Callable[[int], None]:
        """Returns what raises a word and wakes who sleeps on it; all that a view decides of that is looked up here."""
        own, low, peers = self._own, self._low, self._lookers[word]
        theirs, segment, asleep_on = [peer.heard for peer in peers], self._segment, self._tokens[word]

        def raise_to(count: int) -> None:
            own[word] = low + count
            for words in theirs:
                if words[ASLEEP]:
                    _wake(peers, segment.address + 8 * word, asleep_on)
                    break

        return raise_to

    def _concerned(self, word: int, count: int) -> frozenset[int] | None:
        """Returns who looks at the word for the sake of this task; None: all. What goes through the tree is posted and
        taken for the parent's eyes alone, unless the calls or results of all have to be compared."""
        if word not in _TO_ALL:
            return self._levels[word]
        pipeline, index = self._pipeline, count - 1
        if self._place is None or not count or pipeline.slots[index % SLOTS].algorithm is not pipeline.algorithms.tree:
            return None
        return None if pipeline.asks(index) else self._parent_of_leaf

    def _is_concerned(self, reader: MirrorWriter, word: int, count: int) -> bool:
        concerned = self._concerned(word, count)
        return concerned is None or reader.replica in concerned

    def tell_all(self, slot: Slot) -> None:
        """Send all readers what call has posted this task of the tree; the parent may have it."""
        for reader in tuple(self._readers):
            if reader.replica not in self._parent_of_leaf:
                self._send(reader, POSTED, slot.index + 1)

    # -- readers -----------------------------------------------------------------------------------------------------

    def welcome(self, reader: MirrorWriter) -> None:
        """Attach a reader, and send it what it has missed.

        What it has yet to take is in the slots; it needs nothing of earlier tasks from here.
        """
        if all(reader.replica != peer.replica for peer in self._peers):
            reader.close()
            return
        for known in [known for known in self._readers if known.replica == reader.replica]:
            if known.epoch > reader.epoch:  # an earlier connection that has arrived late
                reader.close()
                return
            self._readers.remove(known)
            self._lately.pop(known, None)
            known.close()
        reader.slots = self._pipeline.staged
        self._readers.append(reader)
        if reader.replica == self._right:
            for _, told in self.relayed:
                told[POSTED] = told[TAKEN] = 0
        pipeline = self._pipeline
        first = max(0, pipeline.posted - pipeline.staged)
        for index in range(first, pipeline.posted):
            if self._is_concerned(reader, POSTED, index + 1):
                self._send(reader, POSTED, index + 1)
        for index in range(first, pipeline.arrived):
            slot = pipeline.slots[index % SLOTS]
            for step in slot.algorithm.steps[: slot.number]:
                if step.makes and (step.makes in _TO_ALL or reader.replica in self._levels[step.makes]):
                    self._send(reader, step.makes, index + 1)
        for index in range(max(0, pipeline.taken - pipeline.staged), pipeline.taken):
            # The slot may have the next task by now; then nothing tells whether this one went through the tree.
            if pipeline.slots[index % SLOTS].index != index or self._is_concerned(reader, TAKEN, index + 1):
                self._send(reader, TAKEN, index + 1)
        if self._place is not None:
            self._welcome_to_tree(reader, first)

    def _welcome_to_tree(self, reader: MirrorWriter, first: int) -> None:
        pipeline = self._pipeline
        for word, end in ((GATHERED, pipeline.gathered), (ANNOUNCED, pipeline.announced)):
            for index in range(first, end):
                if reader.replica in self._levels[word] and pipeline.slots[index % SLOTS].first:
                    self._send(reader, word, index + 1)
        for word, count in ((TAKEN_UP, pipeline.taken_below), (TAKEN_DOWN, pipeline.settled)):
            if reader.replica in self._levels[word] and count:
                self._send(reader, word, count)

    def relay(self) -> None:
        """Relay what is heard of others to the right neighbour, before anything that follows from it. So after one
        round all know, and a member that returns an op has told its right neighbour all that it needs to do the same.
        """
        reader = next((reader for reader in self._readers if reader.replica == self._right), None)
        if reader is None:
            return
        for peer, told in self.relayed:
            heard = peer.heard
            for word, before in told.items():
                value = heard[word]
                if not self._low + before < value < self._high:
                    continue
                count = value - self._low
                each = word == POSTED or self._compares
                for said in range(max(before, count - SLOTS) + 1 if each else count, count + 1):
                    at = descriptor((said - 1) % SLOTS)
                    posted = (heard[at], heard[at + 1], heard[at + DETAIL])
                    belongs = posted if word == POSTED else (heard[at + FINGERPRINT], 0, 0)
                    try:
                        reader.relay(peer.replica, word, self._low + said, belongs)
                    except OSError as error:
                        self._drop(reader, error)
                        return
                told[word] = count

    def told(self, count: int) -> bool:
        """Whether all readers were sent the word that `count` tasks are taken."""
        self.clogged()
        if self._place is None:
            return all(reader.told(TAKEN, self._low + count) for reader in self._readers)
        return all(reader.told(word, self._low + count) for reader in self._lately for word in ENDS)

    def clogged(self) -> list[MirrorWriter]:
        """Send what was left; returns the readers for which something is still left."""
        clogged = []
        some = self._place is not None
        for reader in tuple(self._lately if some else self._readers):
            try:
                if not reader.flush():
                    clogged.append(reader)
                elif some and all(reader.told(word, self._high) for word in ENDS):
                    del self._lately[reader]
            except OSError as error:
                self._drop(reader, error)
        return clogged

    def close(self, nonces: Mapping[int, str]) -> list[MirrorWriter]:
        """End the epoch. Returns the readers that go on with this member, see `ftcomm.collective.pending` for `nonces`;
        closes the others."""
        kept = []
        for reader in self._readers:
            if nonces.get(reader.replica) == reader.nonce and reader.end_epoch():
                kept.append(reader)
                continue
            with contextlib.suppress(OSError):
                reader.flush()  # a failed op may have left a word that says so
            reader.close()
        self._readers.clear()
        self._lately.clear()
        return kept

    def _send(self, reader: MirrorWriter, word: int, count: int) -> None:
        """Push a word to a reader, with the bytes that it announces and that this reader will read."""
        if self._place is not None:
            self._lately[reader] = None
        slot = self._pipeline.slots[(count - 1) % SLOTS]
        at = descriptor((count - 1) % SLOTS)
        payload = _NOTHING
        place = self._pipeline.staging(count - 1) * self._segment.chunk
        if word in ENDS:
            belongs = (self._own[at + FINGERPRINT], 0, 0)
        else:
            belongs = (self._own[at], self._own[at + 1], self._own[at + DETAIL])
            start, stop = self._read_by(reader.replica, word, slot)
            place += start
            if word == POSTED and slot.straight:
                # None if it is taken: then all have what they need of it.
                if count > self._pipeline.taken:
                    begin = slot.task.chunk * slot.op.elements * slot.op.itemsize + start
                    payload = slot.op.memory[begin : begin + stop - start]
            else:
                base = self._segment.offset(word, 0) + place
                payload = self._segment.buffer[base : base + stop - start]
        try:
            reader.send(word, self._low + count, place, payload, belongs)
        except OSError as error:
            self._drop(reader, error)

    def _read_by(self, reader: int, word: int, slot: Slot) -> tuple[int, int]:
        """Returns the bytes of the slot that a reader needs of what `word` announces. None lie at its start: behind its
        end they would be outside the memory, and the reader would end the connection."""
        if word in (GATHERED, ANNOUNCED) and slot.algorithm is not self._pipeline.algorithms.tree:
            return 0, 0
        start, stop = slot.algorithm.read_by(reader, word, slot)
        return (start, stop) if start < stop else (0, 0)

    def _drop(self, reader: MirrorWriter, error: OSError) -> None:
        reader.close()
        self._lately.pop(reader, None)
        if reader in self._readers:  # once
            self._readers.remove(reader)
            who = self._me if isinstance(error, CannotSend) else reader.replica
            self._on_lost(who, self._epoch, f"connection for data: {error}")


def _wake(peers: Sequence[Peer], address: int, asleep_on: int) -> None:
    """Wake those of `peers` that sleep on the word at `address`, or on connections too."""
    woken = False
    for peer in peers:
        asleep = peer.heard[ASLEEP]
        if asleep == IN_POLL:
            peer.wake()
        elif not woken and asleep == asleep_on:
            wake(address)  # wakes all that sleep on it
            woken = True
