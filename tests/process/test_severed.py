"""A connection for data is reset in the middle of an op, between two that live: nobody is removed, no step is lost, and
all results are equal."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm

from .bodies import PAUSE, reduce_forever, seen
from .job import STALL, Body, Job, Notes
from .test_faults import BIG, _members, finish
from .test_fencing import go_on
from .test_kills import ENDLESS

pytestmark = pytest.mark.protocol

ALL = (0, 1, 2)
TIMES = 3
_REPAIR = 19  # TCP_REPAIR: what ends then ends without a message to the other side
_LIBC = ctypes.CDLL(None, use_errno=True)


def reset(fd: int, *, silently: bool = False) -> None:
    """The kernel gives the connection up, as if an RST had come: its owner is told, and the other side by an RST."""
    duplicate = socket.socket(fileno=os.dup(fd))
    with duplicate:
        if silently:
            duplicate.setsockopt(socket.IPPROTO_TCP, _REPAIR, 1)
        nowhere = (ctypes.c_char * 16)()  # AF_UNSPEC
        if _LIBC.connect(duplicate.fileno(), nowhere, len(nowhere)) != 0:
            raise OSError(ctypes.get_errno(), "the connection cannot be reset")
        if silently:
            duplicate.setsockopt(socket.IPPROTO_TCP, _REPAIR, 0)


def sever_where_told(replica: int, exchange: Any, arguments: dict[str, Any]) -> None:
    """In a thread. When the file sever-NUMBER-ME-OTHER-END is there, the connection by which this replica reads
    the other one (END: reads), or is read by it (tells; silent: and it hears nothing), is reset as soon as an op runs.
    """
    core = exchange.core

    def sever(mark: Path) -> None:
        _, _, _, other, end = mark.name.split("-")
        while not core.member.inflight.ops:
            time.sleep(0.0001)
        if end == "reads":
            ends = [core.member.peers[int(other)]]
        else:
            ends = [reader for reader in core.stream.publisher._readers if reader.replica == int(other)]
        for one in ends:
            reset(one._sock.fileno(), silently=end == "silent")
        mark.unlink()

    def watch() -> None:
        while True:
            for mark in Path(arguments["marks"]).glob(f"sever-?-{replica}-?-*"):
                sever(mark)
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()


def reduce_and_sever(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    sever_where_told(group.replica, group.internals.exchange, arguments)
    reduce_forever(group, notes, arguments)


def reduce_in_a_subgroup_and_sever(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """As torch's world is a subgroup where replicas have several ranks."""
    world = group.subgroup("world", ALL)
    sever_where_told(group.replica, world._exchange, arguments)
    array = np.empty(arguments["elements"], np.float32)
    for step in ftcomm.steps(arguments["steps"]):
        array[:] = 2.0**group.replica
        time.sleep(PAUSE)
        world.allreduce(array)
        spans, crc = seen(array), zlib.crc32(array.view(np.uint8).data)
        notes.write(kind="step", step=step, crc=crc, spans=spans, whole=True, epoch=group.epoch)


def can_end_silently() -> bool:
    with socket.socket() as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, _REPAIR, 1)
        except PermissionError:
            return False
        return True


def mended(events: list[dict[str, Any]]) -> int:
    return sum(event["kind"] == "view" and "are made again" in event["why"] for event in events)


def resets(folder: Path, body: Body, end: str, times: int, **how: Any) -> None:
    """A job of three, in which connections are reset so many times."""
    pairs = itertools.cycle(zip(ALL, ALL[1:] + ALL[:1], strict=True))  # each reads, and is read
    with Job(folder, replicas=3, body=body, **how) as running:
        running.wait_contributing(set(ALL))
        go_on(running, 3, ALL)
        for number, (me, other) in zip(range(times), pairs, strict=False):
            (folder / f"sever-{number}-{me}-{other}-{end}").touch()
            running.wait_event("view of the same", lambda events, n=number: mended(events) > n)  # type: ignore[misc]
            go_on(running, 3, ALL)
        assert not [event for event in running.events if event["kind"] in ("removed", "failed")]
        views = [_members(event) for event in running.events if event["kind"] == "view"]
        assert all(view == [*ALL] for view in views), views
        finish(running, set(ALL))


@pytest.mark.parametrize(
    ("transport", "end", "settings"),
    [
        ("tcp", "reads", {}),
        pytest.param("tcp", "tells", {}, marks=pytest.mark.sweep),
        ("tcp", "silent", {}),
        ("tcp", "tells", {"data": "mac"}),
        ("tcp", "reads", {"algorithm": "ring"}),
        ("nixl", "reads", {}),
    ],
)
def test_a_reset_costs_no_replica_and_no_step(
    tmp_path: Path, transport: str, end: str, settings: dict[str, Any]
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")
    if end == "silent" and not can_end_silently():
        pytest.skip("TCP_REPAIR takes CAP_NET_ADMIN")
    elements = BIG if transport == "tcp" else 300_001
    how = dict(transport=transport, elements=elements, steps=ENDLESS, **settings)
    resets(tmp_path, reduce_and_sever, end, TIMES, **how)


@pytest.mark.parametrize("end", [*(pytest.param(end, marks=pytest.mark.sweep) for end in ("reads", "tells")), "silent"])
def test_nor_does_one_in_a_subgroup(tmp_path: Path, end: str) -> None:
    """It is said as soon as the op counts as a stall."""
    if end == "silent" and not can_end_silently():
        pytest.skip("TCP_REPAIR takes CAP_NET_ADMIN")
    how = dict(transport="tcp", elements=BIG, steps=ENDLESS, **STALL)
    resets(tmp_path, reduce_in_a_subgroup_and_sever, end, 2, **how)
