"""Memory between simulated hosts: a mirror that frames fill, as in `ftcomm.transport.tcp`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcomm.kernels.epochs import COUNTER, COUNTS
from ftcomm.simulation.memory import TinyMemory
from ftcomm.simulation.network import Connection
from ftcomm.transport.segment import DETAIL, FINGERPRINT, POSTED, PUBLISHED, SLOTS, TAKEN, descriptor

if TYPE_CHECKING:
    from ftcomm.simulation.rank import Rank


class Mirror(TinyMemory):
    """The memory of a member on another host, as one reader sees it from one epoch on."""

    transport = "tcp"
    shares_memory = False

    def __init__(self, reader: Rank, replica: int, epoch: int, connection: Connection) -> None:
        super().__init__(replica)
        self._reader, self._epoch, self._connection = reader, epoch, connection
        self._quiet, self._untold = False, ""
        self._newest = 0  # of the words
        self._begin_epoch(epoch)
        connection.receive[0] = self._apply
        connection.closed[0] = self._closed

    def serves(self, epoch: int) -> bool:
        return self._connection.open[0]

    def enter(self, epoch: int) -> None:
        self._epoch, self._quiet = epoch, False
        self._begin_epoch(epoch)
        untold, self._untold = self._untold, ""
        if untold:
            self._closed(untold)

    def _begin_epoch(self, epoch: int) -> None:
        if epoch > self._newest:
            self._newest = epoch
            for word in PUBLISHED:
                self.words[word] = epoch << COUNTER

    def quiet(self) -> None:
        self._quiet = True

    def close(self) -> None:
        self._quiet = True
        self._connection.close(0)

    def _apply(self, frame: tuple[int, int, int, bytes, tuple[int, int, int]]) -> None:
        word, value, start, payload, (number, call, detail) = frame
        epoch = value >> COUNTER
        if epoch == self._newest and value <= self.words[word]:
            raise AssertionError(f"a frame that cannot be: word {word}, value {value:#x}, {self.words[word]:#x} before")
        self._begin_epoch(epoch)
        slot = ((value & (COUNTS - 1)) - 1) % SLOTS
        if payload:
            base = self.place(word, start, len(payload))
            self.buffer[base : base + len(payload)] = payload
        if epoch < self._newest:
            return
        at = descriptor(slot)
        if word == POSTED:
            self.words[at], self.words[at + 1], self.words[at + DETAIL] = number, call, detail
        elif word == TAKEN:
            self.words[at + FINGERPRINT] = number
        self.words[word] = value
        self._reader.kick()

    def _closed(self, reason: str) -> None:
        self._untold = reason if self._quiet else ""
        if not self._quiet:
            self._reader.data_lost(self.replica, self._epoch, f"connection for data: {reason}")


class Feed:
    """In place of a `MirrorWriter`: a member that reads this one's memory over a connection."""

    def __init__(self, replica: int, epoch: int, life: str, connection: Connection) -> None:
        self.replica, self.epoch, self.life = replica, epoch, life
        self._connection = connection

    def send(self, word: int, value: int, start: int, payload: Any, belongs: Any) -> None:
        if not self._connection.open[1]:
            raise ConnectionError("broken")
        self._connection.send(1, (word, value, start, bytes(payload), belongs))

    def relay(self, member: int, word: int, value: int, belongs: Any) -> None:
        """Nothing: all members are connected to all others."""

    def flush(self) -> bool:
        return True

    def told(self, word: int, value: int) -> bool:
        return True

    def serves(self, epoch: int) -> bool:
        return epoch >= self.epoch

    def turn(self) -> bool:
        return True

    def close(self) -> None:
        self._connection.close(1)
