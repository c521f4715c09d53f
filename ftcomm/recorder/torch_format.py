"""Recordings in the format of torch's flight recorder, for its own analyser (`torchfrtrace`).

A rank of that format is a rank of the whole job: replica * ranks of a replica + rank in it. A process group of it is
one group of ftcomm, with the ranks of its newest view of which there is a recording. The analyser compares entries by
their number in the group, so all ranks begin with the same ones here: older ones, which a rank has overwritten or a
joiner has not seen, are left out. It knows only torch's own backends by name. So entries say gloo, and the description
of their group says that they are of ftcomm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ftcomm.recorder.reader import RecordedOp, Recording, numbers

VERSION = "2.10"
MOST = 2000  # entries of a rank; torch keeps as many
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}  # others are called alike
_NS = 1e9
_Key = tuple[str, int]  # a group: its name, and the rank in the replica, as those of all replicas make one


def rank_of(recording: Recording) -> int:
    """Returns the number of a rank in its job."""
    return recording.replica * max(1, recording.ranks_per_replica) + recording.shard


def newest(recordings: Iterable[Recording]) -> dict[int, Recording]:
    """Returns the newest life of each rank."""
    found: dict[int, Recording] = {}
    for recording in sorted(recordings, key=lambda r: r.began + r.wall_offset):
        found[rank_of(recording)] = recording
    return dict(sorted(found.items()))


def torch_dumps(recordings: Iterable[Recording]) -> dict[int, dict[str, Any]]:
    """Returns rank -> what torch's flight recorder would have dumped there."""
    ranks = newest(recordings)
    members = _members(ranks)
    ops = {rank: [op for op in r.ops if rank in members.get((op.group, r.shard), ())] for rank, r in ranks.items()}
    first, last = _first(ranks, ops), _last(ranks, ops)
    return {rank: _dump(rank, r, ops[rank], members, first, last) for rank, r in ranks.items()}


def _members(ranks: Mapping[int, Recording]) -> dict[_Key, tuple[int, ...]]:
    """Returns the ranks of each group, by its newest view, of which there are recordings."""
    found: dict[_Key, tuple[int, tuple[int, ...]]] = {}
    for rank, recording in ranks.items():
        width, epochs = max(1, recording.ranks_per_replica), dict[str, int]()
        for op in recording.ops:
            epochs[op.group] = max(op.last_epoch, epochs.get(op.group, 0))
        for group in recording.groups:
            if group.closed is not None or group.kind == "static":
                continue
            key = group.name, recording.shard
            epoch = epochs.get(group.name, 0)
            told = tuple(replica * width + recording.shard for replica in sorted(numbers(group.members)))
            if rank in told and epoch >= found.get(key, (0, ()))[0]:
                found[key] = epoch, tuple(other for other in told if other in ranks)
    return {key: told for key, (_, told) in found.items()}


def _first(ranks: Mapping[int, Recording], ops: Mapping[int, Sequence[RecordedOp]]) -> dict[_Key, int]:
    """Returns the first op of each group that all its ranks may have."""
    first: dict[_Key, int] = defaultdict(int)
    for rank, recording in ranks.items():
        oldest: dict[str, int] = {}
        for op in ops[rank][-MOST:]:
            oldest[op.group] = min(op.number, oldest.get(op.group, op.number))
        for group, number in oldest.items():
            key = group, recording.shard
            first[key] = max(first[key], number)
    return first


def _last(ranks: Mapping[int, Recording], ops: Mapping[int, Sequence[RecordedOp]]) -> dict[_Key, int]:
    """Returns the last op of each group that is compared, where that is not the newest one. Recordings are read one
    after the other while the job goes on: what one rank has returned from, all have called, though another recording
    ends before it. What comes after the end of that is not known of its rank."""
    newest: dict[_Key, list[int]] = defaultdict(list)
    returned: dict[_Key, int] = {}
    for rank, recording in ranks.items():
        mine: dict[_Key, int] = {}
        for op in ops[rank]:
            key = op.group, recording.shard
            mine[key] = max(op.number, mine.get(key, -1))
            if op.returned is not None and not op.failed:
                returned[key] = max(op.number, returned.get(key, -1))
        for key, number in mine.items():
            newest[key].append(number)
    return {key: min(found) for key, found in newest.items() if returned.get(key, -1) > min(found)}


def _dump(
    rank: int,
    recording: Recording,
    ops: Sequence[RecordedOp],
    members: Mapping[_Key, tuple[int, ...]],
    first: Mapping[_Key, int],
    last: Mapping[_Key, int],
) -> dict[str, Any]:
    shard = recording.shard
    kept = [op for op in ops[-MOST:] if first[op.group, shard] <= op.number <= last.get((op.group, shard), op.number)]
    groups = {name: told for (name, column), told in members.items() if column == shard and rank in told}
    config, status = {}, {}
    for name, told in groups.items():
        mine = [op for op in kept if op.group == name]
        config[_pg(name, shard)] = {"name": _pg(name, shard), "desc": _about(name, shard), "ranks": str(list(told))}
        status[_pg(name, shard)] = {
            "last_enqueued_collective": max((op.number + 1 for op in mine), default=-1),
            "last_started_collective": max((op.number + 1 for op in mine if op.posted or op.returned), default=-1),
            "last_completed_collective": max((op.number + 1 for op in mine if op.returned), default=-1),
        }
    return {
        "version": VERSION,
        "rank": rank,
        "pg_config": config,
        "pg_status": status,
        "entries": [_entry(record, op, recording, len(groups[op.group])) for record, op in enumerate(kept)],
    }


def _pg(name: str, shard: int) -> str:
    return f"{name}.{shard}"


def _about(name: str, shard: int) -> str:
    return f"ftcomm {'all replicas' if name == '*' else name}, rank {shard} of each"


def _entry(record: int, op: RecordedOp, recording: Recording, size: int) -> dict[str, Any]:
    given, taken = _sizes(op, size)
    file, _, rest = op.caller.rpartition(":")
    line, _, function = rest.partition(" ")
    begun = op.called if op.posted is None else op.posted
    ended = None if op.returned is None else _wall(op.returned, recording)
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": (_pg(op.group, recording.shard), _about(op.group, recording.shard)),
        "collective_seq_id": op.number + 1,
        "p2p_seq_id": 0,
        "op_id": record + 1,
        "profiling_name": f"gloo:{_NAMES.get(op.kind, op.kind)}",
        "is_p2p": False,
        "input_sizes": [given],
        "input_dtypes": [op.dtype],
        "output_sizes": [taken],
        "output_dtypes": [op.dtype],
        "state": "started" if op.returned is None else "completed",
        "time_created_ns": _wall(op.called, recording),
        "time_discovered_started_ns": _wall(begun, recording),
        "time_discovered_completed_ns": ended,
        "duration_ms": None if op.returned is None else (op.returned - begun) * 1e3,
        "retired": op.returned is not None,
        "timeout_ms": 0,
        "frames": [{"name": function, "filename": file, "line": int(line)}] if line.isdecimal() else [],
    }


def _wall(seconds: float, recording: Recording) -> int:
    return round((seconds + recording.wall_offset) * _NS)


def _sizes(op: RecordedOp, size: int) -> tuple[list[int], list[int]]:
    """Returns the elements that go in and come out, as torch counts them; `elements` are those of one part."""
    count = op.elements
    if op.kind in ("allgather", "gather"):
        return [count], [count * size]
    if op.kind in ("reduce_scatter", "scatter"):
        return [count * size], [count]
    return [count], [count]
