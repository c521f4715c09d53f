"""A forked child keeps nothing of a process that takes part in a job, and gets an error if it makes a call.

`fork` gives a child a copy of every descriptor and a share in every shared mapping, but none of the threads. So a
worker of a DataLoader could write into the segment of its parent, or hold its connections open after its death, so that
no peer would see them end. Right after the fork, before anything of the script runs in the child, all that is kept from
children is replaced there:

    descriptor        by one of /dev/null with the same number. The parent alone has the connection then. Nothing is
                      sent on it, since closing a number does not shut the connection down
    shared mapping    by private zeroes at the same address

Numbers and addresses stay in use, since objects of the parent live on in the child. When one of them closes its number,
or unmaps its memory, it must hit what it owned and nothing that the child has made since. No lock is taken, since its
holder may not exist in the child. A child that calls `exec` needs none of this: exec closes our descriptors. What ends
inside this process (the wake-up pipe of a loop, a doorbell) is left alone, as are the descriptors that UCX opens by
itself: no peer concludes a death from those.

`refusal` says why this process may take no part. It compares process ids, so that it also works where a library has
forked behind the interpreter's back. So does the first byte of `checked_page`, which costs less than a system call. It
is 1 once this process was found not to be such a child, and the kernel wipes it in every child. Where a kernel cannot
do that, the process id is asked for at each call.
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

participant = 0  # pid of the process that takes part, which may be the parent; 0: none
_roles: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_descriptors: weakref.WeakKeyDictionary[Any, Callable[[Any], Iterable[int]]] = weakref.WeakKeyDictionary()
_memories: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()  # mapping -> address
_null = -1  # /dev/null, opened early: a child may have no descriptor left

_WIPEONFORK = 18  # MADV_WIPEONFORK; Python's mmap has no name for it
checked_page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
wiped = 0  # 1 if the kernel wipes that page in a child; 0: it stays 0
with contextlib.suppress(OSError):  # Linux before 4.14, gVisor
    checked_page.madvise(_WIPEONFORK)
    wiped = 1

_mmap = ctypes.PyDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_FIXED, _NORESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE; Python's mmap has no names for them


def _own(thing: Any) -> tuple[int]:
    return (thing.fileno(),)


def keep_from_children(thing: Thing, descriptors: Callable[[Thing], Iterable[int]] = _own) -> Thing:
    """Keep `descriptors(thing)`, as they are at the fork, from children of this process for as long as `thing` lives;
    negative numbers are ignored. `descriptors` runs in the child and takes no lock. Any thread."""
    global _null
    if _null < 0:
        _null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    _descriptors[thing] = descriptors
    return thing


def keep_memory_from_children(memory: mmap.mmap, address: int) -> None:
    """Keep `memory`, a mapping that begins at `address`, from children."""
    _memories[memory] = address


def take_part(who: object, role: str) -> None:
    """Let this process take part for as long as one of its objects does: children are refused. Any thread."""
    global participant
    _roles[who] = role
    participant = os.getpid()


def part(who: object) -> None:
    """Note that `who` takes part no longer; idempotent. It does not end what a child has inherited."""
    global participant
    _roles.pop(who, None)
    if not _roles and participant == os.getpid():
        participant = 0


def is_child() -> bool:
    """Whether this process is a child of the one that takes part."""
    return participant not in (0, os.getpid())


def refusal() -> str:
    """Returns why this process may take no part; empty if it may."""
    if not is_child():
        return ""
    role = ", ".join(list(dict.fromkeys(_roles.values()))[:2]) or "a rank"
    return (
        f"this process ({os.getpid()}) is a forked child of process {participant}, which takes part as {role}; a child "
        "has neither its threads nor its connections, and cannot speak for it. Let the parent make the call; or start "
        "the child by spawn or forkserver (DataLoader(multiprocessing_context='forkserver')), or before ftcomm.init()"
    )


def _in_child() -> None:
    checked_page[0] = 0
    for thing, descriptors in list(_descriptors.items()):
        with contextlib.suppress(Exception):  # a closed one may raise; those after it are still open
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
