"""Finds the line of the script from which an op is called, at the price of a dictionary.

A place in a program is a code object and an instruction of it. The first call from a place finds its line, and whether
it belongs to the script: if not, the frame behind it is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import CodeType, FrameType

LASTI = 48  # bits of the address of an object
MOST = 4096  # places that are known

# id(code) ^ instruction << LASTI -> number of the text; 0: a place of this library or of torch. Read without a lock.
places: dict[int, int] = {}
_kept: list[CodeType] = []  # so that no other code gets the address of one that is known
_lock = threading.Lock()
_SCRIPTS = ("ftcomm.bench", "ftcomm.demo", "ftcomm.lab", "ftcomm.integrations")  # of ours, but they call like a user


def find(frame: FrameType | None, number_of: Callable[[str], int]) -> int:
    """Returns the number of the text for the line at which `frame` is now, or the first frame behind it that belongs to
    a script; 0 without one. `number_of` gives a text its number."""
    while frame is not None:
        key = id(frame.f_code) ^ frame.f_lasti << LASTI
        number = places.get(key)
        if number is None:
            number = _learn(frame, key, number_of)
        if number:
            return number
        frame = frame.f_back
    return 0


def known(frame: FrameType) -> int:
    """Returns the number of the place where `frame` itself is now; 0 if it does not belong to a script, or is not
    known."""
    return places.get(id(frame.f_code) ^ frame.f_lasti << LASTI, 0)


def _learn(frame: FrameType, key: int, number_of: Callable[[str], int]) -> int:
    number = 0
    if not _inside(frame.f_globals.get("__name__", "")):
        code = frame.f_code
        number = number_of(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
    with _lock:
        if len(places) < MOST and key not in places:
            _kept.append(frame.f_code)
            places[key] = number
    return number


def _inside(module: object) -> bool:
    """Whether a module belongs to this library or to torch, so that a line in it tells a user nothing."""
    name = str(module)
    if name.startswith(_SCRIPTS):
        return False
    return name.split(".", 1)[0] in ("ftcomm", "torch")


def forget_all() -> None:
    """Forget all places: their numbers are those of the recording of the process from which this one was forked."""
    global _lock
    _lock = threading.Lock()  # its holder may not exist in the child
    places.clear()
    _kept.clear()
