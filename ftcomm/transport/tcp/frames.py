"""Frames of the data plane over TCP: a header, and the bytes that a reader needs of what a word announces."""

from __future__ import annotations

import struct

# Magic, word, its value; the payload's offset in its region, and its bytes; and `Belongs`.
HEAD = struct.Struct("<IIQIIQQQ")
MAGIC = 0x66746332
MEMBER = 16  # the bits from here on: 1 + the member that the word belongs to; 0: the writer
WORD = (1 << MEMBER) - 1


def of_member(member: int, word: int) -> int:
    """Returns what a frame says instead of `word` when it relays what another member has published."""
    return (member + 1) << MEMBER | word
