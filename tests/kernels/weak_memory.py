"""Weak memory for kernels in Triton's interpreter: what a GPU may do, and the processor of the host does not.

    a store       is seen by others later, in any order, element by element; those to one address in their order
    a load        may have been done before: it gives what was there at any time since the last acquiring fence, but
                  nothing older than what was read there before
    publish       waits until all earlier stores are seen; its own word is one more store
    fence         loads behind it are not done before it, stores behind it are not seen before those in front of it
    full_fence    waits, besides, until all earlier stores are seen
    atomics       (add, exchange) are done at once, behind all earlier stores

Loads that are done *after* a later store of their thread are not modelled, since their values would have to be known
before: so nothing here shows that the release of TAKEN keeps the loads of a slot in front of it.

A program sees its own stores at once. Memory that others write is `watched`; the rest is the program's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.runtime import interpreter

from ftcomm.kernels.device import attempts, lane, signal

Array = np.ndarray[Any, Any]
Method = Callable[..., Any]

_KEEP = 24  # stores that wait at most
_builder = interpreter.interpreter_builder


class Store(NamedTuple):
    addresses: Array  # (n,) uint64
    values: Array  # (n,)
    after: int  # those with a lower number have to be seen first


class WeakMemory:
    """The memory of one program, until the process ends. `watched` is what others write meanwhile."""

    def __init__(self, watched: Sequence[torch.Tensor], seed: int) -> None:
        self._chance = random.Random(seed)
        self._numpy = np.random.default_rng(seed)
        self._watched = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor.numpy()) for tensor in watched]
        self._before: list[Array] = []  # what was there at the last fence, as bytes
        self._waiting: dict[int, Store] = {}  # by their numbers
        self._number = 0
        self._after = 0  # a later store is seen after all that have lower numbers
        self._load, self._store = _builder.create_masked_load, _builder.create_masked_store
        self._rmw, self._cas = _builder.create_atomic_rmw, _builder.create_atomic_cas
        self._look()

    def install(self) -> None:
        """Let the kernels of this process work on this memory."""
        _builder.create_masked_load = self.load
        _builder.create_masked_store = self.store
        _builder.create_atomic_rmw = self.rmw
        for module in (lane, attempts):
            for name, mine in (("fence", self.fence), ("full_fence", self.full_fence), ("rest", self.rest)):
                if getattr(module, name, None) is getattr(signal, name):
                    setattr(module, name, mine)

    # -- what the program does -----------------------------------------------------------------------------------------

    def load(self, ptrs: Any, mask: Any, other: Any, *how: Any) -> Any:
        """What is there, or was; with the program's own stores."""
        self._some()
        found = self._load(ptrs, mask, other, *how)  # caches and so on, which versions of Triton name differently
        addresses, chosen = ptrs.data.reshape(-1), np.broadcast_to(mask.data, ptrs.data.shape).reshape(-1)
        values = np.array(found.data).reshape(-1)
        self._age(addresses, chosen, values)
        for store in self._waiting.values():
            _overlay(store, addresses, chosen, values)
        return interpreter.TensorHandle(values.reshape(ptrs.data.shape), found.dtype)

    def store(self, ptrs: Any, value: Any, mask: Any, *how: Any) -> None:
        self._some()
        chosen = np.broadcast_to(mask.data, ptrs.data.shape).reshape(-1)
        addresses = ptrs.data.reshape(-1)[chosen]
        values = np.broadcast_to(value.data, ptrs.data.shape).reshape(-1)[chosen]
        values = values.astype(interpreter._get_np_dtype(ptrs.get_element_ty()), copy=True)
        self._later(addresses.copy(), values)

    def rmw(self, operation: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        self._all()
        if "RELEASE" in str(sem) and "ACQ" not in str(sem):  # `publish`
            self._later(ptr.data.reshape(-1).copy(), np.asarray(value.data).reshape(-1).astype(np.int64))
            return interpreter.TensorHandle(np.zeros_like(value.data), value.dtype.scalar)
        return self._rmw(operation, ptr, value, mask, sem, scope)

    def fence(self) -> None:
        self._after = self._number
        self._look()

    def full_fence(self) -> None:
        self._all()
        self._look()

    def rest(self, polls: object = 0) -> None:
        signal.rest()
        for _ in range(4):
            self._some()

    # -- what others see -----------------------------------------------------------------------------------------------

    def _later(self, addresses: Array, values: Array) -> None:
        self._waiting[self._number] = Store(addresses, values, self._after)
        self._number += 1
        while len(self._waiting) > _KEEP:
            self._show(self._chance.choice(list(self._waiting)))

    def _some(self) -> None:
        if self._waiting and self._chance.random() < 0.25:
            self._show(self._chance.choice(list(self._waiting)), in_part=self._chance.random() < 0.5)

    def settle(self) -> None:
        """Let others see all, as the end of a kernel does."""
        self._all()

    def _all(self) -> None:
        for number in list(self._waiting):
            self._show(number)

    def _show(self, number: int, *, in_part: bool = False) -> None:
        """Let others see a store, or a part of it, and before it those that they have to see first."""
        if number not in self._waiting:
            return
        store = self._waiting[number]
        for earlier, other in list(self._waiting.items()):
            if earlier < number and (earlier < store.after or np.isin(store.addresses, other.addresses).any()):
                self._show(earlier)
        now = self._numpy.random(len(store.addresses)) < (0.5 if in_part else 1.1)
        _write(store.addresses[now], store.values[now])
        if now.all():
            del self._waiting[number]
        else:
            self._waiting[number] = store._replace(addresses=store.addresses[~now], values=store.values[~now])

    # -- what the program sees -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._before = [array.view(np.uint8).reshape(-1).copy() for _, _, array in self._watched]

    def _age(self, addresses: Array, chosen: Array, values: Array) -> None:
        """Give some of the values as they were at the last fence; what is given as it is now was read."""
        size = values.itemsize
        for (start, stop, _), before in zip(self._watched, self._before, strict=True):
            here = chosen & (addresses >= start) & (addresses < stop)
            if not here.any():
                continue
            places = np.flatnonzero(here)
            at = (addresses[places].astype(np.int64) - start)[:, None] + np.arange(size)
            old = self._numpy.random(len(places)) < 0.5
            bytes_of = values.view(np.uint8).reshape(-1, size)
            bytes_of[places[old]] = before[at[old]]
            before[at[~old]] = bytes_of[places[~old]]


def _overlay(store: Store, addresses: Array, chosen: Array, values: Array) -> None:
    if values.itemsize != store.values.itemsize:
        assert not np.isin(addresses, store.addresses).any(), "one word is read and written in different sizes"
        return
    order = np.argsort(store.addresses)
    ordered = store.addresses[order]
    at = np.minimum(np.searchsorted(ordered, addresses), len(ordered) - 1)
    hit = chosen & (ordered[at] == addresses) if len(ordered) else np.zeros(len(addresses), bool)
    values[hit] = store.values[order[at[hit]]].view(values.dtype)


def _write(addresses: Array, values: Array) -> None:
    interpreter._interpreter.store(addresses, values, np.ones(len(addresses), bool))
