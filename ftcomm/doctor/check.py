"""The finding of a check of the doctor: a name, a verdict, what was seen, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Grade = Literal["ok", "note", "wrong"]  # note: works, and something better is to be had; wrong: will not work


class Finding(msgspec.Struct, frozen=True):
    name: str
    verdict: Grade
    said: str  # what was looked at, and what was there
    mend: str = ""  # what to type; every "wrong" has one

    def __post_init__(self) -> None:
        if self.verdict == "wrong" and not self.mend:
            raise ValueError(f"finding {self.name!r} is wrong, and says nothing of how to mend it")


Check = Callable[[], list[Finding]]
