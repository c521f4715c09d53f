"""Somebody on the path between two hosts, who sees the records of a connection for data, and has no key."""

from __future__ import annotations

import enum
import random

from ftcomm.control.sealed import TAG

_LENGTH = 4  # bytes in front of a record


class Attack(enum.Enum):
    """The things that may happen to one record. Who keeps one back is noticed when the next one comes: until then it is
    like a path that is blocked."""

    CHANGE = enum.auto()
    REPEAT = enum.auto()
    INSERT = enum.auto()
    LEAVE_OUT = enum.auto()
    SWAP = enum.auto()  # with the next one

    @property
    def keeps_back(self) -> bool:
        return self in (Attack.LEAVE_OUT, Attack.SWAP)


class Attacker:
    """Lets whole records pass. `next` is what happens to the next one."""

    def __init__(self, rng: random.Random) -> None:
        self.next: Attack | None = None
        self._random = rng
        self._seen = bytearray()
        self._kept = b""

    def lets_pass(self, data: bytes) -> bytes:
        """Returns what comes through now."""
        self._seen += data
        passed = b""
        while (record := self._record()) is not None:
            how, self.next = self.next, None
            kept, self._kept = self._kept, b""
            if how is None:
                passed += record + kept
            elif how is Attack.CHANGE:
                passed += self._changed(record) + kept
            elif how is Attack.REPEAT:
                passed += record + record + kept
            elif how is Attack.INSERT:
                passed += self._changed(record) + record + kept
            elif how is Attack.SWAP:
                passed, self._kept = passed + kept, record
            else:
                passed += kept
        return passed

    def _record(self) -> bytes | None:
        length = int.from_bytes(self._seen[:_LENGTH], "big") + _LENGTH + TAG
        if len(self._seen) < max(length, _LENGTH):
            return None
        record = bytes(self._seen[:length])
        del self._seen[:length]
        return record

    def _changed(self, record: bytes) -> bytes:
        at = self._random.randrange(8 * _LENGTH, 8 * len(record))
        return b"".join((record[: at // 8], bytes([record[at // 8] ^ (1 << at % 8)]), record[at // 8 + 1 :]))
