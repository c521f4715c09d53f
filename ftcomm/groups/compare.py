"""Finds out whether all replicas hold the same state: `ftcomm.verify`.

Every leaf of the state (a tensor, a number, a name) is hashed where it lies. One small all-reduce of a matrix with a
row for each replica gives all hashes to all: a member fills its own row and leaves the others zero. The input of a
replica that catches up does not count, so its row stays zero and is not compared. Only if the hashes differ, a second
all-reduce, with a column for each leaf, finds out where.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from ftcomm.arrays import is_torch
from ftcomm.arrays.dtensor import local
from ftcomm.collective.checksum import judge, named
from ftcomm.errors import DivergenceError, StateError

_NAMED = 3  # how many leaves an error names
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Comparing(Protocol):
    """A group, in so far as states are compared through it."""

    replica: int
    replicas: int
    shard: int

    def allreduce(self, x: Any, *, atomic: bool) -> Any: ...


def compare(state: Any, group: Comparing) -> str:
    """Compare the state, as `Group.verify` says."""
    entries = hashes(state)
    whole = hashlib.blake2b(
        b"".join(value.to_bytes(8, "little") for value in entries.values()), digest_size=16
    ).digest()
    # The number of entries tells different models apart before the second op.
    rows = exchange(group, [len(entries) + 1, *np.frombuffer(whole, np.int64)])
    wrong, right = judge({replica: int.from_bytes(row.tobytes(), "little") for replica, row in rows.items()})
    if not wrong:
        return str(next(iter(rows.values()))[1:].tobytes().hex())  # also where this replica catches up
    counts = {replica: int(row[0]) - 1 for replica, row in rows.items()}
    if len(set(counts.values())) > 1:
        where = "they have different numbers of entries: " + ", ".join(f"{c} on replica {r}" for r, c in counts.items())
    else:
        where = differing(entries, exchange(group, list(entries.values())))
    who = f"the state of {named(wrong)}, shard {group.shard}, "
    who += f"differs from that of {named(right)}" if right else "differs, and none has a majority"
    raise DivergenceError(f"{who}: {where}. Restart those that are wrong, or all from a checkpoint.")


def hashes(state: Any) -> dict[str, int]:
    """Returns the hash of each leaf, never 0, by its path. Raises `StateError` for anything that is not a state."""
    found: dict[str, int] = {}
    for path, meta, data in _leaves(state, ""):
        hasher = hashlib.blake2b(f"{path} {meta} ".encode(), digest_size=8)
        hasher.update(data)
        found[path] = int.from_bytes(hasher.digest(), "little") >> 1 | 1 << 62  # fits an int64
    return dict(sorted(found.items()))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yields (path, dtype and shape, bytes) of all that is in `value`."""
    if callable(getattr(value, "state_dict", None)):
        yield from _leaves(value.state_dict(), path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}[{place}]")
    elif is_torch(value):
        import torch

        part = local(value)  # the own part of a tensor that is spread over a replica
        flat = part.cpu().contiguous().reshape(-1)
        yield path, f"{part.dtype} {tuple(part.shape)}", flat.view(torch.uint8).numpy().data
    elif isinstance(value, _PLAIN):
        yield path, type(value).__name__, repr(value).encode()
    elif hasattr(value, "__array__"):
        array = np.ascontiguousarray(value)
        yield path, f"{array.dtype} {array.shape}", array.reshape(-1).view(np.uint8).data
    else:
        raise StateError(
            f"cannot compare {path or 'a state'} of type {type(value).__name__}; pass modules, optimizers, arrays, or "
            "dicts and lists of them."
        )


def exchange(group: Comparing, mine: list[Any]) -> dict[int, np.ndarray[Any, Any]]:
    """Returns the rows of all contributing replicas."""
    matrix = np.zeros((max(group.replicas, group.replica + 1), len(mine)), np.int64)
    matrix[group.replica] = mine
    group.allreduce(matrix, atomic=True)  # atomic: a row is there completely or not at all
    return {replica: row for replica, row in enumerate(matrix) if row.any()}


def differing(entries: Mapping[str, int], rows: Mapping[int, np.ndarray[Any, Any]]) -> str:
    """Name the first of the `entries` whose hashes differ between `rows`, and say how many do."""
    values = np.stack(list(rows.values()))
    paths = [path for path, differs in zip(entries, (values != values[0]).any(axis=0), strict=True) if differs]
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{len(paths)} of {len(entries)} entries, {', '.join(paths[:_NAMED])}{more}"
