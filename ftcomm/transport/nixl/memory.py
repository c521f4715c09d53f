"""Memory that NIXL may touch: what is registered and for how long, and the mirrors that others write into.

A registration costs half a millisecond or more. So it is kept for as long as the memory lives, up to a number of bytes,
and a put under way holds a lease on it. The segments of this process are such memory. So is memory of a GPU, which
stays in its place for as long as its array lives, and so is a NumPy array of a caller. A put to a peer that was stopped
may read its source for hours, long after the op has returned and the caller has dropped the array, so the put holds the
array as well. It then reads what the caller has written since, and that is never announced.

Registrations may overlap: an array, and a part of it that is reduced by itself. NIXL takes the registration that begins
last before an address, finds the wrong one of two that overlap, and says NOT_FOUND. It keeps those of different devices
apart, and UCX ignores the device number of host memory: so every registration of host memory gets a number of its own.

One incarnation of one rank writes a mirror, and the addresses of the mirror are never used for anything else. A put
that was under way when its writer was stopped may end hours later, and not every transport of UCX checks whether that
memory is still registered (TCP and CMA do not). So a mirror that is given up keeps its addresses, which cost nothing,
and returns only the memory behind them: once at the end, and what late puts write when the next mirror is given up.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import secrets
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

DRAM, VRAM = "DRAM", "VRAM"
KEPT = 256 << 20  # bytes that stay registered without a lease

_quarantine: list[object] = []  # kept for ever
_retired: list[mmap.mmap] = []  # mirrors; kept for ever


def keep(memory: object) -> None:
    """Keep memory for as long as this process lives, since something that cannot be stopped may still use it."""
    _quarantine.append(memory)


def _pages(nbytes: int) -> mmap.mmap:
    """Makes private pages; pages that are shared could not be given back."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def address_of(buffer: Any) -> int:
    """Returns the address of memory that can be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Source(NamedTuple):
    """The source of a put. `extent` bytes from `base` on may be registered for as long as `owner` lives."""

    owner: Any
    base: int
    extent: int
    address: int
    nbytes: int
    kind: str = DRAM
    device: int = 0


def source_of(payload: Any) -> Source:
    """Returns the source in memory of ours, a NumPy array, or an array on a GPU. Raises `ValueError` for one that is
    not contiguous."""
    if isinstance(payload, memoryview):
        exporter: Any = payload.obj
        owner = exporter
        while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
            owner = owner.base  # a view ends with the op, its base does not
        extent = memoryview(exporter).nbytes
        return Source(owner, address_of(exporter), extent, address_of(payload), len(payload))
    interface = payload.__cuda_array_interface__
    if interface.get("strides") is not None:
        raise ValueError("an array of a GPU with gaps, expected a contiguous one")
    (address, _), nbytes = interface["data"], int(payload.nbytes)
    device = payload.device  # CuPy has `id`, torch `index`
    return Source(
        payload, address, nbytes, address, nbytes, VRAM, int(getattr(device, "id", None) or device.index or 0)
    )


@dataclasses.dataclass(eq=False)
class Region:
    """Memory that is registered with each rail. `leases` counts the puts under way that need it. Host memory has a
    `device` number of its own, see above."""

    address: int
    nbytes: int
    kind: str
    device: int
    handles: list[Any]
    leases: int = 0


class Registrations:
    """All memory that this process has registered. Guarded by the lock of the endpoint, except `_gone`.

    `register(address, nbytes, kind, device)` returns what `deregister` gets; `on_forgotten(region)` is called before.
    """

    def __init__(
        self,
        register: Callable[[int, int, str, int], list[Any]],
        deregister: Callable[[list[Any]], None],
        on_forgotten: Callable[[Region], None] = lambda region: None,
        kept: int = KEPT,
    ) -> None:
        self._register, self._deregister, self._on_forgotten = register, deregister, on_forgotten
        self._kept = kept
        self._regions: OrderedDict[tuple[int, int], Region] = OrderedDict()  # the least recently used first
        self._number = 0  # the device number of the last host memory; mirrors have 0
        self._gone: deque[Region] = deque()  # regions without an owner; finalizers add them in any thread

    def lease(self, owner: Any, address: int, nbytes: int, kind: str = DRAM, device: int = 0) -> Region:
        """Returns the region of `owner`, registered from `address` on for `nbytes`; `release` gives it back. Memory
        whose owner dies is forgotten, since other memory may then have its addresses."""
        self._deregister_gone()
        key = (id(owner), address)
        region = self._regions.get(key)
        if region is not None and region.nbytes < nbytes:
            self._gone.append(region)
            self._deregister_gone()
            region = None
        fresh = region is None
        if region is None:
            if kind == DRAM:
                self._number += 1
                device = self._number
            region = Region(address, nbytes, kind, device, self._register(address, nbytes, kind, device))
            self._regions[key] = region
            weakref.finalize(owner, self._gone.append, region).atexit = False
        self._regions.move_to_end(key)
        region.leases += 1
        if fresh:
            self._evict()
        return region

    def renew(self, region: Region) -> bool:
        """Takes another lease on a region that is still registered; much faster than `lease`."""
        if self._gone:
            self._deregister_gone()
        if not region.handles:
            return False
        region.leases += 1
        return True

    def release(self, region: Region) -> None:
        region.leases -= 1
        if region.leases < 0:
            raise AssertionError("a region was given back more often than it was lent")
        if self._gone:
            self._deregister_gone()

    def forget_all(self) -> None:
        """Forget all registrations that no put needs."""
        self._gone.extend(region for region in self._regions.values() if not region.leases)
        self._deregister_gone()

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self._regions.values())

    def _deregister_gone(self) -> None:
        for _ in range(len(self._gone)):
            region = self._gone.popleft()
            self._regions = OrderedDict((key, known) for key, known in self._regions.items() if known is not region)
            if region.leases:
                self._gone.append(region)  # a put still reads it
            elif region.handles:
                self._on_forgotten(region)
                self._deregister(region.handles)
                region.handles = []

    def _evict(self) -> None:
        total = self.nbytes
        for region in self._regions.values():
            if total <= self._kept:
                break
            if not region.leases:
                total -= region.nbytes
                self._gone.append(region)
        self._deregister_gone()


class MirrorMemory:
    """The memory into which one incarnation of a rank writes what it publishes. `token` names it between the two."""

    def __init__(self, nbytes: int, register: Callable[[int, int, str, int], list[Any]]) -> None:
        self.token = secrets.randbits(63)
        self.memory = _pages(nbytes)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        np.frombuffer(self.memory, np.uint8)[:] = 0  # a first touch in the middle of a put costs a page fault
        self.address = address_of(self.memory)
        self.handles = register(self.address, nbytes, DRAM, 0)
        self.users = 0

    def retire(self, deregister: Callable[[list[Any]], None]) -> None:
        """Retire the mirror, which is not read any more. Its addresses stay taken, see above."""
        deregister(self.handles)
        self.handles = []
        _retired.append(self.memory)
        for memory in _retired:  # earlier ones, too: a put that ended late has made 2 MB or more of them resident again
            memory.madvise(mmap.MADV_DONTNEED)


class MirrorMemories:
    """The mirrors of all incarnations that this process reads, by the nonce of their segments. Guarded as above.

    A mirror serves in all epochs of the two, one after the other: a reader that enters an epoch has stopped to read in
    the one before, and tells so before anything of the new one is put.
    """

    def __init__(
        self,
        nbytes: int,
        register: Callable[[int, int, str, int], list[Any]],
        deregister: Callable[[list[Any]], None],
    ) -> None:
        self._nbytes, self._register, self._deregister = nbytes, register, deregister
        self._mirrors: dict[str, MirrorMemory] = {}

    def use(self, nonce: str) -> MirrorMemory:
        mirror = self._mirrors.get(nonce)
        if mirror is None:
            mirror = self._mirrors[nonce] = MirrorMemory(self._nbytes, self._register)
        mirror.users += 1
        return mirror

    def leave(self, mirror: MirrorMemory) -> None:
        mirror.users -= 1
        if not mirror.users:
            self._mirrors = {nonce: known for nonce, known in self._mirrors.items() if known is not mirror}
            mirror.retire(self._deregister)

    def renew(self, nonce: str, mirror: MirrorMemory) -> None:
        """Replace a mirror into which an unknown put may be under way: the next `use` gets another one."""
        if self._mirrors.get(nonce) is mirror:
            del self._mirrors[nonce]
