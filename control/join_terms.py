"""Checks what a replica must have in common with its job. Pure."""

from __future__ import annotations

import dataclasses

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.wire import MAX_MESSAGE

REST = 1024  # bytes of a replica in a view besides its addresses


def too_large(join: m.Join, replicas: int) -> str:
    """Returns why a view of so many such replicas cannot be sent, and the mend; empty if it can."""
    each = len(msgspec.msgpack.encode(join.ranks)) + REST
    if each * replicas <= MAX_MESSAGE:
        return ""
    return (
        f"a view of {replicas} replicas with {len(join.ranks)} ranks takes {each * replicas} bytes, {each} for the "
        f"addresses of replica {join.replica}, and a message has at most {MAX_MESSAGE}; start fewer ranks "
        f"({MAX_MESSAGE // each} such replicas are possible), or give hosts, racks and tuning files shorter names"
    )


def other_job(join: m.Join, replicas: int, ranks: int, timeouts: Timeouts) -> str:
    """Returns why `join` does not belong to a job of so many replicas, ranks a replica and these timeouts, and the
    mend; empty if it does."""
    if join.replica >= replicas:
        return (
            f"there is no replica {join.replica} in a job of {replicas}, which are numbered from 0 to {replicas - 1}; "
            "set FTCOMM_REPLICA to one of them, and FTCOMM_REPLICAS to the same at all of the job"
        )
    if join.replicas not in (0, replicas):
        return (
            f"a rank of replica {join.replica} was started with FTCOMM_REPLICAS={join.replicas}, and the job has "
            f"{replicas} replicas; set the same FTCOMM_REPLICAS at all of the job"
        )
    if len(join.ranks) != ranks:
        return (
            f"replica {join.replica} has {len(join.ranks)} ranks, the job has {ranks} a replica; start all with the "
            "same FTCOMM_RANKS_PER_REPLICA"
        )
    if join.ranks.first != 0:
        return f"the addresses of replica {join.replica} begin with shard {join.ranks.first}, and its shards with 0"
    if join.timeouts != dataclasses.astuple(timeouts):
        said = "heartbeat {:g} s, op {:g} to {:g} s"
        return (
            f"replica {join.replica} has other timeouts ({said.format(*join.timeouts)}) than the coordinator "
            f"({said.format(*dataclasses.astuple(timeouts))}); start all of the job with the same "
            "FTCOMM_HEARTBEAT_TIMEOUT, FTCOMM_OP_TIMEOUT_FLOOR and FTCOMM_OP_TIMEOUT"
        )
    return ""
