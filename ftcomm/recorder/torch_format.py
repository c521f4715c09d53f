"""Recordings in the format of torch's flight recorder, for its own analyser (`torchfrtrace`).

A rank of that format is a rank of the whole job: replica * ranks of a replica + rank in it. A process group of it is
one group of ftcomm, with the ranks of its newest view of which there is a recording. A rank that has left it has what
it did there in a process group of its own. The analyser compares entries by their number in the group, so all ranks
begin with the same ones here: older ones, which a rank has overwritten or a joiner has not seen, are left out. It knows
only torch's own backends by name. So entries say gloo, and the description of their group says that they are of ftcomm.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class _ProcessGroup:
    name: str
    about: str
    ranks: tuple[int, ...]


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
    groups = _process_groups(ranks)
    ops = {rank: [op for op in r.ops if op.group in groups[rank]] for rank, r in ranks.items()}
    first, last = _first(groups, ops), _last(groups, ops)
    return {rank: _dump(rank, r, ops[rank], groups[rank], first, last) for rank, r in ranks.items()}


def _process_groups(ranks: Mapping[int, Recording]) -> dict[int, dict[str, _ProcessGroup]]:
    """Returns rank -> name of a group of ftcomm -> the process group that it is there."""
    views: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}  # (name, rank in the replica) -> newest epoch, ranks
    opened: dict[int, list[str]] = {}
    for rank, recording in ranks.items():
        width, epochs = max(1, recording.ranks_per_replica), dict[str, int]()
        for op in recording.ops:
            epochs[op.group] = max(op.last_epoch, epochs.get(op.group, 0))
        groups = [group for group in recording.groups if group.closed is None and group.kind != "static"]
        opened[rank] = [group.name for group in groups]
        for group in groups:
            key = group.name, recording.shard
            epoch = epochs.get(group.name, 0)
            told = tuple(replica * width + recording.shard for replica in sorted(numbers(group.members)))
            if rank in told and epoch >= views.get(key, (0, ()))[0]:
                views[key] = epoch, tuple(other for other in told if other in ranks)
    return {
        rank: {
            name: _process_group(name, recording.shard, rank, views[name, recording.shard][1])
            for name in opened[rank]
            if (name, recording.shard) in views
        }
        for rank, recording in ranks.items()
    }


def _process_group(name: str, shard: int, rank: int, told: tuple[int, ...]) -> _ProcessGroup:
    about = f"ftcomm {'all replicas' if name == '*' else name}, shard {shard} of each"
    if rank in told:
        return _ProcessGroup(f"{name}.{shard}", about, told)
    left = f"until rank {rank} left"
    return _ProcessGroup(f"{name}.{shard} {left}", f"{about}, {left}", (rank,))


_Groups = Mapping[int, Mapping[str, _ProcessGroup]]
_Ops = Mapping[int, Sequence[RecordedOp]]


def _first(groups: _Groups, ops: _Ops) -> dict[str, int]:
    """Returns the first op of each process group that all its ranks may have."""
    first: dict[str, int] = defaultdict(int)
    for rank, of in groups.items():
        oldest: dict[str, int] = {}
        for op in ops[rank][-MOST:]:
            oldest[op.group] = min(op.number, oldest.get(op.group, op.number))
        for group, number in oldest.items():
            first[of[group].name] = max(first[of[group].name], number)
    return first


def _last(groups: _Groups, ops: _Ops) -> dict[str, int]:
    """Returns the last op of each process group that is compared, where that is not the newest one. Recordings are read
    one after the other while the job goes on: what one rank has returned from, all have called, though another
    recording ends before it. What comes after the end of that is not known of its rank."""
    newest: dict[str, list[int]] = defaultdict(list)
    returned: dict[str, int] = {}
    for rank, of in groups.items():
        mine: dict[str, int] = {}
        for op in ops[rank]:
            name = of[op.group].name
            mine[name] = max(op.number, mine.get(name, -1))
            if op.returned is not None and not op.failed:
                returned[name] = max(op.number, returned.get(name, -1))
        for name, number in mine.items():
            newest[name].append(number)
    return {name: min(found) for name, found in newest.items() if returned.get(name, -1) > min(found)}


def _dump(
    rank: int,
    recording: Recording,
    ops: Sequence[RecordedOp],
    groups: Mapping[str, _ProcessGroup],
    first: Mapping[str, int],
    last: Mapping[str, int],
) -> dict[str, Any]:
    kept = [
        op
        for op in ops[-MOST:]
        if first[groups[op.group].name] <= op.number <= last.get(groups[op.group].name, op.number)
    ]
    config, status = {}, {}
    for name, group in groups.items():
        mine = [op for op in kept if op.group == name]
        config[group.name] = {"name": group.name, "desc": group.about, "ranks": str(list(group.ranks))}
        status[group.name] = {
            "last_enqueued_collective": max((op.number + 1 for op in mine), default=-1),
            "last_started_collective": max((op.number + 1 for op in mine if op.posted or op.returned), default=-1),
            "last_completed_collective": max((op.number + 1 for op in mine if op.returned), default=-1),
        }
    return {
        "version": VERSION,
        "rank": rank,
        "pg_config": config,
        "pg_status": status,
        "entries": [_entry(record, op, recording, groups[op.group]) for record, op in enumerate(kept)],
    }


def _entry(record: int, op: RecordedOp, recording: Recording, group: _ProcessGroup) -> dict[str, Any]:
    given, taken = _sizes(op, len(group.ranks))
    file, _, rest = op.caller.rpartition(":")
    line, _, function = rest.partition(" ")
    begun = op.called if op.posted is None else op.posted
    ended = None if op.returned is None else _wall(op.returned, recording)
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": (group.name, group.about),
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
