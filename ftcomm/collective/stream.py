"""One epoch of the exchange at one member. It does what the pipeline says can be done.

pipeline    decides, see `ftcomm.collective.pipeline`
algorithms  move and reduce memory, see `ftcomm.collective.algorithms`
publisher   raises words, wakes and sends, see `ftcomm.collective.publisher`
checksums   compare the results of all members, if asked to, see `ftcomm.collective.checksum`
fast path   does small ops in one go, see `ftcomm.collective.fast_path`
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from ftcomm.collective.algorithms import Algorithms
from ftcomm.collective.checksum import Checksums, Divergence
from ftcomm.collective.fast_path import FastPath, applies
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import Pipeline, Slot
from ftcomm.collective.plan import GroupView
from ftcomm.collective.publisher import Delivered, Publisher
from ftcomm.kernels.epochs import COUNTER, COUNTS
from ftcomm.kernels.host.reduce import Reducer
from ftcomm.recorder.recorder import GroupRecorder, unread
from ftcomm.settings.tuning import Tuning
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import MirrorWriter, Peer, Poller
from ftcomm.transport.segment import ANNOUNCED, GATHERED, POSTED, SLOTS, TAKEN, Memory, Segment


class Interrupted(Exception):
    """A freeze or the end, while the stream waited in the middle of a publication. Every chunk is INPUT or FINAL."""


class Stream:
    """The stream of one epoch. For one thread at a time, which waits at `waiter`.

    `on_lost(replica, epoch, reason)` hears of connections that broke, and of this member itself if it cannot send. With
    `on_divergence` the results of all members are compared; it hears of those that differ, and raises `Interrupted` to
    give up. `lines` are the connections that this thread serves; without them nothing is ever left to be sent.
    """

    pipeline_type: type[Pipeline] = Pipeline
    publisher_type: type[Publisher] = Publisher

    def __init__(
        self,
        view: GroupView,
        segment: Segment,
        peers: Mapping[int, Peer],
        waiter: Waiter,
        reducer: Reducer,
        on_lost: Callable[[int, int, str], None],
        on_divergence: Callable[[Divergence], None] | None = None,
        lines: Poller | None = None,
        recorder: GroupRecorder | None = None,
    ) -> None:
        self.view, self._peers = view, peers
        self._recorder = unread() if recorder is None else recorder
        self._waiter, self._lines = waiter, lines
        memories: dict[int, Memory] = {**peers, view.me: segment}
        self._left = peers.get(view.ring[view.ring.index(view.me) - 1]) if view.ring else None
        readers: list[MirrorWriter] = []
        self.readers = readers
        algorithms = Algorithms(view, memories, reducer, confirms_arrival=lines is not None and lines.confirms_arrival)
        # All connections are served here: then what is sent from the caller's array is known to have been sent.
        self._serves_all = lines is not None and len(lines.peers) == len(peers)
        others = [peers[m] for m in view.members if m != view.me]
        self.pipeline = pipeline = self.pipeline_type(
            view,
            segment,
            peers,
            algorithms,
            lines.straight_from if lines is not None and self._serves_all else math.inf,
            delivered=(Delivered(view, others, readers),),
            compares=on_divergence is not None,
        )
        self.publisher = self.publisher_type(pipeline, segment, readers, on_lost, compares=on_divergence is not None)
        self._undialled: list[Peer] = []  # peers to dial, for which no thread could be had
        self.checksums: Checksums | None = None
        self.fast_path: FastPath | None = None
        if on_divergence is not None:
            self.checksums = Checksums(view, memories, pipeline.taken_by_all.is_open, on_divergence)
        elif applies(view, peers):
            self.fast_path = FastPath(pipeline, self.publisher.raisers, segment, waiter)

    # -- tasks -------------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Do what can be done without waiting, at most one task per stage; False if nothing could."""
        if self.publisher.relayed:
            self.publisher.relay()
        pipeline = self.pipeline
        moved = False
        if pipeline.unposted and pipeline.posted - pipeline.taken < pipeline.ahead:
            op = pipeline.to_post()
            if op is not None:
                self.post(op)
                moved = True
        if pipeline.place is not None and pipeline.announced < pipeline.posted:
            moved = self._meet() or moved
        if pipeline.arrived < pipeline.posted:
            slot = pipeline.to_arrive()
            if slot is not None:
                pipeline.arrive(slot)
                if slot.first:
                    self._recorder.arrived(slot.op)
                moved = True
        if pipeline.taken < pipeline.arrived:
            # A task without gates is taken now, and others step later.
            if pipeline.stepped < pipeline.arrived and pipeline.slots[pipeline.taken % SLOTS].gates:
                for slot in pipeline.to_step():
                    self.step(slot)
                    moved = True
            slot = pipeline.to_take()
            if slot is not None:
                self.take(slot)
                moved = True
        if pipeline.place is not None and pipeline.ends:
            for word, end in pipeline.to_settle():
                self.publisher.publish(word, end)
                moved = True
        return moved

    def _meet(self) -> bool:
        """Learn through the tree that all have called an op, and have the result where it brings one."""
        pipeline, publisher, algorithm = self.pipeline, self.publisher, self.pipeline.algorithms.tree
        place = pipeline.place
        assert place is not None
        assert algorithm is not None
        moved = False
        if pipeline.gathered < pipeline.posted and (slot := pipeline.to_gather()) is not None:
            if pipeline.compare_below(slot) and slot.algorithm is algorithm and place.children:
                algorithm.gather(slot)
            pipeline.gathered = slot.index + 1
            if place.children:
                publisher.publish(GATHERED, slot.index + 1)
            moved = True
        if (slot := pipeline.to_announce()) is not None:
            brings = pipeline.hear_above(slot) and slot.algorithm is algorithm
            if brings and place.children and place.parent >= 0:
                algorithm.announce(slot)
            pipeline.announce(slot)
            if pipeline.asks(slot.index) and slot.algorithm is algorithm:
                publisher.tell_all(slot)
            if place.children:
                publisher.publish(ANNOUNCED, slot.index + 1)
            moved = True
        return moved

    def post(self, op: Operation) -> None:
        pipeline = self.pipeline
        if self.checksums is not None:
            self.checksums.compare(pipeline.posted - SLOTS + 1)
        first = op.next
        slot = pipeline.begin(op)
        if slot.first:
            self.publisher.describe(slot)
            self._recorder.posted(op, slot.algorithm.name)
        if op.atomic and len(op.finals) > 1:
            op.tasks[first].keep(op, slot.span)
        if pipeline.relayed:
            self._dial(pipeline.need(slot))
        slot.algorithm.post(slot)
        pipeline.posted = count = slot.index + 1
        self.publisher.publish(POSTED, count)

    def _dial(self, peers: Iterable[Peer]) -> None:
        self._undialled = [peer for peer in (*self._undialled, *peers) if not peer.want(self._waiter.interrupt)]

    def step(self, slot: Slot) -> None:
        slot.algorithm.step(slot)
        word = self.pipeline.step(slot)
        if word:
            self.publisher.publish(word, slot.index + 1)

    def take(self, slot: Slot) -> None:
        """Turn INPUT into FINAL, in one go: nothing waits between the first byte and the mark."""
        op, count = slot.op, slot.index + 1
        if op.error is None:
            slot.algorithm.finish(slot)
        if self.checksums is not None:
            self.checksums.taken(slot.index, op, *slot.algorithm.fingerprint(slot))
        self.pipeline.take(slot)
        self.publisher.publish(TAKEN, count, last=op.end == count)

    def stable(self, op: Operation) -> bool:
        """Whether all members are known to hold all of `op` FINAL (or to have failed it). Looks at the words now."""
        if not self.pipeline.is_stable(op):
            return False
        if self.publisher.relayed:
            self.publisher.relay()  # the right neighbour may get it only from here
        if self.readers and not self.publisher.told(op.end):
            return False  # it may be the last for long, and the others wait for it
        if self.checksums is not None:
            self.checksums.compare(op.end)
        return True

    # -- waits -------------------------------------------------------------------------------------------------------

    def wait(self, oldest: Operation) -> bool:
        """Wait for what stands in the way of `oldest`, the first op not returned, when nothing can move.

        False if it did not come before an interrupt or the end of one sleep. With lines: wait for any word.
        """
        if self._undialled:
            self._dial(())
        lines = self._lines
        clogged = self.publisher.clogged() if self.readers else ()
        if lines is not None and lines.peers and not self._serves_all:
            return lines.wait(clogged, lambda: self.advance() or self.stable(oldest))
        if lines is not None and (lines.peers or clogged):
            return lines.wait(clogged)
        gate, count = self.pipeline.obstacle(oldest)
        return gate.wait(count, self._waiter)

    def missing(self, oldest: Operation) -> tuple[int, ...]:
        """Returns the members for which `wait` waits."""
        gate, count = self.pipeline.obstacle(oldest)
        behind = gate.behind(count)
        if gate.relayed and self.pipeline.relayed:
            # The left neighbour tells of others. If it has not, it waits for them as well, or stands still.
            behind = [self._left if self._left and not p.is_open else p for p in behind]
        missing = tuple(sorted({peer.replica for peer in behind}))
        return missing or tuple(reader.replica for reader in self.publisher.clogged())

    def come(self, replica: int) -> int:
        """Returns how far a member has come in this epoch, as its words tell; 0 if it has done nothing in it."""
        peer = self._peers[replica]
        words = peer.words
        return sum(words[word] & COUNTS - 1 for word in peer.published if words[word] >> COUNTER == self.view.epoch)

    # -- the epoch ---------------------------------------------------------------------------------------------------

    def close(self, nonces: Mapping[int, str] | None = None) -> list[MirrorWriter]:
        """End the epoch. Returns the connections of the readers that go on with this member.

        Nothing of it may hold the memory of members that are gone: cyclic garbage is collected so rarely that the
        memory and a descriptor of every loss would be kept.
        """
        kept = self.publisher.close(nonces or {})
        self.pipeline.close()
        return kept

    def tune(self, tuning: Tuning) -> None:
        """Use other switch points, while nothing is in flight."""
        self.view = dataclasses.replace(self.view, tuning=tuning)
        self.pipeline.tune(tuning)
        if self.fast_path is not None:
            self.fast_path.forget()
