"""Readers through connections between their arrival and the moment at which the stream of an epoch can serve them.

A reader dials as soon as it hears of a view, and that may be long before this member enters it, or long after.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftcomm.transport.base import MirrorWriter


class PendingReaders:
    """At most one reader of each replica, so members bound them. Guarded by the mutex of the exchange; nothing blocks.

    Who dials for an epoch has heard that this member stopped for it. So this member enters no earlier epoch, and needs
    no reader that an earlier life of the same replica has dialled.
    """

    def __init__(self) -> None:
        self._readers: list[MirrorWriter] = []

    def add(self, reader: MirrorWriter) -> None:
        """In place of the one that came before it; not if that one was dialled for a later epoch."""
        for known in [known for known in self._readers if known.replica == reader.replica]:
            if known.epoch > reader.epoch:
                reader.close()
                return
            self._readers.remove(known)
            known.close()
        self._readers.append(reader)

    def bring_back(self, reader: MirrorWriter) -> None:
        """It was served in an epoch that is over. Not in place of one that came after it."""
        if any((known.replica, known.epoch) == (reader.replica, reader.epoch) for known in self._readers):
            reader.close()
        else:
            self.add(reader)

    def take(self, epoch: int, lives: Mapping[int, str]) -> list[MirrorWriter]:
        """The readers that `epoch` can serve are no longer pending. Closes those that no epoch will serve any more.

        `lives`: replica -> nonce of its segment, of the other members.
        """
        taken, later = [], []
        for reader in self._readers:
            if reader.epoch > epoch:
                later.append(reader)
            elif is_current(reader, epoch, lives):
                taken.append(reader)
            else:
                reader.close()
        self._readers = later
        return taken

    def holds(self, replica: int, life: str) -> bool:
        return any((reader.replica, reader.life) == (replica, life) for reader in self._readers)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def is_current(reader: MirrorWriter, epoch: int, lives: Mapping[int, str]) -> bool:
    """Whether the stream of `epoch` serves this reader, which was dialled for that epoch or an earlier one."""
    return reader.serves(epoch) and lives.get(reader.replica) == reader.life
