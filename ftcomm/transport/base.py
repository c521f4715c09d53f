"""What the collectives see of a transport: peers, the writers of their mirrors, and what a driver sleeps on.

A member's segment is read where it lies if memory is shared. Otherwise each reader has a *mirror* of it, into which the
owner's `MirrorWriter` pushes every word with the bytes that it announces. Which transport does so is known here and
below; others ask what a peer can do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from ftcomm.transport.segment import Memory

Lost = Callable[[int, int, str], None]  # (replica, epoch, reason)
Belongs = tuple[int, int, int]  # of POSTED the number, the call and the detail of the op; of TAKEN a fingerprint, 0, 0


class CannotSend(ConnectionError):
    """This process can send nothing, whoever the receiver is: no receiver is to blame."""


class Peer(Memory):
    """The segment of another member, as this one sees it."""

    transport: str  # its name, for people
    shares_memory = False  # with this process: its words are its own, and its death is seen on them
    nonce = ""  # of the segment; tells one life of that member from another

    def __init__(self, replica: int) -> None:
        self.replica = replica

    @property
    def is_open(self) -> bool:
        """Whether it can be read now; if not, `want` and `open_now` connect."""
        return True

    def want(self, opened: Callable[[], None] = lambda: None) -> None:
        """Connect in the background if it is not open, and call `opened` then. Does not block; idempotent."""

    def open_now(self) -> None:
        """Wait until it is open. Raises `OSError` if an attempt fails meanwhile."""

    def relay_for(self, others: Mapping[int, Peer]) -> None:
        """Pass on to these what this peer relays of them: what they have posted and taken."""

    def relayed(self, word: int, value: int, belongs: Belongs) -> None:
        """Another member tells what this peer has published."""

    def drive(self, driven: bool = True) -> None:
        """Whether the driver receives from now on (see `Poller`), instead of a thread of the peer."""

    def serves(self, epoch: int) -> bool:
        """Whether it may serve in this epoch too, which is later than the one that it was made for."""
        return True

    def enter(self, epoch: int) -> None:
        """This member, which has stopped for it, enters this epoch; a connection that closes is news again."""

    def quiet(self) -> None:
        """A view change has begun; a connection that closes from now on is no news. Does not block."""

    def ring(self) -> None:
        """Wake its owner, who sleeps `IN_POLL`, if memory is shared. Does not block; for the driving thread."""

    def close(self) -> None:
        """No thread reads it any more. Does not block."""


class MirrorWriter(ABC):
    """Pushes what this member publishes into the mirror that `replica` has of its segment, from `epoch` on.

    `life` is the nonce of that member's own segment. For the driving thread alone, or whoever has stopped it. No method
    blocks. `send`, `relay` and `flush` raise `OSError` if the connection is lost.
    """

    replica: int
    epoch: int
    life: str

    @abstractmethod
    def send(self, word: int, value: int, start: int, payload: memoryview, belongs: Belongs) -> None:
        """Send one frame, or leave it to `flush`. `payload` stays as it is until the reader has it."""

    @abstractmethod
    def relay(self, member: int, word: int, value: int, belongs: Belongs) -> None:
        """Tell what another member has published; nothing where each member is connected to all others."""

    @abstractmethod
    def flush(self) -> bool:
        """Send what has been left. True if nothing is left now."""

    @abstractmethod
    def told(self, word: int, value: int) -> bool:
        """True if no frame for this value of the word, or a lower one, is left to be sent."""

    @abstractmethod
    def serves(self, epoch: int) -> bool:
        """Whether it can be given what belongs to this epoch."""

    @abstractmethod
    def turn(self) -> bool:
        """End the epoch; True if the connection goes on in the next one."""

    @abstractmethod
    def fileno(self) -> int:
        """The descriptor to poll for room."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; idempotent."""


class Poller(ABC):
    """How the thread that drives a stream receives, and sleeps on connections.

    `peers` are those that this thread receives from: all that share no memory with it, or none.
    """

    peers: Sequence[Peer]
    straight_from = 0  # bytes of an op from which it pays to send from the caller's array where it lies
    lands = False  # whether what was told lies at the peer, whatever becomes of the connection

    @abstractmethod
    def wait(self, clogged: Iterable[MirrorWriter], look: Callable[[], bool] | None = None) -> bool:
        """Wait until a word was raised or one of the writers `clogged` has room: True. False at an interrupt, and after
        one sleep. `look` says whether a word in shared memory was raised."""
