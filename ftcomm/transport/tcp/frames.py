"""Frames of the data plane over TCP: a header, and the bytes that a reader needs of what a word announces."""

from __future__ import annotations

import struct

from ftcomm.transport.segment import PUBLISHED

# Magic, word, its value; of the payload: where in its region, bytes; what belongs to the word: to POSTED the number,
# the call and the detail of the op, to TAKEN the fingerprint of the result and two zeros.
HEAD = struct.Struct("<IIQIIQQQ")
MAGIC = 0x66746332
WORDS = frozenset(PUBLISHED)
MEMBER = 16  # the bits of a word from here on: 1 + the member that it is of; 0: the writer itself
WORD = (1 << MEMBER) - 1


def of_member(member: int, word: int) -> int:
    """What a frame says instead of `word` when it relays what another member has published."""
    return (member + 1) << MEMBER | word
