"""Readers through connections that have arrived and that no epoch serves yet.

A reader dials as soon as it hears of a view, which may be long before this member enters it, or long after.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftcomm.transport.base import MirrorWriter


class PendingReaders:
    """The pending readers, at most one of each replica, so that members bound them. Guarded by the mutex of the
    exchange; no method blocks.

    A reader that dials for an epoch has heard that this member has stopped for it. So this member enters no earlier
    epoch, and needs no reader that an earlier life of the same replica has dialled.
    """

    def __init__(self) -> None:
        self._readers: list[MirrorWriter] = []

    def add(self, reader: MirrorWriter) -> None:
        """Add a reader in place of an earlier one, unless that one was dialled for a later epoch."""
        for known in [known for known in self._readers if known.replica == reader.replica]:
            if known.epoch > reader.epoch:
                reader.close()
                return
            self._readers.remove(known)
            known.close()
        self._readers.append(reader)

    def bring_back(self, reader: MirrorWriter) -> None:
        """Take a reader back that was served in an epoch that is over, unless another one came after it."""
        if any((known.replica, known.epoch) == (reader.replica, reader.epoch) for known in self._readers):
            reader.close()
        else:
            self.add(reader)

    def take(self, epoch: int, nonces: Mapping[int, str]) -> list[MirrorWriter]:
        """Take out the readers that `epoch` can serve. Closes those that no epoch will serve any more.

        `nonces`: replica -> nonce of its segment, for the other members.
        """
        taken, later = [], []
        for reader in self._readers:
            if reader.epoch > epoch:
                later.append(reader)
            elif is_current(reader, epoch, nonces):
                taken.append(reader)
            else:
                reader.close()
        self._readers = later
        return taken

    def holds(self, replica: int, nonce: str) -> bool:
        return any((reader.replica, reader.nonce) == (replica, nonce) for reader in self._readers)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def is_current(reader: MirrorWriter, epoch: int, nonces: Mapping[int, str]) -> bool:
    """Whether the stream of `epoch` serves this reader, which was dialled for that epoch or an earlier one."""
    return reader.serves(epoch) and nonces.get(reader.replica) == reader.nonce
