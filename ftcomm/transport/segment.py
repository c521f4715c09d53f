"""The memory through which a rank speaks to its group, and its layout, which a segment and its mirrors share.

    some pages      words, a cache line each: header, POSTED, REDUCED, TAKEN, ASLEEP, those of the tree (up and down),
                    descriptors of slots, mutexes, levels of the ring: one page for up to 17 members, two for 49, nine
                    for 256, 33 for 1,024
    half a page     nothing, see `STAGGER`
    STAGED bytes    region POSTED:  the owner's input of a chunk, for the others to read
    STAGED bytes    region REDUCED: the owner's slice of a reduced chunk

This is the layout for ops that the host drives. A kernel that runs ops has another
(`ftcomm.engines.gpu_kernel.layout`), with the same header and mutexes; the first word tells them apart.

Every byte has exactly one writer, the owner. Others map it read-only, and the kernel refuses them anything else. So an
removed member, however confused, cannot write into the memory of others. The segment is a memfd: it has no name, and
is gone with the last process that maps it, whatever way that process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import mmap
import os
import resource
import secrets
import threading
from typing import Any

import numpy as np

from ftcomm.control.fork import keep_from_children, keep_memory_from_children
from ftcomm.errors import TransportError

MAGIC = 0x6674636F6D6D0003  # "ftcomm", layout 3, of the host's engine
_FAMILY = 16  # bits of the layout's number in MAGIC
_PAGE = 4096  # bytes
STAGGER = _PAGE // 2  # bytes from the start of a page to that of the staging; docs/transports.md, "Measured choices"
HEADER = _PAGE + STAGGER  # bytes before the staging of a group of 17 members or fewer, most of them words

# docs/transports.md, "Measured choices", has the figures for these.
CHUNK = 512 << 10  # bytes; a chunk and its copy must stay in the cache
SLOTS = 8  # with SPAN, they fill a slow line between hosts; larger groups have fewer
SPAN = 2  # the most chunks of one task between hosts; larger groups have more
NEAR = 4  # slots that members of one host use, so that these stay in the cache
SENT = 4  # the most chunks of one task on one host by TCP: a frame costs the interpreter more than the cache saves

MIRRORS = 64 << 20  # bytes of the staging of others that fill up in a group of many members
HOP = 64 << 10  # bytes; to send fewer at a time costs more than the bytes

STAGED = SLOTS * SPAN * CHUNK  # bytes of a region, and the most under way to a peer

# Indices of 64-bit words.
_LINE = 8  # words in a cache line
POSTED = 1 * _LINE
REDUCED = 2 * _LINE
TAKEN = 3 * _LINE
ASLEEP = 4 * _LINE
GATHERED = 5 * _LINE  # see ftcomm.collective.tree
TAKEN_UP = GATHERED + 1
ANNOUNCED = 6 * _LINE
TAKEN_DOWN = ANNOUNCED + 1
_DESCRIPTORS = 8 * _LINE
_MUTEXES = 16 * _LINE
_LEVELS = 32 * _LINE
TREE = (GATHERED, ANNOUNCED, TAKEN_UP, TAKEN_DOWN)  # the words of the tree
ENDS = (TAKEN, TAKEN_UP, TAKEN_DOWN)  # the words that announce no bytes
COUNTERS = frozenset((POSTED, REDUCED, TAKEN, *TREE))  # the words that count tasks in a group of any size
MUTEXES = 16  # the kernel wakes one watcher of each; in larger groups that one wakes those that share it
FINGERPRINT = 2  # see ftcomm.collective.checksum
DETAIL = 3  # the rest of a call, besides sizes, dtype and reduction, see ftcomm.collective.schedule
SIZE = HEADER + 2 * STAGED  # of a group of 17 members or fewer
LEAST = 16  # members for which every segment has words


def levels(members: int) -> int:
    """Returns how many levels a ring of so many members has, see `ftcomm.collective.algorithms.ring`."""
    return 2 * members - 2


def header(members: int) -> int:
    """Returns the bytes before the staging of a group of so many members: pages of words, and half a page."""
    return -(-8 * (_LEVELS + levels(members) * _LINE) // _PAGE) * _PAGE + STAGGER


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a segment, which all members of a group must share. Sizes are bytes."""

    magic: int
    engine: str  # the engine with this layout, as in FTCOMM_ENGINE
    slots: int
    chunk: int  # bytes staged in a slot
    lanes: int  # streams of tasks, each with its own words and slots
    staging_at: int
    size: int
    near: int = 1  # the most chunks of one task on one host
    pair: int = 1  # the same where it has two members alone, of which each sends all of its input
    span: int = SPAN  # the most chunks of one task between hosts; with the host's engine a slot has room for them
    members: int = LEAST  # the most that the group may have

    def __str__(self) -> str:
        lanes = f" in each of {self.lanes} lanes" if self.lanes > 1 else ""
        near = f", tasks of {self.near} chunks" if self.near > 1 else ""
        many = f" for {self.members} members" if self.members > LEAST else ""
        whole = f"{self.slots} slots of {self.chunk} bytes{lanes}{near}{many}"
        return f"engine {self.engine}, {whole}, layout {self.magic & 0xFFFF:#x}"


HOST = Layout(MAGIC, "host", SLOTS, CHUNK, 1, HEADER, SIZE)


def putting(layout: Layout) -> Layout:
    """Returns the layout for members that reach each other by NIXL, also on one host: puts cost more than caches save.
    In three runs of `ftcomm bench nixl --rounds 5` on two EPYC cores 64 MB had 71 to 83% of the puts, and 256 MB 68 to
    70%, where tasks of one chunk had 65 to 72% and 50 to 57%."""
    return dataclasses.replace(layout, near=SPAN, pair=SPAN)


def sending(layout: Layout) -> Layout:
    """Returns the layout for members that reach each other by TCP, also on one host. In a task a member sends each of
    the others a slice: of four chunks to four members, slices have a chunk each."""
    return dataclasses.replace(layout, near=SENT)


def layout_for(transport: str, layout: Layout) -> Layout:
    """Returns the layout of a group with FTCOMM_TRANSPORT=`transport`, whose layout is otherwise `layout`."""
    return putting(layout) if transport == "nixl" else sending(layout) if transport == "tcp" else layout


def sized(layout: Layout, members: int) -> Layout:
    """Returns the layout, one of those that the host drives, for at most so many members: with words for all, and with
    tasks so large that the slice of a member has `HOP` bytes, as long as two slots are left of the same staging."""
    if members <= layout.members:
        return layout
    at, span = header(members), SPAN
    while span * layout.chunk < members * HOP and 4 * span <= SLOTS * SPAN:
        span *= 2  # so that `near` divides it
    slots = SLOTS * SPAN // span
    return dataclasses.replace(layout, members=members, slots=slots, span=span, staging_at=at, size=at + 2 * STAGED)


def slot_payload(members: int) -> int:
    """Returns the most bytes of a slot that a member fills for another one in a task in which all fill as much for that
    one: the mirrors of a group of up to 512 members then take no more than `MIRRORS` bytes, and those of 1,024 twice as
    many, since so large groups have `SLOTS` / 4 slots."""
    return min(CHUNK, max(HOP, MIRRORS // SLOTS // members // HOP * HOP))


def descriptor(slot: int) -> int:
    """Returns the index of the words that describe `slot`. The first two name the op and the call whose task is there;
    `DETAIL` words further there is more, and POSTED announces all of them. `FINGERPRINT` words further is the
    fingerprint of the result, which TAKEN announces."""
    return _DESCRIPTORS + slot * _LINE


DESCRIPTORS = tuple(map(descriptor, range(SLOTS)))


def level(reached: int) -> int:
    """Returns the index of the word that counts the tasks which have reached this level of the ring, from 1 on."""
    return _LEVELS + (reached - 1) * _LINE


def reached_at(word: int) -> int:
    """Returns the level to which `word` belongs."""
    return (word - _LEVELS) // _LINE + 1


@functools.cache
def published(members: int) -> frozenset[int]:
    """Returns the words that count tasks, in a group of so many members."""
    return COUNTERS.union(map(level, range(1, levels(members) + 1)))


def mutex(reader: int) -> int:
    """Returns the index of the mutex that the owner holds while it lives, for `reader` to watch; see
    `ftcomm.sync.robust_mutex`."""
    return _MUTEXES + reader % MUTEXES * _LINE


class Memory:
    """A segment or a mirror of one. `words` are its 64-bit words; `address` is that of the first."""

    layout = HOST
    chunk = CHUNK  # bytes
    header = HEADER  # bytes before the staging
    published = published(LEAST)  # the words that count tasks
    words: memoryview
    address: int
    buffer: memoryview  # all of the memory, as bytes
    _bytes: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def nbytes(self) -> int:
        """The bytes of the words and both regions, in the layout of the host's engine."""
        return self.header + 2 * SLOTS * SPAN * self.chunk

    def _lay_out(self, layout: Layout) -> None:
        self.layout, self.chunk = layout, layout.chunk
        self.header, self.published = header(layout.members), published(layout.members)

    def _map(self, memory: mmap.mmap) -> None:
        self.buffer = memoryview(memory)
        self._bytes = np.frombuffer(memory, np.uint8)
        self.address = self._bytes.ctypes.data
        self.words = memoryview(memory)[: self.header].cast("Q")
        keep_memory_from_children(memory, self.address)

    @property
    def heard(self) -> memoryview:
        """POSTED, TAKEN and the descriptors, as far as any member has told of them. They may be ahead of `words`, and
        then say nothing of the staging here."""
        return self.words

    def carve(self, region: int, slot: int, start: int, count: int, carrier: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Returns a view of `count` elements, from element `start` of the `slot`-th chunk of the region on; `region` is
        POSTED or REDUCED."""
        base = self.offset(region, slot) + start * carrier.itemsize
        return self._bytes[base : base + count * carrier.itemsize].view(carrier)

    def offset(self, region: int, slot: int) -> int:
        """Returns the offset of the `slot`-th chunk in the memory; `region` may be the word that announces its
        content."""
        return self.header + ((region != POSTED) * SLOTS * SPAN + slot) * self.chunk

    def place(self, region: int, start: int, nbytes: int) -> int:
        """Returns the offset in the memory of byte `start` of a region, if `nbytes` from there lie in one slot.

        Raises `ValueError` if they do not.
        """
        layout = self.layout
        room = max(layout.span, layout.near) * self.chunk
        if start % room + nbytes > room or start >= layout.slots * layout.span * self.chunk:
            raise ValueError(f"a payload of {nbytes} bytes at {start} of {layout.slots} slots of {room}")
        return self.offset(region, 0) + start


class Segment(Memory):
    """The own memory of this rank. Its address for others is the process id, `fd` and `nonce`.

    It has words for `members`, if `layout` has fewer. What is staged must be reserved before: to run out of memory in
    the middle of a copy would be a signal, and not an error. So `carve` reserves page by page, and a group takes what
    its ops use. The first `chunks` of each region are reserved here; None: all of the segment. Raises `TransportError`
    if the memory cannot be had.
    """

    def __init__(self, layout: Layout = HOST, *, members: int = LEAST, chunks: int | None = None) -> None:
        layout = sized(layout, members)
        self._lay_out(layout)
        size = layout.size
        self.nonce = secrets.token_hex(16)
        self.fd = os.memfd_create("ftcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._file = _identity(self.fd)
        self._reserving = threading.Lock()  # also held to close the descriptor; guards the next one
        words = -(-self.header // _PAGE)  # pages
        self._lacking = bytearray(words) + b"\1" * (-(-size // _PAGE) - words)  # 1: a page that is not reserved
        try:
            os.posix_fallocate(self.fd, 0, self.header)
            os.ftruncate(self.fd, size)
            memory = mmap.mmap(self.fd, size)
            # From here on no process can change its size or map it for writing, not even through /proc.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
        except OSError as error:
            os.close(self.fd)
            raise self._no_memory(size, error) from error
        self._map(memory)
        keep_from_children(self, lambda segment: (segment.fd,))
        try:
            if chunks is None:
                self._reserve(self.header, size)
            elif chunks:
                self._reserve(self.offset(POSTED, 0), self.offset(POSTED, chunks))
                self._reserve(self.offset(REDUCED, 0), self.offset(REDUCED, chunks))
        except TransportError:
            self.close()
            raise
        self.words[0] = layout.magic
        self.words[1], self.words[2] = _halves(self.nonce)
        self.words[3], self.words[4], self.words[5] = layout.slots, layout.chunk, layout.lanes

    def carve(self, region: int, slot: int, start: int, count: int, carrier: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Does what `Memory.carve` does, and reserves it. Raises `TransportError`."""
        base = self.offset(region, slot) + start * carrier.itemsize
        end = base + count * carrier.itemsize
        if self._lacking.find(1, base // _PAGE, -(-end // _PAGE)) >= 0:
            self._reserve(base, end)
        return self._bytes[base:end].view(carrier)

    def _reserve(self, base: int, end: int) -> None:
        """Reserve and touch these bytes of the segment, and nothing of what is reserved already: that may be in use.
        Thread-safe. Raises `TransportError`."""
        last, end = base // _PAGE, -(-end // _PAGE)
        with self._reserving:
            lacking = self._lacking
            while (first := lacking.find(1, last, end)) >= 0:
                last = lacking.find(0, first, end)
                last = end if last < 0 else last
                at, stop = first * _PAGE, min(last * _PAGE, self.layout.size)
                try:
                    if _identity(self.fd) != self._file:
                        raise OSError(errno.EBADF, "the script has closed its descriptor, and opened something else")
                    os.posix_fallocate(self.fd, at, stop - at)
                except OSError as error:
                    raise self._no_memory(stop - at, error) from error
                self._bytes[at:stop] = 0
                lacking[first:last] = bytes(last - first)

    @staticmethod
    def _no_memory(nbytes: int, error: OSError) -> TransportError:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        said = "none" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        return TransportError(
            f"cannot reserve {nbytes >> 10} KB of shared memory to stage in: {error.strerror}. Free memory, raise the "
            f"memory limit of the container or job, or the file size limit (ulimit -f; now {said})."
        )

    def close(self) -> None:
        """Let no process open the segment any more. The memory itself goes with the last mapping."""
        with self._reserving:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # the script has closed it
                os.close(fd)


_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1; missing in Python's fcntl module


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


class OtherEngine(TransportError):
    """Members of a group have chosen different engines or switch points; no transport can help."""


def wrong(words: memoryview, nonce: str, layout: Layout = HOST) -> str | None:
    """Returns why the memory that begins with these words is not the segment with this nonce and layout; None if it is.

    Raises `OtherEngine` if it belongs to another engine.
    """
    if words[0] >> _FAMILY != MAGIC >> _FAMILY:
        return f"no segment, or one of another version of ftcomm (starts with {words[0]:#x})"
    if (words[1], words[2]) != _halves(nonce):
        return "the segment of somebody else"
    if words[0] != layout.magic:
        raise OtherEngine(
            f"it has a segment of another engine or version (layout {words[0] & 0xFFFF:#x}), not that of FTCOMM_ENGINE="
            f"{layout.engine} (layout {layout.magic & 0xFFFF:#x}). Set FTCOMM_ENGINE and FTCOMM_TRANSPORT to the same "
            "on all ranks, and install one version everywhere"
        )
    there, here = tuple(words[3:6]), (layout.slots, layout.chunk, layout.lanes)
    if there != here:
        return (
            f"a segment of {there[0]} slots of {there[1]} bytes in {there[2]} lanes, not {here[0]} of {here[1]} in "
            f"{here[2]}; install one version everywhere"
        )
    return None


def _halves(nonce: str) -> tuple[int, int]:
    return int(nonce[:16], 16), int(nonce[16:32], 16)
