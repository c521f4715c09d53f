"""Text that ranks have written, without what would command a terminal."""

from __future__ import annotations

import re

# ECMA-48: CSI, OSC and other strings with their ends, two-character sequences, and CSI as one character.
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]"
)


def plain(text: str) -> str:
    """Returns one line of `text`: colours and other sequences are left out, what cannot be printed is "?"."""
    text = _SEQUENCE.sub("", text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char in "\t\r\n" else "?" for char in text)
