"""An all-reduce of one chunk that finds nothing else in flight, in one go: the steps of the stream without the stream.

What a small op costs is not its bytes but the instructions that the interpreter runs for it. The stream decides anew
before each step what can move, for any number of tasks of any kind; here there is one task, and what comes next is
known. The steps are those of the stream, in its order, on its words and its staging:

    post      my input into my staging, the call beside it; raise POSTED
    arrive    all have posted; all have made the same call
    take      reduce all inputs into the caller's buffer: FINAL; raise TAKEN
    stable    all have taken

A wait that does not end at once, an interrupt, another call elsewhere: then the pipeline is left as it would be at this
point, and the stream goes on. So nothing is decided here that is not decided there.

Bytecodes of an op of 1 KB, two members, without its waits: 1510 before, 1010 now (`ftcomm bench profile`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ftcomm.collective.algorithms.direct import OneShotViews
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import Pipeline
from ftcomm.collective.plan import GroupView
from ftcomm.collective.publisher import token
from ftcomm.kernels.epochs import COUNTER
from ftcomm.sync.futex import IN_POLL, Waiter, wake
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import ASLEEP, DETAIL, NEAR, POSTED, SLOTS, TAKEN, Segment, descriptor

LEAST = 2  # members; alone there is nothing to be quick about
_KEPT = 64  # kinds of calls, per slot


def applies(view: GroupView, peers: Mapping[int, Peer]) -> bool:
    """Whether the ops of this view can go this way: all members give, and reach each other through shared memory. With
    a ring the stream says so beside each call, which here it does not."""
    shared = all(peer.shares_memory for peer in peers.values()) and not view.ring
    return view.one_host and shared and len(view.members) >= LEAST and view.contributors == view.members


class FastPath:
    """The fast path of one stream, for which `applies` is true, and which does not compare results."""

    def __init__(self, pipeline: Pipeline, segment: Segment, waiter: Waiter) -> None:
        view = pipeline.view
        self._pipeline = pipeline
        self._view, self._own, self._waiter = view, segment.words, waiter
        self._contributors = view.contributors
        self._low, self._high = view.epoch << COUNTER, (view.epoch + 1) << COUNTER
        self._others = others = pipeline.peers
        self._words = [peer.words for peer in others]
        self._waits = {
            word: [(peer.words, peer.address + 8 * word, token(peer.replica, word)) for peer in others]
            for word in (POSTED, TAKEN)
        }
        self._tokens = {word: (token(view.me, word), segment.address + 8 * word) for word in (POSTED, TAKEN)}
        self._kept: list[dict[int, OneShotViews]] = [{} for _ in range(NEAR)]  # by call

    def run(self, op: Operation) -> bool:
        """`op` is the only one in flight, and nothing of it is posted. True: all members hold it FINAL. False: the
        stream is to go on with it."""
        pipeline = self._pipeline
        index, place, call = pipeline.taken, op.number | op.stamp, op.call
        views = self._kept[index % NEAR].get(call)
        if views is None:
            views = self._views(op, index)
            if views is None:
                return False
        if self._waiter.interrupted:
            return False
        own, array, at = self._own, op.array, descriptor(index % SLOTS)
        own[at] = place
        own[at + 1] = call
        own[at + DETAIL] = 0
        views.mine[...] = array
        pipeline.unposted.popleft()  # another thread may have added one behind it meanwhile
        op.next = 1
        op.end = pipeline.posted = index + 1
        target = self._low + index + 1
        if not self._raise(POSTED, target):
            pipeline.fill(index, op)
            return False
        for words in self._words:
            if words[at] != place or words[at + 1] != call or words[at + DETAIL]:
                pipeline.fill(index, op)
                return False
        op.verified = True
        views.reduce(array)
        op.finals[0] = self._contributors
        pipeline.arrived = pipeline.taken = index + 1
        if self._raise(TAKEN, target):
            return True
        pipeline.take(pipeline.fill(index, op))  # who has yet to take it may attach only now, and reads this slot
        return False

    def _raise(self, word: int, target: int) -> bool:
        """Say that this member has come so far; True when all others have said so."""
        self._own[word] = target
        asleep, address = self._tokens[word]
        for peer in self._others:
            if peer.words[ASLEEP]:
                self._wake(peer, asleep, address)
        high = self._high
        for words, address, asleep in self._waits[word]:
            if not target <= words[word] < high and not self._waiter.until(words, word, address, target, high, asleep):
                return False
        return True

    @staticmethod
    def _wake(peer: Peer, asleep: int, address: int) -> None:
        if peer.words[ASLEEP] == asleep:
            wake(address)
        elif peer.words[ASLEEP] == IN_POLL:  # that one does not share memory with all
            peer.ring()

    def _views(self, op: Operation, index: int) -> OneShotViews | None:
        """None for what does not go in one go."""
        algorithms = self._pipeline.algorithms
        if len(op.finals) > 1 or algorithms.of(op) is not algorithms.one_shot:
            return None
        kept = self._kept[index % NEAR]
        if len(kept) >= _KEPT:
            kept.clear()
        made: OneShotViews = algorithms.one_shot.views(op, op.count, self._pipeline.staging(index))
        kept[op.call] = made
        return made

    def forget(self) -> None:
        """What goes this way may be another choice from now on."""
        for kept in self._kept:
            kept.clear()
