"""The interface of a transport: peers, the writers of their mirrors, and what a driver sleeps on.

Where memory is shared, a member reads the segment of another one itself. Otherwise each reader has a *mirror* of it,
into which the owner's `MirrorWriter` pushes every word with the bytes that it announces. Only this package knows which
transport does so; others ask what a peer can do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from ftcomm.kernels.epochs import COUNTS
from ftcomm.transport.segment import (
    ANNOUNCED,
    DETAIL,
    FINGERPRINT,
    GATHERED,
    POSTED,
    SLOTS,
    TAKEN,
    Memory,
    descriptor,
)

OnLost = Callable[[int, int, str], None]  # (replica, epoch, reason)
Belongs = tuple[int, int, int]  # `_DESCRIBED`: number, call and detail of the op; TAKEN: a fingerprint, 0, 0

_DESCRIBED = (POSTED, GATHERED, ANNOUNCED)


def raise_word(words: memoryview, word: int, value: int, belongs: Belongs) -> None:
    """Store a word of a mirror, behind what belongs to its value."""
    at = descriptor(((value & (COUNTS - 1)) - 1) % SLOTS)
    if word in _DESCRIBED:
        words[at], words[at + 1], words[at + DETAIL] = belongs
    elif word == TAKEN:
        words[at + FINGERPRINT] = belongs[0]
    words[word] = value


class CannotSend(ConnectionError):
    """This process can send nothing to any receiver, so no receiver is to blame."""


class Peer(Memory):
    """The segment of another member, as this member sees it."""

    transport: str  # the name of the transport, for people
    shares_memory = False  # with this process, which then sees the member's own words, and its death on them
    pid = 0  # the process, if memory is shared
    nonce = ""  # the nonce of the segment, which tells one life of that member from another

    def __init__(self, replica: int) -> None:
        self.replica = replica

    @property
    def is_open(self) -> bool:
        """Whether the segment can be read now; if not, `want` and `open_now` connect."""
        return True

    def want(self, opened: Callable[[], None] = lambda: None) -> bool:
        """Connect in the background if the peer is not open, and call `opened` then. Does not block; idempotent. False:
        ask again, since no thread can be had for it now."""
        return True

    def open_now(self) -> None:
        """Block until the peer is open. Raises `OSError` if an attempt fails meanwhile."""

    def relay_for(self, others: Mapping[int, Peer]) -> None:
        """Pass on to `others` what this peer relays of them: what they have posted and taken."""

    def relayed(self, word: int, value: int, belongs: Belongs) -> None:
        """Take what this peer has published, as another member relays it."""

    def drive(self, driven: bool = True) -> None:
        """Let the driver receive from now on (see `Poller`), instead of a thread that serves all peers; or, not
        `driven`, that thread."""

    def pump(self) -> bool:
        """Take in what has come, at most one large payload, where the driver receives. True if a word was raised. Does
        not block. Any thread."""
        return False

    def serves(self, epoch: int) -> bool:
        """Whether the peer may serve in `epoch` too, which is later than the one that it was made for."""
        return True

    def enter(self, epoch: int) -> None:
        """Enter `epoch`, for which this member has stopped; from now on a connection that closes is news again."""

    def quiet(self) -> None:
        """Note that a view change has begun: a connection that closes from now on is no news. Does not block."""

    def overdue(self, seconds: float) -> None:
        """Learn that an op has waited for this peer for `seconds`, and nothing has moved: does this process still hear
        it? Called again and again. Does not block."""

    def wake(self) -> None:
        """Wake the owner, which sleeps `IN_POLL`, if memory is shared. Does not block; for the driving thread."""

    def close(self) -> None:
        """Close the peer, which no thread reads any more. Does not block."""


class MirrorWriter(ABC):
    """Pushes what this member publishes into the mirror that `replica` has of its segment, from `epoch` on.

    `nonce` is that of the segment of that member. For the driving thread alone, or for a thread that has stopped it.
    No method blocks. `send`, `relay` and `flush` raise `OSError` if the connection is lost.
    """

    replica: int
    epoch: int
    nonce: str
    slots = SLOTS  # of the staging that are used in the epoch, see `ftcomm.collective.pipeline`

    @abstractmethod
    def send(self, word: int, value: int, start: int, payload: memoryview, belongs: Belongs) -> None:
        """Send one frame, or leave it to `flush`. `payload` must stay as it is until the reader has it."""

    @abstractmethod
    def relay(self, member: int, word: int, value: int, belongs: Belongs) -> None:
        """Relay what another member has published; does nothing where each member is connected to all others."""

    @abstractmethod
    def flush(self) -> bool:
        """Send what was left. True if nothing is left now."""

    @abstractmethod
    def told(self, word: int, value: int) -> bool:
        """Whether all frames for this value of the word, or a lower one, have been sent."""

    @abstractmethod
    def serves(self, epoch: int) -> bool:
        """Whether this writer can carry what belongs to `epoch`."""

    @abstractmethod
    def end_epoch(self) -> bool:
        """End the epoch; True if the connection goes on in the next one."""

    @abstractmethod
    def fileno(self) -> int:
        """The descriptor to poll for room."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; idempotent."""


class Poller(ABC):
    """Receives for the thread that drives a stream, and lets it sleep on connections.

    `peers` are those that this thread receives from: all that share no memory with it, or none.
    """

    peers: Sequence[Peer]
    straight_from = 0  # bytes of an op from which it pays to send straight from the caller's array
    confirms_arrival = False  # whether what `told` confirms has arrived, even if the connection ends

    @abstractmethod
    def wait(self, clogged: Iterable[MirrorWriter], look: Callable[[], bool] | None = None) -> bool:
        """Wait. True once a word was raised or one of the writers `clogged` has room; False at an interrupt, or after
        one sleep. `look` says whether a word in shared memory was raised."""
