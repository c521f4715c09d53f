"""An all-reduce of one chunk that finds nothing else in flight, in one go: the steps of the stream without the stream.

What a small op costs is not its bytes but the instructions that the interpreter runs for it. The stream decides anew
before each step what can move, for any number of tasks of any kind; here there is one task, and what comes next is
known. The steps are those of the stream, in its order, on its words and its staging:

    post      my input into my staging, the call beside it; raise POSTED
    arrive    all have posted; all have made the same call
    take      reduce all inputs into the caller's buffer: FINAL; raise TAKEN
    stable    all have taken

A wait that does not end at once, a poke, another call elsewhere: then the stream is left as it would be itself at this
point, and goes on. So nothing is decided here that is not decided there.

Bytecodes of an op of 1 KB, two members, without its waits: 1510 before, 1010 now (`ftcomm bench profile`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView, two_shot
from ftcomm.collective.wire import WIRES
from ftcomm.kernels.wait import IN_POLL, Waiter, wake
from ftcomm.transport.segment import ASLEEP, DETAIL, NEAR, POSTED, SLOTS, TAKEN, Peer, Segment, descriptor

if TYPE_CHECKING:
    from ftcomm.collective.stream import Stream

_LEAST = 2  # members; alone there is nothing to be quick about
_KEPT = 64  # kinds of calls, per slot


def may(view: GroupView, peers: Mapping[int, Peer]) -> bool:
    """Whether the ops of this view can go this way: all members give, and reach each other through shared memory. With
    a ring the stream says so beside each call, which here it does not."""
    shared = all(peer.how == "shm" for peer in peers.values()) and not view.ring
    return view.one_host and shared and len(view.members) >= _LEAST and view.contributors == view.members


class _Shot:
    """Calls of one kind in one slot: where their inputs lie, and what reduces them."""

    __slots__ = ("lane", "mine", "reduce")

    def __init__(self, stream: Stream, op: Operation, slot: int) -> None:
        self.lane = stream.lane(op.dtype, op.wire, op.count, slot)
        self.mine = self.lane.mine
        self.reduce = stream.reduction(op, self.lane)


class Express:
    """That of one stream, for which `may` is true, and which does not compare results."""

    def __init__(self, stream: Stream, segment: Segment, peers: Mapping[int, Peer], waiter: Waiter) -> None:
        view = stream.view
        self._view, self._own, self._waiter = view, segment.words, waiter
        self._contributors = stream.contributors
        self._low, self._high = view.epoch << 32, (view.epoch + 1) << 32
        self._others = others = [peers[member] for member in view.members if member != view.me]
        self._words = [peer.words for peer in others]
        self._waits = {
            word: [(peer.words, peer.address + 8 * word, token(peer.replica, word)) for peer in others]
            for word in (POSTED, TAKEN)
        }
        self._tokens = {word: (token(view.me, word), segment.address + 8 * word) for word in (POSTED, TAKEN)}
        self._shots: list[dict[int, _Shot]] = [{} for _ in range(NEAR)]  # by call

    def run(self, stream: Stream, op: Operation) -> bool:
        """`op` is the only one in flight, and nothing of it is posted. True: all members hold it FINAL. False: the
        stream is to go on with it."""
        index, number, call = stream.taken, op.number, op.call
        slot = index % NEAR
        shot = self._shots[slot].get(call)
        if shot is None:
            shot = self._shot(stream, op, slot)
            if shot is None:
                return False
        if self._waiter.poked:
            return False
        own, array, at = self._own, op.array, descriptor(index % SLOTS)
        own[at] = number
        own[at + 1] = call
        own[at + DETAIL] = 0
        shot.mine[...] = array
        stream.unposted.popleft()  # another thread may have added one behind it meanwhile
        op.next = 1
        op.end = stream.posted = index + 1
        target = self._low + index + 1
        if not self._raise(POSTED, target):
            stream.fill(index, op, shot.lane)
            return False
        for words in self._words:
            if words[at] != number or words[at + 1] != call or words[at + DETAIL]:
                stream.fill(index, op, shot.lane)
                return False
        op.verified = True
        shot.reduce(array)
        op.finals[0] = self._contributors
        stream.arrived = stream.taken = index + 1
        return self._raise(TAKEN, target)

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

    def _shot(self, stream: Stream, op: Operation, slot: int) -> _Shot | None:
        """None for what does not go in one go."""
        if op.wire != WIRES[0] or len(op.finals) > 1 or two_shot(op.nbytes, self._view):
            return None
        shots = self._shots[slot]
        if len(shots) >= _KEPT:
            shots.clear()
        shot = shots[op.call] = _Shot(stream, op, slot)
        return shot


def token(replica: int, word: int) -> int:
    """What a member's ASLEEP word holds while it sleeps on a word of `replica`; 0 when awake."""
    return (replica + 1) << 16 | word
