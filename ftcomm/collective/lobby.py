"""Readers through TCP between their arrival and the moment at which the stream of their epoch can serve them.

A reader dials as soon as it hears of a view, and that may be long before this member enters it, or long after.
"""

from __future__ import annotations

from ftcomm.transport.tcp import Reader


class Lobby:
    """At most one reader of each replica and epoch. Guarded by the mutex of the exchange; nothing here blocks."""

    def __init__(self) -> None:
        self._readers: list[Reader] = []

    def add(self, reader: Reader) -> None:
        """In place of the one that came before it."""
        for earlier in self._of(reader.replica, reader.epoch):
            self._readers.remove(earlier)
            earlier.close()
        self._readers.append(reader)

    def take(self, epoch: int) -> list[Reader]:
        """Those of `epoch` leave the lobby; those of earlier ones, which nobody will serve, are closed."""
        for reader in self._readers:
            if reader.epoch < epoch:
                reader.close()
        taken = [reader for reader in self._readers if reader.epoch == epoch]
        self._readers = [reader for reader in self._readers if reader.epoch > epoch]
        return taken

    def holds(self, replica: int, epoch: int) -> bool:
        return bool(self._of(replica, epoch))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def _of(self, replica: int, epoch: int) -> list[Reader]:
        return [reader for reader in self._readers if (reader.replica, reader.epoch) == (replica, epoch)]
