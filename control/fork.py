"""A forked child keeps nothing of a process that takes part in a job, and is told so when it makes a call.

`fork` gives a child a copy of every descriptor and a share in every shared mapping, but none of the threads. So a
worker of a DataLoader could write into the segment of its parent, or keep its connections open after its death, and
nobody would see the end of them. Right after the fork, before anything of the script runs in the child, everything that
was kept `apart` is replaced in its place there:

    descriptor       by one of /dev/null of the same number. The connection itself is the parent's alone, and nothing is
                     said on it: closing a number is not shutting a connection down
    shared mapping   by private zeroes at the same address

In its place, since objects of the parent live on in the child: whatever still closes its number, or unmaps its memory,
hits what it owned and nothing that the child has made since. No lock is taken, as the thread that holds it may not be
there. A child that calls `exec` needs none of it: our descriptors are closed by that. What ends inside this process (a
loop's wake-up pipe, a bell) is left alone, as are the descriptors that UCX opens by itself: nobody concludes a death
from those.

`refusal` says why this process may take no part. It compares process ids, so that it holds, too, where a library has
forked behind the interpreter's back.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Thing = TypeVar("Thing")

participant = 0  # id of the process that takes part, which may be the parent of this one; 0: none does
_roles: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_descriptors: weakref.WeakKeyDictionary[Any, Callable[[Any], Iterable[int]]] = weakref.WeakKeyDictionary()
_memories: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # and their addresses
_null = -1  # /dev/null, opened in time: a child may have no descriptor left

_mmap = ctypes.PyDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_FIXED, _NORESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE; Python's mmap has no names for them


def _own(thing: Any) -> tuple[int]:
    return (thing.fileno(),)


def apart(thing: Thing, descriptors: Callable[[Thing], Iterable[int]] = _own) -> Thing:
    """Children of this process shall not have what `descriptors(thing)` are then, as long as `thing` lives; negative
    ones are none. `descriptors` runs in the child: it takes no lock. Any thread."""
    global _null
    if _null < 0:
        _null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    _descriptors[thing] = descriptors
    return thing


def apart_memory(memory: mmap.mmap, address: int) -> None:
    """Children shall not share `memory` either, a mapping that begins at `address`."""
    _memories[memory] = address


def take_part(who: object, role: str) -> None:
    """From now on this process takes part, for as long as somebody in it does: children are refused. Any thread."""
    global participant
    _roles[who] = role
    participant = os.getpid()


def part(who: object) -> None:
    """`who` takes no part any more; idempotent. What a child inherited it cannot end."""
    global participant
    _roles.pop(who, None)
    if not _roles and participant == os.getpid():
        participant = 0


def is_child() -> bool:
    """Whether this process is a child of the one that takes part."""
    return participant not in (0, os.getpid())


def refusal() -> str:
    """Why this process may take no part; empty if it may."""
    if not is_child():
        return ""
    role = ", ".join(list(dict.fromkeys(_roles.values()))[:2]) or "a rank"
    return (
        f"this process ({os.getpid()}) is a forked child of process {participant}, which takes part as {role}; a child "
        "has neither its threads nor its connections, and cannot speak for it. Let the parent make the call; or start "
        "the child by spawn or forkserver (DataLoader(multiprocessing_context='forkserver')), or before ftcomm.init()"
    )


def _in_child() -> None:
    for thing, descriptors in list(_descriptors.items()):
        with contextlib.suppress(Exception):  # a closed one may say so by an error; those after it are still open
            for fd in descriptors(thing):
                if fd >= 0:
                    os.dup2(_null, fd, inheritable=False)
    for memory, address in list(_memories.items()):
        if not memory.closed:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
            _mmap(address, len(memory), access, kind, -1, 0)
    _descriptors.clear()
    _memories.clear()


os.register_at_fork(after_in_child=_in_child)
