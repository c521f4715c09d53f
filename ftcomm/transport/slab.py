"""The memory in which all groups of this process stage, and who gives what he has to another group.

A segment stages in a memfd, at first in its own. A memfd keeps the pages that it has: the seal that lets no other
process write to it refuses to punch holes, too. So beyond FTCOMM_STAGING_BYTES a group that begins an op takes the
file of a group in which nothing is in flight, and gives its own for it:

    before    segment A: words A, staging in file A      segment B: words B, staging in file B
    after     segment A: words A, staging in file B      segment B: words B, staging in file A

Words stay where they are. The staging is mapped over the one before, at the same address, so that whatever points there
goes on. In its words a segment says in which file its staging is, and how often that has changed (`PLACE`). A member
that reads it through shared memory looks at that before it reads anything of an op, and maps the other file
(`ftcomm.transport.shm`). For the fast path, which has no time to look, the first op after a change says so in its
detail (`MOVED`).

When a file may be given away: all members have taken all that was posted from it, and nothing of it is still to be sent
(`ftcomm.collective.stream.Stream.unread`). By the rule of stability that holds whenever no op is in flight here. A
removed member may still read there, as it may read what the next epoch stages, and can make nothing of it FINAL.

No group waits for the file of another one, which may itself wait for this one at another member. If none can be had,
it takes memory beyond the limit, and the log says so once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING

from ftcomm.control.fork import keep_from_children
from ftcomm.settings.staging import staging_bytes

if TYPE_CHECKING:
    from ftcomm.transport.segment import Segment

log = logging.getLogger("ftcomm")

PAGE = 4096  # bytes
_MOST = 16 << 20  # bytes of staging of one group
_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1; missing in Python's fcntl module
_FIXED = 0x10  # MAP_FIXED
_MOVE, _THERE = 1, 2  # MREMAP_MAYMOVE, MREMAP_FIXED
_DONTFORK = 10  # MADV_DONTFORK
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _mremap, _munmap, _madvise = _libc.mmap, _libc.mremap, _libc.munmap, _libc.madvise
_mmap.restype = _mremap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def map_to_read(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map a part of a file in place of what is mapped at `address`. Raises `OSError`."""
    _check(_mmap(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, fd, offset) == address)


def _check(done: bool) -> None:
    if not done:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class StagingFile:
    """A memfd of `size` bytes: the words of a segment up to `at`, and then staging. No process can change its size, and
    no other one write to it, not even through /proc."""

    def __init__(self, at: int, size: int) -> None:
        self.at, self.size = at, size
        self.fd = os.memfd_create("ftcomm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.identity = identity(self.fd)
        self.lock = threading.Lock()  # held to reserve, and to close the descriptor
        self.lacking = bytearray(b"\1") * -(-(size - at) // PAGE)  # of the staging; 1: a page that is not reserved
        self.reserved = 0  # bytes of staging that it has
        self._kept = 0  # where it is mapped besides, once it was given to another segment
        self._unmap = weakref.finalize(self, int)
        self._unmap.detach()
        self.words = self.staged = True  # whether a segment has its words here, and whether one stages here

    def open(self) -> mmap.mmap:
        """Get memory for the words, map all of it, and seal it. Raises `OSError`."""
        try:
            os.posix_fallocate(self.fd, 0, self.at)
            os.ftruncate(self.fd, self.size)
            memory = mmap.mmap(self.fd, self.size)
            # From here on no process can change its size or map it for writing, not even through /proc.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
        except OSError:
            self.close()
            raise
        keep_from_children(self, lambda file: (file.fd,))
        return memory

    def keep(self, address: int) -> None:
        """Keep the mapping of the staging at `address`, before it is mapped elsewhere. Raises `OSError`.

        The seal lets this process make no mapping either through which it could write. But one that it had before may
        be had twice: a shared mapping of which no bytes are moved is copied.
        """
        if self._unmap.alive:
            return
        nbytes = self.size - self.at
        self._kept = _mremap(address, 0, nbytes, _MOVE, None)
        _check(self._kept != _FAILED)
        self._unmap = weakref.finalize(self, functools.partial(_munmap, self._kept, nbytes))
        self._unmap.atexit = False
        _check(not _madvise(self._kept, nbytes, _DONTFORK))

    def map_staging(self, address: int) -> None:
        """Map the staging, which was kept, in place of what is mapped at `address`. Raises `OSError`."""
        _check(_mremap(self._kept, 0, self.size - self.at, _MOVE | _THERE, address) == address)

    @property
    def is_open(self) -> bool:
        """Whether others can open it: the script has not closed its descriptor."""
        with contextlib.suppress(OSError):
            return identity(self.fd) == self.identity
        return False

    def check(self) -> None:
        """Raise `OSError` if the descriptor is no longer that of this file."""
        if identity(self.fd) != self.identity:
            raise OSError(errno.EBADF, "the script has closed its descriptor, and opened something else")

    def close(self) -> None:
        with self.lock:
            fd, self.fd = self.fd, -1
        self._unmap()
        if fd >= 0:
            with contextlib.suppress(OSError):  # the script has closed it
                os.close(fd)


class Slab:
    """The files of all groups of this process. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held during a wait, not even for the lock of a group
        self._limit: int | None = None  # bytes; None: not looked up yet
        self._said = False
        self._files: weakref.WeakSet[StagingFile] = weakref.WeakSet()
        self._unused: list[StagingFile] = []  # that were given to groups which have ended
        self._segments: weakref.WeakKeyDictionary[Segment, None] = weakref.WeakKeyDictionary()  # longest there first
        self.crowded = False  # whether an op may need more than is left

    @property
    def limit(self) -> int:
        """The bytes of FTCOMM_STAGING_BYTES. Raises `SettingsError`."""
        if self._limit is None:
            self._limit = staging_bytes()
        return self._limit

    @property
    def reserved(self) -> int:
        """The bytes of staging that this process has."""
        return sum(file.reserved for file in tuple(self._files))

    def add(self, file: StagingFile) -> None:
        """Count a new file. Raises `SettingsError`."""
        self.limit  # noqa: B018 (says now that it is wrong)
        with self._lock:
            self._files.add(file)

    def lend(self, segment: Segment) -> None:
        """Let other groups have what `segment` stages in, while it is not in use."""
        with self._lock:
            self._segments[segment] = None

    def grown(self) -> None:
        """Note that a file has more memory than before."""
        limit = self.limit
        with self._lock:
            reserved = self.reserved
            self.crowded = reserved + _MOST > limit
            says = reserved > limit and not self._said
            self._said = self._said or says
            files = sum(file.staged and file.reserved > 0 for file in self._files)
        if says:
            log.warning(
                "the groups of this process stage in %.1f MB, more than FTCOMM_STAGING_BYTES=%d: so much is in flight "
                "at once, of %d groups. They go on; set it higher, or use fewer groups at once",
                reserved / 1e6,
                limit,
                files,
            )

    def make_room(self, segment: Segment, need: int) -> bool:
        """Let `segment`, whose staging nobody reads now, stage up to `need` bytes. True: that lies in another file from
        now on, and may have to be reserved. Raises `OSError`."""
        with self._lock:
            own = segment.staging
            if own.reserved >= need or self.reserved + need - own.reserved <= self.limit or not own.is_open:
                return False
            for file, lender in self._larger(own, need):
                if not file.is_open:
                    continue
                if lender is None:
                    own.keep(segment.address + segment.header)
                    file.map_staging(segment.address + segment.header)
                    self._unused.remove(file)
                    segment.stage_in(file)
                    file.staged = True
                    self._leave(own)
                elif not lender.give(functools.partial(self._exchange, segment, lender)):
                    continue
                return True
        return False

    def _larger(self, own: StagingFile, need: int) -> list[tuple[StagingFile, Segment | None]]:
        """Returns the files that have more memory than `own`, and who stages there: the smallest that has enough first,
        and then the largest ones."""
        found: list[tuple[StagingFile, Segment | None]] = [(file, None) for file in self._unused]
        found += [(segment.staging, segment) for segment in self._segments]
        size = own.size - own.at
        larger = [x for x in found if x[0].reserved > own.reserved and x[0].size - x[0].at == size]

        def rank(found: tuple[StagingFile, Segment | None]) -> tuple[bool, int]:
            reserved = found[0].reserved
            return (False, reserved) if reserved >= need else (True, -reserved)

        return sorted(larger, key=rank)

    def _exchange(self, one: Segment, other: Segment) -> None:
        ones, others = one.staging, other.staging
        ones.keep(one.address + one.header)
        others.keep(other.address + other.header)
        others.map_staging(one.address + one.header)  # if the next one fails, `one` fails, and `other` is as it was
        try:
            self._change(one, ones, other, others)
        except OSError:
            raise
        except BaseException:  # an interrupt from the keyboard ends `one`, but `other` may go on
            self._change(one, ones, other, others)
            raise
        for segment in (other, one):  # the last to be asked again
            del self._segments[segment]
            self._segments[segment] = None

    @staticmethod
    def _change(one: Segment, ones: StagingFile, other: Segment, others: StagingFile) -> None:
        ones.map_staging(other.address + other.header)
        other.stage_in(ones)
        one.stage_in(others)

    def end(self, segment: Segment, home: StagingFile) -> None:
        """Note that a segment has ended, whose words are in `home`."""
        with self._lock:
            self._segments.pop(segment, None)
            staging = segment.staging
            home.words = False
            if staging is home or not segment.is_read:
                self._leave(staging)
            else:
                staging.staged = False  # others may still read there, so nobody stages there any more
            if not home.staged:
                if home in self._unused:
                    self._unused.remove(home)
                home.close()
                self._files.discard(home)
            self.crowded = self.reserved + _MOST > self.limit

    def _leave(self, file: StagingFile) -> None:
        """Note that nobody stages in a file any more."""
        file.staged = False
        if file.words:
            self._unused.append(file)
        else:
            file.close()
            self._files.discard(file)


SLAB = Slab()
