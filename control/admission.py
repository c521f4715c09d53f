"""What a replica must have in common with its job. Pure."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.wire import MAX_MESSAGE

REST = 1024  # bytes of a replica in a view beside its addresses, and its share of all else


class Room(NamedTuple):
    """What a view has to fit in."""

    most: int  # bytes, encoded as for a message
    what: str  # has them
    mend: str = ""


MESSAGE = Room(MAX_MESSAGE, "a message")


def too_large(join: m.Join, replicas: int, room: Room = MESSAGE) -> str:
    """Why a view of so many replicas like this one cannot be sent or stored, and the mend; empty if it can."""
    each = len(msgspec.msgpack.encode(join.ranks)) + REST
    if each * replicas <= room.most:
        return ""
    return (
        f"a view of {replicas} replicas with {len(join.ranks)} ranks takes {each * replicas} bytes, {each} for the "
        f"addresses of replica {join.replica}, and {room.what} has at most {room.most}; start fewer ranks "
        f"({room.most // each} such replicas are possible), or give hosts, racks and tuning files shorter names"
        f"{room.mend}"
    )


def other_job(join: m.Join, ranks: int, timeouts: Timeouts) -> str:
    """Why `join` is not of a job with `ranks` ranks a replica and these timeouts, and the mend; empty if it is."""
    if len(join.ranks) != ranks:
        return (
            f"replica {join.replica} has {len(join.ranks)} ranks, the job has {ranks} a replica; start all with the "
            "same FTCOMM_RANKS_PER_REPLICA"
        )
    if join.timeouts != dataclasses.astuple(timeouts):
        said = "heartbeat {:g} s, op {:g} to {:g} s"
        return (
            f"replica {join.replica} has other timeouts ({said.format(*join.timeouts)}) than the coordinator "
            f"({said.format(*dataclasses.astuple(timeouts))}); start all of the job with the same "
            "FTCOMM_HEARTBEAT_TIMEOUT, FTCOMM_OP_TIMEOUT_FLOOR and FTCOMM_OP_TIMEOUT"
        )
    return ""
