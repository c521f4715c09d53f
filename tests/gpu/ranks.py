"""Ranks that share one GPU in one process, without a job around them: for what is measured and tested of the device.

One thread drives them all: launches return at once, and each rank has streams of its own. What a coordinator and the
exchange do otherwise, `enter` and `freeze` do here by hand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ftcomm.collective.plan import GroupView
from ftcomm.engines.base import CollectiveCall
from ftcomm.engines.gpu_kernel.collective import CollectiveOperation
from ftcomm.engines.gpu_kernel.device import Device, KernelLaunch, Reached
from ftcomm.engines.gpu_kernel.launch import collective_variant, lane_word, variant, view_words
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.kernels.device import words as w
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.segment import Layout, Segment
from ftcomm.transport.shm import ShmPeer

DEADLINE = 60.0  # s; for the interpreter on a busy host
ON_GPU = 10.0  # s; a GPU is that late only if it hangs


class Ranks:
    """`make(segment)` is the device of a rank; `ranks` of them are members, numbered from 0, and all contribute."""

    def __init__(
        self, ranks: int, layout: Layout, make: Callable[[Segment], Any], *, deadline: float = DEADLINE
    ) -> None:
        self.deadline = deadline
        self.segments = [Segment(layout) for _ in range(ranks)]
        self.devices: list[Any] = [make(segment) for segment in self.segments]
        self.layout = layout
        self.epoch = 0
        self.reached: list[dict[int, Reached]] = []
        for me, device in enumerate(self.devices):
            peers = {
                i: ShmPeer(i, os.getpid(), segment.fd, segment.nonce, layout)
                for i, segment in enumerate(self.segments)
                if i != me
            }
            self.reached.append({me: device.own, **{i: device.reach(peer) for i, peer in peers.items()}})

    def view(self, me: int) -> GroupView:
        members = tuple(range(len(self.devices)))
        return GroupView(self.epoch, me, members, frozenset(members))

    def enter(self, number: int | None = None) -> None:
        """A new epoch, in which ops go on from `number`, or from where they were. All are frozen, or new. An op that
        was broken off ends if `number` is a later one."""
        self.epoch += 1
        for device in self.devices:
            for lane in range(self.layout.lanes):
                for word in (w.POSTED, w.REDUCED, w.TAKEN):
                    device.own.lanes[lane_word(lane, word)] = self.epoch << COUNTER
        for me, device in enumerate(self.devices):
            returned = int(device.ctl[w.RETURNED]) if number is None else number
            for i, word in enumerate(view_words(self.view(me), self.reached[me], returned)):
                device.ctl[w.NEWS + i] = word & (1 << 64) - 1
            device.ctl[w.RETURNED] = returned
            device.ctl[w.OPEN] = self.epoch

    def begun(self, launches: int, of: Sequence[int]) -> None:
        """Wait until the ranks `of` have begun so many launches, ever; one that has not when the ranks are frozen waits
        for the next epoch. Raises `TimeoutError`."""
        deadline = time.monotonic() + self.deadline
        while not all(self._has_begun(self.devices[me].ctl, launches) for me in of):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a launch did not begin within {self.deadline:g} s")

    @staticmethod
    def _has_begun(ctl: Any, launches: int) -> bool:
        """A launch that says so (BEGUN) looks at OPEN once more, microseconds later, and is held if it is frozen by
        then. STARTED comes behind that look."""
        started = ctl[w.STARTED] > ctl[w.RETURNED]
        return ctl[w.BEGUN] >= launches and (started or ctl[w.BEGUN] == ctl[w.FINISHED])

    def freeze(self) -> None:
        """No launch runs any more, of any rank. Raises `TimeoutError`."""
        for device in self.devices:
            device.ctl[w.OPEN] = 0
        deadline = time.monotonic() + self.deadline
        for device in self.devices:
            while device.ctl[w.BEGUN] != device.ctl[w.FINISHED]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a launch did not end within {self.deadline:g} s of the abort word")

    def launch(
        self, me: int, flat: Any, dtype: str, op: str = "sum", sms: int | None = None, compression: str = "input"
    ) -> KernelOperation:
        """An all-reduce of `flat`, one-dimensional on the device, queued behind the caller's current stream."""
        device: Device = self.devices[me]
        operation = KernelOperation(flat, dtype, op, self.layout.chunk, compression=compression)
        chunks = len(operation.finals)
        programs = device.programs(flat.nbytes, min(chunks, self.layout.lanes), sms)
        asked = variant(operation, device.address(flat), self.layout, self.view(me))
        device.follow()
        device.launch(KernelLaunch(flat, operation.count, operation.call, 0, chunks, None, programs, asked))
        return operation

    def collective(
        self, me: int, call: CollectiveCall, array: Any, source: Any, dtype: str, count: int, size: int,
        sms: int | None = None,
    ) -> CollectiveOperation:  # fmt: skip
        """Another one, from `source` into `array`, both flat: `count` elements of `size` bytes of each rank."""
        device: Device = self.devices[me]
        addresses = device.address(array), device.address(source)
        op = CollectiveOperation(call, array, source, dtype, count, size, self.layout.chunk, addresses)
        rows = len(op.finals)
        table = device.words(op.pieces) if op.pieces else None
        programs = device.programs(op.nbytes, min(rows, self.layout.lanes), sms)
        asked = collective_variant(op, self.layout, self.view(me))
        device.follow()
        launch = KernelLaunch(array, op.elements, op.compared, 0, rows, None, programs, asked, source, op.who, table)
        device.launch(launch)
        return op

    def settle(self) -> None:
        """All that was launched has ended. Raises `TimeoutError`, with how each rank stands."""
        for device in self.devices:
            if not device.settle(self.deadline):
                stand = [(int(d.ctl[w.STARTED]), int(d.ctl[w.RETURNED]), int(d.ctl[w.STATUS])) for d in self.devices]
                late = f"an op did not end within {self.deadline:g} s"
                raise TimeoutError(f"{late}; (STARTED, RETURNED, STATUS) are {stand}")

    def close(self) -> None:
        """Whatever runs or waits ends."""
        for device in self.devices:
            device.ctl[w.OPEN] = w.CLOSED & (1 << 64) - 1
            device.ctl[w.HEARD] = 1 << 62
        for device, segment in zip(self.devices, self.segments, strict=True):
            device.settle(10.0)
            device.close()
            segment.close()
