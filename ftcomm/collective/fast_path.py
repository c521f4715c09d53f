"""The fast path of an all-reduce of one chunk with nothing else in flight: the steps of the stream without the stream.

The cost of a small op is not in its bytes but in the instructions that the interpreter runs. Before each step the
stream decides anew what can move, for any number of tasks of any kind. Here there is one task, and the next step is
known. The steps are those of the stream, in its order, on its words and its staging:

    post      my input into my staging, the call beside it; raise POSTED
    arrive    all have posted; all have made the same call
    take      reduce all inputs into the caller's buffer: FINAL; raise TAKEN
    stable    all have taken

At a wait that does not end at once, an interrupt, or another call elsewhere, the pipeline is left as the stream would
have it at this point, and the stream goes on. So all decisions here are decisions of the stream.

`python -m tests.bytecodes` counts what the interpreter runs for such an op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftcomm.collective.algorithms.direct import OneShotViews
from ftcomm.collective.operation import Operation
from ftcomm.collective.pipeline import LAST, Pipeline
from ftcomm.collective.plan import GroupView
from ftcomm.errors import TransportError
from ftcomm.sync.futex import Waiter
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import DESCRIPTORS, DETAIL, NEAR, POSTED, SLOTS, TAKEN, Segment

LEAST = 2  # members; one alone needs no fast path
_KEPT = 64  # kinds of calls, per slot

_PLACES = tuple((at, at + 1, at + DETAIL) for at in DESCRIPTORS)  # of the words that describe each slot

Raisers = Mapping[int, Callable[[int], None]]  # see `ftcomm.collective.publisher.Publisher`


def applies(view: GroupView, peers: Mapping[int, Peer]) -> bool:
    """Whether the ops of this view can take the fast path: all members contribute, and reach each other through shared
    memory. With a ring the stream says so beside each call, which this path does not, and with a tree members wait for
    other words."""
    shared = all(peer.shares_memory for peer in peers.values()) and not view.ring and not view.tree
    return view.one_host and shared and len(view.members) >= LEAST and view.contributors == view.members


class FastPath:
    """The fast path of one stream, for which `applies` is true, and which does not compare results. It runs while
    nobody reads through a connection, so that the words of `raisers` are all that there is to say."""

    def __init__(self, pipeline: Pipeline, raisers: Raisers, segment: Segment, waiter: Waiter) -> None:
        view = pipeline.view
        self._pipeline = pipeline
        self._raise_posted, self._raise_taken = raisers[POSTED], raisers[TAKEN]
        self._view, self._own, self._waiter = view, segment.words, waiter
        self._contributors = view.contributors
        self._posted, self._taken = pipeline.posted_by_all, pipeline.taken_by_all
        self._words = [peer.words for peer in pipeline.peers]
        # Keyed by call; None: it cannot take the fast path.
        self._kept: list[dict[int, OneShotViews | None]] = [{} for _ in range(NEAR)]

    def run(self, op: Operation) -> bool:
        """Run `op`, which was just submitted, with nothing else in flight. True: all members hold it FINAL. False: the
        stream has to go on with it."""
        pipeline = self._pipeline
        index, call = pipeline.taken, op.call
        kept = self._kept[index % NEAR]
        views = kept[call] if call in kept else self._views(op, index)
        if views is None or pipeline.posted != index or index >= LAST or len(pipeline.unposted) > 1:
            return False
        if self._waiter.interrupted:
            return False
        own, array, place = self._own, op.array, op.place
        at, call_at, detail_at = _PLACES[index % SLOTS]
        own[at] = place
        own[call_at] = call
        own[detail_at] = 0
        views.mine[...] = array
        pipeline.unposted.popleft()  # another thread may have added one after it
        op.end = pipeline.posted = count = index + 1
        self._raise_posted(count)
        if not self._posted.wait(count, self._waiter):
            pipeline.fill(index, op)
            return False
        for words in self._words:
            if words[at] != place or words[call_at] != call or words[detail_at]:
                pipeline.fill(index, op)
                return False
        views.reduce(array)
        op.finals[0] = self._contributors
        pipeline.arrived = pipeline.taken = count
        self._raise_taken(count)
        if self._taken.wait(count, self._waiter):
            return True
        op.verified = True
        pipeline.take(pipeline.fill(index, op))  # a reader that has yet to take it may attach only now
        return False

    def _views(self, op: Operation, index: int) -> OneShotViews | None:
        """Returns the views for an op; None if it cannot take the fast path."""
        algorithms, kept = self._pipeline.algorithms, self._kept[index % NEAR]
        made: OneShotViews | None = None
        if len(kept) >= _KEPT:
            kept.clear()
        if len(op.finals) == 1 and algorithms.of(op) is algorithms.one_shot:
            try:
                made = algorithms.one_shot.views(op, op.count, self._pipeline.staging(index))
            except TransportError:  # there is no memory for them, with which the stream fails
                return None
        kept[op.call] = made
        return made

    def forget(self) -> None:
        """Forget all views, since other ops may take the fast path from now on."""
        for kept in self._kept:
            kept.clear()
