"""What the ranks run: all-reduces, and every few steps all that needs data of one member alone."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np

import ftcomm
from ftcomm.bench import bandwidth
from tests.process.bodies import PAUSE, Pace, seen
from tests.process.job import Notes

EVERY = 4  # steps


def mixed(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """An all-reduce a step, of which each tells who is in it, and in every fourth the other collectives and a message
    to the next rank. What came of them is written down: equal on all that took part, or an error that is."""
    array = np.empty(arguments["elements"], arguments.get("dtype", "float32"))
    for step in ftcomm.steps(arguments["steps"]):
        reduce(group, notes, step, array)
        if step % EVERY == 0:
            for call in (broadcast, gather_all, exchange_all):
                try:
                    result = str(call(group, step))
                except ftcomm.LostError as error:
                    result = f"LostError: {error}"
                notes.write(kind="call", step=step, call=call.__name__, result=result)
            try:
                pass_on(group, step)
            except ftcomm.LostError as error:
                notes.write(kind="message", step=step, text=str(error))


def columns(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """All-reduces of the ranks of each column, which stay about in step with those of the others."""
    array = np.empty(arguments["elements"], np.float32)
    pace = Pace(group, arguments)
    for step in ftcomm.steps(arguments["steps"]):
        pace.keep(step)
        reduce(group, notes, step, array)


def reduce(group: ftcomm.Group, notes: Notes, step: int, array: np.ndarray) -> None:
    array[:] = 2.0**group.replica
    time.sleep(PAUSE)
    begun = time.monotonic()
    group.allreduce(array)
    seconds = time.monotonic() - begun
    spans = seen(array)
    notes.write(
        kind="step",
        step=step,
        crc=zlib.crc32(array.view(np.uint8).data),
        spans=[list(span) for span in spans],
        whole=spans[0][0] == 0 and spans[-1][1] == array.size,
        epoch=group.epoch,
        at=begun,
        seconds=seconds,
    )


def around(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """All-reduces that go around a ring; after the first, before the step loop sends small ones, who is connected."""
    array = np.zeros(arguments["elements"], np.float32)
    group.allreduce(array)
    peers = group.internals.exchange.member.peers.values()
    notes.write(kind="open", to=[peer.replica for peer in peers if peer.is_open])
    for step in ftcomm.steps(arguments["steps"]):
        reduce(group, notes, step, array)


def tell_bandwidth(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    links = bandwidth.measure(group, nbytes=arguments["nbytes"])
    assert links is not None
    notes.write(kind="links", order=[host.member for host in links.order()], said=str(links))


def own(group: ftcomm.Group, step: int, count: int) -> np.ndarray:
    return np.full(count, 1000 * step + group.replica, np.int64)


def broadcast(group: ftcomm.Group, step: int) -> int:
    x = own(group, step, 30_001)
    group.broadcast(x, step // EVERY % len(group.roster))
    return zlib.crc32(x.data)


def gather_all(group: ftcomm.Group, step: int) -> int:
    x = own(group, step, 5_003)
    out = np.empty(x.size * len(group.roster), x.dtype)
    group.allgather(out, x)
    return zlib.crc32(out.data)


def exchange_all(group: ftcomm.Group, step: int) -> str:
    """Each has its own result, so what it must be is compared here."""
    x = own(group, step, 1_001 * len(group.roster))
    out = np.empty_like(x)
    group.alltoall(out, x)
    if not (out == np.repeat([1000 * step + replica for replica in group.roster], 1_001)).all():
        raise AssertionError(f"step {step}: wrong data of alltoall")
    return "fine"


def pass_on(group: ftcomm.Group, step: int) -> None:
    """A large message to the next rank, which asks for it, and a small one, which is sent ahead."""
    count, me = len(group.roster), group.roster.index(group.replica)
    if count < 2:
        return
    before, after = (me - 1) % count, (me + 1) % count
    sizes = (40_009, 11)
    arrays = [np.empty(size, np.int64) for size in sizes]
    under_way = [group.send(own(group, step, size), after, tag=size, async_op=True) for size in sizes]
    under_way += [group.recv(x, before, tag=x.size, async_op=True) for x in arrays]
    lost = [error for each in under_way if (error := _ended(each)) is not None]
    if lost:  # those to and from others have ended all the same: nobody waits for what is never sent
        raise lost[0]
    if not all((x == 1000 * step + group.roster[before]).all() for x in arrays):
        raise AssertionError(f"step {step}: wrong data in a message from {group.roster[before]}")


def _ended(message: Any) -> ftcomm.LostError | None:
    try:
        message.wait()
    except ftcomm.LostError as error:
        return error
    return None
