"""Collectives that a script has asked for and another library makes later, maybe in a thread of its own.

They belong to the step in which they were asked for, since the step loop ends none before they are made: `settle` waits
for them at its end, and before the first.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

waits: list[Callable[[], object]] = []  # each returns when what it stands for has made its calls, or raises
_here = threading.local()


def settle() -> None:
    """Wait until all such calls are made."""
    for wait in waits:
        wait()


@contextlib.contextmanager
def calls() -> Iterator[None]:
    """A context for such calls, in the thread that makes them."""
    _here.value = True
    try:
        yield
    finally:
        _here.value = False


def called_here() -> bool:
    """Whether this thread is within `calls`."""
    return getattr(_here, "value", False)
